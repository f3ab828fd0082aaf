package testtarget

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/rdma"
)

// iSER messages: the header (RFC 7145 section 9.2), the BHS and the data in one Send. The target writes and reads the initiator's memory by
// the STags of the command; Data-In, R2T and solicited Data-Out do not exist. It posts its receives before it accepts a connection and
// reads a Write at the base offset that the initiator gave, beyond what came as immediate data, as isert does.
const (
	iserHeader  = 28
	iserDataMax = 8192 // TargetRecvDataSegmentLength, and the text of a login
	iserMessage = iserHeader + bhsSize + iserDataMax + 52

	iserRecvs   = 192
	iserSends   = 64
	iserStaging = 1 << 20 // for RDMA Read and Write, bytes

	iserControl = 0x10 // opcode of the header: control-type PDU
	iserWSV     = 0x08
	iserRSV     = 0x04
)

// Kinds of work requests, in the upper half of the WRID.
const (
	iserRecv = 1 << 32
	iserSend = 2 << 32
	iserRDMA = 3 << 32
)

type iserListener struct {
	l      *rdma.Listener
	ctx    context.Context
	cancel context.CancelFunc
}

func listenISER(addr string) (listener, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, fmt.Errorf("iSER needs the address of an adapter: %w", err)
	}
	l, err := rdma.Listen(a)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &iserListener{l, ctx, cancel}, nil
}

func (l *iserListener) addr() net.Addr { return net.TCPAddrFromAddrPort(l.l.Addr()) }

func (l *iserListener) close() {
	l.cancel()
	l.l.Close()
}

// accept implements listener. A connection that fails before it is established is no reason to stop.
func (l *iserListener) accept() (link, error) {
	for {
		conn, _, err := l.l.Accept(l.ctx)
		if err != nil {
			return nil, err
		}
		k, err := newISERLink(l.ctx, conn)
		if err == nil {
			return k, nil
		}
		if l.ctx.Err() != nil {
			return nil, l.ctx.Err()
		}
	}
}

// iserLink is a connection over RDMA. One goroutine owns its completion queue; the others hand it work.
type iserLink struct {
	conn   *rdma.Conn
	cq     *rdma.CQ
	mr     *rdma.MR
	mem    []byte // receive slots, send slots, staging
	event  int    // eventfd: there is work
	stop   bool   // the owner's: it ends
	ended  chan struct{}
	dead   chan struct{} // closed when the connection is lost
	free   chan int      // send slots
	moved  chan error    // an RDMA Read or Write has ended
	once   sync.Once
	closed sync.Once

	mu      sync.Mutex // guards what follows
	work    []func()
	gone    bool // nobody runs work any more
	arrived []*PDU
	news    chan struct{} // holds one token when arrived is not empty
}

func newISERLink(ctx context.Context, conn *rdma.Conn) (_ *iserLink, err error) {
	l := &iserLink{
		conn: conn, event: -1, ended: make(chan struct{}), dead: make(chan struct{}), free: make(chan int, iserSends),
		moved: make(chan error, 1), news: make(chan struct{}, 1),
	}
	running := false
	defer func() {
		if err == nil {
			return
		}
		if running {
			l.close()
			return
		}
		conn.Close()
		l.release()
	}()
	dev := conn.Device()
	if l.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	size := (iserRecvs+iserSends)*iserMessage + iserStaging
	if l.mem, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return nil, err
	}
	if l.mr, err = dev.Register(l.mem, rdma.LocalWrite); err != nil {
		return nil, err
	}
	if l.cq, err = dev.NewCQ(2 * (iserRecvs + iserSends)); err != nil {
		return nil, err
	}
	if err = conn.CreateQP(l.cq, rdma.QPCaps{MaxSend: iserSends + 8, MaxRecv: iserRecvs}, l); err != nil {
		return nil, err
	}
	for i := range iserSends {
		l.free <- i
	}
	for i := range iserRecvs {
		if err = l.postRecv(i); err != nil {
			return nil, err
		}
	}
	if err = l.cq.Flush(); err != nil {
		return nil, err
	}
	running = true
	go l.run()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err = conn.Accept(ctx, rdma.ConnectParams{
		PrivateData:    []byte{0xc0, 0, 0, 0}, // no zero-based addresses, no Send with Invalidate
		InitiatorDepth: rdma.MaxResources,     // for RDMA Read
		RNRRetryCount:  7,
	})
	if err != nil {
		return nil, err
	}
	conn.OnEvent(func(e rdma.Event) {
		switch e.Kind {
		case rdma.EventDisconnected, rdma.EventDeviceRemoved, rdma.EventQPError, rdma.EventCQError:
			l.fail()
		}
	})
	return l, nil
}

