package rdma

import (
	"errors"
	"fmt"
)

// Errors of this package. They are returned wrapped: use errors.Is.
var (
	ErrNotSupported  = errors.New("built without RDMA support (cgo was off)")
	ErrNoDevice      = errors.New("no RDMA device")
	ErrRefused       = errors.New("connection refused")
	ErrUnreachable   = errors.New("host unreachable")
	ErrTimeout       = errors.New("timed out")
	ErrDeviceRemoved = errors.New("RDMA device was removed")
	ErrClosed        = errors.New("closed")
	ErrBusy          = errors.New("still in use")
)

// Errors of the posting calls. They are returned as they are, because nothing is built on the data path.
var (
	ErrFull = errors.New("rdma: more work requests than the queue pair's capacity since the last flush")
	ErrDown = errors.New("rdma: queue pair is closed or failed")
	ErrWR   = errors.New("rdma: work request: WRID above 48 bits, or wrong number of SGEs")
)

// VerbError is a failed call of libibverbs or librdmacm. It unwraps to the errno.
type VerbError struct {
	Call string // the C function
	Err  error  // syscall.Errno
	Hint string // what to do about it, or ""
}

func (e *VerbError) Error() string {
	if e.Hint != "" {
		return fmt.Sprintf("%s: %v: %s", e.Call, e.Err, e.Hint)
	}
	return fmt.Sprintf("%s: %v", e.Call, e.Err)
}

// Unwrap returns the errno.
func (e *VerbError) Unwrap() error { return e.Err }

// WCError is a work request that failed. It unwraps to its [Status].
type WCError struct {
	Status Status
	Vendor uint32 // adapter's own code
	WRID   uint64 // as posted
	Op     Op
}

func (e *WCError) Error() string {
	return fmt.Sprintf("%s: %s (status %d, vendor %#x, wrid %#x)", e.Op, e.Status, uint32(e.Status), e.Vendor, e.WRID)
}

// Unwrap returns the Status.
func (e *WCError) Unwrap() error { return e.Status }

// RejectError is a connection request that the peer's CM or application rejected. It is an [ErrRefused].
type RejectError struct {
	Reason      int    // InfiniBand CM reject reason; on iWARP an errno
	PrivateData []byte // of the peer; on InfiniBand and RoCE filled with zeros to its field's length
}

// The CM reject reasons a user of sockets meets; include/rdma/ib_cm.h has all.
const (
	RejectTimeout    = 4  // no answer to the reply
	RejectNoListener = 8  // invalid service ID: nobody listens on that port
	RejectStale      = 10 // a former connection of the same QP number is still known to the peer
	RejectConsumer   = 28 // consumer defined: the peer's application, or its rdma_cm, said no
)

var rejectNames = map[int]string{
	1: "no QP available", 2: "no EE context available", 3: "no resources available", RejectTimeout: "timeout",
	5: "unsupported request", 6: "invalid communication ID", 7: "invalid communication instance",
	RejectNoListener: "invalid service ID (no listener)", 9: "invalid transport service type", RejectStale: "stale connection",
	11: "RDC does not exist", 12: "primary GID rejected", 13: "primary LID rejected", 14: "invalid primary service level",
	15: "invalid primary traffic class", 16: "invalid primary hop limit", 17: "invalid primary packet rate",
	18: "alternate GID rejected", 19: "alternate LID rejected", 20: "invalid alternate service level",
	21: "invalid alternate traffic class", 22: "invalid alternate hop limit", 23: "invalid alternate packet rate", 24: "port and CM redirection", 25: "port redirection",
	26: "invalid MTU", 27: "insufficient responder resources",
	RejectConsumer: "no listener, or rejected by the peer's application", 29: "RNR retry count rejected",
	30: "duplicate local communication ID", 31: "invalid class version", 32: "invalid flow label", 33: "invalid alternate flow label",
}

func (e *RejectError) Error() string {
	name, ok := rejectNames[e.Reason]
	if !ok {
		name = "unknown reason"
	}
	return fmt.Sprintf("connection refused: reason %d: %s", e.Reason, name)
}

// Is makes a RejectError an ErrRefused.
func (e *RejectError) Is(target error) bool { return target == ErrRefused }

// opError is a text that tells what to do, with the sentinel and the cause behind it.
type opError struct {
	text  string
	kind  error // sentinel
	cause error // or nil
}

func (e *opError) Error() string { return e.text }

func (e *opError) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}
