package dataplane

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/scsi"
)

// initiator is a data plane that is logged in to a target.
type initiator struct {
	t   *testing.T
	p   *Plane
	lun scsi.LUN
}

func newInitiator(t *testing.T, target *testtarget.Target, name string) *initiator {
	t.Helper()
	i := &initiator{t: t, p: newPlane(t)}
	r := loginTo(target)
	r.InitiatorName = "iqn.2026-11.org.iserd:" + name
	if _, err := ask[ipc.Group](t, i.p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	return i
}

// reserve runs a service action that has to succeed by n sessions.
func (i *initiator) reserve(n int, action scsi.ReserveOut, key, actionKey uint64, kind scsi.ReservationType) {
	i.t.Helper()
	a, err := i.tryReserve(action, key, actionKey, kind)
	if err != nil || a.Sessions != n {
		i.t.Fatalf("%v: %+v, %v; want %d sessions", action, a, err, n)
	}
}

func (i *initiator) tryReserve(action scsi.ReserveOut, key, actionKey uint64, kind scsi.ReservationType) (ipc.ReserveReply, error) {
	i.t.Helper()
	return ask[ipc.ReserveReply](i.t, i.p, ipc.MethodReserve, ipc.ReserveRequest{
		Group: "g1", LUN: uint64(i.lun), Action: uint8(action), Key: key, ActionKey: actionKey, Type: uint8(kind),
	})
}

// status runs a command by a session and returns its status.
func (i *initiator) status(session int, r ipc.ScsiRequest) scsi.Status {
	i.t.Helper()
	return scsi.Status(i.scsi(session, r).Status)
}

func (i *initiator) scsi(session int, r ipc.ScsiRequest) ipc.ScsiReply {
	i.t.Helper()
	r.Group, r.LUN, r.Session, r.SkipAttention = "g1", uint64(i.lun), session, true
	a, err := ask[ipc.ScsiReply](i.t, i.p, ipc.MethodScsi, r)
	if err != nil {
		i.t.Fatal(err)
	}
	return a
}

func (i *initiator) keys() []uint64 {
	i.t.Helper()
	keys, err := executor{p: i.p.groups["g1"].paths[0]}.readKeys(context.Background(), i.lun)
	if err != nil {
		i.t.Fatal(err)
	}
	slices.Sort(keys.Keys)
	return keys.Keys
}

// lose drops a session, and returns when it is back.
func (i *initiator) lose(session int) {
	i.t.Helper()
	p := i.p.groups["g1"].paths[session]
	p.group.mu.Lock()
	down := p.down
	p.group.mu.Unlock()
	p.reactor.Call(func() { p.session.Terminate(context.Canceled) })
	<-down
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		up := false
		p.reactor.Call(func() { up = p.session != nil })
		if up {
			return
		}
		if time.Now().After(deadline) {
			i.t.Fatal("the session does not come back")
		}
	}
}

var (
	writeBlock = ipc.ScsiRequest{CDB: []byte{0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0}, Out: make([]byte, 512)}
	readBlock  = ipc.ScsiRequest{CDB: []byte{0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0}, In: 512}
)

