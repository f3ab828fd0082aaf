package ublk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
)

// controlPath is made when the module is loaded; opening it does not load the module.
const controlPath = "/dev/ublk-control"

const (
	maxCalls    = 1024       // commands in the kernel at the same time
	payloadSize = 256        // bytes of off-heap payload per command; the largest struct has 152
	chunkCalls  = 64         // payloads that are mapped together
	noToken     = ^uint32(0) // of entries whose completion says nothing, such as cancellations
)

// cancelGrace is how long a cancelled command has to answer before its caller goes away.
const cancelGrace = 300 * time.Millisecond

// Control sends control commands to the ublk driver. It may be used by any number of goroutines.
//
// State-changing commands of one device run one after the other, those of different devices at the same time, so a device whose command
// hangs in the kernel holds up nobody else. Every method takes a context: when it ends, an interruptible wait in the kernel is cancelled,
// and a command that cannot be cancelled is left behind (CtrlError.Pending). The next command of that device waits for it.
//
// One ring serves all commands. The kernel's submission thread (IORING_SETUP_SQPOLL) starts the workers that the commands run on, so no
// signal of the Go runtime ever reaches them; its sleep is short and it costs nothing when idle. One goroutine, runDispatch, waits
// through an eventfd in the runtime's poller and wakes the callers.
type Control struct {
	fd      int      // /dev/ublk-control
	event   *os.File // eventfd: completions
	closing chan struct{}
	done    chan struct{} // closed when runDispatch has ended

	features Features
	grace    time.Duration // cancelGrace; the tests shorten it

	mu      sync.Mutex // guards what follows; never held while the kernel is waited for
	ring    *uring.Ring
	slot    uring.Slot
	calls   []*call
	free    []*call
	chunks  [][]byte
	devices map[int]*device
	closed  bool
}

// call is one command on its way through the kernel. Its payload is off the Go heap and stays its own until the completion, whether
// its caller still waits or not.
type call struct {
	token     uint32
	payload   []byte
	answer    chan int32
	dev       *device                         // held until the completion; nil for commands that are not serialised
	busy      bool                            // in the kernel
	abandoned bool                            // the caller has gone away
	late      func(payload []byte, res int32) // what to do when an abandoned command is through
}

// device serialises the commands of one device.
type device struct {
	turn   chan struct{} // holds a token while a command is at work
	holder string        // that command; guarded by Control.mu
}

// OpenControl opens the driver's control device. The caller needs CAP_SYS_ADMIN in the initial user namespace.
//
// Errors: ErrNotSupported when the module is not loaded or is older than kernel 6.5, with the remedy in the text; fs.ErrPermission.
func OpenControl() (*Control, error) {
	fd, err := openControlFile(controlPath)
	if err != nil {
		return nil, err
	}
	c := &Control{fd: fd, closing: make(chan struct{}), done: make(chan struct{}), grace: cancelGrace, devices: make(map[int]*device)}
	if err := c.setUp(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %w", controlPath, err)
	}
	go c.runDispatch()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var set uint64
	if _, err := c.run(ctx, cmdGetFeatures, -1, 0, bytesOf(&set)); err != nil {
		c.Close()
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) {
			err = fmt.Errorf("%w: the ublk driver is too old: needs kernel 6.5 or later", ErrNotSupported)
		}
		return nil, fmt.Errorf("open %s: %w", controlPath, err)
	}
	c.features = Features(set)
	return c, nil
}

