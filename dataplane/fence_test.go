package dataplane

import (
	"bytes"
	"testing"
	"time"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// zombie is a target that has parked a write of a session whose connection is then lost.
type zombie struct {
	target *testtarget.Target
	unit   *testtarget.Unit
	park   *testtarget.Park
}

// opLogin is the opcode of a Login Request without its bits.
const opLogin = 0x03

// lateWrite logs in, has a write of the first session parked at the target, and refuses logins that the test does not want.
func lateWrite(t *testing.T, refuse func(path int) bool) (p *Plane, z *zombie, w *writer) {
	t.Helper()
	p = newPlane(t)
	z = &zombie{unit: testtarget.NewUnit(1 << 20)}
	if _, err := z.unit.WriteAt(bytes.Repeat([]byte{1}, 512), 3*512); err != nil {
		t.Fatal(err)
	}
	z.target = newTarget(t, testtarget.Config{Units: []*testtarget.Unit{z.unit}})
	r := loginTo(z.target)
	one := 1
	r.Settings.ReplacementTimeout = &one
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	z.park = z.target.Park(func(_ int, cdb []byte) bool { return cdb[0] == scsi.OpWrite10 })
	w = newWriter(p.groups["g1"].paths[0], 0, nil)
	if err := z.park.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	z.target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == opLogin && refuse(pathOf([6]byte(q.BHS[8:14]))) {
			c.Close()
			return false
		}
		return true
	}})
	return p, z, w
}

// pathOf is the number of the path that logs in with an ISID, see loginTo.
func pathOf(isid [6]byte) int { return int(isid[4])<<8 + int(isid[5]) - 0xff }

// lose ends the connection of a path at the target's end.
func (z *zombie) lose(path int) {
	for _, c := range z.target.Conns() {
		if c.FullFeature() && pathOf(c.ISID()) == path {
			c.Close()
		}
	}
}

// check releases what is parked and looks at what the block holds.
func (z *zombie) check(t *testing.T, untouched bool, resets int) {
	t.Helper()
	z.park.Close()
	b := make([]byte, 512)
	if _, err := z.unit.ReadAt(b, 3*512); err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(b, bytes.Repeat([]byte{1}, 512)) != untouched {
		t.Errorf("the block begins with % x, untouched: want %v", b[:4], untouched)
	}
	if n := z.unit.Resets(); n != resets {
		t.Errorf("%d resets, want %d", n, resets)
	}
}

// A write fails because its session does not come back while the other one is there: it does not take effect later.
func TestFenceByReset(t *testing.T) {
	p, z, w := lateWrite(t, func(path int) bool { return path == 0 })
	z.lose(0)
	if got := <-w.done; got[0] != iscsi.Lost || got[len(got)-1] != iscsi.NotSent {
		t.Errorf("outcomes %v", got)
	}
	if s := sessionCounters(t, p, 1); s.Resets != 1 {
		t.Errorf("the other session %+v", s)
	}
	z.check(t, true, 1)
}

// A write fails while no session is there: the first that comes back makes sure that it does not take effect later.
func TestFenceLater(t *testing.T) {
	closed := make(chan struct{})
	p, z, w := lateWrite(t, func(path int) bool {
		select {
		case <-closed:
			return path == 0
		default:
			return true
		}
	})
	events := watchGroup(p)
	loseAll(z.target)
	if got := <-w.done; got[0] != iscsi.Lost || got[len(got)-1] != iscsi.NotSent {
		t.Errorf("outcomes %v", got)
	}
	for len(events) > 0 {
		<-events
	}
	close(closed)
	for limit := time.After(10 * time.Second); ; {
		select {
		case g := <-events:
			if g.Sessions[1].State != iscsi.StateLoggedIn.String() {
				continue
			}
		case <-limit:
			t.Error("no session comes back")
		}
		break
	}
	z.check(t, true, 1)
}

// The session that is to have the unit reset gets no answer: the write fails in time all the same, and that session writes nothing before the reset.
func TestFenceUnanswered(t *testing.T) {
	p, z, w := lateWrite(t, func(int) bool { return false })
	mute := make(chan struct{})
	muted := func() bool {
		select {
		case <-mute:
			return false
		default:
			return true
		}
	}
	z.target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		switch {
		case q.Opcode() == opLogin && (muted() || pathOf([6]byte(q.BHS[8:14])) == 0):
			c.Close()
			return false
		case q.Opcode() == opTaskManagement && muted():
			return false
		}
		return true
	}})
	z.lose(0)
	if got := <-w.done; got[0] != iscsi.Lost || got[len(got)-1] != iscsi.NotSent {
		t.Errorf("outcomes %v", got)
	}
	var up bool
	if p.reactors[1].Call(func() { up = p.groups["g1"].paths[1].session != nil }); up {
		t.Error("the other session goes on without the reset")
	}
	if p.groups["g1"].settled() {
		t.Error("nobody owes a reset")
	}
	events := watchGroup(p)
	close(mute)
	for limit := time.After(10 * time.Second); ; {
		select {
		case g := <-events:
			if !p.groups["g1"].settled() || g.Sessions[1].State != iscsi.StateLoggedIn.String() {
				continue
			}
		case <-limit:
			t.Error("no session comes back")
		}
		break
	}
	z.check(t, true, 1)
}

