//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// promise is what a QP holds of its CQ.
type promise struct {
	slot    uint16
	entries int
}

const (
	pollBatch = 64  // completions fetched in one crossing
	postBatch = 256 // QPs posted in one crossing
)

// CQ is a completion queue with its completion channel. One goroutine, its owner, calls its methods and posts on its QPs; CreateQP, Abort
// and Close of a Conn may come from others.
//
// Polling, in the order of the code: chores left by Close, one crossing that fills wcs, then each entry goes to the handler that its slot
// names. Posting: the QPs with work are on the dirty list; Flush describes them in posts, crosses once, and empties their chains.
type CQ struct {
	d       *Device
	c       *C.struct_ibv_cq
	ch      *C.struct_ibv_comp_channel
	entries int // as the adapter made it

	// table maps slots to QPs. It is replaced, never changed.
	table  atomic.Pointer[[]*queuePair]
	chores atomic.Bool // retired or graves are not empty

	// Owner's.
	wcs       []wcEntry
	pos, have int // wcs[pos:have] wait for their handlers
	wc        WC  // what handlers see
	posts     []C.struct_shim_post
	batch     []*queuePair // posts[i] is of batch[i]
	dirty     *queuePair
	dirtyTail *queuePair
	settling  []promise // of QPs destroyed before the poll that runs now
	polling   bool
	flushing  bool
	stats     CQStats

	mu      sync.Mutex   // held while posting, so that no QP is destroyed under it; before devices.mu
	retired []promise    // of destroyed QPs
	graves  []*queuePair // destroyed QPs whose chains the owner frees
	spare   []uint16     // slots to give out again
	room    int          // entries not yet promised to a QP
	qps     int
	closed  bool
	armed   bool // a notification will come or is on FD; owner only
	empty   bool // a poll after Arm found the queue empty; owner only
}

// NewCQ makes a completion queue of at least entries entries. [Conn.CreateQP] promises every QP its MaxSend+MaxRecv of them, so the queue
// cannot overrun. Successive queues use successive completion vectors (interrupts) of the adapter.
//
// Wraps: ibv_create_comp_channel(3), ibv_create_cq(3).
func (d *Device) NewCQ(entries int) (*CQ, error) {
	if entries < 1 || entries > d.limits.MaxCQE {
		return nil, fmt.Errorf("device %s: completion queue of %d entries: the adapter allows 1 to %d", d.name, entries, d.limits.MaxCQE)
	}
	cq := &CQ{
		d:     d,
		wcs:   offHeap[wcEntry](pollBatch),
		posts: offHeap[C.struct_shim_post](postBatch),
		batch: make([]*queuePair, postBatch),
	}
	cq.table.Store(new([]*queuePair))
	if cq.wcs == nil || cq.posts == nil {
		cq.free()
		return nil, fmt.Errorf("device %s: no memory for a completion queue", d.name)
	}
	d.ref()
	var err error
	if cq.ch, err = C.ibv_create_comp_channel(d.ctx); cq.ch == nil {
		cq.free()
		d.release()
		return nil, d.verbError("ibv_create_comp_channel", errnoOf(err))
	}
	if rc := C.shim_nonblock(cq.ch.fd); rc != 0 {
		C.ibv_destroy_comp_channel(cq.ch)
		cq.free()
		d.release()
		return nil, d.verbError("fcntl(O_NONBLOCK)", syscall.Errno(rc))
	}
	if cq.c, err = C.ibv_create_cq(d.ctx, C.int(entries), nil, cq.ch, C.int(d.nextVector())); cq.c == nil {
		C.ibv_destroy_comp_channel(cq.ch)
		cq.free()
		d.release()
		return nil, d.verbError("ibv_create_cq", errnoOf(err))
	}
	cq.entries = int(cq.c.cqe)
	cq.room = cq.entries
	live.cqs.Add(1)
	return cq, nil
}

func (d *Device) nextVector() int {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	v := d.vector
	d.vector++
	return v % max(d.limits.CompVectors, 1)
}

func (cq *CQ) free() {
	freeOffHeap(cq.wcs)
	freeOffHeap(cq.posts)
	cq.wcs, cq.posts = nil, nil
}