func openControlFile(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return -1, fmt.Errorf("open %s: %w: %w: load the module with `modprobe ublk_drv` (kernel 6.5 or later with CONFIG_BLK_DEV_UBLK; "+
			"on Ubuntu cloud kernels install linux-modules-extra)", path, ErrNotSupported, err)
	case err != nil:
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// setUp makes the ring and its eventfd.
func (c *Control) setUp() error {
	ring, err := uring.New(uring.Config{SQEntries: 64, CQEntries: 2 * maxCalls, SQPoll: true, SQE128: true})
	if errors.Is(err, uring.ErrNotSupported) {
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	if err != nil {
		return err
	}
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		ring.Close()
		return fmt.Errorf("eventfd: %w", err)
	}
	c.event = os.NewFile(uintptr(efd), "ublk control completions")
	if err := ring.RegisterEventfd(efd); err != nil {
		c.event.Close()
		ring.Close()
		return err
	}
	c.ring = ring
	c.slot = ring.Attach(c)
	return nil
}

// Close ends the Control; calls after the first do nothing. Callers that still wait get ErrClosed. Close itself waits for nothing: the
// kernel goes on with commands that cannot be cancelled, and a process that exits meanwhile stays until they are through.
func (c *Control) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	close(c.closing)
	err := c.event.Close()
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	busy := 0
	for _, k := range c.calls {
		if k.busy {
			busy++
		}
	}
	errs := []error{err, c.ring.Close(), unix.Close(c.fd)}
	if busy == 0 { // else the kernel may still write there: the mapping stays
		for _, m := range c.chunks {
			errs = append(errs, unix.Munmap(m))
		}
	}
	c.chunks = nil
	return errors.Join(errs...)
}

// runDispatch hands completions to their callers until Close.
func (c *Control) runDispatch() {
	defer close(c.done)
	var buf [8]byte
	for {
		if _, err := c.event.Read(buf[:]); err != nil {
			return
		}
		c.mu.Lock()
		for c.ring.Dispatch() > 0 {
		}
		c.mu.Unlock()
	}
}

// Complete implements uring.Completer; it runs under c.mu.
func (c *Control) Complete(token uint32, res int32, _ uint32) {
	if token == noToken || int(token) >= len(c.calls) {
		return
	}
	k := c.calls[token]
	k.busy = false
	if k.dev != nil {
		k.dev.holder = ""
		<-k.dev.turn
		k.dev = nil
	}
	if !k.abandoned {
		k.answer <- res
		return
	}
	if k.late != nil {
		go k.late(append([]byte(nil), k.payload...), res)
	}
	c.recycle(k)
}

// take gives a call with its payload; c.mu is held.
func (c *Control) take() (*call, error) {
	if len(c.free) == 0 {
		if len(c.calls) >= maxCalls {
			return nil, fmt.Errorf("%w: %d commands are at work", ErrBusy, maxCalls)
		}
		m, err := unix.Mmap(-1, 0, chunkCalls*payloadSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return nil, fmt.Errorf("map command payloads: %w", err)
		}
		c.chunks = append(c.chunks, m)
		for i := range chunkCalls {
			k := &call{token: uint32(len(c.calls)), payload: m[i*payloadSize : (i+1)*payloadSize : (i+1)*payloadSize], answer: make(chan int32, 1)}
			c.calls = append(c.calls, k)
			c.free = append(c.free, k)
		}
	}
	k := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	return k, nil
}

// recycle gives a finished call back; c.mu is held.
func (c *Control) recycle(k *call) {
	k.abandoned, k.late = false, nil
	c.free = append(c.free, k)
}

// turnOf waits until no other command of the device is at work.
func (c *Control) turnOf(ctx context.Context, cmd command, dev int) (*device, error) {
	c.mu.Lock()
	d := c.devices[dev]
	if d == nil {
		d = &device{turn: make(chan struct{}, 1)}
		c.devices[dev] = d
	}
	c.mu.Unlock()
	select {
	case d.turn <- struct{}{}:
		c.mu.Lock()
		d.holder = cmd.name
		c.mu.Unlock()
		return d, nil
	case <-c.closing:
		return nil, &CtrlError{Dev: dev, Command: cmd.name, Err: ErrClosed}
	case <-ctx.Done():
		c.mu.Lock()
		holder := d.holder
		c.mu.Unlock()
		return nil, &CtrlError{Dev: dev, Command: cmd.name,
			Err: fmt.Errorf("%w: %s is at work on it: %w", ErrBusy, holder, ctx.Err())}
	}
}

// run sends one command and waits for it. payload goes to the kernel and comes back changed. dev is -1 for none.
func (c *Control) run(ctx context.Context, cmd command, dev int, data uint64, payload []byte) (int32, error) {
	return c.runLate(ctx, cmd, dev, data, payload, nil)
}

