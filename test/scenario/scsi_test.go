package scenario

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// otherName is the initiator that stands for another machine.
const otherName = "iqn.2003-01.org.example:other"

// otherInitiator logs open-iscsi and the kernel's initiator in to a target, and returns the disk of unit 0.
func otherInitiator(t testing.TB, g *target) string {
	t.Helper()
	openISCSI(t, otherName)
	must(t, "iscsiadm", "-m", "node", "-o", "new", "-T", g.name, "-p", g.portal+",1")
	must(t, "iscsiadm", "-m", "node", "-T", g.name, "-p", g.portal, "--login")
	t.Cleanup(func() {
		must(t, "iscsiadm", "-m", "node", "-T", g.name, "--logout")
		must(t, "iscsiadm", "-m", "node", "-T", g.name, "-o", "delete")
	})
	disk := ""
	waitFor(t, "the disk of the other initiator", 20*time.Second, func() error {
		found, err := filepath.Glob("/sys/class/iscsi_session/session*/device/target*/*:0/block/*")
		if err == nil && len(found) != 1 {
			err = fmt.Errorf("%d disks", len(found))
		}
		if err != nil {
			return err
		}
		disk = "/dev/" + filepath.Base(found[0])
		_, err = os.Stat(disk)
		return err
	})
	return disk
}

// writeOn writes a block of 4 KiB to a device, from a CPU, past the page cache. It returns what dd says of a failure.
func writeOn(t testing.TB, cpu int, dev string) error {
	t.Helper()
	r := run(t, "taskset", "-c", strconv.Itoa(cpu), "dd", "if=/dev/zero", "of="+dev, "bs=4k", "count=1", "seek="+strconv.Itoa(16+cpu), "oflag=direct", "conv=notrunc")
	if r.code != 0 {
		return errors.New(oneText(r.stderr))
	}
	return nil
}

func oneText(s string) string { return strings.Join(strings.Fields(s), " ") }

