package scsi

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrCapacityTooLarge says that READ CAPACITY(10) can not tell the size: ask with READ CAPACITY(16).
var ErrCapacityTooLarge = errors.New("capacity does not fit READ CAPACITY(10)")

// Capacity is the size and the geometry of a logical unit.
type Capacity struct {
	LastLBA            LBA    // address of the last block
	BlockLength        uint32 // bytes of a logical block
	PhysicalExponent   uint8  // a physical block has 2**PhysicalExponent logical ones
	LowestAligned      uint16 // first LBA at the start of a physical block
	ProtectionType     uint8  // 0 none, 1-3 as in SBC-3
	Provisioned        bool   // LBPME: thin or resource provisioning
	ProvisionReadsZero bool   // LBPRZ: deallocated blocks read as zeros
}

// Blocks is the number of logical blocks. It is at least 1.
func (c Capacity) Blocks() uint64 { return uint64(c.LastLBA) + 1 }

// Bytes is the size of the unit.
func (c Capacity) Bytes() uint64 { return c.Blocks() * uint64(c.BlockLength) }

// PhysicalLength is the size of a physical block, in bytes.
func (c Capacity) PhysicalLength() uint32 { return c.BlockLength << c.PhysicalExponent }

// check refuses what would overflow later: block lengths that are 0 or beyond 1 MiB, and sizes beyond 2**63 bytes.
func (c Capacity) check() error {
	if c.BlockLength == 0 || c.BlockLength > 1<<20 {
		return fmt.Errorf("scsi: capacity: logical blocks of %d bytes", c.BlockLength)
	}
	if uint64(c.LastLBA) >= (1<<63-1)/uint64(c.BlockLength) {
		return fmt.Errorf("scsi: capacity: last block %d of %d bytes is past the end of what can be addressed", c.LastLBA, c.BlockLength)
	}
	if uint64(c.BlockLength)<<c.PhysicalExponent > 1<<30 {
		return fmt.Errorf("scsi: capacity: physical blocks of 2**%d times %d bytes", c.PhysicalExponent, c.BlockLength)
	}
	return nil
}

// ParseReadCapacity10 reads the answer to READ CAPACITY(10). The error is ErrCapacityTooLarge (wrapped) when the unit has more blocks than
// the answer can say.
//
// Source: SBC-3, READ CAPACITY(10) parameter data.
func ParseReadCapacity10(b []byte) (Capacity, error) {
	if len(b) < 8 {
		return Capacity{}, shortError("READ CAPACITY(10) data", len(b), 8)
	}
	last := binary.BigEndian.Uint32(b)
	if last == 0xffffffff {
		return Capacity{}, fmt.Errorf("scsi: %w", ErrCapacityTooLarge)
	}
	c := Capacity{LastLBA: LBA(last), BlockLength: binary.BigEndian.Uint32(b[4:])}
	if err := c.check(); err != nil {
		return Capacity{}, err
	}
	return c, nil
}

// ParseReadCapacity16 reads the answer to READ CAPACITY(16); at least 12 bytes have to be there.
//
//	off len
//	  0   8  last LBA
//	  8   4  logical block length, bytes
//	 12   1  0x0e protection type - 1, 0x01 protection enabled
//	 13   1  0x0f physical block exponent
//	 14   2  0x8000 LBPME, 0x4000 LBPRZ, 0x3fff lowest aligned LBA
//
// Source: SBC-3, READ CAPACITY(16) parameter data.
func ParseReadCapacity16(b []byte) (Capacity, error) {
	if len(b) < 12 {
		return Capacity{}, shortError("READ CAPACITY(16) data", len(b), 12)
	}
	f := fields(b)
	c := Capacity{
		LastLBA:            LBA(f.u64(0)),
		BlockLength:        f.u32(8),
		PhysicalExponent:   f.u8(13) & 0x0f,
		LowestAligned:      f.u16(14) & 0x3fff,
		Provisioned:        f.u8(14)&0x80 != 0,
		ProvisionReadsZero: f.u8(14)&0x40 != 0,
	}
	if p := f.u8(12); p&1 != 0 {
		c.ProtectionType = p>>1&7 + 1
	}
	if err := c.check(); err != nil {
		return Capacity{}, err
	}
	return c, nil
}

// Mode is what MODE SENSE tells about a disk.
type Mode struct {
	WriteProtected bool // WP: writes are refused
	DPOFUA         bool // the FUA bit of READ and WRITE works
	Caching        bool // the caching page was in the answer: WCE and RCD count
	WCE            bool // write cache enabled: a flush is needed for durability
	RCD            bool // read cache disabled
}

// ParseModeSense6 reads the answer to MODE SENSE(6): the header, and the caching page if it is there.
//
//	header  0  1  mode data length, bytes after this field
//	        2  1  device-specific parameter: 0x80 WP, 0x10 DPOFUA
//	        3  1  block descriptor length, bytes
//
// Source: SPC-4, mode parameters; SBC-3, caching mode page.
func ParseModeSense6(b []byte) (Mode, error) {
	if len(b) < 4 {
		return Mode{}, shortError("MODE SENSE(6) data", len(b), 4)
	}
	return parseMode(b[:min(len(b), 1+int(b[0]))], b[2], 4+int(b[3])), nil
}

// ParseModeSense10 reads the answer to MODE SENSE(10), as [ParseModeSense6].
//
//	header  0  2  mode data length, bytes after this field
//	        3  1  device-specific parameter
//	        6  2  block descriptor length, bytes
func ParseModeSense10(b []byte) (Mode, error) {
	if len(b) < 8 {
		return Mode{}, shortError("MODE SENSE(10) data", len(b), 8)
	}
	return parseMode(b[:min(len(b), 2+int(binary.BigEndian.Uint16(b)))], b[3], 8+int(binary.BigEndian.Uint16(b[6:]))), nil
}

// parseMode walks the mode pages from off. A page that is cut off ends the walk.
func parseMode(b []byte, device uint8, off int) Mode {
	m := Mode{WriteProtected: device&0x80 != 0, DPOFUA: device&0x10 != 0}
	for off+2 <= len(b) {
		code, head, n := b[off]&0x3f, 2, int(b[off+1])
		subpage := b[off]&0x40 != 0
		if subpage {
			if off+4 > len(b) {
				break
			}
			head, n = 4, int(binary.BigEndian.Uint16(b[off+2:]))
		}
		if code == ModePageCaching && !subpage && off+3 <= len(b) && n >= 1 {
			m.Caching = true
			m.WCE = b[off+2]&0x04 != 0
			m.RCD = b[off+2]&0x01 != 0
		}
		off += head + n
	}
	return m
}
