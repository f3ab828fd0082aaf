package pdu

import "fmt"

// DataOut carries write data on TCP (RFC 7143 section 11.7). iSER never sends it for solicited data: the target reads it by RDMA.
//
//	off len
//	  1   1  0x80 F (last of this burst)
//	  8   8  LUN, as in the R2T
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag, 0xffffffff when unsolicited
//	 28   4  ExpStatSN
//	 36   4  DataSN
//	 40   4  BufferOffset, bytes
type DataOut struct{ *BHS }

// NewDataOut starts a SCSI Data-Out PDU in b.
func NewDataOut(b *BHS) DataOut { return DataOut{b.init(OpDataOut)} }

// AsDataOut views b as a SCSI Data-Out.
func AsDataOut(b *BHS) DataOut { return DataOut{b} }

// TargetTransferTag names the R2T that is being answered.
func (p DataOut) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag of the R2T that is being answered.
func (p DataOut) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// DataSN counts the PDUs of one burst from 0.
func (p DataOut) DataSN() uint32 { return p.u32(36) }

// SetDataSN sets the position in the burst.
func (p DataOut) SetDataSN(v uint32) { p.put32(36, v) }

// BufferOffset is the place of the data in the command's buffer, in bytes.
func (p DataOut) BufferOffset() uint32 { return p.u32(40) }

// SetBufferOffset sets the place of the data, in bytes.
func (p DataOut) SetBufferOffset(v uint32) { p.put32(40, v) }

// DataIn carries read data on TCP, the last one possibly with the status (RFC 7143 section 11.7).
//
//	off len
//	  1   1  0x80 F, 0x40 A (acknowledge), 0x04 O, 0x02 U, 0x01 S (status is here)
//	  3   1  Status, valid with S
//	  8   8  LUN, with A
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag, with A
//	 24   4  StatSN, with S
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   4  DataSN
//	 40   4  BufferOffset, bytes
//	 44   4  ResidualCount, bytes, with S
type DataIn struct{ *BHS }

// NewDataIn starts a SCSI Data-In PDU in b.
func NewDataIn(b *BHS) DataIn { return DataIn{b.init(OpDataIn)} }

// AsDataIn views b as a SCSI Data-In.
func AsDataIn(b *BHS) DataIn { return DataIn{b} }

// HasStatus is the S bit: the PDU also ends the task, with Status, StatSN and the residual.
func (p DataIn) HasStatus() bool { return p.bit(1, 0x01) }

// SetStatus sets the S bit, the F bit that goes with it, and the SCSI status.
func (p DataIn) SetStatus(s uint8) {
	p.BHS[1] |= 0x81
	p.BHS[3] = s
}

// Acknowledge is the A bit: the target asks for a DataACK SNACK (only above ErrorRecoveryLevel 0).
func (p DataIn) Acknowledge() bool { return p.bit(1, 0x40) }

// Overflow is the O bit, as in SCSIResponse.
func (p DataIn) Overflow() bool { return p.bit(1, 0x04) }

// Underflow is the U bit, as in SCSIResponse.
func (p DataIn) Underflow() bool { return p.bit(1, 0x02) }

// SetResidual sets the residual in bytes, as overflow or as underflow; 0 clears both bits.
func (p DataIn) SetResidual(n uint32, overflow bool) { SCSIResponse(p).SetResidual(n, overflow) }

// Status is the SCSI status byte, valid with HasStatus.
func (p DataIn) Status() uint8 { return p.BHS[3] }

// TargetTransferTag is the tag for a DataACK SNACK.
func (p DataIn) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag for a DataACK SNACK; ReservedTag when none is wanted.
func (p DataIn) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// DataSN counts the Data-In PDUs of the command from 0.
func (p DataIn) DataSN() uint32 { return p.u32(36) }

// SetDataSN sets the position among the command's Data-In PDUs.
func (p DataIn) SetDataSN(v uint32) { p.put32(36, v) }

// BufferOffset is the place of the data in the command's buffer, in bytes.
func (p DataIn) BufferOffset() uint32 { return p.u32(40) }

// SetBufferOffset sets the place of the data, in bytes.
func (p DataIn) SetBufferOffset(v uint32) { p.put32(40, v) }

// ResidualCount is the residual in bytes, valid with HasStatus and Overflow or Underflow.
func (p DataIn) ResidualCount() uint32 { return p.u32(44) }

