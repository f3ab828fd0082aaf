// Package uring drives one io_uring instance per thread: submission, completion and the mapping of both rings, without allocation.
//
// Layer: above internal/uapi, below ublk and iscsitcp. A reactor of the data plane owns one [Ring] on one locked OS thread and lends it
// to its queues, sockets and wake-up descriptors; each of them attaches a [Completer] and receives the completions of its own entries.
// The control half of package ublk owns another ring whose submission queue the kernel polls.
//
//	owner        SQE() + Prep...         Enter()                    Dispatch()
//	               |                       |                          ^
//	rings    [ SQEs, shared ] --------> kernel -------------> [ CQEs, shared ]
//
// A reactor's loop, which neither spins without reason nor misses a wake-up (the kernel looks for completions and for deferred work before it
// sleeps):
//
//	for {
//		if ring.NeedEnter() {
//			err = ring.Enter(false, 0)
//		}
//		if ring.Dispatch() > 0 || ring.NeedEnter() {
//			continue
//		}
//		// whatever else is polled, for as long as that pays; then arm its descriptor, poll once more, and
//		err = ring.Enter(true, -1)
//	}
//
// Traps:
//
//   - A ring belongs to the thread that called [New] (IORING_SETUP_SINGLE_ISSUER). Lock the goroutine to its thread before, and never
//     unlock it: a thread that ends takes its ublk tags with it. Another thread's Enter gets EEXIST.
//   - With IORING_SETUP_DEFER_TASKRUN completions appear only inside Enter. A loop that polls must call Enter whenever NeedEnter says so,
//     or it never sees anything new.
//   - An SQE holds addresses as numbers, invisible to the garbage collector and to the growth of stacks: what it points to lives
//     outside the Go heap (internal/mempool, [golang.org/x/sys/unix.Mmap]) until the completion has arrived.
//   - The completion queue must hold every completion that can be outstanding ([Ring.Reserve] keeps the account). The kernel would keep
//     what does not fit (IORING_FEAT_NODROP), but in memory that it allocates per completion.
//   - IOSQE_CQE_SKIP_SUCCESS is forbidden here: the account of outstanding operations counts one final completion per entry.
//
// Sources: io_uring(7), io_uring_setup(2), io_uring_enter(2), io_uring_register(2) of liburing; include/uapi/linux/io_uring.h.
package uring
