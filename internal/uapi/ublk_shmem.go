package uapi

import (
	"structs"
	"unsafe"
)

// Flags of UblkShmemBufReg.
const UBLK_SHMEM_BUF_READ_ONLY uint32 = 1 << 0

// UBLK_SHMEM_BUF_MAX is the longest range of one UBLK_U_CMD_REG_BUF, bytes (UBLK_SHMEM_BUF_SIZE_MAX in the driver).
const UBLK_SHMEM_BUF_MAX = 4 << 30

// UblkShmemBufReg mirrors struct ublk_shmem_buf_reg, include/uapi/linux/ublk_cmd.h, since v7.1: the range that UBLK_U_CMD_REG_BUF registers.
type UblkShmemBufReg struct {
	_        structs.HostLayout
	Addr     uint64 // in the caller's address space, a multiple of the page size
	Len      uint64 // bytes, likewise
	Flags    uint32
	Reserved uint32
}

var _ = [1]struct{}{}[unsafe.Sizeof(UblkShmemBufReg{})-24]
