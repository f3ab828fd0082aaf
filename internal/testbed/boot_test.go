package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
)

// boot starts a guest for a test, or skips it where none can be had.
func boot(t *testing.T, cfg GuestConfig) *Guest {
	t.Helper()
	if !Wanted() {
		t.Skip("boots a guest; make test-guest does it, or GUEST=1 in the environment")
	}
	bed, err := Prepare(t.Context(), t.Output())
	require.Need(t, "guest", err)
	g, err := bed.Boot(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

// TestRun goes through what a command in the guest can do, in one boot, and ends with an orderly power-off.
func TestRun(t *testing.T) {
	g := boot(t, GuestConfig{SystemBus: true})
	run := func(c Command) (string, string, int, error) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		code, err := g.Run(t.Context(), c, &stdout, &stderr)
		return stdout.String(), stderr.String(), code, err
	}
	t.Run("streams and status", func(t *testing.T) {
		out, errs, code, err := run(Command{
			Args: []string{"sh", "-c", "echo out $A $PWD; cat; echo err >&2; exit 3"}, Env: []string{"A=b"}, Dir: "/etc", Stdin: strings.NewReader("in\n"),
		})
		if out != "out b /etc\nin\n" || errs != "err\n" || code != 3 || err != nil {
			t.Errorf("got %q, %q, %d, %v", out, errs, code, err)
		}
	})
	t.Run("signal", func(t *testing.T) {
		if _, _, code, err := run(Command{Args: []string{"sh", "-c", "kill -TERM $$"}}); code != 128+15 || err != nil {
			t.Errorf("got %d, %v", code, err)
		}
	})
	t.Run("no such program", func(t *testing.T) {
		if _, _, code, err := run(Command{Args: []string{"no-such-program"}}); code != 127 || err == nil {
			t.Errorf("got %d, %v", code, err)
		}
	})
	t.Run("upload and share", func(t *testing.T) {
		dir := t.TempDir()
		for name, text := range map[string]string{"hello": "#!/bin/sh\ncat /srv/data/a/b >/host/answer\n", "data/a/b": "hello\n"} {
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Upload(t.Context(), Bin, filepath.Join(dir, "hello")); err != nil {
			t.Fatal(err)
		}
		if err := g.Upload(t.Context(), "/srv", filepath.Join(dir, "data")); err != nil {
			t.Fatal(err)
		}
		if _, errs, code, err := run(Command{Args: []string{"hello"}}); code != 0 || err != nil {
			t.Fatal(errs, code, err)
		}
		if b, err := os.ReadFile(filepath.Join(g.Share(), "answer")); string(b) != "hello\n" || err != nil {
			t.Errorf("got %q, %v", b, err)
		}
		if err := g.Upload(t.Context(), "/srv", filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a file that is not there: %v", err)
		}
		if err := g.Upload(t.Context(), "/proc/none", filepath.Join(dir, "hello")); err == nil {
			t.Error("a folder that cannot be made was accepted")
		}
	})
	t.Run("bulk", func(t *testing.T) {
		var n countWriter
		code, err := g.Run(t.Context(), Command{Args: []string{"head", "-c", "20000000", "/dev/zero"}}, &n, nil)
		if n != 20000000 || code != 0 || err != nil {
			t.Errorf("got %d bytes, %d, %v", n, code, err)
		}
	})
	t.Run("left running", func(t *testing.T) {
		_, _, code, err := run(Command{Args: []string{"sh", "-c", "setsid sleep 1000 & until pgrep -x sleep; do :; done"}})
		left := new(LeftoverError)
		if code != 0 || !errors.As(err, &left) || len(left.Processes) != 1 || !strings.HasPrefix(left.Processes[0], "sleep[") {
			t.Errorf("got %d, %v", code, err)
		}
		if out, _, _, _ := run(Command{Args: []string{"pgrep", "sleep"}}); out != "" {
			t.Errorf("sleep still runs: %s", out)
		}
	})
	t.Run("time-out", func(t *testing.T) {
		begin := time.Now()
		_, _, _, err := run(Command{Args: []string{"sh", "-c", "trap '' QUIT; sleep 1000; sleep 1000"}, Timeout: time.Second})
		if !errors.As(err, new(*TimeoutError)) {
			t.Errorf("got %v", err)
		}
		if d := time.Since(begin); d > killLimit {
			t.Errorf("took %s", d)
		}
	})
	t.Run("cancel", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := writerFunc(func(b []byte) (int, error) { cancel(); return len(b), nil })
		if _, err := g.Run(ctx, Command{Args: []string{"sh", "-c", "echo begun; exec sleep 1000"}}, w, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("surroundings", func(t *testing.T) {
		const script = `set -e
			test -c /dev/ublk-control
			rdma link show rxe0/1 | grep -q ACTIVE
			ibv_devinfo >/dev/null
			test -d /sys/kernel/config/target/core
			ip -6 addr show dev veth0 | grep -q fd00::1/64
			dbus-send --system --print-reply --dest=org.freedesktop.DBus / org.freedesktop.DBus.GetId >/dev/null`
		if out, errs, code, err := run(Command{Args: []string{"sh", "-c", script}}); code != 0 || err != nil {
			t.Errorf("got %d, %v: %s%s", code, err, out, errs)
		}
	})
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if cs := g.Complaints(); len(cs) > 0 {
		t.Errorf("complaints: %v", cs)
	}
}

type countWriter int

func (n *countWriter) Write(b []byte) (int, error) { *n += countWriter(len(b)); return len(b), nil }

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestPanic lets the guest's kernel panic under a command.
func TestPanic(t *testing.T) {
	g := boot(t, GuestConfig{})
	_, err := g.Run(t.Context(), Command{Args: []string{"sh", "-c", "echo c >/proc/sysrq-trigger"}}, nil, nil)
	ge := new(GuestError)
	if !errors.As(err, &ge) || !strings.Contains(ge.Reason, "Kernel panic") || !strings.Contains(err.Error(), "sysrq") {
		t.Errorf("Run: %v", err)
	}
	if err := g.Close(); !errors.As(err, &ge) {
		t.Errorf("Close: %v", err)
	}
	if _, err := os.Stat(g.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left behind: %v", g.dir, err)
	}
}

// TestCount checks the instruction-counting mode: the same work takes the same guest time, far from what the host's clock says.
func TestCount(t *testing.T) {
	g := boot(t, GuestConfig{Count: true})
	const script = `import time
def work():
    a = time.monotonic_ns(); s = 0
    for i in range(200000): s += i
    return time.monotonic_ns() - a
work(); print(work(), work())`
	var out bytes.Buffer
	code, err := g.Run(t.Context(), Command{Args: []string{"python3", "-c", script}}, &out, &out)
	if code != 0 || err != nil {
		t.Fatal(code, err, out.String())
	}
	var a, b float64
	if _, err := fmt.Sscan(out.String(), &a, &b); err != nil {
		t.Fatal(err)
	}
	if r := a / b; r < 0.97 || r > 1.03 {
		t.Errorf("the same loop took %.0f and %.0f instructions", a, b)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}
