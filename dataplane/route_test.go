package dataplane

import (
	"bytes"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// twoPortals are two portals of one target with the same unit. Their portal groups are groups.
func twoPortals(t *testing.T, groups [2]uint16) (*testtarget.Unit, [2]*testtarget.Target) {
	t.Helper()
	unit := testtarget.NewUnit(1 << 20)
	var targets [2]*testtarget.Target
	for i := range targets {
		targets[i] = newTarget(t, testtarget.Config{Units: []*testtarget.Unit{unit}, PortGroup: groups[i]})
	}
	return unit, targets
}

// loginBoth is a request with the second portal as the other one.
func loginBoth(targets [2]*testtarget.Target, policy string) ipc.LoginRequest {
	r := loginTo(targets[0])
	r.Others, r.Policy = []ipc.Route{{Portal: targets[1].Addr(), Transport: ipc.TransportTCP}}, policy
	return r
}

// at waits until the sessions are as many as wanted at each portal.
func at(t *testing.T, targets [2]*testtarget.Target, first, second int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); targets[0].Sessions() != first || targets[1].Sessions() != second; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d and %d sessions, want %d and %d", targets[0].Sessions(), targets[1].Sessions(), first, second)
		}
	}
}

// refuseAll closes the portal, and says how to open it again.
func refuseAll(target *testtarget.Target) (open func()) {
	target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		c.Close()
		return false
	}})
	loseAll(target)
	return func() { target.SetHooks(testtarget.Hooks{}) }
}

// A portal goes away and comes back: the sessions go to the other one and return; what they had sent by the first is repeated, once.
func TestFailover(t *testing.T) {
	for _, c := range []struct {
		name   string
		groups [2]uint16
		reset  bool
	}{
		{"one portal group", [2]uint16{1, 1}, false},
		{"two portal groups", [2]uint16{1, 2}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlane(t)
			p.patience.back = 50 * time.Millisecond
			unit, targets := twoPortals(t, c.groups)
			if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathFailover)); err != nil {
				t.Fatal(err)
			}
			at(t, targets, 2, 0)
			park := targets[0].Park(func(_ int, cdb []byte) bool { return cdb[0] == scsi.OpWrite10 })
			w := newWriter(p.groups["g1"].paths[0], 0, nil)
			if err := park.Wait(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			events := watchGroup(p)
			open := refuseAll(targets[0])
			at(t, targets, 0, 2)
			until(t, events, ipc.GroupUp)
			if got := <-w.done; len(got) != 2 || got[0] != iscsi.Lost || got[1] != iscsi.Responded {
				t.Errorf("outcomes %v", got)
			}
			if n := unit.Resets(); n > 0 != c.reset { // each session may see to it
				t.Errorf("%d resets", n)
			}
			// What was sent by the first portal does not come late.
			block := bytes.Repeat([]byte{7}, 512)
			if _, err := unit.WriteAt(block, 3*512); err != nil {
				t.Fatal(err)
			}
			park.Close()
			got := make([]byte, 512)
			if _, err := unit.ReadAt(got, 3*512); err != nil || !bytes.Equal(got, block) {
				t.Errorf("the block begins with % x, %v", got[:4], err)
			}
			if g := p.groups["g1"].snapshot(); g.Sessions[0].Portal != targets[1].Addr() || g.Sessions[0].TPGT != c.groups[1] || g.State != ipc.GroupUp {
				t.Errorf("%+v", g)
			}
			open()
			at(t, targets, 2, 0)
			if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
				t.Error(err)
			}
			at(t, targets, 0, 0)
		})
	}
}

// Sessions begin at portals of their own, and meet where one is left.
func TestSpread(t *testing.T) {
	p := newPlane(t)
	p.patience.back = 50 * time.Millisecond
	_, targets := twoPortals(t, [2]uint16{1, 1})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathSpread)); err != nil {
		t.Fatal(err)
	}
	at(t, targets, 1, 1)
	open := refuseAll(targets[1])
	at(t, targets, 2, 0)
	open()
	at(t, targets, 1, 1)
	open = refuseAll(targets[0])
	at(t, targets, 0, 2)
	open()
	at(t, targets, 1, 1)
}

// Sessions that are to stay where they are wait for their portal.
func TestSinglePath(t *testing.T) {
	p := newPlane(t)
	_, targets := twoPortals(t, [2]uint16{1, 1})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathSingle)); err != nil {
		t.Fatal(err)
	}
	events := watchGroup(p)
	open := refuseAll(targets[0])
	until(t, events, ipc.GroupRecovering)
	open()
	at(t, targets, 2, 0)
	if n := targets[1].Logins(); n != 0 {
		t.Errorf("%d logins at the other portal", n)
	}
}

