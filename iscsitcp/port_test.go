package iscsitcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/pdu"
)

// server accepts one connection and hands it to f.
func server(t *testing.T, network, addr string, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Skipf("needs %s: %v", addr, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		f(c)
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func readRequest(c net.Conn) (pdu.BHS, []byte, error) {
	var h pdu.BHS
	if _, err := io.ReadFull(c, h[:]); err != nil {
		return h, nil, err
	}
	data := make([]byte, pdu.Padded(h.DataSegmentLength()))
	_, err := io.ReadFull(c, data)
	return h, data, err
}

func textRequest() *pdu.BHS {
	h := new(pdu.BHS)
	h[0], h[1] = byte(pdu.OpTextRequest), 0x80
	return h
}

func textResponse(data []byte) []byte {
	h := pdu.BHS{byte(pdu.OpTextResponse), 0x80}
	h.SetDataSegmentLength(len(data))
	b := append(h[:], data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func TestExchange(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(addr, func(t *testing.T) {
			got := make(chan []byte, 2)
			a := server(t, "tcp", addr, func(c net.Conn) {
				for range 2 {
					h, data, err := readRequest(c)
					if err != nil {
						t.Error(err)
						return
					}
					got <- data[:h.DataSegmentLength()]
					answer := textResponse(data[:h.DataSegmentLength()])
					for _, b := range answer { // one byte at a time
						c.Write([]byte{b})
					}
				}
			})
			p, err := Dial(t.Context(), a)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if h, _, _ := net.SplitHostPort(p.LocalAddr()); !strings.Contains(addr, h) {
				t.Errorf("local address %s", p.LocalAddr())
			}
			for _, data := range []string{"SendTargets=All\x00", ""} {
				h, b, err := p.Exchange(t.Context(), textRequest(), []byte(data), false)
				if err != nil {
					t.Fatal(err)
				}
				if h.Opcode() != pdu.OpTextResponse || string(b) != data || string(<-got) != data {
					t.Errorf("answer %v with %q", h, b)
				}
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if err := p.Close(); err != nil {
				t.Error("second Close:", err)
			}
			if _, _, err := p.Exchange(t.Context(), textRequest(), nil, false); !errors.Is(err, ErrClosed) {
				t.Errorf("exchange after Close: %v", err)
			}
		})
	}
}

func TestExchangeErrors(t *testing.T) {
	long := pdu.BHS{byte(pdu.OpTextResponse), 0x80}
	long.SetDataSegmentLength(maxExchangeData + 4)
	ahs := pdu.BHS{byte(pdu.OpTextResponse), 0x80}
	ahs[4] = 1
	wrong := pdu.BHS{byte(pdu.OpTextRequest), 0x80}
	for name, c := range map[string]struct {
		answer []byte
		want   error
		text   string
	}{
		"nothing":  {nil, io.EOF, "target closed"},
		"half":     {textResponse([]byte("x"))[:20], io.ErrUnexpectedEOF, "target closed"},
		"no data":  {textResponse(bytes.Repeat([]byte("x"), 100))[:60], io.ErrUnexpectedEOF, "target closed"},
		"too long": {long[:], nil, "65540 bytes"},
		"ahs":      {ahs[:], nil, "additional header"},
		"opcode":   {wrong[:], nil, "wrong side"},
	} {
		t.Run(name, func(t *testing.T) {
			a := server(t, "tcp", "127.0.0.1:0", func(nc net.Conn) {
				readRequest(nc)
				nc.Write(c.answer)
			})
			p, err := Dial(t.Context(), a)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			_, _, err = p.Exchange(t.Context(), textRequest(), nil, false)
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("got %v", err)
			}
			if _, _, again := p.Exchange(t.Context(), textRequest(), nil, false); again == nil || !errors.Is(again, err) {
				t.Errorf("exchange on a stream out of step: %v", again)
			}
		})
	}
}

func TestExchangeContext(t *testing.T) {
	a := server(t, "tcp", "127.0.0.1:0", func(c net.Conn) { io.Copy(io.Discard, c) })
	p, err := Dial(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, _, err := p.Exchange(ctx, textRequest(), nil, false); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}

	b := server(t, "tcp", "127.0.0.1:0", func(c net.Conn) { io.Copy(io.Discard, c) })
	q, err := Dial(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, _, err := q.Exchange(ctx, textRequest(), nil, false); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	go cancel()
	if _, _, err := q.Exchange(ctx, textRequest(), nil, false); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestDialErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	if _, err := Dial(t.Context(), addr); !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), addr) {
		t.Errorf("refused: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	if _, err := Dial(ctx, addr); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}
	if _, err := Dial(t.Context(), "127.0.0.1"); err == nil {
		t.Error("address without a port is taken")
	}
}
