package uring

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/uapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newRing sets up a ring on the test's thread, which is locked for the test.
func newRing(t testing.TB, cfg Config) *Ring {
	t.Helper()
	runtime.LockOSThread()
	r, err := New(cfg)
	if errors.Is(err, ErrNotSupported) {
		require.Need(t, "uring", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
		runtime.UnlockOSThread()
	})
	return r
}

type completion struct {
	token uint32
	res   int32
	flags uint32
}

type recorder struct{ got []completion }

func (c *recorder) Complete(token uint32, res int32, flags uint32) {
	c.got = append(c.got, completion{token, res, flags})
}

// settle enters and dispatches until c has n completions.
func settle(t *testing.T, r *Ring, c *recorder, n int) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for len(c.got) < n {
		if time.Now().After(deadline) {
			t.Fatalf("%d completions, want %d", len(c.got), n)
		}
		if err := r.Enter(!r.Ready(), time.Second); err != nil {
			t.Fatal(err)
		}
		r.Dispatch()
	}
}

func TestNopOrderAndRouting(t *testing.T) {
	r := newRing(t, Config{SQEntries: 8, CQEntries: 1024})
	var a, b recorder
	sa, sb := r.Attach(&a), r.Attach(&b)
	for i := range uint32(100) { // many times the submission queue: SQE submits when it is full
		e := r.SQE()
		e.PrepNop()
		e.UserData = sa.Key(i)
		if i%10 == 0 {
			e = r.SQE()
			e.PrepNop()
			e.UserData = sb.Key(i)
		}
	}
	if !r.NeedEnter() {
		t.Error("NeedEnter is false with entries pending")
	}
	settle(t, r, &a, 100)
	settle(t, r, &b, 10)
	for i, c := range a.got {
		if c.token != uint32(i) || c.res != 0 {
			t.Fatalf("completion %d is %+v", i, c)
		}
	}
	if r.SQEs != 110 || r.CQEs != 110 || r.Enters == 0 {
		t.Errorf("counters: %d entries, %d completions, %d enters", r.SQEs, r.CQEs, r.Enters)
	}
	if r.Ready() || r.Pending() != 0 || r.NeedEnter() || r.Overflows() != 0 {
		t.Errorf("idle ring: ready %v, pending %d, need enter %v, overflows %d", r.Ready(), r.Pending(), r.NeedEnter(), r.Overflows())
	}
}

// resubmitter submits one more entry for each completion, from within Dispatch.
type resubmitter struct {
	r    *Ring
	s    Slot
	left int
	done int
}

func (c *resubmitter) Complete(token uint32, _ int32, _ uint32) {
	c.done++
	if c.left > 0 {
		c.left--
		e := c.r.SQE()
		e.PrepNop()
		e.UserData = c.s.Key(token)
	}
}

func TestSubmitFromCompleter(t *testing.T) {
	r := newRing(t, Config{SQEntries: 4, CQEntries: 8})
	c := &resubmitter{r: r, left: 1000}
	c.s = r.Attach(c)
	for i := range uint32(8) {
		e := r.SQE()
		e.PrepNop()
		e.UserData = c.s.Key(i)
	}
	for c.done < 1008 {
		if err := r.Enter(!r.Ready(), time.Second); err != nil {
			t.Fatal(err)
		}
		if r.Dispatch() == 0 {
			t.Fatalf("stuck after %d", c.done)
		}
	}
	if n := r.Overflows(); n != 0 {
		t.Errorf("%d completions overflowed with no more outstanding than the queue holds", n)
	}
}

