package scenario

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/scsi"
)

// startDoomed starts fio on a device that is going to be taken from it. The function waits for its end, which has to be an I/O error.
func startDoomed(t testing.TB, d api.Device) (wait func()) {
	t.Helper()
	cmd := exec.Command("fio", "--name=doomed", "--filename="+d.Path, fmt.Sprintf("--size=%d", d.Size), "--rw=randrw", "--bs=4k", "--iodepth=32", "--direct=1",
		"--ioengine=io_uring", "--thread", "--time_based", "--runtime=600")
	cmd.Dir = t.TempDir()
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return func() {
		t.Helper()
		select {
		case err := <-ended:
			if err == nil || !strings.Contains(said.String(), "error") {
				t.Errorf("fio on an aborted device: %v\n%s", err, said.String())
			}
		case <-time.After(60 * time.Second):
			t.Fatalf("fio is still at work on %s, which was aborted\n%s", d.Path, said.String())
		}
	}
}

// isAborted checks that unit 0 has no block device, that it is said why, and that unit 1 has one.
func (g *target) isAborted(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("%s: %v", path, err)
	}
	r := query[api.DevicesReply](t, "device", "list")
	if len(r.Devices) != 1 || r.Devices[0].LUN != 1 || len(r.Unserved) != 1 ||
		r.Unserved[0].LUN != 0 || !strings.Contains(r.Unserved[0].Reason, "aborted by the administrator") {
		t.Errorf("devices %+v", r)
	}
}

// sessionIs waits until the target's session is up, or is not.
func (g *target) sessionIs(t testing.TB, up bool) {
	t.Helper()
	waitFor(t, "the session's state", 60*time.Second, func() error {
		for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
			if s.Target == g.name && (s.State == api.SessionUp) == up {
				return nil
			}
		}
		return fmt.Errorf("want up %v: %s", up, iserctl(t, "session", "list"))
	})
}

// A device whose target is away is ended at once, although it is in use; the other device of the session goes on when the target is back, and a rescan
// serves the unit again.
func TestAbortTargetAway(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			devs := devices(t, g.name)
			ends := startDoomed(t, devs[0])
			wait := startFio(t, fioVerify("lun1", devs[1].Path, devs[1].Size))
			progress(t, devs)
			if err := g.lio.SetEnabled(false); err != nil {
				t.Fatal(err)
			}
			g.sessionIs(t, false)
			iserctl(t, "device", "abort", devs[0].Path)
			ends()
			g.isAborted(t, devs[0].Path)
			if err := g.lio.SetEnabled(true); err != nil {
				t.Fatal(err)
			}
			g.sessionIs(t, true)
			wait()
			g.isAborted(t, devs[0].Path)
			g.servedAgain(t)
		})
	}
}

// servedAgain asks for the unit of an aborted device, uses it and logs out.
func (g *target) servedAgain(t testing.TB) {
	t.Helper()
	iserctl(t, "rescan", g.name)
	var jobs []fioJob
	devs := devices(t, g.name)
	if len(devs) != 2 {
		t.Fatalf("devices after a rescan: %+v", devs)
	}
	for lun, d := range devs {
		jobs = append(jobs, fioVerify(fmt.Sprintf("again%d", lun), d.Path, d.Size)...)
	}
	fio(t, jobs)
	g.logout(t)
}

// A device that works is taken from its users by force only; they keep an open file without a disk. The target is told to end what it has not answered.
func TestAbortInUse(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			units := twoUnits(t, 32*mib, 32*mib)
			g := newTarget(t, k, units)
			g.login(t)
			devs := devices(t, g.name)
			first, second := devs[g.luns[0]], devs[g.luns[1]]
			f, err := os.Open(first.Path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			ends := startDoomed(t, first)
			wait := startFio(t, fioVerify("other", second.Path, second.Size))
			progress(t, devs)
			r := run(t, "iserctl", "device", "abort", first.Path)
			oneLine(t, r)
			if r.code != 28 || !strings.Contains(r.stderr, fmt.Sprint(os.Getpid())) || !strings.Contains(r.stderr, "--force") {
				t.Errorf("exit status %d: %s", r.code, r.stderr)
			}
			iserctl(t, "device", "abort", first.Path, "--force")
			ends()
			if n, err := f.ReadAt(make([]byte, 4096), 16<<20); n != 0 || err == nil { // the kernel gives a disk that is gone the size 0
				t.Errorf("a read from a file that was open: %d bytes, %v", n, err)
			}
			wait()
			for _, c := range query[api.SessionsReply](t, "session", "list").Sessions[0].Connections {
				t.Logf("reactor %d: %d aborts, %d resets, %d drops", c.Reactor, c.Aborts, c.Resets, c.Drops)
			}
			if d := devices(t, g.name); len(d) != 1 || d[g.luns[1]].Stats.Errors != 0 {
				t.Errorf("devices %+v", d)
			}
			f.Close()
			g.servedAgain(t)
			if left, _ := filepath.Glob("/dev/ublkc*"); len(left) != 0 {
				t.Errorf("ublk devices after logout: %v", left)
			}
		})
	}
}

