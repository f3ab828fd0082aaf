package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/rdma"
)

// One turn of a reactor, in order:
//
//	poll      completion queues -> responses -> results queued as COMMIT
//	dispatch  ring completions  -> new requests, socket data, messages -> commands queued as Send
//	flush     ring the doorbells once for everything queued
//	sleep     submit what is queued and wait for more, in one system call
//
// A turn that found work for which others would have had to be waited for costs one io_uring_enter and one doorbell, however many requests
// it carried. Everything here runs on one locked OS thread; messages (Do) are the only way in from elsewhere.

// Reactor is one data-path thread with everything it owns: a ring, the completion queues of the adapters, a buffer pool, queues and
// sessions.
type Reactor struct {
	plane  *Plane
	index  int
	ring   *uring.Ring
	memory *lu.Memory

	commands *mempool.Pool // data of control commands
	clock    clock

	flushers []flusher // sessions, in the order they were added
	cqs      []*rdma.CQ
	spin     spinner
	pulse    metronome
	beats    int // completions of this turn that are only beats of pulse
	stats    ipc.ReactorStats

	event struct { // wakes the reactor for messages
		fd   int
		slot uring.Slot
	}

	arrived  atomic.Bool // inbox is not empty: looked at in every turn, without the lock
	sleeping atomic.Bool // the eventfd has to be written
	mu       sync.Mutex  // guards what follows; held for a few instructions only
	inbox    []func()
	stopped  bool

	batch   []func()
	stop    bool
	done    chan struct{}
	devices map[*rdma.Device]*adapter // used by control goroutines
	pools   []*mempool.Pool           // data of requests: what memory has
	ending  bool                      // Stop has begun
	lock    sync.Mutex                // guards the three
}

type flusher interface {
	Flush()
	Tick(now time.Time) (next time.Time)
}

// ringEntries bound what may be in flight on one ring: one FETCH per tag of every queue, sockets and polls. The completion ring is
// several times larger, so that it cannot overflow.
const (
	ringEntries       = 4096
	completionEntries = 65536
	cqEntries         = 16384
)

// newReactor starts a reactor.
func newReactor(p *Plane, index int) (*Reactor, error) {
	r := &Reactor{
		plane:   p,
		index:   index,
		done:    make(chan struct{}),
		devices: make(map[*rdma.Device]*adapter),
	}
	if err := r.openPools(); err != nil {
		return nil, fmt.Errorf("reactor %d: %w", index, err)
	}
	started := make(chan error)
	go r.run(started)
	if err := <-started; err != nil {
		r.closePools()
		return nil, fmt.Errorf("reactor %d: %w", index, err)
	}
	return r, nil
}

// run is the body of the reactor's thread.
func (r *Reactor) run(started chan<- error) {
	runtime.LockOSThread() // never unlocked: the kernel ties queues to this thread
	defer close(r.done)
	if err := r.open(); err != nil {
		started <- err
		return
	}
	started <- nil
	r.loop()
	r.close()
}

func (r *Reactor) open() error {
	_ = unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) // needs CAP_SYS_RESOURCE; without it only reclaim under pressure suffers
	ring, err := uring.New(uring.Config{SQEntries: ringEntries, CQEntries: completionEntries})
	if err != nil {
		return err
	}
	r.ring = ring
	if r.event.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		ring.Close()
		return fmt.Errorf("eventfd: %w", err)
	}
	if err := ring.OpenBuffers(uring.MaxBuffers); err != nil && !errors.Is(err, uring.ErrNotSupported) {
		r.plane.log.WithField("reactor", r.index).WithError(err).Warn("TCP goes without registered buffers")
	}
	r.event.slot = ring.Attach(wakeup{r})
	r.armEvent()
	r.pulse.open(r)
	return nil
}

func (r *Reactor) close() {
	r.ring.Close()
	unix.Close(r.event.fd)
}

// wakeup receives the completions of the poll on the message eventfd.
type wakeup struct{ r *Reactor }

func (w wakeup) Complete(_ uint32, res int32, flags uint32) {
	var b [8]byte
	unix.Read(w.r.event.fd, b[:])
	_ = binary.NativeEndian.Uint64(b[:])
	if flags&uapi.IORING_CQE_F_MORE == 0 {
		w.r.armEvent()
	}
}

func (r *Reactor) armEvent() {
	sqe := r.ring.SQE()
	sqe.PrepPollMultishot(r.event.fd, unix.POLLIN)
	sqe.UserData = r.event.slot.Key(0)
}

