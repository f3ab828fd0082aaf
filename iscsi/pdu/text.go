package pdu

import "fmt"

// TextRequest carries text keys in the full-feature phase, such as SendTargets (RFC 7143 section 11.10).
//
//	off len
//	  1   1  0x80 F (nothing more to say), 0x40 C (text continues)
//	  8   8  LUN, as in the last Text Response
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag, 0xffffffff at the start of an exchange
//	 24   4  CmdSN
//	 28   4  ExpStatSN
type TextRequest struct{ *BHS }

// NewTextRequest starts a Text Request PDU in b, as the beginning of an exchange (TargetTransferTag reserved).
func NewTextRequest(b *BHS) TextRequest {
	p := TextRequest{b.init(OpTextRequest)}
	p.SetTargetTransferTag(ReservedTag)
	return p
}

// AsTextRequest views b as a Text Request.
func AsTextRequest(b *BHS) TextRequest { return TextRequest{b} }

// Continue is the C bit: the text goes on in the next PDU.
func (p TextRequest) Continue() bool { return p.bit(1, 0x40) }

// SetContinue sets the C bit.
func (p TextRequest) SetContinue(v bool) { p.putBit(1, 0x40, v) }

// TargetTransferTag is copied from the response that is being followed up.
func (p TextRequest) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag of the exchange.
func (p TextRequest) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// TextResponse answers a TextRequest (RFC 7143 section 11.11).
//
//	off len
//	  1   1  0x80 F, 0x40 C
//	  8   8  LUN
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag, 0xffffffff when the exchange is over (F)
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
type TextResponse struct{ *BHS }

// NewTextResponse starts a Text Response PDU in b, with TargetTransferTag reserved.
func NewTextResponse(b *BHS) TextResponse {
	p := TextResponse{b.init(OpTextResponse)}
	p.SetTargetTransferTag(ReservedTag)
	return p
}

// AsTextResponse views b as a Text Response.
func AsTextResponse(b *BHS) TextResponse { return TextResponse{b} }

// Continue is the C bit: the text goes on in the next PDU, after an empty Text Request.
func (p TextResponse) Continue() bool { return p.bit(1, 0x40) }

// SetContinue sets the C bit.
func (p TextResponse) SetContinue(v bool) { p.putBit(1, 0x40, v) }

// TargetTransferTag goes back in the next request of the exchange.
func (p TextResponse) TargetTransferTag() uint32 { return p.u32(20) }

// SetTargetTransferTag sets the tag of the exchange.
func (p TextResponse) SetTargetTransferTag(v uint32) { p.put32(20, v) }

// checkText serves both text PDUs: their flag bytes are the same.
func checkText(b *BHS) error {
	if b[1]&0xc0 == 0xc0 {
		return protocolErrorf("11.10", 1, "%s with both F and C", b.Opcode())
	}
	return nil
}

func decodeTextRequest(b *BHS) string {
	p := TextRequest{b}
	return fmt.Sprintf("%s TTT=%#08x CmdSN=%d ExpStatSN=%d",
		flags(p.BHS[1], "F", "C", "", "", "", "", "", ""), p.TargetTransferTag(), p.CmdSN(), p.ExpStatSN())
}

func decodeTextResponse(b *BHS) string {
	p := TextResponse{b}
	return fmt.Sprintf("%s TTT=%#08x %s", flags(p.BHS[1], "F", "C", "", "", "", "", "", ""), p.TargetTransferTag(), decodeSN(b))
}
