package daemon

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// reserve has n huge pages of 2 MiB for the length of the test.
func reserve(t *testing.T, n int) {
	t.Helper()
	const knob = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	old, err := os.ReadFile(knob)
	if err == nil && os.Getenv("GUEST") != "inside" {
		err = errors.New("only the guest's memory is touched")
	}
	if err == nil {
		err = os.WriteFile(knob, []byte(fmt.Sprint(n)), 0)
	}
	if err == nil {
		t.Cleanup(func() { _ = os.WriteFile(knob, old, 0) })
		if now, _ := os.ReadFile(knob); strings.TrimSpace(string(now)) != fmt.Sprint(n) {
			err = fmt.Errorf("%s huge pages can be had, %d are needed", strings.TrimSpace(string(now)), n)
		}
	}
	require.Need(t, "guest", err)
}

// What the kernel tells about memory that was lent: who holds it, and whether it is all there.
func TestMemoryFile(t *testing.T) {
	reserve(t, 2)
	for _, huge := range []bool{true, false} {
		m, err := newMemory("daemon test", 4<<20) // huge pages first, as long as there are any
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if huge != (m.page == 2<<20) || m.size != 4<<20 {
			t.Errorf("huge %v: %d bytes in pages of %d", huge, m.size, m.page)
		}
		held := func(want bool, when string) {
			t.Helper()
			if got, sure := m.heldByOthers(); got != want && (sure || !huge) || !sure && !huge {
				t.Errorf("huge %v, %s: held by others: %v, sure: %v", huge, when, got, sure)
			}
		}
		held(false, "new")
		dup, err := unix.Dup(int(m.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		held(false, "a duplicate, such as the data plane has")
		f, err := m.reopen()
		if err != nil {
			t.Fatal(err)
		}
		held(true, "opened")
		mem, err := unix.Mmap(int(f.Fd()), 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		held(true, "mapped")
		mem[5<<18] = 1
		if err := m.scrub(); err != nil || mem[5<<18] != 0 {
			t.Errorf("huge %v: scrub: %d, %v", huge, mem[5<<18], err)
		}
		_ = unix.Munmap(mem)
		held(false, "unmapped")
		if f, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", m.Fd())); err != nil {
			t.Fatal(err)
		}
		held(true, "opened for reading")
		_ = f.Close()
		_ = unix.Close(dup)
		if !m.whole() {
			t.Errorf("huge %v: a hole in new memory", huge)
		}
		if err := m.Truncate(2 << 20); !errors.Is(err, unix.EPERM) {
			t.Errorf("huge %v: truncated: %v", huge, err)
		}
		if err := unix.Fallocate(int(m.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 2<<20, 2<<20); err != nil {
			t.Fatal(err)
		}
		if !huge && m.whole() {
			t.Error("the hole is not seen")
		}
		// A page that is gone comes back if there is one; if not, it is an error and not the end of the daemon.
		if huge {
			_ = os.WriteFile("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", []byte("0"), 0)
			if err := m.scrub(); err == nil {
				t.Error("a page that cannot be had is overwritten")
			}
		} else if err := m.scrub(); err != nil {
			t.Error(err)
		}
	}
}

func TestParseMaps(t *testing.T) {
	got := parseMaps([]byte("7f1c2c000000-7f1c2c400000 rw-s 00001000 00:01 1028                       /memfd:a pool (deleted)\n" +
		"55d0-55d1 r--p 00000000 fd:01 77 /bin/x\nnonsense\n7ffc-7ffd rw-p 00000000 00:00 0                          [stack]\n" +
		"7f00-7f01 rw-s 00000000 00:05 9                          /dev/zero (deleted)\n"))
	if len(got) != 4 {
		t.Fatalf("%+v", got)
	}
	if m := got[0]; m.start != 0x7f1c2c000000 || m.end != 0x7f1c2c400000 || m.offset != 4096 || m.inode != (inode{Dev: unix.Mkdev(0, 1), Ino: 1028}) ||
		m.path != "/memfd:a pool (deleted)" || !m.writable() {
		t.Errorf("%+v", m)
	}
	if got[1].writable() || got[2].writable() || !got[3].writable() || got[2].path != "" {
		t.Errorf("%+v", got[1:])
	}
}

// A SysV segment and a memfd may have the same number on the same file system: they are two files nevertheless, however they are looked at.
func TestSysVInode(t *testing.T) {
	maps := parseMaps([]byte("7f1c2c000000-7f1c2c400000 rw-s 00000000 00:01 2                       /memfd:SYSV00000000 (deleted)\n" +
		"7f1c2c400000-7f1c2c800000 rw-s 00400000 00:01 2                       /SYSV00000000 (deleted)\n"))
	if len(maps) != 2 || maps[0].inode == maps[1].inode || maps[0].inode.compare(maps[1].inode) != -maps[1].inode.compare(maps[0].inode) {
		t.Errorf("%+v", maps)
	}
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 1<<16, unix.IPC_CREAT|0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	mem, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.SysvShmDetach(mem)
	at := uint64(uintptr(unsafe.Pointer(&mem[0])))
	maps, err = readMaps(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(maps, func(m mapping) bool { return m.start <= at && at < m.end })
	if i < 0 || !maps[i].inode.SysV || maps[i].inode.Ino != uint64(id) {
		t.Fatalf("segment %d at %#x: %+v", id, at, maps)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/map_files/%x-%x", maps[i].start, maps[i].end), os.O_RDWR, 0)
	if errors.Is(err, os.ErrPermission) {
		require.Need(t, "root", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if m, err := statMemory(f); err != nil || m.inode != maps[i].inode {
		t.Errorf("%+v, %v; expected %+v", m.inode, err, maps[i].inode)
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add([]byte("7f1c2c000000-7f1c2c400000 rw-s 00001000 00:01 1028   /memfd:a pool (deleted)\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range parseMaps(b) {
			if strings.Contains(m.path, "\n") {
				t.Errorf("%+v", m)
			}
		}
	})
}
