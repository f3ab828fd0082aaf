package dataplane

import (
	"errors"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// A command that the target does not answer is given up step by step, each when the one before has no answer in time:
//
//	request timeout ──> ABORT TASK ───────5 s──────> LOGICAL UNIT RESET ──────10 s──────> the session ends, and is logged in to again
//	                        │ confirmed                   │ confirmed                         │ same ISID: the target's old tasks end
//	                        v                             v                                   v
//	                    lu sends it again, a few times, or fails it with ETIMEDOUT        as after any lost session
//
// A task is handed back, and its memory used again, only when the target has confirmed that it is done with it, or when the connection is gone and
// the adapter lets nothing in any more. A response that comes after the confirmation belongs to a tag that is not outstanding, and ends the session.
//
// No clock is read and nothing is written per request: every few seconds the slots of a session are looked at, and the CmdSN of a command that
// was there the last time tells that it is still the same one. So a command is given up between one request timeout and one
// and an eighth; one that comes to an idle session up to a ping interval later.

// patience is how long the target may take to confirm, and how long it is left alone.
type patience struct {
	back  time.Duration // before a session returns to a preferred route, the first time
	move  time.Duration // at a portal at least, when all are shut
	abort time.Duration // ABORT TASK
	reset time.Duration // LOGICAL UNIT RESET, ABORT TASK SET
	look  time.Duration // between two looks at its units, unless one is urgent
	told  time.Duration // to tell of each command that it was ended by the reset of another session, if it does tell
}

var defaultPatience = patience{back: firstReturn, move: movePause, look: lookPause, abort: 5 * time.Second, reset: 10 * time.Second, told: time.Second}

// flushFactor is how much longer a cache flush may take than other commands, as in the kernel (drivers/scsi/sd.h, SD_FLUSH_TIMEOUT_MULTIPLIER).
const flushFactor = 2

// How often the slots are looked at: eight times in a request timeout, within bounds.
const (
	shortestLook = 50 * time.Millisecond
	longestLook  = 5 * time.Second
)

// escalations count what was done about commands without an answer, over all sessions of a path.
type escalations struct {
	aborts, resets, drops uint64
}

// deadline looks after the commands of one session, on its reactor. It takes the session's place among those that are ticked.
type deadline struct {
	*iscsi.Session
	path    *path
	timeout time.Duration // of a request; 0 for none
	patience
	marks   []mark    // by slot
	look    time.Time // when to look at the slots next
	stalled time.Time // since when nothing goes although nothing is outstanding; zero if it does
	step    *step     // under way, nil for none
	sweep   time.Time // when to look for commands that were wiped out; zero for never

	overdue *iscsi.Task // what scan has found last, with its slot's mark
	worst   time.Time
	visit   func(slot int, t *iscsi.Task) // scan, made once
	now     time.Time                     // of the scan
}

// mark says since when a slot was seen with the same command.
type mark struct {
	since   time.Time
	cmdSN   uint32
	used    bool
	givenUp bool // whoever waited for it does not any more
	wiped   bool // another session has had the unit reset meanwhile
}

// step is one function of task management under way.
type step struct {
	function pdu.TaskFunction
	task     *iscsi.Task // that is overdue; nil if the step is not about one
	cmdSN    uint32
	lun      scsi.LUN
	since    time.Time
}

// newDeadline makes the keeper of a session.
func newDeadline(p *path, s *iscsi.Session, timeout time.Duration) *deadline {
	d := &deadline{Session: s, path: p, timeout: timeout, patience: p.group.plane.patience, marks: make([]mark, s.Slots())}
	d.visit = d.scan
	return d
}

// Tick lets time pass for the session, and for its commands.
func (d *deadline) Tick(now time.Time) time.Time {
	next := d.Session.Tick(now)
	if d.State() != iscsi.StateLoggedIn {
		return next
	}
	mine := d.tick(now)
	if next.IsZero() || !mine.IsZero() && mine.Before(next) {
		return mine
	}
	return next
}

// interval is the time between two looks.
func (d *deadline) interval() time.Duration { return min(max(d.timeout/8, shortestLook), longestLook) }

// tick does what is due, and returns when to be called next; the zero time for never.
func (d *deadline) tick(now time.Time) time.Time {
	if d.step != nil {
		if limit := d.limit(d.step); now.Sub(d.step.since) >= limit {
			d.escalate(now, fmt.Errorf("%w: no answer to %v in %v", iscsi.ErrTimeout, d.step.function, limit))
		}
	}
	if d.State() != iscsi.StateLoggedIn {
		return time.Time{}
	}
	if !d.sweep.IsZero() && d.step == nil && !now.Before(d.sweep) {
		d.sweepUp(now)
	}
	if !now.Before(d.look) {
		d.look = now.Add(d.interval())
		d.check(now)
	}
	next := d.look
	ping := api.SecondsOr(d.path.group.request.Settings.NoopOutInterval, pingInterval)
	if d.step == nil && (d.timeout == 0 || ping > 0 && d.timeout > 4*ping && d.InFlight() == 0 && !d.Stalled()) {
		next = time.Time{} // an idle session sleeps: the tick for the next ping finds the command that comes
	}
	if d.step != nil {
		if end := d.step.since.Add(d.limit(d.step)); end.Before(next) {
			next = end
		}
	} else if !d.sweep.IsZero() && (next.IsZero() || d.sweep.Before(next)) {
		next = d.sweep
	}
	return next
}

// limit is how long a step may take.
func (d *deadline) limit(s *step) time.Duration {
	if s.function == pdu.AbortTask {
		return d.patience.abort
	}
	return d.patience.reset
}

// check looks at every slot, and begins with the command that is overdue the longest.
func (d *deadline) check(now time.Time) {
	d.overdue, d.worst, d.now = nil, time.Time{}, now
	d.EachOutstanding(d.visit)
	if d.step == nil && d.overdue != nil {
		t := d.overdue
		d.abortTask(now, t)
	}
	d.overdue = nil
	switch {
	case d.timeout == 0 || !d.Stalled():
		d.stalled = time.Time{}
	case d.stalled.IsZero():
		d.stalled = now
	case now.Sub(d.stalled) >= d.timeout:
		d.drop(fmt.Errorf("%w: the command window was closed for %v although nothing was outstanding", iscsi.ErrTimeout, d.timeout))
	}
}

// scan looks at one slot.
func (d *deadline) scan(slot int, t *iscsi.Task) {
	m := &d.marks[slot]
	if !m.used || m.cmdSN != t.CmdSN() {
		*m = mark{since: d.now, cmdSN: t.CmdSN(), used: true}
		return
	}
	limit := d.timeout
	switch op := t.CDB[0]; {
	case m.givenUp:
		limit = 0
	case limit == 0:
		return
	case op == scsi.OpSynchronizeCache10 || op == scsi.OpSynchronizeCache16:
		limit *= flushFactor
	}
	if _, own := t.Handler.(*execution); own && !m.givenUp {
		return // whoever waits for it has a clock of his own
	}
	if d.now.Sub(m.since) >= limit && (d.overdue == nil || m.since.Before(d.worst)) {
		d.overdue, d.worst = t, m.since
	}
}

// giveUp ends a command that nobody waits for any more.
func (d *deadline) giveUp(t *iscsi.Task) {
	found := false
	now := time.Now()
	d.EachOutstanding(func(slot int, o *iscsi.Task) {
		if o == t {
			found = true
			d.marks[slot] = mark{cmdSN: t.CmdSN(), used: true, givenUp: true}
		}
	})
	switch {
	case !found: // not sent yet, or gone
		d.Manage(iscsi.TaskManagement{Function: pdu.AbortTask, Task: t}, func(error) {})
	case d.step == nil:
		d.abortTask(now, t)
	}
	d.path.reactor.clock.soon()
}

// abortTask sends ABORT TASK.
func (d *deadline) abortTask(now time.Time, t *iscsi.Task) {
	d.path.escalations.aborts++
	d.log().WithField("lun", t.LUN.String()).WithField("command", fmt.Sprintf("%#02x", t.CDB[0])).Warn("command without an answer: ABORT TASK")
	d.begin(&step{function: pdu.AbortTask, task: t, cmdSN: t.CmdSN(), lun: t.LUN, since: now})
}

// begin sends a function.
func (d *deadline) begin(s *step) {
	d.step = s
	d.Manage(iscsi.TaskManagement{Function: s.function, LUN: s.lun, Task: s.task}, func(err error) {
		if d.step == s {
			d.answered(s, err)
		}
	})
	d.path.reactor.clock.soon()
}

// answered takes the target's answer to a step.
func (d *deadline) answered(s *step, err error) {
	var refused *iscsi.TaskManagementError
	switch {
	case d.State() != iscsi.StateLoggedIn:
		d.step = nil
	case err == nil || errors.Is(err, iscsi.ErrTaskManagement): // done with it, or the answer has come just before
		d.step = nil
		d.look = time.Time{} // more may be overdue
		if s.function == pdu.LogicalUnitReset {
			d.path.wasReset(s.lun)
		}
		go d.path.group.plane.notifyGroup(d.path.group)
	case s.function == pdu.AbortTask && errors.As(err, &refused) && refused.Result == pdu.TaskDoesNotExist && d.Outstanding(s.task, s.cmdSN):
		// Its response is under way, over iSER perhaps behind this answer; or it is lost, and the step runs out of time.
	default:
		d.escalate(time.Now(), err)
	}
}

// escalate goes on from a step that did not help.
func (d *deadline) escalate(now time.Time, why error) {
	s := d.step
	if s.function == pdu.AbortTask && !d.Outstanding(s.task, s.cmdSN) {
		d.step = nil // it has been answered in the end
		return
	}
	if s.function != pdu.AbortTask {
		d.drop(why)
		return
	}
	d.path.escalations.resets++
	d.log().WithField("lun", s.lun.String()).WithError(why).Warn("ABORT TASK does not help: LOGICAL UNIT RESET")
	d.begin(&step{function: pdu.LogicalUnitReset, lun: s.lun, since: now})
}

// drop ends the session: the path logs in again, which ends the tasks at the target.
func (d *deadline) drop(why error) {
	d.path.escalations.drops++
	d.step = nil
	d.Terminate(why)
}

func (d *deadline) log() *logrus.Entry { return d.path.group.log(d.path) }

// wasReset tells the other sessions of the group that the unit was reset: their tasks with it have ended too. A target may say so of each (TASK ABORTED), or
// of none (SAM-5 section 5.13, TAS bit of the control mode page).
func (p *path) wasReset(lun scsi.LUN) {
	for _, o := range p.group.paths {
		if o == p {
			continue
		}
		o.reactor.Do(func() {
			d := o.keeper
			if d == nil || d.State() != iscsi.StateLoggedIn {
				return
			}
			now := time.Now()
			d.EachOutstanding(func(slot int, t *iscsi.Task) {
				if t.LUN != lun {
					return
				}
				m := &d.marks[slot]
				if !m.used || m.cmdSN != t.CmdSN() {
					*m = mark{since: now, cmdSN: t.CmdSN(), used: true}
				}
				m.wiped = true
				d.sweep = now.Add(d.told)
			})
			o.reactor.clock.soon()
		})
	}
}

// sweepUp has the target end what is still there of a unit that another session has had reset.
func (d *deadline) sweepUp(now time.Time) {
	d.sweep = time.Time{}
	var left *iscsi.Task
	d.EachOutstanding(func(slot int, t *iscsi.Task) {
		if m := d.marks[slot]; m.wiped && m.cmdSN == t.CmdSN() {
			left = t
		}
	})
	if left != nil {
		d.sweep = now // there may be more units
		d.begin(&step{function: pdu.AbortTaskSet, lun: left.LUN, since: now})
	}
}
