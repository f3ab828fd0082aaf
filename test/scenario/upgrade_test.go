package scenario

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// nextBuild is the version of iserd-io.next, which the harness puts beside iserd-io.
const nextBuild = "next"

// dataPlanes are the programs that an upgrade can bring.
type dataPlanes struct {
	path        string // of the installed one
	first, next string // copies
}

// newDataPlanes finds the two builds of the data plane. The first one is installed again at the end.
func newDataPlanes(t testing.TB) dataPlanes {
	t.Helper()
	path, err := exec.LookPath("iserd-io")
	if err != nil {
		t.Fatal(err)
	}
	p := dataPlanes{path: path, first: filepath.Join(t.TempDir(), "first"), next: path + ".next"}
	must(t, "cp", "-p", path, p.first)
	t.Cleanup(func() { p.install(t, p.first) })
	return p
}

// install replaces the installed program, as a package does: by another file of the same name.
func (p dataPlanes) install(t testing.TB, file string) {
	t.Helper()
	must(t, "cp", "-p", file, p.path+".new")
	if err := os.Rename(p.path+".new", p.path); err != nil {
		t.Error(err)
	}
}

// installScript installs a program that is none.
func (p dataPlanes) installScript(t testing.TB, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	p.install(t, file)
}

// busy starts fio with checksums on all devices of a target.
func busy(t testing.TB, devs map[uint16]api.Device) (wait func()) {
	t.Helper()
	var jobs []fioJob
	for lun, d := range devs {
		jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
	}
	end := startFio(t, jobs)
	progress(t, devs)
	return func() { t.Helper(); end() }
}

// sameDevices checks that the devices are those that were there, with their session, and that no request has failed.
func (g *target) sameDevices(t testing.TB, before map[uint16]api.Device) {
	t.Helper()
	after := devices(t, g.name)
	if len(after) != len(before) {
		t.Errorf("devices %+v, were %+v", after, before)
	}
	for lun, d := range before {
		if a := after[lun]; a.Path != d.Path || a.WWID != d.WWID || a.State != api.DeviceLive || a.SessionID != d.SessionID || a.Stats.Errors != 0 {
			t.Errorf("unit %d: before %+v\nafter  %+v", lun, d, a)
		}
	}
}

// wantHanded checks what an upgrade says of the target's devices.
func wantHanded(t testing.TB, r api.UpgradeReply, devs int, how string) {
	t.Helper()
	if len(r.Devices) != devs || len(r.Problems) != 0 {
		t.Fatalf("%d devices, want %d; problems %q", len(r.Devices), devs, r.Problems)
	}
	for _, d := range r.Devices {
		if d.State != api.DeviceLive || how != "" && d.How != how {
			t.Errorf("%+v, want %s", d, how)
		}
	}
}

// The data plane is replaced by another build while fio writes and verifies, and that one by the first: nobody sees more than a pause.
func TestUpgrade(t *testing.T) {
	for _, k := range []kind{kinds[0], kinds[3]} { // each target and each transport
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			programs := newDataPlanes(t)
			g.login(t)
			before := devices(t, g.name)
			first := strings.Fields(must(t, programs.first, "--version"))
			build := func(round int) (file, want string) {
				if round%2 == 0 {
					return programs.next, nextBuild
				}
				return programs.first, first[len(first)-1]
			}
			for round := range rounds(t, 2) {
				wait := busy(t, before)
				old := status(t).DataPlane
				file, want := build(round)
				programs.install(t, file)
				r := query[api.UpgradeReply](t, "daemon", "upgrade")
				now := status(t).DataPlane
				if was := (api.DataPlane{PID: old.PID, Build: old.Version}); r.Old != was || r.New.PID == old.PID || r.New.Build != want {
					t.Errorf("%+v, want %s in the place of %+v", r, want, was)
				}
				if is := (api.DataPlane{PID: now.PID, Build: now.Version}); is != r.New {
					t.Errorf("%+v; status before %+v, after %+v", r, old, now)
				}
				wantHanded(t, r, len(before), "")
				t.Logf("round %d: paused for %d ms: %+v", round, r.PauseMS, r.Devices)
				wait()
				g.sameDevices(t, before)
			}
			g.logout(t)
		})
	}
}

