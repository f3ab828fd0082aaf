package ublk

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
)

// Handler serves the requests of a queue.
type Handler interface {
	// Submit starts a request. It runs on the reactor, must not block, and may call r.Complete before it returns. Every request gets
	// exactly one Complete, from the reactor; until then r is the handler's.
	Submit(r *Request)

	// Copied tells the end of a Gather or Scatter that was not done at once, on the reactor. err is a bare errno.
	Copied(r *Request, err error)

	// Lent tells the end of a Lend, on the reactor. err is a bare errno; nil means that the pages are in the ring's table.
	Lent(r *Request, err error)
}

// Stats counts what a queue did. The reactor writes it.
type Stats struct {
	Reads, Writes, Flushes, Discards, WriteZeroes uint64 // requests delivered
	Others                                        uint64 // requests of operations that this package does not know, refused
	ReadBytes, WriteBytes                         uint64 // completed without error
	Errors                                        uint64 // completed with an error
	Short                                         uint64 // completions of less than the whole request, turned into errors
	Double                                        uint64 // completions of requests that were not out, ignored
	Copies                                        uint64 // system calls of CopyIn and CopyOut
	RingCopies                                    uint64 // copies done by the ring on its way
	Lent                                          uint64 // requests whose pages were put into the ring's table
}

// Queue is one hardware queue of a device, served by one reactor. Its methods belong to that reactor.
type Queue struct {
	dev   *Device
	ring  *uring.Ring
	slot  uring.Slot
	h     Handler
	id    uint16
	depth int

	mapping []byte // descriptors, read only
	descs   []uapi.UblksrvIoDesc
	reqs    []Request

	fixed     int   // place of tag 0 in the ring's table of buffers, -1 if the queue has none
	noLending bool  // the driver does not put pages there
	inline    bool  // the ring reads and writes the character device while it submits, so that a copy needs no system call of its own
	out       int   // requests at the handler
	back      int   // tags that the driver gave back
	refused   error // first errno of a fetch or commit that is not a cancellation
	closed    bool
	onGone    func()
	finished  bool

	scratch [8]byte // of probeInline

	Stats Stats
}

// strict makes a second Complete of a request panic; the tests set it.
var strict bool

// descStride is the distance between the descriptors of two queues in the mapping: room for the greatest depth, in whole pages, whatever
// the real depth is (ublk_max_cmd_buf_size).
func descStride() int64 {
	page := int64(os.Getpagesize())
	n := int64(uapi.UBLK_MAX_QUEUE_DEPTH) * int64(unsafe.Sizeof(uapi.UblksrvIoDesc{}))
	return (n + page - 1) / page * page
}

// OpenQueue maps the descriptors of queue q and fetches all its tags: prepared on ring, submitted by the next Enter. It runs on the
// thread of the ring, which serves the queue from then on. q and depth are those of the DeviceInfo that Add returned; the device was
// added with FeatureUserCopy.
//
// Errors: of mmap(2); uring.ErrFull when the ring's completion queue is too small for depth more tags. What the driver has against a
// fetch shows later, in Refused.
//
// Source: UBLK_U_IO_FETCH_REQ, ublk_fetch; ublk_ch_mmap.
func (d *Device) OpenQueue(ring *uring.Ring, q, depth int, h Handler) (*Queue, error) {
	wrap := func(err error) error { return fmt.Errorf("ublk device %d: open queue %d: %w", d.id, q, err) }
	if q < 0 || q >= uapi.UBLK_MAX_NR_QUEUES || depth < 1 || depth > uapi.UBLK_MAX_QUEUE_DEPTH {
		return nil, wrap(fmt.Errorf("%w: queue number or depth %d is out of range", unix.EINVAL, depth))
	}
	if d.closed.Load() || ring.Closed() {
		return nil, wrap(ErrClosed)
	}
	if err := ring.Reserve(depth); err != nil {
		return nil, wrap(err)
	}
	page := os.Getpagesize()
	size := (depth*int(unsafe.Sizeof(uapi.UblksrvIoDesc{})) + page - 1) / page * page
	m, err := unix.Mmap(d.fd, uapi.UBLKSRV_CMD_BUF_OFFSET+int64(q)*descStride(), size, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		ring.Release(depth)
		return nil, wrap(fmt.Errorf("map descriptors: %w", err))
	}
	// The mapping refers to the character device, which a forked child would keep open.
	_ = unix.Madvise(m, unix.MADV_DONTFORK)
	queue := newQueue(d, ring, q, depth, h)
	queue.mapping = m
	queue.descs = unsafe.Slice((*uapi.UblksrvIoDesc)(unsafe.Pointer(&m[0])), depth)
	d.refs.Add(1)
	for tag := range queue.reqs {
		queue.command(uapi.UBLK_U_IO_FETCH_REQ, uint16(tag), 0)
	}
	queue.inline = queue.probeInline()
	return queue, nil
}

