package scsi

import "encoding/binary"

// LBA is the address of a logical block.
type LBA uint64

// Blocks is a number of logical blocks in one command.
type Blocks uint32

// CDB is a command descriptor block, zero padded to the 16 bytes that an iSCSI command carries.
type CDB = [16]byte

// Operation codes (SPC-4, SBC-3).
const (
	OpTestUnitReady         uint8 = 0x00
	OpRequestSense          uint8 = 0x03
	OpInquiry               uint8 = 0x12
	OpModeSense6            uint8 = 0x1a
	OpReadCapacity10        uint8 = 0x25
	OpRead10                uint8 = 0x28
	OpWrite10               uint8 = 0x2a
	OpSynchronizeCache10    uint8 = 0x35
	OpWriteSame10           uint8 = 0x41
	OpUnmap                 uint8 = 0x42
	OpModeSense10           uint8 = 0x5a
	OpRead16                uint8 = 0x88
	OpWrite16               uint8 = 0x8a
	OpSynchronizeCache16    uint8 = 0x91
	OpWriteSame16           uint8 = 0x93
	OpServiceActionIn16     uint8 = 0x9e // with service action 10h: READ CAPACITY(16)
	OpReportLuns            uint8 = 0xa0
	OpMaintenanceIn         uint8 = 0xa3 // with service action 0Ah: REPORT TARGET PORT GROUPS; 0Ch: REPORT SUPPORTED OPERATION CODES
	saReadCapacity16        uint8 = 0x10
	saReportTargetPortGroup uint8 = 0x0a
	saReportOperationCodes  uint8 = 0x0c
)

const fuaBit = 0x08 // FUA in byte 1 of READ and WRITE

// TestUnitReady asks whether the unit takes media access commands. No data.
func TestUnitReady(cdb *CDB) { *cdb = CDB{OpTestUnitReady} }

// RequestSense asks for sense data in fixed format, at most n bytes.
func RequestSense(cdb *CDB, n uint8) { *cdb = CDB{0: OpRequestSense, 4: n} }

// InquiryStandard asks for the standard INQUIRY data, at most n bytes; 36 is the least that holds all of [Inquiry].
func InquiryStandard(cdb *CDB, n uint16) {
	*cdb = CDB{OpInquiry}
	binary.BigEndian.PutUint16(cdb[3:], n)
}

// InquiryVPD asks for vital product data page page, at most n bytes.
func InquiryVPD(cdb *CDB, page uint8, n uint16) {
	*cdb = CDB{OpInquiry, 1, page}
	binary.BigEndian.PutUint16(cdb[3:], n)
}

// ReadCapacity10 asks for the capacity in 8 bytes.
func ReadCapacity10(cdb *CDB) { *cdb = CDB{OpReadCapacity10} }

// ReadCapacity16 asks for the capacity, at most n bytes; the answer has 32.
func ReadCapacity16(cdb *CDB, n uint32) {
	*cdb = CDB{OpServiceActionIn16, saReadCapacity16}
	binary.BigEndian.PutUint32(cdb[10:], n)
}

// Mode pages.
const (
	ModePageCaching uint8 = 0x08
	ModePageControl uint8 = 0x0a
	ModePageAll     uint8 = 0x3f
)

// ModeSense6 asks for the current values of a mode page, without block descriptors, at most n bytes.
func ModeSense6(cdb *CDB, page uint8, n uint8) {
	*cdb = CDB{0: OpModeSense6, 1: 0x08, 2: page & 0x3f, 4: n}
}

// ModeSense10 is [ModeSense6] with a two-byte length.
func ModeSense10(cdb *CDB, page uint8, n uint16) {
	*cdb = CDB{OpModeSense10, 0x08, page & 0x3f}
	binary.BigEndian.PutUint16(cdb[7:], n)
}

// Fits10 tells whether READ(10), WRITE(10) and SYNCHRONIZE CACHE(10) can address the range. Prefer the 16-byte forms where the unit has
// them; every unit above 2 TiB has, and some small old ones have not.
func Fits10(lba LBA, n Blocks) bool {
	return uint64(lba)+uint64(n) <= 1<<32 && lba < 1<<32 && n <= 0xffff
}

func cdb10(cdb *CDB, op, flags uint8, lba LBA, n Blocks) {
	*cdb = CDB{op, flags}
	binary.BigEndian.PutUint32(cdb[2:], uint32(lba))
	binary.BigEndian.PutUint16(cdb[7:], uint16(n))
}

func cdb16(cdb *CDB, op, flags uint8, lba LBA, n Blocks) {
	*cdb = CDB{op, flags}
	binary.BigEndian.PutUint64(cdb[2:], uint64(lba))
	binary.BigEndian.PutUint32(cdb[10:], uint32(n))
}

func fuaFlag(fua bool) uint8 {
	if fua {
		return fuaBit
	}
	return 0
}

