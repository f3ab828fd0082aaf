package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/config"
	"iserd.org/iserd/internal/standby"
)

const dataPlaneName = "iserd-io"

// launcher starts the data plane as a process of its own session, without a signal at our death and with our standard error: it is to live on
// when this process ends, however it ends. It goes by the configuration of that moment. The launcher is nil when somebody else starts it.
func launcher(current func() config.Config, external bool, runDir string) daemon.Launcher {
	if external {
		return nil
	}
	return func() (<-chan error, error) {
		cmd, err := dataPlane(current(), runDir)
		if err != nil {
			return nil, err
		}
		return start(cmd)
	}
}

// dataPlane makes the command that starts the data plane.
func dataPlane(c config.Config, runDir string) (*exec.Cmd, error) {
	path, err := findDataPlane(c.DataPlane)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "--run-dir", runDir, "--log-level", c.LogLevel,
		"--reactors", strconv.Itoa(threads(c.Reactors, daemon.DeviceQueues(runDir))), "--pool", strconv.Itoa(c.BufferPool),
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
	return cmd, nil
}

// threads is how many the data plane is started with: as many as configured, but no fewer than it needs for the devices that wait for it, which were made when
// there were more.
func threads(configured, queues int) int {
	have := configured
	if have == 0 {
		have = runtime.NumCPU()
	}
	if have < queues {
		return queues
	}
	return configured
}

// start starts the data plane. exited yields why it has ended.
func start(cmd *exec.Cmd) (exited <-chan error, err error) {
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", cmd.Path, err)
	}
	ended := make(chan error, 1)
	go func() { // collects the process, too
		err := cmd.Wait()
		if err == nil {
			err = fmt.Errorf("%s ended with status 0", cmd.Path)
		}
		ended <- err
	}()
	return ended, nil
}

// preparer starts a data plane that gets ready and waits until it is told to serve (internal/standby). Of one that somebody else starts it only sees whether
// it can be executed.
func preparer(current func() config.Config, external bool, runDir string) func(context.Context, int) (*daemon.Successor, error) {
	return func(ctx context.Context, pid int) (*daemon.Successor, error) {
		if external {
			return nil, tryInstalled(ctx, pid)
		}
		cmd, err := dataPlane(current(), runDir)
		if err != nil {
			return nil, err
		}
		ours, theirs, err := standby.Pair()
		if err != nil {
			return nil, err
		}
		cmd.ExtraFiles = []*os.File{theirs}
		cmd.Args = append(cmd.Args, "--standby", "3")
		exited, err := start(cmd)
		_ = theirs.Close()
		if err != nil {
			_ = ours.Close()
			return nil, err
		}
		hello, err := ours.Hello(ctx)
		if err != nil {
			_ = ours.Close() // it ends by that
			select {
			case why := <-exited:
				err = fmt.Errorf("%s: %w; what it said is in the log of iserd", cmd.Path, why)
			case <-time.After(endTimeout):
				_ = cmd.Process.Kill()
				err = fmt.Errorf("%s: %w", cmd.Path, err)
			}
			return nil, err
		}
		return &daemon.Successor{Hello: hello, Serve: ours.Serve, Drop: func() { _ = ours.Close() }, Exited: exited}, nil
	}
}

// tryInstalled executes the program that is installed now where that of process pid was.
func tryInstalled(ctx context.Context, pid int) error {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return err
	}
	path = strings.TrimSuffix(path, " (deleted)") // replaced since
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	if out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput(); err != nil {
		return fmt.Errorf("%s --version: %w: %.200s", path, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// tryTimeout is how long a program may take to print its version.
const tryTimeout = 10 * time.Second

// endTimeout is how long a data plane may take to end that nobody wants.
const endTimeout = 2 * time.Second

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
