package testtarget

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
)

// Conn is one connection of an initiator, in login or in the full feature phase.
type Conn struct {
	Number int // from 1, in the order they came

	target *Target
	link   link
	params params
	login  loginState

	initiator string
	isid      [6]byte
	group     uint16 // portal group
	tsih      uint16
	discovery bool

	// work is held while a PDU is handled, and by others that send: a number is given out and used under it. It comes before mu.
	work   sync.Mutex
	inHook atomic.Int32 // a Sending hook runs, so work is held on its behalf
	ttt    uint32
	text   []byte // rest of a long Text Response

	mu       sync.Mutex       // guards what follows, and writing
	tasks    map[uint32]*task // writes whose data is still coming, by Initiator Task Tag
	parked   map[uint32]*task // commands that wait for a test to let them go on, by Initiator Task Tag
	full     bool             // in the full feature phase
	statSN   uint32
	expCmdSN uint32
	maxCmdSN uint32
	frozen   bool   // the window does not move
	owed     uint32 // places that frozen has kept back
}

// link moves the PDUs and the data of one connection: the target's half of the Datamover interface (RFC 5047 section 8).
type link interface {
	// receive waits for a PDU.
	receive(d digests) (*PDU, error)

	// encode returns the bytes of a PDU as they go over the wire, and write sends such bytes; both together are Send_Control. The caller of
	// write sees to it that there is one at a time.
	encode(p *PDU, d digests) []byte
	write(b []byte) error

	// get has what is missing of a write's data come (Get_Data). done says that it is there; otherwise it arrives in Data-Out PDUs.
	get(c *Conn, t *task) (done bool, err error)

	// put moves data to the initiator (Put_Data). It takes the status along if it can, which sent tells.
	put(c *Conn, t *task, data []byte, s *outcome) (sent bool, err error)

	local() net.Addr
	close()
}

// errUnsupported is what a connection over RDMA says to things that only a socket has.
var errUnsupported = errors.New("this connection is no socket")

func newConn(t *Target, l link, number int, group uint16) *Conn {
	p := defaultParams()
	if t.config.ISER {
		p.recvMax = iserDataMax
	}
	return &Conn{Number: number, target: t, group: group, link: l, params: p, tasks: make(map[uint32]*task), parked: make(map[uint32]*task)}
}

// Close ends the connection at once.
func (c *Conn) Close() { c.link.close() }

// CloseWrite ends the connection in order, after what was written; the target goes on reading. TCP only.
func (c *Conn) CloseWrite() error {
	if l, ok := c.link.(*tcpLink); ok {
		return l.c.CloseWrite()
	}
	return errUnsupported
}

// Reset ends a TCP connection with a reset, so that the initiator may lose what was written before.
func (c *Conn) Reset() {
	if l, ok := c.link.(*tcpLink); ok {
		l.c.SetLinger(0)
	}
	c.Close()
}

// SetReadBuffer sets the size of the socket's receive buffer, bytes. TCP only.
func (c *Conn) SetReadBuffer(n int) error {
	if l, ok := c.link.(*tcpLink); ok {
		return l.c.SetReadBuffer(n)
	}
	return errUnsupported
}

// FullFeature reports whether the connection has left login.
func (c *Conn) FullFeature() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.full
}

// Discovery reports whether the session is a discovery session. It is for hooks.
func (c *Conn) Discovery() bool { return c.discovery }

// Initiator is the name that the initiator gave. It is for hooks.
func (c *Conn) Initiator() string { return c.initiator }

// ISID returns the initiator's part of the session's name, from its first Login Request.
func (c *Conn) ISID() [6]byte { return c.isid }

// Write sends a PDU as it is, past the hooks. StatSN, ExpCmdSN and MaxCmdSN are the caller's ([Conn.Numbers] fills in what is right).
func (c *Conn) Write(p *PDU) error {
	c.target.record(c, true, p)
	return c.WriteBytes(c.Encode(p))
}

// Encode returns the bytes of a PDU as they would go over this connection now, digests included.
func (c *Conn) Encode(p *PDU) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.full {
		return c.link.encode(p, digests{})
	}
	return c.link.encode(p, c.params.digests)
}

// WriteBytes sends raw bytes; over RDMA they are one message.
func (c *Conn) WriteBytes(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link.write(b)
}

// Numbers fills in StatSN, ExpCmdSN and MaxCmdSN. With status the PDU takes the next StatSN; without it carries what the next one will be.
func (c *Conn) Numbers(p *PDU, status bool) {
	c.mu.Lock()
	p.SetU32(offCmdSN, c.statSN)
	if status {
		c.statSN++
	}
	p.SetU32(offExpStatSN, c.expCmdSN)
	p.SetU32(offMaxCmdSN, c.maxCmdSN)
	c.mu.Unlock()
}

