//go:build cgo

package rdma

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// defaultResolveTimeout bounds each step of Resolve when the context has no deadline.
const defaultResolveTimeout = 10 * time.Second

// Conn is one RDMA connection: an rdma_cm id with its own event channel, and at most one QP. The package comment shows its life.
//
// The posting methods belong to the owner of the QP's CQ; all others may be called from any goroutine.
type Conn struct {
	ch            *channel
	dev           *Device
	port          uint32 // of the device
	local, remote netip.AddrPort
	qp            *queuePair // set once by CreateQP

	mu      sync.Mutex // guards the calls on id, and before cq.mu and devices.mu
	id      *C.struct_rdma_cm_id
	started bool // Connect or Accept was called
	closed  bool

	cb       sync.Mutex // held during a call of onEvent; before mu
	lost     bool       // EventDeviceRemoved was delivered
	onEvent  atomic.Pointer[func(Event)]
	hasEvent chan struct{} // closed by the first OnEvent
	done     chan struct{} // closed by Close
}

func newConn(ch *channel, id *C.struct_rdma_cm_id) *Conn {
	live.conns.Add(1)
	return &Conn{ch: ch, id: id, hasEvent: make(chan struct{}), done: make(chan struct{})}
}

// Resolve finds the adapter and the route that lead to cfg.Target. It sends nothing to the target but what address resolution needs.
//
// Errors: ErrNoDevice when no adapter serves the address (use TCP), ErrUnreachable, ErrTimeout, the context's error, *VerbError.
//
// Wraps: rdma_create_id(3), rdma_resolve_addr(3), rdma_resolve_route(3), rdma_set_option (RDMA_OPTION_ID_ACK_TIMEOUT).
func Resolve(ctx context.Context, cfg ResolveConfig) (*Conn, error) {
	c, err := resolve(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("resolve %s: %w", cfg.Target, err)
	}
	return c, nil
}

