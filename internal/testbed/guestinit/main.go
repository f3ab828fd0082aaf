// Command guestinit is the first process of a test guest, and the agent that runs commands there for the harness on the host.
//
// It plays three parts, one after the other:
//
//  1. /init of the initramfs (boot.go): loads the modules beside it, mounts the root drive, the modules' drive and the host's folder, and
//     moves there. With testbed.probe on the kernel's command line it only says that it lives, which is how the harness finds out whether
//     KVM can run a guest.
//  2. process 1 (reaper.go): collects orphans, and powers off when the agent ends.
//  3. the agent (agent.go, prepare.go): sets up the network, soft RoCE, the target's modules and configfs, then executes commands that
//     arrive over the virtio-serial port in the frames of package wire.
//
// It is built without cgo into the initramfs by package testbed, and is of no use outside such a guest.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// self is where this program lies after the move to the root drive.
const self = "/run/guestinit"

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch {
	case os.Getpid() == 1 && role == "reaper":
		err = runReaper()
	case os.Getpid() == 1:
		err = boot()
	case role == "agent":
		err = runAgent()
	default:
		fmt.Fprintln(os.Stderr, "guestinit: this is the first process of a test guest; run it through iserd.org/iserd/internal/testbed")
		os.Exit(2)
	}
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "testbed: %v\n", err)
	if os.Getpid() != 1 {
		os.Exit(1)
	}
	powerOff()
}

// powerOff ends the virtual machine. It is the caller's business that nothing of value is unwritten.
func powerOff() {
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintf(os.Stderr, "testbed: power off: %v\n", err)
	}
	select {}
}
