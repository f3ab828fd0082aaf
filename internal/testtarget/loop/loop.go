// Package loop is a reactor for tests: one locked thread with a ring, and the order of work of package dataplane without its devices.
package loop

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/uring"
)

// buffers is the size of the ring's table of registered buffers, where the kernel has what it takes.
const buffers = 64

// Loop is a running reactor. It ends with its test.
type Loop struct {
	Ring *uring.Ring // used on the loop only

	event int
	slot  uring.Slot
	done  chan struct{}
	flush []Flusher

	mu   sync.Mutex // guards what follows
	work []func()
	stop bool
}

// A Flusher is flushed once per turn; a session is one.
type Flusher interface{ Flush() }

// New starts a loop. The test skips where io_uring is not available.
func New(t testing.TB) *Loop {
	t.Helper()
	l := &Loop{done: make(chan struct{})}
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

// Add has f flushed in each turn. Call it on the loop.
func (l *Loop) Add(f Flusher) { l.flush = append(l.flush, f) }

// Remove is the opposite of Add.
func (l *Loop) Remove(f Flusher) {
	for i, g := range l.flush {
		if g == f {
			l.flush = append(l.flush[:i:i], l.flush[i+1:]...)
			return
		}
	}
}

// Do runs f on the loop, soon.
func (l *Loop) Do(f func()) {
	l.mu.Lock()
	l.work = append(l.work, f)
	l.mu.Unlock()
	l.wake()
}

// Call runs f on the loop and waits for it.
func (l *Loop) Call(f func()) {
	done := make(chan struct{})
	l.Do(func() {
		defer close(done)
		f()
	})
	<-done
}

func (l *Loop) run(started chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	defer close(l.done)
	var err error
	if l.Ring, err = uring.New(uring.Config{SQEntries: 64, CQEntries: 1024}); err != nil {
		started <- err
		return
	}
	defer l.Ring.Close()
	if err = l.Ring.OpenBuffers(buffers); err != nil && !errors.Is(err, uring.ErrNotSupported) {
		started <- err
		return
	}
	if l.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		started <- err
		return
	}
	defer unix.Close(l.event)
	l.slot = l.Ring.Attach(l)
	l.arm()
	started <- nil
	for {
		if l.Ring.NeedEnter() {
			l.enter(false)
		}
		n := l.Ring.Dispatch()
		l.mu.Lock()
		work := l.work
		l.work = nil
		stop := l.stop
		l.mu.Unlock()
		for _, f := range work {
			f()
		}
		for _, f := range l.flush {
			f.Flush()
		}
		if stop {
			return
		}
		if n+len(work) == 0 && !l.Ring.Ready() {
			l.enter(true)
		}
	}
}

func (l *Loop) enter(wait bool) {
	if err := l.Ring.Enter(wait, time.Second); err != nil {
		panic(err)
	}
}

func (l *Loop) arm() {
	sqe := l.Ring.SQE()
	sqe.PrepPoll(l.event, unix.POLLIN)
	sqe.UserData = l.slot.Key(0)
}

// Complete takes a wake-up. It implements uring.Completer.
func (l *Loop) Complete(uint32, int32, uint32) {
	var b [8]byte
	unix.Read(l.event, b[:])
	l.arm()
}

func (l *Loop) wake() { unix.Write(l.event, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }
