package dataplane

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newPlane starts a data plane with two reactors.
func newPlane(t *testing.T) *Plane {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	p, err := New(Config{Reactors: 2, PoolSize: 4 << 20, Log: logrus.NewEntry(log), Build: "test", Exit: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// ask is what the control plane does.
func ask[T any](t *testing.T, p *Plane, method string, request any) (T, error) {
	t.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	answer, err := p.Handle(ctx, method, body)
	var out T
	if err == nil {
		text, _ := json.Marshal(answer)
		if err := json.Unmarshal(text, &out); err != nil {
			t.Fatal(err)
		}
	}
	return out, err
}

func newTarget(t *testing.T, c testtarget.Config) *testtarget.Target {
	t.Helper()
	target, err := testtarget.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		target.Close()
		if v := target.Violations(); len(v) != 0 {
			t.Errorf("the target complains: %q", v)
		}
	})
	return target
}

func loginTo(target *testtarget.Target) ipc.LoginRequest {
	return ipc.LoginRequest{
		Group: "g1", Target: target.Name(), Portal: target.Addr(), Transport: ipc.TransportTCP,
		InitiatorName: "iqn.2026-11.org.iserd:test", ISID: [6]byte{0x80, 1, 2, 3, 0, 0xff}, Timeout: 5 * time.Second,
	}
}

// settled waits until the process holds what it held before; the target's end of a connection is in this process, too, and closes when it likes.
func settled(t *testing.T, p *Plane, before ipc.Objects) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; {
		after := p.objects()
		if after.Descriptors == before.Descriptors && after.PoolBytesUsed == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("before %+v, after %+v", before, after)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func wantCode(t *testing.T, err error, code string) {
	t.Helper()
	var coded *ipc.Error
	if !errors.As(err, &coded) || coded.Code != code {
		t.Errorf("error %v, want code %s", err, code)
	}
}

func TestLoginLogout(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(8 << 20), nil, testtarget.NewUnit(16 << 20)}})
	before := p.objects()
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target))
	if err != nil {
		t.Fatal(err)
	}
	if len(g.Sessions) != 2 || g.State != ipc.GroupUp || g.Transport != ipc.TransportTCP || g.TransportReason == "" || target.Sessions() != 2 {
		t.Errorf("group %+v; %d sessions at the target", g, target.Sessions())
	}
	if a, b := g.Sessions[0].ISID, g.Sessions[1].ISID; a != [6]byte{0x80, 1, 2, 3, 0, 0xff} || b != [6]byte{0x80, 1, 2, 3, 1, 0} {
		t.Errorf("ISIDs %x and %x", a, b)
	}
	if len(g.Units) != 2 || g.Units[0].Blocks != 16384 || g.Units[1].Number != 2 || g.Units[1].Blocks != 32768 || !g.Units[1].Usable {
		t.Errorf("units %+v", g.Units)
	}
	_, err = ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target))
	wantCode(t, err, api.ErrAlreadyLoggedIn)
	if p.Idle() {
		t.Error("idle with a session")
	}
	_, err = ask[ipc.Empty](t, p, ipc.MethodShutdown, ipc.ShutdownRequest{OnlyIfIdle: true})
	wantCode(t, err, api.ErrBusy)
	_, err = ask[ipc.Empty](t, p, ipc.MethodAttach, ipc.AttachRequest{Group: "g1", LUN: uint64(scsi.NewLUN(7)), UblkID: 5, Queues: 2, Depth: 32})
	wantCode(t, err, api.ErrNotFound)
	_, err = ask[ipc.Empty](t, p, ipc.MethodAttach, ipc.AttachRequest{Group: "g1", Queues: 3, Depth: 32})
	wantCode(t, err, api.ErrInvalidArgs)
	_, err = ask[ipc.Empty](t, p, ipc.MethodDetach, ipc.DetachRequest{UblkID: 5})
	wantCode(t, err, api.ErrNotFound)

	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Fatal(err)
	}
	_, err = ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"})
	wantCode(t, err, api.ErrSessionNotFound)
	s, err := ask[ipc.State](t, p, ipc.MethodState, ipc.Empty{})
	if err != nil || len(s.Groups) != 0 || s.Objects.PoolBytesUsed != 0 {
		t.Errorf("state after logout %+v, %v", s, err)
	}
	settled(t, p, before)
	if !p.Idle() {
		t.Error("not idle after logout")
	}
}

