package uring

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// TestBufferPlaces hands out places without overlap, and again after they came back.
func TestBufferPlaces(t *testing.T) {
	r := newRing(t, Config{})
	if _, ok := r.TakeBuffers(1); ok {
		t.Error("a ring without a table has places")
	}
	r.buffers = 10
	a, _ := r.TakeBuffers(4)
	b, _ := r.TakeBuffers(4)
	if _, ok := r.TakeBuffers(4); ok || a != 0 || b != 4 {
		t.Errorf("places %d and %d of 10, and four more: %v", a, b, ok)
	}
	r.GiveBuffers(a, 4)
	if c, ok := r.TakeBuffers(3); !ok || c != 0 {
		t.Errorf("three of four that came back: %d, %v", c, ok)
	}
	if c, ok := r.TakeBuffers(2); !ok || c != 8 {
		t.Errorf("the last two: %d, %v", c, ok)
	}
	if c, ok := r.TakeBuffers(1); !ok || c != 3 {
		t.Errorf("the one in between: %d, %v", c, ok)
	}
}

// TestFixedBuffers sends from one registered buffer and receives into another, in part.
func TestFixedBuffers(t *testing.T) {
	r := newRing(t, Config{})
	err := r.OpenBuffers(16)
	if errors.Is(err, ErrNotSupported) {
		require.Need(t, "fixed-buffers", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	mem, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	for i := range 2 {
		if err := r.RegisterBuffer(3+i, mem[i*4096:][:4096]); err != nil {
			t.Fatal(err)
		}
	}
	copy(mem[100:], "some bytes")
	base := uintptr(unsafe.Pointer(&mem[0]))
	c := &recorder{}
	slot := r.Attach(c)
	for i, want := range []struct {
		place uint16
		res   int32
	}{{3, 10}, {4, 10}, {5, -int32(unix.EFAULT)}} {
		e := r.SQE()
		if i == 0 {
			e.PrepSend(fds[0], base+100, 10, 0)
		} else {
			e.PrepRecv(fds[1], base+4096+200, 10, unix.MSG_DONTWAIT)
		}
		e.UseFixed(want.place)
		e.UserData = slot.Key(uint32(i))
		settle(t, r, c, i+1)
		if c.got[i].res != want.res {
			t.Errorf("operation %d on place %d gives %d, want %d", i, want.place, c.got[i].res, want.res)
		}
	}
	if string(mem[4296:4306]) != "some bytes" {
		t.Errorf("received %q", mem[4296:4306])
	}
}
