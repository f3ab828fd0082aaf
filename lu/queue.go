package lu

import (
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// The way of a request, in the order of this file: Submit takes it from the kernel, load brings the data of a WRITE, start fills the command and
// sends it, TaskDone takes the target's answer, good brings the data of a READ to the kernel, finish hands the result to the kernel. Everything runs on the reactor that owns the queue; the slow cases (retry,
// sense data, lost session) are in their own functions.

// A Path carries the tasks of a queue to the target: the reactor's own session, as long as there is one.
type Path interface {
	// Submit sends a task; its TaskDone follows.
	Submit(t *iscsi.Task)

	// Reaches tells whether tasks of that direction may have Pages, and that it pays. They are handed back as NotSent where they may not.
	Reaches(d iscsi.Direction) bool

	// Hold keeps a task that a lost session has handed back until there is a session again, and then sends it, unless it is [Hopeless]: then it hands it
	// back as NotSent. It returns false when the task is to fail now, because no session will come, or one is there that has ended what was sent before.
	Hold(t *iscsi.Task) bool
}

// A Clock wakes a request after a while, on the reactor.
type Clock interface {
	After(d time.Duration, w Waker, token uint32)
}

// A Waker is woken by a Clock.
type Waker interface {
	Wake(token uint32)
}

// Counters count what a queue has done.
type Counters struct {
	Reads, Writes, Flushes uint64
	ReadBytes, WriteBytes  uint64
	SharedRequests         uint64 // of the READs and WRITEs, those whose data was not copied
	SharedBytes            uint64
	TCPRequests, TCPBytes  uint64 // of the READs and WRITEs, those that moved while the session was over TCP
	LentRequests           uint64 // of the READs and WRITEs, those whose data moved between the socket and the request's own pages
	LentBytes              uint64
	Discards, Zeroes       uint64 // DISCARD and WRITE_ZEROES
	Errors, Retries        uint64 // a DISCARD or WRITE_ZEROES that the unit has no command for is no error: the kernel does without
	InFlight               int
}

// Config describes a queue.
type Config struct {
	Unit   *Unit
	Depth  int
	Path   Path
	Memory *Memory
	Clock  Clock

	// Notice is told what a unit says besides the answer to a request; nil if nobody wants to know. It runs on the reactor and must not block.
	Notice func(Notice)
}

// Queue turns the requests of one ublk queue into SCSI commands. It implements [ublk.Handler].
type Queue struct {
	unit     *Unit
	path     Path // ways is in between while the unit is in doubt
	ways     ways
	notice   func(Notice)
	ranges   ranges
	memory   *Memory
	clock    Clock
	shift    uint // log2 of sectors per logical block
	long     bool // the unit needs 16-byte commands
	requests []request
	shared   []*Shared // by the driver's index
	counters Counters
	tcp      bool // the path's sessions are over TCP
}

// blockRequest is what a queue needs of a [ublk.Request].
type blockRequest interface {
	Op() ublk.Op
	Flags() ublk.Flags
	Tag() uint16
	Sector() ublk.Sector
	Shared() (index int, offset int64, ok bool)
	Gather(dst []byte) (done bool, err error)
	Scatter(src []byte) (done bool, err error)
	Lend() bool
	iscsi.Pages
	Complete(res int32)
}

// request is what a tag needs, made once.
type request struct {
	task   iscsi.Task
	queue  *Queue
	kernel blockRequest
	length int // bytes of data
	data   []byte
	region int
	shared *Shared        // data lies there, or
	buffer mempool.Buffer // here, if holds
	holds  bool
	lent   bool // the data stays where it is
	span   span // of a DISCARD or WRITE_ZEROES

	immediate, delayed, lost int      // how often it was sent again, by cause
	next                     *request // in Memory.waiting
}

// NewQueue makes the queue's requests, one for each tag.
func NewQueue(c Config) *Queue {
	q := &Queue{
		path:     c.Path,
		notice:   c.Notice,
		memory:   c.Memory,
		clock:    c.Clock,
		requests: make([]request, c.Depth),
	}
	q.ways.target = c.Path
	q.Renew(c.Unit)
	for s := c.Unit.LogicalBlockSize / ublk.SectorSize; s > 1; s >>= 1 {
		q.shift++
	}
	for i := range q.requests {
		q.requests[i].queue = q
		q.requests[i].task.Handler = &q.requests[i]
	}
	return q
}

// Counters returns what the queue has done so far.
func (q *Queue) Counters() Counters { return q.counters }

// Carry tells by which kind of transport data moves from now on.
func (q *Queue) Carry(tcp bool) { q.tcp = tcp }

// carried counts the way that the data of a READ or WRITE has taken.
func (q *Queue) carried(r *request, n int32) {
	switch {
	case q.tcp:
		q.counters.TCPRequests++
		q.counters.TCPBytes += uint64(n)
	case r.shared != nil:
		q.counters.SharedRequests++
		q.counters.SharedBytes += uint64(n)
	}
}

// Submit takes a request from the kernel.
func (q *Queue) Submit(k *ublk.Request) { q.submit(k) }

func (q *Queue) submit(k blockRequest) {
	r := &q.requests[k.Tag()]
	r.kernel, r.immediate, r.delayed, r.lost = k, 0, 0, 0
	q.counters.InFlight++
	switch k.Op() {
	case ublk.OpRead, ublk.OpWrite:
		r.length = k.Len()
		if r.length <= 0 || r.length > q.unit.MaxTransfer {
			q.finish(r, -int32(unix.EINVAL))
			return
		}
		switch {
		case q.share(r):
			q.start(r)
		case !q.lend(r):
			q.place(r)
		}
	case ublk.OpFlush:
		r.length = 0
		q.start(r)
	case ublk.OpDiscard, ublk.OpWriteZeroes:
		q.startRange(r)
	default:
		q.finish(r, -int32(unix.EOPNOTSUPP))
	}
}

// place gives a request memory, soon.
func (q *Queue) place(r *request) {
	if q.memory.get(r, r.length) {
		q.load(r)
	}
}

// load brings the data of a WRITE into the buffer of its request, which then starts.
func (q *Queue) load(r *request) {
	if r.kernel.Op() == ublk.OpWrite {
		if done, err := r.kernel.Gather(r.data); !done || err != nil {
			if done {
				q.finish(r, -int32(unix.EIO))
			}
			return
		}
	}
	q.start(r)
}

// Copied goes on with a request whose copy was not done at once.
func (q *Queue) Copied(k *ublk.Request, err error) { q.copied(&q.requests[k.Tag()], err) }

func (q *Queue) copied(r *request, err error) {
	switch {
	case err != nil:
		q.finish(r, -int32(unix.EIO))
	case r.kernel.Op() == ublk.OpWrite:
		q.start(r)
	default:
		q.finish(r, int32(r.length))
	}
}

// start fills the command of a request that has its memory, and sends it.
func (q *Queue) start(r *request) {
	t := &r.task
	t.LUN = q.unit.LUN
	t.Data, t.Region, t.Pages = r.data, r.region, nil
	if r.lent {
		t.Pages = r.kernel
	}
	lba := scsi.LBA(uint64(r.kernel.Sector()) >> q.shift)
	blocks := uint32(r.length) / uint32(q.unit.LogicalBlockSize)
	// A unit that has shrunk is left with a block device that reaches further than short commands do.
	long := q.long || !scsi.Fits10(lba, scsi.Blocks(blocks))
	switch r.kernel.Op() {
	case ublk.OpRead:
		t.Direction = iscsi.Read
		if long {
			scsi.Read16(&t.CDB, lba, scsi.Blocks(blocks), false)
		} else {
			scsi.Read10(&t.CDB, lba, scsi.Blocks(blocks), false)
		}
	case ublk.OpWrite:
		t.Direction = iscsi.Write
		fua := r.kernel.Flags()&ublk.FlagFUA != 0
		if long {
			scsi.Write16(&t.CDB, lba, scsi.Blocks(blocks), fua)
		} else {
			scsi.Write10(&t.CDB, lba, scsi.Blocks(blocks), fua)
		}
	case ublk.OpFlush:
		t.Direction = iscsi.NoData
		if q.long {
			scsi.SynchronizeCache16(&t.CDB, 0, 0)
		} else {
			scsi.SynchronizeCache10(&t.CDB, 0, 0)
		}
	default:
		q.fillRange(r)
	}
	q.path.Submit(t)
}

// TaskDone takes the end of a request's command.
func (r *request) TaskDone(t *iscsi.Task) {
	q := r.queue
	if t.Outcome != iscsi.Responded || t.Status != scsi.StatusGood || t.Residual != 0 {
		q.exception(r)
		return
	}
	q.good(r)
}

// good finishes a request whose command moved every byte.
func (q *Queue) good(r *request) {
	if r.kernel.Op() == ublk.OpRead && r.shared == nil && !r.lent {
		if done, err := r.kernel.Scatter(r.data); !done || err != nil {
			if done {
				q.finish(r, -int32(unix.EIO))
			}
			return
		}
	}
	q.finish(r, int32(r.length))
}

// finish hands the result of a request to the kernel: bytes, or -errno.
func (q *Queue) finish(r *request, result int32) {
	q.counters.InFlight--
	switch op := r.kernel.Op(); {
	case result == -int32(unix.EOPNOTSUPP) && r.isRange():
		r.task.Handler = r // no error: the kernel does without, see withdraw
	case result < 0:
		q.counters.Errors++
		r.task.Handler = r // a range has its own
	case op == ublk.OpRead:
		q.counters.Reads++
		q.counters.ReadBytes += uint64(result)
		q.carried(r, result)
	case op == ublk.OpWrite:
		q.counters.Writes++
		q.counters.WriteBytes += uint64(result)
		q.carried(r, result)
	case op == ublk.OpFlush:
		q.counters.Flushes++
	default:
		q.rangeFinished(r)
	}
	if r.shared != nil {
		r.unshare(int(result))
	}
	if r.lent && result > 0 {
		q.counters.LentRequests++
		q.counters.LentBytes += uint64(result)
	}
	k := r.kernel
	r.kernel, r.lent = nil, false
	r.data, r.task.Data, r.task.Pages = nil, nil, nil
	k.Complete(result)
	// The buffer goes last: its return may start another request.
	q.memory.put(r)
}
