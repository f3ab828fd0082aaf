package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"iserd.org/iserd/api"
)

// control is the daemon under test: one for all scenarios, started as an administrator would, with nothing configured.
var control = &daemon{socket: "/run/iserd/control.sock"}

type daemon struct {
	socket string
	by     []string // the program that executes it, with its arguments
	mu     sync.Mutex
	cmd    *exec.Cmd
	done   chan struct{} // closed when the process has ended
	log    *os.File
}

// need starts the daemon unless it runs.
func (d *daemon) need(t testing.TB) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cmd != nil {
		select {
		case <-d.done:
		default:
			return
		}
	}
	if d.log == nil {
		f, err := os.Create(filepath.Join(logDir(), "iserd.log"))
		if err != nil {
			t.Fatal(err)
		}
		d.log = f
	}
	command := append(slices.Clone(d.by), "iserd")
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = d.log, d.log
	if err := cmd.Start(); err != nil {
		t.Fatalf("start iserd: %v", err)
	}
	d.cmd, d.done = cmd, make(chan struct{})
	go func(done chan struct{}) {
		cmd.Wait()
		close(done)
	}(d.done)
	waitFor(t, "iserd answers on its socket", 20*time.Second, func() error {
		select {
		case <-d.done:
			return fatalError{fmt.Errorf("iserd ended: %v; see %s:\n%s", cmd.ProcessState, d.log.Name(), tail(d.log.Name(), 15))}
		default:
		}
		c, err := net.Dial("unix", d.socket)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// kill ends the control process as a crash would; the data plane is not touched.
func (d *daemon) kill(t testing.TB) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.done
}

// result is what a command said.
type result struct {
	stdout, stderr string
	code           int
	took           time.Duration
}

// run runs a command and waits for it, two minutes at most.
func run(t testing.TB, name string, args ...string) result {
	t.Helper()
	r, err := try(name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// try is run for goroutines other than the test's. A command that cannot be started or does not end is an error, its exit status is none.
func try(name string, args ...string) (result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	r := result{stdout: stdout.String(), stderr: stderr.String(), took: time.Since(start)}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		r.code = exit.ExitCode()
	case err != nil:
		return r, fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		return r, fmt.Errorf("%s %s: hangs; it said:\n%s%s", name, strings.Join(args, " "), r.stdout, r.stderr)
	}
	return r, nil
}

// must runs a command that has to succeed, and returns what it printed.
func must(t testing.TB, name string, args ...string) string {
	t.Helper()
	r := run(t, name, args...)
	if r.code != 0 {
		t.Fatalf("%s %s: exit status %d\n%s%s", name, strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// iserctl runs iserctl, which has to succeed.
func iserctl(t testing.TB, args ...string) string {
	t.Helper()
	return must(t, "iserctl", args...)
}

// query runs iserctl with --json and decodes the answer.
func query[T any](t testing.TB, args ...string) T {
	t.Helper()
	var v T
	out := iserctl(t, append(args, "--json")...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("iserctl %s --json: %v\n%s", strings.Join(args, " "), err, out)
	}
	return v
}

// devices lists the devices of a target, by logical unit number.
func devices(t testing.TB, target string) map[uint16]api.Device {
	t.Helper()
	m := map[uint16]api.Device{}
	for _, d := range query[api.DevicesReply](t, "device", "list").Devices {
		if d.Target == target {
			m[d.LUN] = d
		}
	}
	return m
}

// status is the daemon's own account of itself.
func status(t testing.TB) api.Status {
	t.Helper()
	return query[api.StatusReply](t, "status").Status
}

// fatalError ends a waitFor at once.
type fatalError struct{ error }

// waitFor calls f until it returns nil. It is for events of other programs and of the kernel that have no descriptor to wait on.
func waitFor(t testing.TB, what string, limit time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		var fatal fatalError
		if errors.As(err, &fatal) {
			t.Fatalf("%s: %v", what, err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// logDir is where the programs under test leave their logs, on the host's side when there is one.
func logDir() string {
	if d := os.Getenv("ISERD_TEST_LOGS"); d != "" {
		return d
	}
	return os.TempDir()
}

// tail returns the last lines of a file.
func tail(name string, n int) string {
	b, _ := os.ReadFile(name)
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
