package lu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// block is a block request without a kernel.
type block struct {
	op      ublk.Op
	flags   ublk.Flags
	tag     uint16
	sector  ublk.Sector
	data    []byte // the request's pages
	cover   int    // bytes of a DISCARD or WRITE_ZEROES
	copyErr error
	shared  int // index of the buffer that data lies in, from 1; 0 for none
	offset  int64
	copies  int
	later   bool // copies end by Copied

	lendable bool
	lends    int
	results  []int32
}

func (b *block) Shared() (int, int64, bool) { return b.shared - 1, b.offset, b.shared > 0 }

func (b *block) Op() ublk.Op         { return b.op }
func (b *block) Flags() ublk.Flags   { return b.flags }
func (b *block) Tag() uint16         { return b.tag }
func (b *block) Sector() ublk.Sector { return b.sector }
func (b *block) Len() int            { return max(len(b.data), b.cover) }
func (b *block) Complete(res int32)  { b.results = append(b.results, res) }
func (b *block) Lend() bool {
	b.lends++
	return b.lendable
}
func (b *block) Fixed() (uint16, uintptr) { return 0, 0 }
func (b *block) CopyOut(src []byte, off int) error {
	copy(b.data[off:], src)
	return nil
}
func (b *block) Gather(dst []byte) (bool, error) {
	b.copies++
	copy(dst, b.data)
	return !b.later, b.copyErr
}
func (b *block) Scatter(src []byte) (bool, error) {
	b.copies++
	copy(b.data, src)
	return !b.later, b.copyErr
}

// disk is a path to a unit in memory, scripted to fail.
type disk struct {
	content []byte
	shift   uint
	tasks   []*iscsi.Task // in the order they came
	answer  func(n int, t *iscsi.Task) bool
	keep    bool // do not answer
	reaches bool // tasks may have Pages
	hold    bool
	held    []*iscsi.Task
	sent    [][]byte // data of commands for ranges
	cdbs    [][16]byte
}

func (d *disk) Submit(t *iscsi.Task) {
	d.tasks = append(d.tasks, t)
	if d.cdbs != nil {
		d.cdbs = append(d.cdbs, t.CDB)
	}
	if !d.keep {
		d.finish(t)
	}
}

func (d *disk) Reaches(iscsi.Direction) bool { return d.reaches }

func (d *disk) Hold(t *iscsi.Task) bool {
	if d.hold {
		d.held = append(d.held, t)
	}
	return d.hold
}

func (d *disk) finish(t *iscsi.Task) {
	t.Outcome, t.Status, t.SenseLen, t.Residual, t.Overflow = iscsi.Responded, scsi.StatusGood, 0, 0, false
	if d.answer != nil && d.answer(len(d.tasks), t) {
		t.Handler.TaskDone(t)
		return
	}
	var lba, blocks uint64
	switch t.CDB[0] {
	case scsi.OpRead10, scsi.OpWrite10:
		lba, blocks = uint64(binary.BigEndian.Uint32(t.CDB[2:])), uint64(binary.BigEndian.Uint16(t.CDB[7:]))
	case scsi.OpRead16, scsi.OpWrite16:
		lba, blocks = binary.BigEndian.Uint64(t.CDB[2:]), uint64(binary.BigEndian.Uint32(t.CDB[10:]))
	}
	data := t.Data
	if t.Pages != nil {
		data = t.Pages.(*block).data
	}
	if t.CDB[0] == scsi.OpUnmap || t.CDB[0] == scsi.OpWriteSame16 || t.CDB[0] == scsi.OpWriteSame10 {
		d.sent = append(d.sent, append([]byte(nil), t.Data...))
		t.Handler.TaskDone(t)
		return
	}
	if blocks<<d.shift != uint64(t.Length()) {
		panic(fmt.Sprintf("command for %d blocks has %d bytes of data", blocks, t.Length()))
	}
	if len(data) > 0 && lba<<d.shift < uint64(len(d.content)) {
		at := d.content[lba<<d.shift:]
		if t.Direction == iscsi.Read {
			copy(data, at)
		} else {
			copy(at, data)
		}
	}
	t.Handler.TaskDone(t)
}