func resolve(ctx context.Context, cfg ResolveConfig) (_ *Conn, err error) {
	dst, err := sockaddr(cfg.Target)
	if err != nil {
		return nil, err
	}
	var src *C.struct_sockaddr_storage
	if cfg.Source.IsValid() {
		if cfg.Source.Unmap().Is4() != cfg.Target.Addr().Unmap().Is4() {
			return nil, fmt.Errorf("source address %s and target are of different families", cfg.Source)
		}
		if src, err = sockaddr(netip.AddrPortFrom(cfg.Source, 0)); err != nil {
			return nil, fmt.Errorf("source: %w", err)
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, ctxError(err, "start")
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
	c := newConn(ch, id)
	c.remote = cfg.Target
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	rc, err := C.rdma_resolve_addr(id, asSockaddr(src), asSockaddr(dst), timeoutMs(ctx))
	if rc != 0 {
		return nil, c.addrError(cfg, "rdma_resolve_addr", errnoOf(err))
	}
	if err := c.await(ctx, "address resolution", C.RDMA_CM_EVENT_ADDR_RESOLVED, cfg); err != nil {
		return nil, err
	}
	if id.verbs == nil {
		return nil, c.addrError(cfg, "rdma_resolve_addr", unix.ENODEV)
	}
	if err := c.bound(); err != nil {
		return nil, err
	}
	timeout := cfg.ACKTimeout
	if cfg.SoftwareACKTimeout != 0 && c.dev.Software() {
		timeout = cfg.SoftwareACKTimeout
	}
	if err := c.setACKTimeout(timeout); err != nil {
		return nil, err
	}
	if rc, err := C.rdma_resolve_route(id, timeoutMs(ctx)); rc != 0 {
		return nil, c.addrError(cfg, "rdma_resolve_route", errnoOf(err))
	}
	if err := c.await(ctx, "route resolution", C.RDMA_CM_EVENT_ROUTE_RESOLVED, cfg); err != nil {
		return nil, err
	}
	return c, nil
}

// bound takes over what the id knows once it is bound to an adapter.
func (c *Conn) bound() error {
	dev, err := acquireDevice(c.id.verbs)
	if err != nil {
		return err
	}
	c.dev = dev
	c.port = uint32(c.id.port_num)
	c.local = addrPort(C.rdma_get_local_addr(c.id))
	if peer := addrPort(C.rdma_get_peer_addr(c.id)); peer.IsValid() {
		c.remote = peer
	}
	return nil
}

// await waits for the one event that means success of a resolution step.
func (c *Conn) await(ctx context.Context, step string, want C.enum_rdma_cm_event_type, cfg ResolveConfig) error {
	ev, err := c.ch.next(ctx)
	if err != nil {
		return ctxError(err, step)
	}
	switch C.enum_rdma_cm_event_type(ev.event) {
	case want:
		return nil
	case C.RDMA_CM_EVENT_ADDR_ERROR, C.RDMA_CM_EVENT_ROUTE_ERROR:
		return c.addrError(cfg, step, statusErrno(ev.status))
	case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
		c.markRemoved()
		return fmt.Errorf("%s: %w", step, ErrDeviceRemoved)
	}
	return unexpected(step, ev)
}

// addrError sorts the failures of address and route resolution. librdmacm gives the errno of rdma_resolve_addr or, later, the negative
// status of the ADDR_ERROR event; ENODEV is the kernel's word for an interface without an adapter.
func (c *Conn) addrError(cfg ResolveConfig, call string, err error) error {
	cause := &VerbError{Call: call, Err: err}
	switch {
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.EADDRNOTAVAIL) && cfg.Source.IsValid():
		at := cfg.Target.Addr()
		if cfg.Source.IsValid() {
			at = cfg.Source
		}
		return &opError{text: fmt.Sprintf("no RDMA device serves %s: %v: see \"rdma link\" and \"ip route get %s\"", at, cause,
			cfg.Target.Addr().WithZone("")), kind: ErrNoDevice, cause: cause}
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return &opError{text: fmt.Sprintf("host unreachable: %v", cause), kind: ErrUnreachable, cause: cause}
	case errors.Is(err, unix.ETIMEDOUT):
		return &opError{text: fmt.Sprintf("timed out: %v", cause), kind: ErrTimeout, cause: cause}
	}
	return cause
}

// Device returns the adapter. It is valid until the Conn and all that was made on the Device are closed.
func (c *Conn) Device() *Device { return c.dev }

// LocalAddr returns the local address of the connection.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

func (c *Conn) String() string { return fmt.Sprintf("rdma %s", c.remote) }

// CreateQP makes the connection's queue pair on cq, of the same device, and sends its completions to h. Receives may then be posted; sends
// only when the connection is established.
//
// Errors: *VerbError, or a text when cq is too small or of another device.
//
// Wraps: rdma_create_qp(3).
func (c *Conn) CreateQP(cq *CQ, caps QPCaps, h WCHandler) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("%s: create QP: %w", c, ErrClosed)
	}
	lim := c.dev.limits.MaxQPWR
	switch {
	case c.qp != nil:
		return fmt.Errorf("%s: create QP: there is one already", c)
	case cq.d != c.dev:
		return fmt.Errorf("%s: create QP: completion queue is on %s, connection on %s", c, cq.d.name, c.dev.name)
	case caps.MaxSend < 1 || caps.MaxRecv < 1 || caps.MaxSend > lim || caps.MaxRecv > lim || caps.MaxInline < 0:
		return fmt.Errorf("%s: create QP: %d sends, %d receives: the adapter allows 1 to %d", c, caps.MaxSend, caps.MaxRecv, lim)
	}
	q, err := newQueuePair(cq, caps, h)
	if err != nil {
		return fmt.Errorf("%s: create QP: %w", c, err)
	}
	if err := cq.attach(q); err != nil {
		q.free()
		return fmt.Errorf("%s: create QP: %w", c, err)
	}
	var init C.struct_ibv_qp_init_attr
	init.send_cq, init.recv_cq = cq.c, cq.c
	init.cap.max_send_wr, init.cap.max_recv_wr = C.uint32_t(caps.MaxSend), C.uint32_t(caps.MaxRecv)
	init.cap.max_send_sge, init.cap.max_recv_sge = MaxSGE, MaxSGE
	init.cap.max_inline_data = C.uint32_t(caps.MaxInline)
	init.qp_type = C.IBV_QPT_RC
	if rc, err := C.rdma_create_qp(c.id, c.dev.pd, &init); rc != 0 {
		q.state.Store(qpClosed)
		cq.detach(q)
		return c.verbError("rdma_create_qp", errnoOf(err))
	}
	cq.activate(q, c.id.qp)
	c.qp = q
	live.qps.Add(1)
	devices.mu.Lock()
	c.dev.conns[q.num] = c
	devices.mu.Unlock()
	return nil
}

