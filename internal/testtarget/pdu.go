package testtarget

import (
	"encoding/binary"
	"fmt"
)

// Opcodes, RFC 7143 section 11.2.1.2, without the immediate bit.
const (
	OpNOPOut       = 0x00
	OpSCSICommand  = 0x01
	OpTaskMgmt     = 0x02
	OpLogin        = 0x03
	OpText         = 0x04
	OpDataOut      = 0x05
	OpLogout       = 0x06
	OpSNACK        = 0x10
	OpNOPIn        = 0x20
	OpSCSIResponse = 0x21
	OpTaskMgmtResp = 0x22
	OpLoginResp    = 0x23
	OpTextResp     = 0x24
	OpDataIn       = 0x25
	OpLogoutResp   = 0x26
	OpR2T          = 0x31
	OpAsync        = 0x32
	OpReject       = 0x3f
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
	offRefCmdSN  = 32 // in a Task Management Function Request
	offDataSN    = 36
	offOffset    = 40
	offResidual  = 44
)

// PDU is one PDU: header segments and data segment without padding. DataSegmentLength is filled in when it is written, unless
// KeepLength is set: then the header is sent as it stands.
type PDU struct {
	BHS        [bhsSize]byte
	AHS        []byte // additional header segments of an initiator, if any
	Data       []byte
	KeepLength bool

	// ISER is the iSER header that came with the PDU, or is to go with it; all zero means that of a control-type PDU without STags. Over
	// TCP it is ignored.
	ISER [iserHeader]byte
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

// setLength fills in DataSegmentLength.
func (p *PDU) setLength() {
	if !p.KeepLength {
		p.BHS[4] = byte(len(p.AHS) / 4)
		p.BHS[5], p.BHS[6], p.BHS[7] = byte(len(p.Data)>>16), byte(len(p.Data)>>8), byte(len(p.Data))
	}
}