func TestWaitTimesOut(t *testing.T) {
	r := newRing(t, Config{})
	start := time.Now()
	if err := r.Enter(true, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d < 15*time.Millisecond && r.Retries == 0 {
		t.Errorf("returned after %v without an event", d)
	}
	if n := r.Dispatch(); n != 0 {
		t.Errorf("%d completions out of nothing", n)
	}
}

func TestPollMultishotAndCancel(t *testing.T) {
	r := newRing(t, Config{})
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(efd)
	var c, x recorder
	s, sx := r.Attach(&c), r.Attach(&x)
	e := r.SQE()
	e.PrepPollMultishot(efd, unix.POLLIN)
	e.UserData = s.Key(7)
	if err := r.Enter(false, 0); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 8)
	for i := 1; i <= 3; i++ {
		// From another thread: the reactor's wake-up.
		go unix.Write(efd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		settle(t, r, &c, i)
		if g := c.got[i-1]; g.token != 7 || g.res&unix.POLLIN == 0 || g.flags&uapi.IORING_CQE_F_MORE == 0 {
			t.Fatalf("round %d: %+v", i, g)
		}
		if _, err := unix.Read(efd, buf); err != nil {
			t.Fatal(err)
		}
	}
	if n := r.Outstanding(s); n != 1 {
		t.Errorf("%d operations outstanding, want the poll alone", n)
	}
	e = r.SQE()
	e.PrepCancel(s.Key(7))
	e.UserData = sx.Key(0)
	settle(t, r, &x, 1)
	settle(t, r, &c, 4)
	if x.got[0].res != 0 || c.got[3].res != -int32(unix.ECANCELED) || c.got[3].flags&uapi.IORING_CQE_F_MORE != 0 {
		t.Errorf("cancel answered %+v, the poll %+v", x.got[0], c.got[3])
	}
	if n := r.Outstanding(s); n != 0 {
		t.Errorf("%d operations outstanding after the last completion", n)
	}
}

func TestSlotReuse(t *testing.T) {
	r := newRing(t, Config{})
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(efd)
	var old, young, x recorder
	s := r.Attach(&old)
	e := r.SQE()
	e.PrepPoll(efd, unix.POLLIN)
	e.UserData = s.Key(1)
	r.Detach(s) // with an operation outstanding
	r.Detach(s) // again: nothing
	if s2 := r.Attach(&young); s2 == s {
		t.Fatal("slot was given away while an operation was outstanding")
	}
	sx := r.Attach(&x)
	e = r.SQE()
	e.PrepCancel(s.Key(1))
	e.UserData = sx.Key(0)
	settle(t, r, &x, 1)
	for r.Outstanding(s) > 0 {
		if err := r.Enter(false, 0); err != nil {
			t.Fatal(err)
		}
		r.Dispatch()
	}
	if len(old.got) != 0 {
		t.Errorf("detached Completer heard %+v", old.got)
	}
	if s3 := r.Attach(&young); s3 != s {
		t.Errorf("free slot %d was not reused, got %d", s, s3)
	}
}

func TestReserve(t *testing.T) {
	r := newRing(t, Config{SQEntries: 8, CQEntries: 64})
	if err := r.Reserve(64); err != nil {
		t.Fatal(err)
	}
	if err := r.Reserve(1); !errors.Is(err, ErrFull) {
		t.Fatalf("over-reservation: %v", err)
	}
	r.Release(64)
	if err := r.Reserve(1); err != nil {
		t.Fatal(err)
	}
}

func TestReadWriteSocket(t *testing.T) {
	r := newRing(t, Config{})
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	copy(mem, "header payload")
	addr := func(off int) uintptr { return uintptr(unsafe.Pointer(&mem[off])) }
	// A msghdr with two iovecs, all off the heap.
	iov := (*[2]unix.Iovec)(unsafe.Pointer(&mem[1024]))
	iov[0].Base, iov[1].Base = &mem[0], &mem[7]
	iov[0].SetLen(7)
	iov[1].SetLen(7)
	msg := (*unix.Msghdr)(unsafe.Pointer(&mem[2048]))
	msg.Iov = &iov[0]
	msg.SetIovlen(2)
	var c recorder
	s := r.Attach(&c)
	e := r.SQE()
	e.PrepRecv(fds[1], addr(512), 14, unix.MSG_WAITALL)
	e.UserData = s.Key(1)
	if err := r.Enter(false, 0); err != nil {
		t.Fatal(err)
	}
	e = r.SQE()
	e.PrepSendmsg(fds[0], unsafe.Pointer(msg), unix.MSG_NOSIGNAL)
	e.UserData = s.Key(2)
	settle(t, r, &c, 2)
	if string(mem[512:526]) != "header payload" {
		t.Errorf("received %q", mem[512:526])
	}
	for _, g := range c.got {
		if g.res != 14 {
			t.Errorf("operation %d: result %d", g.token, g.res)
		}
	}
}

func TestTimeoutOperation(t *testing.T) {
	r := newRing(t, Config{})
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	ts := (*uapi.KernelTimespec)(unsafe.Pointer(&mem[0]))
	ts.Nsec = int64(time.Millisecond)
	var c recorder
	s := r.Attach(&c)
	e := r.SQE()
	e.PrepTimeout(ts, 0, 0)
	e.UserData = s.Key(0)
	settle(t, r, &c, 1)
	if c.got[0].res != -int32(unix.ETIME) {
		t.Errorf("timeout: result %d", c.got[0].res)
	}
}

// TestTaskrunFlag proves that a thread which never sleeps hears of an event through NeedEnter alone.
func TestTaskrunFlag(t *testing.T) {
	r := newRing(t, Config{})
	if !r.Deferred() {
		t.Skip("kernel without IORING_SETUP_DEFER_TASKRUN")
	}
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(efd)
	var c recorder
	s := r.Attach(&c)
	e := r.SQE()
	e.PrepPoll(efd, unix.POLLIN)
	e.UserData = s.Key(0)
	if err := r.Enter(false, 0); err != nil {
		t.Fatal(err)
	}
	enters := r.Enters
	go unix.Write(efd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	deadline := time.Now().Add(10 * time.Second)
	for len(c.got) == 0 {
		if time.Now().After(deadline) {
			t.Fatal("the event never showed")
		}
		if r.NeedEnter() {
			if err := r.Enter(false, 0); err != nil {
				t.Fatal(err)
			}
		}
		r.Dispatch()
	}
	if n := r.Enters - enters; n > 3 {
		t.Errorf("%d system calls for one event", n)
	}
}

func TestWrongThread(t *testing.T) {
	r := newRing(t, Config{})
	if !r.Deferred() {
		t.Skip("kernel without IORING_SETUP_SINGLE_ISSUER")
	}
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // the test's goroutine holds its own thread, so this is another
		defer runtime.UnlockOSThread()
		errs <- r.Enter(false, 0)
	}()
	if err := <-errs; !errors.Is(err, unix.EEXIST) {
		t.Errorf("Enter from another thread: %v", err)
	}
}

func TestSQPoll(t *testing.T) {
	r := newRing(t, Config{SQEntries: 4, CQEntries: 256, SQPoll: true, SQE128: true, SQThreadIdle: time.Millisecond})
	var c recorder
	s := r.Attach(&c)
	for round := range 3 {
		c.got = nil
		for i := range uint32(40) {
			e := r.SQE128()
			e.PrepNop()
			e.UserData = s.Key(i)
			if i%7 == 0 {
				if err := r.Enter(false, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
		settle(t, r, &c, 40)
		for i, g := range c.got {
			if g.token != uint32(i) || g.res != 0 {
				t.Fatalf("round %d, completion %d: %+v", round, i, g)
			}
		}
	}
}

func TestNoAllocation(t *testing.T) {
	r := newRing(t, Config{SQEntries: 64})
	c := &counter{}
	s := r.Attach(c)
	n := testing.AllocsPerRun(1000, func() {
		for i := range uint32(16) {
			e := r.SQE()
			e.PrepNop()
			e.UserData = s.Key(i)
		}
		if r.NeedEnter() {
			_ = r.Enter(false, 0)
		}
		_ = r.Enter(!r.Ready(), time.Second)
		r.Dispatch()
	})
	if n != 0 {
		t.Errorf("%v allocations per turn of the loop", n)
	}
	if c.n == 0 {
		t.Error("nothing was completed")
	}
}

type counter struct{ n int }

func (c *counter) Complete(uint32, int32, uint32) { c.n++ }

func TestSetupError(t *testing.T) {
	if err := setupError(unix.EPERM); !errors.Is(err, ErrNotSupported) || !errors.Is(err, unix.EPERM) {
		t.Errorf("EPERM: %v", err)
	}
	if err := setupError(unix.ENOSYS); !errors.Is(err, ErrNotSupported) {
		t.Errorf("ENOSYS: %v", err)
	}
}

func BenchmarkNopTurn(b *testing.B) {
	r := newRing(b, Config{SQEntries: 64})
	c := &counter{}
	s := r.Attach(c)
	for b.Loop() {
		for i := range uint32(16) {
			e := r.SQE()
			e.PrepNop()
			e.UserData = s.Key(i)
		}
		_ = r.Enter(false, 0)
		r.Dispatch()
	}
}
