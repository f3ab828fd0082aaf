package scenario

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsitcp"
)

// The scenarios TestFault... are rows of docs/reliability.md. In each of them fio writes and reads back with checksums while something
// breaks; unless the scenario says otherwise no request may fail and all data has to be right. make soak repeats them.

// linked is a LIO target at the far end of the link.
func linked(t *testing.T, k kind, units []targets.Unit) *target {
	t.Helper()
	needLink(t)
	g := &target{name: newName(t), transport: k.transport, kind: k, units: units}
	return g.lioAt(t, farAddress+":3264", k.transport == "iser")
}

// ride runs fio with verification on all devices of a target, lets a fault come and go, and checks that nobody has noticed. In a soak it does
// so again and again. options are for each of fio's jobs.
func (g *target) ride(t *testing.T, fault func(t *testing.T), options ...string) {
	t.Helper()
	devs := devices(t, g.name)
	var jobs []fioJob
	for lun, d := range devs {
		jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
	}
	for i := range jobs {
		jobs[i].options = append(jobs[i].options, options...)
	}
	for range rounds(t, 1) {
		wait := startFio(t, jobs)
		progress(t, devs)
		fault(t)
		wait()
		g.whole(t)
	}
	for lun, d := range devices(t, g.name) {
		if d.Stats.Errors != 0 {
			t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
		}
	}
}

// slowly makes each job of fio last for some seconds, however fast the machine is: 32 MiB in four jobs take four.
const slowly = "rate=1m,1m"

// slower is slowly for 4 MiB.
const slower = "rate=128k,128k"

// session is the target's session as the daemon shows it.
func (g *target) session(t testing.TB) api.Session {
	t.Helper()
	for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
		if s.Target == g.name {
			return s
		}
	}
	t.Fatalf("%s has no session", g.name)
	return api.Session{}
}

// lost waits until the daemon shows that the session is gone.
func (g *target) lost(t testing.TB) {
	t.Helper()
	waitFor(t, "the loss is shown", 30*time.Second, func() error {
		if s := g.session(t); s.State == api.SessionUp {
			return fmt.Errorf("session %d is %s", s.ID, s.State)
		}
		return nil
	})
}

// waiting checks that a fault has met requests: some wait at the target's devices.
func (g *target) waiting(t testing.TB) {
	t.Helper()
	for _, d := range devices(t, g.name) {
		b, err := os.ReadFile("/sys/block/" + filepath.Base(d.Path) + "/inflight")
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Fields(string(b)); len(n) == 2 && (n[0] != "0" || n[1] != "0") {
			return
		}
	}
	t.Error("no request waits: the fault has met nobody")
}

// whole waits until the session is up and every device of it is live.
func (g *target) whole(t testing.TB) {
	t.Helper()
	waitFor(t, "the session is back", 60*time.Second, func() error {
		if s := g.session(t); s.State != api.SessionUp {
			return fmt.Errorf("session %d is %s: %+v", s.ID, s.State, s.LastError)
		}
		devs := devices(t, g.name)
		for lun, d := range devs {
			if d.State != api.DeviceLive {
				return fmt.Errorf("unit %d is %s", lun, d.State)
			}
		}
		if len(devs) != len(g.luns) {
			return fmt.Errorf("%d devices of %d", len(devs), len(g.luns))
		}
		return nil
	})
}

// quick makes a dead session be noticed within two to three seconds rather than twenty.
var quick = []string{"noop_out_interval=1", "noop_out_timeout=2", "login_timeout=3"}

// The target's network goes away for longer than the daemon is patient: the session is lost, requests wait, and go on when the network is back.
func TestFaultNetworkCut(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := linked(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t, quick...)
			g.ride(t, func(t *testing.T) {
				unplug(t)
				g.lost(t)
				g.waiting(t)
				plug(t)
				plugged := time.Now()
				g.whole(t)
				t.Logf("back %v after the cable", time.Since(plugged).Round(10*time.Millisecond))
			}, slowly)
			g.logout(t)
		})
	}
}

// Every packet is lost for some seconds, less than the daemon is patient: the transport sends again and the session stays.
func TestFaultSilence(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := linked(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
			g.login(t)
			g.ride(t, func(t *testing.T) {
				disturb(t, "loss", "100%")
				time.Sleep(3 * time.Second) // the fault: its length
				g.waiting(t)
				undisturb(t)
			}, slowly)
			g.logout(t)
		})
	}
}