// Connect sends the connection request and waits for the answer. It returns the private data of the peer's reply, of which InfiniBand and
// RoCE deliver the whole field, filled with zeros. After an error the Conn can only be closed.
//
// Errors: *RejectError (an ErrRefused), ErrUnreachable and ErrTimeout when nothing answers, the context's error, ErrDeviceRemoved,
// ErrClosed, *VerbError. Without a deadline an unanswered request ends after the kernel's own retries, about a minute.
//
// Wraps: rdma_connect(3).
func (c *Conn) Connect(ctx context.Context, p ConnectParams) (peerPrivate []byte, err error) {
	return c.start(ctx, "connect", &p, func(cp *C.struct_rdma_conn_param) (C.int, error) {
		if err := c.setACKTimeout(p.ACKTimeout); err != nil {
			return -1, err
		}
		rc, err := C.rdma_connect(c.id, cp)
		return rc, err
	})
}

// start begins the connection from either side and waits until it is established.
func (c *Conn) start(ctx context.Context, what string, p *ConnectParams, begin func(*C.struct_rdma_conn_param) (C.int, error)) ([]byte, error) {
	fail := func(err error) ([]byte, error) { return nil, fmt.Errorf("%s: %s: %w", c, what, err) }
	if err := ctx.Err(); err != nil {
		return fail(ctxError(err, "start"))
	}
	if len(p.PrivateData) > math.MaxUint8 {
		return fail(fmt.Errorf("%d bytes of private data are too many", len(p.PrivateData)))
	}
	if err := c.begin(p, what, begin); err != nil {
		return fail(err)
	}
	ev, err := c.ch.next(ctx)
	if err != nil {
		return fail(ctxError(err, "no answer"))
	}
	switch C.enum_rdma_cm_event_type(ev.event) {
	case C.RDMA_CM_EVENT_ESTABLISHED:
		c.setRNRTimer()
		go c.runEvents()
		return privateData(ev), nil
	case C.RDMA_CM_EVENT_REJECTED:
		return fail(&RejectError{Reason: int(ev.status), PrivateData: privateData(ev)})
	case C.RDMA_CM_EVENT_UNREACHABLE:
		cause := &VerbError{Call: "no answer from the peer's connection manager", Err: statusErrno(ev.status)}
		kind := ErrUnreachable
		if cause.Err == unix.ETIMEDOUT {
			kind = errUnreachableTimeout
		}
		return fail(&opError{text: "host unreachable: " + cause.Error(), kind: kind, cause: cause})
	case C.RDMA_CM_EVENT_CONNECT_ERROR:
		return fail(&VerbError{Call: "rdma_cm connection establishment", Err: statusErrno(ev.status)})
	case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
		c.markRemoved()
		return fail(ErrDeviceRemoved)
	case C.RDMA_CM_EVENT_DISCONNECTED:
		return fail(&opError{text: "the peer disconnected at once", kind: ErrRefused})
	}
	return fail(unexpected(what, ev))
}

// rnrTimer is the code of 0.64 ms in the encoding of the RNR NAK timer (InfiniBand Architecture Specification, ibv_modify_qp(3)).
const rnrTimer = 12

// setRNRTimer tells the peer to try again soon when it sent before a receive was posted here. The rdma_cm leaves code 0, which is 655 ms.
// An adapter that refuses it keeps that.
func (c *Conn) setRNRTimer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		C.shim_qp_rnr_timer(c.id.qp, rnrTimer)
	}
}

