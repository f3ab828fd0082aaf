package uring

import (
	"unsafe"

	"iserd.org/iserd/internal/uapi"
)

// Completer receives the completions of the entries whose user_data is a key of its slot.
type Completer interface {
	// Complete is called by Dispatch on the ring's thread. token is what Key was given, res and flags are those of the completion.
	Complete(token uint32, res int32, flags uint32)
}

// Slot is a place in the ring's table of Completers. user_data is slot<<32 | token.
type Slot uint32

// slot is one row of the table. A detached row is used again when the kernel has answered its last operation, so that a late completion
// never reaches a stranger.
type slot struct {
	c    Completer
	ops  int32 // entries shown to the kernel whose final completion has not been dispatched
	used bool
}

// Attach enters c into the table. It allocates when the table has to grow.
func (r *Ring) Attach(c Completer) Slot {
	if n := len(r.free); n > 0 {
		s := r.free[n-1]
		r.free = r.free[:n-1]
		r.slots[s] = slot{c: c, used: true}
		return s
	}
	r.slots = append(r.slots, slot{c: c, used: true})
	return Slot(len(r.slots) - 1)
}

// Detach ends the delivery of completions to s. Completions that arrive later are dropped; s is given to another Completer only after
// the last of them. Entries that were prepared but not submitted count as outstanding.
func (r *Ring) Detach(s Slot) {
	if s == 0 || int(s) >= len(r.slots) || !r.slots[s].used || r.slots[s].c == nil {
		return
	}
	r.account()
	r.slots[s].c = nil
	r.recycle(s)
}

// Key gives the user_data of an entry.
func (s Slot) Key(token uint32) uint64 { return uint64(s)<<32 | uint64(token) }

// Outstanding is the number of operations of s that the kernel has not finished, those waiting for Enter included.
func (r *Ring) Outstanding(s Slot) int {
	r.account()
	return int(r.slots[s].ops)
}

// account enters the prepared entries into the table.
func (r *Ring) account() {
	if r.closed {
		return
	}
	for ; r.counted != r.sqeTail; r.counted++ {
		sqe := (*uapi.SQE)(unsafe.Pointer(&r.sqes[uintptr(r.counted&r.sqMask)*r.stride]))
		if s := sqe.UserData >> 32; s < uint64(len(r.slots)) {
			r.slots[s].ops++
		}
	}
}

// deliver routes one completion.
func (r *Ring) deliver(cqe uapi.CQE) {
	s := cqe.UserData >> 32
	if s >= uint64(len(r.slots)) {
		return
	}
	row := &r.slots[s]
	if cqe.Flags&uapi.IORING_CQE_F_MORE == 0 {
		row.ops--
	}
	if row.c != nil {
		row.c.Complete(uint32(cqe.UserData), cqe.Res, cqe.Flags) // may append to r.slots: row is stale afterwards
		return
	}
	r.recycle(Slot(s))
}

// recycle frees a detached row without outstanding operations.
func (r *Ring) recycle(s Slot) {
	row := &r.slots[s]
	if s != 0 && row.used && row.c == nil && row.ops <= 0 {
		row.used = false
		r.free = append(r.free, s)
	}
}
