package ublk

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlRange passes a byte range {start, length} to a block device.
func ioctlRange(fd int, op uint, rng *[2]uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(op), uintptr(unsafe.Pointer(rng))); errno != 0 {
		return errno
	}
	return nil
}
