// Package uapi mirrors the parts of the Linux kernel's user space interface that golang.org/x/sys/unix lacks: io_uring and ublk.
//
// Layer: the lowest one; it imports nothing but the standard library and makes no system call. Neighbours: internal/uring drives the
// rings, package ublk speaks the ublk protocol.
//
// Names are spelled as in the kernel (IORING_SETUP_SQPOLL, UBLK_U_CMD_ADD_DEV), so that a search finds the kernel's own code. Every struct
// is host byte order and natural alignment, carries [structs.HostLayout], and is followed by an assertion of its size that does not
// compile when it is wrong; the tests compare the offsets of fields and the encoded command numbers. All of it is the same on amd64 and
// arm64, whatever the page size.
//
// Sources: include/uapi/linux/io_uring.h and include/uapi/linux/ublk_cmd.h of Linux 7.2.
package uapi
