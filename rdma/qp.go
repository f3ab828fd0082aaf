//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// The states of a queue pair that the owner of its CQ must know.
const (
	qpOpen   uint32 = iota
	qpFailed        // the adapter refused a work request; what it took comes back flushed
	qpClosed        // destroyed or about to be
)

// The wr_id: operation, slot, caller's bits.
//
//	63 62 61           48 47                                0
//	+----+---------------+-----------------------------------+
//	| op |     slot      |  WRID of the caller               |
//	+----+---------------+-----------------------------------+
const (
	opShift   = 62
	slotShift = 48
	slotMask  = 1<<14 - 1
	maxSlots  = 1 << 14
)

// queuePair is one QP: where the CQ's owner collects work requests, and whom completions go to.
//
// The chains lie outside the Go heap in C's layout. Element i points to element i+1 and to its own pair of SGEs since they were made, so
// posting only fills in values; the C side cuts the chain at its count.
type queuePair struct {
	c    *C.struct_ibv_qp // guarded by cq.mu; nil once closed
	cq   *CQ
	h    WCHandler
	num  uint32 // QP number
	slot uint16
	tag  uint64 // slot << slotShift
	caps QPCaps

	state atomic.Uint32

	// The rest belongs to the owner of cq.
	send     []sendWR
	sendSGE  []sge
	recv     []recvWR
	recvSGE  []sge
	nsend    int
	nrecv    int
	queued   bool       // in cq.dirty
	nextWork *queuePair // in cq.dirty
}

// newQueuePair makes the chains.
func newQueuePair(cq *CQ, caps QPCaps, h WCHandler) (*queuePair, error) {
	q := &queuePair{
		cq: cq, h: h, caps: caps,
		send: offHeap[sendWR](caps.MaxSend), sendSGE: offHeap[sge](caps.MaxSend * MaxSGE),
		recv: offHeap[recvWR](caps.MaxRecv), recvSGE: offHeap[sge](caps.MaxRecv * MaxSGE),
	}
	if q.send == nil || q.sendSGE == nil || q.recv == nil || q.recvSGE == nil {
		q.free()
		return nil, fmt.Errorf("no memory for %d+%d work requests", caps.MaxSend, caps.MaxRecv)
	}
	for i := range q.send {
		q.send[i].sgList = uintptr(unsafe.Pointer(&q.sendSGE[i*MaxSGE]))
		if i+1 < len(q.send) {
			q.send[i].next = uintptr(unsafe.Pointer(&q.send[i+1]))
		}
	}
	for i := range q.recv {
		q.recv[i].sgList = uintptr(unsafe.Pointer(&q.recvSGE[i*MaxSGE]))
		if i+1 < len(q.recv) {
			q.recv[i].next = uintptr(unsafe.Pointer(&q.recv[i+1]))
		}
	}
	return q, nil
}

// free gives the chains back. The owner of the CQ does not know q any more.
func (q *queuePair) free() {
	freeOffHeap(q.send)
	freeOffHeap(q.sendSGE)
	freeOffHeap(q.recv)
	freeOffHeap(q.recvSGE)
	q.send, q.sendSGE, q.recv, q.recvSGE = nil, nil, nil, nil
}

// PostSend appends a SEND to what the next [CQ.Flush] gives to the adapter. The memory it names belongs to the adapter from then until a
// completion of this or a later send of the same QP.
//
// Errors, none of which take wr: ErrFull when MaxSend are waiting for Flush, ErrDown when the QP failed or was closed, ErrWR. The caller
// counts what is outstanding at the adapter.
//
// Preconditions: CreateQP was called; the caller is the CQ's owner.
func (c *Conn) PostSend(wr SendWR) error {
	return c.qp.postSend(&wr, Remote{}, OpSend)
}

// PostWrite is PostSend of an RDMA WRITE: wr's data goes to the peer's memory. For the target side.
func (c *Conn) PostWrite(wr SendWR, to Remote) error {
	return c.qp.postSend(&wr, to, OpWrite)
}

// PostRead is PostSend of an RDMA READ: the peer's memory comes into wr's SGEs. For the target side.
func (c *Conn) PostRead(wr SendWR, from Remote) error {
	return c.qp.postSend(&wr, from, OpRead)
}

// opcodes maps a sending Op to enum ibv_wr_opcode.
var opcodes = [4]uint32{OpSend: C.IBV_WR_SEND, OpWrite: C.IBV_WR_RDMA_WRITE, OpRead: C.IBV_WR_RDMA_READ}

