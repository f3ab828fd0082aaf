package scsi

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// unhex turns hex with blanks into bytes; test data only.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLUN(t *testing.T) {
	for _, c := range []struct {
		lun    LUN
		number uint64
		text   string
		single bool
	}{
		{0, 0, "0", true},
		{0x0001 << 48, 1, "1", true},
		{0x00ff << 48, 255, "255", true},
		{0x4100 << 48, 256, "256", true},
		{0x7fff << 48, 16383, "16383", true},
		{0x4001 << 48, 1, "1", true},
		{0x8005 << 48, 5, "5", true},
		{0x8125 << 48, 5, "0x8125000000000000", false},
		{0xd2010203 << 32, 0x010203, "66051", true},
		{0xe20102030405 << 16, 0x0102030405, "4328719365", true},
		{ReportLunsWellKnown, 0xc101 << 48, "0xc101000000000000", true},
		{0x0101 << 48, 1, "0x0101000000000000", false},
		{0x0001000200000000, 1, "0x0001000200000000", false},
		{0xffffffffffffffff, 0xffffffffffffffff, "0xffffffffffffffff", false},
	} {
		if got := c.lun.Number(); got != c.number {
			t.Errorf("%#016x: number %d, want %d", uint64(c.lun), got, c.number)
		}
		if got := c.lun.String(); got != c.text || c.lun.SingleLevel() != c.single {
			t.Errorf("%#016x: %q %v", uint64(c.lun), got, c.lun.SingleLevel())
		}
	}
	for n := range uint16(16384) {
		l := NewLUN(n)
		if l.Number() != uint64(n) || !l.SingleLevel() || (l.Method() == MethodFlat) != (n > 255) {
			t.Fatalf("NewLUN(%d) = %#016x", n, uint64(l))
		}
	}
}

func TestReportLuns(t *testing.T) {
	two := "00000010 00000000 0000000000000000 4100000000000000"
	for _, c := range []struct {
		in     string
		luns   []LUN
		needed int
		ok     bool
	}{
		{"", nil, 0, false},
		{"00000000000000", nil, 0, false},
		{"00000000 00000000", []LUN{}, 8, true},
		{two, []LUN{0, 0x4100 << 48}, 24, true},
		{two + "ffff", []LUN{0, 0x4100 << 48}, 24, true},
		{two[:len(two)-2], []LUN{0}, 24, true},
		{"00000800 00000000 0001000000000000", []LUN{1 << 48}, 2056, true},
		{"00000011 00000000 00", nil, 0, false},
		{"fffffff8 00000000 00", nil, 0, false},
	} {
		luns, needed, err := ParseReportLuns(unhex(t, c.in))
		if (err == nil) != c.ok || needed != c.needed || !reflect.DeepEqual(luns, c.luns) {
			t.Errorf("%s: %v %d %v", c.in, luns, needed, err)
		}
	}
}

// lioInquiry is what a LIO RAM disk (RAMDISK-MCP) answers, by its documented layout.
const lioInquiry = "00 00 06 02 1f 10 00 02" + "4c494f2d4f524720" + "52414d4449534b2d4d43502020202020" + "342e3020"

func TestInquiry(t *testing.T) {
	q, err := ParseInquiry(unhex(t, lioInquiry))
	want := Inquiry{Connected: true, Version: 6, TPGS: 1, CmdQue: true, Vendor: "LIO-ORG", Product: "RAMDISK-MCP", Revision: "4.0"}
	if err != nil || q != want {
		t.Errorf("%+v, %v", q, err)
	}
	q, err = ParseInquiry(unhex(t, "7f 00 05 02 00"))
	if err != nil || q.Connected || q.Type != TypeNone || q.Vendor != "" {
		t.Errorf("%+v, %v", q, err)
	}
	q, err = ParseInquiry(append(unhex(t, "05 80 05 02 1f 00 00 00"), "\x1b[31mEV\x00product\nname \xff\x00rev1"...))
	if err != nil || q.Vendor != "?[31mEV" || q.Type != TypeCDDVD || !q.Removable || strings.ContainsAny(q.Product, "\n\x1b\xff") {
		t.Errorf("%+v, %v", q, err)
	}
	if _, err := ParseInquiry(make([]byte, 4)); err == nil {
		t.Error("4 bytes were enough")
	}
}