// check makes the task fail with a status and fixed-format sense data.
func check(t *iscsi.Task, key scsi.SenseKey, asc, ascq uint8) bool {
	t.Status = scsi.StatusCheckCondition
	sense := []byte{0x70, 0, byte(key), 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0}
	t.SenseLen = copy(t.Sense[:], sense)
	return true
}

// instant is a clock on which every pause is over at once.
type instant struct{ pauses int }

func (c *instant) After(_ time.Duration, w Waker, token uint32) {
	c.pauses++
	w.Wake(token)
}

func testUnit(blockSize uint32, blocks uint64) *Unit {
	return &Unit{LUN: scsi.NewLUN(3), Usable: true, LogicalBlockSize: blockSize, PhysicalBlockSize: blockSize, Blocks: blocks, MaxTransfer: 512 << 10}
}

func newTestQueue(t *testing.T, u *Unit, d *disk, poolSize int) (*Queue, *mempool.Pool, *instant) {
	t.Helper()
	pool, err := mempool.New(poolSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	c := &instant{}
	return NewQueue(Config{Unit: u, Depth: 16, Path: d, Memory: NewMemory(pool, nil), Clock: c}), pool, c
}

func TestReadWriteFlush(t *testing.T) {
	for _, c := range []struct {
		name      string
		blockSize uint32
		shift     uint
		blocks    uint64
		read      uint8
		write     uint8
		flush     uint8
	}{
		{"512", 512, 9, 1 << 20, scsi.OpRead10, scsi.OpWrite10, scsi.OpSynchronizeCache10},
		{"4096", 4096, 12, 1 << 20, scsi.OpRead10, scsi.OpWrite10, scsi.OpSynchronizeCache10},
		{"beyond 2 TiB", 512, 9, 1<<32 + 1, scsi.OpRead16, scsi.OpWrite16, scsi.OpSynchronizeCache16},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &disk{content: make([]byte, 8<<20), shift: c.shift}
			q, pool, _ := newTestQueue(t, testUnit(c.blockSize, c.blocks), d, 4<<20)
			data := bytes.Repeat([]byte("0123456789abcdef"), 4096/16*3)
			w := &block{op: ublk.OpWrite, flags: ublk.FlagFUA, tag: 5, sector: 64, data: data}
			q.submit(w)
			r := &block{op: ublk.OpRead, tag: 6, sector: 64, data: make([]byte, len(data))}
			q.submit(r)
			f := &block{op: ublk.OpFlush, tag: 7}
			q.submit(f)
			for _, b := range []*block{w, r, f} {
				if len(b.results) != 1 || b.results[0] != int32(len(b.data)) {
					t.Errorf("%v: results %v", b.op, b.results)
				}
			}
			if !bytes.Equal(r.data, data) || !bytes.Equal(d.content[64*512:][:len(data)], data) {
				t.Error("data differ")
			}
			got := []uint8{d.tasks[0].CDB[0], d.tasks[1].CDB[0], d.tasks[2].CDB[0]}
			if want := []uint8{c.write, c.read, c.flush}; !bytes.Equal(got, want) {
				t.Errorf("commands %x, want %x", got, want)
			}
			if d.tasks[0].CDB[1]&0x08 == 0 || d.tasks[1].CDB[1]&0x08 != 0 {
				t.Error("FUA belongs to the write and not to the read")
			}
			if pool.InUse() != 0 {
				t.Errorf("%d bytes of buffers are not returned", pool.InUse())
			}
			want := Counters{Reads: 1, Writes: 1, Flushes: 1, ReadBytes: uint64(len(data)), WriteBytes: uint64(len(data))}
			if got := q.Counters(); got != want {
				t.Errorf("counters %+v, want %+v", got, want)
			}
		})
	}
}

