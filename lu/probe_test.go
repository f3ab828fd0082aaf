package lu

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// device answers the commands of a probe; what it does not have it refuses.
type device struct {
	luns      []scsi.LUN // of REPORT LUNS; nil: the command is not known
	reportAt  scsi.LUN
	kind      byte // first byte of the INQUIRY data
	serial    string
	naa       byte // last byte of the identity
	pages     map[uint8][]byte
	capacity  [32]byte
	mode6     []byte
	mode10    []byte
	supported map[uint8]bool // answers of REPORT SUPPORTED OPERATION CODES; nil: the command is not known
	gone      bool
	err       error
	attention int // unit attentions before the first answer
	mu        sync.Mutex
}

func newDevice() *device {
	d := &device{luns: []scsi.LUN{0}, serial: "one", naa: 1, pages: map[uint8][]byte{}, mode6: []byte{0x17, 0, 0x10, 0, 0x08, 18, 0x04}}
	d.mode6 = append(d.mode6, make([]byte, 17)...)
	binary.BigEndian.PutUint64(d.capacity[:], 2047)
	binary.BigEndian.PutUint32(d.capacity[8:], 512)
	return d
}

func (d *device) Execute(_ context.Context, lun scsi.LUN, cdb [16]byte, n int) (Result, error) {
	if d.err != nil {
		return Result{}, d.err
	}
	fail := func(key, asc, ascq byte) (Result, error) {
		return Result{Status: scsi.StatusCheckCondition, Sense: []byte{0x70, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0}}, nil
	}
	good := func(b []byte) (Result, error) { return Result{Data: b[:min(n, len(b))]}, nil }
	page := func(code uint8, body []byte) (Result, error) {
		return good(append([]byte{0, code, byte(len(body) >> 8), byte(len(body))}, body...))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.attention > 0 {
		d.attention--
		return fail(6, 0x29, 0)
	}
	if cdb[0] == scsi.OpReportLuns {
		if d.luns == nil || lun != d.reportAt {
			return fail(5, 0x20, 0)
		}
		b := make([]byte, 8+8*len(d.luns))
		binary.BigEndian.PutUint32(b, uint32(8*len(d.luns)))
		for i, l := range d.luns {
			binary.BigEndian.PutUint64(b[8+8*i:], uint64(l))
		}
		return good(b)
	}
	if d.gone {
		return fail(5, 0x25, 0)
	}
	switch cdb[0] {
	case scsi.OpInquiry:
		if cdb[1] == 0 {
			b := make([]byte, 36)
			b[0], b[2], b[4] = d.kind, 6, 31
			copy(b[8:], "VENDOR  PRODUCT         1.0 ")
			return good(b)
		}
		switch code := cdb[2]; code {
		case scsi.PageSupported:
			list := []byte{0, 0x80, 0x83}
			for _, p := range []uint8{0xb0, 0xb1, 0xb2} {
				if d.pages[p] != nil {
					list = append(list, p)
				}
			}
			return page(code, list)
		case scsi.PageSerialNumber:
			return page(code, []byte(d.serial))
		case scsi.PageIdentification:
			if d.naa == 0 {
				return page(code, nil)
			}
			return page(code, append([]byte{1, 3, 0, 16, 0x60}, append(make([]byte, 14), d.naa)...))
		default:
			if b := d.pages[code]; b != nil {
				return page(code, b)
			}
		}
	case scsi.OpServiceActionIn16:
		return good(d.capacity[:])
	case scsi.OpModeSense6:
		if d.mode6 != nil && cdb[2] == scsi.ModePageCaching {
			return good(d.mode6)
		}
	case scsi.OpModeSense10:
		if d.mode10 != nil && cdb[2] == scsi.ModePageCaching {
			return good(d.mode10)
		}
	case scsi.OpMaintenanceIn:
		if d.supported != nil {
			if d.supported[cdb[3]] {
				return good([]byte{0, 3, 0, 16})
			}
			return good([]byte{0, 1, 0, 0})
		}
	}
	return fail(5, 0x20, 0)
}

// limits is VPD page B0 behind its header.
func limitsPage(unmapBlocks, descriptors, granularity, alignment uint32, same uint64) []byte {
	b := make([]byte, 60)
	binary.BigEndian.PutUint16(b[2:], 8) // optimal transfer length granularity
	binary.BigEndian.PutUint32(b[16:], unmapBlocks)
	binary.BigEndian.PutUint32(b[20:], descriptors)
	binary.BigEndian.PutUint32(b[24:], granularity)
	binary.BigEndian.PutUint32(b[28:], alignment)
	binary.BigEndian.PutUint64(b[32:], same)
	return b
}

func provisioningPage(flags byte) []byte { return []byte{0, flags, 2, 0} }

// How a unit is to deallocate and zero blocks, by all that it may say of itself.
func TestProbeRanges(t *testing.T) {
	const lbpme, lbprz = 0x80, 0x40
	type want struct {
		discard  RangeMethod
		max      uint64
		zeroes   RangeMethod
		maxZero  uint64
		unmap    bool
		granule  uint32
		aligned  uint32
		readOnly bool
	}
	for _, c := range []struct {
		name string
		set  func(d *device)
		want want
	}{
		{"says nothing", func(*device) {}, want{}},
		{"thick, knows WRITE SAME(16)", func(d *device) { d.supported = map[uint8]bool{scsi.OpWriteSame16: true} },
			want{zeroes: RangeWriteSame16, maxZero: 0xffff}},
		{"thick, knows WRITE SAME(10)", func(d *device) { d.supported = map[uint8]bool{scsi.OpWriteSame10: true} },
			want{zeroes: RangeWriteSame10, maxZero: 0xffff}},
		{"thick, limit of WRITE SAME", func(d *device) { d.pages[0xb0] = limitsPage(0, 0, 0, 0, 4096) }, want{zeroes: RangeWriteSame16, maxZero: 4096}},
		{"limits of UNMAP without LBPME", func(d *device) { d.pages[0xb0] = limitsPage(8192, 1, 0, 0, 0); d.pages[0xb2] = provisioningPage(0x80) }, want{}},
		{"thin by UNMAP", func(d *device) {
			d.capacity[14] = lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(8192, 1, 16, 0x80000000|20, 0), provisioningPage(0x80)
		}, want{discard: RangeUnmap, max: 8192, granule: 8192, aligned: 4 * 512}},
		{"thin by UNMAP, no page B2", func(d *device) {
			d.capacity[14] = lbpme
			d.pages[0xb0] = limitsPage(0xffffffff, 0xffffffff, 0, 0, 0)
		}, want{discard: RangeUnmap, max: maxRangeBlocks, granule: 512}},
		{"UNMAP without descriptors", func(d *device) {
			d.capacity[14] = lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(8192, 0, 0, 0, 0), provisioningPage(0x80)
		}, want{}},
		{"thin by WRITE SAME(16), reads zeros", func(d *device) {
			d.capacity[14] = lbpme | lbprz
			d.pages[0xb0], d.pages[0xb2] = limitsPage(0, 0, 0, 0, 1000), provisioningPage(0x44)
		}, want{discard: RangeWriteSame16, max: 1000, zeroes: RangeWriteSame16, maxZero: 1000, unmap: true, granule: 512}},
		{"thin by both, does not read zeros", func(d *device) {
			d.capacity[14] = lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(8, 1, 0, 0, 0), provisioningPage(0xc0)
		}, want{discard: RangeUnmap, max: 8, zeroes: RangeWriteSame16, maxZero: 0xffff, granule: 512}},
		{"thin by WRITE SAME(10)", func(d *device) {
			d.capacity[14] = lbpme | lbprz
			d.pages[0xb2] = provisioningPage(0x24)
		}, want{discard: RangeWriteSame10, max: 0xffff, zeroes: RangeWriteSame10, maxZero: 0xffff, unmap: true, granule: 512}},
		{"WRITE SAME(10) does not reach the end", func(d *device) {
			binary.BigEndian.PutUint64(d.capacity[:], 1<<33)
			d.capacity[14] = lbpme | lbprz
			d.pages[0xb2] = provisioningPage(0x24)
		}, want{}},
		{"4K-native", func(d *device) {
			binary.BigEndian.PutUint32(d.capacity[8:], 4096)
			d.capacity[14] = lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(100, 1, 4, 0x80000003, 0), provisioningPage(0x80)
		}, want{discard: RangeUnmap, max: 100, granule: 16384, aligned: 12288}},
		{"512e", func(d *device) {
			d.capacity[13], d.capacity[14] = 3, lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(100, 1, 1, 0, 0), provisioningPage(0x80)
		}, want{discard: RangeUnmap, max: 100, granule: 4096}},
		{"write protected", func(d *device) {
			d.mode6[2] = 0x90
			d.capacity[14] = lbpme
			d.pages[0xb0], d.pages[0xb2] = limitsPage(100, 1, 1, 0, 10), provisioningPage(0xe0)
		}, want{readOnly: true}},
	} {
		d := newDevice()
		c.set(d)
		u, err := Probe(context.Background(), d, 0, 1<<20)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		got := want{u.Discard, u.MaxDiscard, u.Zeroes, u.MaxZeroes, u.ZeroesUnmap, u.DiscardGranularity, u.DiscardAlignment, u.ReadOnly}
		if got != c.want || !u.Usable {
			t.Errorf("%s:\n got %+v\nwant %+v (usable %v)", c.name, got, c.want, u.Usable)
		}
	}
}

// Write protection, cache and FUA come with either MODE SENSE, and are guessed to the safe side without.
func TestProbeMode(t *testing.T) {
	ten := append([]byte{0, 26, 0, 0x90, 0, 0, 0, 0, 0x08, 18, 0x00}, make([]byte, 17)...)
	for _, c := range []struct {
		name                        string
		mode6, mode10               []byte
		readOnly, cache, guess, fua bool
	}{
		{"MODE SENSE(6)", newDevice().mode6, nil, false, true, false, true},
		{"MODE SENSE(10)", nil, ten, true, false, false, true},
		{"neither", nil, nil, false, true, true, false},
		{"no caching page", []byte{3, 0, 0x80, 0}, nil, true, true, true, false},
	} {
		d := newDevice()
		d.mode6, d.mode10 = c.mode6, c.mode10
		u, err := Probe(context.Background(), d, 0, 1<<20)
		if err != nil || u.ReadOnly != c.readOnly || u.WriteCache != c.cache || u.CacheAssumed != c.guess || u.FUA != c.fua {
			t.Errorf("%s: %+v, %v", c.name, u, err)
		}
	}
}

// Every addressing form of a unit number; none twice, no well known unit, nothing left out in silence.
func TestProbeAll(t *testing.T) {
	d := newDevice()
	d.attention = 1
	d.luns = []scsi.LUN{
		0,
		5 << 48,                  // peripheral
		0x4005 << 48,             // flat: unit 5 again
		0x4123 << 48,             // flat
		0x8007 << 48,             // logical unit
		0xd2001000 << 32,         // extended flat, 24 bits
		0xd2200000 << 32,         // extended flat, a number beyond 16 bits
		scsi.ReportLunsWellKnown, // well known
		0x0001_0002_0000_0000,    // two levels
		0x0001_0003_0000_0000,    // two levels, another unit
		0x0102 << 48,             // bus 1
	}
	units, err := ProbeAll(context.Background(), d, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, u := range units {
		s := u.LUN.String()
		if !u.Usable {
			s += " no"
			if !strings.Contains(u.Reason, "levels") {
				t.Errorf("%v: reason %q", u.LUN, u.Reason)
			}
		}
		got = append(got, s)
	}
	want := "0, 5, 291, 7, 4096, 2097152 no, 0x0001000200000000 no, 0x0001000300000000 no, 0x0102000000000000 no"
	if s := strings.Join(got, ", "); s != want {
		t.Errorf("units\n got %s\nwant %s", s, want)
	}

	d.luns, d.reportAt = []scsi.LUN{3 << 48}, scsi.ReportLunsWellKnown
	if units, err := ProbeAll(context.Background(), d, 1<<20); err != nil || len(units) != 1 || units[0].LUN.Number() != 3 {
		t.Errorf("list of the well known unit: %v, %v", units, err)
	}
	d.luns = nil
	if units, err := ProbeAll(context.Background(), d, 1<<20); err != nil || len(units) != 1 || units[0].LUN != 0 || !units[0].Usable {
		t.Errorf("target without REPORT LUNS: %v, %v", units, err)
	}
	d.err = iscsi.ErrSessionLost
	if _, err := ProbeAll(context.Background(), d, 1<<20); !errors.Is(err, iscsi.ErrSessionLost) {
		t.Errorf("lost session: %v", err)
	}
}

// When a unit is another one.
func TestChanged(t *testing.T) {
	look := func(d *device) *Unit {
		u, err := ProbeOne(context.Background(), d, 0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for _, c := range []struct {
		name string
		set  func(d *device)
		want string
	}{
		{"nothing", func(*device) {}, ""},
		{"size", func(d *device) { d.capacity[6] = 0xff }, ""},
		{"identity", func(d *device) { d.naa = 2 }, "another unit"},
		{"identity is lost", func(d *device) { d.naa = 0 }, "another unit"},
		{"serial number, same identity", func(d *device) { d.serial = "two" }, ""},
		{"block size", func(d *device) { d.capacity[10] = 0x10 }, "logical blocks of 4096 bytes"},
		{"not connected", func(d *device) { d.kind = 0x7f }, "no unit under this number"},
		{"gone", func(d *device) { d.gone = true }, "no unit under this number"},
		{"a tape", func(d *device) { d.kind = 1 }, "another unit"},
		{"no answer", func(d *device) { d.err = errors.New("no memory") }, ""},
	} {
		old, d := look(newDevice()), newDevice()
		c.set(d)
		if got := old.Changed(look(d)); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	// Without an identity the serial number counts.
	d := newDevice()
	d.naa = 0
	old := look(d)
	d.serial = "two"
	if got := old.Changed(look(d)); !strings.Contains(got, "serial number two") {
		t.Errorf("other serial number: %q", got)
	}
	d.serial, d.naa = "one", 7
	if got := old.Changed(look(d)); got != "" {
		t.Errorf("an identity that came: %q", got)
	}

	grown := newDevice()
	grown.capacity[6], grown.mode6[2] = 0xff, 0x80
	u := look(newDevice())
	v := u.Renewed(look(grown))
	if v.Blocks != 0x10000 || !v.ReadOnly || v.FUA || v.WWID != u.WWID || v.MaxTransfer != u.MaxTransfer || v == u {
		t.Errorf("renewed %+v", v)
	}
}

// answers gives out bytes in pieces, each with its length before it; when they are used up, commands are refused.
type answers struct{ b []byte }

func (a *answers) Execute(_ context.Context, _ scsi.LUN, _ [16]byte, n int) (Result, error) {
	if len(a.b) == 0 {
		return Result{Status: scsi.StatusCheckCondition, Sense: []byte{0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0}}, nil
	}
	k := min(int(a.b[0]), len(a.b)-1, n)
	data := a.b[1 : 1+k]
	a.b = a.b[1+k:]
	return Result{Data: data}, nil
}

// FuzzProbe: whatever a unit says of itself, what is served can be served.
func FuzzProbe(f *testing.F) {
	rec := &recorder{x: newDevice()}
	rec.x.capacity[14] = 0xc0
	rec.x.pages[0xb0], rec.x.pages[0xb1], rec.x.pages[0xb2] = limitsPage(8192, 1, 16, 0x80000014, 100), []byte{0, 1, 0, 0, 0}, provisioningPage(0xe4)
	if _, err := Probe(context.Background(), rec, 0, 1<<20); err != nil {
		f.Fatal(err)
	}
	f.Add(rec.b)
	f.Fuzz(func(t *testing.T, b []byte) {
		u, err := Probe(context.Background(), &answers{b}, 0, 1<<20)
		if err != nil {
			if u != nil {
				t.Fatal("error and value")
			}
			return
		}
		if !u.Usable {
			if u.Reason == "" {
				t.Fatal("no reason")
			}
			return
		}
		size := u.LogicalBlockSize
		power := size&(size-1) == 0
		ranges := (u.Discard == RangeNone || u.MaxDiscard > 0 && u.DiscardGranularity >= size && u.DiscardAlignment < u.DiscardGranularity) &&
			(u.Zeroes == RangeNone || u.MaxZeroes > 0) && u.MaxDiscard <= maxRangeBlocks && u.MaxZeroes <= maxRangeBlocks
		if size < 512 || size > 4096 || !power || u.Blocks == 0 || u.MaxTransfer < pageSize || u.MaxTransfer > 1<<20 || u.PhysicalBlockSize < size || !ranges {
			t.Fatalf("%+v", u)
		}
	})
}

// recorder keeps what a device answers, in the form that answers takes.
type recorder struct {
	x *device
	b []byte
}

func (r *recorder) Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (Result, error) {
	a, err := r.x.Execute(ctx, lun, cdb, n)
	r.b = append(append(r.b, byte(len(a.Data))), a.Data...)
	return a, err
}
