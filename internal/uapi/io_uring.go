package uapi

import (
	"structs"
	"unsafe"
)

// SQE mirrors the 64 bytes of struct io_uring_sqe, include/uapi/linux/io_uring.h. Unions are named after the member that is used most;
// the comment gives the others.
//
//	off len
//	  0   1  opcode
//	  1   1  flags, IOSQE_*
//	  2   2  ioprio; poll and receive flags of some operations
//	  4   4  fd
//	  8   8  off; cmd_op (the low 4 bytes) for IORING_OP_URING_CMD
//	 16   8  addr
//	 24   4  len
//	 28   4  rw_flags; msg_flags, poll32_events, timeout_flags, cancel_flags, uring_cmd_flags
//	 32   8  user_data
//	 40   2  buf_index, buf_group
//	 42   2  personality
//	 44   4  splice_fd_in, file_index
//	 48  16  addr3 and padding; the command of IORING_OP_URING_CMD
type SQE struct {
	_           structs.HostLayout
	Opcode      uint8
	Flags       uint8
	Ioprio      uint16
	Fd          int32
	Off         uint64
	Addr        uint64
	Len         uint32
	OpFlags     uint32
	UserData    uint64
	BufIndex    uint16
	Personality uint16
	FileIndex   int32
	Cmd         [16]byte
}

var _ = [1]struct{}{}[unsafe.Sizeof(SQE{})-64]

// SQE128 mirrors struct io_uring_sqe in a ring that was set up with IORING_SETUP_SQE128: the command has 80 bytes.
type SQE128 struct {
	_ structs.HostLayout
	SQE
	CmdTail [64]byte
}

var _ = [1]struct{}{}[unsafe.Sizeof(SQE128{})-128]

// CQE mirrors struct io_uring_cqe, include/uapi/linux/io_uring.h.
type CQE struct {
	_        structs.HostLayout
	UserData uint64
	Res      int32
	Flags    uint32
}

var _ = [1]struct{}{}[unsafe.Sizeof(CQE{})-16]

// IoSqringOffsets mirrors struct io_sqring_offsets: byte offsets into the mapping at IORING_OFF_SQ_RING.
type IoSqringOffsets struct {
	_           structs.HostLayout
	Head        uint32
	Tail        uint32
	RingMask    uint32
	RingEntries uint32
	Flags       uint32
	Dropped     uint32
	Array       uint32
	Resv1       uint32
	UserAddr    uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoSqringOffsets{})-40]

// IoCqringOffsets mirrors struct io_cqring_offsets: byte offsets into the mapping at IORING_OFF_CQ_RING.
type IoCqringOffsets struct {
	_           structs.HostLayout
	Head        uint32
	Tail        uint32
	RingMask    uint32
	RingEntries uint32
	Overflow    uint32
	Cqes        uint32
	Flags       uint32
	Resv1       uint32
	UserAddr    uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoCqringOffsets{})-40]

// IoUringParams mirrors struct io_uring_params, the argument of io_uring_setup(2).
type IoUringParams struct {
	_            structs.HostLayout
	SqEntries    uint32
	CqEntries    uint32
	Flags        uint32
	SqThreadCPU  uint32
	SqThreadIdle uint32 // milliseconds
	Features     uint32
	WqFd         uint32
	Resv         [3]uint32
	SqOff        IoSqringOffsets
	CqOff        IoCqringOffsets
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoUringParams{})-120]

// IoUringGeteventsArg mirrors struct io_uring_getevents_arg, the argument of io_uring_enter(2) with IORING_ENTER_EXT_ARG.
type IoUringGeteventsArg struct {
	_           structs.HostLayout
	Sigmask     uint64
	SigmaskSz   uint32
	MinWaitUsec uint32
	Ts          uint64 // address of a KernelTimespec, 0 for none
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoUringGeteventsArg{})-24]

// KernelTimespec mirrors struct __kernel_timespec, include/uapi/linux/time_types.h.
type KernelTimespec struct {
	_    structs.HostLayout
	Sec  int64
	Nsec int64
}

var _ = [1]struct{}{}[unsafe.Sizeof(KernelTimespec{})-16]

// IoUringRsrcRegister mirrors struct io_uring_rsrc_register, the argument of IORING_REGISTER_BUFFERS2.
type IoUringRsrcRegister struct {
	_     structs.HostLayout
	Nr    uint32
	Flags uint32 // IORING_RSRC_REGISTER_SPARSE
	Resv2 uint64
	Data  uint64 // address of the iovecs
	Tags  uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoUringRsrcRegister{})-32]

// IoUringRsrcUpdate2 mirrors struct io_uring_rsrc_update2, the argument of IORING_REGISTER_BUFFERS_UPDATE.
type IoUringRsrcUpdate2 struct {
	_      structs.HostLayout
	Offset uint32 // the first place
	Resv   uint32
	Data   uint64 // address of the iovecs
	Tags   uint64
	Nr     uint32
	Resv2  uint32
}

var _ = [1]struct{}{}[unsafe.Sizeof(IoUringRsrcUpdate2{})-32]

