package iscsitcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"iserd.org/iserd/iscsi/pdu"
)

// MaxRecvDataSegmentLength is what a login over this transport declares, in bytes: the longest data segment that a Conn takes.
const MaxRecvDataSegmentLength = 262144

// maxExchangeData bounds the data segment of an answer to a Port. RFC 7143 allows 8192 bytes during login (section 13.12); a discovery
// session may declare more.
const maxExchangeData = 65536

// ErrClosed says that the Port or Conn was used after its end. It is always wrapped.
var ErrClosed = errors.New("connection is closed")

// A Port is a TCP connection before the full feature phase, or one of a discovery session. It implements iscsi.Port. One goroutine uses it;
// Close may be called from another.
type Port struct {
	mu   sync.Mutex // guards conn
	conn *net.TCPConn

	local string
	err   error // why the stream is no longer in step
}

// Dial connects to addr, "host:port" with an IPv4 address, an IPv6 address in brackets (with a zone if link-local), or a name.
//
// Errors say where; errors.Is finds the errno (ECONNREFUSED, EHOSTUNREACH, ...) and context.DeadlineExceeded or Canceled in them.
func Dial(ctx context.Context, addr string) (*Port, error) {
	return DialBy(ctx, new(net.Dialer), addr)
}

// DialBy is Dial by a dialer that knows the way: a source address, a network interface.
func DialBy(ctx context.Context, d *net.Dialer, addr string) (*Port, error) {
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, fmt.Errorf("connect over TCP: %w", err)
	}
	tc := c.(*net.TCPConn) // SetNoDelay is Go's default
	return &Port{conn: tc, local: tc.LocalAddr().String()}, nil
}

// LocalAddr is the address that the connection comes from, as host:port.
func (p *Port) LocalAddr() string { return p.local }

// Close ends the connection. It is safe to call twice, and after Attach, when it does nothing.
func (p *Port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	return err
}

// take hands out the connection, keeping it or not.
func (p *Port) take(keep bool) (*net.TCPConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conn
	if c == nil {
		return nil, fmt.Errorf("%w", ErrClosed)
	}
	if p.err != nil {
		return nil, fmt.Errorf("connection is out of step: %w", p.err)
	}
	if !keep {
		p.conn = nil
	}
	return c, nil
}

// Exchange sends one PDU and waits for one. The data segment of bhs gets the length of data and is padded; that of the answer is at most 64
// KiB, padding removed. There are no digests. final has no meaning over TCP: nothing must be posted before the last Login Request.
//
// After an error the stream may be in the middle of a PDU: the Port is then only good for Close. Errors wrap those of ctx, or those of the
// socket; io.EOF and io.ErrUnexpectedEOF when the target closed the connection; *pdu.ProtocolError.
func (p *Port) Exchange(ctx context.Context, bhs *pdu.BHS, data []byte, final bool) (*pdu.BHS, []byte, error) {
	conn, err := p.take(true)
	if err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	resp, respData, err := exchange(conn, bhs, data)
	if !stop() && err != nil {
		err = ctx.Err() // the deadline was set because of it
	}
	if err != nil {
		p.err = err
		return nil, nil, err
	}
	if ctx.Err() != nil {
		p.err = ctx.Err() // the answer is whole, but the deadline stays
	}
	return resp, respData, nil
}

func exchange(conn net.Conn, bhs *pdu.BHS, data []byte) (*pdu.BHS, []byte, error) {
	h := *bhs
	h.SetDataSegmentLength(len(data))
	msg := make([]byte, 0, len(h)+pdu.Padded(len(data)))
	msg = append(append(msg, h[:]...), data...)
	for len(msg)%pdu.Alignment != 0 {
		msg = append(msg, 0)
	}
	if _, err := conn.Write(msg); err != nil {
		return nil, nil, err
	}
	resp := new(pdu.BHS)
	if _, err := io.ReadFull(conn, resp[:]); err != nil {
		return nil, nil, closedByTarget(err)
	}
	if err := resp.Valid(pdu.FromTarget, maxExchangeData); err != nil {
		return nil, nil, err
	}
	n := resp.DataSegmentLength()
	respData := make([]byte, pdu.Padded(n))
	if _, err := io.ReadFull(conn, respData); err != nil {
		return nil, nil, closedByTarget(err)
	}
	return resp, respData[:n], nil
}

func closedByTarget(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("target closed the connection: %w", err)
	}
	return err
}
