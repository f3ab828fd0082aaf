package scenario

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// The data plane gets no CPU for a while, as when its host is overloaded or a debugger holds it: requests wait.
func TestFaultStopped(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}})
			g.login(t)
			g.ride(t, func(t *testing.T) {
				pid := status(t).DataPlane.PID
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				time.Sleep(3 * time.Second) // the fault: its length
				inflight(t)
				if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}, slowly)
			g.logout(t)
		})
	}
}

// inflight checks that requests wait in the kernel. The daemon is not asked: it would ask the data plane.
func inflight(t testing.TB) {
	t.Helper()
	files, _ := filepath.Glob("/sys/block/ublkb*/inflight")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Join(strings.Fields(string(b)), "") != "00" {
			return
		}
	}
	t.Error("no request waits: the fault has met nobody")
}

// Somebody sets the clock, forth and back: nothing times out, and nothing waits until the old time comes again.
func TestFaultClock(t *testing.T) {
	guestOnly(t)
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}})
	g.login(t, "noop_out_interval=1", "noop_out_timeout=2")
	logins, err := g.lio.Logins()
	if err != nil {
		t.Fatal(err)
	}
	off := time.Duration(0)
	jump := func(by time.Duration) {
		t.Helper()
		off += by
		now := syscall.NsecToTimeval(time.Now().Add(by).UnixNano())
		if err := syscall.Settimeofday(&now); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { jump(-off) })
	g.ride(t, func(t *testing.T) {
		for _, by := range []time.Duration{36 * time.Hour, -72 * time.Hour, 36 * time.Hour} {
			jump(by)
			progress(t, devices(t, g.name))
		}
	}, slowly)
	g.enable(t, false)
	jump(-time.Hour)
	g.enable(t, true)
	g.whole(t) // a recovery knows only how long it has waited
	jump(time.Hour)
	if n, err := g.lio.Logins(); err != nil || n != logins+2 {
		t.Errorf("%d logins before, %d after one loss of two sessions, %v", logins, n, err)
	}
	g.logout(t)
}

// The data plane has no descriptor left: a login fails and says so, what is there goes on, and nothing is left behind.
func TestFaultDescriptors(t *testing.T) {
	guestOnly(t)
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	g.login(t)
	other := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	iserctl(t, "discover", other.portal, "--transport", other.transport, "--save")
	before := status(t).DataPlane
	limit := strings.TrimSpace(must(t, "prlimit", "--pid", strconv.Itoa(before.PID), "--nofile", "--output", "SOFT", "--noheadings"))
	for extra := range 8 { // each makes another step fail
		must(t, "prlimit", "--pid", strconv.Itoa(before.PID), fmt.Sprintf("--nofile=%d:", countDescriptors(t, before.PID)+extra))
		if r := run(t, "iserctl", "login", other.name); r.code == 0 {
			iserctl(t, "logout", other.name)
		} else if !strings.Contains(r.stderr, "too many open files") {
			t.Errorf("with %d descriptors left: %s", extra, r.stderr)
		}
		if now := status(t).DataPlane; now.PID != before.PID {
			t.Fatal("the data plane has ended")
		}
	}
	dev := devices(t, g.name)[0] // not so much that memory has to grow
	must(t, "dd", "if=/dev/urandom", "of="+dev.Path, "bs=64k", "count=16", "oflag=direct", "status=none")
	must(t, "dd", "if="+dev.Path, "of=/dev/null", "bs=64k", "count=16", "iflag=direct", "status=none")
	must(t, "prlimit", "--pid", strconv.Itoa(before.PID), "--nofile="+limit+":")
	waitFor(t, "nothing is left of the logins that failed", 10*time.Second, func() error {
		if now := status(t).DataPlane; !sameObjects(before, now) {
			return fmt.Errorf("before %+v, now %+v", before, now)
		}
		return nil
	})
	iserctl(t, "login", other.name)
	iserctl(t, "logout", other.name)
	g.logout(t)
}

// Programs dirty more pages than their memory group may have, so that they are held back until some are written, and the session is lost the while.
func TestFaultReclaim(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			const size = 64 * mib
			g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 160 * mib}})
			g.login(t)
			dev := devices(t, g.name)[0].Path
			must(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,nodiscard", dev)
			dir := t.TempDir()
			must(t, "mount", dev, dir)
			t.Cleanup(func() { run(t, "umount", dir) })
			group := memoryGroup(t, 24*mib)
			file := filepath.Join(dir, "file")
			sh := exec.Command("sh", "-c", `echo $$ > "$1/cgroup.procs" && yes iserd | head -c "$3" > "$2" && sync -d "$2" && sha256sum < "$2"`, "sh", group, file, strconv.Itoa(size))
			type end struct {
				out string
				err error
			}
			done := make(chan end, 1)
			go func() {
				out, err := sh.CombinedOutput()
				done <- end{string(out), err}
			}()
			waitFor(t, "pages are written back", 60*time.Second, func() error {
				if d := devices(t, g.name)[0]; d.Stats.WriteBytes < 16*mib {
					return fmt.Errorf("%d bytes", d.Stats.WriteBytes)
				}
				return nil
			})
			if err := errors.Join(g.lio.SetEnabled(false), g.lio.SetEnabled(true)); err != nil {
				t.Fatal(err)
			}
			want := strings.Fields(must(t, "sh", "-c", fmt.Sprintf("yes iserd | head -c %d | sha256sum", size)))[0]
			select {
			case e := <-done:
				if e.err != nil || !strings.HasPrefix(e.out, want) {
					t.Errorf("%v: %s, want %s", e.err, e.out, want)
				}
			case <-time.After(2 * time.Minute):
				t.Fatal("the writer hangs")
			}
			if events := must(t, "cat", filepath.Join(group, "memory.events")); strings.Contains(events, "high 0\n") {
				t.Errorf("nobody was held back: the fault has met nobody: %s", events)
			}
			must(t, "umount", dir)
			g.whole(t)
			if d := devices(t, g.name)[0]; d.Stats.Errors != 0 {
				t.Errorf("%d errors", d.Stats.Errors)
			}
			g.logout(t)
		})
	}
}

// memoryGroup makes a control group whose programs wait for reclaim with more than so many bytes. It has no memory.max: with that the kernel fails
// their writes with ENOMEM where nothing is written back for some seconds.
func memoryGroup(t testing.TB, limit int) string {
	t.Helper()
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/cgroup.controllers"); err != nil {
		must(t, "mount", "-t", "cgroup2", "none", root)
	}
	if err := os.WriteFile(root+"/cgroup.subtree_control", []byte("+memory"), 0); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(root, "writer")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(dir) })
	if err := os.WriteFile(filepath.Join(dir, "memory.high"), []byte(strconv.Itoa(limit)), 0); err != nil {
		t.Fatal(err)
	}
	return dir
}
