//go:build removal

package scenario

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// The RDMA device goes away under load and comes back: removal does not hang, requests wait, nothing fails.
//
// It is not among the tests that always run, because a guest of Linux 7.2 whose soft RoCE device was removed under load was seen to fail later
// with damaged kernel memory:
//
//	GOFLAGS=-tags=removal GUEST_RUN=scenario:TestAdapterRemoved make test-guest
//
// The daemon is a fresh one that has not discovered over RDMA: a process that used soft RoCE and has no connection left on it keeps the
// kernel from removing the device (see package rdma).
func TestAdapterRemoved(t *testing.T) {
	g := newTarget(t, kinds[0], twoUnits(t, 32*mib, 32*mib))
	if err := control.stop(); err != nil {
		t.Fatal(err)
	}
	control.need(t)
	iserctl(t, "login", g.name, "--portal", g.portal, "--transport", "iser")
	devs := devices(t, g.name)
	var jobs []fioJob
	for lun, d := range devs {
		jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
	}
	wait := startFio(t, jobs)
	progress(t, devs)
	removed := make(chan result, 1)
	go func() { removed <- run(t, "rdma", "link", "del", "rxe0") }()
	select {
	case r := <-removed:
		if r.code != 0 {
			t.Fatalf("rdma link del: exit status %d: %s", r.code, r.stderr)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the removal of the RDMA device hangs")
	}
	if d := status(t).DataPlane; d.QPs+d.CQs+d.MRs != 0 {
		t.Errorf("%d queue pairs, %d completion queues, %d registrations", d.QPs, d.CQs, d.MRs)
	}
	r := run(t, "iserctl", "discover", g.portal, "--transport", "iser")
	if r.code != 12 || !strings.Contains(r.stderr, "RDMA") {
		t.Errorf("discovery without RDMA device: exit status %d: %s", r.code, r.stderr)
	}
	oneLine(t, r)
	must(t, "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "veth0")
	// The target has lost its listener with the device; it gets a new one as its administrator would do it.
	portal := "/sys/kernel/config/target/iscsi/" + g.name + "/tpgt_1/np/" + g.portal + "/iser"
	for _, v := range []string{"0", "1"} {
		if err := os.WriteFile(portal, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	progress(t, devs)
	wait()
	for lun, d := range devices(t, g.name) {
		if d.Stats.Errors != 0 {
			t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
		}
	}
	g.logout(t)
}