// Entries returns the queue's size.
func (cq *CQ) Entries() int { return cq.entries }

// Device returns the device the queue is on.
func (cq *CQ) Device() *Device { return cq.d }

// FD returns the descriptor that becomes readable when a completion arrives after [CQ.Arm]. It is non-blocking, stays the queue's, and is
// only to be waited for: poll(2), epoll or a poll request of an io_uring.
func (cq *CQ) FD() int { return int(cq.ch.fd) }

// Stats returns what the owner did so far. Owner only.
func (cq *CQ) Stats() CQStats { return cq.stats }

// Arm asks for one notification on FD with the next completion that arrives. Completions that are in the queue already raise none: poll
// once more after Arm. A queue that is armed already, its notification not drained yet, stays armed and costs nothing.
//
// Wraps: ibv_req_notify_cq(3).
func (cq *CQ) Arm() error {
	if cq.closed {
		return cq.errClosed("arm")
	}
	if cq.armed {
		return nil
	}
	if rc := C.shim_arm(address(cq.c)); rc != 0 {
		return cq.d.verbError("ibv_req_notify_cq", syscall.Errno(rc))
	}
	cq.armed, cq.empty = true, false
	return nil
}

// DrainEvents takes the notification from FD, if there is one, so that it is no longer readable.
//
// Wraps: ibv_get_cq_event(3), ibv_ack_cq_events(3).
func (cq *CQ) DrainEvents() error {
	if cq.closed {
		return cq.errClosed("drain events")
	}
	n := C.shim_drain(address(cq.ch), address(cq.c))
	if n < 0 {
		return cq.d.verbError("ibv_get_cq_event", syscall.Errno(-n))
	}
	if n > 0 {
		cq.armed = false
	}
	cq.stats.Events += uint64(n)
	return nil
}

// Armed reports whether Poll has nothing to find before the notification comes: the queue was armed and then found empty, or its
// notification is on FD. Completions that were there before the queue was armed raise none, so a full batch does not count as empty.
func (cq *CQ) Armed() bool { return cq.armed && cq.empty && !cq.chores.Load() && cq.pos == cq.have }

// address is a pointer to memory outside the Go heap as C takes it.
func address[T any](p *T) C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(p))) }

// Poll fetches up to 64 completions and gives them to the handlers of their QPs. It returns the number fetched; the queue may hold more
// when it is 64. It flushes nothing: what handlers posted waits for [CQ.Flush].
//
// Wraps: ibv_poll_cq(3).
func (cq *CQ) Poll() (int, error) {
	if cq.polling || cq.flushing {
		return 0, nil
	}
	if cq.closed {
		return 0, cq.errClosed("poll")
	}
	if cq.chores.Load() {
		cq.runChores()
	}
	// A handler that panicked left completions behind; they come first.
	if cq.pos == cq.have {
		n := int(C.shim_poll(address(cq.c), address(unsafe.SliceData(cq.wcs)), pollBatch))
		cq.stats.Polls++
		if n < 0 {
			return 0, cq.d.verbError("ibv_poll_cq", syscall.EIO)
		}
		cq.pos, cq.have = 0, n
		cq.empty = n < pollBatch
		if n == 0 {
			cq.stats.EmptyPolls++
		}
		if n < pollBatch && len(cq.settling) > 0 {
			cq.settle()
		}
	}
	n := cq.have - cq.pos
	if n > 0 {
		cq.dispatch()
	}
	return n, nil
}

func (cq *CQ) dispatch() {
	cq.polling = true
	defer func() { cq.polling = false }()
	for cq.pos < cq.have {
		e := &cq.wcs[cq.pos]
		cq.pos++
		// The table is read for each entry: the handler before may have closed this one's Conn.
		table, slot := *cq.table.Load(), int(e.wrID>>slotShift&slotMask)
		var q *queuePair
		if slot < len(table) {
			q = table[slot]
		}
		if q == nil || q.num != e.qpNum {
			cq.stats.Stale++
			continue
		}
		cq.stats.WCs++
		cq.wc = WC{
			WRID:   e.wrID & WRIDMask,
			Op:     Op(e.wrID >> opShift),
			Status: Status(e.status),
			Bytes:  e.byteLen,
			Vendor: e.vendorErr,
		}
		q.h.HandleWC(&cq.wc)
	}
}

