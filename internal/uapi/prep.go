package uapi

import "unsafe"

// The Prep methods fill in a zeroed entry, fresh from uring.Ring.SQE, and leave UserData to the caller. Addresses are of memory outside the
// Go heap that stays mapped until the completion. Names and arguments are those of liburing's io_uring_prep_*(3).

// PrepNop completes at once with result 0.
func (e *SQE) PrepNop() { e.Opcode = IORING_OP_NOP }

// PrepPollMultishot posts a completion each time fd has one of the poll(2) events in mask. Result: the events. It stays armed while
// completions carry IORING_CQE_F_MORE; the one without is the last.
func (e *SQE) PrepPollMultishot(fd int, mask uint32) {
	e.Opcode, e.Fd, e.OpFlags, e.Len = IORING_OP_POLL_ADD, int32(fd), mask, IORING_POLL_ADD_MULTI
}

// PrepPoll posts one completion when fd has one of the poll(2) events in mask. Result: the events.
func (e *SQE) PrepPoll(fd int, mask uint32) {
	e.Opcode, e.Fd, e.OpFlags = IORING_OP_POLL_ADD, int32(fd), mask
}

// PrepRecv receives n bytes at addr from a socket, as recv(2) with flags. Result: bytes.
func (e *SQE) PrepRecv(fd int, addr uintptr, n uint32, flags uint32) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.OpFlags = IORING_OP_RECV, int32(fd), uint64(addr), n, flags
}

// PrepSend sends n bytes at addr to a socket, as send(2) with flags. Result: bytes.
func (e *SQE) PrepSend(fd int, addr uintptr, n uint32, flags uint32) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.OpFlags = IORING_OP_SEND, int32(fd), uint64(addr), n, flags
}

// PrepSendmsg sends what the struct msghdr at msg describes, as sendmsg(2) with flags. The struct and its iovecs stay valid until the
// completion. Result: bytes.
func (e *SQE) PrepSendmsg(fd int, msg unsafe.Pointer, flags uint32) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.OpFlags = IORING_OP_SENDMSG, int32(fd), uint64(uintptr(msg)), 1, flags
}

// PrepRecvmsg receives into what the struct msghdr at msg describes, as recvmsg(2) with flags. Result: bytes.
func (e *SQE) PrepRecvmsg(fd int, msg unsafe.Pointer, flags uint32) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.OpFlags = IORING_OP_RECVMSG, int32(fd), uint64(uintptr(msg)), 1, flags
}

// PrepRead reads n bytes at file position off to addr; off ^0 means the current position. Result: bytes.
func (e *SQE) PrepRead(fd int, addr uintptr, n uint32, off uint64) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.Off = IORING_OP_READ, int32(fd), uint64(addr), n, off
}

// PrepWrite writes n bytes from addr at file position off; off ^0 means the current position. Result: bytes.
func (e *SQE) PrepWrite(fd int, addr uintptr, n uint32, off uint64) {
	e.Opcode, e.Fd, e.Addr, e.Len, e.Off = IORING_OP_WRITE, int32(fd), uint64(addr), n, off
}

// UseFixed makes a prepared SEND or RECV work on the buffer at a place of the ring's table (Linux 7.2). The address of the entry is one of memory
// for a buffer of this process, and an offset for one that a driver has put there.
func (e *SQE) UseFixed(index uint16) {
	e.Ioprio |= IORING_RECVSEND_FIXED_BUF
	e.BufIndex = index
}

// PrepUringCmd passes the command op to the driver behind fd; its payload goes into e.Cmd. Result: the driver's.
func (e *SQE) PrepUringCmd(fd int, op uint32) {
	e.Opcode, e.Fd, e.Off = IORING_OP_URING_CMD, int32(fd), uint64(op)
}

// PrepCancel cancels the operation whose user_data is key. Result: 0, -ENOENT (no such operation, or one that cannot be cancelled),
// -EALREADY (running; it may still complete).
func (e *SQE) PrepCancel(key uint64) {
	e.Opcode, e.Fd, e.Addr = IORING_OP_ASYNC_CANCEL, -1, key
}

// PrepCancelFd cancels every operation on fd. Result: how many, or -ENOENT.
func (e *SQE) PrepCancelFd(fd int) {
	e.Opcode, e.Fd = IORING_OP_ASYNC_CANCEL, int32(fd)
	e.OpFlags = IORING_ASYNC_CANCEL_FD | IORING_ASYNC_CANCEL_ALL
}

// PrepTimeout completes with -ETIME after the time at ts, or with 0 after count other completions when count is not 0. flags are
// IORING_TIMEOUT_*.
func (e *SQE) PrepTimeout(ts *KernelTimespec, count uint32, flags uint32) {
	e.Opcode, e.Fd, e.Addr, e.Len = IORING_OP_TIMEOUT, -1, uint64(uintptr(unsafe.Pointer(ts))), 1
	e.Off, e.OpFlags = uint64(count), flags
}

// PrepTimeoutRemove ends the timeout whose user_data is key. Result: 0 or -ENOENT.
func (e *SQE) PrepTimeoutRemove(key uint64) {
	e.Opcode, e.Fd, e.Addr = IORING_OP_TIMEOUT_REMOVE, -1, key
}
