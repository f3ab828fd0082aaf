package api

import "time"

// Kinds of shared memory.
const (
	BufferSlice   = "slice"   // of the daemon's arena, lent to one program at a time
	BufferMemfd   = "memfd"   // brought by a program on the bus
	BufferPath    = "path"    // a file on tmpfs or hugetlbfs that the administrator named
	BufferProcess = "process" // a shared mapping of a process that was adopted
)

// States of shared memory.
const (
	BufferReady    = "ready"    // registered with every device that it is meant for
	BufferWaiting  = "waiting"  // not with each of them yet; Devices tells why
	BufferFree     = "free"     // a slice that nobody has
	BufferLent     = "lent"     // a slice that Owner has
	BufferReturned = "returned" // a slice that is to be overwritten with zeroes before somebody else gets it; its former borrower still has it mapped, or requests are in flight
	BufferRemoving = "removing" // waits for devices whose session is not up; Devices has those that are left
)

// States of shared memory with one device.
const (
	BufferRegistered = "registered" // O_DIRECT requests from the memory need no copy
	BufferPending    = "pending"    // waits until the session is up, or until a command to the driver is through
	BufferFailed     = "failed"     // requests are served with a copy; Reason tells why
)

// Buffer is memory that a program shares with the daemon, or a slice of the arena that is there to be lent.
type Buffer struct {
	ID       uint32         `json:"id"`
	Kind     string         `json:"kind"`
	State    string         `json:"state"`
	Length   uint64         `json:"length"`    // bytes
	PageSize uint64         `json:"page_size"` // bytes: 4096, or that of a huge page
	UID      uint32         `json:"uid"`       // user to whose account it goes
	Owner    string         `json:"owner"`     // unique bus name whose end is its end, "" for none
	PID      int            `json:"pid"`       // process whose end is its end, 0 for none
	Path     string         `json:"path"`      // file, or the name that the kernel shows for the mapping
	Since    time.Time      `json:"since"`
	Devices  []BufferDevice `json:"devices"`
	Requests uint64         `json:"requests"` // that moved their data in this memory without a copy
	Bytes    uint64         `json:"bytes"`
}

// BufferDevice is how memory stands with one device.
type BufferDevice struct {
	UblkID int    `json:"ublk_id"`
	Path   string `json:"path"`
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// Arena is the memory that is there to be lent.
type Arena struct {
	Slices    int    `json:"slices"`
	SliceSize uint64 `json:"slice_size"` // bytes
	Free      int    `json:"free"`
	Lent      int    `json:"lent"`
	Returned  int    `json:"returned"`
	Reason    string `json:"reason,omitempty"` // why there is none
}

// BufferAddRequest registers a file on tmpfs or hugetlbfs, which the daemon opens.
type BufferAddRequest struct {
	Path    string   `json:"path"`    // absolute
	Offset  uint64   `json:"offset"`  // bytes, a multiple of the page size
	Length  uint64   `json:"length"`  // bytes, likewise; 0: up to the end
	Devices []string `json:"devices"` // paths such as /dev/ublkb0; empty: all that are there and that will be
}

// BufferAdoptRequest registers the shared memory of a process that knows nothing of it.
type BufferAdoptRequest struct {
	PID     int      `json:"pid"`
	Minimum uint64   `json:"minimum"` // smallest mapping to take, bytes; 0: 65536
	Devices []string `json:"devices"` // as in BufferAddRequest
}

// BufferRemoveRequest ends the registration of memory: of one buffer, or of all of an adopted process.
type BufferRemoveRequest struct {
	ID  uint32 `json:"id"`
	PID int    `json:"pid"`
}

// BuffersReply lists shared memory. As an answer to a change it lists what was changed.
type BuffersReply struct {
	Version int      `json:"version"`
	Buffers []Buffer `json:"buffers"`
	Arena   Arena    `json:"arena"`
	Notes   []string `json:"notes"` // what was left out, and why
}

// Tiers: the ways that payload goes.
const (
	TierShared     = "shared"     // no copy: the adapter reaches the application's memory
	TierRegistered = "registered" // one copy by the driver, to or from memory that was registered once
	TierTCP        = "tcp"        // through a socket
)

// Tier tells whether requests of a device can go one way.
type Tier struct {
	Name     string `json:"name"`
	Possible bool   `json:"possible"`
	Reason   string `json:"reason"` // why, or why not, in one sentence
}
