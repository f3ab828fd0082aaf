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
	Absent     bool   // there is no unit under this number
	Err        error  // it could not be asked: nothing else is known
	DeviceType uint8  // SPC peripheral device type

	Vendor, Product, Revision string
	Serial                    string // VPD page 80h
	WWID                      string // VPD page 83h: "naa.…", "eui.…" or "t10.…"; empty when the unit has none

	// PortGroup is the target port group of the port through which the unit was asked, nil for a unit without asymmetric access (ALUA).
	PortGroup *uint16

	Blocks            uint64 // logical blocks
	LogicalBlockSize  uint32 // bytes
	PhysicalBlockSize uint32 // bytes
	AlignmentOffset   uint32 // bytes from the start of the unit to the first physical block's start
	MinIOSize         uint32 // bytes, 0 when not reported: multiples of it cost the unit no extra work
	OptimalIOSize     uint32 // bytes, 0 when not reported
	MaxTransfer       int    // bytes of one command, a multiple of LogicalBlockSize

	ReadOnly     bool
	WriteCache   bool // a flush is needed for durability
	CacheAssumed bool // the unit did not say whether it has a cache: WriteCache is a guess
	FUA          bool // the FUA bit works
	Rotational   bool

	Discard            RangeMethod
	MaxDiscard         uint64 // logical blocks of one command
	DiscardGranularity uint32 // bytes
	DiscardAlignment   uint32 // bytes from the start of the unit to the first granule
	Zeroes             RangeMethod
	MaxZeroes          uint64 // logical blocks of one command
	ZeroesUnmap        bool   // zeroing may deallocate: blocks that were read as zeros
}

// RangeMethod is the command that carries out a DISCARD or a WRITE_ZEROES.
type RangeMethod uint8

// The methods.
const (
	RangeNone        RangeMethod = 0 // not supported
	RangeUnmap       RangeMethod = 1 // UNMAP with one descriptor
	RangeWriteSame16 RangeMethod = 2 // WRITE SAME(16), one block of zeros; with the UNMAP bit where blocks may be deallocated
	RangeWriteSame10 RangeMethod = 3 // WRITE SAME(10), likewise
)

// String is the name of the command.
func (m RangeMethod) String() string {
	switch m {
	case RangeUnmap:
		return "UNMAP"
	case RangeWriteSame16:
		return "WRITE SAME(16)"
	case RangeWriteSame10:
		return "WRITE SAME(10)"
	}
	return "none"
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
	if granule := uint64(l.OptimalGranularity) * size; granule <= 256<<20 {
		u.MinIOSize = uint32(granule)
	}
	if optimal := uint64(l.OptimalTransfer) * size; optimal != 0 && optimal <= uint64(u.MaxTransfer) && optimal%uint64(u.PhysicalBlockSize) == 0 {
		u.OptimalIOSize = uint32(optimal)
	}
}

const pageSize = 4096

// Limits of ranges that the unit does not bound itself, logical blocks. The kernel's SCSI disk driver has the same: beyond 64 Ki blocks it sends
// WRITE SAME only to units that say they take more.
const (
	maxRangeBlocks     = 0x7fffff
	maxWriteSameBlocks = 0xffff
)

