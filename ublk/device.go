package ublk

import (
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Device is the data plane's hold of a device: the open character device, shared by its queues.
type Device struct {
	id int
	fd int

	// refs counts the holder of the Device and every queue whose tags may still come back. The descriptor is closed by whoever takes it
	// to 0, so that no commit ever goes to a descriptor that was closed and given to somebody else.
	refs     atomic.Int32
	closed   atomic.Bool
	released chan struct{}
}

// Open opens /dev/ublkcN, which one process at a time may do.
//
// Errors: ErrBusy when another process has it open, ErrNotFound when there is no such device.
func Open(id int) (*Device, error) {
	path := charPath(id)
	// O_NONBLOCK changes nothing for the driver. It tells io_uring that reads and writes need no worker thread: see Queue.inline.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("open %s: %w: %w: another process serves it", path, ErrBusy, err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil, fmt.Errorf("open %s: %w: %w", path, ErrNotFound, err)
	case err != nil:
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	d := &Device{id: id, fd: fd, released: make(chan struct{})}
	d.refs.Store(1)
	return d, nil
}

// ID is the number of the device.
func (d *Device) ID() int { return d.id }

// Close lets go of the device; calls after the first do nothing. It may be called from any goroutine.
//
// The descriptor is closed once every queue was closed and has its tags back (Queue.Gone); Released tells when. A queue that was never
// stopped keeps it: then STOP_DEV or DEL_DEV of the control process gives the tags back, or the end of the ring does.
func (d *Device) Close() error {
	if d.closed.CompareAndSwap(false, true) {
		d.unref()
	}
	return nil
}

// Released is closed when the character device is.
func (d *Device) Released() <-chan struct{} { return d.released }

func (d *Device) unref() {
	if d.refs.Add(-1) == 0 {
		_ = unix.Close(d.fd) // a character device has nothing to write back
		close(d.released)
	}
}
