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

// A mounted device is not taken away: logout names who holds it, and the file system stays usable.
func TestLogoutWhileMounted(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 64 * mib}})
	g.login(t)
	dev := devices(t, g.name)[0].Path
	must(t, "mkfs.ext4", "-q", "-F", dev)
	dir := t.TempDir()
	must(t, "mount", dev, dir)
	defer run(t, "umount", dir)

	r := run(t, "iserctl", "logout", g.name)
	if r.code != 28 {
		t.Errorf("exit status %d, want 28 (busy)", r.code)
	}
	oneLine(t, r)
	if !strings.Contains(r.stderr, dir) || !strings.Contains(r.stderr, dev) {
		t.Errorf("the message names neither device nor mount point: %s", r.stderr)
	}
	if err := os.WriteFile(filepath.Join(dir, "still-here"), []byte("yes"), 0o600); err != nil {
		t.Error(err)
	}
	must(t, "umount", dir)

	// An open descriptor is a holder too.
	f, err := os.Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	r = run(t, "iserctl", "logout", g.name)
	f.Close()
	if r.code != 28 || !strings.Contains(r.stderr, fmt.Sprint(os.Getpid())) {
		t.Errorf("with an open descriptor: exit status %d: %s", r.code, r.stderr)
	}
	g.logout(t)
	if _, err := os.Stat(dev); !os.IsNotExist(err) {
		t.Errorf("%s after logout: %v", dev, err)
	}
	if left, _ := filepath.Glob("/dev/ublkc*"); len(left) != 0 {
		t.Errorf("ublk devices after logout: %v", left)
	}
}

// Twenty rounds of login and logout leave nothing behind: no session at the target, no device, no descriptor, queue pair or registration.
func TestTwentyRounds(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t)
			g.logout(t)
			before := status(t).DataPlane
			control.mu.Lock()
			pid := control.cmd.Process.Pid
			control.mu.Unlock()
			descriptors := countDescriptors(t, pid)
			for range 20 {
				iserctl(t, "login", g.name)
				g.logout(t)
			}
			var after api.DataPlaneStatus
			waitFor(t, "nothing is left in the daemon", 5*time.Second, func() error {
				after = status(t).DataPlane
				before.PID, before.PoolBytes = after.PID, after.PoolBytes
				if !sameObjects(before, after) {
					return fmt.Errorf("before %+v\nafter  %+v", before, after)
				}
				if n := countDescriptors(t, pid); n > descriptors {
					return fmt.Errorf("iserd had %d descriptors and has %d", descriptors, n)
				}
				return nil
			})
			if after.PoolBytesUsed != 0 {
				t.Errorf("%d bytes of I/O buffers are in use with nobody logged in", after.PoolBytesUsed)
			}
			if left, _ := filepath.Glob("/dev/ublk[bc]*"); len(left) != 0 {
				t.Errorf("ublk devices: %v", left)
			}
			if left, _ := filepath.Glob("/run/iserd/devices/*"); len(left) != 0 {
				t.Errorf("device files: %v", left)
			}
		})
	}
}

func sameObjects(a, b api.DataPlaneStatus) bool {
	return a.Connections == b.Connections && a.QPs == b.QPs && a.CQs == b.CQs && a.MRs == b.MRs && a.Descriptors == b.Descriptors &&
		a.PoolBytesUsed == b.PoolBytesUsed
}

func countDescriptors(t testing.TB, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// The control process dies while fio writes and verifies: there is no gap and no error, and its successor shows the same devices and logs
// them out.
func TestControlKilled(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			before := devices(t, g.name)
			dataPlane := status(t).DataPlane.PID
			var jobs []fioJob
			for lun, d := range before {
				jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
			}
			wait := startFio(t, jobs)
			progress(t, before)
			control.kill(t)
			// Without a control process the requests go on.
			progress(t, before)
			control.need(t)
			after := devices(t, g.name)
			for lun, d := range before {
				if a := after[lun]; a.Path != d.Path || a.WWID != d.WWID || a.Size != d.Size || a.State != d.State {
					t.Errorf("unit %d: before %+v\nafter %+v", lun, d, a)
				}
			}
			if pid := status(t).DataPlane.PID; pid != dataPlane {
				t.Errorf("the data plane was process %d and is %d", dataPlane, pid)
			}
			wait()
			for lun, d := range devices(t, g.name) {
				if d.Stats.Errors != 0 {
					t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
				}
			}
			g.logout(t)
		})
	}
}