func (l *iserLink) local() net.Addr { return net.TCPAddrFromAddrPort(l.conn.LocalAddr()) }

// fail marks the connection as lost: whoever waits for it goes on.
func (l *iserLink) fail() { l.once.Do(func() { close(l.dead) }) }

// close implements link. What was written leaves first. It waits until the queue pair is gone.
func (l *iserLink) close() {
	l.closed.Do(func() {
		l.drain()
		l.fail()
		l.conn.Disconnect()
		l.conn.Close()
		l.do(func() { l.stop = true })
		<-l.ended
		l.mu.Lock()
		l.gone = true
		l.mu.Unlock()
		l.release()
	})
}

// drain waits until every Send has been acknowledged, or none will be.
func (l *iserLink) drain() {
	limit := time.NewTimer(2 * time.Second)
	defer limit.Stop()
	for range iserSends {
		select {
		case <-l.free:
		case <-l.dead:
			return
		case <-limit.C:
			return
		}
	}
}

// release gives back what the connection holds; its queue pair is gone.
func (l *iserLink) release() {
	if l.cq != nil {
		l.cq.Close()
	}
	if l.mr != nil {
		l.mr.Close()
	}
	if l.mem != nil {
		unix.Munmap(l.mem)
	}
	if l.event >= 0 {
		unix.Close(l.event)
	}
}

// do has the owner of the queue run f, or nobody when the connection is closed.
func (l *iserLink) do(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	l.work = append(l.work, f)
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	unix.Write(l.event, b[:])
}

// run owns the completion queue. It sleeps in poll(2).
func (l *iserLink) run() {
	defer close(l.ended)
	fds := []unix.PollFd{{Fd: int32(l.cq.FD()), Events: unix.POLLIN}, {Fd: int32(l.event), Events: unix.POLLIN}}
	for {
		n, _ := l.cq.Poll()
		l.mu.Lock()
		work := l.work
		l.work = nil
		l.mu.Unlock()
		for _, f := range work {
			f()
		}
		l.cq.Flush()
		if l.stop {
			return
		}
		if n+len(work) > 0 {
			continue
		}
		l.cq.Arm()
		if n, _ := l.cq.Poll(); n > 0 {
			continue
		}
		unix.Poll(fds, -1)
		if fds[0].Revents != 0 {
			l.cq.DrainEvents()
		}
		if fds[1].Revents != 0 {
			var b [8]byte
			unix.Read(l.event, b[:])
		}
	}
}

// sge names a part of the connection's memory.
func (l *iserLink) sge(off, n int) [rdma.MaxSGE]rdma.SGE {
	return [rdma.MaxSGE]rdma.SGE{{Addr: uintptr(unsafe.Pointer(&l.mem[0])) + uintptr(off), Len: uint32(n), LKey: l.mr.LKey()}}
}

func (l *iserLink) postRecv(slot int) error {
	return l.conn.PostRecv(rdma.RecvWR{WRID: iserRecv | uint64(slot), SGE: l.sge(slot*iserMessage, iserMessage), NumSGE: 1})
}

// HandleWC implements rdma.WCHandler.
func (l *iserLink) HandleWC(wc *rdma.WC) {
	slot := int(wc.WRID & 0xffffffff)
	err := wc.Err()
	if err != nil {
		l.fail()
	}
	switch wc.WRID &^ 0xffffffff {
	case iserRecv:
		if err != nil {
			return
		}
		p, err := decodeISER(l.mem[slot*iserMessage:][:wc.Bytes])
		if err != nil || l.postRecv(slot) != nil {
			l.fail()
			return
		}
		l.mu.Lock()
		l.arrived = append(l.arrived, p)
		l.mu.Unlock()
		select {
		case l.news <- struct{}{}:
		default:
		}
	case iserSend:
		l.free <- slot
	case iserRDMA:
		l.moved <- err
	}
}

