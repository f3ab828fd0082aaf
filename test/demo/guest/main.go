// Command guest is the demonstration's part inside the test guest: see test/demo.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// What the demonstration works on.
const (
	address = "10.0.0.1"
	target  = "iqn.2003-01.org.example:demo"
	mount   = "/mnt"
	logFile = "/host/iserd.log"

	ramSize  = 192 << 20 // bytes of LUN 0, a ramdisk; fio works on it
	fileSize = 512 << 20 // bytes of LUN 1, a file; the file system lives on it
)

func main() {
	accel := "emulation"
	if len(os.Args) > 1 {
		accel = os.Args[1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	d := &demo{accel: accel}
	err := d.run(ctx)
	d.cleanUp()
	if err != nil {
		fmt.Printf("✗ %v\n", err)
		if b, rerr := os.ReadFile(logFile); rerr == nil && len(b) > 0 {
			lines := strings.Split(strings.TrimSpace(string(b)), "\n")
			fmt.Printf("  the daemon's last words:\n    %s\n", strings.Join(lines[max(0, len(lines)-25):], "\n    "))
		}
		os.Exit(1)
	}
	d.table()
}

// trees are copied to the file system.
var trees = []string{"/usr/bin", "/usr/sbin"}

// demo is what the steps share.
type demo struct {
	accel   string
	lio     *targets.LIO
	daemon  *exec.Cmd
	mounted bool
	devices []api.Device // by LUN, with the counters last read
	fio     []fioResult
	files   int
	bytes   int64
}

// step runs one step, and prints it with its time when it succeeded. do returns what is to be told about it.
func (d *demo) step(what string, do func() (detail string, err error)) error {
	begin := time.Now()
	detail, err := do()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if detail != "" {
		what += ": " + detail
	}
	fmt.Printf("✓ %s (%.1f s)\n", what, time.Since(begin).Seconds())
	return nil
}

func (d *demo) run(ctx context.Context) error {
	fmt.Println()
	for _, s := range []struct {
		what string
		do   func(context.Context) (string, error)
	}{
		{"the kernel's target (LIO) serves two logical units over iSER on soft RoCE", d.setUpTarget},
		{"iserd runs", d.startDaemon},
		{"discovery", d.discover},
		{"login", d.login},
		{"the block devices have the target's sizes", d.checkDevices},
		{"ext4", d.makeFileSystem},
		{"two trees copied", d.copyTrees},
		{"unmounted, mounted again, checksums equal", d.compareTrees},
		{"fio, mixed sizes, every block verified by crc32c", d.fioVerify},
		{"fio, reads and writes", d.fioSpeed},
		{"counters", d.counters},
		{"logout", d.logout},
	} {
		if err := d.step(s.what, func() (string, error) { return s.do(ctx) }); err != nil {
			return err
		}
	}
	return nil
}

// setUpTarget makes the target.
func (d *demo) setUpTarget(context.Context) (_ string, err error) {
	d.lio, err = targets.NewLIO(targets.LIOConfig{
		Name:    target,
		Portals: []targets.Portal{targets.ParsePortal(address+":3260", true)},
		Units: []targets.Unit{
			{Kind: targets.Ramdisk, Size: ramSize, Product: "RAMDISK"},
			{Kind: targets.FileIO, Size: fileSize, Path: "/var/tmp/unit", Product: "FILE", WriteCache: true},
		},
	})
	return target, err
}

// run executes a program and returns what it prints.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(append([]string{name}, args...), " "), err, strings.TrimSpace(errs.String()))
	}
	return string(out), nil
}

// show prints a command a user would type, executes it, and prints its output indented.
func show(ctx context.Context, name string, args ...string) error {
	fmt.Printf("  # %s\n", strings.Join(append([]string{name}, args...), " "))
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	for _, line := range strings.Split(strings.TrimRight(string(out), "\n"), "\n") {
		fmt.Printf("    %s\n", line)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// cleanUp ends what still runs, so that a failure leaves the guest able to power off. Errors do not matter any more.
func (d *demo) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if d.mounted {
		run(ctx, "umount", mount)
	}
	if d.daemon != nil {
		run(ctx, "iserctl", "logout", target)
		d.stopDaemon(ctx)
	}
	if d.lio != nil {
		d.lio.Close()
	}
}