func checkDataIn(b *BHS) error {
	p := DataIn{b}
	switch {
	case p.HasStatus() && !p.Final():
		return protocolErrorf("11.7", 1, "SCSI Data-In with status but without F")
	case p.HasStatus() && p.Overflow() && p.Underflow():
		return protocolErrorf("11.7", 1, "SCSI Data-In with both overflow and underflow")
	}
	return nil
}

// R2T asks for a part of the write data on TCP (RFC 7143 section 11.8).
//
//	off len
//	  1   1  0x80
//	  8   8  LUN
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag
//	 24   4  StatSN (not advanced)
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   4  R2TSN
//	 40   4  BufferOffset, bytes
//	 44   4  DesiredDataTransferLength, bytes
type R2T struct{ *BHS }

// NewR2T starts a Ready To Transfer PDU in b.
func NewR2T(b *BHS) R2T {
	b.init(OpR2T).SetFinal(true)
	return R2T{b}
}

// AsR2T views b as a Ready To Transfer.
func AsR2T(b *BHS) R2T { return R2T{b} }

// TargetTransferTag has to be copied to each Data-Out that answers.
func (p R2T) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag.
func (p R2T) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// R2TSN counts the R2Ts of the command from 0.
func (p R2T) R2TSN() uint32 { return p.u32(36) }

// SetR2TSN sets the position among the command's R2Ts.
func (p R2T) SetR2TSN(v uint32) { p.put32(36, v) }

// BufferOffset is the place of the wanted data in the command's buffer, in bytes.
func (p R2T) BufferOffset() uint32 { return p.u32(40) }

// SetBufferOffset sets the place of the wanted data, in bytes.
func (p R2T) SetBufferOffset(v uint32) { p.put32(40, v) }

// DesiredDataTransferLength is the number of bytes wanted, at most MaxBurstLength.
func (p R2T) DesiredDataTransferLength() uint32 { return p.u32(44) }

// SetDesiredDataTransferLength sets the number of bytes wanted.
func (p R2T) SetDesiredDataTransferLength(v uint32) { p.put32(44, v) }

func checkR2T(b *BHS) error {
	p := R2T{b}
	switch {
	case p.DesiredDataTransferLength() == 0:
		return protocolErrorf("11.8", 44, "R2T for 0 bytes")
	case p.TargetTransferTag() == ReservedTag:
		return protocolErrorf("11.8", 20, "R2T without TargetTransferTag")
	}
	return nil
}

// SNACKType is the kind of a SNACK Request, byte 1 (RFC 7143 section 11.16). This initiator works at ErrorRecoveryLevel 0 and sends none;
// the numbers are for traces and for the test target.
type SNACKType uint8

// SNACK types.
const (
	SNACKData    SNACKType = 0
	SNACKStatus  SNACKType = 1
	SNACKDataACK SNACKType = 2
	SNACKRData   SNACKType = 3
)

func decodeDataOut(b *BHS) string {
	p := DataOut{b}
	return fmt.Sprintf("%s TTT=%#08x DataSN=%d Offset=%d ExpStatSN=%d",
		flags(p.BHS[1], "F", "", "", "", "", "", "", ""), p.TargetTransferTag(), p.DataSN(), p.BufferOffset(), p.ExpStatSN())
}

func decodeDataIn(b *BHS) string {
	p := DataIn{b}
	s := fmt.Sprintf("%s DataSN=%d Offset=%d %s",
		flags(p.BHS[1], "F", "A", "", "", "", "O", "U", "S"), p.DataSN(), p.BufferOffset(), decodeSN(b))
	if p.HasStatus() {
		s += fmt.Sprintf(" Status=%#02x Residual=%d", p.Status(), p.ResidualCount())
	}
	return s
}

func decodeR2T(b *BHS) string {
	p := R2T{b}
	return fmt.Sprintf("TTT=%#08x R2TSN=%d Offset=%d Length=%d %s",
		p.TargetTransferTag(), p.R2TSN(), p.BufferOffset(), p.DesiredDataTransferLength(), decodeSN(b))
}

func decodeSNACK(b *BHS) string {
	return fmt.Sprintf("type=%d TTT=%#08x BegRun=%d RunLength=%d ExpStatSN=%d", b[1]&0x0f, b.u32(20), b.u32(40), b.u32(44), b.ExpStatSN())
}