// decodeISER takes a message apart. The result shares nothing with b.
func decodeISER(b []byte) (*PDU, error) {
	if len(b) < iserHeader+bhsSize || b[0]&0xf0 != iserControl {
		return nil, errors.New("not a control-type PDU")
	}
	p := new(PDU)
	copy(p.ISER[:], b)
	copy(p.BHS[:], b[iserHeader:])
	rest := b[iserHeader+bhsSize:]
	ahs, n := int(p.BHS[4])*4, int(p.BHS[5])<<16|int(p.BHS[6])<<8|int(p.BHS[7])
	if len(rest) < ahs+n {
		return nil, errors.New("message is shorter than its PDU")
	}
	p.AHS, p.Data = append([]byte(nil), rest[:ahs]...), append([]byte(nil), rest[ahs:ahs+n]...)
	return p, nil
}

// receive implements link.
func (l *iserLink) receive(digests) (*PDU, error) {
	for {
		l.mu.Lock()
		var p *PDU
		if len(l.arrived) > 0 {
			p = l.arrived[0]
			l.arrived = l.arrived[1:]
		}
		l.mu.Unlock()
		if p != nil {
			return p, nil
		}
		select {
		case <-l.news:
		case <-l.dead:
			return nil, net.ErrClosed
		}
	}
}

// encode implements link: there are no digests, and no padding.
func (l *iserLink) encode(p *PDU, _ digests) []byte {
	p.setLength()
	h := p.ISER
	if h == ([iserHeader]byte{}) {
		h[0] = iserControl
	}
	return append(append(append(h[:], p.BHS[:]...), p.AHS...), p.Data...)
}

// write implements link: b is one Send.
func (l *iserLink) write(b []byte) error {
	if len(b) > iserMessage {
		return fmt.Errorf("a message of %d bytes is more than %d", len(b), iserMessage)
	}
	var slot int
	select {
	case slot = <-l.free:
	case <-l.dead:
		return net.ErrClosed
	}
	off := (iserRecvs + slot) * iserMessage
	select {
	case <-l.dead: // the memory may go away
		return net.ErrClosed
	default:
	}
	message := append([]byte(nil), b...)
	l.do(func() {
		copy(l.mem[off:], message)
		wr := rdma.SendWR{WRID: iserSend | uint64(slot), SGE: l.sge(off, len(message)), NumSGE: 1, Signaled: true}
		if l.conn.PostSend(wr) != nil {
			l.fail()
		}
	})
	return nil
}

// move transfers data between the initiator's memory and b, through the staging area.
func (l *iserLink) move(op rdma.Op, stag uint32, addr uint64, b []byte) error {
	const at = (iserRecvs + iserSends) * iserMessage
	for len(b) > 0 {
		n := min(len(b), iserStaging)
		part := b[:n]
		to := rdma.Remote{Addr: addr, RKey: stag}
		l.do(func() {
			wr := rdma.SendWR{WRID: iserRDMA, SGE: l.sge(at, n), NumSGE: 1, Signaled: true}
			post := l.conn.PostRead
			if op == rdma.OpWrite {
				copy(l.mem[at:], part)
				post = l.conn.PostWrite
			}
			if post(wr, to) != nil {
				l.fail()
			}
		})
		select {
		case err := <-l.moved:
			if err != nil {
				return err
			}
		case <-l.dead:
			return net.ErrClosed
		}
		if op == rdma.OpRead {
			done := make(chan struct{})
			l.do(func() { copy(part, l.mem[at:]); close(done) })
			select {
			case <-done:
			case <-l.ended:
				return net.ErrClosed
			}
		}
		b, addr = b[n:], addr+uint64(n)
	}
	return nil
}

// get implements link, by RDMA Read.
func (l *iserLink) get(c *Conn, t *task) (done bool, err error) {
	if t.iser[0]&iserWSV == 0 {
		c.violation("command %#08x has %d bytes of data to come and no Write STag", t.itt, t.need-t.got)
		return false, errors.New("no Write STag")
	}
	stag, addr := binary.BigEndian.Uint32(t.iser[4:]), binary.BigEndian.Uint64(t.iser[8:])
	if err := l.move(rdma.OpRead, stag, addr, t.data[t.got:t.need]); err != nil {
		return false, err
	}
	t.got = t.need
	return true, nil
}

// put implements link, by RDMA Write. The status follows in a response of its own.
func (l *iserLink) put(c *Conn, t *task, data []byte, _ *outcome) (sent bool, err error) {
	if t.iser[0]&iserRSV == 0 {
		c.violation("command %#08x reads %d bytes and has no Read STag", t.itt, len(data))
		return false, errors.New("no Read STag")
	}
	stag, addr := binary.BigEndian.Uint32(t.iser[16:]), binary.BigEndian.Uint64(t.iser[20:])
	return false, l.move(rdma.OpWrite, stag, addr, data)
}
