package iscsi

import (
	"errors"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// manage asks for a function and keeps what is said about it.
func (s *script) manage(r TaskManagement) *[]error {
	answers := new([]error)
	s.Manage(r, func(err error) { *answers = append(*answers, err) })
	return answers
}

// managedBy is the target's answer to the last request.
func (s *script) managedBy(tag uint32, result pdu.TaskResult) {
	var bhs pdu.BHS
	r := pdu.NewTaskResponse(&bhs, result)
	r.SetInitiatorTaskTag(tag)
	r.SetStatSN(s.statSN)
	r.SetExpCmdSN(s.cmdSN)
	r.SetMaxCmdSN(s.max)
	s.statSN++
	s.w.up.ControlNotify(&bhs, nil)
}

func TestAbortTask(t *testing.T) {
	s := newScript(t, 8, Options{})
	other, hung := s.task(Read, 512), s.task(Read, 512)
	s.Submit(other)
	s.Submit(hung)
	answers := s.manage(TaskManagement{Function: pdu.AbortTask, Task: hung})
	s.want(StateLoggedIn, 2, 0, 3)
	r := pdu.AsTaskRequest(s.w.last())
	if !r.Final() || !r.Immediate() || r.Function() != pdu.AbortTask || r.LUN() != uint64(hung.LUN) || r.ReferencedTaskTag() != hung.ITT() ||
		r.RefCmdSN() != hung.cmdSN || r.CmdSN() != s.cmdSN || r.InitiatorTaskTag() == noTag || s.lookup(r.InitiatorTaskTag()) != nil {
		t.Errorf("request %v", r)
	}
	if s.w.flushes == 0 {
		t.Error("the request waits for a flush")
	}
	// Commands go on meanwhile.
	s.Submit(s.task(Read, 512))
	s.want(StateLoggedIn, 3, 0, 4)
	s.managedBy(r.InitiatorTaskTag(), pdu.TaskFunctionComplete)
	s.want(StateLoggedIn, 2, 1, 4)
	if s.done[0] != hung || hung.Outcome != Aborted || len(s.w.freed) != 1 || s.w.freed[0] != hung || len(*answers) != 1 || (*answers)[0] != nil {
		t.Errorf("done %v, outcome %v, freed %v, answers %v", s.done, hung.Outcome, s.w.freed, *answers)
	}
	// A late response to it is one to a tag that is not outstanding.
	s.respond(hung.ITT(), nil, nil)
	if s.State() != StateCleanupWait {
		t.Error("a response to an aborted task is taken")
	}
}

func TestAbortTaskAnswers(t *testing.T) {
	t.Run("response first", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		task := s.task(Read, 512)
		s.Submit(task)
		answers := s.manage(TaskManagement{Function: pdu.AbortTask, Task: task})
		s.respond(task.ITT(), nil, nil)
		s.Submit(task) // the memory is in use again
		s.managedBy(s.w.sent[1].InitiatorTaskTag(), pdu.TaskFunctionComplete)
		s.want(StateLoggedIn, 1, 1, 3)
		if task.Outcome != Responded || len(*answers) != 1 || (*answers)[0] != nil || len(s.w.freed) != 0 {
			t.Errorf("outcome %v, answers %v, freed %v", task.Outcome, *answers, s.w.freed)
		}
	})
	t.Run("refused", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		task := s.task(Read, 512)
		s.Submit(task)
		answers := s.manage(TaskManagement{Function: pdu.AbortTask, Task: task})
		s.managedBy(s.w.last().InitiatorTaskTag(), pdu.TaskDoesNotExist)
		s.want(StateLoggedIn, 1, 0, 2)
		var refused *TaskManagementError
		if len(*answers) != 1 || !errors.As((*answers)[0], &refused) || refused.Result != pdu.TaskDoesNotExist {
			t.Errorf("answers %v", *answers)
		}
	})
	t.Run("not sent yet", func(t *testing.T) {
		s := newScript(t, 1, Options{})
		tasks := []*Task{s.task(Read, 512), s.task(Read, 512), s.task(Read, 512), s.task(Read, 512)}
		for _, task := range tasks {
			s.Submit(task)
		}
		for _, i := range []int{2, 3, 1} { // in the middle, last, only one
			if a := s.manage(TaskManagement{Function: pdu.AbortTask, Task: tasks[i]}); len(*a) != 1 || (*a)[0] != nil {
				t.Errorf("task %d: answers %v", i, *a)
			}
		}
		s.want(StateLoggedIn, 1, 3, 1)
		s.Submit(tasks[1])
		s.max++
		s.respond(tasks[0].ITT(), nil, nil)
		s.want(StateLoggedIn, 1, 4, 2)
	})
	t.Run("not there", func(t *testing.T) {
		s := newScript(t, 1, Options{})
		for _, r := range []TaskManagement{{Function: pdu.AbortTask}, {Function: pdu.AbortTask, Task: s.task(Read, 1)}, {Function: pdu.TaskReassign}, {}} {
			if a := s.manage(r); len(*a) != 1 || !errors.Is((*a)[0], ErrTaskManagement) {
				t.Errorf("%v: answers %v", r, *a)
			}
		}
		s.want(StateLoggedIn, 0, 0, 0)
	})
	t.Run("data is moving", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		task := s.task(Write, 512)
		s.Submit(task)
		answers := s.manage(TaskManagement{Function: pdu.AbortTask, Task: task})
		s.w.freeErr = errors.New("data is moving")
		s.managedBy(s.w.last().InitiatorTaskTag(), pdu.TaskFunctionComplete)
		s.want(StateCleanupWait, 1, 0, 2)
		s.w.up.ConnectionTerminateNotify(s.w.ended)
		if task.Outcome != Lost || len(*answers) != 1 || !errors.Is((*answers)[0], ErrSessionLost) {
			t.Errorf("outcome %v, answers %v", task.Outcome, *answers)
		}
	})
	t.Run("answer to nothing", func(t *testing.T) {
		for _, tag := range []uint32{noTag, 0, 12} {
			s := newScript(t, 8, Options{})
			s.managedBy(tag, pdu.TaskFunctionComplete)
			s.want(StateCleanupWait, 0, 0, 0)
		}
	})
}

