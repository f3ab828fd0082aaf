package testtarget

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
)

// tcpLink is a connection over a socket: framing, digests, Data-In, R2T and Data-Out (RFC 7143 sections 7.2.1, 11.7, 11.8).
type tcpLink struct{ c *net.TCPConn }

type tcpListener struct{ l net.Listener }

func listenTCP(addr string) (listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	return tcpListener{l}, nil
}

func (l tcpListener) accept() (link, error) {
	c, err := l.l.Accept()
	if err != nil {
		return nil, err
	}
	return &tcpLink{c.(*net.TCPConn)}, nil
}

func (l tcpListener) addr() net.Addr { return l.l.Addr() }

func (l tcpListener) close() { l.l.Close() }

func (l *tcpLink) local() net.Addr { return l.c.LocalAddr() }

func (l *tcpLink) close() { l.c.Close() }

func (l *tcpLink) write(b []byte) error {
	_, err := l.c.Write(b)
	return err
}

// digests says which digests follow the segments of a PDU.
type digests struct{ header, data bool }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode implements link.
func (l *tcpLink) encode(p *PDU, d digests) []byte {
	p.setLength()
	b := make([]byte, 0, bhsSize+len(p.AHS)+len(p.Data)+12)
	b = append(append(b, p.BHS[:]...), p.AHS...)
	if d.header {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	}
	start := len(b)
	b = append(b, p.Data...)
	for len(b)&3 != 0 {
		b = append(b, 0)
	}
	if d.data && len(p.Data) > 0 {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
	}
	return b
}

// maxDataSegment bounds what the target reads, whatever it has announced: 2^24-1 is what the field can say.
const maxDataSegment = 1<<24 - 1

// receive implements link. Errors: those of the connection; a wrong digest.
func (l *tcpLink) receive(d digests) (*PDU, error) {
	p := new(PDU)
	if _, err := io.ReadFull(l.c, p.BHS[:]); err != nil {
		return nil, err
	}
	header := p.BHS[:]
	if n := int(p.BHS[4]) * 4; n > 0 {
		p.AHS = make([]byte, n)
		if _, err := io.ReadFull(l.c, p.AHS); err != nil {
			return nil, err
		}
		header = append(append([]byte(nil), header...), p.AHS...)
	}
	if d.header {
		if err := l.check(header); err != nil {
			return nil, fmt.Errorf("header digest: %w", err)
		}
	}
	n := int(p.BHS[5])<<16 | int(p.BHS[6])<<8 | int(p.BHS[7])
	if n == 0 {
		return p, nil
	}
	buf := make([]byte, (n+3)&^3)
	if _, err := io.ReadFull(l.c, buf); err != nil {
		return nil, err
	}
	if d.data {
		if err := l.check(buf); err != nil {
			return nil, fmt.Errorf("data digest: %w", err)
		}
	}
	p.Data = buf[:n]
	return p, nil
}

// check reads the digest of b.
func (l *tcpLink) check(b []byte) error {
	var got [4]byte
	if _, err := io.ReadFull(l.c, got[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(got[:]) != crc32.Checksum(b, castagnoli) {
		return errors.New("it is wrong")
	}
	return nil
}

// get implements link: it sends the R2Ts that may be outstanding.
func (l *tcpLink) get(c *Conn, t *task) (done bool, err error) {
	for len(t.bursts) < c.params.maxOutstandingR2T && t.asked < t.need {
		n := min(c.params.maxBurst, t.need-t.asked)
		c.ttt++
		b := &burst{ttt: c.ttt, offset: t.asked, end: t.asked + n}
		t.bursts = append(t.bursts, b)
		t.asked += n
		r := &PDU{}
		r.BHS[0], r.BHS[offFlags] = OpR2T, final
		encodeLUN(r.BHS[offLUN:], t.lun)
		r.SetU32(offITT, t.itt)
		r.SetU32(offTTT, b.ttt)
		r.SetU32(offDataSN, t.r2tSN)
		r.SetU32(offOffset, uint32(b.offset))
		r.SetU32(offResidual, uint32(n)) // Desired Data Transfer Length
		t.r2tSN++
		c.Numbers(r, false)
		if err := c.send(r); err != nil {
			return false, err
		}
	}
	return false, nil
}

// put implements link: it sends Data-In PDUs. GOOD status rides on the last one, unless the target is configured otherwise.
func (l *tcpLink) put(c *Conn, t *task, in []byte, s *outcome) (sent bool, err error) {
	withStatus := s.status == 0 && !c.target.config.SeparateStatus
	size := c.params.sendMax
	if n := c.target.config.DataInSize; n > 0 && n < size {
		size = n
	}
	for off := 0; off < len(in); {
		toBurst := c.params.maxBurst - off%c.params.maxBurst
		n := min(size, len(in)-off, toBurst)
		p := &PDU{Data: in[off : off+n]}
		p.BHS[0] = OpDataIn
		p.SetU32(offITT, t.itt)
		p.SetU32(offTTT, noTag)
		p.SetU32(offDataSN, t.dataSNs)
		p.SetU32(offOffset, uint32(off))
		t.dataSNs++
		off += n
		last := off == len(in)
		if last || n == toBurst {
			p.BHS[offFlags] = final
		}
		if last && withStatus {
			p.BHS[offFlags] |= 0x01 | s.residualFlag
			p.BHS[3] = s.status
			p.SetU32(offResidual, uint32(s.residual))
			c.Numbers(p, true)
		} else {
			c.Numbers(p, false)
			p.SetU32(offCmdSN, 0) // StatSN is reserved without status
		}
		if err := c.send(p); err != nil {
			return false, err
		}
	}
	return withStatus, nil
}
