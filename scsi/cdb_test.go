package scsi

import (
	"encoding/hex"
	"testing"
)

func TestCDBs(t *testing.T) {
	for _, c := range []struct {
		name  string
		build func(*CDB)
		want  string
	}{
		{"TestUnitReady", TestUnitReady, "00000000000000000000000000000000"},
		{"RequestSense", func(c *CDB) { RequestSense(c, 252) }, "03000000fc0000000000000000000000"},
		{"InquiryStandard", func(c *CDB) { InquiryStandard(c, 0x1234) }, "12000012340000000000000000000000"},
		{"InquiryVPD", func(c *CDB) { InquiryVPD(c, 0x83, 1024) }, "12018304000000000000000000000000"},
		{"ReadCapacity10", ReadCapacity10, "25000000000000000000000000000000"},
		{"ReadCapacity16", func(c *CDB) { ReadCapacity16(c, 32) }, "9e100000000000000000000000200000"},
		{"ModeSense6", func(c *CDB) { ModeSense6(c, 0x3f, 192) }, "1a083f00c00000000000000000000000"},
		{"ModeSense10", func(c *CDB) { ModeSense10(c, 0x08, 512) }, "5a080800000000020000000000000000"},
		{"Read10", func(c *CDB) { Read10(c, 0x01020304, 0x0506, false) }, "28000102030400050600000000000000"},
		{"Read10 FUA", func(c *CDB) { Read10(c, 0, 1, true) }, "28080000000000000100000000000000"},
		{"Read16", func(c *CDB) { Read16(c, 0x0102030405060708, 0x090a0b0c, false) }, "88000102030405060708090a0b0c0000"},
		{"Write10", func(c *CDB) { Write10(c, 0xffffffff, 1, false) }, "2a00ffffffff00000100000000000000"},
		{"Write16 FUA", func(c *CDB) { Write16(c, 1, 8, true) }, "8a080000000000000001000000080000"},
		{"SynchronizeCache10", func(c *CDB) { SynchronizeCache10(c, 0, 0) }, "35000000000000000000000000000000"},
		{"SynchronizeCache16", func(c *CDB) { SynchronizeCache16(c, 0, 0) }, "91000000000000000000000000000000"},
		{"Unmap", func(c *CDB) { Unmap(c, UnmapListLength) }, "42000000000000001800000000000000"},
		{"WriteSame16", func(c *CDB) { WriteSame16(c, 2, 3, WriteSameUnmap|WriteSameNDOB) }, "93090000000000000002000000030000"},
		{"WriteSame10", func(c *CDB) { WriteSame10(c, 2, 3, WriteSameUnmap|WriteSameNDOB) }, "41080000000200000300000000000000"},
		{"ReportOperationCode", func(c *CDB) { ReportOperationCode(c, 0x93, 4) }, "a30c0193000000000004000000000000"},
		{"ReportLuns", func(c *CDB) { ReportLuns(c, 4096) }, "a0000000000000001000000000000000"},
		{"ReportTargetPortGroups", func(c *CDB) { ReportTargetPortGroups(c, 255) }, "a30a00000000000000ff000000000000"},
	} {
		var cdb CDB
		for i := range cdb {
			cdb[i] = 0xee // builders have to overwrite everything
		}
		c.build(&cdb)
		if got := hex.EncodeToString(cdb[:]); got != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.name, got, c.want)
		}
	}
	list := make([]byte, 32)
	PutUnmapList(list, 0x0102030405060708, 0x090a0b0c)
	if got := hex.EncodeToString(list[:UnmapListLength]); got != "001600100000000001020304050607080"+"90a0b0c00000000" {
		t.Errorf("unmap list %s", got)
	}
}

func TestFits10(t *testing.T) {
	for _, c := range []struct {
		lba  LBA
		n    Blocks
		want bool
	}{
		{0, 0, true}, {0, 65535, true}, {0, 65536, false}, {0xffffffff, 1, true}, {0xffffffff, 2, false}, {1 << 32, 0, false},
		{1 << 63, 1, false}, {^LBA(0), 1, false},
	} {
		if got := Fits10(c.lba, c.n); got != c.want {
			t.Errorf("Fits10(%#x, %d) = %v", uint64(c.lba), c.n, got)
		}
	}
}

func TestBuildersDoNotAllocate(t *testing.T) {
	var cdb CDB
	list := make([]byte, UnmapListLength)
	if n := testing.AllocsPerRun(100, func() {
		Read16(&cdb, 1, 2, false)
		Write16(&cdb, 1, 2, true)
		Read10(&cdb, 1, 2, false)
		SynchronizeCache16(&cdb, 0, 0)
		WriteSame16(&cdb, 1, 2, WriteSameUnmap)
		Unmap(&cdb, UnmapListLength)
		PutUnmapList(list, 1, 2)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestParseOperationSupport(t *testing.T) {
	for b, want := range map[byte]bool{0x00: false, 0x01: false, 0x03: true, 0x05: true, 0x83: true, 0x02: false} {
		got, err := ParseOperationSupport([]byte{0, b, 0, 0})
		if err != nil || got != want {
			t.Errorf("support byte %#02x: %v, %v", b, got, err)
		}
	}
	if _, err := ParseOperationSupport([]byte{0}); err == nil {
		t.Error("one byte is accepted")
	}
}
