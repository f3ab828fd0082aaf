package iscsi

import (
	"errors"
	"fmt"
	"time"

	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/iscsi/serial"
	"iserd.org/iserd/scsi"
)

// Task management: ending tasks that do not end by themselves (RFC 7143 sections 4.2.3, 11.5 and 11.6). Nothing here has a time-out: a caller that
// gets no answer in time asks for more (ABORT TASK, LOGICAL UNIT RESET, TARGET WARM RESET), and terminates the session in the end.

// TaskManagement is one request.
//
// A reset also ends the tasks that other sessions have with the unit, and the target need not say so there (Control mode page, TAS): who resets a
// unit sends ABORT TASK SET for it by every other session of his own, whose answer then ends what is left.
type TaskManagement struct {
	Function pdu.TaskFunction // all but TASK REASSIGN, which belongs to ErrorRecoveryLevel 2
	LUN      scsi.LUN         // for functions on a unit
	Task     *Task            // for ABORT TASK

	// Complete is called when the target has said that the function is complete, before the tasks that it has ended are handed back; nil: nobody is to be
	// told. It runs on the owner.
	Complete func()
}

// TaskManagementError is a refusal of the target.
type TaskManagementError struct {
	Function pdu.TaskFunction
	Result   pdu.TaskResult // RFC 7143 section 11.6.1; never TaskFunctionComplete
}

func (e *TaskManagementError) Error() string { return fmt.Sprintf("%v: %v", e.Function, e.Result) }

// ErrTaskManagement tells that a request makes no sense here: a task that is not outstanding, or a function that there is not. Always wrapped.
var ErrTaskManagement = errors.New("task management request cannot be sent")

// management is a request under way.
type management struct {
	TaskManagement
	done  func(error)
	tag   uint32 // of the request; noTag until it is sent, and once it was answered
	cmdSN uint32
	itt   uint32    // of Task
	froze bool      // commands wait because of it
	until time.Time // of settling; zero until the next tick sets it
}

// settleTime is how long tasks go on being outstanding after a function that ended many of them is complete, where the order of answers is not to be
// relied on. isert answers a function while the responses of commands that were complete by then are still on their way to other CPUs, and with them
// the data of reads: their memory may not be in use for something else yet. Time is no proof, but a thousand times what such a response takes.
const settleTime = 500 * time.Millisecond

// lastFunction is the highest function that is sent.
const lastFunction = pdu.TargetColdReset

// endsMany tells whether the function ends more than one task.
func (m *management) endsMany() bool {
	return m.Function != pdu.AbortTask && m.Function != pdu.ClearACA
}

// covers tells whether t is in the set of tasks that the function ends: those of the unit, or of the target, that were sent before it.
func (m *management) covers(t *Task) bool {
	switch {
	case !m.endsMany() || !serial.Less(t.cmdSN, m.cmdSN):
		return false
	case m.Function == pdu.TargetWarmReset || m.Function == pdu.TargetColdReset:
		return true
	}
	return t.LUN == m.LUN
}

// Manage asks the target to end tasks. done runs on the owner, exactly once, after TaskDone of every task that was ended, and maybe from within
// Manage: with nil when the function is complete, with *[TaskManagementError] when the target refused it, *[RejectError] when it rejected the
// request, [ErrSessionLost] when the session ended first, [ErrTaskManagement] when there was nothing to send. The tasks that ended have Outcome
// [Aborted]; one whose response arrives before that of the function ends as ever.
//
// When ABORT TASK is answered by "task does not exist" and the task is still outstanding, its response is under way (targets over iSER do not keep
// the order), or it was lost; the task stays outstanding. A task that still waits for the command window ends at once, without a word to the target.
//
// One request of each function is under way at a time, and others of it wait; a target need take no more than one that is immediate (section
// 4.2.2.1). While one is under way that ends many tasks, new commands wait, so that none can be among those. Over iSER the tasks that such a function has
// ended come back half a second after its answer, see settleTime.
func (s *Session) Manage(r TaskManagement, done func(error)) {
	m := &management{TaskManagement: r, done: done, tag: noTag}
	switch {
	case s.state != StateLoggedIn:
		done(fmt.Errorf("%v: %w: session is in state %v", r.Function, ErrSessionLost, s.state))
		return
	case r.Function < pdu.AbortTask || r.Function > lastFunction:
		done(fmt.Errorf("%w: no %v at ErrorRecoveryLevel 0", ErrTaskManagement, r.Function))
		return
	case r.Function == pdu.AbortTask && s.unqueue(r.Task):
		r.Task.Outcome = Aborted
		r.Task.Handler.TaskDone(r.Task)
		done(nil)
		return
	case r.Function == pdu.AbortTask && (r.Task == nil || s.lookup(r.Task.itt) != r.Task):
		done(fmt.Errorf("%w: the task is not outstanding", ErrTaskManagement))
		return
	case r.Function == pdu.AbortTask:
		m.itt, m.LUN = r.Task.itt, r.Task.LUN
	}
	list := &s.managing[r.Function]
	if *list = append(*list, m); len(*list) == 1 {
		s.sendManagement(m)
	}
}

