package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/config"
)

const dataPlaneName = "iserd-io"

// launcher starts the data plane as a process of its own session, without a signal at our death and with our standard error: it is to live on
// when this process ends, however it ends. It returns nil when somebody else starts it.
func launcher(c config.Config, runDir string) daemon.Launcher {
	if c.DataPlane == "none" {
		return nil
	}
	return func() (<-chan error, error) {
		path, err := findDataPlane(c.DataPlane)
		if err != nil {
			return nil, err
		}
		cmd := exec.Command(path, "--run-dir", runDir, "--log-level", c.LogLevel,
			"--reactors", strconv.Itoa(c.Reactors), "--pool", strconv.Itoa(c.BufferPool),
			"--ack-timeout", c.ACKTimeout.String())
		cmd.Dir = "/"
		cmd.Stderr = os.Stderr
		cmd.Stdout = os.Stderr
		// What the service manager told us is not meant for it.
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
			name, _, _ := strings.Cut(v, "=")
			return name == "NOTIFY_SOCKET" || name == "WATCHDOG_PID" || name == "WATCHDOG_USEC" || strings.HasPrefix(name, "LISTEN_")
		})
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		exited := make(chan error, 1)
		go func() { // collects the process, too
			err := cmd.Wait()
			if err == nil {
				err = fmt.Errorf("%s ended with status 0", path)
			}
			exited <- err
		}()
		return exited, nil
	}
}

// findDataPlane looks at the configured path, beside this program, and in PATH.
func findDataPlane(configured string) (string, error) {
	if configured != "" {
		return exec.LookPath(configured)
	}
	if self, err := os.Executable(); err == nil {
		if p, err := exec.LookPath(filepath.Join(filepath.Dir(self), dataPlaneName)); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath(dataPlaneName)
	if err != nil {
		return "", fmt.Errorf("%s is neither beside iserd nor in PATH; name it with --data-plane", dataPlaneName)
	}
	return p, nil
}