func TestVPDHeader(t *testing.T) {
	for _, c := range []string{"", "000000", "00800000"} {
		if _, err := ParseSupportedPages(unhex(t, c)); err == nil {
			t.Errorf("%q is page 00", c)
		}
	}
	pages, err := ParseSupportedPages(unhex(t, "00 00 0003 00 80 83 b0"))
	if err != nil || !bytes.Equal(pages, []byte{0, 0x80, 0x83}) {
		t.Error(pages, err)
	}
	s, err := ParseSerialNumber(append(unhex(t, "00 80 00ff"), "  6a3b-11 \x00"...))
	if err != nil || s != "6a3b-11" {
		t.Errorf("%q %v", s, err)
	}
}

func TestIdentity(t *testing.T) {
	const (
		naa6  = "01 03 00 10 6001405aabbccddeeff0011223344556 "
		naa5  = "01 03 00 08 5001405aabbccdde "
		naa3  = "01 03 00 08 3001405aabbccdde "
		eui8  = "01 02 00 08 0025b50011223344 "
		eui16 = "01 02 00 10 0025b500112233440025b50011223344 "
		t10   = "02 01 00 14 4c494f2d4f524720 36613362 2020 2f2e2e2f 0000 " // "LIO-ORG 6a3b  /../"
		port  = "61 93 00 08 5001405000000001 "
		vend  = "02 01 00 08 4c494f2d4f524720 "
		zero  = "01 03 00 08 0000000000000000 "
		cut   = "01 03 00 10 6001405a"
	)
	for _, c := range []struct{ in, want string }{
		{"", ""}, {port, ""}, {vend, ""}, {zero, ""}, {cut, ""},
		{t10, "t10.LIO-ORG_6a3b_+2f..+2f"},
		{t10 + eui8, "eui.0025b50011223344"},
		{eui8 + eui16, "eui.0025b500112233440025b50011223344"},
		{eui8 + naa3 + t10, "naa.3001405aabbccdde"},
		{naa3 + naa5 + eui16, "naa.5001405aabbccdde"},
		{port + t10 + naa5 + naa6 + cut, "naa.6001405aabbccddeeff0011223344556"},
	} {
		body := unhex(t, c.in)
		page := append([]byte{0, 0x83, byte(len(body) >> 8), byte(len(body))}, body...)
		list, err := ParseDesignators(page)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
		}
		if got := Identity(list); got != c.want {
			t.Errorf("%s: %q, want %q", c.in, got, c.want)
		}
	}
	// Two texts that differ have to stay different.
	a, b := safeText([]byte("V a/b")), safeText([]byte("V a+2fb"))
	if a == b {
		t.Errorf("%q for two designators", a)
	}
}

