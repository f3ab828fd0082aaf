package dataplane

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// request is a READ or WRITE of block 3 as a queue sends it, on the first reactor.
type request struct {
	iscsi.Task
	group    *group
	way      lu.Path
	outcomes []iscsi.Outcome
	done     chan []iscsi.Outcome
}

// by sends a request by the way of a unit's queue. write is what fills the block; 0: it is read.
func by(g *group, way lu.Path, write byte) *request {
	r := g.paths[0].reactor
	q := &request{group: g, way: way, done: make(chan []iscsi.Outcome, 1)}
	r.Call(func() {
		b, _ := r.commands.Get(512)
		q.Direction = iscsi.Read
		scsi.Read10(&q.CDB, 3, 1, false)
		if write != 0 {
			q.Direction = iscsi.Write
			scsi.Write10(&q.CDB, 3, 1, false)
			copy(b.Bytes(), bytes.Repeat([]byte{write}, 512))
		}
		q.Data, q.Region, q.Handler = b.Bytes(), b.Region().ID, q
		way.Submit(&q.Task)
	})
	return q
}

func (q *request) TaskDone(t *iscsi.Task) {
	if t.Outcome == iscsi.Responded && t.Status != scsi.StatusGood {
		if s, err := scsi.ParseSense(t.Sense[:t.SenseLen]); err == nil {
			if a := scsi.Classify(t.Status, &s).Attention; a == scsi.AttentionALUAChanged {
				q.group.notices.add(lu.Notice{Unit: &lu.Unit{LUN: t.LUN}, Attention: a})
			}
		}
		if e, ok := q.way.(interface{ Elsewhere() bool }); ok && e.Elsewhere() {
			time.AfterFunc(10*time.Millisecond, func() { // as lu does, which has a clock for it
				q.group.paths[0].reactor.Do(func() { q.way.Submit(t) })
			})
			return
		}
	}
	q.outcomes = append(q.outcomes, t.Outcome)
	if (t.Outcome == iscsi.Lost || t.Outcome == iscsi.NotSent) && q.way.Hold(t) {
		return
	}
	q.done <- q.outcomes
}

// end waits for a request.
func (q *request) end(t *testing.T) []iscsi.Outcome {
	t.Helper()
	select {
	case o := <-q.done:
		return o
	case <-time.After(10 * time.Second):
		t.Fatal("the request is not done")
		return nil
	}
}

// isCommand tells whether a CDB is one of the test's own.
func isCommand(cdb []byte) bool { return cdb[0] == scsi.OpRead10 || cdb[0] == scsi.OpWrite10 }

// fanned logs in to two portals with a policy, and has a way to the unit.
func fanned(t *testing.T, groups [2]uint16, change func(*ipc.LoginRequest)) (*Plane, *testtarget.Unit, [2]*testtarget.Target, *fan) {
	t.Helper()
	p := newPlane(t)
	unit, targets := twoPortals(t, groups)
	r := loginBoth(targets, api.PathRoundRobin)
	if change != nil {
		change(&r)
	}
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	at(t, targets, 2, 2)
	return p, unit, targets, enter(t, p)
}

// enter makes a way to the unit of a group.
func enter(t *testing.T, p *Plane) *fan {
	t.Helper()
	f, ok := p.groups["g1"].way(0, 0).(*fan)
	if !ok {
		t.Fatal("one session has all requests")
	}
	p.reactors[0].Call(f.enter)
	t.Cleanup(func() { p.reactors[0].Call(f.exit) })
	return f
}

// counters count the commands that come to each portal.
func counters(targets [2]*testtarget.Target) (n [2]*atomic.Int64) {
	for i, target := range targets {
		n[i] = &atomic.Int64{}
		target.SetHooks(testtarget.Hooks{Received: func(_ *testtarget.Conn, q *testtarget.PDU) bool {
			if q.Opcode() == 0x01 && isCommand(q.BHS[32:48]) {
				n[i].Add(1)
			}
			return true
		}})
	}
	return n
}