// runChores frees what closed QPs left, and takes their slots and entries over for settling: they are free
// once this poll finds the queue empty.
func (cq *CQ) runChores() {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	cq.chores.Store(false)
	cq.settling = append(cq.settling, cq.retired...)
	cq.retired = cq.retired[:0]
	if len(cq.graves) == 0 {
		return
	}
	cq.dropClosed()
	for _, q := range cq.graves {
		q.free()
	}
	cq.graves = nil
}

// dropClosed takes closed QPs off the dirty list.
func (cq *CQ) dropClosed() {
	work := cq.dirty
	cq.dirty, cq.dirtyTail = nil, nil
	for work != nil {
		q := work
		work, q.nextWork, q.queued = q.nextWork, nil, false
		if q.state.Load() != qpClosed {
			q.enqueue()
		}
	}
}

// settle takes back the promises to QPs that were destroyed before a poll that emptied the queue.
func (cq *CQ) settle() {
	cq.mu.Lock()
	for _, p := range cq.settling {
		cq.spare = append(cq.spare, p.slot)
		cq.room += p.entries
	}
	cq.mu.Unlock()
	cq.settling = cq.settling[:0]
}

// Flush gives the work requests of all QPs of the queue to the adapter, receives before sends, in one crossing into C.
//
// Each QP stands for itself: when the adapter refuses a work request, that QP is put into the error state, its handler gets
// [StatusNotPosted] for the refused ones here and StatusFlushed for the accepted ones from Poll, posting on it returns ErrDown, and the
// others are not touched. The returned error tells the cause for the log; every work request has been accounted for.
//
// Wraps: ibv_post_recv(3), ibv_post_send(3).
func (cq *CQ) Flush() error {
	if cq.dirty == nil || cq.flushing || cq.polling {
		return nil
	}
	if cq.closed {
		return cq.errClosed("flush")
	}
	cq.flushing = true
	defer func() { cq.flushing = false }()
	var errs error
	for cq.dirty != nil {
		n, failed := cq.postDirty()
		for i, q := range cq.batch[:n] {
			cq.batch[i] = nil
			if failed > 0 && cq.posts[i].err != 0 {
				errs = errors.Join(errs, cq.fail(q, &cq.posts[i]))
			}
			q.nsend, q.nrecv = 0, 0
		}
	}
	return errs
}

// postDirty posts the chains of up to postBatch QPs. It returns how many they are and how many failed.
func (cq *CQ) postDirty() (n, failed int) {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	for cq.dirty != nil && n < postBatch {
		q := cq.dirty
		cq.dirty, q.nextWork, q.queued = q.nextWork, nil, false
		if q.c == nil {
			q.nsend, q.nrecv = 0, 0
			continue
		}
		p := &cq.posts[n]
		p.qp = q.c
		p.nrecv, p.nsend = C.int(q.nrecv), C.int(q.nsend)
		p.recv = (*C.struct_ibv_recv_wr)(unsafe.Pointer(unsafe.SliceData(q.recv)))
		p.send = (*C.struct_ibv_send_wr)(unsafe.Pointer(unsafe.SliceData(q.send)))
		cq.batch[n] = q
		cq.stats.WRs += uint64(q.nrecv + q.nsend)
		n++
	}
	if n == 0 {
		return 0, 0
	}
	cq.stats.Posts++
	return n, int(C.shim_post(address(unsafe.SliceData(cq.posts)), C.int(n)))
}

// fail takes q out of service because the adapter refused a work request, and tells the handler which ones it does not have.
func (cq *CQ) fail(q *queuePair, p *C.struct_shim_post) error {
	call := "ibv_post_send"
	if p.err_recv != 0 {
		call = "ibv_post_recv"
	}
	err := cq.d.verbError(fmt.Sprintf("%s (QP %d)", call, q.num), syscall.Errno(p.err))
	q.state.CompareAndSwap(qpOpen, qpFailed)
	cq.mu.Lock()
	if q.c != nil {
		C.shim_qp_error(q.c)
	}
	cq.mu.Unlock()
	for i := int(p.recv_done); i < q.nrecv; i++ {
		q.notPosted(q.recv[i].wrID)
	}
	for i := int(p.send_done); i < q.nsend; i++ {
		q.notPosted(q.send[i].wrID)
	}
	return err
}