// Read10 reads n blocks from lba; fua reads from the medium. Preconditions: Fits10(lba, n).
func Read10(cdb *CDB, lba LBA, n Blocks, fua bool) { cdb10(cdb, OpRead10, fuaFlag(fua), lba, n) }

// Read16 reads n blocks from lba; fua reads from the medium.
func Read16(cdb *CDB, lba LBA, n Blocks, fua bool) { cdb16(cdb, OpRead16, fuaFlag(fua), lba, n) }

// Write10 writes n blocks at lba; with fua the status comes after the data are on the medium. Preconditions: Fits10(lba, n).
func Write10(cdb *CDB, lba LBA, n Blocks, fua bool) { cdb10(cdb, OpWrite10, fuaFlag(fua), lba, n) }

// Write16 writes n blocks at lba; with fua the status comes after the data are on the medium.
func Write16(cdb *CDB, lba LBA, n Blocks, fua bool) { cdb16(cdb, OpWrite16, fuaFlag(fua), lba, n) }

// SynchronizeCache10 puts n blocks from lba on the medium; n = 0 means up to the end of the unit. Preconditions: Fits10(lba, n).
func SynchronizeCache10(cdb *CDB, lba LBA, n Blocks) { cdb10(cdb, OpSynchronizeCache10, 0, lba, n) }

// SynchronizeCache16 puts n blocks from lba on the medium; n = 0 means up to the end of the unit, so (0, 0) is a flush of everything.
func SynchronizeCache16(cdb *CDB, lba LBA, n Blocks) { cdb16(cdb, OpSynchronizeCache16, 0, lba, n) }

// UnmapListLength is the length of the UNMAP parameter list for one range, in bytes.
const UnmapListLength = 24

// Unmap sends a parameter list of n bytes (see [PutUnmapList]).
func Unmap(cdb *CDB, n uint16) {
	*cdb = CDB{OpUnmap}
	binary.BigEndian.PutUint16(cdb[7:], n)
}

// PutUnmapList writes the UNMAP parameter list for one range to dst. Preconditions: len(dst) >= UnmapListLength.
//
//	off len
//	  0   2  UNMAP data length, bytes after this field (22)
//	  2   2  block descriptor data length (16)
//	  8   8  LBA
//	 16   4  number of blocks
func PutUnmapList(dst []byte, lba LBA, n Blocks) {
	dst = dst[:UnmapListLength]
	clear(dst)
	binary.BigEndian.PutUint16(dst[0:], UnmapListLength-2)
	binary.BigEndian.PutUint16(dst[2:], 16)
	binary.BigEndian.PutUint64(dst[8:], uint64(lba))
	binary.BigEndian.PutUint32(dst[16:], uint32(n))
}

// WriteSameFlags are the options of WRITE SAME(16), byte 1.
type WriteSameFlags uint8

// Options of WRITE SAME(16) (SBC-3).
const (
	WriteSameNDOB   WriteSameFlags = 0x01 // no data-out buffer: zeros, without sending a block
	WriteSameUnmap  WriteSameFlags = 0x08 // the blocks may be deallocated
	WriteSameAnchor WriteSameFlags = 0x10 // the blocks are anchored
)

// WriteSame16 writes one block, sent as data, to n blocks from lba. n = 0 means up to the end of the unit, where the unit allows it.
func WriteSame16(cdb *CDB, lba LBA, n Blocks, flags WriteSameFlags) {
	cdb16(cdb, OpWriteSame16, uint8(flags)&0x19, lba, n)
}

// WriteSame10 is [WriteSame16] for small units: of the flags it has no WriteSameNDOB. Preconditions: Fits10(lba, n).
func WriteSame10(cdb *CDB, lba LBA, n Blocks, flags WriteSameFlags) {
	cdb10(cdb, OpWriteSame10, uint8(flags)&0x18, lba, n)
}

// ReportLuns asks for the logical units that this nexus can address, at most n bytes; n has to be 16 or more.
func ReportLuns(cdb *CDB, n uint32) {
	*cdb = CDB{OpReportLuns}
	binary.BigEndian.PutUint32(cdb[6:], n)
}

// ReportTargetPortGroups asks for the ALUA states, in the format with the short header, at most n bytes.
func ReportTargetPortGroups(cdb *CDB, n uint32) {
	*cdb = CDB{OpMaintenanceIn, saReportTargetPortGroup}
	binary.BigEndian.PutUint32(cdb[6:], n)
}

// ReportOperationCode asks whether the unit knows an operation code that has no service actions, at most n bytes; 4 are enough for
// [ParseOperationSupport].
func ReportOperationCode(cdb *CDB, op uint8, n uint32) {
	*cdb = CDB{OpMaintenanceIn, saReportOperationCodes, 0x01, op}
	binary.BigEndian.PutUint32(cdb[6:], n)
}