// A network that loses, delays and mixes up packets makes requests slow and nothing else. Soft RoCE sends again after two seconds only
// (ack_timeout, iser/dial.go) and stands still for as long, so it is given less to lose than TCP.
func TestFaultLossyNetwork(t *testing.T) {
	for _, c := range []struct {
		k     kind
		netem []string
	}{
		{kinds[1], []string{"loss", "1%"}},
		{kinds[1], []string{"loss", "5%"}},
		{kinds[1], []string{"delay", "2ms", "reorder", "75%", "50%", "duplicate", "5%"}},
		{kinds[0], []string{"loss", "0.1%"}},
		{kinds[0], []string{"delay", "1ms", "duplicate", "5%"}},
	} {
		t.Run(c.k.name+" "+strings.Join(c.netem, " "), func(t *testing.T) {
			g := linked(t, c.k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
			g.login(t)
			dev := devices(t, g.name)[0]
			for range rounds(t, 1) {
				disturb(t, c.netem...)
				fio(t, fioVerify("lossy", dev.Path, dev.Size))
				lost := dropped(t)
				undisturb(t)
				if c.netem[0] == "loss" && lost == 0 {
					t.Error("no packet was lost")
				}
				t.Logf("%d packets lost", lost)
			}
			g.whole(t)
			if d := devices(t, g.name)[0]; d.Stats.Errors != 0 {
				t.Errorf("%d errors", d.Stats.Errors)
			}
			g.logout(t)
		})
	}
}

// tgtd is killed under load, so that its connections end without a word, and started again: it knows nothing of the sessions that were.
func TestFaultTargetKilled(t *testing.T) {
	for _, k := range kinds[2:] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t)
			g.ride(t, func(t *testing.T) {
				if err := g.tgtd.Close(); err != nil {
					t.Fatal(err)
				}
				g.lost(t)
				g.waiting(t)
				g.startTGTD(t)
			}, slowly)
			g.logout(t)
		})
	}
}

// tgtd stops, as a target does that hangs with its connections open, and goes on with what it was sent meanwhile.
func TestFaultTargetHangs(t *testing.T) {
	for _, k := range kinds[2:] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t, quick...)
			g.ride(t, func(t *testing.T) {
				if err := syscall.Kill(g.tgtd.PID(), syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				g.lost(t)
				g.waiting(t)
				if err := syscall.Kill(g.tgtd.PID(), syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			}, slowly)
			g.logout(t)
		})
	}
}

// Another host logs in with our name and the ISID of one of our sessions, which the target ends therefore: it is brought back.
func TestFaultReinstatedByAnother(t *testing.T) {
	for _, k := range []kind{kinds[0], kinds[1], kinds[3]} {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t)
			g.ride(t, func(t *testing.T) {
				before := g.session(t)
				g.usurp(t, before.Connections[0].ISID)
				waitFor(t, "the session has been made again", 60*time.Second, func() error {
					s := g.session(t)
					if s.State != api.SessionUp || !s.Since.After(before.Since) {
						return fmt.Errorf("it is %s since %v, before %v", s.State, s.Since, before.Since)
					}
					if got, want := s.Connections[0].ISID, before.Connections[0].ISID; got != want {
						return fatalError{fmt.Errorf("with ISID %s, before %s", got, want)}
					}
					return nil
				})
			}, slowly)
			g.logout(t)
		})
	}
}

// usurp logs in to g over TCP as the daemon itself would, and leaves without a logout.
func (g *target) usurp(t *testing.T, isid string) {
	t.Helper()
	p, err := iscsitcp.Dial(t.Context(), g.portal)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c := login.Config{InitiatorName: initiatorName(t), TargetName: g.name, SessionType: login.Normal, Transport: login.TCP, CmdSN: 1}
	if n, err := hex.Decode(c.ISID[:], []byte(isid)); err != nil || n != len(c.ISID) {
		t.Fatalf("ISID %q", isid)
	}
	if _, err := iscsi.Login(t.Context(), p, c); err != nil {
		t.Fatal(err)
	}
}

