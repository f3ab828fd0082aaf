package iscsi

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// wire is a Datamover in memory: what the session sends is kept, what the target says is put in by the test.
type wire struct {
	limits   Limits
	up       Notifier
	sent     []pdu.BHS
	tasks    []*Task
	data     [][]byte
	flushes  int
	ended    error
	sendErr  error
	flushErr error
	freed    []*Task
	freeErr  error
}

func (w *wire) SendControl(bhs *pdu.BHS, data []byte, t *Task) error {
	if w.sendErr != nil {
		return w.sendErr
	}
	w.sent = append(w.sent, *bhs)
	w.tasks = append(w.tasks, t)
	w.data = append(w.data, slices.Clone(data))
	return nil
}
func (w *wire) Flush() error                       { w.flushes++; return w.flushErr }
func (w *wire) AllocateConnectionResources() error { return nil }
func (w *wire) NoticeKeyValues(*login.Keys)        {}
func (w *wire) EnableDatamover(n Notifier) error   { w.up = n; return nil }
func (w *wire) DeallocateTaskResources(t *Task) error {
	w.freed = append(w.freed, t)
	return w.freeErr
}
func (w *wire) ConnectionTerminate(reason error) { w.ended = cmpOr(reason, errors.New("closed")) }
func (w *wire) Limits() Limits                   { return w.limits }
func (w *wire) last() *pdu.BHS                   { return &w.sent[len(w.sent)-1] }
func cmpOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// script drives a session as its owner and as the target do.
type script struct {
	*Session
	t      *testing.T
	w      *wire
	done   []*Task
	downed []error
	statSN uint32
	max    uint32
	events []pdu.AsyncEvent
	again  *Task // submitted from TaskDone

	eventData []byte
	calls     int // of Soon
}

func (s *script) TaskDone(t *Task) {
	s.done = append(s.done, t)
	if s.again != nil {
		next := s.again
		s.again = nil
		s.Submit(next)
	}
}

var start = time.Unix(1000, 0)

func newScript(t *testing.T, window uint32, o Options) *script {
	t.Helper()
	s := &script{t: t, w: &wire{limits: Limits{Outstanding: 16, MaxTransfer: 1 << 20}}, statSN: 0xfffffffe}
	o.Down = func(err error) { s.downed = append(s.downed, err) }
	o.Async = func(e pdu.AsyncEvent, lun scsi.LUN, data []byte) {
		s.events, s.eventData = append(s.events, e), slices.Clone(data)
		if lun != scsi.NewLUN(3) && lun != 0 {
			t.Errorf("event for unit %v", lun)
		}
	}
	o.Soon = func() { s.calls++ }
	s.max = 0xfffffff0 + window - 1
	result := &login.Result{ExpStatSN: s.statSN, CmdSN: 0xfffffff0, ExpCmdSN: 0xfffffff0, MaxCmdSN: s.max}
	var err error
	if s.Session, err = NewSession(s.w, result, o, start); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *script) task(d Direction, n int) *Task {
	return &Task{LUN: scsi.NewLUN(1), Direction: d, Data: make([]byte, n), Handler: s}
}

// respond is the target's answer to a tag, with the next StatSN.
func (s *script) respond(itt uint32, change func(r pdu.SCSIResponse), data []byte) {
	var bhs pdu.BHS
	r := pdu.NewSCSIResponse(&bhs)
	r.SetInitiatorTaskTag(itt)
	r.SetStatSN(s.statSN)
	r.SetExpCmdSN(s.cmdSN)
	r.SetMaxCmdSN(s.max)
	r.SetDataSegmentLength(len(data))
	if change != nil {
		change(r)
	}
	s.statSN++
	s.w.up.ControlNotify(&bhs, data)
}

func (s *script) want(state State, inFlight, done, sent int) {
	s.t.Helper()
	if s.State() != state || s.InFlight() != inFlight || len(s.done) != done || len(s.w.sent) != sent {
		s.t.Fatalf("state %v, %d in flight, %d done, %d sent; want %v, %d, %d, %d (ended: %v)",
			s.State(), s.InFlight(), len(s.done), len(s.w.sent), state, inFlight, done, sent, s.w.ended)
	}
}