// lock takes work, unless it is held for the hook that runs. Use it as defer c.lock()().
func (c *Conn) lock() (unlock func()) {
	if c.inHook.Load() > 0 {
		return func() {}
	}
	c.work.Lock()
	return c.work.Unlock
}

func (c *Conn) nextStatSN() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statSN
}

// CloseWindow stops MaxCmdSN: the initiator may send what it has places for, and nothing afterwards.
func (c *Conn) CloseWindow() {
	c.mu.Lock()
	c.frozen = true
	c.mu.Unlock()
}

// OpenWindow undoes CloseWindow and tells the initiator by a NOP-In that asks for no answer.
func (c *Conn) OpenWindow() error {
	c.mu.Lock()
	c.frozen = false
	c.maxCmdSN += c.owed
	c.owed = 0
	c.mu.Unlock()
	return c.Ping(noTag, nil)
}

// advance gives a place of the command window back.
func (c *Conn) advance() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked()
}

func (c *Conn) advanceLocked() {
	if c.frozen {
		c.owed++
	} else {
		c.maxCmdSN++
	}
}

// send passes a PDU to the hooks and writes it.
func (c *Conn) send(p *PDU) error {
	c.inHook.Add(1)
	pass := c.target.pass(c, p, true)
	c.inHook.Add(-1)
	if !pass {
		return nil
	}
	return c.Write(p)
}

func (c *Conn) violation(format string, args ...any) {
	t := c.target
	t.mu.Lock()
	defer t.mu.Unlock()
	t.violations = append(t.violations, fmt.Sprintf("connection %d: ", c.Number)+fmt.Sprintf(format, args...))
}

// run serves the connection until it ends.
func (c *Conn) run() {
	defer c.target.routines.Done()
	defer c.target.gone(c)
	defer c.link.close()
	for {
		full := c.FullFeature()
		var d digests
		if full {
			d = c.params.digests
		}
		p, err := c.link.receive(d)
		if err != nil {
			return
		}
		c.target.record(c, false, p)
		if !c.target.pass(c, p, false) {
			continue
		}
		if len(p.Data) > c.params.recvMax {
			c.violation("data segment of %d bytes, MaxRecvDataSegmentLength is %d: %v", len(p.Data), c.params.recvMax, p)
		}
		c.work.Lock()
		if full {
			err = c.handle(p)
		} else {
			err = c.handleLogin(p)
		}
		c.work.Unlock()
		if err != nil {
			return
		}
	}
}

// handle answers one PDU of the full feature phase. An error ends the connection.
func (c *Conn) handle(p *PDU) error {
	if p.Opcode() != OpDataOut {
		if !c.number(p) {
			return nil // outside the window: ignored without an answer (section 4.2.2.1)
		}
	}
	if c.discovery {
		switch p.Opcode() {
		case OpText, OpLogout, OpNOPOut:
		default:
			return c.reject(p, 0x0b) // only text and logout in a discovery session (section 4.3)
		}
	}
	switch p.Opcode() {
	case OpSCSICommand:
		return c.command(p)
	case OpDataOut:
		return c.dataOut(p)
	case OpNOPOut:
		return c.nopOut(p)
	case OpText:
		return c.textRequest(p)
	case OpTaskMgmt:
		return c.taskManagement(p)
	case OpLogout:
		return c.logout(p)
	}
	c.violation("opcode %#02x", p.BHS[0])
	return c.reject(p, 0x05)
}

// number checks the numbers of a PDU and advances ExpCmdSN (section 4.2.2.1).
func (c *Conn) number(p *PDU) (ok bool) {
	sn, exp := p.U32(offCmdSN), p.U32(offExpStatSN)
	c.mu.Lock()
	statSN, expCmdSN, maxCmdSN := c.statSN, c.expCmdSN, c.maxCmdSN
	c.mu.Unlock()
	if int32(exp-statSN) > 0 {
		c.violation("ExpStatSN %d, the next StatSN is %d: %v", exp, statSN, p)
	}
	if p.Immediate() {
		if int32(sn-expCmdSN) < 0 || int32(sn-maxCmdSN) > 1 {
			c.violation("immediate PDU with CmdSN %d, window is %d to %d: %v", sn, expCmdSN, maxCmdSN, p)
		}
		return true
	}
	if sn != expCmdSN { // one connection: nothing can be out of order
		c.violation("CmdSN %d, expected %d: %v", sn, expCmdSN, p)
		return false
	}
	if int32(sn-maxCmdSN) > 0 {
		c.violation("CmdSN %d is beyond MaxCmdSN %d: %v", sn, maxCmdSN, p)
		return false
	}
	c.mu.Lock()
	c.expCmdSN++
	c.mu.Unlock()
	if p.Opcode() != OpSCSICommand { // a command gives its place back with the response
		c.advance()
	}
	return true
}