// Functions that end many tasks end those that were sent before them, on their unit or on all, and nothing else; commands wait meanwhile.
func TestEndMany(t *testing.T) {
	for f, all := range map[pdu.TaskFunction]bool{
		pdu.AbortTaskSet: false, pdu.ClearTaskSet: false, pdu.LogicalUnitReset: false, pdu.TargetWarmReset: true, pdu.TargetColdReset: true,
	} {
		t.Run(f.String(), func(t *testing.T) {
			s := newScript(t, 8, Options{})
			here, there, late := s.task(Read, 512), s.task(Write, 512), s.task(Read, 512)
			there.LUN = scsi.NewLUN(2)
			s.Submit(here)
			s.Submit(there)
			answers := s.manage(TaskManagement{Function: f, LUN: here.LUN})
			r := pdu.AsTaskRequest(s.w.last())
			if r.ReferencedTaskTag() != noTag || r.Function() != f || all != (r.LUN() == 0) || r.RefCmdSN() != 0 {
				t.Errorf("request %v", r)
			}
			s.Submit(late)
			s.again = s.task(Read, 512)
			s.want(StateLoggedIn, 2, 0, 3)
			s.managedBy(r.InitiatorTaskTag(), pdu.TaskFunctionComplete)
			if all {
				s.want(StateLoggedIn, 2, 2, 5)
			} else {
				s.want(StateLoggedIn, 3, 1, 5)
			}
			if here.Outcome != Aborted || all != (there.Outcome == Aborted) || len(*answers) != 1 || (*answers)[0] != nil {
				t.Errorf("outcomes %v and %v, answers %v", here.Outcome, there.Outcome, *answers)
			}
			if s.w.tasks[3] != late {
				t.Error("the task that waited is not the next one")
			}
		})
	}
}

