package ublk

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
)

// bench makes a queue without a driver: descriptors in Go memory, a descriptor that is none, so that the kernel refuses every command. Its
// completions are dropped, for the keys are those of slot 0.
func bench(t testing.TB, depth int, h Handler) *Queue {
	t.Helper()
	runtime.LockOSThread()
	ring, err := uring.New(uring.Config{SQEntries: 64})
	if errors.Is(err, uring.ErrNotSupported) {
		require.Need(t, "uring", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ring.Close(); runtime.UnlockOSThread() })
	d := &Device{id: 7, fd: -1, released: make(chan struct{})}
	d.refs.Store(2)
	if err := ring.Reserve(depth); err != nil {
		t.Fatal(err)
	}
	q := newQueue(d, ring, 1, depth, h)
	ring.Detach(q.slot)
	q.slot = 0
	q.descs = make([]uapi.UblksrvIoDesc, depth)
	return q
}

// results gives the results in the last n entries on the ring, which has not wrapped around.
func results(q *Queue, n int) []int32 {
	e := q.ring.SQE()
	e.PrepNop()
	var got []int32
	for i := n; i > 0; i-- {
		prev := (*uapi.SQE)(unsafe.Add(unsafe.Pointer(e), -i*int(unsafe.Sizeof(*e))))
		got = append(got, (*uapi.UblksrvIoCmd)(unsafe.Pointer(&prev.Cmd)).Result)
	}
	return got
}

type handlerFunc func(r *Request)

func (f handlerFunc) Submit(r *Request)      { f(r) }
func (f handlerFunc) Copied(*Request, error) {}
func (f handlerFunc) Lent(*Request, error)   {}

func TestRequestFields(t *testing.T) {
	var got *Request
	q := bench(t, 4, handlerFunc(func(r *Request) { got = r }))
	q.descs[3] = uapi.UblksrvIoDesc{OpFlags: uint32(uapi.UBLK_IO_OP_WRITE) | uapi.UBLK_IO_F_FUA, NrSectors: 16, StartSector: 1 << 33}
	q.Complete(3, 0, 0)
	q.descs[3] = uapi.UblksrvIoDesc{} // the driver reuses the place
	r := got
	if r.Op() != OpWrite || r.Flags() != FlagFUA || r.Tag() != 3 || r.Sector() != 1<<33 || r.Sectors() != 16 || r.Len() != 8192 || r.Queue() != q {
		t.Errorf("request %v, flags %#x, tag %d", r, r.Flags(), r.Tag())
	}
	if s := r.String(); s != "WRITE tag 3 sector 8589934592 +16" {
		t.Errorf("String gives %q", s)
	}
	// Position of user copies: 0x80000000 + (queue << 41) + (tag << 25), include/uapi/linux/ublk_cmd.h.
	if r.pos != 0x80000000+1<<41+3<<25 {
		t.Errorf("data at %#x", r.pos)
	}
	if q.Idle() || q.InFlight() != 1 {
		t.Error("a request is out and the queue calls itself idle")
	}
	buf := make([]byte, 8192)
	for name, err := range map[string]error{
		"wrong direction": r.CopyOut(buf, 0), "too long": r.CopyIn(buf, 512), "negative": r.CopyIn(buf, -1), "far off": r.CopyIn(nil, 8193),
	} {
		if err != unix.EINVAL {
			t.Errorf("copy, %s: %v", name, err)
		}
	}
	if err := r.CopyIn(buf, 0); err != unix.EBADF {
		t.Errorf("copy from a closed descriptor: %v", err)
	}
	r.Complete(8192)
	if !q.Idle() || q.Stats.WriteBytes != 8192 || q.Stats.Errors != 0 || q.ring.Pending() != 1 {
		t.Errorf("after Complete: %+v, %d entries", q.Stats, q.ring.Pending())
	}
	if err := r.CopyIn(buf, 0); err != unix.EINVAL {
		t.Errorf("copy after Complete: %v", err)
	}
}

