package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/testbed/wire"
)

// modules are loaded in every guest: the block driver, soft RoCE with its user interface, and the kernel's target with its back ends.
var modules = []string{
	"configfs", "ublk_drv", "rdma_rxe", "rdma_ucm", "ib_uverbs",
	"target_core_mod", "target_core_file", "target_core_iblock", "iscsi_target_mod", "ib_isert",
}

// prepare makes the guest ready for commands and reports what failed. It goes on after a failure, so that one report names them all.
func prepare(s wire.Setup) wire.Ready {
	var problems []string
	do := func(err error) {
		if err != nil {
			problems = append(problems, err.Error())
		}
	}
	// The agent must outlive a guest that runs out of memory.
	do(os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0))
	do(unix.Sethostname([]byte("guest")))
	do(run("systemd-machine-id-setup"))
	do(os.MkdirAll("/etc/target", 0o755)) // where the kernel's target keeps reservations; it looks once, when loaded
	do(run("modprobe", append([]string{"-a"}, append(modules, s.Modules...)...)...))
	// Mounted after the modules: without one that uses it, the file system is not there.
	if err := (mount{"configfs", "/sys/kernel/config", "configfs", 0, ""}).mount(); err != nil && !errors.Is(err, unix.EBUSY) {
		do(err)
	}
	if err := (mount{"debugfs", "/sys/kernel/debug", "debugfs", 0, ""}).mount(); err != nil && !errors.Is(err, unix.EBUSY) {
		do(err)
	}
	// One pair of Ethernet devices carries the addresses; soft RoCE sits on one end. MTU 4200 holds an RDMA path MTU of 4096.
	do(run("ip", "link", "set", "lo", "up"))
	do(run("ip", "link", "add", "veth0", "mtu", "4200", "type", "veth", "peer", "name", "veth1", "mtu", "4200"))
	do(run("ip", "addr", "add", "10.0.0.1/24", "dev", "veth0"))
	do(run("ip", "addr", "add", "fd00::1/64", "dev", "veth0", "nodad"))
	do(run("ip", "link", "set", "veth0", "up"))
	do(run("ip", "link", "set", "veth1", "up"))
	do(run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "veth0"))
	if s.SystemBus {
		do(os.MkdirAll("/run/dbus", 0o755))
		do(run("dbus-daemon", "--system", "--fork"))
	}
	var uts unix.Utsname
	do(unix.Uname(&uts))
	return wire.Ready{Kernel: unix.ByteSliceToString(uts.Release[:]), Problems: problems}
}

// run executes a command of the preparation; its error holds what the command said.
func run(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %v: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
