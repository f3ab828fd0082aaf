package iser

import (
	"bytes"
	"encoding/hex"
	"testing"
)

// The headers of a READ(10) and a WRITE(10) as the kernel's ib_iser puts them on the wire, laid out by hand from RFC 7145 section 9.2.
func TestHeaderGolden(t *testing.T) {
	read, write := make([]byte, HeaderSize), make([]byte, HeaderSize)
	Header(read).EncodeControl()
	Header(read).SetRead(0x11223344, 0x7f00_1234_5678_9abc)
	Header(write).EncodeControl()
	Header(write).SetWrite(0xa1b2c3d4, 0x1000)
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"read", read, "14000000" + "00000000" + "0000000000000000" + "11223344" + "7f00123456789abc"},
		{"write", write, "18000000" + "a1b2c3d4" + "0000000000001000" + "00000000" + "0000000000000000"},
	} {
		if got := hex.EncodeToString(c.got); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
	if stag, offset, ok := Header(read).Read(); stag != 0x11223344 || offset != 0x7f00_1234_5678_9abc || !ok {
		t.Errorf("Read() = %#x, %#x, %v", stag, offset, ok)
	}
	if _, _, ok := Header(read).Write(); ok {
		t.Error("a read advertises a write STag")
	}
}

func TestEncodeControlClears(t *testing.T) {
	b := bytes.Repeat([]byte{0xff}, HeaderSize)
	Header(b).EncodeControl()
	want := make([]byte, HeaderSize)
	want[0] = 0x10
	if !bytes.Equal(b, want) {
		t.Errorf("got %x", b)
	}
}

// rawMessage builds an iSER message that announces announced bytes of data and carries carried.
func rawMessage(first byte, ahs byte, announced, carried int) []byte {
	b := make([]byte, headersSize+carried)
	b[0] = first
	b[HeaderSize+4] = ahs
	b[HeaderSize+5], b[HeaderSize+6], b[HeaderSize+7] = byte(announced>>16), byte(announced>>8), byte(announced)
	return b
}

func TestCheckMessage(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
		want int // -1: an error
	}{
		{"empty", nil, -1},
		{"header only", make([]byte, HeaderSize), -1},
		{"one byte short", rawMessage(0x10, 0, 0, 0)[:headersSize-1], -1},
		{"no data", rawMessage(0x10, 0, 0, 0), 0},
		{"exact data", rawMessage(0x10, 0, 18, 18), 18},
		{"padded data", rawMessage(0x10, 0, 18, 20), 18},
		{"too little data", rawMessage(0x10, 0, 18, 17), -1},
		{"too much data", rawMessage(0x10, 0, 18, 22), -1},
		{"length beyond any buffer", rawMessage(0x10, 0, 0xffffff, 4), -1},
		{"Hello", rawMessage(0x20, 0, 0, 0), -1},
		{"HelloReply", rawMessage(0x30, 0, 0, 0), -1},
		{"additional header", rawMessage(0x10, 1, 0, 4), -1},
		{"with STag flags", rawMessage(0x1c, 0, 0, 0), 0},
	} {
		got, err := CheckMessage(c.b)
		if (err != nil) != (c.want < 0) || err == nil && got != c.want {
			t.Errorf("%s: %d, %v; want %d", c.name, got, err, c.want)
		}
	}
}

func FuzzCheckMessage(f *testing.F) {
	f.Add(rawMessage(0x10, 0, 18, 20))
	f.Add(rawMessage(0x14, 0, 0, 0))
	f.Add([]byte{0x10})
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := CheckMessage(b)
		if err == nil && (n < 0 || headersSize+n > len(b)) {
			t.Fatalf("%d bytes of data in a message of %d", n, len(b))
		}
		if err != nil && n != 0 {
			t.Fatalf("a value and an error: %d, %v", n, err)
		}
	})
}
