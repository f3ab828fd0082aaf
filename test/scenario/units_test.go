package scenario

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// fileUnit is a unit in a sparse file.
func fileUnit(t testing.TB, name string, size int64, attributes map[string]string) targets.Unit {
	return targets.Unit{Kind: targets.FileIO, Size: size, Path: filepath.Join(t.TempDir(), name), Attributes: attributes}
}

// allocated tells how many bytes of a file take space.
func allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// queueLimit reads a limit of a block device from sysfs.
func queueLimit(t testing.TB, dev, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(dev), "queue", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// A thin unit: what a file system frees is freed at the target, zeros are written without sending them, and both with 4K blocks, too.
func TestThinUnit(t *testing.T) {
	thin := map[string]string{"emulate_tpu": "1", "emulate_tpws": "1", "unmap_zeroes_data": "1"}
	for _, c := range []struct {
		kind  kind
		block int
	}{{kinds[0], 512}, {kinds[1], 4096}} {
		t.Run(fmt.Sprintf("%s-%d", c.kind.name, c.block), func(t *testing.T) {
			u := fileUnit(t, "thin", 48*mib, thin)
			u.BlockSize = c.block
			g := newTarget(t, c.kind, []targets.Unit{u})
			g.login(t)
			d := devices(t, g.name)[0]
			if int(d.LogicalBlockSize) != c.block || d.MaxDiscard == 0 || d.MaxZeroes == 0 || queueLimit(t, d.Path, "discard_max_bytes") != fmt.Sprint(d.MaxDiscard) ||
				queueLimit(t, d.Path, "write_zeroes_max_bytes") != fmt.Sprint(d.MaxZeroes) {
				t.Errorf("limits: device %+v, kernel %s and %s", d, queueLimit(t, d.Path, "discard_max_bytes"), queueLimit(t, d.Path, "write_zeroes_max_bytes"))
			}
			must(t, "mkfs.ext4", "-q", "-F", d.Path)
			dir := t.TempDir()
			must(t, "mount", d.Path, dir)
			defer run(t, "umount", dir)
			must(t, "dd", "if=/dev/urandom", "of="+filepath.Join(dir, "big"), "bs=1M", "count=24", "conv=fsync", "status=none")
			full := allocated(t, u.Path)
			if full < 24*mib {
				t.Fatalf("%d bytes of the target's file take space after 24 MiB were written", full)
			}
			if err := os.Remove(filepath.Join(dir, "big")); err != nil {
				t.Fatal(err)
			}
			must(t, "sync", "-f", dir)
			must(t, "fstrim", dir)
			if left := allocated(t, u.Path); left > full-22*mib {
				t.Errorf("fstrim: %d bytes take space, %d did before", left, full)
			}
			must(t, "umount", dir)

			// Zeros that keep their blocks, and zeros that need not.
			must(t, "dd", "if=/dev/urandom", "of="+d.Path, "bs=1M", "count=16", "oflag=direct", "status=none")
			before := allocated(t, u.Path)
			must(t, "blkdiscard", "-z", "-o", "0", "-l", fmt.Sprint(4*mib), d.Path)
			must(t, "fallocate", "-p", "-o", fmt.Sprint(4*mib), "-l", fmt.Sprint(8*mib), d.Path)
			if after := allocated(t, u.Path); after > before-7*mib || after < before-9*mib {
				t.Errorf("zeros: %d bytes take space, %d did before; 8 MiB may go", after, before)
			}
			content, err := os.ReadFile(u.Path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(content[:12*mib], make([]byte, 12*mib)) || bytes.Equal(content[12*mib:16*mib], make([]byte, 4*mib)) {
				t.Error("the target's file does not hold 12 MiB of zeros followed by data")
			}
			s := devices(t, g.name)[0].Stats
			if s.Discards == 0 || s.Zeroes == 0 || s.Errors != 0 {
				t.Errorf("counters %+v", s)
			}
			g.logout(t)
		})
	}
}

// 4K-native units keep data, whatever the target.
func TestFourKNative(t *testing.T) {
	for _, k := range []kind{kinds[0], kinds[3]} {
		t.Run(k.name, func(t *testing.T) {
			u := fileUnit(t, "4k", 16*mib, nil)
			u.BlockSize = 4096
			g := newTarget(t, k, []targets.Unit{u})
			g.login(t)
			d := devices(t, g.name)[g.luns[0]]
			if got := strings.Fields(must(t, "blockdev", "--getss", "--getsize64", d.Path)); got[0] != "4096" || got[1] != fmt.Sprint(16*mib) {
				t.Errorf("the kernel says %v", got)
			}
			jobs := fioVerify("4k", d.Path, d.Size)
			for i := range jobs {
				for j, o := range jobs[i].options {
					jobs[i].options[j] = strings.NewReplacer("bsrange=512-", "bsrange=4k-", "blockalign=512", "blockalign=4k").Replace(o)
				}
			}
			fio(t, jobs)
			g.logout(t)
		})
	}
}

// A write-protected unit is read-only, and can be read.
func TestReadOnlyUnit(t *testing.T) {
	guestOnly(t)
	g := &target{name: newName(t), transport: "tcp", kind: kinds[1], units: []targets.Unit{{Kind: targets.Ramdisk, Size: 8 * mib}}, portal: "10.0.0.1:3261"}
	lio, err := targets.NewLIO(targets.LIOConfig{Name: g.name, Portals: []targets.Portal{targets.ParsePortal(g.portal, false)}, Units: g.units, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer lio.Close()
	g.lio, g.sessions, g.luns = lio, lio.Sessions, []uint16{0}
	g.login(t)
	d := devices(t, g.name)[0]
	if !d.ReadOnly || strings.TrimSpace(must(t, "blockdev", "--getro", d.Path)) != "1" {
		t.Errorf("device %+v is not read-only", d)
	}
	must(t, "dd", "if="+d.Path, "of=/dev/null", "bs=1M", "iflag=direct", "status=none")
	if f, err := os.OpenFile(d.Path, os.O_WRONLY, 0); err == nil {
		_, err = f.Write(make([]byte, 4096))
		if err == nil {
			err = f.Sync()
		}
		f.Close()
		if err == nil {
			t.Error("a write succeeds")
		}
	}
	g.logout(t)
}

// A unit grows under a mounted file system with writes running; resize2fs makes use of it at once.
func TestOnlineGrow(t *testing.T) {
	u := fileUnit(t, "growing", 16*mib, nil)
	g := newTarget(t, kinds[0], []targets.Unit{u})
	g.login(t)
	d := devices(t, g.name)[0]
	must(t, "mkfs.ext4", "-q", "-F", d.Path)
	dir := t.TempDir()
	must(t, "mount", d.Path, dir)
	defer run(t, "umount", dir)

	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		f, err := os.OpenFile(filepath.Join(dir, "busy"), os.O_CREATE|os.O_RDWR, 0o600)
		for i := 0; err == nil; i++ {
			select {
			case <-stop:
				done <- errors.Join(f.Sync(), f.Close())
				return
			default:
			}
			if _, err = f.WriteAt(bytes.Repeat([]byte{byte(i)}, 64<<10), int64(i%32)*(64<<10)); err == nil {
				err = f.Sync()
			}
		}
		done <- err
	}()
	if err := g.lio.Resize(0, u, 48*mib); err != nil {
		t.Fatal(err)
	}
	out := iserctl(t, "rescan", g.name)
	if !strings.Contains(out, "grown: "+d.Path) {
		t.Errorf("rescan says %q", out)
	}
	if got := strings.TrimSpace(must(t, "blockdev", "--getsize64", d.Path)); got != fmt.Sprint(48*mib) {
		t.Errorf("the kernel says %s bytes", got)
	}
	must(t, "resize2fs", d.Path)
	close(stop)
	if err := <-done; err != nil {
		t.Errorf("the writer: %v", err)
	}
	must(t, "dd", "if=/dev/urandom", "of="+filepath.Join(dir, "more"), "bs=1M", "count=20", "conv=fsync", "status=none")
	must(t, "umount", dir)
	must(t, "e2fsck", "-f", "-n", d.Path)

	// It shrinks: the device stays as it is, and says so.
	if err := g.lio.Resize(0, u, 24*mib); err != nil {
		t.Fatal(err)
	}
	iserctl(t, "rescan")
	d = devices(t, g.name)[0]
	if d.Size != 48*mib || d.State != api.DeviceLive || len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0], "shrunk") {
		t.Errorf("device of a unit that has shrunk: %+v", d)
	}
	if err := g.lio.Resize(0, u, 48*mib); err != nil {
		t.Fatal(err)
	}
	iserctl(t, "rescan")
	if d = devices(t, g.name)[0]; len(d.Warnings) != 0 {
		t.Errorf("device of a unit that has its size again: %+v", d)
	}
	g.logout(t)
}

// Units are mapped and unmapped while the target is logged in. It says so with the answer to the next request.
func TestMapAndUnmap(t *testing.T) {
	for _, k := range kinds[:1] {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
			g.login(t)
			touch := func() {
				run(t, "dd", "if="+devices(t, g.name)[0].Path, "of=/dev/null", "bs=4k", "count=1", "iflag=direct", "status=none")
			}
			state := func(want string) func() error {
				return func() error {
					got := ""
					if d, ok := devices(t, g.name)[1]; ok {
						got = d.State
					}
					if got == want {
						return nil
					}
					return fmt.Errorf("device of unit 1: %q, want %q", got, want)
				}
			}
			first := fileUnit(t, "first", 8*mib, nil)
			first.Serial = "0123456789abcdef0123456789abcdef"
			if err := g.lio.AddUnit(1, first); err != nil {
				t.Fatal(err)
			}
			touch()
			waitFor(t, "a device for the new unit", 20*time.Second, state(api.DeviceLive))
			if err := g.lio.RemoveUnit(1); err != nil {
				t.Fatal(err)
			}
			touch()
			waitFor(t, "no device without its unit", 20*time.Second, state(""))

			// One that is in use stays, dead, and nothing reaches the unit that takes its place.
			if err := g.lio.AddUnit(1, first); err != nil {
				t.Fatal(err)
			}
			touch()
			waitFor(t, "a device again", 20*time.Second, state(api.DeviceLive))
			path := devices(t, g.name)[1].Path
			f, err := os.OpenFile(path, os.O_RDWR|syscall.O_DIRECT, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			second := fileUnit(t, "second", 8*mib, nil)
			second.Serial = "fedcba9876543210fedcba9876543210"
			if err := g.lio.RemoveUnit(1); err != nil {
				t.Fatal(err)
			}
			touch()
			waitFor(t, "the device in use is dead", 20*time.Second, state(api.DeviceDead))
			if err := g.lio.AddUnit(1, second); err != nil {
				t.Fatal(err)
			}
			iserctl(t, "rescan")
			d := devices(t, g.name)[1]
			if d.State != api.DeviceDead || !strings.Contains(d.Reason, "another unit") {
				t.Errorf("device %+v", d)
			}
			page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			if err != nil {
				t.Fatal(err)
			}
			copy(page, "must not arrive")
			if _, err := f.WriteAt(page, 0); !errors.Is(err, syscall.ENODEV) {
				t.Errorf("a write to the dead device: %v", err)
			}
			if n := allocated(t, second.Path); n != 0 {
				t.Errorf("%d bytes were written to the unit that took the place", n)
			}
			r := query[api.DevicesReply](t, "device", "list")
			if len(r.Unserved) != 1 || r.Unserved[0].LUN != 1 || !strings.Contains(r.Unserved[0].Reason, path) {
				t.Errorf("units without a device: %+v", r.Unserved)
			}
			f.Close()
			iserctl(t, "rescan", g.name)
			if d := devices(t, g.name)[1]; d.State != api.DeviceLive || !strings.Contains(d.Serial, "fedcba98") {
				t.Errorf("the other unit's device: %+v", d)
			}
			g.logout(t)
		})
	}
}