// A unit that answers no read and no write any more, while its session is up, keeps no device: its commands end by the target's word, or with the session if it
// does not answer that either. The other unit sees no error.
func TestAbortTargetHangs(t *testing.T) {
	for _, transport := range []string{"iser", "tcp"} {
		for _, silent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/silent=%v", transport, silent), func(t *testing.T) {
				g, s := newScripted(t, transport, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(16 * mib), testtarget.NewUnit(16 * mib)}})
				g.login(t)
				devs := devices(t, g.name)
				ends := startDoomed(t, devs[0])
				wait := startFio(t, fioVerify("lun1", devs[1].Path, devs[1].Size))
				progress(t, devs)
				heal := s.Misbehave(testtarget.When{}, func(c *testtarget.Conn, p *testtarget.PDU) bool {
					if cdb := p.BHS[32]; p.Opcode() == testtarget.OpSCSICommand && p.BHS[9] == 0 && (cdb == scsi.OpRead10 || cdb == scsi.OpWrite10) ||
						silent && p.Opcode() == testtarget.OpTaskMgmt {
						return testtarget.Ignore(c, p)
					}
					return true
				})
				iserctl(t, "device", "abort", devs[0].Path, "--force")
				heal()
				ends()
				g.isAborted(t, devs[0].Path)
				wait()
				g.sessionIs(t, true)
				var drops uint64
				for _, x := range query[api.SessionsReply](t, "session", "list").Sessions[0].Connections {
					drops += x.Drops
				}
				if (drops > 0) != silent {
					t.Errorf("%d sessions were ended", drops)
				}
				if d := devices(t, g.name)[1]; d.Stats.Errors != 0 {
					t.Errorf("the other unit: %d errors", d.Stats.Errors)
				}
				g.servedAgain(t)
			})
		}
	}
}

// A data plane that does not answer is killed when a device is aborted by force; its other devices are taken over and see no error.
func TestAbortDataPlaneHangs(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 32*mib, 32*mib))
			g.login(t)
			devs := devices(t, g.name)
			ends := startDoomed(t, devs[0])
			wait := startFio(t, fioVerify("lun1", devs[1].Path, devs[1].Size))
			progress(t, devs)
			old := status(t).DataPlane.PID
			if err := syscall.Kill(old, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			r := run(t, "iserctl", "device", "abort", devs[0].Path)
			if r.code != 28 { // it seems to work, and is in use
				t.Errorf("exit status %d: %s", r.code, r.stderr)
			}
			iserctl(t, "device", "abort", devs[0].Path, "--force")
			ends()
			waitFor(t, "the next data plane serves", 60*time.Second, func() error {
				if pid := status(t).DataPlane.PID; pid == old || pid == 0 {
					return fmt.Errorf("it is %d", pid)
				}
				if d := devices(t, g.name); len(d) != 1 || d[1].State != api.DeviceLive {
					return fmt.Errorf("devices %+v", d)
				}
				return nil
			})
			wait()
			g.sessionIs(t, true)
			g.isAborted(t, devs[0].Path)
			g.servedAgain(t)
		})
	}
}

// Without a data plane, and none to come, a device is ended all the same, also by a daemon that has never seen the data plane.
func TestAbortNoDataPlane(t *testing.T) {
	for _, fresh := range []bool{false, true} {
		t.Run(fmt.Sprintf("fresh=%v", fresh), func(t *testing.T) {
			g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}, {Kind: targets.Ramdisk, Size: 32 * mib}})
			g.login(t)
			devs := devices(t, g.name)
			ends := startDoomed(t, devs[0])
			progress(t, map[uint16]api.Device{0: devs[0]})
			old := status(t).DataPlane.PID

			control.kill(t)
			breakDataPlane(t, true)
			if !fresh { // it adopts the data plane that is there, and cannot start another
				control.need(t)
				waitFor(t, "the devices are known", 20*time.Second, func() error {
					if n := len(devices(t, g.name)); n != 2 {
						return fmt.Errorf("%d devices", n)
					}
					return nil
				})
			}
			if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			control.need(t)
			waitFor(t, "there is no data plane", 30*time.Second, func() error {
				if st := status(t).DataPlane; st.State != api.DataPlaneDown {
					return errors.New(st.State)
				}
				return nil
			})
			iserctl(t, "device", "abort", devs[0].Path)
			ends()
			if _, err := os.Stat(devs[0].Path); !os.IsNotExist(err) {
				t.Errorf("%s: %v", devs[0].Path, err)
			}

			control.kill(t)
			breakDataPlane(t, false)
			control.need(t)
			g.sessionIs(t, true)
			waitFor(t, "the other device is taken over", 60*time.Second, func() error {
				if d := devices(t, g.name); len(d) != 1 || d[1].State != api.DeviceLive {
					return fmt.Errorf("devices %+v", d)
				}
				return nil
			})
			g.isAborted(t, devs[0].Path)
			g.servedAgain(t)
		})
	}
}

// breakDataPlane configures a data plane that does not exist, or takes that back.
func breakDataPlane(t testing.TB, on bool) {
	t.Helper()
	const file = "/etc/iserd/iserd.toml"
	if !on {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		return
	}
	if _, err := os.Stat(file); err == nil {
		t.Fatalf("%s is there already", file)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("data_plane = \"/nonexistent/iserd-io\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(file) })
}
