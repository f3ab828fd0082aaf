package testbed

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// guestPackages are the guest's user space beyond Debian's minimum.
var guestPackages = []string{
	"systemd", "systemd-sysv", "udev", "dbus", "polkitd", "procps", "kmod", "iproute2", "util-linux", // a system
	"rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "libibverbs1", "librdmacm1t64", // verbs
	"tgt",                        // the second target
	"open-iscsi", "libiscsi-bin", // other initiators, as peers and referees
	"e2fsprogs", "xfsprogs", "fio", "sg3-utils", "dmsetup", // what a user puts on a device
	"python3-dbus", // a client of the bus in another language
}

// imageSize is the guest's root drive, in MiB. It is sparse; what a guest writes to it lives in a temporary file of QEMU's.
const imageSize = 6144

// imageKey names the image after what went into it, so that a change builds a new one. The recipe's number changes with this file.
func imageKey() string {
	const recipe = 1
	sum := sha256.Sum256([]byte(fmt.Sprint(recipe, release, imageSize, guestPackages)))
	return fmt.Sprintf("%s-%x", release, sum[:6])
}

// rootImage returns the guest's root drive, building it when the cache has none for the present recipe.
func rootImage(ctx context.Context, l *log, cache string) (string, error) {
	path := filepath.Join(cache, "image", imageKey()+".ext4")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if os.Geteuid() != 0 {
		return "", &Problem{What: "building the guest's image needs root", Do: "run this once as root; later runs use the image from " + cache}
	}
	m, err := mirror(ctx)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", diskFull(err, cache)
	}
	if err := needSpace(filepath.Dir(path), 2500<<20); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(filepath.Dir(path), "build-")
	if err != nil {
		return "", diskFull(err, cache)
	}
	defer os.RemoveAll(work)
	l.printf("guest image: Debian %s with %d packages, about a minute", release, len(guestPackages))
	root := filepath.Join(work, "root")
	if err := bootstrap(ctx, l, m, root); err != nil {
		return "", err
	}
	// Mount points that the first process needs before it can write.
	for _, d := range []string{"host", "usr/lib/modules"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return "", err
		}
	}
	l.printf("guest image: writing the drive")
	tmp := filepath.Join(work, "image")
	if err := makeImage(ctx, root, tmp, imageSize); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", err
	}
	pruneImages(path)
	l.printf("guest image is in the cache")
	return path, nil
}

// bootstrap makes the guest's root file system. mmdebstrap checks Debian's signatures, and keeps services from starting while it works.
func bootstrap(ctx context.Context, l *log, mirror, root string) error {
	args := []string{
		"--variant=minbase", "--mode=root", "--format=directory", "--keyring=" + keyring, "--include=" + strings.Join(guestPackages, ","),
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/info/*",
		`--aptopt=Acquire::Retries "3"`,
		release, root, mirror,
	}
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TMPDIR="+filepath.Dir(root))
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it unmounts what it mounted
	cmd.WaitDelay = 20 * time.Second
	stop := tick(l, "guest image: installing packages")
	out, err := cmd.CombinedOutput()
	stop()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	text := string(out)
	p := &Problem{What: "mmdebstrap could not build the guest's image", Do: "look at its last lines above", Err: err}
	switch {
	case strings.Contains(text, "No space left"):
		p.What, p.Do = "the disk is full", "free some space, or set ISERD_CACHE to a folder on another file system"
	case strings.Contains(text, "Temporary failure resolving"), strings.Contains(text, "Could not connect"), strings.Contains(text, "Unable to connect"):
		p.What, p.Do = "the mirror "+mirror+" cannot be reached", "check this host's network and proxy, and try again"
	case strings.Contains(text, "Hash Sum mismatch"):
		p.What, p.Do = "the mirror "+mirror+" delivers broken files", "try again later: it is being updated"
	default:
		for _, line := range lastLines(out, 12) {
			l.printf("  mmdebstrap: %s", line)
		}
	}
	return p
}

// tick prints a line now and then until the returned function is called.
func tick(l *log, what string) (stop func()) {
	done := make(chan struct{})
	go func() {
		t := time.NewTicker(10 * time.Second)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				l.printf("%s ...", what)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

// makeImage writes the tree below root to an ext4 image of size MiB; 0 means just large enough. There is no journal: nothing in a guest's
// drive outlives the guest.
func makeImage(ctx context.Context, root, to string, size int) error {
	args := []string{"-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-L", "guest", "-d", root, to}
	if size == 0 {
		var total int64
		n := 0
		filepath.Walk(root, func(_ string, fi os.FileInfo, err error) error {
			if err == nil {
				total += (fi.Size() + 4095) &^ 4095
				n++
			}
			return nil
		})
		size = int(total>>20)*11/10 + 16 + n/2048
	}
	if err := command(ctx, "mke2fs", append(args, fmt.Sprintf("%dM", size))...); err != nil {
		os.Remove(to)
		return diskFull(err, filepath.Dir(to))
	}
	return nil
}

// pruneImages removes other images that nobody has booted for a week, and remains of builds that were interrupted.
func pruneImages(keep string) {
	others, _ := filepath.Glob(filepath.Join(filepath.Dir(keep), "*"))
	for _, p := range others {
		if st, err := os.Stat(p); err == nil && p != keep && time.Since(st.ModTime()) > 7*24*time.Hour {
			os.RemoveAll(p)
		}
	}
}

// command runs a program of the host; its error holds the program's last line. /usr/sbin and /sbin are searched too.
func command(ctx context.Context, name string, args ...string) error {
	path, err := lookPath(name)
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	text := strings.Join(lastLines(out, 3), "; ")
	if strings.Contains(text, "No space left") || strings.Contains(text, "Could not allocate block") {
		return &Problem{What: name + ": no space left", Do: "free some, or set ISERD_CACHE to a folder on another file system", Err: err}
	}
	return fmt.Errorf("%s: %w: %s", name, err, text)
}

// lookPath finds a program of the host, also where administrators' programs are.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	for _, d := range []string{"/usr/sbin/", "/sbin/"} {
		if err != nil {
			path, err = exec.LookPath(d + name)
		}
	}
	if err != nil {
		return "", &Problem{What: name + " is not installed", Do: "run the testbed once as root, which installs it", Err: err}
	}
	return path, nil
}