// The target ends the sessions and refuses those that would log in again, for it wants a secret now. Requests wait until it does not any more.
func TestFaultLoginRefused(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t)
			g.ride(t, func(t *testing.T) {
				g.enable(t, false)
				if err := g.lio.SetAttribute("authentication", "1"); err != nil {
					t.Fatal(err)
				}
				g.enable(t, true)
				waitFor(t, "the refusal is shown", 30*time.Second, func() error {
					s := g.session(t)
					if s.State != api.SessionRecovering || s.LastError == nil || !strings.Contains(s.LastError.Text, "CHAP") {
						return fmt.Errorf("the session is %s, %+v", s.State, s.LastError)
					}
					return nil
				})
				g.waiting(t)
				if err := g.lio.SetAttribute("authentication", "0"); err != nil {
					t.Fatal(err)
				}
			}, slowly)
			g.logout(t)
		})
	}
}

// enable opens or shuts the target.
func (g *target) enable(t testing.TB, on bool) {
	t.Helper()
	if err := g.lio.SetEnabled(on); err != nil {
		t.Fatal(err)
	}
}

// severed is ENOLINK in words, as which a request fails that waited for too long.
const severed = "Link has been severed"

// Targets stay away for longer than requests wait: with replacement_timeout=0 these fail at once, with 3 after three seconds and not before, by
// default after thirty, and with forever they are still waiting then. When the targets are back every device is as good as new.
func TestFaultReplacementTimeout(t *testing.T) {
	guestOnly(t)
	cases := []struct {
		setting  string // "" is the default
		least    time.Duration
		k        kind
		g        *target
		dev      api.Device
		cut      time.Time
		ended    chan time.Time
		response result
		err      error
	}{
		{setting: "0", k: kinds[0]}, {setting: "0", k: kinds[1]},
		{setting: "3", least: 3 * time.Second, k: kinds[0]}, {least: 30 * time.Second, k: kinds[1]},
		{setting: "forever", k: kinds[0]}, {setting: "forever", k: kinds[1]},
	}
	for i := range cases {
		c := &cases[i]
		// LIO mixes up targets that are at one address over different transports.
		c.g = &target{name: newName(t), transport: c.k.transport, kind: c.k, units: []targets.Unit{{Kind: targets.Ramdisk, Size: 4 * mib}}}
		c.g.lioAt(t, map[string]string{"iser": "10.0.0.1:3261", "tcp": "10.0.0.1:3265"}[c.k.transport], c.k.transport == "iser")
		var settings []string
		if c.setting != "" {
			settings = []string{"replacement_timeout=" + c.setting}
		}
		c.g.login(t, settings...)
		c.dev = devices(t, c.g.name)[0]
	}
	for i := range cases {
		c := &cases[i]
		c.cut = time.Now()
		c.g.enable(t, false)
		c.g.lost(t)
		c.ended = make(chan time.Time, 1)
		go func() {
			// Not must and run, which are for the goroutine of the test.
			c.response, c.err = try("dd", "if="+c.dev.Path, "of=/dev/null", "bs=4096", "count=1", "iflag=direct", "status=none")
			c.ended <- time.Now()
		}()
	}
	for i := range cases {
		c := &cases[i]
		name := c.k.name + " " + c.setting
		if c.setting == "forever" {
			continue
		}
		select {
		case at := <-c.ended:
			if took := at.Sub(c.cut); took < c.least || c.err != nil || c.response.code == 0 || !strings.Contains(c.response.stderr, severed) {
				t.Errorf("%s: after %v: %v, %+v", name, took, c.err, c.response)
			}
		case <-time.After(time.Until(c.cut.Add(c.least + 30*time.Second))):
			t.Errorf("%s: a request still waits", name)
		}
		if s := c.g.session(t); s.State != api.SessionFailed {
			t.Errorf("%s: the session is %s", name, s.State)
		}
	}
	for i := range cases {
		c := &cases[i]
		if c.setting == "forever" {
			select {
			case <-c.ended:
				t.Errorf("%s: a request does not wait: %+v", c.k.name, c.response)
			default:
			}
		}
		c.g.enable(t, true)
		c.g.whole(t)
		if c.setting == "forever" {
			if <-c.ended; c.err != nil || c.response.code != 0 {
				t.Errorf("%s: the request that waited: %v, %+v", c.k.name, c.err, c.response)
			}
		}
		must(t, "dd", "if=/dev/urandom", "of="+c.dev.Path, "bs=65536", "count=16", "oflag=direct", "status=none")
		must(t, "dd", "if="+c.dev.Path, "of=/dev/null", "bs=65536", "iflag=direct", "status=none")
		c.g.logout(t)
	}
}

