package lu

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"testing"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// thin is a unit that can deallocate and zero.
func thin(blockSize uint32, discard, zeroes RangeMethod, unmap bool) *Unit {
	u := testUnit(blockSize, 1<<20)
	u.Discard, u.MaxDiscard, u.Zeroes, u.MaxZeroes, u.ZeroesUnmap = discard, 100, zeroes, 64, unmap
	return u
}

// What goes to the target for a DISCARD and a WRITE_ZEROES, whole and in parts.
func TestRanges(t *testing.T) {
	zeros := func(n int) string { return hex.EncodeToString(make([]byte, n)) }
	for _, c := range []struct {
		name  string
		unit  *Unit
		block block
		cdbs  []string
		sent  []string
	}{
		{"discard by UNMAP", thin(512, RangeUnmap, RangeNone, false), block{op: ublk.OpDiscard, sector: 8, cover: 100 * 512},
			[]string{"42000000000000001800000000000000"}, []string{"00160010000000000000000000000008" + "0000006400000000"}},
		{"one block more than the unit takes", thin(512, RangeUnmap, RangeNone, false), block{op: ublk.OpDiscard, sector: 8, cover: 101 * 512},
			[]string{"42000000000000001800000000000000", "42000000000000001800000000000000"},
			[]string{"00160010000000000000000000000008" + "0000006400000000", "0016001000000000000000000000006c" + "0000000100000000"}},
		{"4K blocks", thin(4096, RangeUnmap, RangeNone, false), block{op: ublk.OpDiscard, sector: 16, cover: 8192},
			[]string{"42000000000000001800000000000000"}, []string{"00160010000000000000000000000002" + "0000000200000000"}},
		{"discard by WRITE SAME(16)", thin(512, RangeWriteSame16, RangeNone, false), block{op: ublk.OpDiscard, cover: 1024},
			[]string{"93080000000000000000000000020000"}, []string{zeros(512)}},
		{"discard by WRITE SAME(10)", thin(512, RangeWriteSame10, RangeNone, false), block{op: ublk.OpDiscard, sector: 1, cover: 1024},
			[]string{"41080000000100000200000000000000"}, []string{zeros(512)}},
		{"zeroes that deallocate", thin(4096, RangeNone, RangeWriteSame16, true), block{op: ublk.OpWriteZeroes, cover: 8192},
			[]string{"93080000000000000000000000020000"}, []string{zeros(4096)}},
		{"zeroes that may not deallocate", thin(512, RangeNone, RangeWriteSame16, true), block{op: ublk.OpWriteZeroes, flags: ublk.FlagNoUnmap, cover: 65 * 512},
			[]string{"93000000000000000000000000400000", "93000000000000000040000000010000"}, []string{zeros(512), zeros(512)}},
		{"zeroes of a unit that would not read zeros", thin(512, RangeNone, RangeWriteSame16, false), block{op: ublk.OpWriteZeroes, cover: 512},
			[]string{"93000000000000000000000000010000"}, []string{zeros(512)}},
		{"zeroes by WRITE SAME(10)", thin(512, RangeNone, RangeWriteSame10, false), block{op: ublk.OpWriteZeroes, cover: 512},
			[]string{"41000000000000000100000000000000"}, []string{zeros(512)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &disk{shift: 9, cdbs: [][16]byte{}}
			q, pool, _ := newTestQueue(t, c.unit, d, 4<<20)
			// Memory is used again: what a request leaves behind must not become the pattern that is written.
			if b, ok := pool.Get(4096); ok {
				copy(b.Bytes(), bytes.Repeat([]byte{0xee}, 4096))
				pool.Put(b)
			}
			q.submit(&c.block)
			if len(c.block.results) != 1 || c.block.results[0] != 0 {
				t.Errorf("results %v", c.block.results)
			}
			if len(d.cdbs) != len(c.cdbs) {
				t.Fatalf("%d commands, want %d", len(d.cdbs), len(c.cdbs))
			}
			for i, want := range c.cdbs {
				if got := hex.EncodeToString(d.cdbs[i][:]); got != want {
					t.Errorf("command %d: %s, want %s", i, got, want)
				}
				if got := hex.EncodeToString(d.sent[i]); got != c.sent[i] {
					t.Errorf("data %d: %s, want %s", i, got, c.sent[i])
				}
			}
			if n := q.Counters(); n.Discards+n.Zeroes != 1 || n.Errors != 0 || n.InFlight != 0 || pool.InUse() != 0 {
				t.Errorf("counters %+v, %d bytes in use", n, pool.InUse())
			}
			// The tag serves other operations again.
			r := &block{op: ublk.OpFlush, tag: c.block.tag}
			q.submit(r)
			if len(r.results) != 1 || r.results[0] != 0 || q.Counters().Flushes != 1 {
				t.Errorf("a flush afterwards: %v, %+v", r.results, q.Counters())
			}
		})
	}
}

