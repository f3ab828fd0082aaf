package testtarget

import (
	"encoding/binary"
	"errors"
	"strings"
)

// errLoggedOut ends a connection after its Logout Response.
var errLoggedOut = errors.New("logged out")

// Ping sends a NOP-In with ttt and data, which asks for an answer unless ttt is 0xffffffff (section 11.19).
func (c *Conn) Ping(ttt uint32, data []byte) error {
	defer c.lock()()
	p := &PDU{Data: data}
	p.BHS[0], p.BHS[offFlags] = OpNOPIn, final
	p.SetU32(offITT, noTag)
	p.SetU32(offTTT, ttt)
	c.Numbers(p, false)
	return c.Write(p)
}

// Events of [Conn.Async] (section 11.9.1).
const (
	AsyncSCSI      = 0 // a SCSI event; see Conn.AsyncSense
	AsyncLogout    = 1 // log out within p3 seconds
	AsyncDrop      = 2 // connection p1 (CID) will be dropped; wait p2 seconds, and at most p3 more, before coming back
	AsyncDropAll   = 3 // the same for all connections of the session
	AsyncNegotiate = 4 // negotiate again within p3 seconds
)

// Async sends an Asynchronous Message (section 11.9).
func (c *Conn) Async(event byte, p1, p2, p3 uint16) error {
	p := asyncMessage(event)
	binary.BigEndian.PutUint16(p.BHS[38:], p1)
	binary.BigEndian.PutUint16(p.BHS[40:], p2)
	binary.BigEndian.PutUint16(p.BHS[42:], p3)
	defer c.lock()()
	c.Numbers(p, true)
	return c.Write(p)
}

// AsyncSense sends an Asynchronous Message with a SCSI event of a unit (section 11.9).
func (c *Conn) AsyncSense(lun int, sense []byte) error {
	p := asyncMessage(AsyncSCSI)
	encodeLUN(p.BHS[offLUN:], lun)
	p.Data = senseSegment(sense)
	defer c.lock()()
	c.Numbers(p, true)
	return c.Write(p)
}

func asyncMessage(event byte) *PDU {
	p := &PDU{}
	p.BHS[0], p.BHS[offFlags], p.BHS[36] = OpAsync, final, event
	p.SetU32(offITT, noTag)
	return p
}

// Reject sends a Reject of p with a reason (section 11.17).
func (c *Conn) Reject(p *PDU, reason byte) error {
	defer c.lock()()
	return c.Write(c.newReject(p, reason))
}

func (c *Conn) newReject(p *PDU, reason byte) *PDU {
	r := &PDU{Data: append([]byte(nil), p.BHS[:]...)}
	r.BHS[0], r.BHS[offFlags], r.BHS[2] = OpReject, final, reason
	r.SetU32(offITT, noTag)
	c.Numbers(r, true)
	return r
}

func (c *Conn) reject(p *PDU, reason byte) error { return c.send(c.newReject(p, reason)) }

func (c *Conn) nopOut(p *PDU) error {
	if p.ITT() == noTag {
		if !p.Immediate() {
			c.violation("NOP-Out without tag is not immediate: %v", p)
		}
		return nil // answers a ping; the test finds it in the events
	}
	r := &PDU{Data: p.Data}
	r.BHS[0], r.BHS[offFlags] = OpNOPIn, final
	r.SetU32(offITT, p.ITT())
	r.SetU32(offTTT, noTag)
	copy(r.BHS[offLUN:], p.BHS[offLUN:offLUN+8])
	c.Numbers(r, true)
	return c.send(r)
}

func (c *Conn) logout(p *PDU) error {
	r := &PDU{}
	r.BHS[0], r.BHS[offFlags] = OpLogoutResp, final
	r.SetU32(offITT, p.ITT())
	c.Numbers(r, true)
	c.send(r)
	return errLoggedOut
}

