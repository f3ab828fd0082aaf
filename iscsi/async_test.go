package iscsi

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// event is an Asynchronous Message of the target.
func (s *script) event(e pdu.AsyncEvent, p2, p3 uint16, data []byte) {
	var bhs pdu.BHS
	a := pdu.NewAsyncMessage(&bhs, e)
	a.SetStatSN(s.statSN)
	a.SetExpCmdSN(s.cmdSN)
	a.SetMaxCmdSN(s.max)
	a.SetParameters(0, p2, p3)
	a.SetLUN(uint64(scsi.NewLUN(3)))
	s.statSN++
	s.w.up.ControlNotify(&bhs, data)
}

// answerLogout is the answer to the Logout Request that was sent last.
func (s *script) answerLogout(result pdu.LogoutResult) {
	var bhs pdu.BHS
	pdu.NewLogoutResponse(&bhs, result).SetInitiatorTaskTag(s.w.last().InitiatorTaskTag())
	s.w.up.ControlNotify(&bhs, nil)
}

// A target that asks for a logout gets one when the commands have ended; what waits goes to the next session.
func TestLogoutRequested(t *testing.T) {
	for _, e := range []pdu.AsyncEvent{pdu.AsyncLogoutRequest, pdu.AsyncNegotiate} {
		s := newScript(t, 8, Options{PingInterval: 5 * time.Second, PingTimeout: 15 * time.Second})
		first, second, late := s.task(Read, 512), s.task(Read, 512), s.task(Read, 512)
		s.Submit(first)
		s.Submit(second)
		s.event(e, 0, 10, nil)
		s.Submit(late)
		s.want(StateLoggedIn, 2, 0, 2)
		if s.calls != 1 {
			t.Errorf("event %d: %d calls of Soon", e, s.calls)
		}
		if next := s.Tick(start); !next.Equal(start.Add(5 * time.Second)) {
			t.Errorf("event %d: next tick after %v", e, next.Sub(start))
		}
		s.respond(first.ITT(), nil, nil)
		s.want(StateLoggedIn, 1, 1, 2)
		s.respond(second.ITT(), nil, nil)
		s.want(StateInLogout, 0, 2, 3)
		if r := pdu.AsLogoutRequest(s.w.last()); r.Reason() != pdu.CloseSession || !r.Final() || !r.Immediate() {
			t.Errorf("event %d: request %v", e, r)
		}
		s.answerLogout(pdu.LogoutSuccess)
		s.want(StateInLogout, 0, 2, 3)
		s.w.up.ConnectionTerminateNotify(io.EOF)
		var end *TargetEndError
		if len(s.downed) != 1 || !errors.As(s.downed[0], &end) || !errors.Is(end, ErrTargetAsked) || !end.Orderly || end.Event != e || late.Outcome != NotSent {
			t.Errorf("event %d: down %v, outcome %v", e, s.downed, late.Outcome)
		}
	}
}