func TestCommand(t *testing.T) {
	s := newScript(t, 8, Options{})
	read := s.task(Read, 4096)
	read.CDB = [16]byte{0x28, 1, 2, 3}
	s.Submit(read)
	s.Submit(s.task(Write, 512))
	s.Submit(s.task(NoData, 0))
	s.want(StateLoggedIn, 3, 0, 3)
	for i, c := range []struct {
		read, write bool
		n           uint32
	}{{true, false, 4096}, {false, true, 512}, {false, false, 0}} {
		p := pdu.AsSCSICommand(&s.w.sent[i])
		if p.Opcode() != pdu.OpSCSICommand || !p.Final() || p.Immediate() || p.Read() != c.read || p.Write() != c.write ||
			p.ExpectedDataTransferLength() != c.n || p.CmdSN() != 0xfffffff0+uint32(i) || p.ExpStatSN() != 0xfffffffe ||
			p.LUN() != uint64(scsi.NewLUN(1)) || p.Attribute() != pdu.AttributeSimple || p.InitiatorTaskTag() != s.w.tasks[i].ITT() {
			t.Errorf("command %d: %v", i, p)
		}
	}
	if *pdu.AsSCSICommand(&s.w.sent[0]).CDB() != read.CDB {
		t.Error("CDB differs")
	}
	s.respond(read.ITT(), nil, nil)
	s.want(StateLoggedIn, 2, 1, 3)
	if read.Outcome != Responded || read.Status != scsi.StatusGood || s.done[0] != read {
		t.Errorf("outcome %v, status %v", read.Outcome, read.Status)
	}
}

func TestResponseFields(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(r pdu.SCSIResponse)
		data   []byte
		check  func(t *Task) bool
		broken bool
	}{
		{"underflow", func(r pdu.SCSIResponse) { r.SetResidual(100, false) }, nil, func(t *Task) bool { return t.Residual == 100 && !t.Overflow }, false},
		{"overflow", func(r pdu.SCSIResponse) { r.SetResidual(1<<30, true) }, nil, func(t *Task) bool { return t.Residual == 1<<30 && t.Overflow }, false},
		{"underflow beyond the length", func(r pdu.SCSIResponse) { r.SetResidual(4097, false) }, nil, nil, true},
		{"sense", func(r pdu.SCSIResponse) { r.SetStatus(2) }, []byte{0, 3, 0x70, 0, 6}, func(t *Task) bool {
			return t.Status == scsi.StatusCheckCondition && t.SenseLen == 3 && t.Sense[2] == 6
		}, false},
		{"sense longer than is kept", func(r pdu.SCSIResponse) { r.SetStatus(2) }, append([]byte{0, 200}, make([]byte, 200)...), func(t *Task) bool {
			return t.SenseLen == MaxSense
		}, false},
		{"sense length beyond the segment", func(r pdu.SCSIResponse) { r.SetStatus(2) }, []byte{0, 9, 0x70}, nil, true},
		{"sense of one byte", func(r pdu.SCSIResponse) { r.SetStatus(2) }, []byte{0}, nil, true},
		{"target failure", func(r pdu.SCSIResponse) { r.SetResponse(1) }, nil, func(t *Task) bool { return t.Outcome == TargetFailed && t.Response == 1 }, false},
		{"target failure, with flags that mean nothing", func(r pdu.SCSIResponse) {
			r.SetResidual(1<<30, false)
			r.SetResponse(1)
			r.SetStatus(2)
		}, nil, func(t *Task) bool { return t.Outcome == TargetFailed && t.Residual == 0 && t.Status == 0 }, false},
		{"StatSN too high", func(r pdu.SCSIResponse) { r.SetStatSN(r.StatSN() + 1) }, nil, nil, true},
		{"StatSN too low", func(r pdu.SCSIResponse) { r.SetStatSN(r.StatSN() - 1) }, nil, nil, true},
		{"unknown tag", func(r pdu.SCSIResponse) { r.SetInitiatorTaskTag(12) }, nil, nil, true},
		{"tag beyond the table", func(r pdu.SCSIResponse) { r.SetInitiatorTaskTag(0xfffe) }, nil, nil, true},
		{"reserved tag", func(r pdu.SCSIResponse) { r.SetInitiatorTaskTag(noTag) }, nil, nil, true},
		{"another generation", func(r pdu.SCSIResponse) { r.SetInitiatorTaskTag(r.InitiatorTaskTag() + 1<<16) }, nil, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t, 8, Options{})
			task := s.task(Read, 4096)
			s.Submit(task)
			s.respond(task.ITT(), c.change, c.data)
			if !c.broken {
				s.want(StateLoggedIn, 0, 1, 1)
				if !c.check(task) {
					t.Errorf("task %+v", task)
				}
				return
			}
			s.want(StateCleanupWait, 1, 0, 1)
			var broken *pdu.ProtocolError
			if !errors.As(s.w.ended, &broken) {
				t.Errorf("ended with %v", s.w.ended)
			}
			// The task comes back only when nothing can reach its memory any more.
			s.w.up.ConnectionTerminateNotify(s.w.ended)
			s.want(StateFree, 0, 1, 1)
			if task.Outcome != Lost || len(s.downed) != 1 || s.downed[0] == nil {
				t.Errorf("outcome %v, down %v", task.Outcome, s.downed)
			}
		})
	}
}