// Bits of a token beside the tag.
const (
	tokenCopy  = 1 << 16 // a copy of request data
	tokenProbe = 1 << 17
	tokenLend  = 1 << 18 // pages on their way into the ring's table
	tokenBack  = 1 << 19 // and out of it
	tagMask    = 1<<16 - 1
)

// probeInline finds out whether the ring reads the character device while it submits. io_uring hands a read of a file that it does not trust to a
// worker thread, which takes longer than the copy; for one that is open with O_NONBLOCK it tries first, and the driver does not wait.
// A read of a request that is not there fails either way; the question is whether the answer is there at once.
//
// Source: io_file_get_flags, io_file_supports_nowait.
func (q *Queue) probeInline() bool {
	e := q.ring.SQE()
	e.PrepRead(q.dev.fd, uintptr(unsafe.Pointer(&q.scratch)), uint32(len(q.scratch)), uint64(q.reqs[0].pos))
	e.UserData = q.slot.Key(tokenProbe)
	return q.ring.Enter(false, 0) == nil && q.ring.Holds(q.slot.Key(tokenProbe))
}

// newQueue makes a queue without a mapping.
func newQueue(d *Device, ring *uring.Ring, q, depth int, h Handler) *Queue {
	queue := &Queue{dev: d, ring: ring, h: h, id: uint16(q), depth: depth, fixed: -1, reqs: make([]Request, depth)}
	for tag := range queue.reqs {
		r := &queue.reqs[tag]
		r.q, r.tag = queue, uint16(tag)
		r.pos = uapi.UBLKSRV_IO_BUF_OFFSET + int64(q)<<uapi.UBLK_QID_OFF + int64(tag)<<uapi.UBLK_TAG_OFF
	}
	queue.slot = ring.Attach(queue)
	return queue
}

// command prepares an I/O command for a tag. In user copy mode its address is 0.
func (q *Queue) command(op uint32, tag uint16, result int32) {
	e := q.ring.SQE()
	e.PrepUringCmd(q.dev.fd, op)
	e.UserData = q.slot.Key(uint32(tag))
	c := (*uapi.UblksrvIoCmd)(unsafe.Pointer(&e.Cmd))
	c.QID, c.Tag, c.Result = q.id, tag, result
}

// Complete implements uring.Completer: the driver delivers a request, or gives a tag back.
func (q *Queue) Complete(token uint32, res int32, _ uint32) {
	if int(token&tagMask) >= len(q.reqs) {
		return
	}
	r := &q.reqs[token&tagMask]
	switch token &^ tagMask {
	case tokenCopy:
		q.copied(r, res)
		return
	case tokenLend:
		q.lent(r, res)
		return
	case tokenProbe, tokenBack:
		return
	}
	if res != uapi.UBLK_IO_RES_OK {
		q.tagBack(r, res)
		return
	}
	if q.closed { // the mapping is gone; an error needs no descriptor
		q.Stats.Errors++
		q.command(uapi.UBLK_U_IO_COMMIT_AND_FETCH_REQ, r.tag, -int32(unix.ENODEV))
		return
	}
	r.desc = q.descs[r.tag] // a copy: the driver reuses the place when the tag is committed
	r.out = true
	q.out++
	switch r.Op() {
	case OpRead:
		q.Stats.Reads++
	case OpWrite:
		q.Stats.Writes++
	case OpFlush:
		q.Stats.Flushes++
	case OpDiscard:
		q.Stats.Discards++
	case OpWriteZeroes:
		q.Stats.WriteZeroes++
	default:
		q.Stats.Others++
		r.Complete(-int32(unix.EOPNOTSUPP))
		return
	}
	q.h.Submit(r)
}

