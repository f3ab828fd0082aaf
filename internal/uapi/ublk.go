package uapi

import (
	"structs"
	"unsafe"
)

// Control commands: cmd_op of IORING_OP_URING_CMD on /dev/ublk-control, encoded as ioctl numbers of type 'u' (include/uapi/linux/ublk_cmd.h).
const (
	UBLK_U_CMD_GET_QUEUE_AFFINITY  uint32 = 0x80207501
	UBLK_U_CMD_GET_DEV_INFO        uint32 = 0x80207502
	UBLK_U_CMD_ADD_DEV             uint32 = 0xc0207504
	UBLK_U_CMD_DEL_DEV             uint32 = 0xc0207505
	UBLK_U_CMD_START_DEV           uint32 = 0xc0207506
	UBLK_U_CMD_STOP_DEV            uint32 = 0xc0207507
	UBLK_U_CMD_SET_PARAMS          uint32 = 0xc0207508
	UBLK_U_CMD_GET_PARAMS          uint32 = 0x80207509
	UBLK_U_CMD_START_USER_RECOVERY uint32 = 0xc0207510
	UBLK_U_CMD_END_USER_RECOVERY   uint32 = 0xc0207511
	UBLK_U_CMD_GET_DEV_INFO2       uint32 = 0x80207512
	UBLK_U_CMD_GET_FEATURES        uint32 = 0x80207513
	UBLK_U_CMD_DEL_DEV_ASYNC       uint32 = 0x80207514
	UBLK_U_CMD_UPDATE_SIZE         uint32 = 0xc0207515
	UBLK_U_CMD_QUIESCE_DEV         uint32 = 0xc0207516
	UBLK_U_CMD_TRY_STOP_DEV        uint32 = 0xc0207517
	UBLK_U_CMD_REG_BUF             uint32 = 0xc0207518
	UBLK_U_CMD_UNREG_BUF           uint32 = 0xc0207519
)

// I/O commands: cmd_op of IORING_OP_URING_CMD on /dev/ublkcN (include/uapi/linux/ublk_cmd.h).
const (
	UBLK_U_IO_FETCH_REQ            uint32 = 0xc0107520
	UBLK_U_IO_COMMIT_AND_FETCH_REQ uint32 = 0xc0107521
	UBLK_U_IO_NEED_GET_DATA        uint32 = 0xc0107522
	UBLK_U_IO_REGISTER_IO_BUF      uint32 = 0xc0107523
	UBLK_U_IO_UNREGISTER_IO_BUF    uint32 = 0xc0107524
)

// Results of I/O commands; a negative one other than UBLK_IO_RES_ABORT is the errno of a refused command.
const (
	UBLK_IO_RES_OK            int32 = 0
	UBLK_IO_RES_NEED_GET_DATA int32 = 1
	UBLK_IO_RES_ABORT         int32 = -19 // -ENODEV: the command was cancelled, the tag is not fetched any more
)

// Device flags, enum-like macros UBLK_F_* of include/uapi/linux/ublk_cmd.h.
const (
	UBLK_F_SUPPORT_ZERO_COPY      uint64 = 1 << 0
	UBLK_F_URING_CMD_COMP_IN_TASK uint64 = 1 << 1
	UBLK_F_NEED_GET_DATA          uint64 = 1 << 2
	UBLK_F_USER_RECOVERY          uint64 = 1 << 3
	UBLK_F_USER_RECOVERY_REISSUE  uint64 = 1 << 4
	UBLK_F_UNPRIVILEGED_DEV       uint64 = 1 << 5
	UBLK_F_CMD_IOCTL_ENCODE       uint64 = 1 << 6
	UBLK_F_USER_COPY              uint64 = 1 << 7
	UBLK_F_ZONED                  uint64 = 1 << 8
	UBLK_F_USER_RECOVERY_FAIL_IO  uint64 = 1 << 9
	UBLK_F_UPDATE_SIZE            uint64 = 1 << 10
	UBLK_F_AUTO_BUF_REG           uint64 = 1 << 11
	UBLK_F_QUIESCE                uint64 = 1 << 12
	UBLK_F_PER_IO_DAEMON          uint64 = 1 << 13
	UBLK_F_BUF_REG_OFF_DAEMON     uint64 = 1 << 14
	UBLK_F_BATCH_IO               uint64 = 1 << 15
	UBLK_F_INTEGRITY              uint64 = 1 << 16
	UBLK_F_SAFE_STOP_DEV          uint64 = 1 << 17
	UBLK_F_NO_AUTO_PART_SCAN      uint64 = 1 << 18
	UBLK_F_SHMEM_ZC               uint64 = 1 << 19
)