// cpus counts the processors, of which each has a queue of each device.
func cpus(t testing.TB) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(must(t, "nproc")))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Commands that bypass the block layer bring what another initiator's tools bring, and persistent reservations work for a device with several
// sessions: others are kept out, all queues get in, also after the sessions were lost; an initiator that was preempted stays out.
func TestScsi(t *testing.T) {
	guestOnly(t)
	// LIO writes down there that nothing is to survive a loss of power, and refuses registrations when it cannot.
	for _, d := range []string{"/etc/target/pr", "/var/target/pr"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	g := &target{name: newName(t), transport: "iser", portal: "10.0.0.1:3261", kind: kinds[0]}
	// The target forgets an initiator, and its registrations, when its last session ends: without cached ACLs.
	lio, err := targets.NewLIO(targets.LIOConfig{
		Name: g.name, Portals: []targets.Portal{targets.ParsePortal(g.portal, true)}, Units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}},
		Attributes: map[string]string{"cache_dynamic_acls": "0", "demo_mode_write_protect": "0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lio.Close(); err != nil {
			t.Error(err)
		}
	})
	g.lio, g.sessions, g.luns = lio, lio.Sessions, []uint16{0}
	g.login(t)
	dev := devices(t, g.name)[0].Path
	other := otherInitiator(t, g)

	t.Run("answers", func(t *testing.T) {
		for name, c := range map[string]struct {
			cdb string
			in  int
		}{
			"INQUIRY":           {"12 00 00 00 60 00", 96},
			"VPD 83":            {"12 01 83 04 00 00", 1024},
			"READ CAPACITY(10)": {"25 00 00 00 00 00 00 00 00 00", 8},
			"READ CAPACITY(16)": {"9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00", 32},
			"MODE SENSE(6)":     {"1a 08 3f 00 c0 00", 192},
			"REPORT LUNS":       {"a0 00 00 00 00 00 00 00 10 00 00 00", 4096},
		} {
			dir := t.TempDir()
			ours, theirs := filepath.Join(dir, "ours"), filepath.Join(dir, "theirs")
			iserctl(t, "scsi", "raw", dev, c.cdb, "--in", strconv.Itoa(c.in), "--save", ours)
			must(t, "sg_raw", append([]string{"-r", strconv.Itoa(c.in), "-o", theirs, other}, strings.Fields(c.cdb)...)...)
			a, err := os.ReadFile(ours)
			if err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(theirs)
			if err != nil {
				t.Fatal(err)
			}
			if len(a) == 0 || !bytes.Equal(a, b) {
				t.Errorf("%s: %x, sg_raw has %x", name, a, b)
			}
		}
		if out := iserctl(t, "scsi", "inquiry", dev, "--page", "0x83"); !strings.Contains(out, devices(t, g.name)[0].WWID) {
			t.Errorf("inquiry does not show %s:\n%s", devices(t, g.name)[0].WWID, out)
		}
		if out := iserctl(t, "scsi", "capacity", dev); !strings.Contains(out, "16 MiB") {
			t.Errorf("capacity:\n%s", out)
		}
		block := filepath.Join(t.TempDir(), "block")
		if err := os.WriteFile(block, bytes.Repeat([]byte("iserd..."), 64), 0o600); err != nil {
			t.Fatal(err)
		}
		write := []string{"scsi", "raw", dev, "2a 00 00 00 00 07 00 00 01 00", "--out", block}
		if r := run(t, "iserctl", write...); r.code != 7 || !strings.Contains(r.stderr, "--force") {
			t.Errorf("WRITE without force: exit status %d: %s", r.code, r.stderr)
		}
		iserctl(t, append(write, "--force")...)
		if got := must(t, "dd", "if="+dev, "bs=512", "skip=7", "count=1", "iflag=direct", "status=none"); got != strings.Repeat("iserd...", 64) {
			t.Errorf("the block device reads %q", got[:16])
		}
		if r := run(t, "iserctl", "scsi", "raw", dev, "ff 00 00 00 00 00"); r.code == 0 {
			t.Error("an unknown command without force is sent")
		}
		if r := run(t, "iserctl", "scsi", "raw", dev, "ff 00 00 00 00 00", "--force"); r.code != 33 || !strings.Contains(r.stderr, "invalid command operation code") {
			t.Errorf("unknown command: exit status %d: %s", r.code, r.stderr)
		}
	})

	t.Run("reservations", func(t *testing.T) {
		reserve := func(args ...string) { t.Helper(); iserctl(t, append([]string{"scsi", "reserve"}, args...)...) }
		keys := func() []api.Key {
			t.Helper()
			return query[api.ReservationReply](t, "scsi", "reserve", "keys", dev).Keys
		}
		n := cpus(t)
		all := func(what string, want bool) {
			t.Helper()
			for cpu := range n {
				if err := writeOn(t, cpu, dev); (err == nil) != want {
					t.Errorf("%s: write from CPU %d: %v", what, cpu, err)
				}
			}
		}
		reserve("register", dev, "--new-key", "0xaa")
		if k := keys(); len(k) != n || k[0] != 0xaa {
			t.Errorf("keys %v, want %d of 0xaa", k, n)
		}
		if r := run(t, "iserctl", "scsi", "reserve", "reserve", dev, "--key", "0xaa", "--type", "we"); n > 1 && (r.code != 7 || !strings.Contains(r.stderr, "Registrants Only")) {
			t.Errorf("a type for one session: exit status %d: %s", r.code, r.stderr)
		}
		reserve("reserve", dev, "--key", "0xaa", "--type", "we-ro")
		if out := must(t, "sg_persist", "-i", "-r", other); !strings.Contains(out, "Write Exclusive, registrants only") {
			t.Errorf("sg_persist:\n%s", out)
		}
		own, holders := 0, 0
		for _, x := range query[api.ReservationReply](t, "scsi", "reserve", "full-status", dev).Registrations {
			if x.Own && x.Key == 0xaa {
				own++
			}
			if x.Holder {
				holders++
			}
		}
		if own != n || holders != 1 {
			t.Errorf("%d nexuses of ours, %d holders; want %d and one:\n%s", own, holders, n, iserctl(t, "scsi", "reserve", "full-status", dev))
		}
		all("reserved", true)
		if err := writeOn(t, 0, other); err == nil {
			t.Error("another initiator writes to a reserved unit")
		}

		// All sessions are lost, and with them the registrations.
		if err := lio.SetEnabled(false); err != nil {
			t.Fatal(err)
		}
		if err := lio.SetEnabled(true); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the sessions are back", 30*time.Second, func() error {
			for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
				if s.Target == g.name && s.State != api.SessionUp {
					return errors.New(s.State)
				}
			}
			return nil
		})
		all("after a loss", true)
		if k := keys(); len(k) != n {
			t.Errorf("keys after a loss %v", k)
		}

		// The other one takes over. Our sessions do not come back by themselves.
		waitFor(t, "the other initiator is back", 60*time.Second, func() error {
			r := run(t, "sg_persist", "-o", "-I", "-S", "0xbb", other)
			if r.code != 0 {
				return errors.New(oneText(r.stderr))
			}
			return nil
		})
		must(t, "sg_persist", "-o", "-A", "-K", "0xbb", "-S", "0xaa", "-T", "5", other)
		must(t, "sg_persist", "-o", "-R", "-K", "0xbb", "-T", "5", other)
		all("preempted", false)
		if r := run(t, "iserctl", "scsi", "reserve", "reserve", dev, "--key", "0xaa", "--type", "we-ro"); r.code != 34 {
			t.Errorf("reserve with a key that was taken away: exit status %d: %s", r.code, r.stderr)
		}
		must(t, "sg_persist", "-o", "-C", "-K", "0xbb", other)
		all("cleared", true)
	})
}
