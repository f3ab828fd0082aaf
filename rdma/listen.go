//go:build cgo

package rdma

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Listener is the passive side, for targets.
type Listener struct {
	ch   *channel
	id   *C.struct_rdma_cm_id
	addr netip.AddrPort

	accept sync.Mutex // held by Accept: events of the channel and migration of new ids do not mix

	mu     sync.Mutex
	closed bool
}

// Listen waits for connections to addr; port 0 takes a free one. An unspecified address listens on all adapters.
//
// Errors: ErrNoDevice, *VerbError (EADDRINUSE, EADDRNOTAVAIL).
//
// Wraps: rdma_create_id(3), rdma_bind_addr(3), rdma_listen(3).
func Listen(addr netip.AddrPort) (*Listener, error) {
	l, err := listen(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

func listen(addr netip.AddrPort) (*Listener, error) {
	sa, err := sockaddr(addr)
	if err != nil {
		return nil, err
	}
	refreshDevices()
	ch, err := newChannel()
	if err != nil {
		return nil, err
	}
	var id *C.struct_rdma_cm_id
	if rc, err := C.rdma_create_id(ch.c, &id, nil, C.RDMA_PS_TCP); rc != 0 {
		ch.close()
		return nil, &VerbError{Call: "rdma_create_id", Err: errnoOf(err)}
	}
	fail := func(call string, err error) (*Listener, error) {
		C.rdma_destroy_id(id)
		ch.close()
		cause := &VerbError{Call: call, Err: errnoOf(err)}
		if cause.Err == unix.ENODEV {
			return nil, &opError{text: fmt.Sprintf("no RDMA device serves %s: %v", addr.Addr(), cause), kind: ErrNoDevice, cause: cause}
		}
		return nil, cause
	}
	if rc, err := C.rdma_bind_addr(id, asSockaddr(sa)); rc != 0 {
		return fail("rdma_bind_addr", err)
	}
	if rc, err := C.rdma_listen(id, 128); rc != 0 {
		return fail("rdma_listen", err)
	}
	live.listeners.Add(1)
	return &Listener{ch: ch, id: id, addr: addrPort(C.rdma_get_local_addr(id))}, nil
}

// Addr returns the address, with the port that was taken.
func (l *Listener) Addr() netip.AddrPort { return l.addr }

// Accept waits for a connection request. It returns the half-open connection and the private data of the request; the caller makes the QP,
// posts receives, and answers with [Conn.Accept] or [Conn.Reject].
//
// Errors: ErrClosed, the context's error, *VerbError.
//
// Wraps: rdma_get_cm_event(3), rdma_migrate_id(3).
func (l *Listener) Accept(ctx context.Context) (*Conn, []byte, error) {
	l.accept.Lock()
	defer l.accept.Unlock()
	for {
		ev, err := l.ch.next(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("accept on %s: %w", l.addr, ctxError(err, "wait"))
		}
		switch C.enum_rdma_cm_event_type(ev.event) {
		case C.RDMA_CM_EVENT_CONNECT_REQUEST:
		case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
			removals.Store(true)
			return nil, nil, fmt.Errorf("accept on %s: %w", l.addr, ErrDeviceRemoved)
		default:
			continue
		}
		c, err := l.adopt(ev)
		if err != nil {
			return nil, nil, fmt.Errorf("accept on %s: %w", l.addr, err)
		}
		return c, privateData(ev), nil
	}
}

// adopt gives a new id its own event channel.
func (l *Listener) adopt(ev *cmEvent) (*Conn, error) {
	ch, err := newChannel()
	if err != nil {
		C.rdma_destroy_id(ev.id)
		return nil, err
	}
	if rc, err := C.rdma_migrate_id(ev.id, ch.c); rc != 0 {
		C.rdma_destroy_id(ev.id)
		ch.close()
		return nil, &VerbError{Call: "rdma_migrate_id", Err: errnoOf(err)}
	}
	c := newConn(ch, ev.id)
	if err := c.bound(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close stops listening and ends a waiting Accept. Connections already accepted stay. It is idempotent.
//
// Wraps: rdma_destroy_id(3), rdma_destroy_event_channel(3).
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	l.ch.shut()
	l.accept.Lock() // an Accept that has its event finishes first
	defer l.accept.Unlock()
	C.rdma_destroy_id(l.id)
	C.rdma_destroy_event_channel(l.ch.c)
	live.listeners.Add(-1)
	return nil
}

// Accept answers a connection request with yes and waits until the peer confirmed it.
//
// Errors as those of Connect.
//
// Wraps: rdma_accept(3).
func (c *Conn) Accept(ctx context.Context, p ConnectParams) error {
	_, err := c.start(ctx, "accept", &p, func(cp *C.struct_rdma_conn_param) (C.int, error) {
		rc, err := C.rdma_accept(c.id, cp)
		return rc, err
	})
	return err
}

// Reject answers a connection request with no, and private data of at most 148 bytes. The Conn can then only be closed.
//
// Wraps: rdma_reject(3).
func (c *Conn) Reject(private []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("%s: reject: %w", c, ErrClosed)
	}
	data := C.CBytes(private)
	defer C.free(data)
	if rc, err := C.rdma_reject(c.id, data, C.uint8_t(min(len(private), 148))); rc != 0 {
		return c.verbError("rdma_reject", errnoOf(err))
	}
	return nil
}
