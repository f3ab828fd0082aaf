package iscsi

import (
	"errors"
	"fmt"

	"iserd.org/iserd/iscsi/pdu"
)

// Sentinels, always wrapped.
var (
	ErrTimeout     = errors.New("target does not answer")
	ErrTargetAsked = errors.New("session ended at the target's request")
	ErrSessionLost = errors.New("session lost before the target answered")
)

// RejectError is a Reject PDU.
type RejectError struct {
	Reason pdu.RejectReason // RFC 7143 section 11.17.1
}

func (e *RejectError) Error() string {
	return "target rejects a PDU: " + e.Reason.String()
}

// violation tells how a target broke the protocol; section is of RFC 7143. The connection ends.
func violation(section, format string, args ...any) error {
	return &pdu.ProtocolError{Section: section, Offset: -1, What: fmt.Sprintf(format, args...)}
}
