package iscsi

import (
	"fmt"

	"iserd.org/iserd/iscsi/pdu"
)

// RejectError is a Reject PDU.
type RejectError struct {
	Reason pdu.RejectReason // RFC 7143 section 11.17.1
	What   pdu.Opcode       // of the rejected PDU
	Header bool             // What is known
}

func (e *RejectError) Error() string {
	if !e.Header {
		return "target rejects a PDU: " + e.Reason.String()
	}
	return fmt.Sprintf("target rejects a %v: %v", e.What, e.Reason)
}

// Resend tells whether the same PDU may be sent again later (section 11.17.1).
func (e *RejectError) Resend() bool {
	switch e.Reason {
	case pdu.RejectDataDigest, pdu.RejectTooManyImmediate, pdu.RejectLongOperation:
		return true
	}
	return false
}

// reject decides what a Reject means for the session (sections 7.3 and 11.17). The rejected header tells who has to hear of it:
//
//	SCSI Command     its CmdSN is missing at the target, and error recovery level 0 does not fill the gap: the session ends
//	SCSI Data-Out    for the log only: the target ends the task by a response
//	NOP-Out          the target lives; the next ping comes in its time
//	task management  the one who asked decides
//	else             the session ends
//
// A target that waits for a logout gets one, whatever it rejects.
//
// A protocol error, a rejected SNACK or acknowledgement (there were none) and a header that is not there end the session in any case.
func (s *Session) reject(r pdu.Reject, data []byte) error {
	if err := s.status(r.StatSN(), r.ExpCmdSN(), r.MaxCmdSN()); err != nil {
		return err
	}
	rejected := &RejectError{Reason: r.Reason()}
	h := pdu.RejectedHeader(data)
	if h == nil {
		return rejected
	}
	rejected.What, rejected.Header = h.Opcode(), true
	switch r.Reason() {
	case pdu.RejectProtocolError, pdu.RejectSNACK, pdu.RejectInvalidDataACK, pdu.RejectNegotiationReset:
		return rejected
	case pdu.RejectWaitingForLogout:
		s.leave(pdu.AsyncLogoutRequest, 0) // also for a command: nothing with a CmdSN follows
	}
	itt := h.InitiatorTaskTag()
	switch h.Opcode() {
	case pdu.OpDataOut:
	case pdu.OpNOPOut:
		if itt != noTag && itt == s.ping.tag {
			s.pong()
		}
	case pdu.OpTaskRequest:
		m := s.underManagement(itt)
		if m == nil {
			return rejected
		}
		return s.managed(m, rejected)
	case pdu.OpLogoutRequest:
		if s.logout != nil && itt == s.logoutTag {
			done := s.logout
			s.logout = nil
			done(rejected)
		}
		return rejected
	default:
		if r.Reason() != pdu.RejectWaitingForLogout {
			return rejected
		}
	}
	if s.options.Rejected != nil {
		s.options.Rejected(rejected)
	}
	return nil
}
