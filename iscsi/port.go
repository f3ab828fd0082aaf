package iscsi

import (
	"context"

	"iserd.org/iserd/iscsi/pdu"
)

// A Port is a connection before the full feature phase, or one of a discovery session: one request goes out, one response comes back. It is
// used by an ordinary goroutine, which may block.
type Port interface {
	// Exchange sends one PDU and waits for the answer. final tells that bhs is the Login Request that may end the login: over iSER every
	// receive of the full feature phase is posted before it leaves. The answer is the caller's.
	Exchange(ctx context.Context, bhs *pdu.BHS, data []byte, final bool) (*pdu.BHS, []byte, error)

	// LocalAddr is the address that the connection comes from.
	LocalAddr() string

	// Close ends the connection. It is safe to call twice.
	Close() error
}
