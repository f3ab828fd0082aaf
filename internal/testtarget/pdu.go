package testtarget

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
)

// Opcodes, RFC 7143 section 11.2.1.2, without the immediate bit.
const (
	opNOPOut       = 0x00
	opSCSICommand  = 0x01
	opTaskMgmt     = 0x02
	opLogin        = 0x03
	opText         = 0x04
	opDataOut      = 0x05
	opLogout       = 0x06
	opNOPIn        = 0x20
	opSCSIResponse = 0x21
	opTaskMgmtResp = 0x22
	opLoginResp    = 0x23
	opTextResp     = 0x24
	opDataIn       = 0x25
	opLogoutResp   = 0x26
	opR2T          = 0x31
	opReject       = 0x3f
)

const (
	bhsSize = 48
	noTag   = 0xffffffff
	final   = 0x80 // F bit, or T bit of login
)

// Offsets into the basic header segment that several PDUs share (RFC 7143 section 11).
const (
	offFlags     = 1
	offLUN       = 8
	offITT       = 16
	offTTT       = 20
	offCmdSN     = 24 // StatSN in PDUs of the target
	offExpStatSN = 28 // ExpCmdSN in PDUs of the target
	offMaxCmdSN  = 32
	offDataSN    = 36
	offOffset    = 40
	offResidual  = 44
)

// PDU is one PDU: basic header segment and data segment without padding. DataSegmentLength is filled in when it is written, unless
// KeepLength is set: then the header is sent as it stands.
type PDU struct {
	BHS        [bhsSize]byte
	Data       []byte
	KeepLength bool
}

// Opcode returns the opcode without the immediate bit.
func (p *PDU) Opcode() byte { return p.BHS[0] & 0x3f }

// Immediate reports the immediate bit.
func (p *PDU) Immediate() bool { return p.BHS[0]&0x40 != 0 }

// U32 reads four bytes of the header, big endian.
func (p *PDU) U32(off int) uint32 { return binary.BigEndian.Uint32(p.BHS[off:]) }

// SetU32 writes four bytes of the header, big endian.
func (p *PDU) SetU32(off int, v uint32) { binary.BigEndian.PutUint32(p.BHS[off:], v) }

// ITT returns the Initiator Task Tag.
func (p *PDU) ITT() uint32 { return p.U32(offITT) }

// Clone returns a copy that shares nothing.
func (p *PDU) Clone() *PDU {
	q := *p
	q.Data = append([]byte(nil), p.Data...)
	return &q
}

func (p *PDU) String() string {
	return fmt.Sprintf("opcode %#02x flags %#02x itt %#08x, %d bytes of data", p.BHS[0], p.BHS[1], p.ITT(), len(p.Data))
}

// digests says which digests follow the segments of a PDU.
type digests struct{ header, data bool }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode returns the PDU as it goes over the wire.
func (p *PDU) encode(d digests) []byte {
	if !p.KeepLength {
		p.BHS[5], p.BHS[6], p.BHS[7] = byte(len(p.Data)>>16), byte(len(p.Data)>>8), byte(len(p.Data))
	}
	b := make([]byte, 0, bhsSize+len(p.Data)+12)
	b = append(b, p.BHS[:]...)
	if d.header {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(p.BHS[:], castagnoli))
	}
	start := len(b)
	b = append(b, p.Data...)
	for len(b)&3 != 0 {
		b = append(b, 0)
	}
	if d.data && len(p.Data) > 0 {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
	}
	return b
}

// maxDataSegment bounds what the target reads, whatever it has announced: 2^24-1 is what the field can say.
const maxDataSegment = 1<<24 - 1

// readPDU reads one PDU. Errors: those of the connection; a PDU with an additional header segment, which no initiator here has.
func readPDU(c net.Conn, d digests) (*PDU, error) {
	p := new(PDU)
	if _, err := io.ReadFull(c, p.BHS[:]); err != nil {
		return nil, err
	}
	if d.header {
		var got [4]byte
		if _, err := io.ReadFull(c, got[:]); err != nil {
			return nil, err
		}
		if binary.LittleEndian.Uint32(got[:]) != crc32.Checksum(p.BHS[:], castagnoli) {
			return nil, errors.New("header digest is wrong")
		}
	}
	if p.BHS[4] != 0 {
		return nil, fmt.Errorf("additional header segment of %d words", p.BHS[4])
	}
	n := int(p.BHS[5])<<16 | int(p.BHS[6])<<8 | int(p.BHS[7])
	if n == 0 {
		return p, nil
	}
	padded := (n + 3) &^ 3
	buf := make([]byte, padded, padded+4)
	if _, err := io.ReadFull(c, buf); err != nil {
		return nil, err
	}
	if d.data {
		var got [4]byte
		if _, err := io.ReadFull(c, got[:]); err != nil {
			return nil, err
		}
		if binary.LittleEndian.Uint32(got[:]) != crc32.Checksum(buf, castagnoli) {
			return nil, errors.New("data digest is wrong")
		}
	}
	p.Data = buf[:n]
	return p, nil
}