// Requests of one function go one after another, those of others at once; the end of the session answers them all.
func TestManageQueue(t *testing.T) {
	s := newScript(t, 8, Options{})
	tasks := []*Task{s.task(Read, 512), s.task(Read, 512)}
	for _, task := range tasks {
		s.Submit(task)
	}
	first := s.manage(TaskManagement{Function: pdu.AbortTask, Task: tasks[0]})
	second := s.manage(TaskManagement{Function: pdu.AbortTask, Task: tasks[1]})
	reset := s.manage(TaskManagement{Function: pdu.LogicalUnitReset, LUN: tasks[0].LUN})
	s.want(StateLoggedIn, 2, 0, 4)
	s.managedBy(s.w.sent[2].InitiatorTaskTag(), pdu.TaskFunctionRejected)
	if len(*first) != 1 || len(*second) != 0 || pdu.AsTaskRequest(s.w.last()).ReferencedTaskTag() != tasks[1].ITT() {
		t.Errorf("answers %v and %v, then %v", *first, *second, s.w.last())
	}
	s.Terminate(errors.New("enough"))
	s.w.up.ConnectionTerminateNotify(s.w.ended)
	for _, a := range []*[]error{second, reset} {
		if len(*a) != 1 || !errors.Is((*a)[0], ErrSessionLost) {
			t.Errorf("answers %v", *a)
		}
	}
	if a := s.manage(TaskManagement{Function: pdu.TargetWarmReset}); len(*a) != 1 || !errors.Is((*a)[0], ErrSessionLost) {
		t.Errorf("after the end: answers %v", *a)
	}
}

// Where the order of answers is not to be relied on, the tasks that a function has ended stay outstanding for a while: a response that is late is still
// theirs, and their memory is not given back before.
func TestSettling(t *testing.T) {
	s := newScript(t, 8, Options{})
	s.unordered = true
	late, gone, waits := s.task(Read, 512), s.task(Read, 512), s.task(Read, 512)
	s.Submit(late)
	s.Submit(gone)
	answers := s.manage(TaskManagement{Function: pdu.LogicalUnitReset, LUN: late.LUN})
	tag := s.w.last().InitiatorTaskTag()
	s.Submit(waits)
	s.managedBy(tag, pdu.TaskFunctionComplete)
	if s.want(StateLoggedIn, 2, 0, 3); s.calls != 1 || len(*answers) != 0 {
		t.Errorf("%d calls of Soon, answers %v", s.calls, *answers)
	}
	if next := s.Tick(start); !next.Equal(start.Add(settleTime)) {
		t.Errorf("next tick after %v", next.Sub(start))
	}
	s.respond(late.ITT(), nil, nil)
	s.want(StateLoggedIn, 1, 1, 3)
	s.Tick(start.Add(settleTime - 1))
	s.want(StateLoggedIn, 1, 1, 3)
	flushes := s.w.flushes
	s.Tick(start.Add(settleTime))
	s.want(StateLoggedIn, 1, 2, 4)
	if late.Outcome != Responded || gone.Outcome != Aborted || s.w.tasks[3] != waits || s.w.flushes == flushes || len(*answers) != 1 || (*answers)[0] != nil {
		t.Errorf("outcomes %v and %v, answers %v", late.Outcome, gone.Outcome, *answers)
	}
	s.managedBy(tag, pdu.TaskFunctionComplete)
	if s.State() != StateCleanupWait {
		t.Error("a second answer to the function is taken")
	}
	t.Run("session lost meanwhile", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.unordered = true
		s.Submit(s.task(Read, 512))
		answers := s.manage(TaskManagement{Function: pdu.TargetWarmReset})
		s.managedBy(s.w.last().InitiatorTaskTag(), pdu.TaskFunctionComplete)
		s.w.up.ConnectionTerminateNotify(errors.New("closed"))
		s.Tick(start.Add(time.Hour))
		if len(*answers) != 1 || !errors.Is((*answers)[0], ErrSessionLost) || s.done[0].Outcome != Lost || len(s.done) != 1 {
			t.Errorf("answers %v, %d done", *answers, len(s.done))
		}
	})
	t.Run("one task", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.unordered = true
		task := s.task(Read, 512)
		s.Submit(task)
		s.manage(TaskManagement{Function: pdu.AbortTask, Task: task})
		s.managedBy(s.w.last().InitiatorTaskTag(), pdu.TaskFunctionComplete)
		s.want(StateLoggedIn, 0, 1, 2)
	})
}