func (c *Conn) begin(p *ConnectParams, what string, begin func(*C.struct_rdma_conn_param) (C.int, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return ErrClosed
	case c.started:
		return errors.New("called twice")
	case c.qp == nil:
		return errors.New("there is no queue pair: CreateQP comes first")
	}
	c.started = true
	cp := (*C.struct_rdma_conn_param)(C.calloc(1, C.sizeof_struct_rdma_conn_param))
	defer C.free(unsafe.Pointer(cp))
	if n := len(p.PrivateData); n > 0 {
		data := C.CBytes(p.PrivateData)
		defer C.free(data)
		cp.private_data, cp.private_data_len = data, C.uint8_t(n)
	}
	cp.responder_resources = C.uint8_t(resources(p.ResponderResources, c.dev.limits.ResponderResources))
	cp.initiator_depth = C.uint8_t(resources(p.InitiatorDepth, c.dev.limits.InitiatorDepth))
	cp.retry_count = C.uint8_t(min(p.RetryCount, 7))
	cp.rnr_retry_count = C.uint8_t(min(p.RNRRetryCount, 7))
	if rc, err := begin(cp); rc != 0 {
		var ve *VerbError
		if errors.As(err, &ve) {
			return err
		}
		return &VerbError{Call: "rdma_" + what, Err: errnoOf(err)}
	}
	return nil
}

// resources leaves MaxResources to librdmacm, which knows the peer's wish when accepting, and refuses other values above the limit.
func resources(n, limit uint8) uint8 {
	if n == MaxResources {
		return n
	}
	return min(n, limit)
}

// Abort puts the QP into the error state: the adapter stops working for it, the peer's RDMA fails, and every outstanding work request comes
// back from Poll as StatusFlushed (those that were complete before, as they were). Nothing is sent to the peer, who notices by time-out;
// Disconnect tells it.
//
// Wraps: ibv_modify_qp(3).
func (c *Conn) Abort() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.qp == nil {
		return nil
	}
	if rc := C.shim_qp_error(c.id.qp); rc != 0 {
		return c.verbError("ibv_modify_qp", syscall.Errno(rc))
	}
	return nil
}

// Disconnect does what Abort does and tells the peer that the connection has ended. It does not wait for the peer; EventDisconnected
// follows. On a connection that is not established it does nothing.
//
// Wraps: rdma_disconnect(3).
func (c *Conn) Disconnect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !c.started {
		return nil
	}
	if rc, err := C.rdma_disconnect(c.id); rc != 0 && err != unix.EINVAL && err != unix.ENOTCONN {
		return c.verbError("rdma_disconnect", errnoOf(err))
	}
	return nil
}

// Close destroys the QP, the id and the event channel, in this order, and gives up the Device. It is idempotent and may be called at any
// time, also while Connect waits (which returns ErrClosed).
//
// When it returns, the adapter touches no memory for this connection, and completions that were not polled are lost: to see every work
// request come back, Abort or Disconnect first and Poll until all have. Called from the goroutine that owns the CQ, HandleWC is not called
// again; from another one, a call that runs may still finish.
//
// Wraps: rdma_destroy_qp(3), rdma_destroy_id(3), rdma_destroy_event_channel(3).
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	close(c.done)
	c.ch.shut()
	if q := c.qp; q != nil {
		devices.mu.Lock()
		delete(c.dev.conns, q.num)
		devices.mu.Unlock()
		q.cq.deactivate(q)
		C.rdma_destroy_qp(c.id)
		q.cq.detach(q)
		live.qps.Add(-1)
	}
	var err error
	if rc, errno := C.rdma_destroy_id(c.id); rc != 0 {
		err = c.verbError("rdma_destroy_id", errnoOf(errno))
	}
	if c.dev != nil {
		c.dev.release()
	}
	C.rdma_destroy_event_channel(c.ch.c)
	live.conns.Add(-1)
	return err
}
