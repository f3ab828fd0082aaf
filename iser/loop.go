package iser

import (
	"encoding/binary"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/rdma"
)

// Loop is the owner of a single connection outside the data plane: a discovery session. It is a goroutine that sleeps in poll(2) on the
// completion channel and on a message descriptor.
type Loop struct {
	Config Config // for [New]

	event int
	mu    sync.Mutex
	queue []func()
	stop  bool
	done  chan struct{}
}

// NewLoop starts a loop with a completion queue of its own on dev.
func NewLoop(dev *rdma.Device) (*Loop, error) {
	l := &Loop{done: make(chan struct{})}
	var err error
	if l.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	domain, err := NewDomain(dev)
	if err != nil {
		unix.Close(l.event)
		return nil, err
	}
	cq, err := dev.NewCQ(2 * (sendSlots + recvSlots))
	if err != nil {
		domain.Close()
		unix.Close(l.event)
		return nil, err
	}
	l.Config = Config{Owner: l, CQ: cq, Domain: domain, Discovery: true}
	go l.run()
	return l, nil
}

// Do implements [Owner].
func (l *Loop) Do(f func()) {
	l.mu.Lock()
	l.queue = append(l.queue, f)
	l.mu.Unlock()
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	unix.Write(l.event, b[:])
}

// Close ends the loop and frees what it holds. Its connection must be closed.
func (l *Loop) Close() error {
	l.Do(func() { l.stop = true })
	<-l.done
	err := l.Config.CQ.Close()
	if e := l.Config.Domain.Close(); err == nil {
		err = e
	}
	unix.Close(l.event)
	return err
}

func (l *Loop) run() {
	defer close(l.done)
	cq := l.Config.CQ
	fds := []unix.PollFd{{Fd: int32(cq.FD()), Events: unix.POLLIN}, {Fd: int32(l.event), Events: unix.POLLIN}}
	for {
		n, _ := cq.Poll()
		l.mu.Lock()
		batch := l.queue
		l.queue = nil
		l.mu.Unlock()
		for _, f := range batch {
			f()
		}
		cq.Flush()
		if l.stop {
			return
		}
		if n > 0 || len(batch) > 0 {
			continue
		}
		cq.Arm()
		if n, _ := cq.Poll(); n > 0 {
			continue
		}
		unix.Poll(fds, -1)
		if fds[0].Revents != 0 {
			cq.DrainEvents()
		}
		if fds[1].Revents != 0 {
			var b [8]byte
			unix.Read(l.event, b[:])
		}
	}
}
