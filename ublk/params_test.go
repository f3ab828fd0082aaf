package ublk

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"iserd.org/iserd/internal/uapi"
)

func TestValidate(t *testing.T) {
	good := func() Params { return Params{LogicalBlock: 512, MaxSectors: 2048, Sectors: 1 << 20} }
	if p := good(); p.Validate() != nil {
		t.Fatal(p.Validate())
	}
	page := uint32(os.Getpagesize())
	for want, change := range map[string]func(p *Params){
		"logical block size 0":             func(p *Params) { p.LogicalBlock = 0 },
		"logical block size 520":           func(p *Params) { p.LogicalBlock = 520 },
		"logical block size":               func(p *Params) { p.LogicalBlock = 2 * page },
		"physical block size 256":          func(p *Params) { p.PhysicalBlock = 256 },
		"physical block size 5000":         func(p *Params) { p.PhysicalBlock = 5000 },
		"minimum I/O size 3000":            func(p *Params) { p.MinIO = 3000 },
		"optimal I/O size 536870912":       func(p *Params) { p.OptimalIO = 512 << 20 },
		"maximum of 1 sectors per request": func(p *Params) { p.MaxSectors = 1 },
		"device of 0 sectors":              func(p *Params) { p.Sectors = 0 },
		"device of 9 sectors":              func(p *Params) { p.Sectors, p.LogicalBlock = 9, 4096 },
		"DMA alignment 3":                  func(p *Params) { p.DMAAlign = 3 },
		"DMA alignment":                    func(p *Params) { p.DMAAlign = page },
	} {
		p := good()
		change(&p)
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestEncodeGolden holds the bytes of struct ublk_params, include/uapi/linux/ublk_cmd.h of Linux 7.2, field by field, little endian. That the
// driver takes such parameters and gives them back is TestGuestControl's business.
func TestEncodeGolden(t *testing.T) {
	p := Params{
		Attrs: AttrVolatileCache | AttrFUA, LogicalBlock: 512, PhysicalBlock: 4096, OptimalIO: 1 << 20, MaxSectors: 2048, Sectors: 131072,
		DMAAlign: 512, Discard: Discard{MaxSectors: 1 << 31, Granularity: 4096, MaxWriteZeroesSectors: 65536},
	}
	want := "98000000" + "13000000" + // len 152; basic, discard, dma_align
		"0c000000" + "090c140c" + "00080000" + "00000000" + "0000020000000000" + "0000000000000000" + // basic
		"00000000" + "00100000" + "f8ff7f00" + "00000100" + "0100" + "0000" + // discard, the length capped below 4 GiB
		strings.Repeat("00", 16+32) + // devt, zoned
		"ff01000000000000" + "00000000" + // dma_align, padding
		strings.Repeat("00", 16+16) // segment, integrity
	k := p.encode()
	if got := hex.EncodeToString(bytesOf(&k)); got != want {
		t.Errorf("encoded\n%s, want\n%s", got, want)
	}
}

// TestRoundTrip encodes and decodes: what is valid comes back, with defaults filled in.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lbs := uint32(512) << rapid.IntRange(0, 3).Draw(t, "lbs")
		p := Params{
			Attrs:         Attrs(rapid.Uint32Range(0, 15).Draw(t, "attrs")),
			LogicalBlock:  lbs,
			PhysicalBlock: lbs << rapid.IntRange(0, 4).Draw(t, "pbs"),
			MaxSectors:    rapid.Uint32Range(128, 65536).Draw(t, "max"),
			ChunkSectors:  rapid.Uint32().Draw(t, "chunk"),
			Sectors:       Sector(rapid.Uint64Range(1, 1<<40).Draw(t, "size")) * Sector(lbs/512),
		}
		p.MinIO = p.PhysicalBlock << rapid.IntRange(0, 3).Draw(t, "min")
		if rapid.Bool().Draw(t, "opt") {
			p.OptimalIO = 1 << rapid.IntRange(12, 28).Draw(t, "optimal")
		}
		if rapid.Bool().Draw(t, "discard") {
			p.Discard = Discard{MaxSectors: rapid.Uint32Range(1, maxRange).Draw(t, "discard"), Granularity: lbs * rapid.Uint32Range(1, 100).Draw(t, "granularity")}
		}
		if rapid.Bool().Draw(t, "dma") {
			p.DMAAlign = 1 << rapid.IntRange(2, 11).Draw(t, "align")
		}
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		k := p.encode()
		if got := decodeParams(&k); got != p {
			t.Fatalf("%+v became %+v", p, got)
		}
	})
}

func TestDecodeStrange(t *testing.T) {
	k := uapi.UblkParams{Basic: uapi.UblkParamBasic{LogicalBsShift: 200}}
	if p := decodeParams(&k); p.LogicalBlock != 0 {
		t.Errorf("block size of a shift of 200: %d", p.LogicalBlock)
	}
}

func TestFeatureNames(t *testing.T) {
	for f, want := range map[Features]string{
		0:                               "none",
		FeatureUserCopy:                 "USER_COPY",
		FeatureQuiesce | FeatureBatchIO: "QUIESCE|BATCH_IO",
		FeatureSharedMemory | 1<<40:     "SHMEM_ZC|bit40",
	} {
		if got := f.String(); got != want {
			t.Errorf("%#x is %q, want %q", uint64(f), got, want)
		}
	}
	if len(featureTable) != 20 || FeatureSharedMemory != 1<<19 {
		t.Error("the table of names does not end at the last feature")
	}
	if s := (FeatureUserCopy | 1<<50).needs(); s != "USER_COPY (kernel 6.5), bit50 (unknown)" {
		t.Errorf("needs %q", s)
	}
	if !(FeatureQuiesce | FeatureRecovery).Has(FeatureQuiesce) || FeatureQuiesce.Has(FeatureQuiesce|FeatureRecovery) {
		t.Error("Has is wrong")
	}
}
