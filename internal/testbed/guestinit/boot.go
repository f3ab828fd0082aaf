package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// boot runs as /init of the initramfs and ends by becoming process 1 on the root drive.
func boot() error {
	for _, m := range []mount{{"proc", "/proc", "proc", 0, ""}, {"sysfs", "/sys", "sysfs", 0, ""}, {"devtmpfs", "/dev", "devtmpfs", 0, ""}} {
		if err := m.mount(); err != nil {
			return err
		}
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	if strings.Contains(string(cmdline), "testbed.probe") {
		fmt.Println("testbed: alive")
		powerOff()
	}
	if err := loadModules("/modules"); err != nil {
		return err
	}
	for _, dev := range []string{"/dev/vda", "/dev/vdb"} {
		if err := waitFor(dev, 20*time.Second); err != nil {
			return err
		}
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	modules := "/new/usr/lib/modules/" + unix.ByteSliceToString(uts.Release[:])
	for _, m := range []mount{
		{"/dev/vda", "/new", "ext4", unix.MS_NOATIME, ""},
		{"/dev/vdb", modules, "ext4", unix.MS_RDONLY | unix.MS_NOATIME, ""},
		{"host", "/new/host", "9p", 0, "trans=virtio,version=9p2000.L,msize=512000"},
		{"tmpfs", "/new/run", "tmpfs", 0, "mode=755"},
		{"tmpfs", "/new/tmp", "tmpfs", 0, "mode=1777"},
		{"/proc", "/new/proc", "", unix.MS_MOVE, ""},
		{"/sys", "/new/sys", "", unix.MS_MOVE, ""},
		{"/dev", "/new/dev", "", unix.MS_MOVE, ""},
		{"devpts", "/new/dev/pts", "devpts", 0, "mode=620,ptmxmode=666"},
		{"tmpfs", "/new/dev/shm", "tmpfs", 0, "mode=1777"},
		{"cgroup2", "/new/sys/fs/cgroup", "cgroup2", 0, ""},
	} {
		if err := m.mount(); err != nil {
			return err
		}
	}
	program, err := os.ReadFile("/init")
	if err != nil {
		return err
	}
	if err := os.WriteFile("/new"+self, program, 0o755); err != nil {
		return err
	}
	if err := os.Remove("/init"); err != nil { // the initramfs stays in memory
		return err
	}
	if err := os.Chdir("/new"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	return fmt.Errorf("exec %s: %w", self, unix.Exec(self, []string{self, "reaper"}, environ))
}

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

func (m mount) mount() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
	}
	return nil
}

// loadModules loads the files of dir in the order of their names, which the harness numbered so that dependencies come first.
func loadModules(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		os.Remove(f.Name())
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("load module %s: %w", e.Name(), err)
		}
	}
	return nil
}

// waitFor waits until the kernel has made a device node; drives are probed asynchronously, and no udev tells us here.
func waitFor(path string, limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s did not appear within %s", path, limit)
		}
	}
}
