package dataplane

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// A group that an earlier data plane had comes back without anybody waiting for its target, and with the same ISIDs.
func TestRestore(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	events := make(chan ipc.Group, 64)
	p.Notify(func(_ string, body any) { events <- *body.(*ipc.Group) })
	r := ipc.RestoreRequest{LoginRequest: loginTo(target), TPGT: 1, Units: []ipc.Unit{{LUN: 0, Usable: true, Blocks: 8, LogicalBlockSize: 512}}}
	r.Transport, r.ISID[5] = ipc.TransportTCP, 0x10
	g, err := ask[ipc.Group](t, p, ipc.MethodRestore, r)
	if err != nil || g.State != ipc.GroupRecovering || len(g.Units) != 1 {
		t.Fatalf("%+v, %v", g, err)
	}
	if _, err := ask[ipc.Group](t, p, ipc.MethodRestore, r); !api.Is(err, api.ErrAlreadyLoggedIn) && err == nil {
		t.Errorf("restored twice: %v", err)
	}
	// What is sent before a session is there waits for it.
	done := make(chan iscsi.Outcome, 1)
	task := &iscsi.Task{Handler: taskFunc(func(t *iscsi.Task) { done <- t.Outcome })} // TEST UNIT READY
	path := p.groups[r.Group].paths[0]
	path.reactor.Do(func() { path.Submit(task) })
	if o := <-done; o != iscsi.Responded {
		t.Errorf("outcome %v", o)
	}
	for g := range events {
		if g.State == ipc.GroupUp {
			for i, s := range g.Sessions {
				want := r.ISID
				want[5] += byte(i)
				if s.ISID != want || s.TSIH == 0 {
					t.Errorf("session %d: %+v", i, s)
				}
			}
			break
		}
	}
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: r.Group}); err != nil {
		t.Error(err)
	}
	r.Transport = ipc.TransportAuto
	if _, err := ask[ipc.Group](t, p, ipc.MethodRestore, r); err == nil {
		t.Error("restored over whatever transport there is")
	}
}

// What the control plane keeps of a unit is enough to serve it again.
func TestUnitOf(t *testing.T) {
	m := ipc.Unit{
		LUN: uint64(scsi.NewLUN(3)), Number: 3, Usable: true, Vendor: "v", Product: "p", Revision: "r", Serial: "s", WWID: "naa.1", Blocks: 4096, LogicalBlockSize: 4096,
		PhysicalBlockSize: 8192, AlignmentOffset: 4096, MinIOSize: 8192, OptimalIOSize: 65536, MaxTransfer: 1 << 20, ReadOnly: true, WriteCache: true, FUA: true,
		Rotational: true, MaxDiscard: 1 << 30, DiscardGranularity: 65536, DiscardAlignment: 4096, MaxZeroes: 1 << 20, Discard: 1, Zeroes: 2, ZeroesUnmap: true, CacheAssumed: true,
	}
	if d := cmp.Diff(m, unitMessage(unitOf(&m))); d != "" {
		t.Error(d)
	}
}
