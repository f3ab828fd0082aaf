package pdu

import (
	"encoding/binary"
	"fmt"
)

// SCSICommand carries a CDB to a logical unit (RFC 7143 section 11.3).
//
//	off len
//	  1   1  0x80 F (no unsolicited Data-Out follows), 0x40 R, 0x20 W, 0x07 task attribute
//	  8   8  LUN
//	 16   4  InitiatorTaskTag
//	 20   4  ExpectedDataTransferLength, bytes
//	 24   4  CmdSN
//	 28   4  ExpStatSN
//	 32  16  CDB, zero padded
type SCSICommand struct{ *BHS }

// TaskAttribute orders a command in the task set.
type TaskAttribute uint8

// Task attributes (RFC 7143 section 11.3).
const (
	AttributeUntagged    TaskAttribute = 0
	AttributeSimple      TaskAttribute = 1
	AttributeOrdered     TaskAttribute = 2
	AttributeHeadOfQueue TaskAttribute = 3
	AttributeACA         TaskAttribute = 4
)

// NewSCSICommand starts a SCSI Command PDU in b.
func NewSCSICommand(b *BHS) SCSICommand { return SCSICommand{b.init(OpSCSICommand)} }

// AsSCSICommand views b as a SCSI Command.
func AsSCSICommand(b *BHS) SCSICommand { return SCSICommand{b} }

// Read is the R bit: the command reads data from the logical unit.
func (p SCSICommand) Read() bool { return p.bit(1, 0x40) }

// SetRead sets the R bit.
func (p SCSICommand) SetRead(v bool) { p.putBit(1, 0x40, v) }

// Write is the W bit: the command writes data to the logical unit.
func (p SCSICommand) Write() bool { return p.bit(1, 0x20) }

// SetWrite sets the W bit.
func (p SCSICommand) SetWrite(v bool) { p.putBit(1, 0x20, v) }

// Attribute is the task attribute.
func (p SCSICommand) Attribute() TaskAttribute { return TaskAttribute(p.BHS[1] & 7) }

// SetAttribute sets the task attribute.
func (p SCSICommand) SetAttribute(a TaskAttribute) { p.BHS[1] = p.BHS[1]&^7 | byte(a)&7 }

// ExpectedDataTransferLength is the number of bytes that the initiator has room for or will send.
func (p SCSICommand) ExpectedDataTransferLength() uint32 { return p.u32(20) }

// SetExpectedDataTransferLength sets the expected length in bytes.
func (p SCSICommand) SetExpectedDataTransferLength(n uint32) { p.put32(20, n) }

// CDB is the command descriptor block inside the header; writes go to the PDU.
func (p SCSICommand) CDB() *[16]byte { return (*[16]byte)(p.BHS[32:48]) }

// SCSIResponse ends a task (RFC 7143 section 11.4).
//
//	off len
//	  1   1  0x80, 0x10 o, 0x08 u (bidirectional read residual), 0x04 O, 0x02 U (residual)
//	  2   1  Response
//	  3   1  Status, valid when Response is 0
//	 16   4  InitiatorTaskTag
//	 20   4  SNACK Tag
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   4  ExpDataSN
//	 40   4  BidirectionalReadResidualCount, bytes
//	 44   4  ResidualCount, bytes
//
// Data segment: SenseLength (2 bytes), sense data, then response data.
type SCSIResponse struct{ *BHS }

// ResponseCode tells whether the command got to the end at the target; the SCSI status only counts if it did.
type ResponseCode uint8

// Response codes (RFC 7143 section 11.4). 0x80-0xff are vendor specific.
const (
	ResponseCompleted     ResponseCode = 0x00
	ResponseTargetFailure ResponseCode = 0x01
)

// NewSCSIResponse starts a SCSI Response PDU in b.
func NewSCSIResponse(b *BHS) SCSIResponse {
	b.init(OpSCSIResponse).SetFinal(true)
	return SCSIResponse{b}
}

// AsSCSIResponse views b as a SCSI Response.
func AsSCSIResponse(b *BHS) SCSIResponse { return SCSIResponse{b} }

// Response is the iSCSI service response.
func (p SCSIResponse) Response() ResponseCode { return ResponseCode(p.BHS[2]) }

// SetResponse sets the service response.
func (p SCSIResponse) SetResponse(c ResponseCode) { p.BHS[2] = byte(c) }

// Status is the SCSI status byte, for scsi.Status.
func (p SCSIResponse) Status() uint8 { return p.BHS[3] }

