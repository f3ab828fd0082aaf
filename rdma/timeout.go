//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Times for the CM, and what its errors and statuses mean.

// setACKTimeout sets the exponent n of 4.096 us * 2^n, where the kernel knows the option.
func (c *Conn) setACKTimeout(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	v := C.uint8_t(ackExponent(d))
	rc, err := C.rdma_set_option(c.id, C.RDMA_OPTION_ID, C.RDMA_OPTION_ID_ACK_TIMEOUT, unsafe.Pointer(&v), 1)
	if rc != 0 && err != unix.ENOSYS && err != unix.EINVAL && err != unix.EOPNOTSUPP {
		return &VerbError{Call: "rdma_set_option", Err: errnoOf(err)}
	}
	return nil
}

// ackExponent returns the least n in 1..31 with 4.096 us * 2^n >= d.
func ackExponent(d time.Duration) uint8 {
	units := uint64(d+4095) / 4096 // nanoseconds in 4.096 us, rounded up
	return uint8(min(max(bits.Len64(units-1), 1), 31))
}

// ackDuration is the inverse; 0 is without end.
func ackDuration(n uint8) time.Duration {
	if n == 0 {
		return 0
	}
	return 4096 * time.Nanosecond << n
}

// timeoutMs is the time left, for the kernel's resolution steps.
func timeoutMs(ctx context.Context) C.int {
	d := defaultResolveTimeout
	if deadline, ok := ctx.Deadline(); ok {
		d = time.Until(deadline)
	}
	return C.int(min(max(d.Milliseconds()+1, 1), math.MaxInt32))
}

// ctxError says in which step the context ended. A deadline is an ErrTimeout as well.
func ctxError(err error, step string) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return &opError{text: step + ": timed out", kind: ErrTimeout, cause: err}
	}
	return fmt.Errorf("%s: %w", step, err)
}

// errUnreachableTimeout is both.
var errUnreachableTimeout = fmt.Errorf("%w: %w", ErrUnreachable, ErrTimeout)

// statusErrno reads the status of a CM event, a negative errno.
func statusErrno(status C.int) error {
	if status < 0 {
		return syscall.Errno(-status)
	}
	if status > 0 {
		return syscall.Errno(status)
	}
	return unix.EIO
}

func errno[T ~int32](rc T) syscall.Errno { return syscall.Errno(max(rc, -rc)) }

func unexpected(step string, ev *cmEvent) error {
	return fmt.Errorf("%s: unexpected event %s, status %d", step, C.GoString(C.rdma_event_str(C.enum_rdma_cm_event_type(ev.event))), ev.status)
}

func (c *Conn) verbError(call string, err error) error {
	return fmt.Errorf("%s: %w", c, &VerbError{Call: call, Err: err})
}