// Each way in which a login fails leaves nothing behind.
func TestLoginFails(t *testing.T) {
	p := newPlane(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	target := newTarget(t, testtarget.Config{})
	// The second session is refused: the first one must go as well.
	half := newTarget(t, testtarget.Config{})
	half.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, _ *testtarget.PDU) bool {
		if half.Logins() == 1 && !c.FullFeature() {
			c.Close()
		}
		return true
	}})
	noUnits := newTarget(t, testtarget.Config{})
	noUnits.SetHooks(testtarget.Hooks{Received: func(_ *testtarget.Conn, q *testtarget.PDU) bool {
		return q.Opcode() != 1 // never answers a SCSI command
	}})
	before := p.objects()
	for _, c := range []struct {
		name   string
		change func(r *ipc.LoginRequest)
		code   string
	}{
		{"nobody listens", func(r *ipc.LoginRequest) { r.Portal = closed.Addr().String() }, api.ErrConnectionFailed},
		{"no answer", func(r *ipc.LoginRequest) { r.Portal, r.Timeout = silent.Addr().String(), 200*time.Millisecond }, api.ErrTimeout},
		{"no RDMA there", func(r *ipc.LoginRequest) { r.Transport = ipc.TransportISER }, api.ErrTransportUnavailable},
		{"unknown target", func(r *ipc.LoginRequest) { r.Target = "iqn.2003-01.org.example:nobody" }, api.ErrNotFound},
		{"bad name", func(r *ipc.LoginRequest) { r.Target = "nobody" }, api.ErrInternal},
		{"second session refused", func(r *ipc.LoginRequest) { r.Portal = half.Addr() }, api.ErrLoginFailed},
		{"commands are not answered", func(r *ipc.LoginRequest) { r.Portal, r.Timeout = noUnits.Addr(), 500*time.Millisecond }, api.ErrTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := loginTo(target)
			c.change(&r)
			_, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
			wantCode(t, err, c.code)
			if !p.Idle() {
				t.Error("something is left")
			}
			settled(t, p, before)
		})
	}
}

func TestTransportFallback(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	r := loginTo(target)
	r.Transport = ipc.TransportAuto
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
	if err != nil {
		t.Fatal(err)
	}
	if g.Transport != ipc.TransportTCP || len(g.TransportReason) < 20 {
		t.Errorf("transport %s because %q", g.Transport, g.TransportReason)
	}
}

// Lost sessions come back with the same ISID, and what was under way is sent again only by them.
func TestRecovery(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	events := make(chan ipc.Group, 64)
	p.Notify(func(_ string, body any) { events <- *body.(*ipc.Group) })
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	g := p.groups["g1"]
	path := g.paths[0]

	// A command that the target never answers in its first session.
	received := make(chan struct{})
	var lost *testtarget.Conn
	target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == 1 && lost == nil {
			lost = c
			close(received)
			return false
		}
		return true
	}})
	done := make(chan iscsi.Outcome, 4)
	task := &iscsi.Task{LUN: 0, CDB: [16]byte{}} // TEST UNIT READY
	task.Handler = taskFunc(func(t *iscsi.Task) {
		if t.Outcome == iscsi.Lost && path.Hold(t) {
			return
		}
		done <- t.Outcome
	})
	path.reactor.Do(func() { path.Submit(task) })
	<-received
	lost.Close()
	if o := <-done; o != iscsi.Responded {
		t.Errorf("outcome %v", o)
	}
	var states []string
	for len(states) == 0 || states[len(states)-1] != ipc.GroupUp {
		states = append(states, (<-events).State)
	}
	if states[0] != ipc.GroupRecovering {
		t.Errorf("states %v", states)
	}
	if n := target.Logins(); n != 3 {
		t.Errorf("%d logins, want 3", n)
	}
	if n := target.Sessions(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}

