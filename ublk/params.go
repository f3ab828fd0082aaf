package ublk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"unsafe"

	"iserd.org/iserd/internal/uapi"
)

// SectorSize is the unit of the block layer in bytes, whatever the logical block size of a device.
const SectorSize = 512

// Sector is a position or a length in sectors of 512 bytes.
type Sector uint64

// Bytes is s in bytes.
func (s Sector) Bytes() uint64 { return uint64(s) * SectorSize }

// Attrs are the attributes of a device, UBLK_ATTR_*.
type Attrs uint32

// The attributes. Without AttrVolatileCache no FLUSH is ever sent, and AttrFUA is ignored.
const (
	AttrReadOnly      Attrs = Attrs(uapi.UBLK_ATTR_READ_ONLY)
	AttrRotational    Attrs = Attrs(uapi.UBLK_ATTR_ROTATIONAL)
	AttrVolatileCache Attrs = Attrs(uapi.UBLK_ATTR_VOLATILE_CACHE)
	AttrFUA           Attrs = Attrs(uapi.UBLK_ATTR_FUA)
)

// Params are the properties of the block device, set between Add and Start. Block and I/O sizes are bytes and powers of two.
type Params struct {
	Attrs         Attrs
	LogicalBlock  uint32 // 512 up to the page size
	PhysicalBlock uint32 // LogicalBlock or more; 0 means LogicalBlock
	MinIO         uint32 // smallest efficient I/O, a hint; 0 means PhysicalBlock
	OptimalIO     uint32 // optimal I/O, a hint; 0 for none
	MaxSectors    uint32 // of one request; a page or more, and no more than the device's MaxIOBytes
	ChunkSectors  uint32 // requests never cross a multiple of it; 0 for none
	Sectors       Sector // size of the device
	DMAAlign      uint32 // alignment in bytes that O_DIRECT buffers must have, a power of two below the page size; 0 leaves 4

	// Discard and zeroing limits; the zero value refuses both.
	Discard Discard
}

// Discard are the limits of DISCARD and WRITE_ZEROES requests. One DISCARD carries one range.
type Discard struct {
	MaxSectors            uint32 // of one DISCARD; 0: no DISCARD
	Granularity           uint32 // bytes; 0 means LogicalBlock
	Alignment             uint32 // bytes from the device's start to the first granule
	MaxWriteZeroesSectors uint32 // of one WRITE_ZEROES; 0: no WRITE_ZEROES
}

// maxRange caps DISCARD and WRITE_ZEROES, so that their length in bytes fits 32 bits: kernels before 6.11 cut longer ones short.
const maxRange = 1<<23 - 8

// Validate reports the first field that the driver would refuse, in words; the driver only says EINVAL.
//
// Source: ublk_validate_params, drivers/block/ublk_drv.c.
func (p *Params) Validate() error {
	page := uint32(os.Getpagesize())
	pow2 := func(v uint32) bool { return v&(v-1) == 0 }
	switch {
	case p.LogicalBlock < SectorSize || p.LogicalBlock > page || !pow2(p.LogicalBlock):
		return fmt.Errorf("logical block size %d: want a power of two from 512 to the page size of %d", p.LogicalBlock, page)
	case p.PhysicalBlock != 0 && (p.PhysicalBlock < p.LogicalBlock || p.PhysicalBlock > 256<<20 || !pow2(p.PhysicalBlock)):
		return fmt.Errorf("physical block size %d: want a power of two from the logical block size of %d to 256 MiB", p.PhysicalBlock, p.LogicalBlock)
	case p.MinIO > 256<<20 || !pow2(p.MinIO):
		return fmt.Errorf("minimum I/O size %d: want a power of two up to 256 MiB", p.MinIO)
	case p.OptimalIO > 256<<20 || !pow2(p.OptimalIO):
		return fmt.Errorf("optimal I/O size %d: want a power of two up to 256 MiB", p.OptimalIO)
	case p.MaxSectors < page/SectorSize:
		return fmt.Errorf("maximum of %d sectors per request: want a page (%d sectors) or more", p.MaxSectors, page/SectorSize)
	case p.Sectors == 0:
		return errors.New("device of 0 sectors")
	case p.Sectors.Bytes()%uint64(p.LogicalBlock) != 0:
		return fmt.Errorf("device of %d sectors is not a multiple of its logical block size %d", p.Sectors, p.LogicalBlock)
	case p.DMAAlign != 0 && (!pow2(p.DMAAlign) || p.DMAAlign >= page):
		return fmt.Errorf("DMA alignment %d: want a power of two below the page size", p.DMAAlign)
	}
	return nil
}

