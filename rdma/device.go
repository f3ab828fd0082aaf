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
	"math"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Device is an adapter as this process has it open: one verbs context and one protection domain, shared by all connections through it.
// It is made by [Resolve] and [Listener.Accept] and closes with the last Conn, CQ and MR that uses it.
type Device struct {
	ctx    *C.struct_ibv_context
	pd     *C.struct_ibv_pd
	pin    **C.struct_ibv_context
	name   string
	soft   bool
	limits Limits

	async    waiter
	uevents  waiter
	watching bool        // uevents is in use
	removed  atomic.Bool // the adapter is gone, or waits for us to go

	// Guarded by devices.mu.
	refs   int
	vector int              // of the next CQ
	conns  map[uint32]*Conn // by QP number, for asynchronous events
}

// devices are the open ones, by verbs context. librdmacm has one context per device for the whole process.
var devices struct {
	mu    sync.Mutex
	byCtx map[*C.struct_ibv_context]*Device
}

// acquireDevice returns the Device of ctx with one more reference. An rdma_cm_id keeps ctx open during the call.
//
// Wraps: ibv_alloc_pd(3), ibv_query_device(3), rdma_get_devices(3).
func acquireDevice(ctx *C.struct_ibv_context) (*Device, error) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if d := devices.byCtx[ctx]; d != nil {
		if d.removed.Load() {
			// Something new on it would keep it from going.
			return nil, &opError{text: d.name + " is being removed", kind: ErrNoDevice}
		}
		d.refs++
		return d, nil
	}
	d := &Device{ctx: ctx, refs: 1, name: C.GoString(C.ibv_get_device_name(ctx.device)), conns: map[uint32]*Conn{}}
	d.soft = virtual(C.GoString(&ctx.device.ibdev_path[0]))
	var attr C.struct_ibv_device_attr
	if rc := C.ibv_query_device(ctx, &attr); rc != 0 {
		return nil, d.verbError("ibv_query_device", syscall.Errno(rc))
	}
	d.limits = Limits{
		MaxQPWR:            int(attr.max_qp_wr),
		MaxSGE:             int(attr.max_sge),
		MaxCQE:             int(attr.max_cqe),
		MaxMR:              int(attr.max_mr),
		MaxMRSize:          int64(min(uint64(attr.max_mr_size), math.MaxInt64)),
		ResponderResources: uint8(min(attr.max_qp_rd_atom, 0xfe)),
		InitiatorDepth:     uint8(min(attr.max_qp_init_rd_atom, 0xfe)),
		CompVectors:        int(ctx.num_comp_vectors),
	}
	var err error
	if d.pin, err = C.shim_pin(ctx); d.pin == nil {
		return nil, d.verbError("rdma_get_devices", errnoOf(err))
	}
	if d.pd, err = C.ibv_alloc_pd(ctx); d.pd == nil {
		C.shim_unpin(d.pin)
		return nil, d.verbError("ibv_alloc_pd", errnoOf(err))
	}
	if err := d.async.init(ctx.async_fd, d.name); err != nil {
		C.ibv_dealloc_pd(d.pd)
		C.shim_unpin(d.pin)
		return nil, err
	}
	if devices.byCtx == nil {
		devices.byCtx = map[*C.struct_ibv_context]*Device{}
	}
	devices.byCtx[ctx] = d
	live.pds.Add(1)
	go d.runAsyncEvents()
	d.watch()
	return d, nil
}

// virtual tells whether sysfs has the device of path below no bus.
func virtual(path string) bool {
	real, err := filepath.EvalSymlinks(path)
	return err == nil && strings.HasPrefix(real, "/sys/devices/virtual/")
}

// Software tells whether the adapter has no hardware: the processor does its work when it gets to it, as with soft RoCE (rdma_rxe) and soft
// iWARP (siw).
func (d *Device) Software() bool { return d.soft }

// ref takes one more reference for an object that is made on d. The caller holds one already.
func (d *Device) ref() {
	devices.mu.Lock()
	d.refs++
	devices.mu.Unlock()
}

// release gives one reference back. With the last one the PD goes, and the context unless an rdma_cm_id has it.
//
// Wraps: ibv_dealloc_pd(3), rdma_free_devices(3).
func (d *Device) release() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if d.refs--; d.refs > 0 {
		return
	}
	delete(devices.byCtx, d.ctx)
	d.async.shut()
	if d.watching {
		d.uevents.shut()
	}
	C.ibv_dealloc_pd(d.pd)
	if d.removed.Load() {
		C.shim_let_go(d.ctx)
	}
	C.shim_unpin(d.pin)
	live.pds.Add(-1)
}

