package iscsitcp

import (
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/uring"
)

func TestMain(m *testing.M) {
	before := openFiles()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
		if after := openFiles(); after > before+2 { // the runtime's own poller may appear
			os.Stderr.WriteString("descriptors were left open\n")
			code = 1
		}
	}
	os.Exit(code)
}

func openFiles() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(list)
}

// loop is a small reactor: one locked thread with a ring, the order of work of package dataplane.
type loop struct {
	ring  *uring.Ring
	event int
	slot  uring.Slot
	done  chan struct{}

	flush map[flusher]bool
	turns int

	mu   sync.Mutex // guards what follows
	work []func()
	stop bool
}

type flusher interface{ Flush() }

func newLoop(t testing.TB) *loop {
	t.Helper()
	l := &loop{done: make(chan struct{}), flush: make(map[flusher]bool)}
	started := make(chan error)
	go l.run(started)
	if err := <-started; err != nil {
		require.Need(t, "uring", err)
	}
	t.Cleanup(func() {
		l.mu.Lock()
		l.stop = true
		l.mu.Unlock()
		l.wake()
		<-l.done
	})
	return l
}

func (l *loop) run(started chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	defer close(l.done)
	var err error
	if l.ring, err = uring.New(uring.Config{SQEntries: 64, CQEntries: 1024}); err != nil {
		started <- err
		return
	}
	defer l.ring.Close()
	if l.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		started <- err
		return
	}
	defer unix.Close(l.event)
	l.slot = l.ring.Attach(l)
	l.arm()
	started <- nil
	for {
		if l.ring.NeedEnter() {
			l.enter(false)
		}
		n := l.ring.Dispatch()
		l.mu.Lock()
		work := l.work
		l.work = nil
		stop := l.stop
		l.mu.Unlock()
		for _, f := range work {
			f()
		}
		for f := range l.flush {
			f.Flush()
		}
		l.turns++
		if stop {
			return
		}
		if n+len(work) == 0 && !l.ring.Ready() {
			l.enter(true)
		}
	}
}

func (l *loop) enter(wait bool) {
	if err := l.ring.Enter(wait, time.Second); err != nil {
		panic(err)
	}
}

func (l *loop) arm() {
	sqe := l.ring.SQE()
	sqe.PrepPoll(l.event, unix.POLLIN)
	sqe.UserData = l.slot.Key(0)
}

// Complete takes a wake-up.
func (l *loop) Complete(uint32, int32, uint32) {
	var b [8]byte
	unix.Read(l.event, b[:])
	l.arm()
}

func (l *loop) wake() { unix.Write(l.event, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// do runs f on the loop, soon.
func (l *loop) do(f func()) {
	l.mu.Lock()
	l.work = append(l.work, f)
	l.mu.Unlock()
	l.wake()
}

// call runs f on the loop and waits for it.
func (l *loop) call(f func()) {
	done := make(chan struct{})
	l.do(func() {
		defer close(done)
		f()
	})
	<-done
}
