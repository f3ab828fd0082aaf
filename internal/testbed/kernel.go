package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"time"
)

// kernelRoot is the package whose dependencies make up a kernel.
const kernelRoot = "linux-image-amd64"

// bootModules are what the initramfs needs to reach the root drive and the host's folder; modprobe adds what they depend on.
var bootModules = []string{"virtio_pci", "virtio_blk", "ext4", "9pnet_virtio", "9p"}

// unusedModules are subtrees of the kernel's modules that no guest here has hardware for. Leaving them out halves the image.
var unusedModules = []string{
	"sound", "drivers/gpu", "drivers/media", "drivers/iio", "drivers/staging", "drivers/input", "drivers/hwmon", "drivers/usb",
	"drivers/net/wireless", "drivers/net/can", "drivers/bluetooth", "net/bluetooth", "net/wireless", "net/mac80211",
}

// kernel is one kernel in the cache.
type kernel struct {
	dir     string // its folder
	version string // of the Debian package, as in 7.2.12-1~bpo13+1
}

func (k kernel) image() string    { return filepath.Join(k.dir, "vmlinuz") }
func (k kernel) modules() string  { return filepath.Join(k.dir, "modules.ext4") }
func (k kernel) bootCPIO() string { return filepath.Join(k.dir, "bootmodules.cpio") }

// newestKernel returns the newest kernel of the suite, fetching it when the cache has only older ones. When the mirror cannot be
// reached, the newest kernel in the cache is used instead, and said to be.
func newestKernel(ctx context.Context, l *log, cache string) (kernel, error) {
	k, err := fetchKernel(ctx, l, cache)
	if err == nil || ctx.Err() != nil {
		return k, err
	}
	if old, ok := cachedKernel(cache); ok {
		l.printf("%v", err)
		l.printf("using kernel %s from the cache", old.version)
		return old, nil
	}
	return kernel{}, err
}

// cachedKernel returns the newest kernel in the cache.
func cachedKernel(cache string) (kernel, bool) {
	dirs, err := filepath.Glob(filepath.Join(cache, "kernel", "*", "vmlinuz"))
	if err != nil || len(dirs) == 0 {
		return kernel{}, false
	}
	var ks []kernel
	for _, d := range dirs {
		ks = append(ks, kernel{filepath.Dir(d), filepath.Base(filepath.Dir(d))})
	}
	sort.Slice(ks, func(i, j int) bool { return olderVersion(ks[j].version, ks[i].version) })
	return ks[0], true
}

func fetchKernel(ctx context.Context, l *log, cache string) (kernel, error) {
	m, err := mirror(ctx)
	if err != nil {
		return kernel{}, err
	}
	packages, err := refreshIndex(ctx, l, m, filepath.Join(cache, "index"))
	if err != nil {
		return kernel{}, err
	}
	x, err := readIndex(packages, m)
	if err != nil {
		os.RemoveAll(filepath.Join(cache, "index")) // whatever it is, the next run fetches a new one
		return kernel{}, err
	}
	debs, err := x.kernelPackages()
	if err != nil {
		return kernel{}, err
	}
	k := kernel{version: x.packages[kernelRoot]["Version"]}
	k.dir = filepath.Join(cache, "kernel", k.version)
	if _, err := os.Stat(k.image()); err == nil {
		return k, nil
	}
	return k, k.build(ctx, l, x.mirror, debs)
}

// kernelPackages returns the packages of which the newest kernel consists: Debian splits it into its image, its modules and the files
// both need, and names each after the release.
func (x *index) kernelPackages() ([]stanza, error) {
	all, err := x.closure(kernelRoot, func(n string) bool {
		for _, p := range []string{"linux-image-", "linux-binary-", "linux-modules-", "linux-base-"} {
			if strings.HasPrefix(n, p) {
				return true
			}
		}
		return false
	})
	if err != nil {
		return nil, err
	}
	var debs []stanza
	for _, s := range all {
		var size int64
		fmt.Sscan(s["Size"], &size)
		if size < 64<<10 { // meta packages, which hold nothing but their dependencies
			continue
		}
		if s["Filename"] == "" || len(s["SHA256"]) != 64 {
			return nil, fmt.Errorf("suite %s: package %s has no file name or checksum", suite, s["Package"])
		}
		debs = append(debs, s)
	}
	if len(debs) == 0 {
		return nil, fmt.Errorf("suite %s: %s leads to no kernel", suite, kernelRoot)
	}
	return debs, nil
}

