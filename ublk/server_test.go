package ublk

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
)

// This file is the data plane of the guest tests: a process with two reactors that serves devices from a shared file, and does what it is
// told on its standard input, one line per command, one line per answer. Events go out as lines that start with "event".

// reactor is one ring on one locked thread. Others hand it functions through post.
type reactor struct {
	ring   *uring.Ring
	efd    int
	queues []*Queue

	mu    sync.Mutex
	inbox []func()
}

func newReactor() *reactor {
	ready := make(chan *reactor)
	go func() {
		runtime.LockOSThread()
		ring, err := uring.New(uring.Config{SQEntries: 64})
		if err != nil {
			panic(err)
		}
		efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			panic(err)
		}
		r := &reactor{ring: ring, efd: efd}
		e := ring.SQE()
		e.PrepPollMultishot(efd, unix.POLLIN)
		e.UserData = ring.Attach(r).Key(0)
		ready <- r
		r.run()
	}()
	return <-ready
}

func (r *reactor) run() {
	for {
		if r.ring.NeedEnter() {
			if err := r.ring.Enter(false, 0); err != nil {
				panic(err)
			}
		}
		if r.ring.Dispatch() > 0 || r.ring.NeedEnter() {
			continue
		}
		if err := r.ring.Enter(true, -1); err != nil {
			panic(err)
		}
	}
}

// Complete runs the functions that were posted.
func (r *reactor) Complete(uint32, int32, uint32) {
	var b [8]byte
	_, _ = unix.Read(r.efd, b[:])
	r.mu.Lock()
	inbox := r.inbox
	r.inbox = nil
	r.mu.Unlock()
	for _, f := range inbox {
		f()
	}
}

// post runs f on the reactor and waits for it.
func (r *reactor) post(f func()) {
	done := make(chan struct{})
	r.mu.Lock()
	r.inbox = append(r.inbox, func() { f(); close(done) })
	r.mu.Unlock()
	_, _ = unix.Write(r.efd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	<-done
}

// ram serves one queue of a device from memory.
type ram struct {
	mem    []byte
	hold   bool
	held   []*Request
	shared int // requests that came with the index of a buffer
}

func (m *ram) Submit(r *Request) {
	if m.hold {
		m.held = append(m.held, r)
		return
	}
	m.serve(r)
}

func (m *ram) serve(r *Request) {
	if r.desc.OpFlags&uapi.UBLK_IO_F_SHMEM_ZC != 0 {
		m.shared++
	}
	off, n := int(r.Sector().Bytes()), r.Len()
	if off+n > len(m.mem) {
		r.Complete(-int32(unix.EIO))
		return
	}
	var err error
	switch op := r.Op(); {
	case r.Tag()%2 == 0 && (op == OpRead || op == OpWrite): // every other tag by the ring
		done := true
		if op == OpRead {
			done, err = r.Scatter(m.mem[off : off+n])
		} else {
			done, err = r.Gather(m.mem[off : off+n])
		}
		if !done {
			return
		}
	case op == OpRead:
		err = r.CopyOut(m.mem[off:off+n], 0)
	case op == OpWrite:
		// In two pieces, to try offsets.
		half := n / 2 &^ 511
		if err = r.CopyIn(m.mem[off:off+half], 0); err == nil {
			err = r.CopyIn(m.mem[off+half:off+n], half)
		}
	case op == OpFlush:
		n = 0
	case op == OpDiscard, op == OpWriteZeroes:
		clear(m.mem[off : off+n])
		n = 0
	}
	m.answer(r, n, err)
}

// Copied ends a request whose copy was made by the ring.
func (m *ram) Copied(r *Request, err error) { m.answer(r, r.Len(), err) }

// Lent is not asked for.
func (m *ram) Lent(r *Request, err error) { r.Complete(-int32(unix.EIO)) }

func (m *ram) answer(r *Request, n int, err error) {
	if err != nil {
		var errno unix.Errno
		if !errors.As(err, &errno) {
			errno = unix.EIO
		}
		r.Complete(-int32(errno))
		return
	}
	r.Complete(int32(n))
}

type served struct {
	dev    *Device
	mem    []byte
	queues []*Queue
	rams   []*ram
}

type server struct {
	reactors []*reactor
	devices  map[int]*served
	mallocs  uint64
	mu       sync.Mutex // output
	out      io.Writer
}

func (s *server) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

func runServer(in io.Reader, out io.Writer) error {
	s := &server{devices: make(map[int]*served), out: out, reactors: []*reactor{newReactor(), newReactor()}}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		answer, err := s.do(lines.Text())
		if err != nil {
			s.say("err %v", err)
		} else {
			s.say("ok %s", answer)
		}
	}
	return lines.Err()
}