// Each way in which a command may end badly, and what the kernel is told.
func TestFailures(t *testing.T) {
	always := func(f func(t *iscsi.Task)) func(int, *iscsi.Task) bool {
		return func(_ int, t *iscsi.Task) bool { f(t); return true }
	}
	for _, c := range []struct {
		name   string
		answer func(n int, t *iscsi.Task) bool
		result int32 // of a read of 4096 bytes
		tries  int
		pauses int
	}{
		{"unit attention, then good", func(n int, t *iscsi.Task) bool {
			return n == 1 && check(t, scsi.KeyUnitAttention, 0x29, 0)
		}, 4096, 2, 0},
		{"unit attention for ever", always(func(t *iscsi.Task) { check(t, scsi.KeyUnitAttention, 0x29, 0) }),
			-int32(unix.EIO), 1 + maxImmediate, 0},
		{"busy, then good", func(n int, t *iscsi.Task) bool {
			t.Status = scsi.StatusBusy
			return n < 4
		}, 4096, 4, 3},
		{"task set full for ever", always(func(t *iscsi.Task) { t.Status = scsi.StatusTaskSetFull }),
			-int32(unix.EBUSY), 1 + maxDelayed, maxDelayed},
		{"aborted, then good", func(n int, t *iscsi.Task) bool {
			if n == 1 {
				t.Outcome = iscsi.Aborted
			}
			return n == 1
		}, 4096, 2, 0},
		{"aborted for ever", always(func(t *iscsi.Task) { t.Outcome = iscsi.Aborted }), -int32(unix.ETIMEDOUT), 1 + maxImmediate, 0},
		{"reservation conflict", always(func(t *iscsi.Task) { t.Status = scsi.StatusReservationConflict }), -int32(unix.EBADE), 1, 0},
		{"medium error", always(func(t *iscsi.Task) { check(t, scsi.KeyMediumError, 0x11, 0) }), -int32(unix.ENODATA), 1, 0},
		{"unit gone", always(func(t *iscsi.Task) { check(t, scsi.KeyIllegalRequest, 0x25, 0) }), -int32(unix.ENODEV), 1, 0},
		{"check condition without sense", always(func(t *iscsi.Task) { t.Status = scsi.StatusCheckCondition }), -int32(unix.EIO), 1, 0},
		{"short read with GOOD, then whole", func(n int, t *iscsi.Task) bool {
			t.Residual = 512
			return n == 1
		}, 4096, 2, 0},
		{"short read with GOOD for ever", always(func(t *iscsi.Task) { t.Residual = 512 }), -int32(unix.EIO), 1 + maxImmediate, 0},
		{"recovered error", func(_ int, t *iscsi.Task) bool {
			copy(t.Data, "recovered")
			return check(t, scsi.KeyRecoveredError, 0x17, 0)
		}, 4096, 1, 0},
		{"target failure", always(func(t *iscsi.Task) { t.Outcome = iscsi.TargetFailed }), -int32(unix.EREMOTEIO), 1 + maxImmediate, 0},
		{"session lost for good", always(func(t *iscsi.Task) { t.Outcome = iscsi.Lost }), -int32(unix.ENOLINK), 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &disk{content: make([]byte, 1<<20), shift: 9}
			d.answer = func(n int, task *iscsi.Task) bool {
				task.Status = scsi.StatusGood
				if c.answer(n, task) {
					return true
				}
				task.Status, task.Residual = scsi.StatusGood, 0
				return false
			}
			q, pool, clock := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
			b := &block{op: ublk.OpRead, data: make([]byte, 4096)}
			q.submit(b)
			if len(b.results) != 1 || b.results[0] != c.result {
				t.Errorf("results %v, want %d", b.results, c.result)
			}
			if len(d.tasks) != c.tries || clock.pauses != c.pauses {
				t.Errorf("%d tries and %d pauses, want %d and %d", len(d.tasks), clock.pauses, c.tries, c.pauses)
			}
			if pool.InUse() != 0 || q.Counters().InFlight != 0 {
				t.Errorf("left behind: %d bytes, %d in flight", pool.InUse(), q.Counters().InFlight)
			}
		})
	}
}