// Requests take the portals in turn.
func TestRoundRobin(t *testing.T) {
	p, _, targets, f := fanned(t, [2]uint16{1, 2}, nil)
	n := counters(targets)
	for range 40 {
		if got := by(p.groups["g1"], f, 0).end(t); got[len(got)-1] != iscsi.Responded {
			t.Fatalf("outcomes %v", got)
		}
	}
	if a, b := n[0].Load(), n[1].Load(); a != 20 || b != 20 {
		t.Errorf("%d and %d commands", a, b)
	}
	if g := p.groups["g1"].snapshot(); len(g.Sessions) != 4 || g.Sessions[0].Portal != "" || g.Sessions[2].Portal != targets[1].Addr() || g.Sessions[3].Reactor != 1 {
		t.Errorf("%+v", g.Sessions)
	}
}

// A portal that answers nothing gets nothing more.
func TestLeastQueued(t *testing.T) {
	p, _, targets, f := fanned(t, [2]uint16{1, 1}, func(r *ipc.LoginRequest) { r.Policy = api.PathLeastQueued })
	park := targets[0].Park(func(_ int, cdb []byte) bool { return isCommand(cdb) })
	var stuck *request
	for range 2 { // one of them goes there
		q := by(p.groups["g1"], f, 0)
		select {
		case <-q.done:
		case <-time.After(100 * time.Millisecond):
			stuck = q
		}
		if stuck != nil {
			break
		}
	}
	for range 20 {
		by(p.groups["g1"], f, 0).end(t)
	}
	if n := park.Waiting(); n != 1 || stuck == nil {
		t.Errorf("%d commands at the portal that does not answer", n)
	}
	park.Close()
	stuck.end(t)
}

// parked sends requests until one is parked at the first portal.
func parked(t *testing.T, p *Plane, f *fan, target *testtarget.Target, write byte) (*testtarget.Park, *request) {
	t.Helper()
	park := target.Park(func(_ int, cdb []byte) bool { return isCommand(cdb) })
	for range 2 {
		q := by(p.groups["g1"], f, write)
		for range 200 {
			if park.Waiting() > 0 {
				return park, q
			}
			select {
			case <-q.done:
			case <-time.After(5 * time.Millisecond):
				continue
			}
			break
		}
	}
	t.Fatal("no command comes to the portal")
	return nil, nil
}

// A portal goes away: reads go by the other one at once, writes after a reset, and nothing of what was sent by the first comes late.
func TestFanPortalLost(t *testing.T) {
	for _, c := range []struct {
		name   string
		write  byte
		resets int
	}{{"read", 0, 0}, {"write", 1, 1}} {
		t.Run(c.name, func(t *testing.T) {
			p, unit, targets, f := fanned(t, [2]uint16{1, 2}, nil)
			park, q := parked(t, p, f, targets[0], c.write)
			open := refuseAll(targets[0])
			if got := q.end(t); got[0] != iscsi.Lost || got[len(got)-1] != iscsi.Responded {
				t.Errorf("outcomes %v", got)
			}
			if n := unit.Resets(); n != c.resets {
				t.Errorf("%d resets, want %d", n, c.resets)
			}
			for range 4 { // all by the one that is left
				if got := by(p.groups["g1"], f, 7).end(t); len(got) != 1 || got[0] != iscsi.Responded {
					t.Errorf("outcomes %v", got)
				}
			}
			park.Close()
			b := make([]byte, 512)
			if _, err := unit.ReadAt(b, 3*512); err != nil || b[0] != 7 {
				t.Errorf("the block begins with %x, %v", b[:4], err)
			}
			open()
			at(t, targets, 2, 2)
			n := counters(targets)
			for deadline := time.Now().Add(10 * time.Second); n[0].Load() == 0; {
				if by(p.groups["g1"], f, 0).end(t); time.Now().After(deadline) {
					t.Fatal("no request goes by the portal that is back")
				}
			}
		})
	}
}

// The session of a write is back before others would have to see to it: it repeats the write, and nothing is reset.
func TestFanQuickReturn(t *testing.T) {
	p, unit, targets, f := fanned(t, [2]uint16{1, 1}, nil)
	park, q := parked(t, p, f, targets[0], 1)
	loseAll(targets[0])
	at(t, targets, 2, 2)
	park.Close()
	if got := q.end(t); got[0] != iscsi.Lost || got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	if n := unit.Resets(); n != 0 {
		t.Errorf("%d resets", n)
	}
}

