package pdu

import "fmt"

// NOPOut pings the target or answers its ping (RFC 7143 section 11.18).
//
//	off len
//	  1   1  0x80
//	  8   8  LUN, as in the NOP-In that is answered
//	 16   4  InitiatorTaskTag, 0xffffffff when no answer is wanted
//	 20   4  TargetTransferTag, 0xffffffff unless this answers a NOP-In
//	 24   4  CmdSN
//	 28   4  ExpStatSN
//
// Trap: over iSER a target's receive buffer for a NOP-Out without a real InitiatorTaskTag is not given back (LIO isert), so pings there
// always carry one.
type NOPOut struct{ *BHS }

// NewNOPOut starts a NOP-Out PDU in b, with TargetTransferTag reserved.
func NewNOPOut(b *BHS) NOPOut {
	p := NOPOut{b.init(OpNOPOut)}
	p.SetFinal(true)
	p.SetTargetTransferTag(ReservedTag)
	return p
}

// AsNOPOut views b as a NOP-Out.
func AsNOPOut(b *BHS) NOPOut { return NOPOut{b} }

// TargetTransferTag is the tag of the NOP-In that is answered.
func (p NOPOut) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag of the NOP-In that is answered.
func (p NOPOut) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// NOPIn is the target's ping or its answer (RFC 7143 section 11.19).
//
//	off len
//	  1   1  0x80
//	  8   8  LUN, with a TargetTransferTag
//	 16   4  InitiatorTaskTag, 0xffffffff unless this answers a NOP-Out
//	 20   4  TargetTransferTag, 0xffffffff when no answer is wanted
//	 24   4  StatSN (advanced only when this answers a NOP-Out)
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
type NOPIn struct{ *BHS }

// NewNOPIn starts a NOP-In PDU in b, with both tags reserved.
func NewNOPIn(b *BHS) NOPIn {
	p := NOPIn{b.init(OpNOPIn)}
	p.SetFinal(true)
	p.SetInitiatorTaskTag(ReservedTag)
	p.SetTargetTransferTag(ReservedTag)
	return p
}

// AsNOPIn views b as a NOP-In.
func AsNOPIn(b *BHS) NOPIn { return NOPIn{b} }

// TargetTransferTag goes back in the answer; ReservedTag asks for none.
func (p NOPIn) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag that the answer has to carry.
func (p NOPIn) SetTargetTransferTag(v uint32) { p.put32(20, v) }

func decodeNOPOut(b *BHS) string {
	return fmt.Sprintf("TTT=%#08x CmdSN=%d ExpStatSN=%d", b.u32(20), b.CmdSN(), b.ExpStatSN())
}

func decodeNOPIn(b *BHS) string {
	return fmt.Sprintf("TTT=%#08x %s", b.u32(20), decodeSN(b))
}