// TestLend puts pages into the ring's table before the handler goes on, and takes them out before the commit.
func TestLend(t *testing.T) {
	var got *Request
	q := bench(t, 4, handlerFunc(func(r *Request) { got = r }))
	q.descs[2] = uapi.UblksrvIoDesc{OpFlags: uint32(uapi.UBLK_IO_OP_READ), NrSectors: 8}
	q.Complete(2, 0, 0)
	if got.Lend() {
		t.Fatal("a queue without places lends")
	}
	q.fixed = 100
	if !got.Lend() {
		t.Fatal("does not lend")
	}
	q.Complete(2|tokenLend, 0, 0)
	if place, base := got.Fixed(); place != 102 || base != 0 || q.Stats.Lent != 1 {
		t.Errorf("place %d, base %#x, %+v", place, base, q.Stats)
	}
	got.Complete(4096)
	want := []uint32{uapi.UBLK_U_IO_REGISTER_IO_BUF, uapi.UBLK_U_IO_UNREGISTER_IO_BUF, uapi.UBLK_U_IO_COMMIT_AND_FETCH_REQ}
	if list := commands(q, 3); !slices.Equal(list, want) {
		t.Errorf("commands %#x, want %#x", list, want)
	}
	// A driver that refuses is not asked again.
	q.Complete(2, 0, 0)
	got.Lend()
	q.Complete(2|tokenLend, -int32(unix.EINVAL), 0)
	if got.Lend() {
		t.Error("lends again what the driver refuses")
	}
	got.Complete(4096)
	if last := commands(q, 1)[0]; last != uapi.UBLK_U_IO_COMMIT_AND_FETCH_REQ || q.Stats.Lent != 1 {
		t.Errorf("last command %#x, %+v", last, q.Stats)
	}
}

// commands gives the driver's commands in the last n entries on the ring, which has not wrapped around.
func commands(q *Queue, n int) []uint32 {
	e := q.ring.SQE()
	var got []uint32
	for i := n; i > 0; i-- {
		prev := (*uapi.SQE)(unsafe.Add(unsafe.Pointer(e), -i*int(unsafe.Sizeof(*e))))
		got = append(got, uint32(prev.Off))
	}
	return got
}

// TestResults looks at the result that goes to the driver, in the entry on the ring.
func TestResults(t *testing.T) {
	for _, c := range []struct {
		name      string
		op        uint8
		sectors   uint32
		res, want int32
		short     uint64
	}{
		{"whole read", uapi.UBLK_IO_OP_READ, 8, 4096, 4096, 0},
		{"short read is an error", uapi.UBLK_IO_OP_READ, 8, 512, -int32(unix.EIO), 1},
		{"empty write is an error, or it would come back for ever", uapi.UBLK_IO_OP_WRITE, 8, 0, -int32(unix.EIO), 1},
		{"more than all is an error", uapi.UBLK_IO_OP_WRITE, 8, 4608, -int32(unix.EIO), 1},
		{"errno", uapi.UBLK_IO_OP_WRITE, 8, -int32(unix.ENOLINK), -int32(unix.ENOLINK), 0},
		{"flush", uapi.UBLK_IO_OP_FLUSH, 0, 0, 0, 0},
		{"a byte count makes no sense for discard", uapi.UBLK_IO_OP_DISCARD, 8, 4096, 0, 0},
		{"write zeroes", uapi.UBLK_IO_OP_WRITE_ZEROES, 8, 0, 0, 0},
		{"unknown operation", 77, 8, 0, -int32(unix.EOPNOTSUPP), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := bench(t, 1, handlerFunc(func(r *Request) { r.Complete(c.res) }))
			q.descs[0] = uapi.UblksrvIoDesc{OpFlags: uint32(c.op), NrSectors: c.sectors}
			q.Complete(0, 0, 0)
			got := results(q, 1)[0]
			if got != c.want || q.Stats.Short != c.short || !q.Idle() {
				t.Errorf("result %d, want %d; %+v", got, c.want, q.Stats)
			}
			if (c.want < 0) != (q.Stats.Errors == 1) {
				t.Errorf("errors counted: %d", q.Stats.Errors)
			}
		})
	}
}

func TestDoubleComplete(t *testing.T) {
	var got *Request
	q := bench(t, 1, handlerFunc(func(r *Request) { got = r }))
	q.descs[0] = uapi.UblksrvIoDesc{NrSectors: 1}
	q.Complete(0, 0, 0)
	got.Complete(512)
	func() {
		defer func() {
			if v := recover(); v == nil || !strings.Contains(v.(string), "second Complete") {
				t.Errorf("panic %v", v)
			}
		}()
		got.Complete(512)
	}()
	strict = false
	defer func() { strict = true }()
	got.Complete(512)
	if q.Stats.Double != 2 || q.ring.Pending() != 1 || q.InFlight() != 0 {
		t.Errorf("%+v, %d entries, %d out", q.Stats, q.ring.Pending(), q.InFlight())
	}
}

func TestGoneThenClose(t *testing.T) {
	q := bench(t, 3, handlerFunc(func(r *Request) { r.Complete(int32(r.Len())) }))
	gone := 0
	q.OnGone(func() { gone++ })
	for tag := range uint32(3) {
		if q.Gone() || gone != 0 {
			t.Fatal("gone with tags at the driver")
		}
		q.Complete(tag, -int32(unix.ENODEV), 0)
		q.Complete(tag, -int32(unix.ENODEV), 0) // never counted twice
	}
	if !q.Gone() || gone != 1 || q.Refused() != nil {
		t.Errorf("gone %v, called %d times, refused %v", q.Gone(), gone, q.Refused())
	}
	q.OnGone(func() { gone++ })
	if gone != 2 {
		t.Error("OnGone of a queue that is gone was not called at once")
	}
	q.dev.Close()
	if open(q.dev) == false {
		t.Error("device released before its queue was closed")
	}
	if err := errors.Join(q.Close(), q.Close(), q.dev.Close()); err != nil {
		t.Error(err)
	}
	if open(q.dev) {
		t.Error("device not released")
	}
}