// Over a Datamover on which StatSN is not to be relied on, numbers may be early, late or used twice, as isert makes them; what is out of all
// proportion is still an error.
func TestUnorderedStatus(t *testing.T) {
	s := newScript(t, 64, Options{})
	s.unordered = true
	base := s.statSN
	answer := func(statSN uint32) {
		task := s.task(Read, 512)
		s.Submit(task)
		s.respond(task.ITT(), func(r pdu.SCSIResponse) { r.SetStatSN(base + statSN) }, nil)
	}
	for i, c := range []struct{ statSN, exp uint32 }{{0, 1}, {2, 3}, {1, 3}, {3, 4}, {3, 4}, {4, 5}, {5 + maxDisorder - 1, 5 + maxDisorder}, {6, 5 + maxDisorder}} {
		answer(c.statSN)
		if got := s.expStatSN - base; got != c.exp || s.State() != StateLoggedIn {
			t.Fatalf("step %d: expected StatSN %d, want %d (state %v, %v)", i, got, c.exp, s.State(), s.w.ended)
		}
	}
	for _, bad := range []uint32{maxDisorder, 1 << 31, 1000000, ^uint32(maxDisorder - 1)} {
		s := newScript(t, 64, Options{})
		s.unordered = true
		task := s.task(Read, 512)
		s.Submit(task)
		s.respond(task.ITT(), func(r pdu.SCSIResponse) { r.SetStatSN(s.statSN + bad) }, nil)
		if s.State() != StateCleanupWait {
			t.Errorf("StatSN %d ahead is taken", bad)
		}
	}
}

// An answer to an earlier use of a tag is not taken for one to the present use.
func TestTagReuse(t *testing.T) {
	s := newScript(t, 64, Options{MaxOutstanding: 1})
	first, second := s.task(Read, 512), s.task(Read, 512)
	s.Submit(first)
	tag := first.ITT()
	s.respond(tag, nil, nil)
	s.Submit(second)
	if second.ITT() == tag {
		t.Fatal("the tag is used again at once")
	}
	s.respond(tag, nil, nil)
	s.want(StateCleanupWait, 1, 1, 2)
}

// Commands wait in order while the window or the tags are used up, and go on as it opens, across the wrap of CmdSN.
func TestWindow(t *testing.T) {
	s := newScript(t, 2, Options{MaxOutstanding: 4})
	var tasks []*Task
	for range 40 {
		task := s.task(NoData, 0)
		tasks = append(tasks, task)
		s.Submit(task)
	}
	s.want(StateLoggedIn, 2, 0, 2)
	for i := 0; len(s.done) < len(tasks); i++ {
		s.max += 1 + uint32(i%3)
		if i%3 == 1 {
			s.max -= 2 // some answers do not open it
		}
		if s.InFlight() == 0 {
			t.Fatalf("stuck after %d: window %+v", len(s.done), s.window)
		}
		s.respond(tasks[len(s.done)].ITT(), nil, nil)
		if s.InFlight() > 4 {
			t.Fatalf("%d in flight", s.InFlight())
		}
	}
	for i, b := range s.w.sent {
		if b.CmdSN() != 0xfffffff0+uint32(i) {
			t.Fatalf("command %d has CmdSN %#x", i, b.CmdSN())
		}
		if s.done[i] != tasks[i] {
			t.Fatalf("task %d is out of order", i)
		}
	}
	if s.WindowWaits() != 38 {
		t.Errorf("%d waits", s.WindowWaits())
	}
}