// prober reads a device all the time and notes how long it waited for an answer at most.
type prober struct {
	path    string
	stop    chan struct{}
	ended   chan struct{} // closed when it reads no more
	err     error         // why, unless it was stopped; valid then
	longest chan chan time.Duration
}

// probe begins to read the first block of a device, past the page cache.
func probe(t testing.TB, path string) *prober {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	p := &prober{path: path, stop: make(chan struct{}), ended: make(chan struct{}), longest: make(chan chan time.Duration)}
	go func() {
		defer close(p.ended)
		defer unix.Close(fd)
		defer unix.Munmap(mem)
		p.err = p.read(fd, mem)
	}()
	return p
}

// read reads until it is told to stop, or an error.
func (p *prober) read(fd int, mem []byte) error {
	var longest time.Duration
	for {
		select {
		case <-p.stop:
			return nil
		case answer := <-p.longest:
			answer <- longest
			longest = 0
		default:
		}
		begin := time.Now()
		if n, err := unix.Pread(fd, mem, 0); err != nil || n != len(mem) {
			return fmt.Errorf("%d bytes, %w", n, err)
		}
		longest = max(longest, time.Since(begin))
	}
}

// take returns the longest wait since it was last called.
func (p *prober) take(t testing.TB) time.Duration {
	t.Helper()
	answer := make(chan time.Duration, 1)
	select {
	case p.longest <- answer:
		return <-answer
	case <-p.ended:
		t.Fatalf("read %s: %v", p.path, p.err)
	}
	return 0
}

// end stops reading; nothing may have failed.
func (p *prober) end(t testing.TB) {
	t.Helper()
	close(p.stop)
	<-p.ended
	if p.err != nil {
		t.Errorf("read %s: %v", p.path, p.err)
	}
}

// The pause of an upgrade, as a program that reads sees it, and as the daemon tells it. A device that is open stays open.
func TestUpgradePause(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}})
			g.login(t)
			before := devices(t, g.name)
			p := probe(t, before[0].Path)
			var seen, told []time.Duration
			quiesced := 0
			for range rounds(t, 10) {
				g.sessionIs(t, true)
				p.take(t)
				r := query[api.UpgradeReply](t, "daemon", "upgrade")
				wantHanded(t, r, 1, "")
				if r.Devices[0].How == api.HandOverQuiesced {
					quiesced++
				} else {
					t.Logf("%+v", r)
				}
				progress(t, before)
				seen, told = append(seen, p.take(t)), append(told, time.Duration(r.PauseMS)*time.Millisecond)
			}
			t.Logf("%s: pause over %d upgrades: a reader saw median %v, max %v; the daemon told median %v, max %v",
				k.name, len(seen), median(seen), slices.Max(seen), median(told), slices.Max(told))
			if quiesced == 0 {
				t.Error("not once was everything answered before the old data plane ended")
			}
			g.sameDevices(t, before)
			p.end(t)
			g.logout(t)
		})
	}
}

func median(list []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[len(sorted)/2].Round(time.Millisecond)
}

// While the session is being brought back nothing can be answered: the requests go over with the devices, and are sent when the target is there again.
func TestUpgradeWhileRecovering(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			before := devices(t, g.name)
			wait := busy(t, before)
			if err := g.lio.SetEnabled(false); err != nil {
				t.Fatal(err)
			}
			g.sessionIs(t, false)
			r := query[api.UpgradeReply](t, "daemon", "upgrade")
			wantHanded(t, r, len(before), api.HandOverReissued)
			if r.New.PID == r.Old.PID || len(r.Devices) > 0 && r.Devices[0].Reason != "its session was not up" {
				t.Errorf("%+v", r)
			}
			if err := g.lio.SetEnabled(true); err != nil {
				t.Fatal(err)
			}
			g.sessionIs(t, true)
			wait()
			g.sameDevices(t, before)
			g.logout(t)
		})
	}
}

