package lu

import (
	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// ranges are the ways in which a queue deallocates and zeroes blocks: the unit's, less what it has refused.
type ranges struct {
	discard, zeroes RangeMethod
	unmapZeroes     bool // zeroing may set the UNMAP bit
}

// span is the part of a DISCARD or WRITE_ZEROES that is not done yet. One that is longer than the unit takes goes in several commands, one
// after the other.
type span struct {
	lba   scsi.LBA
	left  uint64 // logical blocks
	chunk uint64 // of those, what the command under way covers
	with  RangeMethod
	unmap bool // the blocks may be deallocated
}

// rangeRequest is a request as the handler of a range's commands.
type rangeRequest request

// isRange tells a DISCARD or WRITE_ZEROES.
func (r *request) isRange() bool {
	op := r.kernel.Op()
	return op == ublk.OpDiscard || op == ublk.OpWriteZeroes
}

// startRange begins a DISCARD or WRITE_ZEROES, which has no data of its own; what the command sends is made here.
func (q *Queue) startRange(r *request) {
	k, size := r.kernel, uint64(q.unit.LogicalBlockSize)
	n, from := uint64(k.Len()), uint64(k.Sector())*ublk.SectorSize
	if n == 0 || n%size != 0 || from%size != 0 {
		q.finish(r, -int32(unix.EINVAL))
		return
	}
	r.span = span{lba: scsi.LBA(from / size), left: n / size}
	q.chooseRange(r)
}

// chooseRange picks the command for the rest of a range, and memory for what it sends.
func (q *Queue) chooseRange(r *request) {
	s, k := &r.span, r.kernel
	switch {
	case k.Op() == ublk.OpDiscard:
		s.with, s.unmap = q.ranges.discard, true
	case k.Flags()&ublk.FlagFUA != 0: // no command has the bit; the kernel then writes zeros itself
		s.with = RangeNone
	default:
		s.with, s.unmap = q.ranges.zeroes, q.ranges.unmapZeroes && k.Flags()&ublk.FlagNoUnmap == 0
	}
	switch s.with {
	case RangeNone:
		q.finish(r, -int32(unix.EOPNOTSUPP))
		return
	case RangeUnmap:
		r.length = scsi.UnmapListLength
	default:
		r.length = int(q.unit.LogicalBlockSize)
	}
	q.place(r)
}

// fillRange makes the command for as much of the rest as the unit takes at once. Preconditions: r has its memory.
func (q *Queue) fillRange(r *request) {
	t, s := &r.task, &r.span
	t.Direction, t.Handler = iscsi.Write, (*rangeRequest)(r)
	limit := q.unit.MaxZeroes
	if r.kernel.Op() == ublk.OpDiscard {
		limit = q.unit.MaxDiscard
	}
	s.chunk = max(1, min(s.left, limit))
	n, flags := scsi.Blocks(s.chunk), scsi.WriteSameFlags(0)
	if s.unmap {
		flags = scsi.WriteSameUnmap
	}
	with := s.with
	if with == RangeWriteSame10 && !scsi.Fits10(s.lba, n) {
		with = RangeWriteSame16 // the unit has shrunk: it is to say that these blocks are not there
	}
	switch with {
	case RangeUnmap:
		scsi.PutUnmapList(r.data, s.lba, n)
		scsi.Unmap(&t.CDB, scsi.UnmapListLength)
	case RangeWriteSame16:
		clear(r.data)
		scsi.WriteSame16(&t.CDB, s.lba, n, flags)
	case RangeWriteSame10:
		clear(r.data)
		scsi.WriteSame10(&t.CDB, s.lba, n, flags)
	}
}

// TaskDone takes the end of a range's command. What of the parameter list of an UNMAP a unit leaves unread is its own business.
func (x *rangeRequest) TaskDone(t *iscsi.Task) {
	r := (*request)(x)
	if t.Outcome == iscsi.Responded && t.Status == scsi.StatusGood && (t.Residual == 0 || r.span.with == RangeUnmap) {
		r.queue.rangeGood(r)
		return
	}
	r.queue.exception(r)
}

// rangeGood goes on with the rest of a range.
func (q *Queue) rangeGood(r *request) {
	s := &r.span
	s.lba += scsi.LBA(s.chunk)
	s.left -= s.chunk
	if s.left == 0 {
		q.finish(r, 0)
		return
	}
	with := q.ranges.zeroes
	if r.kernel.Op() == ublk.OpDiscard {
		with = q.ranges.discard
	}
	if with == RangeNone {
		q.finish(r, -int32(unix.EOPNOTSUPP)) // meanwhile the unit has refused, or says that it cannot any more
		return
	}
	r.immediate, r.delayed, r.lost = 0, 0, 0 // another command
	q.start(r)
}

// rangeFinished counts a range that is done, and gives the tag back to READs and WRITEs.
func (q *Queue) rangeFinished(r *request) {
	r.task.Handler = r
	if r.kernel.Op() == ublk.OpDiscard {
		q.counters.Discards++
	} else {
		q.counters.Zeroes++
	}
}

// withdraw stops using an optional command that the unit has refused, and finds another way for the request. It returns false for a command that
// is not optional.
func (q *Queue) withdraw(r *request, sense *scsi.Sense) bool {
	why := "it does not say why"
	if sense != nil {
		why = sense.String()
	}
	switch s := &r.span; {
	case r.kernel.Op() == ublk.OpFlush && q.unit.CacheAssumed:
		// The unit never said that it has a cache, and has no command to flush one.
		q.tell(Notice{Unit: q.unit, Text: "SYNCHRONIZE CACHE is refused by a unit that reports no write cache, so that flushes have nothing to do: " + why})
		q.finish(r, 0)
		return true
	case !r.isRange():
		return false
	case r.kernel.Op() == ublk.OpDiscard:
		if q.ranges.discard == s.with {
			q.ranges.discard = RangeNone
			q.tell(Notice{Unit: q.unit, Text: s.with.String() + " is refused although the unit reports it; discard is off: " + why})
		}
	case s.unmap:
		if q.ranges.unmapZeroes {
			q.ranges.unmapZeroes = false
			q.tell(Notice{Unit: q.unit, Text: s.with.String() + " with the UNMAP bit is refused although the unit reports it; zeroing no longer deallocates: " + why})
		}
	default:
		if q.ranges.zeroes == s.with {
			q.ranges.zeroes = RangeNone
			q.tell(Notice{Unit: q.unit, Text: s.with.String() + " is refused although the unit reports it; zeros are written by the kernel from now on: " + why})
		}
	}
	q.memory.put(r)
	r.data = nil
	q.chooseRange(r)
	return true
}
