package dataplane

import (
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

const tgtdName = "iqn.2003-01.org.example:tgtd"

var tgtdLUN = scsi.NewLUN(1) // LUN 0 is its controller

// startTGTD runs tgtd on this host, with one unit, over TCP.
func startTGTD(t *testing.T) (d *targets.TGTD, portal string) {
	t.Helper()
	programs := testbed.TGTD(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	portal = l.Addr().String()
	l.Close()
	d, err = targets.StartTGTD(t.Context(), targets.TGTDConfig{
		Programs: programs, Name: tgtdName, Portal: netip.MustParseAddrPort(portal),
		Units: []targets.Unit{{Kind: targets.FileIO, Path: filepath.Join(t.TempDir(), "unit"), Size: 8 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, portal
}

func loginTGTD(t *testing.T, p *Plane, portal, name string, timeout time.Duration) {
	t.Helper()
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, ipc.LoginRequest{
		Group: "g1", Target: tgtdName, Portal: portal, Transport: ipc.TransportTCP, InitiatorName: "iqn.2026-11.org.iserd:" + name,
		ISID: [6]byte{0x80, 1, 2, 3}, Timeout: 20 * time.Second, RequestTimeout: timeout,
	}); err != nil {
		t.Fatal(err)
	}
}

// A reservation at a target that is not ours, seen by two initiators.
func TestReserveTGTD(t *testing.T) {
	_, portal := startTGTD(t)
	ours, other := &initiator{t, newPlane(t), tgtdLUN}, &initiator{t, newPlane(t), tgtdLUN}
	loginTGTD(t, ours.p, portal, "ours", 0)
	loginTGTD(t, other.p, portal, "other", 0)
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
	ours.reserve(1, scsi.Reserve, 0xa, 0, scsi.WriteExclusiveRegistrantsOnly)
	writes(ours, scsi.StatusGood)
	writes(other, scsi.StatusReservationConflict)
	if s := other.status(0, readBlock); s != scsi.StatusGood {
		t.Errorf("READ by another: %v", s)
	}
	a := ours.scsi(1, ipc.ScsiRequest{CDB: []byte{0x5e, 1, 0, 0, 0, 0, 0, 0, 24, 0}, In: 24})
	if r, err := scsi.ParseReadReservation(a.Data); err != nil || !r.Held || r.Key != 0xa || r.Type != scsi.WriteExclusiveRegistrantsOnly {
		t.Errorf("reservation %+v, %v", r, err)
	}
	for session := range 2 {
		ours.lose(session)
	}
	writes(ours, scsi.StatusGood)
	_, err := other.tryReserve(scsi.Reserve, 0xb, 0, scsi.WriteExclusiveRegistrantsOnly)
	wantCode(t, err, api.ErrReservationConflict)
	other.reserve(2, scsi.Register, 0, 0xb, 0)
	other.reserve(1, scsi.Preempt, 0xb, 0xa, scsi.WriteExclusiveRegistrantsOnly)
	writes(ours, scsi.StatusReservationConflict)
	writes(other, scsi.StatusGood)
	ours.lose(0)
	if k := other.keys(); !slices.Equal(k, []uint64{0xb, 0xb}) {
		t.Errorf("keys %x", k)
	}
	other.reserve(1, scsi.Clear, 0xb, 0, 0)
	writes(ours, scsi.StatusGood)
}

// A target that stops in the middle of a command: every step is tried, and the command goes through when the target goes on.
func TestHungTGTD(t *testing.T) {
	d, portal := startTGTD(t)
	p := newPlane(t)
	p.patience = patience{abort: 200 * time.Millisecond, reset: 200 * time.Millisecond}
	loginTGTD(t, p, portal, "ours", 300*time.Millisecond)
	path := p.groups["g1"].paths[0]
	if err := syscall.Kill(d.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(d.PID(), syscall.SIGCONT)
	w := newWriter(path, tgtdLUN, nil)
	w.path.reactor.Call(func() {}) // it is on its way
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for sessionCounters(t, p, 0).Drops == 0 {
		select {
		case <-time.After(20 * time.Millisecond):
		case got := <-w.done:
			t.Fatalf("outcomes %v of a stopped target", got)
		case <-ctx.Done():
			t.Fatal("the session is not dropped")
		}
	}
	if s := sessionCounters(t, p, 0); s.Aborts != 1 || s.Resets != 1 || s.Drops != 1 {
		t.Errorf("%d aborts, %d resets, %d drops", s.Aborts, s.Resets, s.Drops)
	}
	if err := syscall.Kill(d.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-w.done:
		if got[0] != iscsi.Lost || got[len(got)-1] != iscsi.Responded || w.Status != scsi.StatusGood {
			t.Errorf("outcomes %v, %v", got, w.Status)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the command does not end after the target goes on")
	}
}