// A request that a lost session hands back is held with its data, and sent again by the next session.
func TestLostSessionIsHeld(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9, hold: true}
	d.answer = func(n int, t *iscsi.Task) bool {
		if n == 1 {
			t.Outcome = iscsi.Lost
		}
		return n == 1
	}
	q, _, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
	data := bytes.Repeat([]byte{0xa5}, 8192)
	b := &block{op: ublk.OpWrite, sector: 8, data: data}
	q.submit(b)
	if len(b.results) != 0 || len(d.held) != 1 {
		t.Fatalf("results %v, %d held", b.results, len(d.held))
	}
	copy(data, "the pages may not be looked at again: a retry must send what was sent")
	d.Submit(d.held[0])
	if len(b.results) != 1 || b.results[0] != 8192 {
		t.Fatalf("results %v", b.results)
	}
	if !bytes.Equal(d.content[8*512:][:8192], bytes.Repeat([]byte{0xa5}, 8192)) {
		t.Error("the repetition wrote something else")
	}
}

// An aborted queue fails what waits and what comes, and nothing lets it go on.
func TestAbort(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9}
	q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
	waits, comes := &block{op: ublk.OpRead, data: make([]byte, 4096)}, &block{op: ublk.OpWrite, tag: 1, data: make([]byte, 4096)}
	q.Park()
	q.submit(waits)
	q.Abort()
	q.Proceed()
	q.submit(comes)
	for _, b := range []*block{waits, comes} {
		if want := -int32(unix.EIO); len(b.results) != 1 || b.results[0] != want {
			t.Errorf("results %v, want %d", b.results, want)
		}
	}
	if len(d.tasks) != 0 || pool.InUse() != 0 || q.Counters().InFlight != 0 {
		t.Errorf("%d commands; left behind: %d bytes, %d in flight", len(d.tasks), pool.InUse(), q.Counters().InFlight)
	}
}

// A write that was under way when its session was lost, of a queue that is condemned: it fails when the session is back, and nothing of it can come late.
func TestCondemnedLate(t *testing.T) {
	for _, lost := range []bool{false, true} {
		d := &disk{content: make([]byte, 1<<20), shift: 9, hold: true}
		q, _, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
		var under *iscsi.Task
		d.answer = func(_ int, t *iscsi.Task) bool {
			under, t.Outcome = t, iscsi.NotSent
			return true
		}
		b := &block{op: ublk.OpWrite, data: make([]byte, 512)}
		if lost {
			d.answer = func(_ int, t *iscsi.Task) bool {
				q.Condemn()
				under, t.Outcome = t, iscsi.Lost
				return true
			}
		}
		q.submit(b)
		if lost {
			if len(b.results) != 0 || len(d.held) != 1 {
				t.Fatalf("results %v, %d held", b.results, len(d.held))
			}
			d.hold, under.Outcome = false, iscsi.NotSent
			under.Handler.TaskDone(under)
		} else {
			q.Condemn()
			if len(b.results) != 0 || len(d.held) != 1 {
				t.Fatalf("results %v, %d held", b.results, len(d.held))
			}
			under.Outcome = iscsi.NotSent
			under.Handler.TaskDone(under)
		}
		if len(b.results) != 1 || b.results[0] != -int32(unix.ENODEV) {
			t.Errorf("lost %v: results %v", lost, b.results)
		}
	}
}