func TestLogoutRequestedLate(t *testing.T) {
	t.Run("commands do not end", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		hung := s.task(Read, 512)
		s.Submit(hung)
		s.event(pdu.AsyncLogoutRequest, 0, 10, nil)
		s.event(pdu.AsyncLogoutRequest, 0, 10, nil) // once more changes nothing
		s.Tick(start)
		s.Tick(start.Add(4 * time.Second))
		s.want(StateLoggedIn, 1, 0, 1)
		s.Tick(start.Add(5 * time.Second))
		s.want(StateInLogout, 1, 0, 2)
		s.answerLogout(pdu.LogoutSuccess)
		s.Tick(start.Add(5 * time.Second))
		s.want(StateInLogout, 1, 0, 2)
		// The target does not close the connection.
		s.Tick(start.Add(6*time.Second + time.Millisecond))
		s.want(StateCleanupWait, 1, 0, 2)
		s.w.up.ConnectionTerminateNotify(s.w.ended)
		var end *TargetEndError
		if hung.Outcome != Lost || len(s.downed) != 1 || !errors.As(s.downed[0], &end) || !end.Orderly {
			t.Errorf("outcome %v, down %v", hung.Outcome, s.downed)
		}
	})
	t.Run("no response", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.event(pdu.AsyncLogoutRequest, 0, 1, nil)
		s.want(StateInLogout, 0, 0, 1)
		s.Tick(start)
		s.Tick(start.Add(time.Second))
		s.want(StateInLogout, 0, 0, 1)
		s.Tick(start.Add(shortest))
		s.want(StateCleanupWait, 0, 0, 1)
		s.w.up.ConnectionTerminateNotify(s.w.ended)
		var end *TargetEndError
		if len(s.downed) != 1 || !errors.As(s.downed[0], &end) || end.Orderly {
			t.Errorf("down %v", s.downed)
		}
	})
	t.Run("refused", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.event(pdu.AsyncLogoutRequest, 0, 1, nil)
		s.answerLogout(pdu.LogoutCleanupFailed)
		s.want(StateCleanupWait, 0, 0, 1)
	})
	t.Run("no time", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.Submit(s.task(Read, 512))
		s.event(pdu.AsyncLogoutRequest, 0, 0, nil)
		s.want(StateInLogout, 1, 0, 2)
	})
	t.Run("our own logout first", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.Logout(func(error) {})
		s.event(pdu.AsyncLogoutRequest, 0, 10, nil)
		s.want(StateInLogout, 0, 0, 1)
		s.answerLogout(pdu.LogoutSuccess)
		s.w.up.ConnectionTerminateNotify(io.EOF)
		if len(s.downed) != 1 || s.downed[0] != nil {
			t.Errorf("down %v", s.downed)
		}
	})
	for _, answered := range []bool{false, true} {
		t.Run(fmt.Sprintf("our own logout after theirs, answered %v", answered), func(t *testing.T) {
			s := newScript(t, 8, Options{})
			s.event(pdu.AsyncLogoutRequest, 0, 10, nil)
			var answers []error
			if answered {
				s.answerLogout(pdu.LogoutSuccess)
			}
			s.Logout(func(err error) { answers = append(answers, err) })
			if !answered {
				s.answerLogout(pdu.LogoutSuccess)
			}
			s.want(StateInLogout, 0, 0, 1)
			s.Tick(start)
			s.w.up.ConnectionTerminateNotify(io.EOF)
			if len(answers) != 1 || answers[0] != nil || len(s.downed) != 1 || s.downed[0] != nil {
				t.Errorf("answers %v, down %v", answers, s.downed)
			}
		})
	}
	t.Run("our own logout meanwhile", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		s.Submit(s.task(Read, 512))
		s.event(pdu.AsyncLogoutRequest, 0, 10, nil)
		s.Logout(func(error) {})
		s.answerLogout(pdu.LogoutSuccess)
		s.w.up.ConnectionTerminateNotify(io.EOF)
		if len(s.downed) != 1 || s.downed[0] != nil {
			t.Errorf("down %v", s.downed)
		}
	})
}

func TestDropped(t *testing.T) {
	for _, e := range []pdu.AsyncEvent{pdu.AsyncDropConnection, pdu.AsyncDropAll} {
		s := newScript(t, 8, Options{})
		s.Submit(s.task(Read, 512))
		s.event(e, 7, 0, nil)
		s.want(StateCleanupWait, 1, 0, 1)
		s.w.up.ConnectionTerminateNotify(s.w.ended)
		var end *TargetEndError
		if !errors.As(s.downed[0], &end) || end.Event != e || end.Time2Wait != 7*time.Second || end.Orderly {
			t.Errorf("event %d: down %v", e, s.downed)
		}
	}
}

func TestEvents(t *testing.T) {
	for _, c := range []struct {
		name  string
		event pdu.AsyncEvent
		data  []byte
		got   []byte
		alive bool
	}{
		{"SCSI event", pdu.AsyncSCSI, pdu.AppendSense(nil, []byte{0x70, 0, 6}), []byte{0x70, 0, 6}, true},
		{"SCSI event with bad sense", pdu.AsyncSCSI, []byte{0, 9, 0x70}, nil, false},
		{"vendor's event", pdu.AsyncVendor, []byte("text"), []byte("text"), true},
		{"end of tasks, which was not agreed upon", pdu.AsyncTasksTerminated, nil, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t, 8, Options{})
			s.event(c.event, 0, 0, c.data)
			if alive := s.State() == StateLoggedIn; alive != c.alive {
				t.Fatalf("state %v", s.State())
			}
			if !c.alive {
				return
			}
			if !slices.Equal(s.events, []pdu.AsyncEvent{c.event}) || !slices.Equal(s.eventData, c.got) {
				t.Errorf("events %v with %x", s.events, s.eventData)
			}
			task := s.task(Read, 512) // StatSN has advanced
			s.Submit(task)
			s.respond(task.ITT(), nil, nil)
			s.want(StateLoggedIn, 0, 1, 1)
		})
	}
}