func TestPlan(t *testing.T) {
	via := func(portal string, t ipc.Transport) ipc.Route { return ipc.Route{Portal: portal, Transport: t} }
	iser, tcp, auto := ipc.TransportISER, ipc.TransportTCP, ipc.TransportAuto
	for _, c := range []struct {
		name   string
		asked  ipc.Transport
		chosen ipc.Transport
		others []ipc.Route
		policy string
		want   []ipc.Route
		homes  []int // of three paths
	}{
		{"none", tcp, tcp, nil, api.PathFailover, []ipc.Route{via("a", tcp)}, []int{0, 0, 0}},
		{"not asked for", auto, iser, []ipc.Route{via("b", auto)}, api.PathSingle, []ipc.Route{via("a", iser)}, []int{0, 0, 0}},
		{"left to us", auto, iser, nil, api.PathFailover, []ipc.Route{via("a", iser), via("a", tcp)}, []int{0, 0, 0}},
		{"fell back", auto, tcp, nil, api.PathFailover, []ipc.Route{via("a", tcp), via("a", iser)}, []int{0, 0, 0}},
		{"RDMA first", auto, iser, []ipc.Route{via("b", auto)}, api.PathSpread, []ipc.Route{via("a", iser), via("b", iser), via("a", tcp), via("b", tcp)}, []int{0, 1, 0}},
		{"mixed", iser, iser, []ipc.Route{via("b", tcp), via("c", iser)}, api.PathSpread, []ipc.Route{via("a", iser), via("c", iser), via("b", tcp)}, []int{0, 1, 0}},
		{"restored", iser, iser, []ipc.Route{via("a", auto)}, api.PathFailover, []ipc.Route{via("a", iser), via("a", tcp)}, []int{0, 0, 0}},
		{"named twice", tcp, tcp, []ipc.Route{via("a", tcp), via("b", tcp)}, api.PathSpread, []ipc.Route{via("a", tcp), via("b", tcp)}, []int{0, 1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := &group{transport: c.chosen, paths: []*path{{}, {}, {}}}
			g.request.Portal, g.request.Transport, g.request.Others, g.request.Policy = "a", c.asked, c.others, c.policy
			g.plan()
			if !slices.Equal(g.routes, c.want) {
				t.Errorf("routes %v, want %v", g.routes, c.want)
			}
			for i, p := range g.paths {
				if p.home != c.homes[i] || p.at != p.home {
					t.Errorf("path %d begins at %d, prefers %d, want %d", i, p.at, p.home, c.homes[i])
				}
			}
		})
	}
}

// The longer a preferred route says nothing, and the oftener a return to it did not last, the later the next look.
func TestBackOff(t *testing.T) {
	b := backOff{probe: time.Second}
	now := time.Now()
	look := func(want time.Duration) {
		t.Helper()
		if got := b.pause(now); got != want {
			t.Errorf("pause %v, want %v", got, want)
		}
	}
	look(time.Second)
	for _, want := range []time.Duration{2 * time.Second, 4 * time.Second} {
		b.silent()
		look(want)
	}
	for range 9 {
		b.silent()
	}
	look(lastProbe)
	for _, want := range []time.Duration{2 * time.Second, 4 * time.Second, 8 * time.Second} {
		b.returned(now, time.Second)
		look(want)
	}
	now = now.Add(7 * time.Second)
	look(time.Second)
	for range 20 {
		b.returned(now, time.Second)
	}
	look(lastReturn)
	now = now.Add(3 * lastReturn) // it lasted
	b.returned(now, time.Second)
	look(2 * time.Second)
}

// Sessions of many CPUs go to another portal group together: one reset does for those that were lost before it.
func TestFailoverResets(t *testing.T) {
	const n = 12
	log := logrus.New()
	log.SetOutput(io.Discard)
	p, err := New(Config{Reactors: n, PoolSize: 4 << 20, Log: logrus.NewEntry(log), Build: "test", Exit: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	unit, targets := twoPortals(t, [2]uint16{1, 2})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathFailover)); err != nil {
		t.Fatal(err)
	}
	at(t, targets, n, 0)
	park := targets[0].Park(func(_ int, cdb []byte) bool { return cdb[0] == scsi.OpWrite10 })
	var writers []*writer
	for i := range n {
		writers = append(writers, newWriter(p.groups["g1"].paths[i], 0, nil))
	}
	if err := park.Wait(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	refuseAll(targets[0])
	for _, w := range writers {
		if got := <-w.done; got[len(got)-1] != iscsi.Responded {
			t.Errorf("outcomes %v", got)
		}
	}
	if r := unit.Resets(); r == 0 || r > n/2 {
		t.Errorf("%d resets for %d sessions", r, n)
	}
	park.Close()
}

// A session that returns to a portal of another group has nothing under way: no unit is reset, whatever came meanwhile.
func TestReturnWithoutReset(t *testing.T) {
	p := newPlane(t)
	p.patience.back = 50 * time.Millisecond
	unit, targets := twoPortals(t, [2]uint16{1, 2})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathFailover)); err != nil {
		t.Fatal(err)
	}
	open := refuseAll(targets[0])
	at(t, targets, 0, 2)
	before := unit.Resets()
	stop, done := make(chan struct{}), make(chan int)
	go func() { // somebody always writes
		path := p.groups["g1"].paths[0]
		w := newWriter(path, 0, nil)
		for n := 1; ; n++ {
			<-w.done
			select {
			case <-stop:
				done <- n
				return
			default:
				path.reactor.Call(func() { path.Submit(&w.Task) })
			}
		}
	}()
	open()
	at(t, targets, 2, 0)
	close(stop)
	if n := <-done; n == 0 || unit.Resets() != before {
		t.Errorf("%d writes, %d resets", n, unit.Resets()-before)
	}
}