// Requests wait as long as no portal answers, and fail when that takes too long; with one portal the group works, and with both it is whole.
func TestFanAllLost(t *testing.T) {
	p, _, targets, f := fanned(t, [2]uint16{1, 1}, func(r *ipc.LoginRequest) {
		one := 1
		r.Settings.ReplacementTimeout = &one
	})
	events := watchGroup(p)
	first, second := refuseAll(targets[0]), refuseAll(targets[1])
	at(t, targets, 0, 0)
	q := by(p.groups["g1"], f, 0)
	if got := q.end(t); got[len(got)-1] != iscsi.NotSent {
		t.Errorf("outcomes %v", got)
	}
	until(t, events, ipc.GroupFailed)
	second()
	at(t, targets, 0, 2)
	until(t, events, ipc.GroupRecovering)
	if got := by(p.groups["g1"], f, 0).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	first()
	until(t, events, ipc.GroupUp)
	at(t, targets, 2, 2)
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Error(err)
	}
	at(t, targets, 0, 0)
}

// One portal is not there when the login comes: the other one does, and the rest follows.
func TestFanLate(t *testing.T) {
	p := newPlane(t)
	_, targets := twoPortals(t, [2]uint16{1, 2})
	open := refuseAll(targets[1])
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathRoundRobin))
	if err != nil || g.State != ipc.GroupRecovering || len(g.Sessions) != 4 {
		t.Fatalf("%+v, %v", g, err)
	}
	f := enter(t, p)
	if got := by(p.groups["g1"], f, 0).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	open()
	at(t, targets, 2, 2)
}

// What an earlier data plane has sent by a portal may be at work there: nothing is sent by the other one before that is over.
func TestFanRestore(t *testing.T) {
	for _, clean := range []bool{false, true} { // true: it had answers to everything
		fanRestore(t, clean)
	}
}

func fanRestore(t *testing.T, clean bool) {
	p := newPlane(t)
	unit, targets := twoPortals(t, [2]uint16{1, 2})
	refuseAll(targets[0])
	r := ipc.RestoreRequest{Clean: clean, LoginRequest: loginBoth(targets, api.PathRoundRobin), TPGT: 1, Units: []ipc.Unit{{LUN: 0, Usable: true, Blocks: 2048, LogicalBlockSize: 512}}}
	if _, err := ask[ipc.Group](t, p, ipc.MethodRestore, r); err != nil {
		t.Fatal(err)
	}
	q := by(p.groups["g1"], enter(t, p), 1)
	if got := q.end(t); len(got) != 1 || got[0] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	if n := unit.Resets(); n > 0 == clean {
		t.Errorf("clean %v: %d resets", clean, n)
	}
}

// late checks that what is still parked at a portal does not take effect after what is written now.
func late(t *testing.T, p *Plane, f *fan, unit *testtarget.Unit, park *testtarget.Park) {
	t.Helper()
	if got := by(p.groups["g1"], f, 7).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	park.Close()
	b := make([]byte, 512)
	if _, err := unit.ReadAt(b, 3*512); err != nil || b[0] != 7 {
		t.Errorf("the block begins with %x, %v", b[:4], err)
	}
}

// The session is lost while it answers what it has before it leaves the portal: its write belongs to it all the same.
func TestFanDrainLost(t *testing.T) {
	p, unit, targets, f := fanned(t, [2]uint16{1, 2}, nil)
	park, q := parked(t, p, f, targets[0], 1)
	left := make(chan bool)
	go func() { left <- p.groups["g1"].paths[0].leaveRoute() }()
	for draining := false; !draining; {
		p.reactors[0].Call(func() { draining = p.groups["g1"].paths[0].draining != nil })
	}
	refuseAll(targets[0])
	if got := q.end(t); got[0] != iscsi.Lost || unit.Resets() != 1 {
		t.Errorf("outcomes %v, %d resets", got, unit.Resets())
	}
	late(t, p, f, unit, park)
	<-left
}