func TestSubmitFromTaskDone(t *testing.T) {
	s := newScript(t, 1, Options{MaxOutstanding: 1})
	first, waiting, again := s.task(NoData, 0), s.task(NoData, 0), s.task(NoData, 0)
	s.Submit(first)
	s.Submit(waiting)
	s.again = again
	s.max++
	s.respond(first.ITT(), nil, nil)
	// The one that waited goes first.
	s.want(StateLoggedIn, 1, 1, 2)
	if s.w.tasks[1] != waiting {
		t.Error("a later task overtook an earlier one")
	}
}

func TestPing(t *testing.T) {
	o := Options{PingInterval: 5 * time.Second, PingTimeout: 15 * time.Second}
	t.Run("answered", func(t *testing.T) {
		s := newScript(t, 8, o)
		if next := s.Tick(start.Add(4 * time.Second)); !next.Equal(start.Add(5 * time.Second)) {
			t.Errorf("next tick at %v", next.Sub(start))
		}
		s.want(StateLoggedIn, 0, 0, 0)
		if next := s.Tick(start.Add(5 * time.Second)); !next.Equal(start.Add(10 * time.Second)) {
			t.Errorf("next tick at %v", next.Sub(start))
		}
		s.want(StateLoggedIn, 0, 0, 1)
		ping := pdu.AsNOPOut(s.w.last())
		if ping.Opcode() != pdu.OpNOPOut || !ping.Immediate() || ping.InitiatorTaskTag() == noTag || ping.TargetTransferTag() != noTag || s.w.flushes == 0 {
			t.Errorf("ping %v, %d flushes", ping, s.w.flushes)
		}
		var bhs pdu.BHS
		pong := pdu.NewNOPIn(&bhs)
		pong.SetInitiatorTaskTag(ping.InitiatorTaskTag())
		pong.SetStatSN(s.statSN)
		pong.SetExpCmdSN(s.cmdSN)
		pong.SetMaxCmdSN(s.max)
		s.w.up.ControlNotify(&bhs, nil)
		s.Tick(start.Add(9 * time.Second))
		s.want(StateLoggedIn, 0, 0, 1)
		s.Tick(start.Add(10 * time.Second))
		s.want(StateLoggedIn, 0, 0, 2)
	})
	t.Run("together", func(t *testing.T) {
		// Two sessions of one process that begin at different times ask at the same time, and wake it once.
		o := o
		o.PingEpoch = start.Add(-time.Hour - 800*time.Millisecond)
		one, two := newScript(t, 8, o), newScript(t, 8, o)
		two.lastRecv = start.Add(900 * time.Millisecond)
		a, b := one.Tick(start.Add(time.Second)), two.Tick(start.Add(time.Second))
		if !a.Equal(b) || a.After(start.Add(5*time.Second)) || a.Before(start.Add(2500*time.Millisecond)) {
			t.Errorf("next ticks at %v and %v", a.Sub(start), b.Sub(start))
		}
		one.Tick(a.Add(-1))
		one.want(StateLoggedIn, 0, 0, 0)
		one.Tick(a)
		one.want(StateLoggedIn, 0, 0, 1)
	})
	t.Run("not answered", func(t *testing.T) {
		s := newScript(t, 8, o)
		task := s.task(Read, 512)
		s.Submit(task)
		s.Tick(start.Add(5 * time.Second))
		s.Tick(start.Add(20 * time.Second))
		s.want(StateLoggedIn, 1, 0, 2)
		s.Tick(start.Add(21 * time.Second))
		s.want(StateCleanupWait, 1, 0, 2)
		if !errors.Is(s.w.ended, ErrTimeout) {
			t.Errorf("ended with %v", s.w.ended)
		}
	})
	t.Run("answers once more and hangs", func(t *testing.T) {
		s := newScript(t, 8, o)
		task, hung := s.task(Read, 512), s.task(Read, 512)
		s.Submit(task)
		s.Submit(hung)
		s.Tick(start.Add(5 * time.Second))
		s.respond(task.ITT(), nil, nil)
		s.Tick(start.Add(6 * time.Second))
		s.Tick(start.Add(21 * time.Second))
		s.want(StateLoggedIn, 1, 1, 3)
		s.Tick(start.Add(22 * time.Second))
		s.want(StateCleanupWait, 1, 1, 3)
	})
	t.Run("busy target", func(t *testing.T) {
		// The answer to the ping waits behind data, but the target lives.
		s := newScript(t, 64, o)
		s.Tick(start.Add(5 * time.Second))
		for i := range 10 {
			task := s.task(Read, 512)
			s.Submit(task)
			s.respond(task.ITT(), nil, nil)
			s.Tick(start.Add(time.Duration(6+5*i) * time.Second))
		}
		s.want(StateLoggedIn, 0, 10, 11)
	})
}

