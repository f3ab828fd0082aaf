package uring

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// SQE returns the next free submission entry, zeroed. The caller fills it in at once; the next Enter, or the next SQE when the queue
// is full, submits it. Entries reach the kernel in the order of the calls.
//
// Panics when the kernel refuses the ring itself, as it does when another thread than the ring's owner calls: a bug here.
func (r *Ring) SQE() *uapi.SQE {
	return (*uapi.SQE)(r.next())
}

// SQE128 is SQE for a ring with entries of 128 bytes.
func (r *Ring) SQE128() *uapi.SQE128 {
	if r.stride != unsafe.Sizeof(uapi.SQE128{}) {
		panic("uring: 128-byte entry asked of a ring that has none")
	}
	return (*uapi.SQE128)(r.next())
}

func (r *Ring) next() unsafe.Pointer {
	if r.sqeTail-atomic.LoadUint32(r.kSQHead) == r.sqSize {
		r.makeRoom()
	}
	p := unsafe.Pointer(&r.sqes[uintptr(r.sqeTail&r.sqMask)*r.stride])
	if r.stride == unsafe.Sizeof(uapi.SQE{}) {
		*(*uapi.SQE)(p) = uapi.SQE{}
	} else {
		*(*uapi.SQE128)(p) = uapi.SQE128{}
	}
	r.sqeTail++
	return p
}

// makeRoom submits until the kernel has taken at least one entry.
func (r *Ring) makeRoom() {
	for r.sqeTail-atomic.LoadUint32(r.kSQHead) == r.sqSize {
		if err := r.Enter(false, 0); err != nil {
			panic("uring: submission queue is full and the kernel takes nothing: " + err.Error())
		}
	}
}

// Pending is the number of entries that the kernel has not taken yet.
func (r *Ring) Pending() int { return int(r.sqeTail - atomic.LoadUint32(r.kSQHead)) }

// NeedEnter reports whether Enter has something to do: entries to submit, or deferred work of the kernel that yields completions.
// It costs two loads of shared memory and no system call.
func (r *Ring) NeedEnter() bool {
	return r.sqeTail != atomic.LoadUint32(r.kSQHead) ||
		atomic.LoadUint32(r.kSQFlags)&(uapi.IORING_SQ_TASKRUN|uapi.IORING_SQ_CQ_OVERFLOW) != 0
}

// Ready reports whether Dispatch has completions to hand out.
func (r *Ring) Ready() bool { return atomic.LoadUint32(r.kCQTail) != r.cqHead }

// Holds reports whether the completion of the entry with that user_data waits for Dispatch.
func (r *Ring) Holds(userData uint64) bool {
	tail := atomic.LoadUint32(r.kCQTail)
	for i := r.cqHead; i != tail; i++ {
		if r.cqes[i&r.cqMask].UserData == userData {
			return true
		}
	}
	return false
}

// Enter shows all entries to the kernel and lets it run deferred work, which is where completions come from.
//
// With wait false it returns at once, and without telling the scheduler of the Go runtime, which makes it cheap. With wait true it sleeps
// until there is a completion, a signal arrives, or timeout has passed (negative: no limit); neither a signal nor the timeout is an
// error, so the caller looks at Ready. Whoever waits must know that Ready is false, else the call returns at once. [Ring.Doze] is the way to
// wait for something that is about to come.
//
// Errors: a wrapped errno that says the ring is unusable, as EEXIST for the wrong thread. Refusals that pass (EAGAIN, EBUSY, ENOMEM)
// are counted in Retries; the entries stay queued and NeedEnter stays true.
//
// Source: io_uring_enter(2).
func (r *Ring) Enter(wait bool, timeout time.Duration) error {
	return r.enter(wait, false, timeout)
}

// Doze is Enter with wait, for a short time only: it keeps the thread's place in the Go scheduler while it sleeps. A wait that the scheduler
// knows of costs far more than the system call: its monitor takes the place away after 20 microseconds, goes to sleep when all places are free, and
// is woken by a futex when this thread comes back. On the other hand a stop of the world has to interrupt a thread that dozes by a signal, which
// ends the wait early.
func (r *Ring) Doze(timeout time.Duration) error {
	return r.enter(true, true, timeout)
}

