package scsi

import (
	"encoding/hex"
	"strings"
	"testing"
	"unicode"
)

func seeds(f *testing.F, list ...string) {
	for _, s := range list {
		b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, file := range []string{"testdata/lio.hex", "testdata/tgt.hex"} {
		for _, c := range captures(f, file) {
			f.Add(c.data)
		}
	}
}

// printable fails on text that could harm a log, a terminal or a path.
func printable(t *testing.T, texts ...string) {
	for _, s := range texts {
		for _, r := range s {
			if r > unicode.MaxASCII || !unicode.IsPrint(r) {
				t.Fatalf("unsafe text %q", s)
			}
		}
	}
}

func FuzzSense(f *testing.F) {
	seeds(f, "f0 00 03 00001267 0a 00000000 11 00 00 000000", "72 02 04 01 00 00 00 08 0206 0000 804000 00", "72ffffffffffffffff",
		"7100030000000000")
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSense(b)
		if err != nil {
			if s != (Sense{}) {
				t.Fatal("error and value")
			}
			return
		}
		printable(t, s.String())
		for _, st := range []Status{StatusGood, StatusCheckCondition, StatusBusy} {
			if a := Classify(st, &s); a.Kind < Done || a.Kind > Fail || a.Kind != Done && a.Errno == 0 {
				t.Fatalf("%v: %+v", s, a)
			}
		}
		printable(t, (&StatusError{Status: StatusCheckCondition, Sense: &s}).Error())
	})
}

func FuzzInquiry(f *testing.F) {
	seeds(f, lioInquiry, "7f00050200")
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := ParseInquiry(b)
		if err != nil && q != (Inquiry{}) {
			t.Fatal("error and value")
		}
		printable(t, q.Vendor, q.Product, q.Revision)
	})
}

// FuzzVPD runs each page parser on the same bytes.
func FuzzVPD(f *testing.F) {
	seeds(f, "00 00 0003 00 80 83", "00 80 0004 31323334", "00 83 0014 01 03 00 10 6001405aabbccddeeff0011223344556",
		"00 83 0018 02 01 00 14 4c494f2d4f524720 36613362 2020 2f2e2e2f 0000", "00 b0 003c 01 00 0008 00001000", "00 b1 003c 0001", "00 b2 0004 00 e6 02 00")
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := ParseSupportedPages(b); err != nil && p != nil || len(p) > 255 {
			t.Fatal(p, err)
		}
		s, _ := ParseSerialNumber(b)
		printable(t, s)
		list, err := ParseDesignators(b)
		if err != nil && list != nil {
			t.Fatal("error and value")
		}
		id := Identity(list)
		printable(t, id)
		if strings.ContainsAny(id, "/ %\\") {
			t.Fatalf("identity %q is not a path component", id)
		}
		_, _ = ParseBlockLimits(b)
		_, _ = ParseCharacteristics(b)
		_, _ = ParseProvisioning(b)
	})
}

func FuzzCapacity(f *testing.F) {
	seeds(f, "0003ffff 00000200", "00000000ffffffff 00000200 03 03 c007"+strings.Repeat("00", 16), "ffffffffffffffff00000200")
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func([]byte) (Capacity, error){ParseReadCapacity10, ParseReadCapacity16} {
			c, err := parse(b)
			if err != nil {
				if c != (Capacity{}) {
					t.Fatal("error and value")
				}
				continue
			}
			if c.Blocks() == 0 || int64(c.Bytes()) <= 0 || c.Bytes()/uint64(c.BlockLength) != c.Blocks() || c.PhysicalLength() < c.BlockLength {
				t.Fatalf("%+v overflows", c)
			}
		}
	})
}

func FuzzModeSense(f *testing.F) {
	seeds(f, "17 00 10 00 08 12 04"+strings.Repeat("00", 17), "001a 00 90 00 00 0000 08 12 04"+strings.Repeat("00", 17))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func([]byte) (Mode, error){ParseModeSense6, ParseModeSense10} {
			if m, err := parse(b); err != nil && m != (Mode{}) || m.WCE && !m.Caching {
				t.Fatal(m, err)
			}
		}
	})
}

// FuzzLists covers REPORT LUNS and REPORT TARGET PORT GROUPS.
func FuzzLists(f *testing.F) {
	seeds(f, "00000010 00000000 0000000000000000 4100000000000000", "00000010 8003 0010 00 00 00 02 0000 0001 0000 0002")
	f.Fuzz(func(t *testing.T, b []byte) {
		luns, needed, err := ParseReportLuns(b)
		if err != nil && (luns != nil || needed != 0) || 8*len(luns) > len(b) {
			t.Fatal(luns, needed, err)
		}
		for _, l := range luns {
			printable(t, l.String())
			if l.SingleLevel() && !l.WellKnown() && l.Method() != MethodExtended && l.Number() > 16383 {
				t.Fatalf("%#x is number %d", uint64(l), l.Number())
			}
		}
		groups, err := ParseTargetPortGroups(b)
		if err != nil && groups != nil || 8*len(groups) > len(b) {
			t.Fatal(groups, err)
		}
	})
}