func TestTargetPing(t *testing.T) {
	s := newScript(t, 8, Options{})
	var bhs pdu.BHS
	in := pdu.NewNOPIn(&bhs)
	in.SetInitiatorTaskTag(noTag)
	in.SetTargetTransferTag(77)
	in.SetLUN(5 << 48)
	in.SetStatSN(s.statSN)
	in.SetExpCmdSN(s.cmdSN)
	in.SetMaxCmdSN(s.max)
	s.w.up.ControlNotify(&bhs, []byte("echo"))
	out := pdu.AsNOPOut(s.w.last())
	if out.TargetTransferTag() != 77 || out.InitiatorTaskTag() != noTag || out.LUN() != 5<<48 || string(s.w.data[0]) != "echo" {
		t.Errorf("answer %v with %q", out, s.w.data[0])
	}
	// StatSN did not advance.
	task := s.task(NoData, 0)
	s.Submit(task)
	s.respond(task.ITT(), nil, nil)
	s.want(StateLoggedIn, 0, 1, 2)
}

func TestLogout(t *testing.T) {
	s := newScript(t, 8, Options{})
	var answers []error
	s.Logout(func(err error) { answers = append(answers, err) })
	request := pdu.AsLogoutRequest(s.w.last())
	if request.Reason() != pdu.CloseSession || !request.Immediate() {
		t.Errorf("request %v", request)
	}
	late := s.task(Read, 512)
	s.Submit(late)
	if late.Outcome != NotSent {
		t.Errorf("a task during logout: outcome %v", late.Outcome)
	}
	var bhs pdu.BHS
	pdu.NewLogoutResponse(&bhs, pdu.LogoutSuccess).SetInitiatorTaskTag(request.InitiatorTaskTag())
	s.w.up.ControlNotify(&bhs, nil)
	if len(answers) != 1 || answers[0] != nil || s.State() != StateInLogout || len(s.downed) != 0 || s.w.ended != nil {
		t.Fatalf("answers %v, state %v, down %v, connection ended: %v", answers, s.State(), s.downed, s.w.ended)
	}
	// The target closes the connection.
	s.w.up.ConnectionTerminateNotify(errors.New("closed"))
	if len(s.downed) != 1 || s.downed[0] != nil || s.State() != StateFree {
		t.Errorf("down %v, state %v", s.downed, s.State())
	}
}