// sendManagement sends a request.
func (s *Session) sendManagement(m *management) {
	r := pdu.NewTaskRequest(&s.bhs, m.Function)
	m.cmdSN = s.cmdSN
	if !s.number() {
		s.managed(m, fmt.Errorf("%v: %w: the target's window is closed and %d unexpected PDUs are outstanding", m.Function, ErrTaskManagement, s.unexpected))
		return
	}
	m.tag = s.controlTag(tagManage + int(m.Function))
	if m.endsMany() {
		m.froze = true
		s.frozen++
	}
	r.SetInitiatorTaskTag(m.tag)
	if m.Function < pdu.TargetWarmReset {
		r.SetLUN(uint64(m.LUN))
	}
	if m.Function == pdu.AbortTask {
		r.SetReferencedTaskTag(m.itt)
		r.SetRefCmdSN(m.Task.cmdSN)
	}
	if err := s.mover.SendControl(&s.bhs, nil, nil); err != nil {
		s.fail(err)
		return
	}
	s.Flush()
}

// underManagement finds the request of a tag, nil if there is none.
func (s *Session) underManagement(itt uint32) *management {
	for _, list := range s.managing {
		if itt != noTag && len(list) > 0 && list[0].tag == itt {
			return list[0]
		}
	}
	return nil
}

// taskResponse ends the tasks that a function has ended, and tells who asked for it (section 11.6).
func (s *Session) taskResponse(r pdu.TaskResponse) error {
	m := s.underManagement(r.InitiatorTaskTag())
	if m == nil {
		return violation("11.6", "task management response to tag %#08x, which no request has", r.InitiatorTaskTag())
	}
	if err := s.status(r.StatSN(), r.ExpCmdSN(), r.MaxCmdSN()); err != nil {
		return err
	}
	if r.Response() != pdu.TaskFunctionComplete {
		return s.managed(m, &TaskManagementError{m.Function, r.Response()})
	}
	if m.Complete != nil {
		m.Complete()
	}
	if m.Function == pdu.AbortTask {
		// The task may have ended, and its memory may be in use again: the tag tells.
		if t := s.lookup(m.itt); t != nil {
			if err := s.abort(t); err != nil {
				return err
			}
		}
		return s.managed(m, nil)
	}
	if m.endsMany() && s.unordered {
		m.tag = noTag
		s.settling = append(s.settling, m)
		s.soon()
		return nil
	}
	return s.conclude(m)
}

// conclude ends the tasks that a complete function has ended, and the request.
func (s *Session) conclude(m *management) error {
	for _, t := range s.slots {
		if t == nil || !m.covers(t) {
			continue
		}
		if err := s.abort(t); err != nil {
			return err
		}
		if s.state >= StateCleanupWait { // a TaskDone may end the session
			return nil
		}
	}
	return s.managed(m, nil)
}

// tickSettling concludes what has settled.
func (s *Session) tickSettling(now time.Time) (next time.Time) {
	for i := 0; i < len(s.settling); {
		m := s.settling[i]
		if m.until.IsZero() {
			m.until = now.Add(settleTime)
		}
		if now.Before(m.until) {
			if next.IsZero() || m.until.Before(next) {
				next = m.until
			}
			i++
			continue
		}
		s.settling = append(s.settling[:i:i], s.settling[i+1:]...)
		if err := s.conclude(m); err != nil {
			s.fail(err)
		}
		if s.state >= StateCleanupWait {
			return time.Time{}
		}
		s.Flush()
	}
	return next
}

// managed ends a request, and lets the next one go.
func (s *Session) managed(m *management, err error) error {
	list := &s.managing[m.Function]
	*list = (*list)[1:]
	if m.froze {
		s.frozen--
	}
	if len(*list) > 0 && s.state == StateLoggedIn {
		s.sendManagement((*list)[0])
	}
	s.drain()
	m.done(err)
	return nil
}

// abort ends an outstanding task that the target does not know any more.
func (s *Session) abort(t *Task) error {
	if err := s.mover.DeallocateTaskResources(t); err != nil {
		return err
	}
	t.Outcome = Aborted
	s.finish(t)
	return nil
}

// unqueue takes a task out of those that wait for the window.
func (s *Session) unqueue(t *Task) bool {
	if t == nil {
		return false
	}
	var before *Task
	for w := s.waiting.head; w != nil; before, w = w, w.next {
		if w != t {
			continue
		}
		if before == nil {
			s.waiting.head = t.next
		} else {
			before.next = t.next
		}
		if t.next == nil {
			s.waiting.tail = before
		}
		t.next = nil
		s.waiting.n--
		return true
	}
	return false
}

// unmanaged tells everyone whose request was under way that the session has ended.
func (s *Session) unmanaged() {
	s.settling = nil
	for f, list := range s.managing {
		s.managing[f] = nil
		for _, m := range list {
			m.done(fmt.Errorf("%v: %w", m.Function, ErrSessionLost))
		}
	}
}