// A unit that refuses what it reports: the request gets another command or EOPNOTSUPP, the next ones do not try again, and somebody is told once.
func TestRefusedRanges(t *testing.T) {
	for _, c := range []struct {
		name   string
		unit   *Unit
		op     ublk.Op
		refuse func(cdb [16]byte) bool
		result int32
		first  int // commands of the first request
		second int
		told   int
	}{
		{"UNMAP", thin(512, RangeUnmap, RangeNone, false), ublk.OpDiscard, func([16]byte) bool { return true }, -int32(unix.EOPNOTSUPP), 1, 0, 1},
		{"zeroing with the UNMAP bit", thin(512, RangeNone, RangeWriteSame16, true), ublk.OpWriteZeroes, func(c [16]byte) bool { return c[1] != 0 }, 0, 2, 1, 1},
		{"WRITE SAME", thin(512, RangeNone, RangeWriteSame16, true), ublk.OpWriteZeroes, func([16]byte) bool { return true }, -int32(unix.EOPNOTSUPP), 2, 0, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &disk{shift: 9}
			d.answer = func(_ int, task *iscsi.Task) bool {
				if c.refuse(task.CDB) {
					return check(task, scsi.KeyIllegalRequest, 0x20, 0)
				}
				return false
			}
			q, pool, _ := newTestQueue(t, c.unit, d, 4<<20)
			var told []Notice
			q.notice = func(n Notice) { told = append(told, n) }
			for i, want := range []int{c.first, c.second} {
				d.tasks = nil
				b := &block{op: c.op, cover: 512}
				q.submit(b)
				if len(b.results) != 1 || b.results[0] != c.result || len(d.tasks) != want {
					t.Errorf("request %d: results %v with %d commands, want %d with %d", i, b.results, len(d.tasks), c.result, want)
				}
			}
			if len(told) != c.told || told[0].Unit != c.unit || told[0].Text == "" {
				t.Errorf("told %+v", told)
			}
			// The same description again changes nothing, another one does.
			q.Renew(c.unit)
			d.tasks = nil
			q.submit(&block{op: c.op, cover: 512})
			if len(d.tasks) != c.second {
				t.Errorf("%d commands after the unit was described again", len(d.tasks))
			}
			if n := q.Counters(); pool.InUse() != 0 || n.Errors != 0 { // the kernel writes zeros itself, or leaves a discard
				t.Errorf("%d bytes in use, %d errors", pool.InUse(), n.Errors)
			}
		})
	}
}

// Ranges fail, are tried again and held as other requests are.
func TestRangeFailures(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer func(n int, t *iscsi.Task) bool
		result int32
		tries  int
	}{
		{"out of space", func(_ int, t *iscsi.Task) bool { return check(t, scsi.KeyDataProtect, 0x27, 7) }, -int32(unix.ENOSPC), 1},
		{"busy at the second part", func(n int, t *iscsi.Task) bool {
			t.Status = scsi.StatusGood
			if n == 2 {
				t.Status = scsi.StatusBusy
			}
			return n == 2
		}, 0, 3},
		{"recovered error", func(_ int, t *iscsi.Task) bool { return check(t, scsi.KeyRecoveredError, 0x17, 0) }, 0, 2},
		{"out of range", func(_ int, t *iscsi.Task) bool { return check(t, scsi.KeyIllegalRequest, 0x21, 0) }, -int32(unix.EREMOTEIO), 1},
		{"part of the block was not taken", func(_ int, t *iscsi.Task) bool { t.Residual = 100; return true }, -int32(unix.EIO), 1 + maxImmediate},
	} {
		d := &disk{shift: 9, answer: c.answer}
		q, pool, _ := newTestQueue(t, thin(512, RangeNone, RangeWriteSame16, false), d, 4<<20)
		b := &block{op: ublk.OpWriteZeroes, cover: 128 * 512}
		q.submit(b)
		if len(b.results) != 1 || b.results[0] != c.result || len(d.tasks) != c.tries || pool.InUse() != 0 {
			t.Errorf("%s: results %v after %d commands, want %d after %d; %d bytes in use", c.name, b.results, len(d.tasks), c.result, c.tries, pool.InUse())
		}
	}
}

// A unit that has shrunk below what short commands reach keeps its block device: what is beyond its end may not be taken for a block at its beginning.
func TestShrunk(t *testing.T) {
	u := thin(512, RangeNone, RangeWriteSame10, false)
	u.Blocks = 1 << 33
	d := &disk{shift: 9, answer: func(_ int, t *iscsi.Task) bool { return check(t, scsi.KeyIllegalRequest, 0x21, 0) }}
	q, _, _ := newTestQueue(t, u, d, 4<<20)
	small := thin(512, RangeNone, RangeWriteSame10, false)
	small.Blocks = 1 << 31
	q.Renew(small)
	const beyond = 1<<32 + 5
	for _, b := range []*block{
		{op: ublk.OpWrite, sector: beyond, data: make([]byte, 4096)}, {op: ublk.OpRead, sector: beyond, data: make([]byte, 4096)},
		{op: ublk.OpWrite, sector: 1<<32 - 4, data: make([]byte, 4096)}, {op: ublk.OpWriteZeroes, sector: beyond, cover: 4096},
	} {
		q.submit(b)
		if len(b.results) != 1 || b.results[0] >= 0 {
			t.Errorf("%v at %d: results %v", b.op, b.sector, b.results)
		}
	}
	for _, task := range d.tasks {
		if lba := binary.BigEndian.Uint64(task.CDB[2:]); task.CDB[0]&0xe0 != 0x80 || lba < 1<<32-4 {
			t.Errorf("command % x", task.CDB)
		}
	}
	if len(d.tasks) != 4 {
		t.Errorf("%d commands", len(d.tasks))
	}
}

