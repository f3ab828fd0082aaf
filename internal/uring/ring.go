package uring

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// ErrNotSupported says that the kernel has no usable io_uring, or that an administrator switched it off.
var ErrNotSupported = errors.New("io_uring is not available")

// ErrFull says that the completion queue cannot hold more outstanding operations.
var ErrFull = errors.New("completion queue is spoken for")

// Config chooses the kind of ring.
type Config struct {
	SQEntries uint32 // entries of the submission queue, rounded up to a power of two; 0 means 256
	CQEntries uint32 // entries of the completion queue, rounded up to a power of two; 0 means 16384. At most 65536
	SQPoll    bool   // the kernel takes submissions on a thread of its own; for control rings
	SQE128    bool   // entries of 128 bytes; for ublk control commands

	// SQThreadIdle is how long the kernel's thread looks for submissions before it sleeps; 0 means 10 ms. Only with SQPoll.
	SQThreadIdle time.Duration
}

// Ring is one io_uring instance. All methods but Close's second and later calls belong to one thread, the one that called New; a ring
// with SQPoll may be used from any thread, one at a time.
type Ring struct {
	fd     int
	flags  uint32 // setup flags that the kernel accepted
	sqPoll bool

	// Submission side. sqeTail counts entries handed out by SQE, kTail mirrors what the kernel was shown, counted what attach.go has
	// entered into the account of outstanding operations.
	sqes     []byte
	stride   uintptr
	sqMask   uint32
	sqSize   uint32
	sqeTail  uint32
	kTail    uint32
	counted  uint32
	kSQHead  *uint32
	kSQTail  *uint32
	kSQFlags *uint32

	// Completion side. cqHead is where Dispatch reads; the kernel learns it at the end of Dispatch and before each Enter.
	cqes      []uapi.CQE
	cqMask    uint32
	cqHead    uint32
	kCQHead   *uint32
	kCQTail   *uint32
	kOverflow *uint32
	reserved  int

	buffers int    // places in the table of registered buffers
	taken   []bool // of those, the ones that are in use

	slots []slot
	free  []Slot

	arg    *waitArg // off the Go heap: the kernel reads it during Enter
	closed bool

	mapRing, mapSQEs, mapArg []byte

	// Counters, written by the owner of the ring and to be read by it.
	Enters  uint64 // system calls
	SQEs    uint64 // entries shown to the kernel
	CQEs    uint64 // completions dispatched
	Retries uint64 // calls that the kernel refused for now (EAGAIN, EBUSY, ENOMEM) or that a signal interrupted
}

type waitArg struct {
	arg uapi.IoUringGeteventsArg
	ts  uapi.KernelTimespec
}

// New sets up a ring. For an I/O ring the calling goroutine is locked to its thread ([runtime.LockOSThread]) and stays so for the
// life of the ring.
//
// I/O rings ask for SINGLE_ISSUER, DEFER_TASKRUN and TASKRUN_FLAG, and do without what an older kernel refuses. Errors:
// ErrNotSupported with the remedy in the text, else a wrapped errno.
//
// Source: io_uring_setup(2).
func New(cfg Config) (*Ring, error) {
	if cfg.SQEntries == 0 {
		cfg.SQEntries = 256
	}
	if cfg.CQEntries == 0 {
		cfg.CQEntries = 16384
	}
	if cfg.CQEntries < cfg.SQEntries {
		cfg.CQEntries = cfg.SQEntries
	}
	base := uapi.IORING_SETUP_CQSIZE | uapi.IORING_SETUP_CLAMP | uapi.IORING_SETUP_SUBMIT_ALL
	if cfg.SQE128 {
		base |= uapi.IORING_SETUP_SQE128
	}
	var choices []uint32
	if cfg.SQPoll {
		base |= uapi.IORING_SETUP_SQPOLL
		choices = []uint32{base | uapi.IORING_SETUP_NO_SQARRAY, base}
	} else {
		defer_ := uapi.IORING_SETUP_SINGLE_ISSUER | uapi.IORING_SETUP_DEFER_TASKRUN | uapi.IORING_SETUP_TASKRUN_FLAG
		coop := uapi.IORING_SETUP_COOP_TASKRUN | uapi.IORING_SETUP_TASKRUN_FLAG
		choices = []uint32{base | defer_ | uapi.IORING_SETUP_NO_SQARRAY, base | defer_, base | coop}
	}
	var (
		fd    uintptr
		errno unix.Errno
		p     uapi.IoUringParams
	)
	for _, flags := range choices {
		p = uapi.IoUringParams{CqEntries: cfg.CQEntries, Flags: flags}
		if cfg.SQPoll {
			if p.SqThreadIdle = uint32(cfg.SQThreadIdle / time.Millisecond); p.SqThreadIdle == 0 {
				p.SqThreadIdle = 10
			}
		}
		fd, _, errno = unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(cfg.SQEntries), uintptr(unsafe.Pointer(&p)), 0)
		if errno != unix.EINVAL {
			break
		}
	}
	if errno != 0 {
		return nil, setupError(errno)
	}
	r := &Ring{fd: int(fd), flags: p.Flags, sqPoll: cfg.SQPoll}
	if err := r.mapRings(&p, cfg.SQE128); err != nil {
		r.Close()
		return nil, err
	}
	r.slots = make([]slot, 1, 64) // slot 0 is the ring's own
	return r, nil
}

