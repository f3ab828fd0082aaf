package iser

import (
	"context"
	"fmt"
	"sync"

	"iserd.org/iserd/iscsi/pdu"
)

// Port drives a connection through its login, or through a discovery session, from an ordinary goroutine. It implements
// [iserd.org/iserd/iscsi.Port].
type Port struct {
	conn  *Conn
	local string
	once  sync.Once
	gone  chan struct{}
}

// NewPort drives conn, which is connected.
func NewPort(conn *Conn, local string) *Port {
	p := &Port{conn: conn, local: local, gone: make(chan struct{})}
	conn.owner.Do(func() {
		if conn.state == stateEnded {
			close(p.gone)
			return
		}
		conn.gone = func() { close(p.gone) }
	})
	return p
}

// LocalAddr is the address that the connection comes from.
func (p *Port) LocalAddr() string { return p.local }

// Conn is the connection, for the full feature phase.
func (p *Port) Conn() *Conn { return p.conn }

type message struct {
	bhs  pdu.BHS
	data []byte
	err  error
}

// Exchange implements the interface.
func (p *Port) Exchange(ctx context.Context, bhs *pdu.BHS, data []byte, final bool) (*pdu.BHS, []byte, error) {
	ch := make(chan message, 1)
	request, text := *bhs, append([]byte(nil), data...)
	p.conn.owner.Do(func() {
		p.conn.exchange(&request, text, final, func(b []byte, err error) {
			m := message{err: err}
			if err == nil {
				copy(m.bhs[:], b[HeaderSize:headersSize])
				n := m.bhs.DataSegmentLength()
				m.data = append([]byte(nil), b[headersSize:headersSize+n]...)
			}
			ch <- m
		})
	})
	select {
	case m := <-ch:
		if m.err != nil {
			return nil, nil, m.err
		}
		return &m.bhs, m.data, nil
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("wait for the target: %w", context.Cause(ctx))
	}
}

// Close ends the connection and waits until its queue pair is gone.
func (p *Port) Close() error {
	p.once.Do(func() { p.conn.owner.Do(func() { p.conn.ConnectionTerminate(nil) }) })
	<-p.gone
	return nil
}