// A program that does not start changes nothing; one that ends when it is its turn leaves the devices waiting, without an error, until a good one is there.
func TestUpgradeDoesNotStart(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			programs := newDataPlanes(t)
			g.login(t)
			before := devices(t, g.name)
			wait := busy(t, before)
			old := status(t).DataPlane

			programs.installScript(t, "exit 3")
			r := run(t, "iserctl", "daemon", "upgrade")
			oneLine(t, r)
			if r.code != 29 || !strings.Contains(r.stderr, "exit status 3") || !strings.Contains(r.stderr, "nothing was changed") {
				t.Errorf("exit status %d: %s", r.code, r.stderr)
			}
			if now := status(t).DataPlane; now.PID != old.PID {
				t.Errorf("the data plane was process %d and is %d", old.PID, now.PID)
			}
			wait()

			wait = busy(t, before)
			// It gets ready, and ends when it is told to serve.
			programs.installScript(t, fmt.Sprintf(`echo '{"version":1,"build":"bad","pid":1,"reactors":%d}' >&3 && read word <&3; exit 4`, old.Reactors))
			r = run(t, "iserctl", "daemon", "upgrade")
			oneLine(t, r)
			if r.code != 29 || !strings.Contains(r.stderr, "2 devices wait, without errors: install one that works, then run iserctl daemon upgrade") {
				t.Errorf("exit status %d: %s", r.code, r.stderr)
			}
			for _, d := range devices(t, g.name) {
				if d.State != api.DeviceWaiting {
					t.Errorf("%+v", d)
				}
			}
			if _, err := os.Stat(before[0].Path); err != nil {
				t.Error(err)
			}

			programs.install(t, programs.next)
			u := query[api.UpgradeReply](t, "daemon", "upgrade")
			wantHanded(t, u, len(before), "")
			if u.New.Build != nextBuild {
				t.Errorf("%+v", u)
			}
			wait()
			g.sameDevices(t, before)
			g.logout(t)
		})
	}
}

// The control plane is killed, or told to end, in the middle: the next one takes the devices over.
func TestUpgradeControlEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		sig  syscall.Signal
	}{{"SIGKILL", syscall.SIGKILL}, {"SIGTERM", syscall.SIGTERM}} {
		t.Run(c.name, func(t *testing.T) {
			g := newTarget(t, kinds[0], twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			before := devices(t, g.name)
			wait := busy(t, before)
			old := status(t).DataPlane.PID
			ended := make(chan result, 1)
			go func() {
				r, err := try("iserctl", "daemon", "upgrade")
				if err != nil {
					r.stderr += err.Error()
				}
				ended <- r
			}()
			// The note is there for as long as there is no way back. It is gone soon: no sleep.
			for limit := time.Now().Add(20 * time.Second); ; {
				if _, err := os.Stat("/run/iserd/upgrade.json"); err == nil {
					break
				}
				if time.Now().After(limit) {
					t.Fatalf("no upgrade has begun: %+v", <-ended)
				}
			}
			control.mu.Lock()
			if err := control.cmd.Process.Signal(c.sig); err != nil {
				t.Error(err)
			}
			select {
			case <-control.done:
			case <-time.After(30 * time.Second):
				t.Error("iserd does not end")
			}
			control.mu.Unlock()
			r := <-ended
			if r.code == 0 {
				t.Log("the upgrade was done before the signal came")
			} else if want := map[syscall.Signal]int{syscall.SIGKILL: 20, syscall.SIGTERM: 29}[c.sig]; r.code != want {
				t.Errorf("exit status %d, want %d: %s", r.code, want, r.stderr)
			}
			control.need(t)
			waitFor(t, "the next data plane serves", 60*time.Second, func() error {
				if pid := status(t).DataPlane.PID; pid == old || pid == 0 {
					return fmt.Errorf("it is %d", pid)
				}
				for _, d := range devices(t, g.name) {
					if d.State != api.DeviceLive {
						return fmt.Errorf("%+v", d)
					}
				}
				return nil
			})
			wait()
			g.sameDevices(t, before)
			g.logout(t)
			if left, _ := filepath.Glob("/run/iserd/upgrade*"); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