// setupError explains why io_uring_setup failed.
func setupError(errno unix.Errno) error {
	switch errno {
	case unix.EPERM:
		why := "a seccomp filter or security module forbids it"
		if b, err := os.ReadFile("/proc/sys/kernel/io_uring_disabled"); err == nil && len(b) > 0 && b[0] != '0' {
			why = "sysctl kernel.io_uring_disabled is " + string(b[:1]) + "; set it to 0, or to 1 and give the process kernel.io_uring_group"
		}
		return fmt.Errorf("set up io_uring: %w: %w: %s", ErrNotSupported, errno, why)
	case unix.ENOSYS:
		return fmt.Errorf("set up io_uring: %w: the kernel was built without CONFIG_IO_URING, or a seccomp filter hides it", ErrNotSupported)
	case unix.ENOMEM:
		return fmt.Errorf("set up io_uring: %w: out of memory or over the locked memory limit (ulimit -l)", errno)
	}
	return fmt.Errorf("set up io_uring: %w", errno)
}

// mapRings maps the two rings and the entries, and finds the shared words.
func (r *Ring) mapRings(p *uapi.IoUringParams, sqe128 bool) error {
	const need = uapi.IORING_FEAT_SINGLE_MMAP | uapi.IORING_FEAT_NODROP | uapi.IORING_FEAT_EXT_ARG
	if p.Features&need != need {
		return fmt.Errorf("set up io_uring: %w: kernel reports features %#x, need %#x (kernel 5.11)", ErrNotSupported, p.Features, need)
	}
	r.stride = unsafe.Sizeof(uapi.SQE{})
	if sqe128 {
		r.stride = unsafe.Sizeof(uapi.SQE128{})
	}
	sqLen := int(p.SqOff.Array + p.SqEntries*4)
	cqLen := int(p.CqOff.Cqes + p.CqEntries*uint32(unsafe.Sizeof(uapi.CQE{})))
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	var err error
	if r.mapRing, err = unix.Mmap(r.fd, uapi.IORING_OFF_SQ_RING, max(sqLen, cqLen), prot, flags); err != nil {
		return fmt.Errorf("map io_uring: %w", err)
	}
	if r.mapSQEs, err = unix.Mmap(r.fd, uapi.IORING_OFF_SQES, int(p.SqEntries)*int(r.stride), prot, flags); err != nil {
		return fmt.Errorf("map io_uring entries: %w", err)
	}
	if r.mapArg, err = unix.Mmap(-1, 0, os.Getpagesize(), prot, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map io_uring wait argument: %w", err)
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.mapRing[off])) }
	r.sqes = r.mapSQEs
	r.sqMask, r.sqSize = *word(p.SqOff.RingMask), *word(p.SqOff.RingEntries)
	r.kSQHead, r.kSQTail, r.kSQFlags = word(p.SqOff.Head), word(p.SqOff.Tail), word(p.SqOff.Flags)
	r.cqMask = *word(p.CqOff.RingMask)
	r.kCQHead, r.kCQTail, r.kOverflow = word(p.CqOff.Head), word(p.CqOff.Tail), word(p.CqOff.Overflow)
	r.cqes = unsafe.Slice((*uapi.CQE)(unsafe.Pointer(&r.mapRing[p.CqOff.Cqes])), p.CqEntries)
	if r.flags&uapi.IORING_SETUP_NO_SQARRAY == 0 { // entry i is always at index i
		array := unsafe.Slice(word(p.SqOff.Array), p.SqEntries)
		for i := range array {
			array[i] = uint32(i)
		}
	}
	r.arg = (*waitArg)(unsafe.Pointer(&r.mapArg[0]))
	return nil
}

// FD is the ring's descriptor, valid until Close.
func (r *Ring) FD() int { return r.fd }

// Deferred reports whether completions appear only inside Enter (IORING_SETUP_DEFER_TASKRUN).
func (r *Ring) Deferred() bool { return r.flags&uapi.IORING_SETUP_DEFER_TASKRUN != 0 }

// Overflows counts completions that did not fit and that the kernel kept elsewhere; not 0 means that CQEntries is too small.
func (r *Ring) Overflows() uint32 { return atomic.LoadUint32(r.kOverflow) }

// Reserve claims room in the completion queue for n operations that may be outstanding at the same time, and Release gives it back.
// Whoever keeps operations outstanding for long (a ublk queue, a socket) reserves before it submits. Errors: ErrFull.
func (r *Ring) Reserve(n int) error {
	if r.reserved+n > len(r.cqes) {
		return fmt.Errorf("io_uring: %w: %d of %d entries reserved, %d more wanted; set up the ring with more CQEntries",
			ErrFull, r.reserved, len(r.cqes), n)
	}
	r.reserved += n
	return nil
}

// Release gives back room that Reserve claimed.
func (r *Ring) Release(n int) { r.reserved -= n }

// RegisterEventfd makes the kernel write to the eventfd at each completion.
//
// Source: io_uring_register(2), IORING_REGISTER_EVENTFD.
func (r *Ring) RegisterEventfd(fd int) error {
	v := int32(fd)
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), uintptr(uapi.IORING_REGISTER_EVENTFD),
		uintptr(unsafe.Pointer(&v)), 1, 0, 0)
	if errno != 0 {
		return fmt.Errorf("io_uring: register eventfd: %w", errno)
	}
	return nil
}

// Close gives the ring back; calls after the first do nothing. The kernel cancels what is outstanding, after Close has returned; no
// Completer hears of it, so memory that the kernel may still write to is not to be unmapped by whoever closes the ring early.
func (r *Ring) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	var errs []error
	for _, m := range [][]byte{r.mapRing, r.mapSQEs, r.mapArg} {
		if m != nil {
			errs = append(errs, unix.Munmap(m))
		}
	}
	errs = append(errs, unix.Close(r.fd))
	r.fd = -1
	return errors.Join(errs...)
}

// Closed reports whether Close was called.
func (r *Ring) Closed() bool { return r.closed }