// setRanges decides about DISCARD and WRITE_ZEROES by what the unit says of itself; knows16 and knows10 tell whether it knows the WRITE SAME commands.
//
// Source: SBC-3 sections 4.7 (logical block provisioning) and 6.6.3 to 6.6.5; UNMAP needs LBPME, a limit of blocks and one of descriptors.
func (u *Unit) setRanges(c scsi.Capacity, l scsi.BlockLimits, p scsi.Provisioning, hasProvisioning, knows16, knows10 bool) {
	if u.ReadOnly || u.LogicalBlockSize == 0 {
		return
	}
	small := u.Blocks <= 1<<32 // WRITE SAME(10) reaches everything
	same := l.MaxWriteSame
	if same == 0 {
		same = maxWriteSameBlocks
	}
	same = min(same, maxRangeBlocks)
	unmap := l.MaxUnmapBlocks > 0 && l.MaxUnmapDescriptors > 0
	if c.Provisioned {
		switch {
		case unmap && (p.Unmap || !hasProvisioning):
			u.Discard, u.MaxDiscard = RangeUnmap, min(uint64(l.MaxUnmapBlocks), maxRangeBlocks)
		case p.WriteSame16:
			u.Discard, u.MaxDiscard = RangeWriteSame16, same
		case p.WriteSame10 && small:
			u.Discard, u.MaxDiscard = RangeWriteSame10, min(same, maxWriteSameBlocks)
		}
	}
	switch {
	case knows16 || c.Provisioned && p.WriteSame16:
		u.Zeroes, u.MaxZeroes = RangeWriteSame16, same
		u.ZeroesUnmap = c.Provisioned && c.ProvisionReadsZero && p.WriteSame16
	case small && (knows10 || c.Provisioned && p.WriteSame10):
		u.Zeroes, u.MaxZeroes = RangeWriteSame10, min(same, maxWriteSameBlocks)
		u.ZeroesUnmap = c.Provisioned && c.ProvisionReadsZero && p.WriteSame10
	}
	if u.Discard == RangeNone {
		return
	}
	granularity := uint64(l.OptimalUnmapGranularity) * uint64(u.LogicalBlockSize)
	if granularity < uint64(u.PhysicalBlockSize) || granularity > 1<<31 {
		granularity = uint64(u.PhysicalBlockSize)
	}
	u.DiscardGranularity = uint32(granularity)
	if l.UnmapGranularityAligned {
		u.DiscardAlignment = uint32(uint64(l.UnmapGranularityAlignment) * uint64(u.LogicalBlockSize) % granularity)
	}
}

// Changed tells why now cannot be served as what u is: it is gone, or another unit; "" when it can. A unit that could not be asked has not
// changed, as far as anybody knows.
//
// The identity is that of VPD page 83; without one, serial number, vendor and product.
func (u *Unit) Changed(now *Unit) string {
	switch {
	case now.Err != nil:
		return ""
	case now.Absent:
		return "the target has no unit under this number any more"
	case u.WWID != "" && now.WWID != u.WWID:
		return fmt.Sprintf("the target has another unit under this number now: %s, it was %s", orNone(now.WWID), u.WWID)
	case u.WWID == "" && (now.Serial != u.Serial || now.Vendor != u.Vendor || now.Product != u.Product):
		return fmt.Sprintf("the target has another unit under this number now: %s %s, serial number %s; it was %s %s, serial number %s",
			now.Vendor, now.Product, orNone(now.Serial), u.Vendor, u.Product, orNone(u.Serial))
	case now.LogicalBlockSize != 0 && now.LogicalBlockSize != u.LogicalBlockSize:
		return fmt.Sprintf("the unit has logical blocks of %d bytes now, it had %d", now.LogicalBlockSize, u.LogicalBlockSize)
	}
	return ""
}

func orNone(s string) string {
	if s == "" {
		return "(none)"
	}
	return s
}

// Renewed is u with what may change while a unit is served taken from now: its size, write protection, cache. What a block device cannot change
// while it is there stays as it is.
func (u *Unit) Renewed(now *Unit) *Unit {
	v := *u
	v.Blocks, v.ReadOnly, v.FUA, v.Revision = now.Blocks, now.ReadOnly, now.FUA, now.Revision
	v.WriteCache, v.CacheAssumed = now.WriteCache, now.CacheAssumed
	v.Discard, v.MaxDiscard, v.DiscardGranularity, v.DiscardAlignment = now.Discard, now.MaxDiscard, now.DiscardGranularity, now.DiscardAlignment
	v.Zeroes, v.MaxZeroes, v.ZeroesUnmap = now.Zeroes, now.MaxZeroes, now.ZeroesUnmap
	return &v
}