// runLate is run for a command that needs something done when it is through and nobody waits for it any more: an error with Pending set announces that
// late will be called, on a goroutine of its own. After Close it is not.
func (c *Control) runLate(ctx context.Context, cmd command, dev int, data uint64, payload []byte, late func([]byte, int32)) (int32, error) {
	if err := ctx.Err(); err != nil {
		return 0, &CtrlError{Dev: dev, Command: cmd.name, Err: err}
	}
	var d *device
	if cmd.serial && dev >= 0 {
		var err error
		if d, err = c.turnOf(ctx, cmd, dev); err != nil {
			return 0, err
		}
	}
	k, err := c.submit(cmd, d, dev, data, payload, late)
	if err != nil {
		if d != nil {
			c.mu.Lock()
			d.holder = ""
			c.mu.Unlock()
			<-d.turn
		}
		return 0, &CtrlError{Dev: dev, Command: cmd.name, Err: err, Pending: k != nil}
	}
	var res int32
	select {
	case res = <-k.answer:
	case <-c.closing:
		c.abandon(k)
		return 0, &CtrlError{Dev: dev, Command: cmd.name, Err: ErrClosed, Pending: true}
	case <-ctx.Done():
		c.cancel(k)
		grace := time.NewTimer(c.grace)
		defer grace.Stop()
		select {
		case res = <-k.answer:
		case <-grace.C:
			if r, answered := c.abandon(k); answered {
				res = r
				break
			}
			return 0, &CtrlError{Dev: dev, Command: cmd.name, Err: ctx.Err(), Hint: cmd.late, Pending: true}
		}
		if errno := unix.Errno(-res); res < 0 && (errno == unix.EINTR || errno == unix.ECANCELED) {
			c.finish(k, nil)
			return 0, &CtrlError{Dev: dev, Command: cmd.name, Err: ctx.Err(), Hint: cmd.late}
		}
	}
	c.finish(k, payload)
	if res < 0 {
		return 0, errnoError(dev, cmd, unix.Errno(-res))
	}
	return res, nil
}

// submit hands a command to the kernel. A call that comes with an error may yet be taken by the kernel.
func (c *Control) submit(cmd command, d *device, dev int, data uint64, payload []byte, late func([]byte, int32)) (*call, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	k, err := c.take()
	if err != nil {
		return nil, err
	}
	copy(k.payload, payload)
	k.dev, k.busy, k.late = d, true, late
	e := c.ring.SQE128()
	e.PrepUringCmd(c.fd, cmd.op)
	e.UserData = c.slot.Key(k.token)
	p := (*uapi.UblksrvCtrlCmd)(unsafe.Pointer(&e.Cmd))
	p.DevID, p.QueueID, p.Data = uint32(int32(dev)), uapi.UBLK_NO_QUEUE, data
	if len(payload) > 0 {
		p.Len, p.Addr = uint16(len(payload)), uint64(uintptr(unsafe.Pointer(&k.payload[0])))
	}
	if err := c.ring.Enter(false, 0); err != nil {
		// The entry is in the queue and may yet be taken: its call stays busy, and the device with it.
		k.abandoned, k.dev = true, nil
		return k, err
	}
	return k, nil
}

// cancel asks the kernel to interrupt a command.
func (c *Control) cancel(k *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !k.busy {
		return
	}
	e := c.ring.SQE128()
	e.PrepCancel(c.slot.Key(k.token))
	e.UserData = c.slot.Key(noToken)
	_ = c.ring.Enter(false, 0) // a cancellation that is lost leaves the command pending, which is reported
}

// abandon leaves a command to the kernel, unless it has just answered.
func (c *Control) abandon(k *call) (res int32, answered bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.busy {
		k.abandoned = true
		return 0, false
	}
	return <-k.answer, true
}

// finish copies the answer out and gives the call back.
func (c *Control) finish(k *call, payload []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed { // Close may have unmapped it
		copy(payload, k.payload)
	}
	c.recycle(k)
}

// bytesOf views a kernel struct as bytes.
func bytesOf[T any](p *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p)) }