// rejectSent is a Reject of the PDU that was sent as number n.
func (s *script) rejectSent(n int, reason pdu.RejectReason, cut int) {
	var bhs pdu.BHS
	r := pdu.NewReject(&bhs, reason)
	r.SetStatSN(s.statSN)
	r.SetExpCmdSN(s.cmdSN)
	r.SetMaxCmdSN(s.max)
	s.statSN++
	s.w.up.ControlNotify(&bhs, s.w.sent[n][:pdu.HeaderLength-cut])
}

func TestReject(t *testing.T) {
	o := Options{PingInterval: 5 * time.Second, PingTimeout: 15 * time.Second}
	ping := func(s *script) { s.Tick(start.Add(5 * time.Second)) }
	command := func(s *script) { s.Submit(s.task(Write, 512)) }
	for _, c := range []struct {
		name   string
		send   func(s *script)
		reason pdu.RejectReason
		cut    int
		state  State
		told   int
	}{
		{"command", command, pdu.RejectDataDigest, 0, StateCleanupWait, 0},
		{"command, waiting for logout", command, pdu.RejectWaitingForLogout, 0, StateInLogout, 1},
		{"ping", ping, pdu.RejectTooManyImmediate, 0, StateLoggedIn, 1},
		{"ping, protocol error", ping, pdu.RejectProtocolError, 0, StateCleanupWait, 0},
		{"ping, but no header", ping, pdu.RejectTooManyImmediate, 1, StateCleanupWait, 0},
		{"SNACK that was not sent", ping, pdu.RejectSNACK, 0, StateCleanupWait, 0},
		{"deprecated reason", ping, pdu.RejectNegotiationReset, 0, StateCleanupWait, 0},
		{"data", func(s *script) {
			command(s)
			pdu.NewDataOut(&s.w.sent[0]).SetInitiatorTaskTag(s.w.tasks[0].ITT())
		}, pdu.RejectInvalidPDUField, 0, StateLoggedIn, 1},
		{"logout", func(s *script) { s.Logout(func(err error) { s.downed = append(s.downed, err) }) }, pdu.RejectCommandNotSupported, 0, StateCleanupWait, 0},
		{"task management", func(s *script) { s.manage(TaskManagement{Function: pdu.TargetWarmReset}) }, pdu.RejectCommandNotSupported, 0, StateLoggedIn, 0},
		{"what was never sent", func(s *script) { command(s); pdu.NewTextRequest(&s.w.sent[0]) }, pdu.RejectCommandNotSupported, 0, StateCleanupWait, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			told := 0
			o.Rejected = func(err *RejectError) {
				if told++; err.Reason != c.reason || !err.Header {
					t.Errorf("told %v", err)
				}
			}
			s := newScript(t, 8, o)
			c.send(s)
			s.rejectSent(0, c.reason, c.cut)
			if s.State() != c.state || told != c.told {
				t.Errorf("state %v, told %d times (%v)", s.State(), told, s.w.ended)
			}
			if s.State() == StateCleanupWait {
				var rejected *RejectError
				if !errors.As(s.w.ended, &rejected) || rejected.Reason != c.reason || rejected.Header != (c.cut == 0) {
					t.Errorf("ended with %v", s.w.ended)
				}
			}
		})
	}
	t.Run("who asked hears of it", func(t *testing.T) {
		s := newScript(t, 8, Options{})
		a := s.manage(TaskManagement{Function: pdu.LogicalUnitReset})
		s.rejectSent(0, pdu.RejectTooManyImmediate, 0)
		var rejected *RejectError
		if len(*a) != 1 || !errors.As((*a)[0], &rejected) || !rejected.Resend() || rejected.What != pdu.OpTaskRequest {
			t.Errorf("answers %v", *a)
		}
		command(s)
		s.want(StateLoggedIn, 1, 0, 2)
	})
	t.Run("another ping follows a rejected one", func(t *testing.T) {
		o.Rejected = nil
		s := newScript(t, 8, o)
		ping(s)
		s.rejectSent(0, pdu.RejectTooManyImmediate, 0)
		s.Tick(start.Add(10 * time.Second))
		s.want(StateLoggedIn, 0, 0, 2)
	})
}