// A unit that says in the middle of a range that it cannot do this any more.
func TestRangeEndsEarly(t *testing.T) {
	d := &disk{shift: 9}
	q, pool, _ := newTestQueue(t, thin(512, RangeUnmap, RangeNone, false), d, 4<<20)
	d.answer = func(int, *iscsi.Task) bool {
		q.Renew(testUnit(512, 1<<20))
		return true
	}
	b := &block{op: ublk.OpDiscard, cover: 500 * 512}
	q.submit(b)
	if len(b.results) != 1 || b.results[0] != -int32(unix.EOPNOTSUPP) || len(d.tasks) != 1 || pool.InUse() != 0 {
		t.Errorf("results %v after %d commands, %d bytes in use", b.results, len(d.tasks), pool.InUse())
	}
}

// A unit that never said it has a cache may refuse to flush it.
func TestFlushOfNoCache(t *testing.T) {
	for _, assumed := range []bool{true, false} {
		u := testUnit(512, 2048)
		u.WriteCache, u.CacheAssumed = true, assumed
		d := &disk{shift: 9, answer: func(_ int, t *iscsi.Task) bool { return check(t, scsi.KeyIllegalRequest, 0x20, 0) }}
		q, _, _ := newTestQueue(t, u, d, 4<<20)
		b := &block{op: ublk.OpFlush}
		q.submit(b)
		want := int32(0)
		if !assumed {
			want = -int32(unix.EREMOTEIO)
		}
		if len(b.results) != 1 || b.results[0] != want {
			t.Errorf("assumed %v: results %v", assumed, b.results)
		}
	}
}

// While a unit may be another one its requests wait; then they go on, or fail.
func TestDoubt(t *testing.T) {
	for _, same := range []bool{true, false} {
		d := &disk{content: make([]byte, 1<<20), shift: 9}
		d.answer = func(n int, t *iscsi.Task) bool { return n == 1 && check(t, scsi.KeyUnitAttention, 0x3f, 5) }
		q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
		var told []Notice
		q.notice = func(n Notice) { told = append(told, n) }
		a := &block{op: ublk.OpRead, tag: 1, data: make([]byte, 512)}
		b := &block{op: ublk.OpWrite, tag: 2, data: make([]byte, 512)}
		q.submit(a)
		q.submit(b)
		if len(a.results)+len(b.results) != 0 || len(d.tasks) != 1 {
			t.Fatalf("results %v and %v after %d commands", a.results, b.results, len(d.tasks))
		}
		if len(told) != 1 || told[0].Attention != scsi.AttentionInquiryChanged || !told[0].Parked {
			t.Errorf("told %+v", told)
		}
		want := int32(512)
		if same {
			q.Proceed()
		} else {
			q.Condemn()
			want = -int32(unix.ENODEV)
		}
		if len(a.results) != 1 || a.results[0] != want || len(b.results) != 1 || b.results[0] != want || pool.InUse() != 0 {
			t.Errorf("same %v: results %v and %v, %d bytes in use", same, a.results, b.results, pool.InUse())
		}
		if !same && len(d.tasks) != 1 {
			t.Error("a request reached another unit")
		}
		if got := Hopeless(&q.requests[1].task); got == same {
			t.Errorf("Condemned is %v", got)
		}
		q.Proceed() // the old unit is back
		c := &block{op: ublk.OpRead, data: make([]byte, 512)}
		q.submit(c)
		if len(c.results) != 1 || c.results[0] != 512 {
			t.Errorf("afterwards: results %v", c.results)
		}
	}
}

func TestNoAllocationForRanges(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9, tasks: make([]*iscsi.Task, 0, 64), keep: true}
	q, _, _ := newTestQueue(t, thin(512, RangeUnmap, RangeWriteSame16, true), d, 4<<20)
	b := &block{op: ublk.OpDiscard, cover: 4096, results: make([]int32, 0, 64)}
	if n := testing.AllocsPerRun(1000, func() {
		for _, op := range []ublk.Op{ublk.OpDiscard, ublk.OpWriteZeroes} {
			d.tasks, b.results, b.op = d.tasks[:0], b.results[:0], op
			q.submit(b)
			task := d.tasks[0]
			task.Outcome, task.Status, task.Residual = iscsi.Responded, scsi.StatusGood, 0
			task.Handler.TaskDone(task)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
