package scenario

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget"
)

// newScripted serves units by the scripted target, in this process, over iSER or TCP. It is closed at the end of the test, which fails on
// what the initiator did wrong.
func newScripted(t testing.TB, transport string, config testtarget.Config) (*target, *testtarget.Target) {
	t.Helper()
	guestOnly(t)
	config.Name, config.ISER = newName(t), transport == "iser"
	config.Addr = "10.0.0.1:3263"
	s, err := testtarget.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		for _, v := range s.Violations() {
			t.Error("the target saw:", v)
		}
	})
	g := &target{name: config.Name, portal: s.Addr(), transport: transport, kind: kind{name: "scripted-" + transport, transport: transport}}
	g.sessions = func() (int, error) { return s.Sessions(), nil }
	for lun, u := range config.Units {
		if u != nil {
			g.luns = append(g.luns, uint16(lun))
		}
	}
	return g, s
}

// The scripted target serves a unit in memory and one in a file, over both transports, and keeps what is written: so what other tests make of
// its misbehaviour rests on a target that works.
func TestScripted(t *testing.T) {
	for _, transport := range []string{"iser", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			file, err := testtarget.NewFileUnit(filepath.Join(t.TempDir(), "unit"), 8*mib)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { file.Close() })
			g, s := newScripted(t, transport, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(4 * mib), file}})
			g.login(t)
			var jobs []fioJob
			for lun, d := range devices(t, g.name) {
				if d.Size != uint64(s.Unit(int(lun)).Size()) || d.Transport != transport {
					t.Errorf("unit %d: %d bytes over %s", lun, d.Size, d.Transport)
				}
				jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
			}
			fio(t, jobs)
			for lun, sum := range contents(t, g) {
				b := make([]byte, s.Unit(int(lun)).Size())
				s.Unit(int(lun)).ReadAt(b, 0)
				if want := fmt.Sprintf("%x", sha256.Sum256(b)); !strings.HasPrefix(sum, want) {
					t.Errorf("unit %d: the device reads %s, the target has %s", lun, sum, want)
				}
			}
			g.logout(t)
		})
	}
}

// Other initiators judge the iSER half of the scripted target: the kernel's with open-iscsi, and libiscsi.
func TestScriptedPeers(t *testing.T) {
	unit := testtarget.NewUnit(8 * mib)
	content := bytes.Repeat([]byte("0123456789abcdef"), 8*mib/16)
	unit.WriteAt(content, 0)
	g, s := newScripted(t, "iser", testtarget.Config{Units: []*testtarget.Unit{unit}, StatSN: 1000}) // libiscsi does not let StatSN wrap

	url := "iser://" + s.Addr() + "/" + g.name + "/0"
	if out := must(t, "iscsi-inq", url); !strings.Contains(out, "ISERD") {
		t.Errorf("iscsi-inq prints %s", out)
	}
	if out := must(t, "iscsi-readcapacity16", url); !strings.Contains(out, fmt.Sprint(8*mib)) {
		t.Errorf("iscsi-readcapacity16 prints %s", out)
	}

	must(t, "modprobe", "-a", "ib_iser", "sd_mod")
	for _, d := range []string{"/run/lock/iscsi", "/etc/iscsi"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile("/etc/iscsi/initiatorname.iscsi", []byte("InitiatorName=iqn.2003-01.org.example:peer\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	iscsid := exec.Command("iscsid", "-f")
	if err := iscsid.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		iscsid.Process.Kill()
		iscsid.Wait()
	})
	waitFor(t, "iscsid answers", 10*time.Second, func() error {
		if r := run(t, "iscsiadm", "-m", "session"); r.code != 21 { // no sessions: it has answered
			return fmt.Errorf("%s%s", r.stdout, r.stderr)
		}
		return nil
	})
	must(t, "iscsiadm", "-m", "node", "-o", "new", "-T", g.name, "-p", s.Addr()+",1", "-I", "iser")
	t.Cleanup(func() { run(t, "iscsiadm", "-m", "node", "-o", "delete") })
	must(t, "iscsiadm", "-m", "node", "-T", g.name, "-p", s.Addr(), "-I", "iser", "--login")
	t.Cleanup(func() { run(t, "iscsiadm", "-m", "node", "-U", "all") })
	var disk string
	waitFor(t, "the kernel's disk", 20*time.Second, func() error {
		found, _ := filepath.Glob("/sys/class/block/sd*/device/vendor")
		for _, f := range found {
			if b, _ := os.ReadFile(f); strings.HasPrefix(string(b), "ISERD") {
				disk = "/dev/" + strings.Split(f, "/")[4]
				return nil
			}
		}
		return fmt.Errorf("no disk of vendor ISERD among %q", found)
	})
	sum := fmt.Sprintf("%x", sha256.Sum256(content))
	if got := must(t, "sh", "-c", "dd if="+disk+" bs=1M iflag=direct status=none | sha256sum"); !strings.HasPrefix(got, sum) {
		t.Errorf("the kernel reads %s, the target has %s", got, sum)
	}
	must(t, "sh", "-c", "dd if=/dev/urandom of=/tmp/random bs=1M count=8 status=none && dd if=/tmp/random of="+disk+" bs=256k oflag=direct status=none")
	got := make([]byte, 8*mib)
	unit.ReadAt(got, 0)
	want, err := os.ReadFile("/tmp/random")
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("what the kernel wrote has not arrived (%v)", err)
	}
	must(t, "iscsiadm", "-m", "node", "-T", g.name, "-p", s.Addr(), "--logout")
}