// The network of twenty devices (of a hundred in a soak) is cut for ten seconds under load: all of them come back.
func TestFaultManyDevices(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			var units []targets.Unit
			count := 20
			if os.Getenv("SOAK") != "" {
				count = 100
			}
			for range count {
				units = append(units, targets.Unit{Kind: targets.Ramdisk, Size: 4 * mib})
			}
			g := linked(t, k, units)
			g.login(t, quick...)
			g.ride(t, func(t *testing.T) {
				unplug(t)
				cut := time.Now()
				g.lost(t)
				time.Sleep(time.Until(cut.Add(10 * time.Second))) // the fault: its length
				g.waiting(t)
				plug(t)
			}, slower)
			g.logout(t)
		})
	}
}

// This host is cut off from its unit in the midst of writing, as when its power goes: a copy of the unit made then mounts, and holds every file
// whose fsync had returned. With the target back the writing goes on.
func TestFaultPowerCut(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			must(t, "modprobe", "loop")
			backing := filepath.Join(t.TempDir(), "unit")
			g := newTarget(t, k, []targets.Unit{{Kind: targets.FileIO, Size: 64 * mib, Path: backing, WriteCache: true}})
			g.login(t)
			dev := devices(t, g.name)[0]
			must(t, "mkfs.ext4", "-q", "-F", dev.Path)
			dir := t.TempDir()
			must(t, "mount", dev.Path, dir)
			defer run(t, "umount", dir)
			var synced atomic.Int64 // files before this one are safe
			stop, stopped := make(chan struct{}), make(chan error, 1)
			go func() { stopped <- writeFiles(dir, &synced, stop) }()
			for range rounds(t, 3) {
				start := synced.Load()
				waitFor(t, "files are written", 60*time.Second, func() error {
					if n := synced.Load() - start; n < 20 {
						return fmt.Errorf("%d", n)
					}
					return nil
				})
				safe := synced.Load()
				g.enable(t, false)
				image := filepath.Join(t.TempDir(), "copy")
				must(t, "cp", "--sparse=always", backing, image)
				g.enable(t, true)
				checkImage(t, image, safe)
				os.Remove(image)
			}
			close(stop)
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			g.whole(t)
			must(t, "umount", dir)
			if r := run(t, "e2fsck", "-fn", dev.Path); r.code != 0 {
				t.Errorf("e2fsck: %d: %s%s", r.code, r.stdout, r.stderr)
			}
			g.logout(t)
		})
	}
}

// fileOf is the name and the content of file n. The last files are kept, so that there is room.
func fileOf(dir string, n int64) (name string, content []byte) {
	return filepath.Join(dir, fmt.Sprintf("file%d", n)), bytes.Repeat(fmt.Appendf(nil, "file %d\n", n), 1+int(n*7919%4000))
}

// keptFiles is how many files there are at a time.
const keptFiles = 400

// writeFiles writes files with fsync until it is stopped, and counts those that are safe.
func writeFiles(dir string, synced *atomic.Int64, stop chan struct{}) error {
	for n := int64(0); ; n++ {
		select {
		case <-stop:
			return nil
		default:
		}
		name, content := fileOf(dir, n)
		f, err := os.Create(name)
		if err != nil {
			return err
		}
		_, err = f.Write(content)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			return err
		}
		synced.Store(n + 1)
		if n >= keptFiles {
			old, _ := fileOf(dir, n-keptFiles)
			if err := os.Remove(old); err != nil {
				return err
			}
		}
	}
}

// checkImage mounts a copy of a unit, which replays the journal, and looks for the files that were safe.
func checkImage(t *testing.T, image string, safe int64) {
	t.Helper()
	dir := t.TempDir()
	must(t, "mount", "-o", "loop", image, dir)
	// The files that were written behind the last of them may have taken the place of the oldest.
	first := max(0, safe-keptFiles/2)
	for n := first; n < safe; n++ {
		name, want := fileOf(dir, n)
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("file %d of %d: %d bytes of %d, %v", n, safe, len(got), len(want), err)
		}
	}
	must(t, "umount", dir)
	if r := run(t, "e2fsck", "-fn", image); r.code != 0 {
		t.Errorf("e2fsck of the copy: %d: %s%s", r.code, r.stdout, r.stderr)
	}
}
