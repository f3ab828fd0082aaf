package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Bed is a cache that holds all that a guest takes. Several processes may share it, and boot several guests each.
type Bed struct {
	log    *log
	cache  string
	kernel kernel
	image  string // root drive
	kvm    bool
}

// Prepare brings the cache up to date and returns it: fetches the newest kernel, builds the guest's image, and finds out whether KVM
// works. With everything in the cache it takes about a second. It says on w what it does. Tools that are missing on the host are its
// error; [InstallTools] installs them.
//
// Errors that the surroundings cause are [*Problem]: what is wrong and what to do.
func Prepare(ctx context.Context, w io.Writer) (*Bed, error) {
	l := newLog(w)
	dir, err := cacheDir()
	if err != nil {
		return nil, err
	}
	b := &Bed{log: l, cache: dir}
	if err := os.MkdirAll(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		if errors.Is(err, os.ErrPermission) {
			return nil, &Problem{What: "cannot make the cache folder", Do: "run this as root, or set ISERD_CACHE to a folder that you may write to", Err: err}
		}
		return nil, diskFull(err, dir)
	}
	unlock, err := b.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if m := missing(runTools, makeTools); len(m) > 0 {
		return nil, &Problem{What: "the package " + m[0].pkg + " is not installed: it " + m[0].why, Do: "`make deps` as root installs what is missing"}
	}
	if err := b.fill(ctx); err != nil {
		return nil, err
	}
	now := time.Now() // tells prune that these are in use
	os.Chtimes(b.kernel.dir, now, now)
	os.Chtimes(b.image, now, now)
	return b, nil
}

// fill gets the kernel and the image, both at once: each waits for the mirror much of its time.
func (b *Bed) fill(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	image := make(chan error, 1)
	go func() {
		path, err := rootImage(ctx, b.log, b.cache)
		if err != nil {
			err = fmt.Errorf("guest image: %w", err)
			cancel(err)
		}
		b.image = path
		image <- err
	}()
	var err error
	if b.kernel, err = newestKernel(ctx, b.log, b.cache); err != nil {
		err = fmt.Errorf("guest kernel: %w", err)
	} else {
		b.kvm, err = b.probeKVM(ctx)
	}
	if err != nil {
		cancel(err)
	}
	imageErr := <-image
	if cause := context.Cause(ctx); cause != nil {
		return cause // the failure that came first; the other is its consequence
	}
	return errors.Join(err, imageErr)
}

// Kernel returns the version of the guest's kernel package.
func (b *Bed) Kernel() string { return b.kernel.version }

// Accel tells how guests run: "KVM" or "emulation".
func (b *Bed) Accel() string {
	if b.kvm {
		return "KVM"
	}
	return "emulation"
}

// lock waits until no other process prepares the cache. Without write access there is nothing to prepare, and no lock.
func (b *Bed) lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(b.cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if errors.Is(err, os.ErrPermission) {
		return func() {}, nil
	}
	if err != nil {
		return nil, diskFull(err, b.cache)
	}
	for said := false; ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != syscall.EWOULDBLOCK {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !said {
			b.log.printf("waiting for another run that is filling %s", b.cache)
			said = true
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// probeKVM tells whether KVM runs a guest, by booting one that only says so. The answer is remembered for this host and QEMU.
func (b *Bed) probeKVM(ctx context.Context) (bool, error) {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false, nil
	}
	dev.Close()
	var uts syscall.Utsname
	if err := syscall.Uname(&uts); err != nil {
		return false, fmt.Errorf("uname: %w", err)
	}
	version, err := exec.CommandContext(ctx, "qemu-system-x86_64", "--version").Output()
	if err != nil {
		return false, &Problem{What: "QEMU does not run", Do: "reinstall the package qemu-system-x86", Err: err}
	}
	key := fmt.Sprintf("%s %s", cString(uts.Release[:]), strings.SplitN(string(version), "\n", 2)[0])
	memo := filepath.Join(b.cache, "kvm")
	if old, err := os.ReadFile(memo); err == nil {
		if answer, ok := strings.CutSuffix(string(old), "\n"+key); ok {
			return answer == "works", nil
		}
	}
	b.log.printf("trying KVM")
	answer := "does not work"
	works, err := b.boots(ctx, "kvm", 10*time.Second)
	if err != nil {
		return false, err
	}
	if works {
		answer = "works"
	}
	b.log.printf("KVM %s here", answer)
	if err := os.WriteFile(memo, []byte(answer+"\n"+key), 0o644); err != nil && !errors.Is(err, os.ErrPermission) {
		return false, diskFull(err, b.cache)
	}
	return works, nil
}

// cString returns the text before the first zero byte.
func cString(a []int8) string {
	var b []byte
	for _, c := range a {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

// boots reports whether a guest comes to life with an accelerator within limit.
func (b *Bed) boots(ctx context.Context, accel string, limit time.Duration) (bool, error) {
	dir, err := os.MkdirTemp("", "iserd-probe-")
	if err != nil {
		return false, diskFull(err, os.TempDir())
	}
	defer os.RemoveAll(dir)
	initrd, err := b.initramfs(ctx, dir)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-m", "512", "-accel", accel,
		"-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot", "-nic", "none",
		"-kernel", b.kernel.image(), "-initrd", initrd, "-append", "console=ttyS0 quiet panic=-1 testbed.probe")
	out, err := cmd.CombinedOutput()
	return strings.Contains(string(out), "testbed: alive"), nil
}

// initramfs builds the guest's first process and returns the path of an initramfs with it in dir.
func (b *Bed) initramfs(ctx context.Context, dir string) (string, error) {
	root, err := ModuleRoot()
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "guestinit")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./internal/testbed/guestinit")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build guestinit: %w: %s", err, strings.Join(lastLines(out, 5), "; "))
	}
	path := filepath.Join(dir, "initramfs")
	if err := writeInitramfs(path, program, b.kernel.bootCPIO()); err != nil {
		return "", fmt.Errorf("initramfs: %w", diskFull(err, dir))
	}
	return path, nil
}

// ModuleRoot returns the folder of the project's go.mod, seen from the working directory.
func ModuleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if b, err := os.ReadFile(filepath.Join(d, "go.mod")); err == nil && strings.HasPrefix(string(b), "module iserd.org/iserd") {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", &Problem{What: dir + " is not in a checkout of iserd", Do: "change into one"}
		}
	}
}
