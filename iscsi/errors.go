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
	ErrAborted     = errors.New("command ended by task management")
)

// violation tells how a target broke the protocol; section is of RFC 7143. The connection ends.
func violation(section, format string, args ...any) error {
	return &pdu.ProtocolError{Section: section, Offset: -1, What: fmt.Sprintf(format, args...)}
}