// build downloads and unpacks the packages, and turns them into the files of a kernel in the cache.
func (k kernel) build(ctx context.Context, l *log, mirror string, debs []stanza) error {
	tmp := k.dir + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return diskFull(err, tmp)
	}
	if err := needSpace(tmp, 1500<<20); err != nil {
		return err
	}
	l.printf("kernel %s: downloading and unpacking", k.version)
	tree := filepath.Join(tmp, "tree")
	for _, s := range debs {
		deb := filepath.Join(tmp, filepath.Base(s["Filename"]))
		sum := checksum{sha256: s["SHA256"]}
		fmt.Sscan(s["Size"], &sum.size)
		if err := download(ctx, l, mirror+"/"+s["Filename"], deb, sum); err != nil {
			return err
		}
		if err := command(ctx, "dpkg-deb", "-x", deb, tree); err != nil {
			return diskFull(err, tmp)
		}
		os.Remove(deb)
	}
	release, root, err := findModules(tree)
	if err != nil {
		return fmt.Errorf("kernel %s: %w", k.version, err)
	}
	for _, d := range unusedModules {
		os.RemoveAll(filepath.Join(root, "kernel", d))
	}
	// depmod and modprobe look for lib/modules below the folder they are given.
	base := strings.TrimSuffix(root, "/lib/modules/"+release)
	if err := command(ctx, "depmod", "-b", base, release); err != nil {
		return err
	}
	t := kernel{dir: tmp}
	if err := t.writeBootModules(ctx, base, release); err != nil {
		return err
	}
	vmlinuz := filepath.Join(root, "vmlinuz")
	if _, err := os.Stat(vmlinuz); err != nil {
		vmlinuz = filepath.Join(tree, "boot", "vmlinuz-"+release)
	}
	if err := os.Rename(vmlinuz, t.image()); err != nil {
		return fmt.Errorf("kernel %s: no image in its packages: %w", k.version, err)
	}
	if err := makeImage(ctx, root, t.modules(), 0); err != nil {
		return err
	}
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	if err := os.Rename(tmp, k.dir); err != nil {
		return err
	}
	k.prune()
	l.printf("kernel %s (%s) is in the cache", k.version, release)
	return nil
}

// prune removes other kernels that nobody has booted for a week.
func (k kernel) prune() {
	others, _ := filepath.Glob(filepath.Join(filepath.Dir(k.dir), "*"))
	for _, d := range others {
		if st, err := os.Stat(d); err == nil && d != k.dir && time.Since(st.ModTime()) > 7*24*time.Hour {
			os.RemoveAll(d)
		}
	}
}

// findModules returns the kernel's release and the folder of its modules below an unpacked tree.
func findModules(tree string) (release, dir string, err error) {
	for _, p := range []string{"usr/lib/modules/*/kernel", "lib/modules/*/kernel"} {
		if m, _ := filepath.Glob(filepath.Join(tree, p)); len(m) == 1 {
			dir = filepath.Dir(m[0])
			return filepath.Base(dir), dir, nil
		}
	}
	return "", "", fmt.Errorf("its packages hold no modules")
}

// writeBootModules writes an archive of the modules the initramfs loads, decompressed and numbered in the order to load them.
func (k kernel) writeBootModules(ctx context.Context, base, release string) error {
	modprobe, err := lookPath("modprobe")
	if err != nil {
		return err
	}
	var files []string
	seen := map[string]bool{}
	for _, m := range bootModules {
		cmd := exec.CommandContext(ctx, modprobe, "-d", base, "-S", release, "--show-depends", m)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("kernel %s has no module %s: %s", release, m, strings.TrimSpace(string(out)))
		}
		for _, line := range strings.Split(string(out), "\n") {
			if f := strings.Fields(line); len(f) >= 2 && f[0] == "insmod" && !seen[f[1]] {
				seen[f[1]] = true
				files = append(files, f[1])
			}
		}
	}
	f, err := os.Create(k.bootCPIO())
	if err != nil {
		return diskFull(err, k.dir)
	}
	defer f.Close()
	w := newCPIO(f)
	w.dir("modules")
	for i, path := range files {
		b, err := readModule(path)
		if err != nil {
			return err
		}
		name, _, _ := strings.Cut(filepath.Base(path), ".ko")
		w.file(fmt.Sprintf("modules/%02d-%s.ko", i, name), 0o644, b)
	}
	if err := w.close(); err != nil {
		return diskFull(err, k.dir)
	}
	return f.Close()
}
