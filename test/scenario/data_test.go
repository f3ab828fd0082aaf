package scenario

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"iserd.org/iserd/internal/testbed/targets"
)

const mib = 1 << 20

// Two units behind one target have the right size and keep what is written to them: mixed reads and writes with checksums on both at
// once, and the same data read back through a new login.
func TestUnits(t *testing.T) {
	eachTarget(t, func(t *testing.T, k kind) {
		g := newTarget(t, k, twoUnits(t, 16*mib, 24*mib))
		g.login(t)
		var jobs []fioJob
		for lun, d := range devices(t, g.name) {
			size := uint64(g.units[indexOf(g.luns, lun)].Size)
			if d.Size != size {
				t.Errorf("unit %d: %s has %d bytes, the target's unit has %d", lun, d.Path, d.Size, size)
			}
			if got := strings.TrimSpace(must(t, "blockdev", "--getsize64", d.Path)); got != fmt.Sprint(size) {
				t.Errorf("unit %d: the kernel says %s bytes, want %d", lun, got, size)
			}
			if got := strings.TrimSpace(must(t, "blockdev", "--getss", "--getpbsz", d.Path)); got != fmt.Sprintf("%d\n%d", d.LogicalBlockSize, d.PhysicalBlockSize) {
				t.Errorf("unit %d: block sizes %q, want %d and %d", lun, got, d.LogicalBlockSize, d.PhysicalBlockSize)
			}
			if d.Transport != k.transport {
				t.Errorf("unit %d: transport %s, want %s", lun, d.Transport, k.transport)
			}
			jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
		}
		fio(t, jobs)
		sums := contents(t, g)

		g.logout(t)
		g.login(t)
		for lun, sum := range contents(t, g) {
			if sum != sums[lun] {
				t.Errorf("unit %d: reads back differently after a new login", lun)
			}
		}
		for lun, d := range devices(t, g.name) {
			s := d.Stats
			if s.Errors != 0 || s.ReadBytes < d.Size {
				t.Errorf("unit %d: counters %+v after reading all of %d bytes", lun, s, d.Size)
			}
			if moved := s.ReadBytes + s.WriteBytes; k.transport == "iser" && s.BytesRegistered != moved || k.transport == "tcp" && s.BytesTCP != moved {
				t.Errorf("unit %d: bytes by tier do not add up over %s: %+v", lun, k.transport, s)
			}
			// The guest's kernel reaches the pages of requests from a socket. Most of the bytes are in requests of 32 KiB and more; tgtd takes writes in
			// pieces of 8 KiB, which are copied.
			if k.transport == "tcp" && s.BytesLent < s.ReadBytes/2 {
				t.Errorf("unit %d: only %d of %d bytes without a copy of their own: %+v", lun, s.BytesLent, s.ReadBytes, s)
			}
		}
		g.logout(t)
	})
}

// contents reads every device of a target past the page cache, and returns the checksums by unit number.
func contents(t testing.TB, g *target) map[uint16]string {
	t.Helper()
	sums := map[uint16]string{}
	for lun, d := range devices(t, g.name) {
		sums[lun] = must(t, "sh", "-c", "dd if="+d.Path+" bs=1M iflag=direct status=none | sha256sum")
	}
	return sums
}

func indexOf(luns []uint16, lun uint16) int {
	for i, l := range luns {
		if l == lun {
			return i
		}
	}
	return -1
}

// A file system lives on the device: real files are copied, survive logout and login, and the file system is clean.
func TestFileSystem(t *testing.T) {
	eachTarget(t, func(t *testing.T, k kind) {
		// The whole 200 MB over iSER to LIO; the other ways get a part, for the sake of the time it takes under emulation.
		total := int64(200 * mib)
		if k != kinds[0] {
			total /= 5
		}
		g := newTarget(t, k, []targets.Unit{{Kind: targets.FileIO, Size: total*3/2 + 20*mib, Path: filepath.Join(t.TempDir(), "fs")}})
		g.login(t)
		dev := devices(t, g.name)[g.luns[0]].Path
		must(t, "mkfs.ext4", "-q", "-F", dev)
		dir := t.TempDir()
		must(t, "mount", dev, dir)
		mounted := true
		t.Cleanup(func() {
			if mounted {
				run(t, "umount", dir)
			}
		})
		want := copyTree(t, "/usr", dir, total)
		must(t, "umount", dir)
		mounted = false
		g.logout(t)

		g.login(t)
		dev = devices(t, g.name)[g.luns[0]].Path
		must(t, "mount", "-o", "ro", dev, dir)
		mounted = true
		got := checksums(t, dir)
		must(t, "umount", dir)
		mounted = false
		for name, sum := range want {
			if got[name] != sum {
				t.Fatalf("%s: checksum %s, want %s", name, got[name], sum)
			}
		}
		must(t, "e2fsck", "-f", "-n", dev)
		g.logout(t)
	})
}

// copyTree copies regular files from a tree until total bytes are there, and returns their checksums by name.
func copyTree(t testing.TB, from, to string, total int64) map[string]string {
	t.Helper()
	sums := map[string]string{}
	var done int64
	err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil
		}
		if done >= total {
			return filepath.SkipAll
		}
		name := strings.ReplaceAll(strings.TrimPrefix(path, from+"/"), "/", "%")
		if len(name) > 200 {
			return nil
		}
		src, err := os.Open(path)
		if err != nil {
			return err
		}
		defer src.Close()
		dst, err := os.Create(filepath.Join(to, name))
		if err != nil {
			return err
		}
		h := sha256.New()
		n, err := io.Copy(io.MultiWriter(dst, h), src)
		if e := dst.Close(); err == nil {
			err = e
		}
		done += n
		sums[name] = hex.EncodeToString(h.Sum(nil))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if done < total {
		t.Fatalf("%s has only %d bytes to copy", from, done)
	}
	return sums
}

// checksums reads every file of a directory.
func checksums(t testing.TB, dir string) map[string]string {
	t.Helper()
	sums := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		h := sha256.New()
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			t.Fatalf("%s: %v", e.Name(), err)
		}
		sums[e.Name()] = hex.EncodeToString(h.Sum(nil))
	}
	return sums
}
