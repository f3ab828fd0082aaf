package scenario

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// configure has the daemon go by a file of some lines, until the end of the test.
func configure(t testing.TB, lines ...string) api.ReloadReply {
	t.Helper()
	const file = "/etc/iserd/iserd.toml"
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = os.Remove(file)
		iserctl(t, "daemon", "reload")
	})
	return query[api.ReloadReply](t, "daemon", "reload")
}

// A configuration is read again under load: devices keep their queues, a data plane that is killed after fewer threads were configured comes back with as many as
// the devices need, and the next login goes by what is configured. A file with errors changes nothing.
func TestReloadUnderLoad(t *testing.T) {
	g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}})
	g.login(t)
	before := devices(t, g.name)
	dev := before[0]
	l := startLoad(t, dev.Path, dev.Size)
	progress(t, before)
	threads := status(t).DataPlane.Reactors
	if threads < 2 {
		t.Fatalf("%d threads: there is nothing to make fewer of", threads)
	}
	t.Cleanup(func() { iserctl(t, "daemon", "upgrade") }) // the file is gone by then
	r := configure(t, "queue_depth = 16", "reactors = 1")
	if len(r.Changes) != 2 || r.Changes[0].Name != "queue_depth" || len(r.Changes[0].KeptBy) != 1 || r.Changes[0].KeptBy[0] != dev.Path || r.Changes[1].Effect != api.EffectDataPlane {
		t.Errorf("changes %+v", r.Changes)
	}
	old := status(t).DataPlane.PID
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the next data plane serves", 60*time.Second, func() error {
		if p := status(t).DataPlane; p.PID == old || p.PID == 0 {
			return fmt.Errorf("it is %d", p.PID)
		}
		if a := devices(t, g.name)[0]; a.State != api.DeviceLive {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	progress(t, before)
	g.sameDevices(t, before)
	if n := status(t).DataPlane.Reactors; n != threads {
		t.Errorf("%d threads for a device with %d queues", n, threads)
	}

	if err := os.WriteFile("/etc/iserd/iserd.toml", []byte("queue_depth = 0\nrequest_timeout = 30\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	bad := run(t, "iserctl", "daemon", "reload")
	oneLine(t, bad)
	if bad.code != 7 || !strings.Contains(bad.stderr, "iserd.toml:1: queue_depth is 0") || !strings.Contains(bad.stderr, "iserd.toml:2: request_timeout is") {
		t.Errorf("a bad file: exit status %d: %s", bad.code, bad.stderr)
	}
	progress(t, before)
	l.end(t)
	g.logout(t)

	// Nobody needs the threads any more.
	iserctl(t, "daemon", "upgrade")
	if n := status(t).DataPlane.Reactors; n != 1 {
		t.Errorf("%d threads, 1 is configured", n)
	}
	g.login(t)
	dev = devices(t, g.name)[0]
	b, err := os.ReadFile("/sys/block/" + filepath.Base(dev.Path) + "/queue/nr_requests")
	if n, _ := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || n != 16 || dev.Queues != 1 {
		t.Errorf("%d queues of %d requests, %v; want 1 of 16", dev.Queues, n, err)
	}
	g.logout(t)
}
