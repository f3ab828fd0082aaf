package ublk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// sharedSpec is testSpec with shared memory.
func sharedSpec() DeviceSpec {
	s := testSpec
	s.Features |= FeatureSharedMemory
	return s
}

// shareable makes memory of n bytes that others can open by the path.
func shareable(t *testing.T, n int64, flags int) (*os.File, string) {
	t.Helper()
	fd, err := unix.MemfdCreate("ublk test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	check(t, err)
	f := os.NewFile(uintptr(fd), "memfd")
	t.Cleanup(func() { f.Close() })
	check(t, f.Truncate(n))
	check(t, unix.Fallocate(fd, 0, 0, n))
	return f, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
}

// hugePages reserves n huge pages of 2 MiB for the length of the test.
func hugePages(t *testing.T, n int) {
	t.Helper()
	const knob = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	old, err := os.ReadFile(knob)
	check(t, err)
	check(t, os.WriteFile(knob, []byte(fmt.Sprint(n)), 0))
	t.Cleanup(func() { _ = os.WriteFile(knob, old, 0) })
	if now, _ := os.ReadFile(knob); strings.TrimSpace(string(now)) != fmt.Sprint(n) {
		require.Need(t, "guest", fmt.Errorf("%s huge pages can be had, %d are needed", strings.TrimSpace(string(now)), n))
	}
}

func needShared(t *testing.T, c *Control) {
	t.Helper()
	if !c.features.Has(FeatureSharedMemory) {
		require.Need(t, "ublk", errors.New("the driver lacks "+FeatureSharedMemory.needs()))
	}
}

// TestGuestBuffers registers memory of several kinds before and after START_DEV, and has another process do verified I/O from it.
func TestGuestBuffers(t *testing.T) {
	c := openControl(t)
	needShared(t, c)
	hugePages(t, 4)
	info := add(t, c, sharedSpec())
	early, earlyPath := shareable(t, 4<<20, 0)
	huge, hugePath := shareable(t, 4<<20, unix.MFD_HUGETLB)
	lateMem, latePath := shareable(t, 4<<20, 0)
	foreign, foreignPath := shareable(t, 4<<20, 0)
	_ = foreign

	reg := func(f *os.File, off, n int64, want int) {
		t.Helper()
		got, err := c.RegisterBuffer(within(t, 10*time.Second), info.ID, f, off, n)
		if err != nil || got != want {
			t.Fatalf("RegisterBuffer: index %d, %v; want index %d", got, err, want)
		}
	}
	// Before START_DEV; indexes are the lowest that are free.
	reg(early, 0, 1<<20, 0)
	reg(early, 1<<20, 3<<20, 1)
	check(t, c.UnregisterBuffer(within(t, 10*time.Second), info.ID, 0))
	check(t, c.UnregisterBuffer(within(t, 10*time.Second), info.ID, 1))
	reg(early, 0, 4<<20, 0)
	reg(huge, 0, 4<<20, 1)
	if _, err := unix.FcntlInt(early.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		t.Errorf("seal after registration: %v", err)
	}

	p := startServer(t)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, backing(t))
	check(t, c.Start(within(t, 20*time.Second), info.ID, p.pid()))
	settleUdev()
	dev := info.BlockPath()
	shared := func(path string) (hits int) {
		t.Helper()
		p.do("shared %d", info.ID)
		use(t, "shared", dev, path, 0, testSize, 1, 150)
		fmt.Sscan(p.do("shared %d", info.ID), &hits)
		return hits
	}
	for name, path := range map[string]string{"memfd": earlyPath, "huge memfd": hugePath} {
		if n := shared(path); n < 150 {
			t.Errorf("%s: %d requests of at least 150 came from the buffer", name, n)
		}
	}
	if n := shared(foreignPath); n != 0 {
		t.Errorf("%d requests from memory that is not registered came with an index", n)
	}

	for _, want := range []string{"2", "0"} {
		if _, err := QueueAttribute(info.ID, "nomerges", want); err != nil {
			t.Error(err)
		}
		if got, err := QueueAttribute(info.ID, "nomerges", ""); got != want || err != nil {
			t.Errorf("nomerges is %q, %v; want %s", got, err, want)
		}
	}
	if _, err := QueueAttribute(info.ID, "none", ""); !errors.Is(err, ErrNotSupported) {
		t.Errorf("attribute that is not there: %v", err)
	}
	if _, err := QueueAttribute(9999, "nomerges", ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("device that is not there: %v", err)
	}

	// Live, while another process does I/O.
	user := client("verify", dev, 0, testSize, 1, 400)
	check(t, user.Start())
	for range 5 {
		reg(lateMem, 0, 4<<20, 2)
		check(t, c.UnregisterBuffer(within(t, 20*time.Second), info.ID, 2))
	}
	reg(lateMem, 0, 4<<20, 2)
	if err := user.Wait(); err != nil {
		t.Errorf("I/O while buffers come and go: %v", err)
	}
	if n := shared(latePath); n < 150 {
		t.Errorf("registered while live: %d requests of at least 150 came from the buffer", n)
	}
	check(t, c.UnregisterBuffer(within(t, 20*time.Second), info.ID, 0))
	if n := shared(earlyPath); n != 0 {
		t.Errorf("%d requests came with the index of a buffer that is unregistered", n)
	}
	reg(early, 0, 4<<20, 0) // the lowest again
	takeDown(t, c, info, p) // frees what is registered
}