func (r *Ring) enter(wait, doze bool, timeout time.Duration) error {
	r.publish()
	if r.sqPoll {
		return r.enterSQPoll(wait, timeout)
	}
	for {
		n := r.sqeTail - atomic.LoadUint32(r.kSQHead)
		r.Enters++
		var errno unix.Errno
		if wait && doze {
			flags, arg, size := r.waitArgs(timeout)
			_, _, errno = unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 1, flags, arg, size)
		} else if wait {
			flags, arg, size := r.waitArgs(timeout)
			_, _, errno = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 1, flags, arg, size)
		} else {
			_, _, errno = unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(n), 0, uintptr(uapi.IORING_ENTER_GETEVENTS), 0, 0)
		}
		switch errno {
		case 0:
			// The kernel stops at an entry it cannot allocate for, and then neither goes on nor waits: again for the rest.
			if left := r.sqeTail - atomic.LoadUint32(r.kSQHead); left == 0 || left == n {
				return nil
			}
			r.Retries++
			wait = wait && !r.Ready()
		case unix.ETIME:
			return nil
		case unix.EINTR, unix.EAGAIN, unix.EBUSY, unix.ENOMEM:
			r.Retries++
			return nil
		default:
			return fmt.Errorf("io_uring_enter: %w", errno)
		}
	}
}

// enterSQPoll wakes the kernel's thread when it sleeps, and waits if asked.
func (r *Ring) enterSQPoll(wait bool, timeout time.Duration) error {
	var flags uintptr
	if atomic.LoadUint32(r.kSQFlags)&uapi.IORING_SQ_NEED_WAKEUP != 0 {
		flags |= uintptr(uapi.IORING_ENTER_SQ_WAKEUP)
	}
	full := r.sqeTail-atomic.LoadUint32(r.kSQHead) == r.sqSize
	if full {
		flags |= uintptr(uapi.IORING_ENTER_SQ_WAIT)
	}
	if atomic.LoadUint32(r.kSQFlags)&uapi.IORING_SQ_CQ_OVERFLOW != 0 {
		flags |= uintptr(uapi.IORING_ENTER_GETEVENTS)
	}
	if flags == 0 && !wait {
		return nil
	}
	var minComplete, arg, size uintptr
	if wait {
		var f uintptr
		f, arg, size = r.waitArgs(timeout)
		flags |= f
		minComplete = 1
	}
	r.Enters++
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 0, minComplete, flags, arg, size)
	switch errno {
	case 0, unix.ETIME:
		return nil
	case unix.EINTR, unix.EAGAIN, unix.EBUSY, unix.ENOMEM:
		r.Retries++
		return nil
	}
	return fmt.Errorf("io_uring_enter: %w", errno)
}

// waitArgs gives the flags and the extended argument of a wait.
func (r *Ring) waitArgs(timeout time.Duration) (flags, arg, size uintptr) {
	flags = uintptr(uapi.IORING_ENTER_GETEVENTS)
	if timeout < 0 {
		return flags, 0, 0
	}
	r.arg.ts.Sec, r.arg.ts.Nsec = int64(timeout/time.Second), int64(timeout%time.Second)
	r.arg.arg.Ts = uint64(uintptr(unsafe.Pointer(&r.arg.ts)))
	return flags | uintptr(uapi.IORING_ENTER_EXT_ARG), uintptr(unsafe.Pointer(&r.arg.arg)), unsafe.Sizeof(r.arg.arg)
}

// publish shows the kernel what was filled in and what was read.
func (r *Ring) publish() {
	if n := r.sqeTail - r.kTail; n != 0 {
		r.account()
		r.SQEs += uint64(n)
		r.kTail = r.sqeTail
		atomic.StoreUint32(r.kSQTail, r.kTail)
	}
	if atomic.LoadUint32(r.kCQHead) != r.cqHead {
		atomic.StoreUint32(r.kCQHead, r.cqHead)
	}
}

// Dispatch hands each completion that has arrived to the Completer of its slot and returns how many there were. Completers run on the
// calling thread, may prepare entries and may call Enter(false), but not Dispatch.
func (r *Ring) Dispatch() int {
	tail := atomic.LoadUint32(r.kCQTail)
	n := int(tail - r.cqHead)
	if n == 0 {
		return 0
	}
	for r.cqHead != tail {
		cqe := r.cqes[r.cqHead&r.cqMask] // copied: the place is the kernel's again after publish
		r.cqHead++
		r.deliver(cqe)
	}
	r.CQEs += uint64(n)
	atomic.StoreUint32(r.kCQHead, r.cqHead)
	return n
}