// While the session is lost another unit takes the number of one whose requests wait: they fail, and never reach it.
func TestSwapDuringOutage(t *testing.T) {
	first, second := fileUnit(t, "first", 8*mib, nil), fileUnit(t, "second", 8*mib, nil)
	first.Serial, second.Serial = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
	g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}, first})
	g.login(t)
	path := devices(t, g.name)[1].Path
	if err := g.lio.SetEnabled(false); err != nil {
		t.Fatal(err)
	}
	written := make(chan result, 1)
	go func() {
		r := run(t, "dd", "if=/dev/urandom", "of="+path, "bs=64k", "count=8", "oflag=direct", "status=none")
		written <- r
	}()
	waitFor(t, "requests wait", 20*time.Second, func() error {
		if d := devices(t, g.name)[1]; d.Stats.InFlight == 0 {
			return errors.New("none in flight")
		}
		return nil
	})
	if err := errors.Join(g.lio.RemoveUnit(1), g.lio.AddUnit(1, second), g.lio.SetEnabled(true)); err != nil {
		t.Fatal(err)
	}
	if r := <-written; r.code == 0 {
		t.Error("the writes have succeeded")
	}
	if n := allocated(t, second.Path); n != 0 {
		t.Errorf("%d bytes were written to the unit that took the place", n)
	}
	waitFor(t, "a device for the unit that is there now", 30*time.Second, func() error {
		if d := devices(t, g.name)[1]; d.State != api.DeviceLive || !strings.Contains(d.Serial, "fedcba98") {
			return fmt.Errorf("device %+v", d)
		}
		return nil
	})
	g.logout(t)
}

// As many units as fit eight bits: each gets its device, and all go again.
func TestManyUnits(t *testing.T) {
	units := make([]targets.Unit, 255)
	for i := range units {
		units[i] = targets.Unit{Kind: targets.Ramdisk, Size: mib}
	}
	start := time.Now()
	g := newTarget(t, kinds[0], units)
	made := time.Now()
	g.login(t)
	in := time.Now()
	list := devices(t, g.name)
	for lun, d := range list {
		if d.State != api.DeviceLive || d.Size != mib {
			t.Errorf("unit %d: %+v", lun, d)
		}
	}
	last := list[uint16(len(units)-1)].Path
	must(t, "dd", "if=/dev/urandom", "of="+last, "bs=64k", "count=4", "oflag=direct", "status=none")
	out := time.Now()
	g.logout(t)
	t.Logf("%d units: set up %v, login %v, logout %v", len(units), made.Sub(start), in.Sub(made), time.Since(out))
}
