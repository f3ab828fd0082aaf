//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Removal of an adapter, three sources of the same news:
//
//   - DEVICE_REMOVAL of the rdma_cm, for each id;
//   - IBV_EVENT_DEVICE_FATAL of the context, when the driver can take an open device away (mlx5 and other hardware);
//   - the kernel's "remove" message for the uverbs device. Drivers that cannot, as rxe, wait in ib_uverbs_remove_one until every context is
//     closed, and if ib_uverbs was loaded after rdma_cm they do so before the rdma_cm is told. Only this message comes then.
//
// A Conn hears of it once. When the last object on the Device is closed, the context's descriptors are closed too, although librdmacm
// keeps the context: it notices a removal only when it looks for another device, and not even then if none is left. A process that has
// used rxe and has nothing open on it any more hears nothing, and the removal of rxe waits until it exits or connects again.

// removals is set when an adapter went away, so that the next look-up has librdmacm read the list of devices again. It would otherwise
// find a device that came back under the same GUID and number by its old, dead context.
var removals atomic.Bool

// refreshDevices drops librdmacm's contexts of removed devices.
func refreshDevices() {
	if removals.Swap(false) && C.shim_refresh() == 0 {
		removals.Store(true) // no device at all: librdmacm keeps its list
	}
}

// watch subscribes to the kernel's device messages. Without them (a container) the other two sources remain.
//
// Source: the kernel's lib/kobject_uevent.c, NETLINK_KOBJECT_UEVENT, group 1.
func (d *Device) watch() {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return
	}
	if unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}) == nil && d.uevents.init(C.int(fd), "uevent") == nil {
		d.watching = true
		go d.runWatch(C.GoString(&d.ctx.device.dev_name[0]))
	}
	unix.Close(fd) // the waiter has its own
}

// runWatch waits for the removal of the uverbs device, until the Device closes.
func (d *Device) runWatch(uverbs string) {
	buf := make([]byte, 8192)
	for {
		var n int
		err := d.uevents.take(context.Background(), "recvfrom", func(fd uintptr) (errno syscall.Errno) {
			var err error
			n, _, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			errors.As(err, &errno)
			return errno
		})
		if errors.Is(err, unix.ENOBUFS) { // some messages were lost
			continue
		}
		if err != nil {
			return
		}
		if isRemoval(buf[:n], uverbs) {
			d.lost("uverbs device removed")
		}
	}
}

// isRemoval parses a kernel device message: "remove@DEVPATH", then KEY=VALUE pairs, all ended by zero bytes.
func isRemoval(msg []byte, uverbs string) bool {
	head, rest, _ := bytes.Cut(msg, []byte{0})
	return bytes.HasPrefix(head, []byte("remove@")) && bytes.HasSuffix(head, []byte("/"+uverbs)) &&
		bytes.Contains(rest, []byte("SUBSYSTEM=infiniband_verbs\x00"))
}

// lost tells the connections that the adapter goes away.
func (d *Device) lost(code string) {
	removals.Store(true)
	d.removed.Store(true)
	d.broadcast(Event{Kind: EventDeviceRemoved, Code: code}, func(*Conn) bool { return true })
}

// broadcast gives e to the connections it concerns.
func (d *Device) broadcast(e Event, concerns func(*Conn) bool) {
	devices.mu.Lock()
	var to []*Conn
	for _, c := range d.conns {
		if concerns(c) {
			to = append(to, c)
		}
	}
	devices.mu.Unlock()
	for _, c := range to {
		c.deliver(e, false)
	}
}