func TestUnexpectedPDUs(t *testing.T) {
	for _, c := range []struct {
		name  string
		build func(b *pdu.BHS, s *script)
		alive bool
	}{
		{"data-in over a datamover that places data", func(b *pdu.BHS, _ *script) { pdu.NewDataIn(b) }, false},
		{"R2T", func(b *pdu.BHS, _ *script) { pdu.NewR2T(b) }, false},
		{"login response", func(b *pdu.BHS, _ *script) { pdu.NewLoginResponse(b) }, false},
		{"logout response", func(b *pdu.BHS, _ *script) { pdu.NewLogoutResponse(b, pdu.LogoutSuccess) }, false},
		{"reject", func(b *pdu.BHS, s *script) { pdu.NewReject(b, 4).SetStatSN(s.statSN) }, false},
		{"answer to no ping", func(b *pdu.BHS, s *script) { pdu.NewNOPIn(b).SetInitiatorTaskTag(99) }, false},
		{"window update", func(b *pdu.BHS, s *script) {
			p := pdu.NewNOPIn(b)
			p.SetInitiatorTaskTag(noTag)
			p.SetTargetTransferTag(noTag)
		}, true},
		{"SCSI event", func(b *pdu.BHS, s *script) { pdu.NewAsyncMessage(b, pdu.AsyncSCSI).SetStatSN(s.statSN) }, true},
		{"logout request", func(b *pdu.BHS, s *script) { pdu.NewAsyncMessage(b, pdu.AsyncLogoutRequest).SetStatSN(s.statSN) }, false},
		{"drop of all connections", func(b *pdu.BHS, s *script) { pdu.NewAsyncMessage(b, pdu.AsyncDropAll).SetStatSN(s.statSN) }, false},
		{"opcode that is none", func(b *pdu.BHS, _ *script) { b[0] = 0x3f }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t, 8, Options{})
			var bhs pdu.BHS
			c.build(&bhs, s)
			s.w.up.ControlNotify(&bhs, nil)
			if alive := s.State() == StateLoggedIn; alive != c.alive {
				t.Errorf("state %v (%v)", s.State(), s.w.ended)
			}
		})
	}
}

// Whatever ends the connection, every task comes back exactly once.
func TestConnectionLost(t *testing.T) {
	for _, how := range []string{"send", "flush", "notify", "terminate"} {
		t.Run(how, func(t *testing.T) {
			s := newScript(t, 2, Options{})
			for range 5 {
				s.Submit(s.task(Read, 512))
			}
			lost := errors.New("cable pulled")
			switch how {
			case "send":
				s.max++
				s.w.sendErr = lost
				s.respond(s.w.tasks[0].ITT(), nil, nil)
			case "flush":
				s.w.flushErr = lost
				s.Flush()
			case "terminate":
				s.Terminate(lost)
			}
			s.w.up.ConnectionTerminateNotify(lost)
			s.w.up.ConnectionTerminateNotify(lost)
			if len(s.done) != 5 || len(s.downed) != 1 || !errors.Is(s.downed[0], lost) {
				t.Fatalf("%d tasks are back, down %v", len(s.done), s.downed)
			}
			outcomes := map[Outcome]int{}
			for _, task := range s.done {
				outcomes[task.Outcome]++
			}
			if how != "send" && (outcomes[Lost] != 2 || outcomes[NotSent] != 3) {
				t.Errorf("outcomes %v", outcomes)
			}
			s.Submit(s.task(Read, 512))
			if s.done[5].Outcome != NotSent {
				t.Errorf("a task after the end: outcome %v", s.done[5].Outcome)
			}
		})
	}
}

func TestTooFewOutstanding(t *testing.T) {
	_, err := NewSession(&wire{limits: Limits{Outstanding: controlSlots}}, &login.Result{}, Options{}, start)
	if err == nil {
		t.Error("a session without room for a command")
	}
}

func TestNoAllocation(t *testing.T) {
	s := newScript(t, 8, Options{})
	s.done = make([]*Task, 0, 4096)
	s.w.sent, s.w.tasks, s.w.data = make([]pdu.BHS, 0, 4096), make([]*Task, 0, 4096), make([][]byte, 0, 4096)
	task := s.task(Read, 512)
	var bhs pdu.BHS
	if n := testing.AllocsPerRun(1000, func() {
		s.done, s.w.sent, s.w.tasks, s.w.data = s.done[:0], s.w.sent[:0], s.w.tasks[:0], s.w.data[:0]
		s.Submit(task)
		s.Flush()
		s.max++
		r := pdu.NewSCSIResponse(&bhs)
		r.SetInitiatorTaskTag(task.ITT())
		r.SetStatSN(s.statSN)
		r.SetExpCmdSN(s.cmdSN)
		r.SetMaxCmdSN(s.max)
		s.statSN++
		s.w.up.ControlNotify(&bhs, nil)
	}); n != 0 {
		t.Errorf("%v allocations per command", n)
	}
	if len(s.done) != 1 || s.State() != StateLoggedIn {
		t.Fatal(fmt.Sprint("the commands did not run: ", s.w.ended))
	}
}