// Device states, field state of UblksrvCtrlDevInfo.
const (
	UBLK_S_DEV_DEAD     uint16 = 0
	UBLK_S_DEV_LIVE     uint16 = 1
	UBLK_S_DEV_QUIESCED uint16 = 2
	UBLK_S_DEV_FAIL_IO  uint16 = 3
)

// Limits and positions of /dev/ublkcN. UBLK_NO_QUEUE and UBLK_NO_DEV are this package's names of what the header writes as (u16)-1 and -1.
const (
	UBLKSRV_CMD_BUF_OFFSET int64  = 0          // of the descriptors' mapping
	UBLKSRV_IO_BUF_OFFSET  int64  = 0x80000000 // of pread(2) and pwrite(2) with UBLK_F_USER_COPY
	UBLK_MAX_QUEUE_DEPTH          = 4096
	UBLK_MAX_NR_QUEUES            = 4096
	UBLK_IO_BUF_BITS              = 25 // one request is at most 32 MiB
	UBLK_TAG_OFF                  = UBLK_IO_BUF_BITS
	UBLK_TAG_BITS                 = 16
	UBLK_QID_OFF                  = UBLK_TAG_OFF + UBLK_TAG_BITS
	UBLK_NO_QUEUE          uint16 = 0xffff     // queue_id of commands that concern no single queue
	UBLK_NO_DEV            uint32 = 0xffffffff // dev_id of ADD_DEV: the driver chooses
	UBLK_FEATURES_LEN      uint16 = 8
)

// Kinds of parameters (field types of struct ublk_params) and attributes (field attrs of struct ublk_param_basic).
const (
	UBLK_PARAM_TYPE_BASIC     uint32 = 1 << 0
	UBLK_PARAM_TYPE_DISCARD   uint32 = 1 << 1
	UBLK_PARAM_TYPE_DEVT      uint32 = 1 << 2
	UBLK_PARAM_TYPE_ZONED     uint32 = 1 << 3
	UBLK_PARAM_TYPE_DMA_ALIGN uint32 = 1 << 4
	UBLK_PARAM_TYPE_SEGMENT   uint32 = 1 << 5

	UBLK_ATTR_READ_ONLY      uint32 = 1 << 0
	UBLK_ATTR_ROTATIONAL     uint32 = 1 << 1
	UBLK_ATTR_VOLATILE_CACHE uint32 = 1 << 2
	UBLK_ATTR_FUA            uint32 = 1 << 3
)

// Operations, the low 8 bits of UblksrvIoDesc.OpFlags.
const (
	UBLK_IO_OP_READ         uint8 = 0
	UBLK_IO_OP_WRITE        uint8 = 1
	UBLK_IO_OP_FLUSH        uint8 = 2
	UBLK_IO_OP_DISCARD      uint8 = 3
	UBLK_IO_OP_WRITE_SAME   uint8 = 4
	UBLK_IO_OP_WRITE_ZEROES uint8 = 5
)