// A layer above that has another way hears of a lost session at once, but not of a write that may be at work at the target.
func TestFailfast(t *testing.T) {
	const all = ublk.FlagFailfastDev | ublk.FlagFailfastTransport | ublk.FlagFailfastDriver
	for _, c := range []struct {
		op      ublk.Op
		flags   ublk.Flags
		outcome iscsi.Outcome
		fails   bool
	}{
		{ublk.OpRead, 0, iscsi.Lost, false},
		{ublk.OpRead, ublk.FlagFailfastTransport, iscsi.Lost, true},
		{ublk.OpRead, ublk.FlagFailfastTransport, iscsi.NotSent, true},
		{ublk.OpRead, ublk.FlagFailfastDev, iscsi.Lost, false},
		{ublk.OpRead, all, iscsi.NotSent, false}, // read-ahead
		{ublk.OpWrite, ublk.FlagFailfastTransport, iscsi.NotSent, true},
		{ublk.OpWrite, ublk.FlagFailfastTransport | ublk.FlagFailfastDev, iscsi.Lost, false},
		{ublk.OpFlush, ublk.FlagFailfastTransport, iscsi.Lost, true},
	} {
		d := &disk{content: make([]byte, 1<<20), shift: 9, hold: true}
		q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
		var task *iscsi.Task
		d.answer = func(_ int, t *iscsi.Task) bool {
			task, t.Outcome = t, c.outcome
			return true
		}
		b := &block{op: c.op, flags: c.flags}
		if c.op != ublk.OpFlush {
			b.data = make([]byte, 512)
		}
		q.submit(b)
		if c.fails {
			if len(b.results) != 1 || b.results[0] != -int32(unix.ENOLINK) || pool.InUse() != 0 {
				t.Errorf("%v, flags %#x, outcome %d: results %v", c.op, c.flags, c.outcome, b.results)
			}
			continue
		}
		if len(b.results) != 0 || len(d.held) != 1 || FailsFast(task) {
			t.Errorf("%v, flags %#x, outcome %d: results %v, %d held", c.op, c.flags, c.outcome, b.results, len(d.held))
		}
	}
}

// A command that costs the session each time is given up.
func TestPoison(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9, hold: true}
	d.answer = func(_ int, t *iscsi.Task) bool {
		t.Outcome = iscsi.Lost
		return true
	}
	q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
	b := &block{op: ublk.OpRead, data: make([]byte, 512)}
	q.submit(b)
	for i := 0; i < len(d.held); i++ {
		if !Hopeless(d.held[i]) {
			d.Submit(d.held[i])
			continue
		}
		if len(b.results) != 0 {
			t.Error("the command fails before its last session is over")
		}
		d.hold = false // there is a session again
		d.held[i].Outcome = iscsi.NotSent
		d.held[i].Handler.TaskDone(d.held[i])
	}
	if len(b.results) != 1 || b.results[0] != -int32(unix.EIO) || len(d.tasks) != 1+maxLost || pool.InUse() != 0 {
		t.Errorf("results %v after %d tries, %d bytes in use", b.results, len(d.tasks), pool.InUse())
	}
}

func TestRefusedRequests(t *testing.T) {
	d := &disk{content: make([]byte, 4<<20), shift: 9}
	q, pool, _ := newTestQueue(t, testUnit(512, 8192), d, 4<<20)
	for _, c := range []struct {
		b    *block
		want unix.Errno
	}{
		{&block{op: ublk.OpDiscard, cover: 4096}, unix.EOPNOTSUPP},
		{&block{op: ublk.OpWriteZeroes, cover: 4096}, unix.EOPNOTSUPP},
		{&block{op: ublk.OpDiscard}, unix.EINVAL},
		{&block{op: 17}, unix.EOPNOTSUPP},
		{&block{op: ublk.OpRead, data: make([]byte, 1<<20)}, unix.EINVAL},
		{&block{op: ublk.OpRead}, unix.EINVAL},
		{&block{op: ublk.OpRead, data: make([]byte, 512), copyErr: errors.New("gone")}, unix.EIO},
		{&block{op: ublk.OpWrite, data: make([]byte, 512), copyErr: errors.New("gone")}, unix.EIO},
	} {
		q.submit(c.b)
		if len(c.b.results) != 1 || c.b.results[0] != -int32(c.want) {
			t.Errorf("%v of %d bytes: results %v, want %d", c.b.op, len(c.b.data), c.b.results, -int32(c.want))
		}
	}
	if pool.InUse() != 0 {
		t.Errorf("%d bytes of buffers are not returned", pool.InUse())
	}
}