// Functions of a Task Management Function Request (section 11.5.1).
const (
	AbortTask        = 1
	AbortTaskSet     = 2
	ClearACA         = 3
	ClearTaskSet     = 4
	LogicalUnitReset = 5
	TargetWarmReset  = 6
	TargetColdReset  = 7
	TaskReassign     = 8
)

// Responses to it (section 11.6.1).
const (
	TaskComplete      = 0
	TaskDoesNotExist  = 1
	TaskNoUnit        = 2
	TaskStillAlleged  = 3
	TaskNotReassigned = 4
	TaskNotSupported  = 5
	TaskUnauthorized  = 6
	TaskRejected      = 255
)

// taskManagement ends what a function ends, in this and in other sessions.
func (c *Conn) taskManagement(p *PDU) error {
	function, lun := p.BHS[1]&0x7f, decodeLUN(p.BHS[offLUN:offLUN+8])
	response := byte(TaskComplete)
	t := c.target
	switch function {
	case AbortTask:
		if itt := p.U32(offTTT); !c.forget(func(k *task) bool { return k.itt == itt }) && !c.inWindow(p.U32(offRefCmdSN)) {
			response = TaskDoesNotExist // one that is in the window has not come yet, and counts as ended (section 11.6.1)
		}
	case AbortTaskSet:
		c.forget(func(k *task) bool { return k.lun == lun })
	case ClearTaskSet, LogicalUnitReset:
		u := c.unit(lun)
		if u == nil {
			response = TaskNoUnit
			break
		}
		for _, port := range u.ports() {
			port.others(nil, func(o *Conn) { o.forget(func(k *task) bool { return o.target.unit(k.lun) == u }) })
		}
		if function == LogicalUnitReset {
			u.reset()
			u.attention(nexus{}, nexus{}, 0x29, 0x03)
		}
	case TargetWarmReset, TargetColdReset:
		t.others(c, func(o *Conn) { o.forget(func(*task) bool { return true }) })
		c.forget(func(*task) bool { return true })
		for _, u := range t.units() {
			if u != nil {
				u.reset()
				u.attention(nexus{}, nexus{}, 0x29, 0x02)
			}
		}
	default:
		response = TaskNotSupported
	}
	r := &PDU{}
	r.BHS[0], r.BHS[offFlags], r.BHS[2] = OpTaskMgmtResp, final, response
	r.SetU32(offITT, p.ITT())
	c.Numbers(r, true)
	if err := c.send(r); err != nil || function != TargetColdReset {
		return err
	}
	t.others(c, (*Conn).Close)
	return errors.New("target cold reset") // ends every session (section 11.5.1)
}

// forget drops the commands that fit, unfinished or parked. It tells whether there was one.
func (c *Conn) forget(fits func(*task) bool) (found bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, list := range []map[uint32]*task{c.tasks, c.parked} {
		for itt, k := range list {
			if fits(k) {
				delete(list, itt)
				c.advanceLocked()
				found = true
			}
		}
	}
	return found
}

func (c *Conn) inWindow(cmdSN uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return int32(cmdSN-c.expCmdSN) >= 0 && int32(cmdSN-c.maxCmdSN) <= 0
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
		switch {
		case kv.key == "SendTargets":
			reply = append(reply, c.target.sendTargets(kv.value, c.link.local().String())...)
		case kv.value == "NotUnderstood":
		case kv.key == "MaxRecvDataSegmentLength": // may be declared at any time (section 13.12)
			reply = append(reply, c.negotiate([]pair{kv})...)
		default:
			reply = append(reply, pair{kv.key, "NotUnderstood"})
		}
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
	r.BHS[0], r.BHS[offFlags] = OpTextResp, final
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
	if which == "All" && len(t.config.More) > 0 {
		if more, err := parseText([]byte(strings.Join(t.config.More, "\x00") + "\x00")); err == nil {
			reply = append(reply, more...)
		}
	}
	return reply
}