func (q *queuePair) notPosted(wrID uint64) {
	if q.state.Load() == qpClosed { // by the handler, during the calls before
		return
	}
	q.cq.wc = WC{WRID: wrID & WRIDMask, Op: Op(wrID >> opShift), Status: StatusNotPosted}
	q.h.HandleWC(&q.cq.wc)
}

// attach gives q a slot and promises it its entries.
func (cq *CQ) attach(q *queuePair) error {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	if cq.closed {
		return cq.errClosed("create QP")
	}
	need := q.caps.MaxSend + q.caps.MaxRecv
	if need > cq.room {
		return fmt.Errorf("device %s: completion queue has room for %d of its %d entries, the queue pair needs %d: make the queue larger",
			cq.d.name, cq.room, cq.entries, need)
	}
	old := *cq.table.Load()
	slot := len(old)
	if n := len(cq.spare); n > 0 {
		slot = int(cq.spare[n-1])
	}
	if slot == maxSlots {
		return fmt.Errorf("device %s: %w: all %d slots of the completion queue", cq.d.name, ErrBusy, maxSlots)
	}
	q.slot, q.tag = uint16(slot), uint64(slot)<<slotShift
	table := make([]*queuePair, max(len(old), slot+1))
	copy(table, old)
	if slot < len(old) {
		cq.spare = cq.spare[:len(cq.spare)-1]
	}
	table[slot] = nil // activate fills it when the QP has its number
	cq.table.Store(&table)
	cq.room -= need
	cq.qps++
	return nil
}

// activate makes completions of q reach its handler.
func (cq *CQ) activate(q *queuePair, c *C.struct_ibv_qp) {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	q.c, q.num = c, uint32(c.qp_num)
	cq.setSlot(q.slot, q)
}

func (cq *CQ) setSlot(slot uint16, q *queuePair) {
	table := append([]*queuePair(nil), *cq.table.Load()...)
	table[slot] = q
	cq.table.Store(&table)
}

// deactivate ends posting on q and its way to the handler. The QP may then be destroyed.
func (cq *CQ) deactivate(q *queuePair) {
	q.state.Store(qpClosed)
	cq.mu.Lock()
	defer cq.mu.Unlock()
	q.c = nil
	cq.setSlot(q.slot, nil)
}

// detach follows when the QP is destroyed.
func (cq *CQ) detach(q *queuePair) {
	cq.mu.Lock()
	defer cq.mu.Unlock()
	cq.retired = append(cq.retired, promise{q.slot, q.caps.MaxSend + q.caps.MaxRecv})
	cq.graves = append(cq.graves, q)
	cq.qps--
	cq.chores.Store(true)
}

// Close destroys the queue and its channel. It is idempotent. FD is invalid afterwards: stop waiting for it before.
//
// Errors: ErrBusy while a Conn has a QP on the queue.
//
// Wraps: ibv_destroy_cq(3), ibv_destroy_comp_channel(3).
func (cq *CQ) Close() error {
	cq.mu.Lock()
	if cq.closed {
		cq.mu.Unlock()
		return nil
	}
	if cq.qps > 0 {
		defer cq.mu.Unlock()
		return fmt.Errorf("device %s: close completion queue: %w: %d connections have queue pairs on it", cq.d.name, ErrBusy, cq.qps)
	}
	cq.closed = true
	cq.mu.Unlock()

	C.shim_drain(address(cq.ch), address(cq.c))
	if rc := C.ibv_destroy_cq(cq.c); rc != 0 {
		cq.closed = false
		return cq.d.verbError("ibv_destroy_cq", syscall.Errno(rc))
	}
	C.ibv_destroy_comp_channel(cq.ch)
	cq.runChores()
	cq.free()
	live.cqs.Add(-1)
	cq.d.release()
	return nil
}

func (cq *CQ) errClosed(what string) error {
	return fmt.Errorf("device %s: completion queue: %s: %w", cq.d.name, what, ErrClosed)
}
