package ublk

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// Lending: the pages of a request go into the ring's table of registered buffers, so that SEND and RECV work on them and nothing is copied to
// this process. It costs two more entries per request (REGISTER_IO_BUF, UNREGISTER_IO_BUF), which pays for large ones only; that is why it is done request
// by request and not by the driver for all of them (AUTO_BUF_REG).
//
//	Submit --Lend--> REGISTER_IO_BUF --Lent--> SEND, RECV on Fixed() --Complete--> UNREGISTER_IO_BUF, COMMIT_AND_FETCH_REQ
//
// The driver does the first and the last two while the ring submits them, in this order, so a place is free before its tag can bring another
// request. An operation that is under way holds the pages, whatever becomes of the place.

// OpenLending reserves a place in the ring's table for each tag. The device was added with FeatureZeroCopy. It returns false when the ring has no such
// table, or no room there.
func (q *Queue) OpenLending() bool {
	if q.fixed >= 0 {
		return true
	}
	if q.ring.Reserve(q.depth) != nil {
		return false
	}
	first, ok := q.ring.TakeBuffers(q.depth)
	if !ok {
		q.ring.Release(q.depth)
		return false
	}
	q.fixed = first
	return true
}

// Lend puts the pages of a READ or WRITE into the ring's table. It returns false when the queue does not lend; else the handler's Lent follows.
//
// Source: UBLK_U_IO_REGISTER_IO_BUF, ublk_register_io_buf.
func (r *Request) Lend() bool {
	if r.q.fixed < 0 || r.q.noLending || !r.out || r.lent || r.Op() != OpRead && r.Op() != OpWrite {
		return false
	}
	r.bufferCommand(uapi.UBLK_U_IO_REGISTER_IO_BUF, tokenLend)
	return true
}

// Fixed is the place of the pages in the ring's table; their addresses there begin with 0. A READ can only be received into, a WRITE only
// be sent from. Preconditions: Lent has come without an error.
func (r *Request) Fixed() (place uint16, base uintptr) { return uint16(r.q.fixed + int(r.tag)), 0 }

// lent takes the end of a Lend.
func (q *Queue) lent(r *Request, res int32) {
	if res >= 0 {
		r.lent = true
	}
	if res == -int32(unix.EINVAL) || res == -int32(unix.EOPNOTSUPP) {
		q.noLending = true // the device was added without
	}
	switch {
	case !r.out: // completed in the meantime
		r.takeBack()
	case res < 0:
		q.h.Lent(r, unix.Errno(-res))
	default:
		q.Stats.Lent++
		q.h.Lent(r, nil)
	}
}

// takeBack empties the place of a request in the ring's table.
func (r *Request) takeBack() {
	if r.lent && !r.q.ring.Closed() {
		r.bufferCommand(uapi.UBLK_U_IO_UNREGISTER_IO_BUF, tokenBack)
	}
	r.lent = false
}

func (r *Request) bufferCommand(op, token uint32) {
	e := r.q.ring.SQE()
	e.PrepUringCmd(r.q.dev.fd, op)
	e.UserData = r.q.slot.Key(uint32(r.tag) | token)
	c := (*uapi.UblksrvIoCmd)(unsafe.Pointer(&e.Cmd))
	c.QID, c.Tag, c.Addr = r.q.id, r.tag, uint64(r.q.fixed+int(r.tag))
}