// Do runs f on the reactor, soon. It never blocks. After Stop it does nothing.
func (r *Reactor) Do(f func()) {
	r.mu.Lock()
	if r.stopped {
		r.mu.Unlock()
		return
	}
	r.inbox = append(r.inbox, f)
	r.arrived.Store(true)
	r.mu.Unlock()
	if r.sleeping.Swap(false) {
		var b [8]byte
		binary.NativeEndian.PutUint64(b[:], 1)
		unix.Write(r.event.fd, b[:])
	}
}

// Call runs f on the reactor and waits for it.
func (r *Reactor) Call(f func()) {
	done := make(chan struct{})
	r.Do(func() {
		defer close(done)
		f()
	})
	select {
	case <-done:
	case <-r.done:
	}
}

// Stop ends the reactor. Its queues and sessions must be gone.
func (r *Reactor) Stop() {
	r.lock.Lock()
	r.ending = true
	r.lock.Unlock()
	r.Do(func() { r.stop = true })
	<-r.done
	r.mu.Lock()
	r.stopped, r.inbox = true, nil
	r.mu.Unlock()
	r.lock.Lock()
	for dev, a := range r.devices {
		a.close()
		delete(r.devices, dev)
	}
	r.closePools()
	r.lock.Unlock()
}

// takeMessages runs what others have sent.
func (r *Reactor) takeMessages() int {
	if !r.arrived.Load() {
		return 0
	}
	r.mu.Lock()
	r.batch, r.inbox = r.inbox, r.batch[:0]
	r.arrived.Store(false)
	r.mu.Unlock()
	for i, f := range r.batch {
		r.batch[i] = nil
		f()
	}
	return len(r.batch)
}

// loop is the turn, for ever.
func (r *Reactor) loop() {
	for spinning := false; ; {
		work := r.ring.Dispatch() - r.beats
		r.beats = 0
		work += r.poll(spinning)
		work += r.takeMessages()
		for _, f := range r.flushers {
			f.Flush()
		}
		for _, cq := range r.cqs {
			cq.Flush()
		}
		if work > 0 {
			r.stats.Turns++
			r.pulse.worked()
		}
		if r.stop {
			return
		}
		if spinning = r.spin.goOn(work > 0); spinning {
			if r.ring.NeedEnter() {
				r.enter()
			}
			continue
		}
		r.sleep()
	}
}

// poll takes up to 64 completions from each adapter. One that is armed says when it has some, and is only asked if all are wanted.
func (r *Reactor) poll(all bool) int {
	work := 0
	for _, cq := range r.cqs {
		if !all && cq.Armed() {
			continue
		}
		n, err := cq.Poll()
		if err != nil {
			// A dead adapter. Its connections hear of it by an event, or by the silence that follows.
			r.cqs = slices.DeleteFunc(slices.Clone(r.cqs), func(c *rdma.CQ) bool { return c == cq })
		}
		work += n
	}
	return work
}

func (r *Reactor) tick(now time.Time) {
	r.clock.advance(now)
	r.clock.tick(now, r.flushers)
}

// sleep submits what is queued and waits for the ring. Whatever could have come between the last poll and the wait is looked for once more
// after every source is armed.
func (r *Reactor) sleep() {
	r.sleeping.Store(true)
	defer r.sleeping.Store(false)
	if r.arrived.Load() {
		return
	}
	work := 0
	for _, cq := range r.cqs {
		if cq.Armed() {
			continue
		}
		cq.Arm()
		for !cq.Armed() { // more than a batch may be there, and raises no notification any more
			n, err := cq.Poll()
			if work += n; err != nil || n == 0 {
				break
			}
		}
	}
	if work > 0 || r.ring.Ready() {
		if work > 0 {
			r.stats.Turns++
			r.pulse.worked()
		}
		if r.ring.NeedEnter() {
			r.enter()
		}
		return
	}
	r.stats.Sleeps++
	if !r.pulse.quiet {
		r.check(r.ring.Doze(-1))
		return
	}
	// Timers have nobody else to look after them now.
	begin := time.Now()
	r.tick(begin)
	if r.ring.NeedEnter() || r.arrived.Load() {
		r.enter()
		return
	}
	r.stats.DeepSleeps++
	r.check(r.ring.Enter(true, r.clock.until(begin)))
	if time.Since(begin) > beat {
		r.pulse.streak = 0
	}
}

func (r *Reactor) enter() { r.check(r.ring.Enter(false, 0)) }

func (r *Reactor) check(err error) {
	if err != nil {
		panic(fmt.Sprintf("reactor %d: io_uring_enter: %v", r.index, err))
	}
}