// Two sessions of a reactor end at the same time: each write waits for its own.
func TestFanTwoEnding(t *testing.T) {
	p, unit, targets, f := fanned(t, [2]uint16{1, 2}, nil)
	park, q := parked(t, p, f, targets[1], 1)
	targets[1].SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, _ *testtarget.PDU) bool {
		c.Close()
		return false
	}})
	g := p.groups["g1"]
	p.reactors[0].Call(func() {
		g.paths[2].session.Terminate(iscsi.ErrTimeout)
		g.paths[0].session.Terminate(iscsi.ErrTimeout)
	})
	if got := q.end(t); got[0] != iscsi.Lost || unit.Resets() != 1 {
		t.Errorf("outcomes %v, %d resets", got, unit.Resets())
	}
	late(t, p, f, unit, park)
}

// The answer to a reset comes when the session is back and lost once more: it is none for what that one had sent.
func TestFanLateReset(t *testing.T) {
	p, unit, targets, f := fanned(t, [2]uint16{1, 2}, nil)
	park, q := parked(t, p, f, targets[0], 1)
	begun, answer := make(chan struct{}, 8), make(chan struct{})
	targets[1].SetHooks(testtarget.Hooks{Sending: func(_ *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == 0x22 { // Task Management Function Response
			begun <- struct{}{}
			<-answer
		}
		return true
	}})
	open := refuseAll(targets[0])
	<-begun
	open()
	at(t, targets, 2, 2)
	if err := park.Wait(t.Context(), 1); err != nil { // the repetition
		t.Fatal(err)
	}
	refuseAll(targets[0])
	close(answer)
	if got := q.end(t); got[len(got)-1] != iscsi.Responded || unit.Resets() != 2 {
		t.Errorf("outcomes %v, %d resets", got, unit.Resets())
	}
	late(t, p, f, unit, park)
}

// A reset is never answered: the session that was to have it done ends, and what waits for it goes on.
func TestFanUnansweredReset(t *testing.T) {
	p, _, targets, f := fanned(t, [2]uint16{1, 2}, nil)
	p.patience.reset = 200 * time.Millisecond
	park, q := parked(t, p, f, targets[0], 1)
	asked := make(chan struct{}, 8)
	targets[1].SetHooks(testtarget.Hooks{Received: func(_ *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() != opTaskManagement {
			return true
		}
		asked <- struct{}{}
		return false
	}})
	open := refuseAll(targets[0])
	<-asked
	r := by(p.groups["g1"], f, 0)
	park.Close()
	open()
	if got := q.end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	if got := r.end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	at(t, targets, 2, 2)
}

// A queue that goes leaves nothing behind.
func TestFanExit(t *testing.T) {
	p, _, targets, _ := fanned(t, [2]uint16{1, 1}, nil)
	f := p.groups["g1"].way(0, 0).(*fan)
	p.reactors[0].Call(f.enter)
	refuseAll(targets[0])
	refuseAll(targets[1])
	for deadline, gone := time.Now().Add(10*time.Second), false; !gone; time.Sleep(time.Millisecond) { // the reactor hears of it later than the target
		if p.reactors[0].Call(func() { gone = len(f.best) == 0 }); time.Now().After(deadline) {
			t.Fatal("there are sessions")
		}
	}
	q := by(p.groups["g1"], f, 0)
	p.reactors[0].Call(f.exit)
	if got := q.end(t); got[len(got)-1] != iscsi.NotSent {
		t.Errorf("outcomes %v", got)
	}
}

// Two portals have different units under one number: no device is made of them.
func TestFanOtherUnit(t *testing.T) {
	p := newPlane(t)
	var targets [2]*testtarget.Target
	for i := range targets {
		u := testtarget.NewUnit(1 << 20)
		u.SetSerial([]string{"first", "second"}[i])
		targets[i] = newTarget(t, testtarget.Config{Units: []*testtarget.Unit{u}, PortGroup: uint16(i + 1)})
	}
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathRoundRobin)); err != nil {
		t.Fatal(err)
	}
	g := p.groups["g1"]
	wantCode(t, g.confirm(t.Context(), serveUnit(t, g, 0)), api.ErrNotSupported)
}