// A reservation keeps others out and lets every session of the holder in, also one that comes back without its registration; a registration that was
// preempted is not made again.
func TestReserve(t *testing.T) {
	target := newTarget(t, testtarget.Config{})
	ours, other := newInitiator(t, target, "ours"), newInitiator(t, target, "other")
	conflict := func(err error) {
		t.Helper()
		wantCode(t, err, api.ErrReservationConflict)
	}
	writes := func(i *initiator, want scsi.Status) {
		t.Helper()
		for session := range 2 {
			if s := i.status(session, writeBlock); s != want {
				t.Errorf("WRITE by session %d: %v, want %v", session, s, want)
			}
		}
	}
	ours.reserve(2, scsi.Register, 0, 0xa, 0)
	if k := ours.keys(); !slices.Equal(k, []uint64{0xa, 0xa}) {
		t.Fatalf("keys %x", k)
	}
	for _, kind := range []scsi.ReservationType{scsi.WriteExclusive, scsi.ExclusiveAccess, 0, 2, 9} {
		_, err := ours.tryReserve(scsi.Reserve, 0xa, 0, kind)
		wantCode(t, err, api.ErrInvalidArgs)
		if kind.OneNexus() && !strings.Contains(err.Error(), "Registrants Only") {
			t.Errorf("%v does not say what to do", err)
		}
	}
	ours.reserve(1, scsi.Reserve, 0xa, 0, scsi.WriteExclusiveRegistrantsOnly)
	writes(ours, scsi.StatusGood)
	writes(other, scsi.StatusReservationConflict)
	if s := other.status(0, readBlock); s != scsi.StatusGood {
		t.Errorf("READ by another: %v", s)
	}

	// Keys that do not fit, and a session that is registered with another key: what was done before it is taken back.
	_, err := ours.tryReserve(scsi.Register, 0x77, 0xb, 0)
	conflict(err)
	one := executor{p: ours.p.groups["g1"].paths[1]}
	if err := one.persistentReserveOut(context.Background(), 0, scsi.Register, scsi.ReserveParameters{Key: 0xa, ActionKey: 0xc}); err != nil {
		t.Fatal(err)
	}
	_, err = ours.tryReserve(scsi.Register, 0xa, 0xb, 0)
	conflict(err)
	if err != nil && !strings.Contains(err.Error(), "taken back") {
		t.Error(err)
	}
	if k := ours.keys(); !slices.Equal(k, []uint64{0xa, 0xc}) {
		t.Errorf("keys %x", k)
	}
	ours.reserve(2, scsi.RegisterAndIgnoreExistingKey, 0, 0xa, 0)

	// A target that forgets the registration of a session that ends: the session registers again before requests use it.
	if err := one.persistentReserveOut(context.Background(), 0, scsi.Register, scsi.ReserveParameters{Key: 0xa}); err != nil {
		t.Fatal(err)
	}
	if s := ours.status(1, writeBlock); s != scsi.StatusReservationConflict {
		t.Errorf("WRITE without registration: %v", s)
	}
	ours.lose(1)
	writes(ours, scsi.StatusGood)
	if k := ours.keys(); !slices.Equal(k, []uint64{0xa, 0xa}) {
		t.Errorf("keys %x", k)
	}

	// Another initiator takes over. That stays so when sessions come back.
	other.reserve(2, scsi.Register, 0, 0xe, 0)
	_, err = other.tryReserve(scsi.Preempt, 0xe, 0xe, scsi.WriteExclusiveRegistrantsOnly)
	wantCode(t, err, api.ErrInvalidArgs)
	_, err = other.tryReserve(scsi.Preempt, 0xe, 0, scsi.WriteExclusiveAllRegistrants)
	wantCode(t, err, api.ErrInvalidArgs)
	other.reserve(1, scsi.Preempt, 0xe, 0xa, scsi.WriteExclusiveRegistrantsOnly)
	writes(ours, scsi.StatusReservationConflict)
	for session := range 2 {
		ours.lose(session)
	}
	writes(ours, scsi.StatusReservationConflict)
	writes(other, scsi.StatusGood)
	if k := other.keys(); !slices.Equal(k, []uint64{0xe, 0xe}) {
		t.Errorf("keys %x", k)
	}

	// Release by the holder, whichever session that is; unregister; clear.
	other.reserve(2, scsi.Release, 0xe, 0, scsi.WriteExclusiveRegistrantsOnly)
	writes(ours, scsi.StatusGood)
	ours.reserve(2, scsi.RegisterAndIgnoreExistingKey, 0, 0xa, 0)
	ours.reserve(1, scsi.Reserve, 0xa, 0, scsi.ExclusiveAccessAllRegistrants)
	writes(ours, scsi.StatusGood)
	other.reserve(2, scsi.Register, 0xe, 0, 0)
	if s := other.status(1, readBlock); s != scsi.StatusReservationConflict {
		t.Errorf("READ by another: %v", s)
	}
	ours.reserve(1, scsi.Clear, 0xa, 0, 0)
	if k := ours.keys(); len(k) != 0 || len(ours.p.groups["g1"].registered) != 0 {
		t.Errorf("keys %x, known %v", k, ours.p.groups["g1"].registered)
	}
	writes(other, scsi.StatusGood)
	_, err = ours.tryReserve(scsi.Clear, 0, 0, 0)
	wantCode(t, err, api.ErrInvalidArgs)
	_, err = ours.tryReserve(7, 1, 1, scsi.WriteExclusiveRegistrantsOnly)
	wantCode(t, err, api.ErrInvalidArgs)
}

// A session that is lost while it registers again comes back once more, and a group can be logged out meanwhile.
func TestLostWhileRegistering(t *testing.T) {
	target := newTarget(t, testtarget.Config{})
	ours := newInitiator(t, target, "ours")
	ours.reserve(2, scsi.Register, 0, 0xa, 0)
	logins := target.Logins()
	undo := target.Misbehave(testtarget.When{Nth: 1, Opcode: 0x01}, testtarget.CloseConn) // READ KEYS of the session that comes back
	ours.lose(1)
	undo()
	if n := target.Logins() - logins; n != 2 {
		t.Errorf("%d logins, want 2", n)
	}
	if s := ours.status(1, writeBlock); s != scsi.StatusGood {
		t.Error(s)
	}
	// Now READ KEYS is never answered.
	park := target.Park(func(_ int, cdb []byte) bool { return cdb[0] == scsi.OpPersistentReserveIn })
	p := ours.p.groups["g1"].paths[1]
	p.reactor.Call(func() { p.session.Terminate(context.Canceled) })
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := park.Wait(ctx, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := ask[ipc.Empty](t, ours.p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Error(err)
	}
	if !ours.p.Idle() {
		t.Error("not idle")
	}
	park.Close()
}