// With the pool used up, requests wait in order and are served as buffers come back.
func TestBuffersRunOut(t *testing.T) {
	d := &disk{content: make([]byte, 8<<20), shift: 9, keep: true}
	q, pool, _ := newTestQueue(t, testUnit(512, 1<<20), d, 1<<20)
	var blocks []*block
	for i := range 5 {
		b := &block{op: ublk.OpRead, tag: uint16(i), sector: ublk.Sector(1024 * i), data: make([]byte, 512<<10)}
		blocks = append(blocks, b)
		q.submit(b)
	}
	if len(d.tasks) != 2 {
		t.Fatalf("%d commands under way with room for 2", len(d.tasks))
	}
	for i := 0; i < len(d.tasks); i++ {
		d.finish(d.tasks[i])
	}
	for i, b := range blocks {
		if len(b.results) != 1 || b.results[0] != 512<<10 {
			t.Errorf("request %d: results %v", i, b.results)
		}
	}
	if pool.InUse() != 0 || q.memory.Waits() != 3 {
		t.Errorf("%d bytes in use, %d waits", pool.InUse(), q.memory.Waits())
	}
}

// A memory that may grow asks once, and serves those that wait when it has grown.
func TestMemoryGrows(t *testing.T) {
	d := &disk{content: make([]byte, 8<<20), shift: 9, keep: true}
	q, pool, _ := newTestQueue(t, testUnit(512, 1<<20), d, 1<<20)
	asked, grant := 0, true
	q.memory = NewMemory(pool, func() bool { asked++; return grant })
	submit := func(tag uint16) {
		q.submit(&block{op: ublk.OpRead, tag: tag, sector: ublk.Sector(1024 * int(tag)), data: make([]byte, 512<<10)})
	}
	for tag := range uint16(5) {
		submit(tag)
	}
	if len(d.tasks) != 2 || asked != 1 {
		t.Fatalf("%d commands, asked %d times", len(d.tasks), asked)
	}
	more, err := mempool.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	q.memory.Add(more)
	if len(d.tasks) != 4 || asked != 2 || d.tasks[2].Region != more.Region().ID {
		t.Fatalf("%d commands, asked %d times", len(d.tasks), asked)
	}
	q.memory.Add(nil) // refused
	grant = false
	submit(5)
	for i := 0; i < len(d.tasks); i++ {
		d.finish(d.tasks[i])
	}
	if len(d.tasks) != 6 || pool.InUse() != 0 || more.InUse() != 0 {
		t.Errorf("%d commands, %d and %d bytes in use", len(d.tasks), pool.InUse(), more.InUse())
	}
	if err := more.Close(); err != nil {
		t.Error(err)
	}
}

func TestNoAllocation(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9, tasks: make([]*iscsi.Task, 0, 1<<16)}
	q, _, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
	b := &block{op: ublk.OpWrite, data: make([]byte, 4096), results: make([]int32, 0, 1<<16)}
	if n := testing.AllocsPerRun(1000, func() {
		d.tasks, b.results = d.tasks[:0], b.results[:0]
		b.op = ublk.OpWrite
		q.submit(b)
		b.op = ublk.OpRead
		q.submit(b)
	}); n != 0 {
		t.Errorf("%v allocations per write and read", n)
	}
}

// Copies that end later: the command leaves after the data has come, the request completes after the data has gone, and a buffer is not given
// to somebody else before.
func TestCopiesThatEndLater(t *testing.T) {
	for _, c := range []struct {
		op  ublk.Op
		err error
	}{{ublk.OpRead, nil}, {ublk.OpWrite, nil}, {ublk.OpRead, errors.New("gone")}, {ublk.OpWrite, errors.New("gone")}} {
		d := &disk{content: make([]byte, 1<<20), shift: 9}
		q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
		b := &block{op: c.op, data: make([]byte, 4096), later: true}
		q.submit(b)
		sent := 0
		if c.op == ublk.OpRead {
			sent = 1
		}
		if len(d.tasks) != sent || len(b.results) != 0 || pool.InUse() == 0 {
			t.Errorf("%v before the copy: %d commands, results %v, %d bytes in use", c.op, len(d.tasks), b.results, pool.InUse())
		}
		q.copied(&q.requests[b.tag], c.err)
		want := int32(4096)
		if c.err != nil {
			want = -int32(unix.EIO)
		} else {
			sent = 1
		}
		if len(d.tasks) != sent || len(b.results) != 1 || b.results[0] != want || pool.InUse() != 0 {
			t.Errorf("%v after the copy: %d commands, results %v, %d bytes in use", c.op, len(d.tasks), b.results, pool.InUse())
		}
	}
}