func (s *server) do(line string) (string, error) {
	var (
		id, queues, depth, open int
		path                    string
	)
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "attach": // ID QUEUES DEPTH OPEN PATH; only the first OPEN queues are fetched
		if _, err := fmt.Sscan(rest, &id, &queues, &depth, &open, &path); err != nil {
			return "", err
		}
		return "", s.attach(id, depth, open, path)
	case "detach":
		fmt.Sscan(rest, &id)
		return "", s.detach(id)
	case "close": // of queues and device, without waiting
		fmt.Sscan(rest, &id)
		return "", s.close(id)
	case "hold", "release":
		fmt.Sscan(rest, &id)
		d := s.devices[id]
		for i, m := range d.rams {
			s.reactors[i].post(func() {
				m.hold = verb == "hold"
				if !m.hold {
					held := m.held
					m.held = nil
					for _, r := range held {
						m.serve(r)
					}
				}
			})
		}
		return "", nil
	case "held":
		fmt.Sscan(rest, &id)
		n := 0
		for i, m := range s.devices[id].rams {
			s.reactors[i].post(func() { n += len(m.held) })
		}
		return fmt.Sprint(n), nil
	case "shared":
		fmt.Sscan(rest, &id)
		n := 0
		for i, m := range s.devices[id].rams {
			s.reactors[i].post(func() { n += m.shared; m.shared = 0 })
		}
		return fmt.Sprint(n), nil
	case "stats":
		fmt.Sscan(rest, &id)
		var sum Stats
		for i, q := range s.devices[id].queues {
			s.reactors[i].post(func() {
				sum.Reads += q.Stats.Reads
				sum.Writes += q.Stats.Writes
				sum.Flushes += q.Stats.Flushes
				sum.Discards += q.Stats.Discards
				sum.WriteZeroes += q.Stats.WriteZeroes
				sum.Errors += q.Stats.Errors
				sum.Double += q.Stats.Double
				sum.Short += q.Stats.Short
			})
		}
		return fmt.Sprintf("%d %d %d %d %d %d %d", sum.Reads, sum.Writes, sum.Flushes, sum.Discards, sum.WriteZeroes, sum.Errors, sum.Double+sum.Short), nil
	case "refused":
		fmt.Sscan(rest, &id)
		var errs []error
		for i, q := range s.devices[id].queues {
			s.reactors[i].post(func() { errs = append(errs, q.Refused()) })
		}
		if err := errors.Join(errs...); err != nil {
			return strings.ReplaceAll(err.Error(), "\n", "; "), nil
		}
		return "", nil
	case "cancel": // what IORING_OP_ASYNC_CANCEL says of a fetched tag
		fmt.Sscan(rest, &id)
		q := s.devices[id].queues[0]
		got := make(chan int32, 1)
		s.reactors[0].post(func() {
			ring := s.reactors[0].ring
			e := ring.SQE()
			e.PrepCancel(q.slot.Key(0))
			e.UserData = ring.Attach(completerFunc(func(res int32) { got <- res })).Key(0)
		})
		return fmt.Sprint(<-got), nil
	case "mallocs": // since the last time
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		n := m.Mallocs - s.mallocs
		s.mallocs = m.Mallocs
		return fmt.Sprint(n), nil
	case "fds":
		return fmt.Sprint(countFDs()), nil
	case "maps":
		b, err := os.ReadFile("/proc/self/maps")
		return fmt.Sprint(strings.Count(string(b), "/dev/ublkc")), err
	}
	return "", fmt.Errorf("unknown command %q", line)
}

type completerFunc func(res int32)

func (f completerFunc) Complete(_ uint32, res int32, _ uint32) { f(res) }

func countFDs() int {
	entries, _ := os.ReadDir("/proc/self/fd")
	return len(entries)
}

func (s *server) attach(id, depth, open int, path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	d, err := Open(id)
	if err != nil {
		return err
	}
	sv := &served{dev: d, mem: mem}
	for i := range open {
		m := &ram{mem: mem}
		s.reactors[i].post(func() {
			var q *Queue
			if q, err = d.OpenQueue(s.reactors[i].ring, i, depth, m); err != nil {
				return
			}
			q.OnGone(func() { s.say("event gone %d %d", id, i) })
			sv.queues = append(sv.queues, q)
			sv.rams = append(sv.rams, m)
		})
		if err != nil {
			return err
		}
	}
	s.devices[id] = sv
	return nil
}

func (s *server) close(id int) error {
	sv := s.devices[id]
	if sv == nil {
		return fmt.Errorf("device %d is not attached", id)
	}
	var errs []error
	for i, q := range sv.queues {
		s.reactors[i].post(func() { errs = append(errs, q.Close(), q.Close()) })
	}
	errs = append(errs, sv.dev.Close(), sv.dev.Close())
	return errors.Join(errs...)
}

func (s *server) detach(id int) error {
	sv := s.devices[id]
	if err := s.close(id); err != nil {
		return err
	}
	select {
	case <-sv.dev.Released():
	case <-time.After(20 * time.Second):
		return fmt.Errorf("device %d was not released", id)
	}
	delete(s.devices, id)
	return unix.Munmap(slices.Clip(sv.mem))
}