// The data plane dies while fio writes and verifies: the devices stay, the next data plane serves them, and nobody sees more than a pause. So it is when the
// control plane dies at the same time.
func TestDataPlaneKilled(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			before := devices(t, g.name)
			session := query[api.SessionsReply](t, "session", "list").Sessions[0]
			var jobs []fioJob
			for lun, d := range before {
				jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
			}
			for round := range rounds(t, 2) {
				wait := startFio(t, jobs)
				progress(t, before)
				old := status(t).DataPlane.PID
				if round%2 == 1 {
					control.kill(t)
				}
				if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				if round%2 == 1 {
					control.need(t)
				}
				waitFor(t, "the next data plane serves", 60*time.Second, func() error {
					if pid := status(t).DataPlane.PID; pid == old || pid == 0 {
						return fmt.Errorf("it is %d", pid)
					}
					after := devices(t, g.name)
					for lun, d := range before {
						if a := after[lun]; a.Path != d.Path || a.WWID != d.WWID || a.State != api.DeviceLive {
							return fmt.Errorf("unit %d: %+v", lun, a)
						}
					}
					return nil
				})
				wait()
			}
			for lun, d := range devices(t, g.name) {
				if d.Stats.Errors != 0 {
					t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
				}
			}
			if s := query[api.SessionsReply](t, "session", "list").Sessions; len(s) != 1 || s[0].ID != session.ID || s[0].State != api.SessionUp ||
				s[0].Connections[0].ISID != session.Connections[0].ISID {
				t.Errorf("session before %+v\nafter %+v", session, s)
			}
			g.logout(t)
		})
	}
}

// rounds is how often a fault is repeated: a few times in a test, SOAK times in a soak.
func rounds(t testing.TB, few int) int {
	t.Helper()
	text := os.Getenv("SOAK")
	if text == "" {
		return few
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SOAK=%q: a number of rounds is wanted, 1 or more", text)
	}
	return n
}

// progress waits until the kernel has completed more requests of every device than it had.
func progress(t testing.TB, devs map[uint16]api.Device) {
	t.Helper()
	start := map[string]string{}
	stat := func(path string) string {
		b, err := os.ReadFile("/sys/block/" + filepath.Base(path) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		f := strings.Fields(string(b))
		return f[0] + " " + f[4] // reads and writes completed
	}
	for _, d := range devs {
		start[d.Path] = stat(d.Path)
	}
	waitFor(t, "requests complete", 20*time.Second, func() error {
		for path, s := range start {
			if stat(path) == s {
				return fmt.Errorf("%s: none", path)
			}
		}
		return nil
	})
}

// The target goes away under load and comes back: requests wait, no error, the data is right.
func TestSessionLost(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			devs := devices(t, g.name)
			var jobs []fioJob
			for lun, d := range devs {
				jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
			}
			wait := startFio(t, jobs)
			for range 2 {
				progress(t, devs)
				if err := g.lio.SetEnabled(false); err != nil {
					t.Fatal(err)
				}
				waitFor(t, "the loss is shown", 10*time.Second, func() error {
					for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
						if s.Target == g.name && s.State == api.SessionUp {
							return fmt.Errorf("session %d is %s", s.ID, s.State)
						}
					}
					return nil
				})
				if err := g.lio.SetEnabled(true); err != nil {
					t.Fatal(err)
				}
				progress(t, devs)
			}
			wait()
			for lun, d := range devices(t, g.name) {
				if d.Stats.Errors != 0 {
					t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
				}
			}
			g.logout(t)
		})
	}
}

// oneLine checks that a failing command says what it has to say in one line on standard error.
func oneLine(t testing.TB, r result) {
	t.Helper()
	if text := strings.TrimSuffix(r.stderr, "\n"); text == "" || strings.Contains(text, "\n") {
		t.Errorf("want one line on standard error, got %q", r.stderr)
	}
	if r.stdout != "" {
		t.Errorf("standard output of a failure: %q", r.stdout)
	}
}
