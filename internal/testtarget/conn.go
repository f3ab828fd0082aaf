package testtarget

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync"
)

// Conn is one connection of an initiator, in login or in the full feature phase.
type Conn struct {
	Number int // from 1, in the order they came

	target *Target
	nc     net.Conn
	params params
	login  loginState

	initiator string
	isid      [6]byte
	tsih      uint16
	discovery bool

	tasks map[uint32]*transfer // writes whose data is still coming, by Initiator Task Tag
	ttt   uint32
	text  []byte // rest of a long Text Response

	mu       sync.Mutex // guards what follows, and the order of writes
	full     bool       // in the full feature phase
	statSN   uint32
	expCmdSN uint32
	maxCmdSN uint32
}

func newConn(t *Target, nc net.Conn, number int) *Conn {
	return &Conn{Number: number, target: t, nc: nc, params: defaultParams(), tasks: make(map[uint32]*transfer)}
}

// Close ends the connection at once.
func (c *Conn) Close() {
	c.nc.Close()
}

// CloseWrite ends the connection in order, after what was written; the target goes on reading.
func (c *Conn) CloseWrite() { c.nc.(*net.TCPConn).CloseWrite() }

// SetReadBuffer sets the size of the socket's receive buffer, bytes.
func (c *Conn) SetReadBuffer(n int) { c.nc.(*net.TCPConn).SetReadBuffer(n) }

// FullFeature reports whether the connection has left login.
func (c *Conn) FullFeature() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.full
}

// Discovery reports whether the session is a discovery session. It is for hooks.
func (c *Conn) Discovery() bool { return c.discovery }

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
		return p.encode(digests{})
	}
	return p.encode(c.params.digests)
}

// WriteBytes sends raw bytes.
func (c *Conn) WriteBytes(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.nc.Write(b)
	return err
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

func (c *Conn) nextStatSN() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statSN
}

// Ping sends a NOP-In that asks for an answer with ttt and data (section 11.19).
func (c *Conn) Ping(ttt uint32, data []byte) error {
	p := &PDU{Data: data}
	p.BHS[0], p.BHS[offFlags] = opNOPIn, final
	p.SetU32(offITT, noTag)
	p.SetU32(offTTT, ttt)
	c.Numbers(p, false)
	return c.Write(p)
}

// Async sends an Asynchronous Message (section 11.9).
func (c *Conn) Async(event byte, p1, p2, p3 uint16) error {
	p := &PDU{}
	p.BHS[0], p.BHS[offFlags] = 0x32, final
	p.SetU32(offITT, noTag)
	p.BHS[36] = event
	binary.BigEndian.PutUint16(p.BHS[38:], p1)
	binary.BigEndian.PutUint16(p.BHS[40:], p2)
	binary.BigEndian.PutUint16(p.BHS[42:], p3)
	c.Numbers(p, true)
	return c.Write(p)
}