// tagBack takes note that a tag is not fetched any more.
func (q *Queue) tagBack(r *Request, res int32) {
	if r.gone {
		return
	}
	r.gone = true
	q.back++
	if res != uapi.UBLK_IO_RES_ABORT && q.refused == nil {
		errno := unix.EPROTO // a positive result belongs to a mode that was not asked for
		if res < 0 {
			errno = unix.Errno(-res)
		}
		q.refused = fmt.Errorf("ublk device %d: queue %d: tag %d: %w", q.dev.id, q.id, r.tag, errno)
	}
	if q.back == q.depth {
		q.goneNow()
	}
}

// goneNow runs once, when the driver has given back the last tag.
func (q *Queue) goneNow() {
	q.ring.Release(q.depth)
	q.finish()
	if f := q.onGone; f != nil {
		q.onGone = nil
		f()
	}
}

// finish lets go of the device once the queue is both closed and gone.
func (q *Queue) finish() {
	if q.closed && q.Gone() && !q.finished {
		q.finished = true
		if q.fixed >= 0 {
			q.ring.GiveBuffers(q.fixed, q.depth)
			q.ring.Release(q.depth)
		}
		q.ring.Detach(q.slot)
		q.dev.unref()
	}
}

// OnGone sets what is called, on the reactor, when the driver has given back every tag: the device was stopped or deleted, or its fetches
// were refused. It is called at once when that has happened already. f may call Close.
func (q *Queue) OnGone(f func()) {
	if q.Gone() {
		f()
		return
	}
	q.onGone = f
}

// Gone reports whether the driver has given back every tag, so that no request will come any more.
func (q *Queue) Gone() bool { return q.back == q.depth || q.ring.Closed() }

// Idle reports whether the handler has no request.
func (q *Queue) Idle() bool { return q.out == 0 }

// InFlight is the number of requests at the handler.
func (q *Queue) InFlight() int { return q.out }

// Refused is what the driver had against a fetch or commit, nil if nothing. EINVAL on a fetch: the device was added without user copy
// mode; on a commit: it came from another thread than the fetch.
func (q *Queue) Refused() error { return q.refused }

// ID is the number of the queue in its device.
func (q *Queue) ID() int { return int(q.id) }

// Depth is the number of tags.
func (q *Queue) Depth() int { return q.depth }

// Device is the device of the queue.
func (q *Queue) Device() *Device { return q.dev }

// Close unmaps the descriptors and takes the queue from its handler; calls after the first do nothing.
//
// The usual caller waits for Gone first. A queue that is not gone - its device was never started, or is being abandoned - cannot take its
// fetches back: the driver knows no cancellation of a single one (IORING_OP_ASYNC_CANCEL answers ENOENT). It stays attached to the ring,
// answers what still arrives with ENODEV, passes on what the handler still completes, and lets go of the device when STOP_DEV or DEL_DEV
// has brought the tags back. So DEL_DEV always ends as long as the reactor runs.
//
// A ring that was closed brings no tag back; then Close lets go of the device at once.
func (q *Queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	m := q.mapping
	q.mapping, q.descs = nil, nil
	q.finish()
	if m == nil {
		return nil
	}
	if err := unix.Munmap(m); err != nil {
		return fmt.Errorf("ublk device %d: queue %d: unmap descriptors: %w", q.dev.id, q.id, err)
	}
	return nil
}

var _ uring.Completer = (*Queue)(nil)