// Whatever PDU opens the window lets waiting commands go.
func TestWindowOpensByAnyPDU(t *testing.T) {
	for name, send := range map[string]func(s *script){
		"answer to a ping": func(s *script) {
			s.Tick(start.Add(5 * time.Second))
			var bhs pdu.BHS
			n := pdu.NewNOPIn(&bhs)
			n.SetInitiatorTaskTag(s.w.last().InitiatorTaskTag())
			n.SetStatSN(s.statSN)
			n.SetExpCmdSN(s.cmdSN)
			n.SetMaxCmdSN(s.max)
			s.w.up.ControlNotify(&bhs, nil)
		},
		"ping": func(s *script) {
			var bhs pdu.BHS
			n := pdu.NewNOPIn(&bhs)
			n.SetTargetTransferTag(1)
			n.SetStatSN(s.statSN)
			n.SetExpCmdSN(s.cmdSN)
			n.SetMaxCmdSN(s.max)
			s.w.up.ControlNotify(&bhs, nil)
		},
		"event": func(s *script) { s.event(pdu.AsyncVendor, 0, 0, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t, 1, Options{PingInterval: 5 * time.Second, PingTimeout: 15 * time.Second})
			s.Submit(s.task(Read, 512))
			s.Submit(s.task(Read, 512))
			s.max++
			send(s)
			if s.InFlight() != 2 {
				t.Errorf("%d in flight", s.InFlight())
			}
		})
	}
}

// A target that has declared how many immediate PDUs it can take gets no more; they take a place in the window instead.
func TestUnexpectedLimit(t *testing.T) {
	s := &script{t: t, w: &wire{limits: Limits{Outstanding: 16}}, statSN: 1, max: 12}
	result := &login.Result{ExpStatSN: 1, CmdSN: 10, ExpCmdSN: 10, MaxCmdSN: 12}
	result.Keys.TargetMaxOutstandingUnexpected = 2
	var err error
	o := Options{Down: func(err error) { s.downed = append(s.downed, err) }}
	if s.Session, err = NewSession(s.w, result, o, start); err != nil {
		t.Fatal(err)
	}
	reset := func() *[]error { return s.manage(TaskManagement{Function: pdu.TargetWarmReset}) }
	answer := func(n int) {
		s.managedBy(s.w.sent[n].InitiatorTaskTag(), pdu.TaskFunctionComplete)
	}
	for i, c := range []struct {
		immediate bool
		cmdSN     uint32
	}{{true, 10}, {true, 10}, {false, 10}, {false, 11}, {false, 12}} {
		reset()
		if b := s.w.last(); b.Immediate() != c.immediate || b.CmdSN() != c.cmdSN {
			t.Fatalf("request %d: immediate %v, CmdSN %d", i, b.Immediate(), b.CmdSN())
		}
		if i < 4 {
			answer(i)
		}
		if i == 1 { // nothing is retired while the target has not taken a command
			s.cmdSN = 10
		}
		if i >= 2 { // pretend that it does not hear of them
			s.window.ExpCmdSN = 10
		}
	}
	// Neither kind is possible.
	answer(4)
	s.window.ExpCmdSN = 10
	if a := reset(); len(*a) != 1 || !errors.Is((*a)[0], ErrTaskManagement) {
		t.Errorf("answers %v", *a)
	}
	// The target has taken what came after them.
	s.window.ExpCmdSN = 13
	reset()
	if b := s.w.last(); !b.Immediate() || b.CmdSN() != 13 {
		t.Errorf("immediate %v, CmdSN %d", b.Immediate(), b.CmdSN())
	}
	s.window.ExpCmdSN = 10
	s.unexpected = 2
	s.Logout(func(error) {})
	if s.State() != StateCleanupWait {
		t.Errorf("state %v", s.State())
	}
}