// shift is the exponent of a power of two.
func shift(v uint32) uint8 { return uint8(bits.TrailingZeros32(v)) }

// encode gives the driver's form of valid parameters.
func (p *Params) encode() uapi.UblkParams {
	phys := max(p.PhysicalBlock, p.LogicalBlock)
	k := uapi.UblkParams{
		Len:   uint32(unsafe.Sizeof(uapi.UblkParams{})),
		Types: uapi.UBLK_PARAM_TYPE_BASIC,
		Basic: uapi.UblkParamBasic{
			Attrs:           uint32(p.Attrs),
			LogicalBsShift:  shift(p.LogicalBlock),
			PhysicalBsShift: shift(phys),
			IoMinShift:      shift(max(p.MinIO, phys)),
			MaxSectors:      p.MaxSectors,
			ChunkSectors:    p.ChunkSectors,
			DevSectors:      uint64(p.Sectors),
		},
	}
	if p.OptimalIO != 0 {
		k.Basic.IoOptShift = shift(p.OptimalIO)
	}
	if d := p.Discard; d.MaxSectors != 0 || d.MaxWriteZeroesSectors != 0 {
		k.Types |= uapi.UBLK_PARAM_TYPE_DISCARD
		k.Discard = uapi.UblkParamDiscard{
			DiscardAlignment:      d.Alignment,
			DiscardGranularity:    max(d.Granularity, p.LogicalBlock),
			MaxDiscardSectors:     min(d.MaxSectors, maxRange),
			MaxWriteZeroesSectors: min(d.MaxWriteZeroesSectors, maxRange),
			MaxDiscardSegments:    1,
		}
	}
	if p.DMAAlign != 0 {
		k.Types |= uapi.UBLK_PARAM_TYPE_DMA_ALIGN
		binary.NativeEndian.PutUint32(k.DmaAlign[:4], p.DMAAlign-1)
	}
	return k
}

// decodeParams gives the public form of what the driver reported.
func decodeParams(k *uapi.UblkParams) Params {
	size := func(shift uint8) uint32 {
		if shift == 0 || shift > 31 {
			return 0
		}
		return 1 << shift
	}
	p := Params{
		Attrs:         Attrs(k.Basic.Attrs),
		LogicalBlock:  size(k.Basic.LogicalBsShift),
		PhysicalBlock: size(k.Basic.PhysicalBsShift),
		MinIO:         size(k.Basic.IoMinShift),
		OptimalIO:     size(k.Basic.IoOptShift),
		MaxSectors:    k.Basic.MaxSectors,
		ChunkSectors:  k.Basic.ChunkSectors,
		Sectors:       Sector(k.Basic.DevSectors),
	}
	if k.Types&uapi.UBLK_PARAM_TYPE_DISCARD != 0 {
		p.Discard = Discard{
			MaxSectors:            k.Discard.MaxDiscardSectors,
			Granularity:           k.Discard.DiscardGranularity,
			Alignment:             k.Discard.DiscardAlignment,
			MaxWriteZeroesSectors: k.Discard.MaxWriteZeroesSectors,
		}
	}
	if k.Types&uapi.UBLK_PARAM_TYPE_DMA_ALIGN != 0 {
		p.DMAAlign = binary.NativeEndian.Uint32(k.DmaAlign[:4]) + 1
	}
	return p
}
