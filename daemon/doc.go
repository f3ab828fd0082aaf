// Package daemon is the control plane: it turns requests (discover, login, logout) into sessions of the data plane and block devices of the
// kernel, keeps both in step, and answers what there is.
//
// Layer: below package daemon/bus and the socket in http.go, which are two doors to the one [Service]; above package internal/ipc
// (the data plane, iserd-io), the control half of package ublk, and discovery. No I/O of a device passes through it and its
// death stops none.
//
// # Order of a login
//
//	data plane  login            sessions up, logical units known
//	kernel      ADD_DEV          for each usable unit: the driver chooses the number
//	kernel      SET_PARAMS
//	files       RUN/devices/N.*  written before the device can be seen
//	data plane  attach           queues fetch
//	kernel      REG_BUF          for each piece of shared memory: nothing has to stop yet; then data plane  bind
//	kernel      START_DEV        /dev/ublkbN appears, and udev reads it at once
//
// Logout goes the other way: TRY_STOP_DEV (refused while somebody has the device open), detach, DEL_DEV, files, logout. Each step
// that fails undoes the ones before it, with a deadline of its own that the caller's cannot shorten.
//
// # State
//
// What is desired and what is there are the same thing here: a session group in the data plane is to have a device for each usable unit. The
// truth about sessions is in the data plane, about devices in the kernel, and about which device is which unit in both the data plane
// and RUN/devices. A starting daemon reads all three ([Service] adopt.go) and finishes or undoes what a dead one left half-done: a session that is
// there gets its missing devices, also one whose logout was cut short, and a device that no session serves is deleted.
//
// # Shared memory
//
// takeover.go hands sessions and devices of a data plane that has ended to the next one; upgrade.go ends one in order for that.
//
// buffers.go is the registry of memory that programs share with the data plane, registration.go brings each device in step with it, arena.go lends slices of
// the daemon's own, memory.go and process.go know about files and processes. docs/shared-memory.md is for those who use it. The order that
// must hold, for each device and buffer:
//
//	data plane buffer-add -> REG_BUF -> bind ... UNREG_BUF -> unbind -> data plane buffer-remove
//
// A client's memory is mapped here only for the length of REG_BUF, and touched never; only slices are written, when they come back.
//
// # Locks
//
// One lock for each target name serialises login, logout and clean-up of that target (keylock.go), so that 50 logins of one target make one
// session and logins of different targets do not wait for each other; an upgrade of the data plane takes all of them at once.
// Service.mu guards the maps, is taken after a target's lock, and is never held while something is awaited.
//
// # Traps
//
//   - ublk control commands must not come from the process that serves the device, and wait without interrupt when that process does not answer:
//     each has a deadline here, and none is issued under Service.mu.
//   - This process never opens a /dev/ublkbN. Who uses a device is read from /proc and /sys.
//   - DEL_DEV waits until the data plane has closed the character device: detach first.
//   - REG_BUF and UNREG_BUF stop a device's requests and wait without interrupt: only while its session is up, and never two for one device.
//   - Anybody may send descriptors over the bus, and memory that changes its size or its pages while it is looked at.
//   - A target may say anything. Names are checked before they are stored or printed, and never become paths.
package daemon