// TestGuestBufferErrors has each misuse answered.
func TestGuestBufferErrors(t *testing.T) {
	c := openControl(t)
	needShared(t, c)
	info := add(t, c, sharedSpec())
	mem, _ := shareable(t, 1<<20, 0)
	file, err := os.CreateTemp("/var/tmp", "ublk") // an ordinary file system
	check(t, err)
	defer os.Remove(file.Name())
	defer file.Close()
	check(t, file.Truncate(1<<20))
	ctx := within(t, 20*time.Second)
	if n, err := c.RegisterBuffer(ctx, info.ID, mem, 0, 1<<20); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	for _, x := range []struct {
		name   string
		file   *os.File
		off, n int64
		want   error
	}{
		{"overlap", mem, 4096, 4096, ErrExist},
		{"offset", mem, 512, 4096, unix.EINVAL},
		{"length", mem, 0, 1000, unix.EINVAL},
		{"nothing", mem, 0, 0, unix.EINVAL},
		{"too long", mem, 0, MaxBuffer + 4096, unix.EINVAL},
		{"beyond the end", mem, 1 << 20, 4096, unix.EFAULT},
		{"ordinary file system", file, 0, 1 << 20, unix.EFAULT},
	} {
		n, err := c.RegisterBuffer(ctx, info.ID, x.file, x.off, x.n)
		if !errors.Is(err, x.want) {
			t.Errorf("%s: index %d, %v; want %v", x.name, n, err, x.want)
		}
	}
	if err := c.UnregisterBuffer(ctx, info.ID, 7); !errors.Is(err, ErrNoBuffer) {
		t.Errorf("UnregisterBuffer of an unused index: %v", err)
	}
	check(t, c.UnregisterBuffer(ctx, info.ID, 0))
	check(t, c.Delete(ctx, info.ID))
	if _, err := c.RegisterBuffer(ctx, info.ID, mem, 0, 1<<20); !errors.Is(err, ErrNotFound) {
		t.Errorf("RegisterBuffer with a deleted device: %v", err)
	}
	if err := c.UnregisterBuffer(ctx, info.ID, 0); !errors.Is(err, ErrNotFound) {
		t.Errorf("UnregisterBuffer of a deleted device: %v", err)
	}

	plain := add(t, c, testSpec) // without the feature
	var ce *CtrlError
	if _, err := c.RegisterBuffer(ctx, plain.ID, mem, 0, 1<<20); !errors.Is(err, ErrNotSupported) || !errors.As(err, &ce) || ce.Feature != FeatureSharedMemory {
		t.Errorf("RegisterBuffer with a device without the feature: %v", err)
	}
	check(t, c.Delete(ctx, plain.ID))
	c.features &^= FeatureSharedMemory // an older kernel
	if _, err := c.RegisterBuffer(ctx, plain.ID, mem, 0, 1<<20); !errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), "7.1") {
		t.Errorf("RegisterBuffer on an older kernel: %v", err)
	}
}

// TestGuestBufferLate gives up waiting for a registration: when it succeeds later it is taken back, and nothing stays mapped.
func TestGuestBufferLate(t *testing.T) {
	c := openControl(t)
	needShared(t, c)
	info, p := live(t, c, sharedSpec())
	mem, _ := shareable(t, 1<<20, 0)
	p.do("hold %d", info.ID)
	reader := client("read", info.BlockPath(), 0, 0)
	check(t, reader.Start())
	for deadline := time.Now().Add(20 * time.Second); p.do("held %d", info.ID) == "0"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no request arrives")
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	_, err := c.RegisterBuffer(ctx, info.ID, mem, 0, 1<<20)
	var ce *CtrlError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &ce) || !ce.Pending {
		t.Fatalf("RegisterBuffer with a request that is not answered: %v", err)
	}
	p.do("release %d", info.ID)
	check(t, reader.Wait())
	// The next command waits for the late one; which of the two comes first, this or the taking back, is open.
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		n, err := c.RegisterBuffer(within(t, 10*time.Second), info.ID, mem, 0, 1<<20)
		if err == nil {
			if n != 0 {
				t.Errorf("index %d: the late buffer is still there", n)
			}
			break
		}
		if !errors.Is(err, ErrExist) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	if maps, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(maps), "memfd:ublk test") {
		t.Errorf("the memory is still mapped (%v)", err)
	}
	takeDown(t, c, info, p)
}
