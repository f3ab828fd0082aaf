package ublk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// MaxBuffer is the longest range of memory that one RegisterBuffer takes, bytes.
const MaxBuffer = uapi.UBLK_SHMEM_BUF_MAX

// ErrNoBuffer tells that a device has no buffer of that index.
var ErrNoBuffer = errors.New("no such buffer")

var (
	cmdRegBuf = command{name: "REG_BUF", op: uapi.UBLK_U_CMD_REG_BUF, serial: true, feature: FeatureSharedMemory,
		late: "requests are in flight that the data plane does not answer",
		hints: map[unix.Errno]string{
			unix.EEXIST: "a part of the memory is registered with this device already",
			unix.EFAULT: "the memory cannot be pinned: it is not writable, shorter than said, or of a kind that adapters cannot reach",
			unix.EINVAL: "the range is not made of whole pages, or longer than 4 GiB",
			unix.ENOMEM: "the memory cannot be had: there are too few free pages, or too few huge ones",
		}}
	cmdUnregBuf = command{name: "UNREG_BUF", op: uapi.UBLK_U_CMD_UNREG_BUF, serial: true, feature: FeatureSharedMemory,
		late:  "requests are in flight that the data plane does not answer",
		hints: map[unix.Errno]string{unix.ENOENT: "the device has no buffer of this index"}}
)

// orphanTimeout bounds the UNREG_BUF of a buffer whose registration nobody waited for.
const orphanTimeout = time.Minute

// RegisterBuffer makes a device recognise the pages of n bytes from offset off of a file in its requests: such a request is delivered with the
// index that is returned and its offset in the range instead of being copied. The file is a memfd, or lies on tmpfs or hugetlbfs; it is mapped
// shared and writable for the length of the command only, and the pages stay pinned until UnregisterBuffer or the end of the device.
//
// off and n are multiples of the file's page size, n is at most MaxBuffer. Indexes are the lowest that are free, from 0, and belong to one device.
//
// On a live device the command freezes the queue: it waits, uninterruptibly, until the requests in flight are answered, and new ones wait for it.
// Do not call it while the device is quiesced or its requests are stuck, and never from the process that serves the device. Before Start
// there is nothing to freeze. When ctx ends first and the command succeeds later, the buffer is unregistered again.
//
// Errors: ErrNotSupported before kernel 7.1 and for a device that was added without FeatureSharedMemory, ErrExist when a page is registered with the device
// already, ErrNotFound, else a *CtrlError with the errno in words.
//
// Source: UBLK_U_CMD_REG_BUF, ublk_ctrl_reg_buf.
func (c *Control) RegisterBuffer(ctx context.Context, id int, file *os.File, off, n int64) (index int, err error) {
	if page := int64(os.Getpagesize()); off < 0 || off%page != 0 || n <= 0 || n%page != 0 || n > MaxBuffer {
		return 0, &CtrlError{Dev: id, Command: cmdRegBuf.name, Errno: unix.EINVAL, Hint: cmdRegBuf.hints[unix.EINVAL]}
	}
	if !c.features.Has(FeatureSharedMemory) {
		return 0, &CtrlError{Dev: id, Command: cmdRegBuf.name, Err: ErrNotSupported, Feature: FeatureSharedMemory, Hint: "the kernel lacks " + FeatureSharedMemory.needs()}
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, &CtrlError{Dev: id, Command: cmdRegBuf.name, Err: err}
	}
	var addr unsafe.Pointer
	var mapErr error
	if err := raw.Control(func(fd uintptr) {
		addr, mapErr = unix.MmapPtr(int(fd), off, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}); err != nil || mapErr != nil {
		return 0, &CtrlError{Dev: id, Command: cmdRegBuf.name, Err: fmt.Errorf("map the memory: %w", errors.Join(err, mapErr))}
	}
	// The kernel pins the pages by way of this mapping, which therefore stays until the command is through.
	unmap := func() { _ = unix.MunmapPtr(addr, uintptr(n)) }
	k := uapi.UblkShmemBufReg{Addr: uint64(uintptr(addr)), Len: uint64(n)}
	late := func(_ []byte, res int32) {
		unmap()
		if res < 0 {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), orphanTimeout)
		defer cancel()
		_ = c.UnregisterBuffer(ctx, id, int(res)) // what stays goes with the device
	}
	res, err := c.runLate(ctx, cmdRegBuf, id, 0, bytesOf(&k), late)
	var ce *CtrlError
	if err == nil || !errors.As(err, &ce) || !ce.Pending {
		unmap()
	}
	return int(res), err
}

// UnregisterBuffer ends what RegisterBuffer began. When it has returned, no request is out that refers to the buffer, and its pages are no longer pinned by the
// device. It freezes the queue like RegisterBuffer.
//
// Errors: ErrNoBuffer when the device has no buffer of that index, ErrNotFound, ErrNotSupported.
//
// Source: UBLK_U_CMD_UNREG_BUF, ublk_ctrl_unreg_buf.
func (c *Control) UnregisterBuffer(ctx context.Context, id, index int) error {
	_, err := c.run(ctx, cmdUnregBuf, id, uint64(index), nil)
	return err
}