// A reset pays for what was owed when it began, not for what is added while it is under way.
func TestDebts(t *testing.T) {
	p, z, w := lateWrite(t, func(path int) bool { return path == 0 })
	g := p.groups["g1"]
	begun, more := make(chan struct{}), make(chan struct{})
	z.target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == opTaskManagement {
			select {
			case begun <- struct{}{}:
				<-more
			default: // the second
			}
		}
		return true
	}})
	lun := map[scsi.LUN]bool{0: true}
	g.owe(g.paths[0], lun)
	done := make(chan error, 1)
	go func() {
		var session *iscsi.Session
		g.paths[1].reactor.Call(func() { session = g.paths[1].session })
		done <- g.paths[1].fence(t.Context(), session)
	}()
	<-begun
	g.owe(g.paths[0], lun) // the same loss once more
	g.mu.Lock()
	g.debts.last++
	g.paths[1].lostAt = g.debts.last // and another one
	g.mu.Unlock()
	g.owe(g.paths[1], lun)
	close(more)
	if err := <-done; err != nil || g.settled() {
		t.Errorf("%v; settled %v", err, g.settled())
	}
	if err := g.settle(t.Context(), 1); err != nil || g.settled() { // another unit is none of its business
		t.Errorf("%v; settled %v", err, g.settled())
	}
	if err := g.settle(t.Context(), 0); err != nil || !g.settled() {
		t.Errorf("%v; settled %v", err, g.settled())
	}
	z.park.Close()
	// The write was wiped out without a word, which its session has found out.
	g.owe(g.paths[0], lun)
	g.owe(g.paths[1], lun)
	if !g.settled() {
		t.Error("owed for what was lost before the reset")
	}
	if got := <-w.done; got[0] != iscsi.Aborted || got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	z.check(t, false, 2)
}

// The session comes back with another portal group, which reinstates nothing: the write is repeated after a reset.
func TestFenceOtherPort(t *testing.T) {
	_, z, w := lateWrite(t, func(int) bool { return false })
	z.target.SetPortGroup(2)
	z.lose(0)
	for deadline := time.Now().Add(10 * time.Second); z.unit.Resets() == 0 && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
	}
	if err := z.park.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if n := z.park.Waiting(); n != 1 {
		t.Errorf("%d writes are under way", n)
	}
	z.park.Close() // also for what comes again after a unit attention
	if got := <-w.done; got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	z.check(t, false, 1)
}

// What an earlier data plane has sent is not known: when its session does not come back in time, every unit is reset.
func TestFenceAfterRestore(t *testing.T) {
	p := newPlane(t)
	unit := testtarget.NewUnit(1 << 20)
	target := newTarget(t, testtarget.Config{Units: []*testtarget.Unit{unit}})
	target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == opLogin && pathOf([6]byte(q.BHS[8:14])) == 0 {
			c.Close()
			return false
		}
		return true
	}})
	r := ipc.RestoreRequest{LoginRequest: loginTo(target), TPGT: 1, Units: []ipc.Unit{{LUN: 0, Usable: true, Blocks: 2048, LogicalBlockSize: 512}}}
	one := 1
	r.Settings.ReplacementTimeout = &one
	events := watchGroup(p)
	if _, err := ask[ipc.Group](t, p, ipc.MethodRestore, r); err != nil {
		t.Fatal(err)
	}
	until(t, events, ipc.GroupFailed)
	if n := unit.Resets(); n != 1 {
		t.Errorf("%d resets, want 1", n)
	}
}

// The session of the write itself comes back first: nobody else need do anything.
func TestFenceByReinstatement(t *testing.T) {
	p, z, w := lateWrite(t, func(int) bool { return false })
	events := watchGroup(p)
	z.lose(0)
	until(t, events, ipc.GroupUp)
	if err := z.park.Wait(t.Context(), 1); err != nil { // the repetition; the first is no more
		t.Fatal(err)
	}
	z.park.Close() // also for what comes again after a unit attention
	if got := <-w.done; got[len(got)-1] != iscsi.Responded {
		t.Errorf("outcomes %v", got)
	}
	z.check(t, false, 0)
}
