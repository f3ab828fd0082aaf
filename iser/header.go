package iser

import (
	"encoding/binary"
	"fmt"
)

// Sizes in bytes.
const (
	HeaderSize  = 28 // iSER header (RFC 7145 section 9.2)
	bhsSize     = 48 // basic header segment (RFC 7143 section 11.2.1)
	headersSize = HeaderSize + bhsSize
)

// Opcode and flag bits of the first byte.
const (
	opcodeMask    = 0xf0
	opcodeControl = 0x10 // iSCSI control-type PDU
	flagWSV       = 0x08 // Write STag valid
	flagRSV       = 0x04 // Read STag valid
)

// Header is the iSER header of an iSCSI control-type PDU: 28 bytes, big endian (RFC 7145 section 9.2).
//
//	off len
//	  0   1  opcode (high nibble, 1 = control-type PDU), WSV 0x08, RSV 0x04
//	  1   3  reserved
//	  4   4  Write STag: of the memory that the target reads (SCSI Write)
//	  8   8  Write Base Offset
//	 16   4  Read STag: of the memory that the target writes (SCSI Read)
//	 20   8  Read Base Offset
type Header []byte

// EncodeControl makes h the header of a PDU that advertises no memory.
func (h Header) EncodeControl() {
	clear(h[:HeaderSize])
	h[0] = opcodeControl
}

// SetRead advertises the memory that the target writes by RDMA Write.
func (h Header) SetRead(stag uint32, offset uint64) {
	h[0] |= flagRSV
	binary.BigEndian.PutUint32(h[16:], stag)
	binary.BigEndian.PutUint64(h[20:], offset)
}

// SetWrite advertises the memory that the target reads by RDMA Read.
func (h Header) SetWrite(stag uint32, offset uint64) {
	h[0] |= flagWSV
	binary.BigEndian.PutUint32(h[4:], stag)
	binary.BigEndian.PutUint64(h[8:], offset)
}

// Read returns the advertised Read STag and base offset; ok is the RSV flag.
func (h Header) Read() (stag uint32, offset uint64, ok bool) {
	return binary.BigEndian.Uint32(h[16:]), binary.BigEndian.Uint64(h[20:]), h[0]&flagRSV != 0
}

// Write returns the advertised Write STag and base offset; ok is the WSV flag.
func (h Header) Write() (stag uint32, offset uint64, ok bool) {
	return binary.BigEndian.Uint32(h[4:]), binary.BigEndian.Uint64(h[8:]), h[0]&flagWSV != 0
}

// CheckMessage tells whether b is a whole iSER message with a control-type PDU: header, BHS and the data segment that the BHS announces.
// It returns the length of the data segment in bytes, padding excluded. Targets differ in whether they send the padding (isert does,
// tgt does not), so both are accepted.
func CheckMessage(b []byte) (dataLen int, err error) {
	if len(b) < headersSize {
		return 0, fmt.Errorf("message of %d bytes is shorter than the %d bytes of its headers", len(b), headersSize)
	}
	if op := b[0] & opcodeMask; op != opcodeControl {
		return 0, fmt.Errorf("iSER opcode %#x is not that of a control-type PDU", op>>4)
	}
	bhs := b[HeaderSize:]
	ahs := int(bhs[4]) * 4
	if ahs != 0 {
		return 0, fmt.Errorf("PDU has %d bytes of additional header, which no target PDU has", ahs)
	}
	dataLen = int(bhs[5])<<16 | int(bhs[6])<<8 | int(bhs[7])
	have := len(b) - headersSize
	if have < dataLen || have > dataLen+3 {
		return 0, fmt.Errorf("PDU announces %d bytes of data and carries %d", dataLen, have)
	}
	return dataLen, nil
}