// Name returns the name under /sys/class/infiniband.
func (d *Device) Name() string { return d.name }

// Limits returns what the adapter allows.
func (d *Device) Limits() Limits { return d.limits }

func (d *Device) verbError(call string, err error) error {
	return fmt.Errorf("device %s: %w", d.name, &VerbError{Call: call, Err: err})
}

// runAsyncEvents gives the adapter's asynchronous events to the connections they concern, until the device closes.
//
// Wraps: ibv_get_async_event(3), ibv_ack_async_event(3).
func (d *Device) runAsyncEvents() {
	for {
		var ev C.struct_shim_async_event
		err := d.async.take(context.Background(), "ibv_get_async_event", func(uintptr) syscall.Errno {
			return syscall.Errno(C.shim_get_async_event(d.ctx, &ev))
		})
		if err != nil { // closed, or the context died with its adapter
			return
		}
		code := C.GoString(C.ibv_event_type_str(C.enum_ibv_event_type(ev.event)))
		port := func(c *Conn) bool { return c.port == uint32(ev.port) }
		switch C.enum_ibv_event_type(ev.event) {
		case C.IBV_EVENT_QP_FATAL, C.IBV_EVENT_QP_REQ_ERR, C.IBV_EVENT_QP_ACCESS_ERR:
			d.broadcast(Event{EventQPError, code}, func(c *Conn) bool { return c.qp.num == uint32(ev.qpn) })
		case C.IBV_EVENT_CQ_ERR:
			d.broadcast(Event{EventCQError, code}, func(c *Conn) bool { return c.qp.cq.c == ev.cq })
		case C.IBV_EVENT_PORT_ERR:
			d.broadcast(Event{EventPortDown, code}, port)
		case C.IBV_EVENT_PORT_ACTIVE:
			d.broadcast(Event{EventPortUp, code}, port)
		case C.IBV_EVENT_DEVICE_FATAL:
			d.lost(code)
		default: // communication established, address tables: the CM and the WCs tell what matters
		}
	}
}

// MR is registered memory.
type MR struct {
	d   *Device
	mem []byte

	mu sync.Mutex
	c  *C.struct_ibv_mr // nil when closed

	lkey, rkey uint32
}

// Register gives the adapter access to mem until the MR is closed. mem must be outside the Go heap (internal/mempool, mmap); it stays
// pinned in memory as a whole.
//
// Errors: *VerbError; ENOMEM mostly means the limit of locked memory, EPERM that it is 0.
//
// Wraps: ibv_reg_mr(3).
func (d *Device) Register(mem []byte, access Access) (*MR, error) {
	if len(mem) == 0 {
		return nil, fmt.Errorf("device %s: register: no memory", d.name)
	}
	d.ref()
	c, err := C.shim_reg_mr(d.pd, C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), C.size_t(len(mem)), C.int(access))
	if c == nil {
		d.release()
		e := &VerbError{Call: "ibv_reg_mr", Err: errnoOf(err)}
		if e.Err == unix.ENOMEM || e.Err == unix.EPERM { // EPERM: nothing may be locked at all
			e.Hint = "raise the limit of locked memory (LimitMEMLOCK=, ulimit -l) or grant CAP_IPC_LOCK"
		}
		return nil, fmt.Errorf("device %s: register %d bytes for %s: %w", d.name, len(mem), access, e)
	}
	live.mrs.Add(1)
	return &MR{d: d, mem: mem, c: c, lkey: uint32(c.lkey), rkey: uint32(c.rkey)}, nil
}

// LKey is the key for SGEs.
func (m *MR) LKey() uint32 { return m.lkey }

// RKey is the key a peer uses for this memory; iSER calls it a STag.
func (m *MR) RKey() uint32 { return m.rkey }

// Close takes the adapter's access away: when it returns, neither this side nor a peer reaches the memory by this MR. It is idempotent.
//
// Wraps: ibv_dereg_mr(3).
func (m *MR) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c == nil {
		return nil
	}
	if rc := C.ibv_dereg_mr(m.c); rc != 0 {
		return m.d.verbError("ibv_dereg_mr", syscall.Errno(rc))
	}
	m.c = nil
	live.mrs.Add(-1)
	m.d.release()
	return nil
}
