package lu

import (
	"fmt"

	"iserd.org/iserd/scsi"
)

// Unit is what a target says of one logical unit.
type Unit struct {
	LUN        scsi.LUN
	Usable     bool   // it can be served as a block device
	Reason     string // why not
	DeviceType uint8  // SPC peripheral device type

	Vendor, Product, Revision string
	Serial                    string // VPD page 80h
	WWID                      string // VPD page 83h: "naa.…", "eui.…" or "t10.…"; empty when the unit has none

	Blocks            uint64 // logical blocks
	LogicalBlockSize  uint32 // bytes
	PhysicalBlockSize uint32 // bytes
	AlignmentOffset   uint32 // bytes from the start of the unit to the first physical block's start
	OptimalIOSize     uint32 // bytes, 0 when not reported
	MaxTransfer       int    // bytes of one command, a multiple of LogicalBlockSize

	ReadOnly   bool
	WriteCache bool // a flush is needed for durability
	FUA        bool // the FUA bit works
	Rotational bool
}

// Block sizes that the kernel's block layer takes, bytes.
const (
	minBlockSize = 512
	maxBlockSize = 4096
)

// refuse marks the unit as one that cannot be served.
func (u *Unit) refuse(format string, args ...any) {
	u.Usable, u.Reason = false, fmt.Sprintf(format, args...)
}

// setCapacity takes over READ CAPACITY.
func (u *Unit) setCapacity(c scsi.Capacity) {
	u.Blocks, u.LogicalBlockSize, u.PhysicalBlockSize = c.Blocks(), c.BlockLength, c.PhysicalLength()
	u.AlignmentOffset = uint32(c.LowestAligned) * c.BlockLength
	size := u.LogicalBlockSize
	switch {
	case size < minBlockSize || size > maxBlockSize || size&(size-1) != 0:
		u.refuse("logical blocks of %d bytes; 512, 1024, 2048 and 4096 can be served", size)
	case c.ProtectionType != 0:
		u.refuse("formatted with type %d protection information, which is not served", c.ProtectionType)
	case u.Blocks > (1<<63)/uint64(size):
		u.refuse("%d blocks of %d bytes are more than a block device can have", u.Blocks, size)
	}
	if u.PhysicalBlockSize > 1<<20 {
		u.PhysicalBlockSize = u.LogicalBlockSize // a nonsensical hint is no hint
	}
}

// setLimits takes over VPD page B0h; limit is what the transport carries in one command, bytes.
func (u *Unit) setLimits(l scsi.BlockLimits, limit int) {
	size := uint64(u.LogicalBlockSize)
	if size == 0 {
		return
	}
	u.MaxTransfer = limit
	if most := uint64(l.MaxTransfer) * size; most != 0 && most < uint64(limit) {
		u.MaxTransfer = int(most)
	}
	// The kernel's largest request is a multiple of its page, and at least one.
	u.MaxTransfer &^= pageSize - 1
	if u.MaxTransfer < pageSize {
		u.refuse("takes only %d blocks of %d bytes in one command, less than a page", l.MaxTransfer, size)
	}
	if optimal := uint64(l.OptimalTransfer) * size; optimal != 0 && optimal <= uint64(u.MaxTransfer) && optimal%uint64(u.PhysicalBlockSize) == 0 {
		u.OptimalIOSize = uint32(optimal)
	}
}

const pageSize = 4096
