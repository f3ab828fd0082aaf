package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	var b bytes.Buffer
	c := NewConn(&b)
	want := Start{Args: []string{"sh", "-c", "true"}, Env: []string{"A=b"}, Dir: "/", Merge: true}
	if err := c.SendJSON(TypeStart, 7, want); err != nil {
		t.Fatal(err)
	}
	if err := c.Send(TypePing, 0, nil); err != nil {
		t.Fatal(err)
	}
	f, err := c.Receive()
	if err != nil || f.Type != TypeStart || f.ID != 7 {
		t.Fatalf("Receive() = %+v, %v", f, err)
	}
	var got Start
	if err := f.Decode(&got); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("Decode: got %+v, %v; want %+v", got, err, want)
	}
	if f, err = c.Receive(); err != nil || f.Type != TypePing || len(f.Payload) != 0 {
		t.Fatalf("Receive() = %+v, %v", f, err)
	}
	if _, err = c.Receive(); err != io.EOF {
		t.Fatalf("Receive() at the end: %v, want io.EOF", err)
	}
}

func TestReceiveBad(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"cut header", "\x01\x00", "unexpected EOF"},
		{"cut payload", "\x06\x00\x00\x00\x01\x00\x00\x00\x04ab", "unexpected EOF"},
		{"no payload", "\x06\x00\x00\x00\x01\x00\x00\x00\x04", "unexpected EOF"},
		{"huge", "\x06\x00\x00\x00\x01\xff\xff\xff\xff", "is over"},
	} {
		_, err := NewConn(bytes.NewBufferString(tc.in)).Receive()
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	if err := NewConn(new(bytes.Buffer)).Send(TypeInput, 1, make([]byte, MaxPayload+1)); err == nil {
		t.Error("Send took a payload over MaxPayload")
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x06\x00\x00\x00\x01\x00\x00\x00\x02ab"))
	f.Add([]byte("\x0a\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewConn(bytes.NewBuffer(b))
		for {
			fr, err := c.Receive()
			if err != nil {
				if errors.Is(err, io.EOF) && len(fr.Payload) > 0 {
					t.Fatal("a frame came with io.EOF")
				}
				return
			}
			var out bytes.Buffer
			if err := NewConn(&out).Send(fr.Type, fr.ID, fr.Payload); err != nil {
				t.Fatal(err)
			}
			if !bytes.HasPrefix(b, out.Bytes()) {
				t.Fatalf("%x does not start with %x", b, out.Bytes())
			}
			b = b[out.Len():]
		}
	})
}
