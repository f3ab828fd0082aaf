// Package scenario holds the tests that use iserd as an administrator does: programs from their packages, real targets, a real kernel. They
// run in the guest (make test-guest) and skip elsewhere.
package scenario

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain stops the daemon at the end: it has to go in order and take its data plane along, since nobody is logged in any more.
func TestMain(m *testing.M) {
	if os.Getenv(unknowingRole) != "" {
		if err := unknowing(os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if err := control.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL: stop the daemon:", err)
		code = 1
	}
	os.Exit(code)
}

// stop ends the daemon with SIGTERM.
func (d *daemon) stop() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cmd == nil {
		return nil
	}
	d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.done:
	case <-time.After(20 * time.Second):
		d.cmd.Process.Kill()
		return fmt.Errorf("iserd does not end within 20 s of SIGTERM; its log ends with:\n%s", tail(d.log.Name(), 10))
	}
	if !d.cmd.ProcessState.Success() {
		return fmt.Errorf("iserd: %v; its log ends with:\n%s", d.cmd.ProcessState, tail(d.log.Name(), 10))
	}
	d.cmd = nil
	for deadline := time.Now().Add(10 * time.Second); ; {
		out, _ := exec.Command("pidof", "iserd-io").Output()
		if len(strings.Fields(string(out))) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("iserd-io is still there: %s; the log ends with:\n%s", out, tail(d.log.Name(), 10))
		}
		time.Sleep(50 * time.Millisecond)
	}
}