// Flags of a request, bits of the whole UblksrvIoDesc.OpFlags.
const (
	UBLK_IO_F_FAILFAST_DEV       uint32 = 1 << 8
	UBLK_IO_F_FAILFAST_TRANSPORT uint32 = 1 << 9
	UBLK_IO_F_FAILFAST_DRIVER    uint32 = 1 << 10
	UBLK_IO_F_META               uint32 = 1 << 11
	UBLK_IO_F_FUA                uint32 = 1 << 13
	UBLK_IO_F_NOUNMAP            uint32 = 1 << 15
	UBLK_IO_F_SWAP               uint32 = 1 << 16
	UBLK_IO_F_NEED_REG_BUF       uint32 = 1 << 17
	UBLK_IO_F_INTEGRITY          uint32 = 1 << 18
	UBLK_IO_F_SHMEM_ZC           uint32 = 1 << 19
)

// UblksrvCtrlCmd mirrors struct ublksrv_ctrl_cmd, include/uapi/linux/ublk_cmd.h: the payload of a control command, at offset 48 of a
// 128-byte SQE.
type UblksrvCtrlCmd struct {
	_          structs.HostLayout
	DevID      uint32
	QueueID    uint16
	Len        uint16 // bytes at Addr
	Addr       uint64
	Data       uint64
	DevPathLen uint16
	Pad        uint16
	Reserved   uint32
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblksrvCtrlCmd{})-32]

// UblksrvCtrlDevInfo mirrors struct ublksrv_ctrl_dev_info.
type UblksrvCtrlDevInfo struct {
	_             structs.HostLayout
	NrHwQueues    uint16
	QueueDepth    uint16
	State         uint16
	Pad0          uint16
	MaxIoBufBytes uint32
	DevID         uint32
	UblksrvPid    int32
	Pad1          uint32
	Flags         uint64
	UblksrvFlags  uint64 // opaque to the driver, kept for the server
	OwnerUID      uint32
	OwnerGID      uint32
	Reserved1     uint64
	Reserved2     uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblksrvCtrlDevInfo{})-64]

// UblksrvIoDesc mirrors struct ublksrv_io_desc: one per tag in the mapping of /dev/ublkcN.
type UblksrvIoDesc struct {
	_           structs.HostLayout
	OpFlags     uint32
	NrSectors   uint32
	StartSector uint64
	Addr        uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblksrvIoDesc{})-24]

// UblksrvIoCmd mirrors struct ublksrv_io_cmd: the payload of an I/O command, at offset 48 of a 64-byte SQE.
type UblksrvIoCmd struct {
	_      structs.HostLayout
	QID    uint16
	Tag    uint16
	Result int32
	Addr   uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblksrvIoCmd{})-16]

// UblkParamBasic mirrors struct ublk_param_basic.
type UblkParamBasic struct {
	_                structs.HostLayout
	Attrs            uint32
	LogicalBsShift   uint8
	PhysicalBsShift  uint8
	IoOptShift       uint8
	IoMinShift       uint8
	MaxSectors       uint32
	ChunkSectors     uint32
	DevSectors       uint64
	VirtBoundaryMask uint64
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblkParamBasic{})-32]

// UblkParamDiscard mirrors struct ublk_param_discard.
type UblkParamDiscard struct {
	_                     structs.HostLayout
	DiscardAlignment      uint32
	DiscardGranularity    uint32
	MaxDiscardSectors     uint32
	MaxWriteZeroesSectors uint32
	MaxDiscardSegments    uint16
	Reserved0             uint16
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblkParamDiscard{})-20]

// UblkParams mirrors struct ublk_params, 152 bytes since v7.0. The parts that this project leaves to the driver are bytes.
//
//	off len
//	  0   4  len, of the struct as user space knows it
//	  4   4  types, UBLK_PARAM_TYPE_*
//	  8  32  basic
//	 40  20  discard
//	 60  16  devt, filled in by the driver
//	 76  32  zoned
//	108   8  dma_align
//	120  16  segment
//	136  16  integrity
type UblkParams struct {
	_         structs.HostLayout
	Len       uint32
	Types     uint32
	Basic     UblkParamBasic
	Discard   UblkParamDiscard
	Devt      [16]byte
	Zoned     [32]byte
	DmaAlign  [8]byte
	_         [4]byte
	Segment   [16]byte
	Integrity [16]byte
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblkParams{})-152]