func TestBlockPages(t *testing.T) {
	b0 := unhex(t, "00 b0 003c 01 00 0008 00001000 00000800 00000000 00002000 00000001 00000010 80000004 0000000000001000"+strings.Repeat("00", 20))
	l, err := ParseBlockLimits(b0)
	want := BlockLimits{true, 8, 4096, 2048, 8192, 1, 16, true, 4, 4096}
	if err != nil || l != want {
		t.Errorf("%+v, %v", l, err)
	}
	l, err = ParseBlockLimits(unhex(t, "00 b0 000c 00 00 0008 00001000 00000800 ffffffff ffffffff"))
	if err != nil || l.MaxUnmapBlocks != 0 || l.MaxTransfer != 4096 || l.MaxWriteSame != 0 {
		t.Errorf("SBC-2 page: %+v, %v", l, err)
	}
	c, err := ParseCharacteristics(unhex(t, "00 b1 003c 0001 00 00 10"))
	if err != nil || c.Rotational() || c.Zoned != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := ParseCharacteristics(unhex(t, "00 b1 0000")); err != nil || !c.Rotational() {
		t.Errorf("%+v, %v", c, err)
	}
	p, err := ParseProvisioning(unhex(t, "00 b2 0004 00 e6 02 00"))
	if err != nil || p != (Provisioning{true, true, true, true, true, 0, 2}) {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestCapacity(t *testing.T) {
	c, err := ParseReadCapacity10(unhex(t, "0003ffff 00000200"))
	if err != nil || c.Blocks() != 262144 || c.Bytes() != 128<<20 || c.PhysicalLength() != 512 {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := ParseReadCapacity10(unhex(t, "ffffffff 00000200")); !errors.Is(err, ErrCapacityTooLarge) {
		t.Error(err)
	}
	c, err = ParseReadCapacity16(unhex(t, "00000000ffffffff 00000200 03 03 c007"+strings.Repeat("00", 16)))
	want := Capacity{0xffffffff, 512, 3, 7, 2, true, true}
	if err != nil || c != want || c.PhysicalLength() != 4096 || c.Bytes() != 2<<40 {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := ParseReadCapacity16(unhex(t, "000000000000ffff 00001000")); err != nil || c.BlockLength != 4096 || c.Provisioned {
		t.Errorf("%+v, %v", c, err)
	}
	for _, s := range []string{
		"", "0000", "00000000ffffffff 000002", "00000000ffffffff 00000000", "ffffffffffffffff 00000200", "7fffffffffffffff 00000200",
		"00000000ffffffff ffffffff", "0000000000000001 00100000 00 0f 0000", "003fffffffffffff 00000200",
	} {
		if c, err := ParseReadCapacity16(unhex(t, s)); err == nil {
			t.Errorf("%s: %+v", s, c)
		}
	}
	for _, s := range []string{"", "00000000000000", "0000000100000000"} {
		if c, err := ParseReadCapacity10(unhex(t, s)); err == nil {
			t.Errorf("%s: %+v", s, c)
		}
	}
}

func TestMode(t *testing.T) {
	caching := "08 12 04" + strings.Repeat("00", 17)
	for _, c := range []struct {
		in   string
		ten  bool
		want Mode
		ok   bool
	}{
		{"", false, Mode{}, false}, {"000000", false, Mode{}, false}, {"00000000000000", true, Mode{}, false},
		{"03 00 00 00", false, Mode{}, true},
		{"03 00 90 00", false, Mode{WriteProtected: true, DPOFUA: true}, true},
		{"17 00 10 00" + caching, false, Mode{DPOFUA: true, Caching: true, WCE: true}, true},
		{"23 00 10 08" + "0000000000000200" + "0a 02 0000" + caching, false, Mode{DPOFUA: true, Caching: true, WCE: true}, true},
		{"ff 00 10 ff" + caching, false, Mode{DPOFUA: true}, true},
		{"05 00 00 00 08 12", false, Mode{}, true},
		{"001a 00 90 00 00 0000" + caching, true, Mode{WriteProtected: true, DPOFUA: true, Caching: true, WCE: true}, true},
		{"ffff 00 00 00 00 ffff" + caching, true, Mode{}, true},
		{"ffff 00 00 00 00 0000 48 01 ffff" + caching, true, Mode{}, true},
		{"ffff 00 00 00 00 0000 48 01 0001 00" + caching, true, Mode{Caching: true, WCE: true}, true},
	} {
		parse := ParseModeSense6
		if c.ten {
			parse = ParseModeSense10
		}
		got, err := parse(unhex(t, c.in))
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("%s: %+v, %v", c.in, got, err)
		}
	}
}

func TestTargetPortGroups(t *testing.T) {
	b := unhex(t, "00000018 8003 0010 00 00 00 02 0000 0001 0000 0002 0f 00 0011 00 00 00 00 ffffffff")
	groups, err := ParseTargetPortGroups(b)
	want := []TargetPortGroup{{16, ActiveOptimized, true, []uint16{1, 2}}, {17, Transitioning, false, nil}}
	if err != nil || !reflect.DeepEqual(groups, want) {
		t.Errorf("%+v, %v", groups, err)
	}
	if groups, err := ParseTargetPortGroups(unhex(t, "ffffffff 80 00 0010 00 00 00 ff 0000 0001")); err != nil || len(groups) != 0 {
		t.Errorf("%+v, %v", groups, err)
	}
	if _, err := ParseTargetPortGroups([]byte{0, 0, 0}); err == nil {
		t.Error("3 bytes were enough")
	}
}
