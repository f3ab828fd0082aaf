package scenario

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// Bad input and bad surroundings: one line that says what is wrong, the exit status that open-iscsi gives, and no waiting beyond reason.
func TestBadInput(t *testing.T) {
	g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}) // TCP only
	control.need(t)

	silent, err := net.Listen("tcp", "10.0.0.1:0") // takes connections and never says a word
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()

	for _, c := range []struct {
		name string
		args []string
		code int
		says string
		max  time.Duration
	}{
		{"portal refuses over TCP", []string{"discover", "10.0.0.1:9", "--transport", "tcp"}, 4, "refused", 10 * time.Second},
		{"portal refuses over RDMA", []string{"discover", "10.0.0.1:9", "--transport", "iser"}, 12, "iSER", 10 * time.Second},
		{"portal never answers", []string{"discover", silent.Addr().String(), "--transport", "tcp", "--timeout", "3s"}, 8, "time", 8 * time.Second},
		{"portal never answers a login", []string{"login", "iqn.2003-01.org.example:nobody", "--portal", silent.Addr().String(), "--transport", "tcp", "--timeout", "3s"}, 8, "time", 8 * time.Second},
		{"nobody at the address", []string{"discover", "10.0.0.77", "--transport", "tcp", "--timeout", "4s"}, 4, "10.0.0.77", 10 * time.Second},
		{"target name that has no record", []string{"login", "iqn.2003-01.org.example:unknown"}, 21, "iqn.2003-01.org.example:unknown", 5 * time.Second},
		{"target name that the portal does not know", []string{"login", "iqn.2003-01.org.example:unknown", "--portal", g.portal, "--transport", "tcp"}, 21, "iqn.2003-01.org.example:unknown", 10 * time.Second},
		{"target without iSER", []string{"login", g.name, "--portal", g.portal, "--transport", "iser"}, 12, "iSER", 10 * time.Second},
		{"malformed name", []string{"login", "iqn.bad name/../x"}, 7, "iqn.bad name/../x", 2 * time.Second},
		{"malformed address", []string{"discover", "10.0.0.1:port"}, 7, "10.0.0.1:port", 2 * time.Second},
		{"address without RDMA device", []string{"discover", "127.0.0.1", "--transport", "iser"}, 12, "RDMA", 5 * time.Second},
		{"logout of nothing", []string{"logout", "iqn.2003-01.org.example:unknown"}, 21, "iqn.2003-01.org.example:unknown", 5 * time.Second},
		{"unknown command", []string{"frobnicate"}, 7, "frobnicate", 2 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, "iserctl", c.args...)
			if r.code != c.code {
				t.Errorf("exit status %d, want %d: %s", r.code, c.code, r.stderr)
			}
			if !strings.Contains(strings.ToLower(r.stderr), strings.ToLower(c.says)) {
				t.Errorf("does not say %q: %s", c.says, r.stderr)
			}
			if r.took > c.max {
				t.Errorf("took %v, more than %v", r.took, c.max)
			}
			oneLine(t, r)
		})
	}
	if n, _ := g.sessions(); n != 0 {
		t.Errorf("%d sessions at the target after failed logins", n)
	}

	t.Run("caller without rights", func(t *testing.T) {
		cmd := exec.Command("iserctl", "login", g.name)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != 13 {
			t.Errorf("exit status %d (%v), want 13: %s", code, err, out)
		}
	})
	t.Run("second daemon", func(t *testing.T) {
		r := run(t, "iserd")
		if r.code == 0 || !strings.Contains(r.stderr, "running") {
			t.Errorf("exit status %d: %s", r.code, r.stderr)
		}
		oneLine(t, r)
		control.need(t)
		status(t) // the first one still answers
	})
}

// Without the ublk driver a login ends with an error that says what to do, and no session stays.
func TestNoUblk(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	// A daemon of its own, with a /dev of its own that lacks the control node.
	dir := t.TempDir()
	script := `mkdir "$1/dev" && mount -t tmpfs dev "$1/dev" && cp -a /dev/null /dev/zero /dev/urandom /dev/infiniband "$1/dev" &&
		mount --rbind "$1/dev" /dev && exec iserd --run-dir "$1/run" --state-dir "$1/state"`
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", dir)
	log, err := os.Create(dir + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
	}()
	socket := dir + "/run/control.sock"
	waitFor(t, "the daemon answers", 20*time.Second, func() error {
		c, err := net.Dial("unix", socket)
		if err == nil {
			c.Close()
		}
		return err
	})
	r := run(t, "iserctl", "--socket", socket, "login", g.name, "--portal", g.portal, "--transport", "iser")
	if r.code != 27 || !strings.Contains(r.stderr, "ublk_drv") {
		t.Errorf("exit status %d, want 27 and what to do: %s\n%s", r.code, r.stderr, tail(log.Name(), 10))
	}
	oneLine(t, r)
	waitFor(t, "no session at the target", 5*time.Second, func() error {
		n, err := g.sessions()
		if err == nil && n != 0 {
			t.Fatalf("%d sessions at the target after a failed login", n)
		}
		return err
	})
}
