package dataplane

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// TestManageLIO asks the kernel's target for each function while reads are under way, over RDMA and over TCP: every read ends once, by its response or by
// the function, no session is lost, and reads go on.
func TestManageLIO(t *testing.T) {
	_, err := os.Stat("/sys/kernel/config/target")
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("not root")
	}
	require.Need(t, "guest", err)
	for _, transport := range []ipc.Transport{ipc.TransportISER, ipc.TransportTCP} {
		t.Run(string(transport), func(t *testing.T) {
			const name, addr = "iqn.2003-01.org.example:manage", "10.0.0.1:3264"
			lio, err := targets.NewLIO(targets.LIOConfig{
				Name: name, Portals: []targets.Portal{targets.ParsePortal(addr, transport == ipc.TransportISER)}, Units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 << 20}},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := lio.Close(); err != nil {
					t.Error(err)
				}
			})
			p := newPlane(t)
			if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, ipc.LoginRequest{
				Group: "g1", Target: name, Portal: addr, Transport: transport, InitiatorName: "iqn.2026-11.org.iserd:test", ISID: [6]byte{0x80, 7}, Timeout: 20 * time.Second,
			}); err != nil {
				t.Fatal(err)
			}
			manageUnderReads(t, p.groups["g1"].paths[0])
			if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
				t.Error(err)
			}
		})
	}
}

func manageUnderReads(t *testing.T, p *path) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var session *iscsi.Session
	p.reactor.Call(func() { session = p.session })
	var good, aborted atomic.Int64
	var cdb scsi.CDB
	scsi.Read10(&cdb, 0, 8, false)
	var wg sync.WaitGroup
	end := make(chan struct{})
	for range 8 {
		wg.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				r, err := executor{p: p}.Execute(ctx, scsi.NewLUN(0), cdb, 4096)
				switch {
				case errors.Is(err, iscsi.ErrAborted):
					aborted.Add(1)
				case err != nil:
					t.Error(err)
					return
				case r.Status == scsi.StatusGood:
					good.Add(1)
				}
			}
		})
	}
	reads := func() { // waits until reads have gone on
		t.Helper()
		for n := good.Load(); good.Load() < n+16; time.Sleep(time.Millisecond) {
			if ctx.Err() != nil {
				t.Fatal("reads do not go on")
			}
		}
	}
	for _, f := range []pdu.TaskFunction{pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset, pdu.AbortTask} {
		for round := range 5 {
			reads()
			answer := make(chan error, 1)
			p.reactor.Do(func() {
				r := iscsi.TaskManagement{Function: f, LUN: scsi.NewLUN(0)}
				if f == pdu.AbortTask {
					r.Task = &iscsi.Task{LUN: r.LUN, Handler: taskFunc(func(*iscsi.Task) {})} // TEST UNIT READY
					p.session.Submit(r.Task)
				}
				p.session.Manage(r, func(err error) { answer <- err })
			})
			select {
			case err := <-answer:
				var refused *iscsi.TaskManagementError
				if err != nil && !errors.As(err, &refused) {
					t.Errorf("%v: %v", f, err)
				}
				if round == 0 {
					t.Logf("%v: %v, %d reads aborted so far", f, err, aborted.Load())
				}
			case <-ctx.Done():
				t.Fatalf("%v: no answer", f)
			}
		}
	}
	reads()
	close(end)
	wg.Wait()
	p.reactor.Call(func() {
		if p.session != session {
			t.Error("the session was lost meanwhile")
		}
	})
	t.Logf("%d reads, %d aborted", good.Load(), aborted.Load())
}
