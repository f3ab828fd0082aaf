//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// cmEvent is a CM event by value; the library's own is acknowledged already.
type cmEvent = C.struct_shim_cm_event

// waiter waits in Go's netpoller for a descriptor that belongs to the C library, and calls into the library when it is readable. No thread
// sleeps in C.
//
// The descriptor is made non-blocking, which is a property of the open file, and duplicated, because os.File closes what it is given.
type waiter struct {
	file *os.File
	raw  syscall.RawConn

	mu     sync.Mutex // held during each call into the library, so that shut is a border
	closed bool
}

func (w *waiter) init(fd C.int, name string) error {
	if rc := C.shim_nonblock(fd); rc != 0 {
		return &VerbError{Call: "fcntl(O_NONBLOCK)", Err: syscall.Errno(rc)}
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return &VerbError{Call: "fcntl(F_DUPFD_CLOEXEC)", Err: err}
	}
	w.file = os.NewFile(uintptr(dup), name)
	if w.raw, err = w.file.SyscallConn(); err != nil {
		w.file.Close()
		return err
	}
	return nil
}

// take calls try until it returns something else than EAGAIN, and waits for the descriptor in between. One caller at a time.
//
// Errors: ErrClosed after shut, the context's error, or a *VerbError.
func (w *waiter) take(ctx context.Context, call string, try func(fd uintptr) syscall.Errno) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var rc syscall.Errno
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		w.file.SetReadDeadline(time.Unix(1, 0))
		close(fired)
	})
	err := w.raw.Read(func(fd uintptr) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.closed {
			return true
		}
		rc = try(fd)
		return rc != unix.EAGAIN
	})
	if !stop() {
		<-fired
		w.file.SetReadDeadline(time.Time{})
	}
	w.mu.Lock()
	closed := w.closed
	w.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	case err != nil:
		return err
	case rc != 0:
		return &VerbError{Call: call, Err: rc}
	}
	return nil
}

// shut wakes the caller of take. When it returns, no call into the library runs or will run.
func (w *waiter) shut() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.file.Close()
}

// channel is an rdma_cm event channel.
type channel struct {
	waiter
	c *C.struct_rdma_event_channel
}

// Wraps: rdma_create_event_channel(3).
func newChannel() (*channel, error) {
	c, err := C.rdma_create_event_channel()
	if c == nil {
		e := &VerbError{Call: "rdma_create_event_channel", Err: errnoOf(err)}
		if errors.Is(e, unix.ENODEV) || errors.Is(e, unix.ENOENT) || errors.Is(e, unix.ENOSYS) {
			return nil, &opError{text: "no RDMA device in this host: " + e.Error() +
				": load the adapter's driver and the kernel module rdma_ucm", kind: ErrNoDevice, cause: e}
		}
		if errors.Is(e, unix.EACCES) || errors.Is(e, unix.EPERM) {
			e.Hint = "no access to /dev/infiniband/rdma_cm"
		}
		return nil, e
	}
	ch := &channel{c: c}
	if err := ch.init(c.fd, "rdma_cm"); err != nil {
		C.rdma_destroy_event_channel(c)
		return nil, err
	}
	return ch, nil
}

// next returns the next event of any id of the channel.
//
// Wraps: rdma_get_cm_event(3), rdma_ack_cm_event(3).
func (ch *channel) next(ctx context.Context) (*cmEvent, error) {
	ev := new(cmEvent)
	err := ch.take(ctx, "rdma_get_cm_event", func(uintptr) syscall.Errno {
		return syscall.Errno(C.shim_get_cm_event(ch.c, ev))
	})
	if err != nil {
		return nil, err
	}
	return ev, nil
}

// close frees the channel. All its ids are destroyed or migrated.
func (ch *channel) close() {
	ch.shut()
	C.rdma_destroy_event_channel(ch.c)
}

// privateData copies an event's private data.
func privateData(ev *cmEvent) []byte {
	out := make([]byte, ev.private_len)
	for i := range out {
		out[i] = byte(ev.private_data[i])
	}
	return out
}

// errnoOf returns the errno of a failed C call, EIO if it set none.
func errnoOf(err error) error {
	if err == nil {
		return unix.EIO
	}
	return err
}
