package dataplane

import (
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

func TestRank(t *testing.T) {
	order := []access{ // from the worst
		{asymmetric: true, state: scsi.Offline},
		{asymmetric: true, state: scsi.Transitioning},
		{asymmetric: true, state: scsi.LBADependent},
		{asymmetric: true, state: scsi.ActiveNonOptimized},
		{asymmetric: true, state: scsi.ActiveNonOptimized, preferred: true},
		{asymmetric: true, state: scsi.ActiveOptimized},
		{asymmetric: true, state: scsi.ActiveOptimized, preferred: true},
	}
	for i, a := range order[1:] {
		if a.rank() <= order[i].rank() {
			t.Errorf("%v is not better than %v", a, order[i])
		}
	}
	for _, s := range []scsi.AccessState{scsi.Standby, scsi.Unavailable} {
		if a := (access{asymmetric: true, state: s, preferred: true}); a.rank() != order[0].rank() || a.active() {
			t.Errorf("%v", a)
		}
	}
	if (access{}).rank() != order[5].rank() || !(access{}).active() {
		t.Error("a unit without ALUA")
	}
}

// Requests go by the target ports that the unit says are best, and follow when it says otherwise.
func TestFollowAccess(t *testing.T) {
	p := newPlane(t)
	unit, targets := twoPortals(t, [2]uint16{1, 2})
	unit.SetALUA(1, testtarget.ActiveOptimized)
	unit.SetALUA(2, testtarget.ActiveNonOptimized)
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathRoundRobin)); err != nil {
		t.Fatal(err)
	}
	g := p.groups["g1"]
	f := enter(t, p)
	if err := g.confirm(t.Context(), serveUnit(t, g, 0)); err != nil {
		t.Fatal(err)
	}
	n := counters(targets)
	ten := func(first, second int64) {
		t.Helper()
		a, b := n[0].Load(), n[1].Load()
		for range 10 {
			if got := by(g, f, 0).end(t); got[len(got)-1] != iscsi.Responded {
				t.Errorf("outcomes %v", got)
			}
		}
		if a, b = n[0].Load()-a, n[1].Load()-b; a != first || b != second {
			t.Errorf("%d and %d of 10 requests, want %d and %d", a, b, first, second)
		}
	}
	ten(10, 0)
	if s := g.snapshot().Sessions; s[0].Access[0] != "active/optimized (target port group 1)" || s[2].Access[0] != "active/non-optimized (target port group 2)" {
		t.Errorf("%+v", s)
	}
	// The controllers change their roles. The first command hears of it.
	unit.SetALUA(1, testtarget.Standby)
	unit.SetALUA(2, testtarget.ActiveOptimized)
	if got := by(g, f, 0).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	g.readAllAccess(t.Context())
	ten(0, 10)
	unit.SetALUA(1, testtarget.ActiveOptimized)
	g.readAllAccess(t.Context())
	by(g, f, 0).end(t) // unit attentions
	by(g, f, 0).end(t)
	ten(5, 5)
	// Nobody takes commands for a while: requests wait.
	unit.SetALUA(1, testtarget.Transitioning)
	unit.SetALUA(2, testtarget.Transitioning)
	q := by(g, f, 0)
	if again := g.readAllAccess(t.Context()); !again {
		t.Error("a transition is not followed")
	}
	select {
	case got := <-q.done:
		t.Errorf("outcomes %v", got)
	default:
	}
	unit.SetALUA(1, testtarget.ActiveOptimized)
	q.end(t)
}

// With one session at a time, the sessions go where the unit can be used: at the login, and whenever that changes.
func TestMoveOn(t *testing.T) {
	p := newPlane(t)
	p.patience.move = 50 * time.Millisecond
	unit, targets := twoPortals(t, [2]uint16{1, 2})
	unit.SetALUA(1, testtarget.Standby)
	unit.SetALUA(2, testtarget.ActiveOptimized)
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginBoth(targets, api.PathFailover))
	if err != nil || len(g.Units) != 1 || !g.Units[0].Usable {
		t.Fatalf("%+v, %v", g.Units, err)
	}
	group := p.groups["g1"]
	path := group.paths[0]
	if err := group.confirm(t.Context(), serveUnit(t, group, 0)); err != nil {
		t.Fatal(err)
	}
	group.notices.states() // as when a device is made
	at(t, targets, 0, 2)
	if got := by(group, path, 1).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	reached := func(want uint16) {
		t.Helper()
		var a access
		for deadline := time.Now().Add(10 * time.Second); !a.active() || a.group != want; time.Sleep(5 * time.Millisecond) {
			if path.reactor.Call(func() { a = path.access[0] }); time.Now().After(deadline) {
				t.Fatalf("reached by a port that is %v", a)
			}
		}
	}
	reached(2)
	// The controllers change their roles, and nobody says so but the target port that takes no command any more.
	unit.SetALUA(1, testtarget.ActiveOptimized)
	unit.SetALUA(2, testtarget.Unavailable)
	if got := by(group, path, 1).end(t); got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	at(t, targets, 2, 0)
	reached(1)
}
