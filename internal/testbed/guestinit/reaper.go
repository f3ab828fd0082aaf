package main

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// environ is what every process of the guest starts with.
var environ = []string{
	"PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
	"HOME=/root", "USER=root", "LANG=C.UTF-8", "TERM=dumb",
}

// runReaper is process 1: it starts the agent, collects every child and orphan, and powers off when the agent ends.
func runReaper() error {
	// The agent inherits the console for its own words; the commands that it starts get pipes.
	agent, err := syscall.ForkExec(self, []string{self, "agent"}, &syscall.ProcAttr{
		Env: environ, Dir: "/", Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("wait: %w", err)
		case pid == agent:
			if status.ExitStatus() != 0 {
				fmt.Fprintf(os.Stderr, "testbed: the agent ended with status %#x\n", uint32(status))
			}
			unix.Sync()
			powerOff()
		}
	}
}