// SetStatus sets the SCSI status byte.
func (p SCSIResponse) SetStatus(s uint8) { p.BHS[3] = s }

// Overflow is the O bit: Residual bytes were not transferred because the expected length was too small.
func (p SCSIResponse) Overflow() bool { return p.bit(1, 0x04) }

// Underflow is the U bit: Residual bytes of the expected length were not transferred.
func (p SCSIResponse) Underflow() bool { return p.bit(1, 0x02) }

// SetResidual sets the residual in bytes, as overflow or as underflow; 0 clears both bits.
func (p SCSIResponse) SetResidual(n uint32, overflow bool) {
	p.putBit(1, 0x04, n != 0 && overflow)
	p.putBit(1, 0x02, n != 0 && !overflow)
	p.put32(44, n)
}

// ReadOverflow is the o bit, Overflow for the read half of a bidirectional command.
func (p SCSIResponse) ReadOverflow() bool { return p.bit(1, 0x10) }

// ReadUnderflow is the u bit, Underflow for the read half of a bidirectional command.
func (p SCSIResponse) ReadUnderflow() bool { return p.bit(1, 0x08) }

// ResidualCount is the residual in bytes; it means something when Overflow or Underflow is set.
func (p SCSIResponse) ResidualCount() uint32 { return p.u32(44) }

// ReadResidualCount is the residual of the read half of a bidirectional command, in bytes.
func (p SCSIResponse) ReadResidualCount() uint32 { return p.u32(40) }

// ExpDataSN is the number of Data-In (read) or R2T (write) PDUs that the target sent for the command.
func (p SCSIResponse) ExpDataSN() uint32 { return p.u32(36) }

// SetExpDataSN sets the number of Data-In or R2T PDUs.
func (p SCSIResponse) SetExpDataSN(v uint32) { p.put32(36, v) }

// SNACKTag is the tag of an R-Data SNACK that the initiator has to copy back, or 0.
func (p SCSIResponse) SNACKTag() uint32 { return p.u32(20) }

func checkSCSIResponse(b *BHS) error {
	p := SCSIResponse{b}
	switch {
	case p.Overflow() && p.Underflow():
		return protocolErrorf("11.4", 1, "SCSI Response with both overflow and underflow")
	case p.ReadOverflow() && p.ReadUnderflow():
		return protocolErrorf("11.4", 1, "SCSI Response with both read overflow and read underflow")
	}
	return nil
}

// SenseData takes the sense bytes out of the data segment of a SCSI Response, or of an Asynchronous Message for a SCSI event. segment has
// no padding. The result is a part of segment, nil when there is no sense.
//
// A length field that is cut off, or larger than the segment, is a *[ProtocolError]: targets have sent both.
//
// Source: RFC 7143 section 11.4.
func SenseData(segment []byte) ([]byte, error) {
	if len(segment) == 0 {
		return nil, nil
	}
	if len(segment) < 2 {
		return nil, protocolErrorf("11.4", HeaderLength, "data segment of %d byte has no room for SenseLength", len(segment))
	}
	n := int(binary.BigEndian.Uint16(segment))
	if n > len(segment)-2 {
		return nil, protocolErrorf("11.4", HeaderLength, "SenseLength %d in a data segment of %d bytes", n, len(segment))
	}
	if n == 0 {
		return nil, nil
	}
	return segment[2 : 2+n : 2+n], nil
}

// AppendSense appends the data segment of a SCSI Response with the given sense data to dst; the inverse of [SenseData].
func AppendSense(dst, sense []byte) []byte {
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(sense)))
	return append(dst, sense...)
}

func decodeSCSICommand(b *BHS) string {
	p := SCSICommand{b}
	return fmt.Sprintf("%s LUN=%#016x EDTL=%d CmdSN=%d ExpStatSN=%d CDB=%x",
		flags(p.BHS[1], "F", "R", "W", "", "", "", "", ""), p.LUN(), p.ExpectedDataTransferLength(), p.CmdSN(), p.ExpStatSN(), p.CDB()[:])
}

func decodeSCSIResponse(b *BHS) string {
	p := SCSIResponse{b}
	return fmt.Sprintf("%s Response=%#02x Status=%#02x Residual=%d %s",
		flags(p.BHS[1], "", "", "", "o", "u", "O", "U", ""), uint8(p.Response()), p.Status(), p.ResidualCount(), decodeSN(b))
}