func (q *queuePair) postSend(wr *SendWR, remote Remote, op Op) error {
	if q == nil || q.state.Load() != qpOpen {
		return ErrDown
	}
	i := q.nsend
	if i == q.caps.MaxSend {
		return ErrFull
	}
	if wr.WRID > WRIDMask || uint(wr.NumSGE) > MaxSGE {
		return ErrWR
	}
	for j := range wr.NumSGE {
		s := &wr.SGE[j]
		d := &q.sendSGE[i*MaxSGE+j]
		d.addr, d.len, d.lkey = uint64(s.Addr), s.Len, s.LKey
	}
	e := &q.send[i]
	e.wrID = uint64(op)<<opShift | q.tag | wr.WRID
	e.numSGE = int32(wr.NumSGE)
	e.opcode = opcodes[op]
	e.flags = 0
	if wr.Signaled {
		e.flags |= C.IBV_SEND_SIGNALED
	}
	if wr.Inline {
		e.flags |= C.IBV_SEND_INLINE
	}
	e.remoteAddr, e.rkey = remote.Addr, remote.RKey
	q.nsend = i + 1
	q.enqueue()
	return nil
}

// PostRecv appends a receive buffer to what the next [CQ.Flush] gives to the adapter. The memory it names belongs to the adapter from then
// until its completion. Receives may be posted as soon as the QP exists.
//
// Errors and preconditions are those of PostSend, with MaxRecv.
func (c *Conn) PostRecv(wr RecvWR) error {
	q := c.qp
	if q == nil || q.state.Load() != qpOpen {
		return ErrDown
	}
	i := q.nrecv
	if i == q.caps.MaxRecv {
		return ErrFull
	}
	if wr.WRID > WRIDMask || uint(wr.NumSGE) > MaxSGE {
		return ErrWR
	}
	for j := range wr.NumSGE {
		s := &wr.SGE[j]
		d := &q.recvSGE[i*MaxSGE+j]
		d.addr, d.len, d.lkey = uint64(s.Addr), s.Len, s.LKey
	}
	e := &q.recv[i]
	e.wrID = uint64(OpRecv)<<opShift | q.tag | wr.WRID
	e.numSGE = int32(wr.NumSGE)
	q.nrecv = i + 1
	q.enqueue()
	return nil
}

// enqueue puts q on the CQ's list of QPs with work.
func (q *queuePair) enqueue() {
	if q.queued {
		return
	}
	q.queued = true
	q.nextWork = nil
	if cq := q.cq; cq.dirty == nil {
		cq.dirty, cq.dirtyTail = q, q
	} else {
		cq.dirtyTail.nextWork = q
		cq.dirtyTail = q
	}
}

// QPAttr returns the state of the QP as the adapter has it, for diagnosis.
//
// Wraps: ibv_query_qp(3).
func (c *Conn) QPAttr() (QPAttr, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.qp == nil || c.closed {
		return QPAttr{}, fmt.Errorf("%s: query QP: %w", c, ErrClosed)
	}
	var a C.struct_ibv_qp_attr
	var init C.struct_ibv_qp_init_attr
	mask := C.IBV_QP_STATE | C.IBV_QP_PATH_MTU | C.IBV_QP_TIMEOUT | C.IBV_QP_RETRY_CNT | C.IBV_QP_RNR_RETRY | C.IBV_QP_DEST_QPN |
		C.IBV_QP_MAX_QP_RD_ATOMIC | C.IBV_QP_MAX_DEST_RD_ATOMIC
	if rc := C.ibv_query_qp(c.id.qp, &a, C.int(mask), &init); rc != 0 {
		return QPAttr{}, c.verbError("ibv_query_qp", errno(rc))
	}
	states := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	out := QPAttr{
		QPN:                c.qp.num,
		PeerQPN:            uint32(a.dest_qp_num),
		PathMTU:            128 << a.path_mtu, // enum ibv_mtu: 1 is 256
		ACKTimeout:         ackDuration(uint8(a.timeout)),
		RetryCount:         uint8(a.retry_cnt),
		RNRRetryCount:      uint8(a.rnr_retry),
		ResponderResources: uint8(a.max_dest_rd_atomic),
		InitiatorDepth:     uint8(a.max_rd_atomic),
	}
	if int(a.qp_state) < len(states) {
		out.State = states[a.qp_state]
	}
	return out, nil
}
