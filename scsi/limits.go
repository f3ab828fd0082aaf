package scsi

import "encoding/binary"

// BlockLimits is VPD page B0. Lengths are in logical blocks; 0 means that the unit reports no limit, unless said otherwise.
type BlockLimits struct {
	WriteSameNonZero          bool // WSNZ: WRITE SAME with 0 blocks is refused
	OptimalGranularity        uint32
	MaxTransfer               uint32
	OptimalTransfer           uint32
	MaxUnmapBlocks            uint32 // of one UNMAP command; 0: UNMAP is not supported
	MaxUnmapDescriptors       uint32 // ranges in one UNMAP command; 0: UNMAP is not supported
	OptimalUnmapGranularity   uint32
	UnmapGranularityAligned   bool // UGAVALID: UnmapGranularityAlignment counts
	UnmapGranularityAlignment uint32
	MaxWriteSame              uint64
}

// ParseBlockLimits reads VPD page B0. SBC-2 units end after OptimalTransfer; the rest is 0 then.
//
// Source: SBC-3, Block Limits VPD page.
func ParseBlockLimits(b []byte) (BlockLimits, error) {
	if _, err := vpdPayload(b, PageBlockLimits); err != nil {
		return BlockLimits{}, err
	}
	f := fields(b[:min(len(b), 4+int(binary.BigEndian.Uint16(b[2:])))])
	l := BlockLimits{
		WriteSameNonZero:        f.u8(4)&1 != 0,
		OptimalGranularity:      uint32(f.u16(6)),
		MaxTransfer:             f.u32(8),
		OptimalTransfer:         f.u32(12),
		MaxUnmapBlocks:          f.u32(20),
		MaxUnmapDescriptors:     f.u32(24),
		OptimalUnmapGranularity: f.u32(28),
		MaxWriteSame:            f.u64(36),
	}
	if a := f.u32(32); a&0x80000000 != 0 {
		l.UnmapGranularityAligned, l.UnmapGranularityAlignment = true, a&0x7fffffff
	}
	return l, nil
}

// Characteristics is VPD page B1.
type Characteristics struct {
	RotationRate uint16 // 0 not reported, 1 not rotating, else turns per minute
	Zoned        uint8  // 0 not reported, 1 host aware, 2 device managed
}

// Rotational tells whether seeking costs time; a unit that does not say counts as rotational, as in the kernel.
func (c Characteristics) Rotational() bool { return c.RotationRate != 1 }

// ParseCharacteristics reads VPD page B1.
//
// Source: SBC-3, Block Device Characteristics VPD page.
func ParseCharacteristics(b []byte) (Characteristics, error) {
	if _, err := vpdPayload(b, PageCharacteristics); err != nil {
		return Characteristics{}, err
	}
	f := fields(b[:min(len(b), 4+int(binary.BigEndian.Uint16(b[2:])))])
	return Characteristics{RotationRate: f.u16(4), Zoned: f.u8(8) >> 4 & 3}, nil
}

// Provisioning is VPD page B2.
type Provisioning struct {
	Unmap         bool  // LBPU: UNMAP works
	WriteSame16   bool  // LBPWS: WRITE SAME(16) with the UNMAP bit works
	WriteSame10   bool  // LBPWS10: WRITE SAME(10) with the UNMAP bit works
	ReadsZeros    bool  // LBPRZ: deallocated blocks read as zeros
	Anchor        bool  // ANC_SUP
	ThresholdSets uint8 // threshold exponent, 0 for none
	Type          uint8 // 0 not reported, 1 resource provisioned, 2 thin provisioned
}

// ParseProvisioning reads VPD page B2.
//
// Source: SBC-3, Logical Block Provisioning VPD page.
func ParseProvisioning(b []byte) (Provisioning, error) {
	if _, err := vpdPayload(b, PageProvisioning); err != nil {
		return Provisioning{}, err
	}
	f := fields(b[:min(len(b), 4+int(binary.BigEndian.Uint16(b[2:])))])
	v := f.u8(5)
	return Provisioning{
		Unmap:         v&0x80 != 0,
		WriteSame16:   v&0x40 != 0,
		WriteSame10:   v&0x20 != 0,
		ReadsZeros:    v>>2&7 == 1,
		Anchor:        v&0x02 != 0,
		ThresholdSets: f.u8(4),
		Type:          f.u8(6) & 7,
	}, nil
}

// ParseOperationSupport reads the answer to REPORT SUPPORTED OPERATION CODES for one command: whether the unit knows it, by the standard or in
// its own way.
//
//	off len
//	  1   1  0x07 support: 0 not known yet, 1 not supported, 3 supported by the standard, 5 in the vendor's way
//
// Source: SPC-4, one_command parameter data.
func ParseOperationSupport(b []byte) (bool, error) {
	if len(b) < 2 {
		return false, shortError("REPORT SUPPORTED OPERATION CODES data", len(b), 2)
	}
	support := b[1] & 7
	return support == 3 || support == 5, nil
}

// fields reads numbers at fixed places of a page that may end early: what is not there is 0, which is how these pages say "not reported".
type fields []byte

func (f fields) u8(off int) uint8 {
	if off+1 > len(f) {
		return 0
	}
	return f[off]
}

func (f fields) u16(off int) uint16 {
	if off+2 > len(f) {
		return 0
	}
	return binary.BigEndian.Uint16(f[off:])
}

func (f fields) u32(off int) uint32 {
	if off+4 > len(f) {
		return 0
	}
	return binary.BigEndian.Uint32(f[off:])
}

func (f fields) u64(off int) uint64 {
	if off+8 > len(f) {
		return 0
	}
	return binary.BigEndian.Uint64(f[off:])
}