// A target asks for a logout, or drops the sessions for a while: the session goes on elsewhere in time, and no request fails.
func TestTargetEndsSession(t *testing.T) {
	for _, c := range []struct {
		name     string
		event    pdu.AsyncEvent
		p2, p3   uint16
		polite   bool // it gets a Logout Request
		earliest time.Duration
	}{
		{"logout request", pdu.AsyncLogoutRequest, 0, 10, true, 0},
		{"negotiation request", pdu.AsyncNegotiate, 0, 10, true, 0},
		{"logout request, at once", pdu.AsyncLogoutRequest, 0, 0, true, 0},
		{"drop", pdu.AsyncDropAll, 0, 0, false, 0},
		{"drop for a second", pdu.AsyncDropConnection, 1, 0, false, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlane(t)
			target := newTarget(t, testtarget.Config{})
			events := make(chan ipc.Group, 64)
			p.Notify(func(_ string, body any) { events <- *body.(*ipc.Group) })
			if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
				t.Fatal(err)
			}
			path := p.groups["g1"].paths[0]
			// The session of this path: the one that its next command comes from. It is answered only after the event.
			told := make(chan *testtarget.Conn, 1)
			var logouts atomic.Int32
			target.SetHooks(testtarget.Hooks{Received: func(tc *testtarget.Conn, q *testtarget.PDU) bool {
				if q.Opcode() == byte(pdu.OpSCSICommand) && len(told) == 0 {
					tc.Async(byte(c.event), 0, c.p2, c.p3)
					told <- tc
				}
				if q.Opcode() == byte(pdu.OpLogoutRequest) {
					if q.BHS[1] != 0x80 {
						t.Errorf("Logout Request with %#02x", q.BHS[1])
					}
					logouts.Add(1)
				}
				return true
			}})
			done := make(chan iscsi.Outcome, 1)
			task := &iscsi.Task{CDB: [16]byte{}} // TEST UNIT READY
			task.Handler = taskFunc(func(t *iscsi.Task) {
				if t.Outcome != iscsi.Responded && path.Hold(t) {
					return
				}
				done <- t.Outcome
			})
			start := time.Now()
			path.reactor.Do(func() { path.Submit(task) })
			if o := <-done; o != iscsi.Responded {
				t.Errorf("outcome %v", o)
			}
			for g := range events {
				if g.State == ipc.GroupUp {
					break
				}
			}
			if took := time.Since(start); took < c.earliest || took > c.earliest+5*time.Second {
				t.Errorf("back after %v", took)
			}
			if n := target.Logins(); n != 3 {
				t.Errorf("%d logins, want 3", n)
			}
			if n := logouts.Load(); n != 0 != c.polite || n > 1 {
				t.Errorf("%d logout requests", n)
			}
		})
	}
}

// A target that stays away: requests are held, a logout in the middle of the recovery gives them back as failed.
func TestLogoutDuringRecovery(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	path := p.groups["g1"].paths[1]
	events := make(chan ipc.Group, 64)
	p.Notify(func(_ string, body any) { events <- *body.(*ipc.Group) })
	target.Close()
	if g := <-events; g.State != ipc.GroupRecovering || g.Error == nil {
		t.Errorf("group %+v", g)
	}
	<-events // the other session's loss
	done := make(chan iscsi.Outcome, 1)
	task := &iscsi.Task{Handler: taskFunc(func(t *iscsi.Task) { done <- t.Outcome })}
	path.reactor.Call(func() { path.Submit(task) })
	select {
	case o := <-done:
		t.Fatalf("a request during recovery is not held: outcome %v", o)
	default:
	}
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Fatal(err)
	}
	if o := <-done; o != iscsi.NotSent {
		t.Errorf("outcome %v", o)
	}
	if !p.Idle() {
		t.Error("not idle")
	}
}

type taskFunc func(t *iscsi.Task)

func (f taskFunc) TaskDone(t *iscsi.Task) { f(t) }

func TestBadRequests(t *testing.T) {
	p := newPlane(t)
	_, err := ask[ipc.Empty](t, p, "frobnicate", ipc.Empty{})
	wantCode(t, err, api.ErrInvalidArgs)
	_, err = p.Handle(context.Background(), ipc.MethodLogin, json.RawMessage(`{"target":5}`))
	wantCode(t, err, api.ErrInvalidArgs)
	h, err := ask[ipc.HelloReply](t, p, ipc.MethodHello, ipc.HelloRequest{Version: ipc.Version})
	if err != nil || h.Reactors != 2 || h.Version != ipc.Version || h.PID == 0 {
		t.Errorf("hello %+v, %v", h, err)
	}
}

// An idle reactor sleeps, and a message wakes it at once.
func TestReactorSleeps(t *testing.T) {
	p := newPlane(t)
	r := p.reactors[0]
	asleep := func() bool {
		return r.sleeping.Load()
	}
	for range 200 {
		for deadline := time.Now().Add(5 * time.Second); !asleep(); {
			if time.Now().After(deadline) {
				t.Fatal("the reactor does not go to sleep")
			}
			time.Sleep(100 * time.Microsecond)
		}
		done := make(chan struct{})
		r.Do(func() { close(done) })
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			t.Fatal("the reactor does not wake up")
		}
	}
}