// send passes a PDU to the hook and writes it.
func (c *Conn) send(p *PDU) error {
	c.target.mu.Lock()
	hook := c.target.hooks.Sending
	c.target.mu.Unlock()
	if hook != nil && !hook(c, p) {
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
	defer c.nc.Close()
	for {
		full := c.FullFeature()
		var d digests
		if full {
			d = c.params.digests
		}
		p, err := readPDU(c.nc, d)
		if err != nil {
			return
		}
		c.target.record(c, false, p)
		c.target.mu.Lock()
		hook := c.target.hooks.Received
		c.target.mu.Unlock()
		if hook != nil && !hook(c, p) {
			continue
		}
		if len(p.Data) > c.params.recvMax {
			c.violation("data segment of %d bytes, MaxRecvDataSegmentLength is %d: %v", len(p.Data), c.params.recvMax, p)
		}
		if !full {
			if err := c.handleLogin(p); err != nil {
				return
			}
			continue
		}
		if err := c.handle(p); err != nil {
			return
		}
	}
}

// handle answers one PDU of the full feature phase. An error ends the connection.
func (c *Conn) handle(p *PDU) error {
	if p.Opcode() != opDataOut {
		if !c.number(p) {
			return nil // outside the window: ignored without an answer (section 4.2.2.1)
		}
	}
	if c.discovery {
		switch p.Opcode() {
		case opText, opLogout, opNOPOut:
		default:
			return c.reject(p, 0x0b) // only text and logout in a discovery session (section 4.3)
		}
	}
	switch p.Opcode() {
	case opSCSICommand:
		return c.command(p)
	case opDataOut:
		return c.dataOut(p)
	case opNOPOut:
		return c.nopOut(p)
	case opText:
		return c.textRequest(p)
	case opTaskMgmt:
		return c.taskManagement(p)
	case opLogout:
		r := &PDU{}
		r.BHS[0], r.BHS[offFlags] = opLogoutResp, final
		r.SetU32(offITT, p.ITT())
		c.Numbers(r, true)
		c.send(r)
		return fmt.Errorf("logged out")
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
	if p.Opcode() != opSCSICommand { // a command gives its place back with the response
		c.maxCmdSN++
	}
	c.mu.Unlock()
	return true
}

func (c *Conn) reject(p *PDU, reason byte) error {
	r := &PDU{Data: append([]byte(nil), p.BHS[:]...)}
	r.BHS[0], r.BHS[offFlags], r.BHS[2] = opReject, final, reason
	r.SetU32(offITT, noTag)
	c.Numbers(r, true)
	return c.send(r)
}

func (c *Conn) nopOut(p *PDU) error {
	if p.ITT() == noTag {
		if !p.Immediate() {
			c.violation("NOP-Out without tag is not immediate: %v", p)
		}
		return nil // answers a ping; the test finds it in the events
	}
	r := &PDU{Data: p.Data}
	r.BHS[0], r.BHS[offFlags] = opNOPIn, final
	r.SetU32(offITT, p.ITT())
	r.SetU32(offTTT, noTag)
	copy(r.BHS[offLUN:], p.BHS[offLUN:offLUN+8])
	c.Numbers(r, true)
	return c.send(r)
}

// taskManagement forgets what a function ends and says that it is complete.
func (c *Conn) taskManagement(p *PDU) error {
	switch p.BHS[1] & 0x7f {
	case 1: // ABORT TASK
		delete(c.tasks, p.U32(offTTT)) // Referenced Task Tag
	default:
		clear(c.tasks)
	}
	r := &PDU{}
	r.BHS[0], r.BHS[offFlags] = opTaskMgmtResp, final
	r.SetU32(offITT, p.ITT())
	c.Numbers(r, true)
	return c.send(r)
}

// textRequest answers SendTargets, in pieces where the answer is longer than one PDU may be (section 11.11).
func (c *Conn) textRequest(p *PDU) error {
	if ttt := p.U32(offTTT); ttt != noTag {
		if len(p.Data) > 0 || c.text == nil {
			c.violation("Text Request continues %#08x with %d bytes of text", ttt, len(p.Data))
		}
		return c.textResponse(p)
	}
	pairs, err := parseText(p.Data)
	if err != nil {
		c.violation("%v", err)
		return c.reject(p, 0x04)
	}
	var reply []pair
	for _, kv := range pairs {
		if kv.key != "SendTargets" {
			reply = append(reply, pair{kv.key, "NotUnderstood"})
			continue
		}
		reply = append(reply, c.target.sendTargets(kv.value, c.nc.LocalAddr().String())...)
	}
	c.text = formatText(reply)
	return c.textResponse(p)
}

func (c *Conn) textResponse(p *PDU) error {
	n := c.params.sendMax
	if s := c.target.config.TextSize; s > 0 && s < n {
		n = s
	}
	n = min(n, len(c.text))
	r := &PDU{Data: c.text[:n]}
	c.text = c.text[n:]
	r.BHS[0], r.BHS[offFlags] = opTextResp, final
	r.SetU32(offTTT, noTag)
	if len(c.text) > 0 {
		r.BHS[offFlags] = 0x40 // C bit
		c.ttt++
		r.SetU32(offTTT, c.ttt)
	}
	r.SetU32(offITT, p.ITT())
	c.Numbers(r, true)
	return c.send(r)
}

func (t *Target) sendTargets(which, local string) []pair {
	var reply []pair
	if which == "All" || which == "" || which == t.config.Name {
		reply = append(reply, pair{"TargetName", t.config.Name})
		portals := t.config.Portals
		if len(portals) == 0 {
			portals = []string{local + ",1"}
		}
		for _, a := range portals {
			reply = append(reply, pair{"TargetAddress", a})
		}
	}
	if which == "All" {
		more, err := parseText(append([]byte(joinZero(t.config.More)), 0))
		if err == nil {
			reply = append(reply, more...)
		}
	}
	return reply
}

func joinZero(list []string) string {
	s := ""
	for i, l := range list {
		if i > 0 {
			s += "\x00"
		}
		s += l
	}
	return s
}
