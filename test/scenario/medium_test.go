package scenario

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// medium is a block device for a target's unit, in this process's memory, that holds writes back for as long as it is told to: a network block device whose
// server is here. (dm-delay would not do: what it delays stays in order, and a new table lets go of it.)
type medium struct {
	path   string
	device *os.File
	server net.Conn
	done   chan error // what the kernel's half ended with

	mu      sync.Mutex // guards what follows
	bytes   []byte
	hold    bool
	held    []mediumWrite
	arrived chan struct{} // a write that is held back
}

// mediumWrite is a write that has not been carried out.
type mediumWrite struct {
	handle [8]byte
	from   uint64
	data   []byte
}

// The kernel's interface to network block devices (include/uapi/linux/nbd.h).
const (
	nbdSetSocket    = 0xab00
	nbdSetBlockSize = 0xab01
	nbdDoIt         = 0xab03
	nbdClearSocket  = 0xab04
	nbdSetSize      = 0xab07 // in blocks
	nbdDisconnect   = 0xab08
	nbdSetFlags     = 0xab0a

	nbdHasFlags = 1

	nbdRead, nbdWrite, nbdEnd = 0, 1, 2

	nbdRequestMagic = 0x25609513
	nbdReplyMagic   = 0x67446698
)

// newMedium makes a medium for the length of the test. Whoever uses it is gone by then: targets are made later.
func newMedium(t testing.TB, size int) *medium {
	t.Helper()
	guestOnly(t)
	must(t, "modprobe", "nbd", "nbds_max=1")
	m := &medium{path: "/dev/nbd0", bytes: make([]byte, size), arrived: make(chan struct{}, 64), done: make(chan error, 1)}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(pair[0]), "server")
	m.server, err = net.FileConn(file)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1]) // the kernel keeps it
	if m.device, err = os.OpenFile(m.path, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ command, value int }{
		{nbdSetBlockSize, blockSize}, {nbdSetSize, size / blockSize}, {nbdSetFlags, nbdHasFlags}, {nbdSetSocket, pair[1]},
	} {
		if err := unix.IoctlSetInt(int(m.device.Fd()), uint(c.command), c.value); err != nil {
			t.Fatalf("%s: command %#x: %v", m.path, c.command, err)
		}
	}
	served := make(chan error, 1)
	go func() { served <- m.serve() }()
	go m.run()
	t.Cleanup(func() {
		m.release()
		err := unix.IoctlSetInt(int(m.device.Fd()), nbdDisconnect, 0)
		if err == nil {
			err = <-m.done
		}
		if err != nil {
			m.server.Close()
		}
		if serr := <-served; err == nil {
			err = serr
		}
		m.device.Close()
		if err != nil {
			t.Errorf("%s: %v", m.path, err)
		}
	})
	waitFor(t, m.path+" works", 10*time.Second, func() error {
		select {
		case err := <-m.done:
			m.done <- err
			return fatalError{fmt.Errorf("it has ended: %v", err)}
		default:
		}
		_, err := os.Stat("/sys/block/nbd0/pid")
		return err
	})
	return m
}

// run is the kernel's half, which ends with a signal: on a thread that gets none.
func (m *medium) run() {
	runtime.LockOSThread() // the thread ends with it
	all := unix.Sigset_t{}
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil)
	if err == nil {
		err = unix.IoctlSetInt(int(m.device.Fd()), nbdDoIt, 0)
	}
	_ = unix.IoctlSetInt(int(m.device.Fd()), nbdClearSocket, 0)
	m.done <- err
}

// serve answers the kernel until it says that it goes.
func (m *medium) serve() error {
	for {
		var request struct {
			Magic, Type uint32
			Handle      [8]byte
			From        uint64
			Length      uint32
		}
		if err := binary.Read(m.server, binary.BigEndian, &request); err != nil {
			return err
		}
		if request.Magic != nbdRequestMagic {
			return fmt.Errorf("a request begins with %#x", request.Magic)
		}
		data := make([]byte, request.Length)
		switch request.Type & 0xffff {
		case nbdRead:
			m.mu.Lock()
			copy(data, m.bytes[request.From:])
			m.mu.Unlock()
			if err := m.reply(request.Handle, data); err != nil {
				return err
			}
		case nbdWrite:
			if _, err := io.ReadFull(m.server, data); err != nil {
				return err
			}
			if err := m.write(mediumWrite{request.Handle, request.From, data}); err != nil {
				return err
			}
		case nbdEnd:
			return m.server.Close() // which the kernel waits for
		default:
			return fmt.Errorf("a request of type %d", request.Type)
		}
	}
}

// write carries a write out, or keeps it.
func (m *medium) write(w mediumWrite) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hold {
		m.held = append(m.held, w)
		m.arrived <- struct{}{}
		return nil
	}
	copy(m.bytes[w.from:], w.data)
	return m.reply(w.handle, nil)
}

func (m *medium) reply(handle [8]byte, data []byte) error {
	b := binary.BigEndian.AppendUint32(nil, nbdReplyMagic)
	b = binary.BigEndian.AppendUint32(b, 0) // no error
	_, err := m.server.Write(slices.Concat(b, handle[:], data))
	return err
}

// holdBack makes the medium keep the writes to come, or carry them out.
func (m *medium) holdBack(hold bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hold = hold
}

// waiting is how many writes are held back.
func (m *medium) waiting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.held)
}

// release carries out what was held back, and all that comes.
func (m *medium) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hold = false
	for _, w := range m.held {
		copy(m.bytes[w.from:], w.data)
		_ = m.reply(w.handle, nil) // serve says so
	}
	m.held = nil
}

// read returns what the medium holds.
func (m *medium) read(from, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.bytes[from : from+n])
}
