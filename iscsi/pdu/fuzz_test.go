package pdu

import (
	"bytes"
	"strings"
	"testing"
)

// FuzzHeader: no bytes crash the check, the getters or the trace, and a header that passes keeps its promises.
func FuzzHeader(f *testing.F) {
	for _, c := range readGolden(f) {
		f.Add(c.header, len(c.segment))
	}
	f.Fuzz(func(t *testing.T, data []byte, received int) {
		if len(data) < HeaderLength {
			return
		}
		b := HeaderOf(data)
		if b.String() == "" {
			t.Fatal("no trace")
		}
		for _, d := range []Direction{FromInitiator, FromTarget} {
			if err := b.Valid(d, received); err == nil && (b.DataSegmentLength() > received && b.DataSegmentLength() != 0 || opcodes[b.Opcode()].dir != d) {
				t.Fatalf("accepted %v with %d bytes", b, received)
			}
		}
	})
}

// FuzzKeys: text decodes to an error or to keys that encode to the same text, padding apart.
func FuzzKeys(f *testing.F) {
	for _, c := range readGolden(f) {
		f.Add(c.segment)
	}
	f.Add([]byte("A=b\x00\x00"))
	f.Add([]byte("=\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		keys, err := DecodeKeys(text)
		if err != nil {
			if keys != nil {
				t.Fatal("error and value")
			}
			return
		}
		var want []byte
		for p := range bytes.SplitSeq(text, []byte{0}) {
			if len(p) > 0 {
				want = append(append(want, p...), 0)
			}
		}
		if got := keys.Append(nil); !bytes.Equal(got, want) {
			t.Fatalf("%q came back as %q", want, got)
		}
	})
}

// FuzzSense: the result is inside the segment and has the length that the segment says.
func FuzzSense(f *testing.F) {
	f.Add([]byte{0, 2, 0x70, 0})
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, segment []byte) {
		s, err := SenseData(segment)
		if err != nil && s != nil || len(s) > 0 && len(s)+2 > len(segment) {
			t.Fatal(s, err)
		}
	})
}

// FuzzName: what passes is in normal form, short, and safe as a path component.
func FuzzName(f *testing.F) {
	for _, s := range []string{"iqn.2003-01.org.example:t1", "eui.02004567A425678D", "naa.52004567BA64678D", "iqn.2003-01.x/../y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := NormalizeName(s)
		if err != nil {
			if n != "" {
				t.Fatal("error and value")
			}
			return
		}
		again, err := NormalizeName(n)
		if err != nil || again != n || len(n) > MaxNameLength || strings.ContainsAny(n, "/\\\x00\n \t\"'`$") || strings.HasPrefix(n, ".") {
			t.Fatalf("%q -> %q -> %q, %v", s, n, again, err)
		}
	})
}

// FuzzAddress: what passes comes back from its own text.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{"10.0.0.1:3260,1", "[fd00::1]:3260,1", "host", "[::ffff:1.2.3.4%a]:1,1", "a.b:,1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddress(s)
		if err != nil {
			if a != (Address{}) {
				t.Fatal("error and value")
			}
			return
		}
		b, err := ParseAddress(a.String())
		if err != nil || a != b || a.Port == 0 || strings.ContainsAny(a.Host, "/ \x00\n") {
			t.Fatalf("%q -> %+v -> %+v, %v", s, a, b, err)
		}
	})
}

// FuzzSendTargets: no text crashes the parser; names and addresses in the result have passed their checks.
func FuzzSendTargets(f *testing.F) {
	f.Add([]byte("TargetName=iqn.2003-01.org.example:t1\x00TargetAddress=10.0.0.1:3260,1\x00TargetAddress=[fd00::1]:3260,1\x00"))
	f.Add([]byte("TargetAddress=10.0.0.1:3260,1\x00"))
	f.Add([]byte("TargetName=x\x00TargetName=x\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		keys, err := DecodeKeys(text)
		if err != nil {
			return
		}
		records, err := ParseSendTargets(keys)
		if err != nil && records != nil {
			t.Fatal("error and value")
		}
		for _, r := range records {
			if r.Name == "" && r.Problem == nil || r.Name != "" && ValidName(r.Name) != nil {
				t.Fatalf("record %+v", r)
			}
			for _, a := range r.Addresses {
				if _, err := ParseAddress(a.String()); err != nil || !a.HasTag {
					t.Fatal(a, err)
				}
			}
		}
	})
}