// Flags of io_uring_setup(2).
const (
	IORING_SETUP_IOPOLL        uint32 = 1 << 0
	IORING_SETUP_SQPOLL        uint32 = 1 << 1
	IORING_SETUP_SQ_AFF        uint32 = 1 << 2
	IORING_SETUP_CQSIZE        uint32 = 1 << 3
	IORING_SETUP_CLAMP         uint32 = 1 << 4
	IORING_SETUP_ATTACH_WQ     uint32 = 1 << 5
	IORING_SETUP_R_DISABLED    uint32 = 1 << 6
	IORING_SETUP_SUBMIT_ALL    uint32 = 1 << 7  // v5.18
	IORING_SETUP_COOP_TASKRUN  uint32 = 1 << 8  // v5.19
	IORING_SETUP_TASKRUN_FLAG  uint32 = 1 << 9  // v5.19
	IORING_SETUP_SQE128        uint32 = 1 << 10 // v5.19
	IORING_SETUP_CQE32         uint32 = 1 << 11 // v5.19
	IORING_SETUP_SINGLE_ISSUER uint32 = 1 << 12 // v6.0
	IORING_SETUP_DEFER_TASKRUN uint32 = 1 << 13 // v6.1
	IORING_SETUP_NO_MMAP       uint32 = 1 << 14 // v6.5
	IORING_SETUP_NO_SQARRAY    uint32 = 1 << 16 // v6.6
)

// Feature bits that io_uring_setup(2) reports.
const (
	IORING_FEAT_SINGLE_MMAP uint32 = 1 << 0
	IORING_FEAT_NODROP      uint32 = 1 << 1
	IORING_FEAT_EXT_ARG     uint32 = 1 << 8
)

// Offsets of mmap(2) on the ring descriptor.
const (
	IORING_OFF_SQ_RING int64 = 0
	IORING_OFF_CQ_RING int64 = 0x8000000
	IORING_OFF_SQES    int64 = 0x10000000
)

// Bits of the submission ring's flags word.
const (
	IORING_SQ_NEED_WAKEUP uint32 = 1 << 0
	IORING_SQ_CQ_OVERFLOW uint32 = 1 << 1
	IORING_SQ_TASKRUN     uint32 = 1 << 2
)

// Flags of io_uring_enter(2).
const (
	IORING_ENTER_GETEVENTS uint32 = 1 << 0
	IORING_ENTER_SQ_WAKEUP uint32 = 1 << 1
	IORING_ENTER_SQ_WAIT   uint32 = 1 << 2
	IORING_ENTER_EXT_ARG   uint32 = 1 << 3
)

// Operations of io_uring_register(2).
const (
	IORING_REGISTER_EVENTFD        uint32 = 4
	IORING_UNREGISTER_EVENTFD      uint32 = 5
	IORING_REGISTER_BUFFERS2       uint32 = 15
	IORING_REGISTER_BUFFERS_UPDATE uint32 = 16
)

// IORING_RSRC_REGISTER_SPARSE, in the flags of an IoUringRsrcRegister: a table of empty places.
const IORING_RSRC_REGISTER_SPARSE uint32 = 1 << 0

// Opcodes, enum io_uring_op.
const (
	IORING_OP_NOP            uint8 = 0
	IORING_OP_POLL_ADD       uint8 = 6
	IORING_OP_POLL_REMOVE    uint8 = 7
	IORING_OP_SENDMSG        uint8 = 9
	IORING_OP_RECVMSG        uint8 = 10
	IORING_OP_TIMEOUT        uint8 = 11
	IORING_OP_TIMEOUT_REMOVE uint8 = 12
	IORING_OP_ACCEPT         uint8 = 13
	IORING_OP_ASYNC_CANCEL   uint8 = 14
	IORING_OP_LINK_TIMEOUT   uint8 = 15
	IORING_OP_CONNECT        uint8 = 16
	IORING_OP_CLOSE          uint8 = 19
	IORING_OP_READ           uint8 = 22
	IORING_OP_WRITE          uint8 = 23
	IORING_OP_SEND           uint8 = 26
	IORING_OP_RECV           uint8 = 27
	IORING_OP_SHUTDOWN       uint8 = 34
	IORING_OP_MSG_RING       uint8 = 40
	IORING_OP_URING_CMD      uint8 = 46
)

// Flags of a submission queue entry.
const (
	IOSQE_FIXED_FILE       uint8 = 1 << 0
	IOSQE_IO_DRAIN         uint8 = 1 << 1
	IOSQE_IO_LINK          uint8 = 1 << 2
	IOSQE_IO_HARDLINK      uint8 = 1 << 3
	IOSQE_ASYNC            uint8 = 1 << 4
	IOSQE_BUFFER_SELECT    uint8 = 1 << 5
	IOSQE_CQE_SKIP_SUCCESS uint8 = 1 << 6
)

// Flags of a completion queue entry.
const (
	IORING_CQE_F_BUFFER        uint32 = 1 << 0
	IORING_CQE_F_MORE          uint32 = 1 << 1
	IORING_CQE_F_SOCK_NONEMPTY uint32 = 1 << 2
	IORING_CQE_F_NOTIF         uint32 = 1 << 3
)

// Flags of single operations.
const (
	IORING_POLL_ADD_MULTI uint32 = 1 << 0 // in len of IORING_OP_POLL_ADD

	IORING_TIMEOUT_ABS           uint32 = 1 << 0
	IORING_TIMEOUT_ETIME_SUCCESS uint32 = 1 << 5
	IORING_TIMEOUT_MULTISHOT     uint32 = 1 << 6

	IORING_ASYNC_CANCEL_ALL uint32 = 1 << 0
	IORING_ASYNC_CANCEL_FD  uint32 = 1 << 1
	IORING_ASYNC_CANCEL_ANY uint32 = 1 << 2

	IORING_RECVSEND_POLL_FIRST uint16 = 1 << 0 // in ioprio of SEND, RECV, SENDMSG and RECVMSG
	IORING_RECV_MULTISHOT      uint16 = 1 << 1
	IORING_RECVSEND_FIXED_BUF  uint16 = 1 << 2
)