func open(d *Device) bool {
	select {
	case <-d.Released():
		return false
	default:
		return true
	}
}

// TestCloseThenGone closes a queue with one request at the handler and tags at the driver.
func TestCloseThenGone(t *testing.T) {
	var held *Request
	q := bench(t, 2, handlerFunc(func(r *Request) { held = r }))
	q.descs[0] = uapi.UblksrvIoDesc{NrSectors: 1}
	q.Complete(0, 0, 0)
	q.dev.Close()
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	q.Complete(1, 0, 0) // a request after Close: there is no descriptor to look at
	held.Complete(512)
	if got := results(q, 2); got[0] != -int32(unix.ENODEV) || got[1] != 512 {
		t.Errorf("results %v", got)
	}
	q.Complete(1, -int32(unix.ENODEV), 0)
	if !open(q.dev) {
		t.Error("device released with a tag at the driver")
	}
	q.Complete(0, -int32(unix.ENODEV), 0)
	if open(q.dev) || !q.Gone() {
		t.Error("device not released")
	}
}

func TestRefused(t *testing.T) {
	q := bench(t, 2, handlerFunc(func(*Request) {}))
	q.Complete(0, -int32(unix.EINVAL), 0)
	q.Complete(1, -int32(unix.ENODEV), 0)
	if !q.Gone() || !errors.Is(q.Refused(), unix.EINVAL) {
		t.Errorf("gone %v, refused %v", q.Gone(), q.Refused())
	}
	q.Complete(9, 0, 0) // no such tag
}

func TestRingClosed(t *testing.T) {
	var held *Request
	q := bench(t, 2, handlerFunc(func(r *Request) { held = r }))
	q.Complete(0, 0, 0)
	q.dev.Close()
	if err := q.ring.Close(); err != nil {
		t.Fatal(err)
	}
	held.Complete(0)
	if err := q.Close(); err != nil || !q.Gone() || open(q.dev) {
		t.Errorf("close after the ring: %v, gone %v", err, q.Gone())
	}
	if _, err := q.dev.OpenQueue(q.ring, 0, 1, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("OpenQueue of a closed device: %v", err)
	}
}

func TestOpenQueueLimits(t *testing.T) {
	q := bench(t, 1, nil)
	for _, c := range [][2]int{{-1, 1}, {4096, 1}, {0, 0}, {0, 4097}} {
		if _, err := q.dev.OpenQueue(q.ring, c[0], c[1], nil); !errors.Is(err, unix.EINVAL) {
			t.Errorf("queue %d, depth %d: %v", c[0], c[1], err)
		}
	}
	if err := q.ring.Reserve(16380); err != nil {
		t.Fatal(err)
	}
	if _, err := q.dev.OpenQueue(q.ring, 0, 16, nil); !errors.Is(err, uring.ErrFull) {
		t.Errorf("more tags than completions: %v", err)
	}
	if _, err := q.dev.OpenQueue(q.ring, 0, 1, nil); !errors.Is(err, unix.EBADF) {
		t.Errorf("no device: %v", err)
	}
}

func TestNoAllocation(t *testing.T) {
	q := bench(t, 16, handlerFunc(func(r *Request) { r.Complete(int32(r.Len())) }))
	for i := range q.descs {
		q.descs[i] = uapi.UblksrvIoDesc{OpFlags: uint32(i % 2), NrSectors: 8, StartSector: uint64(i)}
	}
	n := testing.AllocsPerRun(500, func() {
		for tag := range uint32(16) {
			q.Complete(tag, 0, 0)
		}
		_ = q.ring.Enter(false, 0)
		q.ring.Dispatch()
	})
	if n != 0 {
		t.Errorf("%v allocations for 16 requests", n)
	}
	if q.Stats.Errors != 0 || q.Stats.Reads < 4000 || q.Stats.Writes < 4000 {
		t.Errorf("%+v", q.Stats)
	}
}

func BenchmarkSubmitComplete(b *testing.B) {
	q := bench(b, 1, handlerFunc(func(r *Request) { r.Complete(int32(r.Len())) }))
	q.descs[0] = uapi.UblksrvIoDesc{NrSectors: 8}
	n := 0
	for b.Loop() {
		q.Complete(0, 0, 0)
		if n++; n%32 == 0 {
			_ = q.ring.Enter(false, 0)
			q.ring.Dispatch()
		}
	}
}
