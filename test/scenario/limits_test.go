package scenario

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// executedBy has the daemon executed by another program for the length of the test.
func executedBy(t *testing.T, command ...string) {
	t.Helper()
	guestOnly(t)
	change := func(command []string) {
		t.Helper()
		if err := control.stop(); err != nil {
			t.Fatal(err)
		}
		control.by = command
	}
	change(command)
	t.Cleanup(func() { change(nil) })
}

// setLockedMemory limits the memory that the data plane may lock.
func setLockedMemory(t testing.TB, limit string) {
	t.Helper()
	pid := 0
	waitFor(t, "the data plane is there", 20*time.Second, func() error {
		if pid = status(t).DataPlane.PID; pid == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	must(t, "prlimit", "--pid", strconv.Itoa(pid), "--memlock="+limit+":")
}

// pinned is how much memory of a process is locked for adapters, which is what the kernel compares with the limit.
func pinned(t testing.TB, pid int) (kib int) {
	t.Helper()
	for line := range strings.Lines(must(t, "cat", fmt.Sprintf("/proc/%d/status", pid))) {
		if _, err := fmt.Sscanf(line, "VmPin: %d kB", &kib); err == nil {
			return kib
		}
	}
	t.Fatal("the kernel does not tell how much memory is pinned")
	return 0
}

// The data plane may lock no more memory than it has: logins over iSER fail and say what to do, or use TCP and say why, and nothing is left behind. What is
// there goes on, and a session that is lost the while comes back when it may.
func TestFaultLockedMemory(t *testing.T) {
	// A process that starts with no limit locks all memory that it will ever map, and cannot map any when the limit comes.
	executedBy(t, "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536:unlimited")
	g := newTarget(t, kinds[0], twoUnits(t, 16*mib, 16*mib))
	control.need(t)
	must(t, "prlimit", "--pid", strconv.Itoa(control.cmd.Process.Pid), "--memlock=unlimited:") // discovery is the control plane's
	setLockedMemory(t, "unlimited")
	g.login(t, "transport=iser")
	other := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	iserctl(t, "discover", other.portal, "--transport", other.transport, "--save")
	// Once, so that what the first login leaves for good is there.
	iserctl(t, "login", other.name)
	iserctl(t, "logout", other.name)
	g.ride(t, func(t *testing.T) {
		before := status(t).DataPlane
		for _, extra := range []int{0, 64, 200, 512, 1100} { // each makes another step fail
			setLockedMemory(t, strconv.Itoa((pinned(t, before.PID)+extra)<<10))
			if r := run(t, "iserctl", "login", other.name, "--transport", "iser"); r.code == 0 {
				iserctl(t, "logout", other.name)
			} else if !strings.Contains(r.stderr, "LimitMEMLOCK") {
				t.Errorf("with %d KiB left: %s", extra, r.stderr)
			} else {
				oneLine(t, r)
				t.Logf("with %d KiB left: %s", extra, r.stderr)
			}
		}
		setLockedMemory(t, "0")
		reply := query[api.LoginReply](t, "login", other.name, "--transport", "auto")
		if s := reply.Session; s.Transport != "tcp" || !strings.Contains(s.TransportReason, "LimitMEMLOCK") {
			t.Errorf("over %s, %q", s.Transport, s.TransportReason)
		}
		iserctl(t, "logout", other.name)
		setLockedMemory(t, "unlimited")
		if now := status(t).DataPlane; now.PID != before.PID {
			t.Error("the data plane has ended")
		}
		waitFor(t, "nothing is left of the logins that failed", 10*time.Second, func() error {
			now := status(t).DataPlane
			// fio goes on, and buffers grow by a registration of 4 MiB at a time.
			now.PoolBytesUsed = before.PoolBytesUsed
			now.MRs -= int(now.PoolBytes-before.PoolBytes) / (4 * mib)
			if !sameObjects(before, now) {
				return fmt.Errorf("before %+v, now %+v", before, now)
			}
			return nil
		})
	}, slowly)
	g.ride(t, func(t *testing.T) {
		setLockedMemory(t, "0")
		g.enable(t, false)
		g.lost(t)
		g.enable(t, true)
		waitFor(t, "the session says why it does not come back", 20*time.Second, func() error {
			if s := g.session(t); s.State == api.SessionUp || s.LastError == nil || !strings.Contains(s.LastError.Text, "LimitMEMLOCK") {
				return fmt.Errorf("it is %s: %+v", s.State, s.LastError)
			}
			return nil
		})
		g.waiting(t)
		setLockedMemory(t, "unlimited")
	}, slowly)
	iserctl(t, "login", other.name, "--transport", "iser")
	iserctl(t, "logout", other.name)
	g.logout(t)
}

// Huge pages are used up: memory of them cannot be registered, with the reason, the rest goes on, and it can be when there are some.
func TestFaultHugePages(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	g.login(t)
	dir := hugePages(t, 2)
	path := memoryFile(t, filepath.Join(dir, "pool"), sharedJobMemory)
	refused := func(t *testing.T) {
		r := run(t, "iserctl", "buffer", "add", path)
		if r.code == 0 || !strings.Contains(r.stderr, "vm.nr_hugepages") {
			t.Errorf("exit status %d: %s", r.code, r.stderr)
		}
		oneLine(t, r)
	}
	g.ride(t, refused)
	before := status(t).DataPlane
	refused(t)
	onlyArena(t)
	if now := status(t).DataPlane; !sameObjects(before, now) {
		t.Errorf("before %+v, now %+v", before, now)
	}
	setHugePages(t, 8)
	addBuffer(t, path)
	fio(t, []fioJob{sharedJob("fio", devices(t, g.name)[0].Path, "mmaphuge:"+path, 1)})
	g.logout(t)
}
