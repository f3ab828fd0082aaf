package testtarget

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Login stages, RFC 7143 section 11.12.3.
const (
	stageSecurity    = 0
	stageOperational = 1
	stageFull        = 3
)

// Status of a Login Response, class and detail (section 11.13.5).
const (
	statusRedirect       = 0x0101
	statusMoved          = 0x0102
	statusInitiatorError = 0x0200
	statusAuthFailed     = 0x0201
	statusNotFound       = 0x0203
	statusTargetRemoved  = 0x0204
	statusMissing        = 0x0207
	statusNoSuchSession  = 0x020a
)

type loginState struct {
	started bool
	stage   byte
	text    []byte // of a request with the C bit
	chap    chapState
	secure  bool   // authentication is done, or none was asked for
	reply   []byte // rest of a response that is longer than one PDU
	last    byte   // flags of its last PDU
	further bool   // Config.LoginKeys have been sent
}

// handleLogin answers one Login Request. An error ends the connection.
func (c *Conn) handleLogin(p *PDU) error {
	l := &c.login
	if p.Opcode() != OpLogin || !p.Immediate() {
		c.violation("before the full feature phase: %v", p)
		return errors.New("not a Login Request")
	}
	flags := p.BHS[offFlags]
	csg, nsg, transit, more := flags>>2&3, flags&3, flags&final != 0, flags&0x40 != 0
	if !l.started {
		l.started, l.stage = true, csg
		copy(c.isid[:], p.BHS[8:14])
		c.tsih = uint16(p.BHS[14])<<8 | uint16(p.BHS[15])
		c.mu.Lock()
		c.expCmdSN = p.U32(offCmdSN)
		c.maxCmdSN = c.expCmdSN + uint32(c.target.config.Window) - 1
		c.statSN = c.target.config.StatSN
		c.mu.Unlock()
	} else if got := p.U32(offExpStatSN); got != c.nextStatSN() {
		c.violation("ExpStatSN %d in a Login Request, the next StatSN is %d", got, c.nextStatSN())
	}
	if csg != l.stage {
		c.violation("login stage %d in a Login Request, stage is %d", csg, l.stage)
		return c.loginFailed(p, statusInitiatorError)
	}
	if transit && more {
		c.violation("Login Request with T and C")
	}
	if len(l.reply) > 0 { // the rest of the answer is asked for (section 11.12)
		if len(p.Data) > 0 || more {
			c.violation("the target's answer goes on, and the Login Request that asks for it is not empty: %v", p)
		}
		return c.loginPiece(p)
	}
	l.text = append(l.text, p.Data...)
	if more {
		return c.loginResponse(p, csg<<2, nil)
	}
	pairs, err := parseText(l.text)
	l.text = nil
	if err != nil {
		c.violation("%v", err)
		return c.loginFailed(p, statusInitiatorError)
	}
	first := c.initiator == ""
	if first {
		if status := c.identify(pairs); status != 0 {
			return c.loginFailed(p, status)
		}
	}
	var reply []pair
	if first {
		chap := c.target.config.CHAP
		l.secure = chap == nil || c.discovery && chap.OpenDiscovery
	}
	if first && !c.discovery {
		reply = append(reply, pair{"TargetPortalGroupTag", strconv.Itoa(int(c.group))})
		if a := c.target.config.Alias; a != "" {
			reply = append(reply, pair{"TargetAlias", a})
		}
	}
	if csg == stageSecurity {
		more, status := c.security(pairs)
		if status != 0 {
			return c.loginFailed(p, status)
		}
		reply = append(reply, more...)
		if transit && !l.secure {
			transit = false
		}
	} else {
		if !l.secure {
			return c.loginFailed(p, statusAuthFailed) // operational stage without the authentication that is asked for
		}
		reply = append(reply, c.negotiate(pairs)...)
		for _, k := range c.target.config.LoginKeys {
			if key, value, ok := strings.Cut(k, "="); ok && !l.further {
				reply = append(reply, pair{key, value})
			}
		}
		l.further = true
	}
	if !transit {
		return c.loginResponse(p, csg<<2, reply)
	}
	if nsg <= csg || nsg == 2 {
		c.violation("login from stage %d to stage %d", csg, nsg)
		return c.loginFailed(p, statusInitiatorError)
	}
	if nsg == stageFull && c.tsih != 0 {
		return c.loginFailed(p, statusNoSuchSession) // one connection per session
	}
	return c.loginResponse(p, final|csg<<2|nsg, reply)
}

// identify takes the keys of the first request that say who wants what.
func (c *Conn) identify(pairs []pair) (status int) {
	var name, kind string
	for _, kv := range pairs {
		switch kv.key {
		case "InitiatorName":
			c.initiator = strings.ToLower(kv.value)
		case "TargetName":
			name = kv.value
		case "SessionType":
			kind = kv.value
		}
	}
	t := c.target
	switch {
	case c.initiator == "" || kind == "":
		return statusMissing // LIO wants SessionType although Normal is the default
	case kind == "Discovery":
		c.discovery = true
	case kind != "Normal":
		return 0x0209
	case name == "":
		return statusMissing
	case name != t.config.Name:
		return statusNotFound
	case t.config.Redirect != "" && t.config.RedirectForever:
		return statusMoved
	case t.config.Redirect != "":
		return statusRedirect
	}
	return 0
}

// negotiate answers operational keys.
func (c *Conn) negotiate(pairs []pair) []pair {
	var reply []pair
	for _, kv := range pairs {
		switch kv.key {
		case "InitiatorName", "InitiatorAlias", "TargetName", "SessionType":
			continue
		}
		if c.discovery && discoveryIrrelevant[kv.key] {
			reply = append(reply, pair{kv.key, "Irrelevant"})
			continue
		}
		if kv.value == "NotUnderstood" || kv.value == "Irrelevant" || kv.value == "Reject" {
			continue
		}
		if silent[kv.key] && c.target.config.ISER {
			continue
		}
		answer, effective := c.target.answer(kv.key, kv.value)
		reply = append(reply, pair{kv.key, answer})
		if effective != "" {
			c.params.set(kv.key, answer, effective)
		}
	}
	return reply
}

func (c *Conn) loginFailed(p *PDU, status int) error {
	var reply []pair
	if status == statusRedirect || status == statusMoved {
		reply = []pair{{"TargetAddress", c.target.config.Redirect}}
	}
	r := c.newLoginResponse(p, p.BHS[offFlags]&0x0c)
	r.BHS[36], r.BHS[37] = byte(status>>8), byte(status)
	r.Data = formatText(reply)
	c.send(r)
	return fmt.Errorf("login failed with status %04x", status)
}

// loginResponse answers a Login Request, in several PDUs if the text does not fit one (section 11.13). flags are those of the last one.
func (c *Conn) loginResponse(p *PDU, flags byte, reply []pair) error {
	c.login.reply, c.login.last = formatText(reply), flags
	return c.loginPiece(p)
}

func (c *Conn) loginPiece(p *PDU) error {
	l := &c.login
	n := len(l.reply)
	if s := c.target.config.TextSize; s > 0 && s < n {
		n = s
	}
	n = min(n, 8192) // MaxRecvDataSegmentLength does not hold before the full feature phase (section 13.12)
	piece := l.reply[:n]
	l.reply = l.reply[n:]
	flags := l.last
	if len(l.reply) > 0 {
		flags = flags&0x0c | 0x40
	} else if p.BHS[offFlags]&final == 0 {
		flags &= 0x0c // the stage is left when the initiator asks for it in the request that is answered (section 11.13)
	}
	if flags&final != 0 {
		l.stage = flags & 3
		if l.stage == stageFull {
			c.tsih = c.target.newTSIH()
		}
		if l.stage == stageFull && !c.discovery {
			c.target.established(c)
		}
	}
	r := c.newLoginResponse(p, flags)
	r.Data = piece
	err := c.send(r)
	c.mu.Lock()
	c.full = flags&final != 0 && l.stage == stageFull
	c.mu.Unlock()
	return err
}

func (c *Conn) newLoginResponse(p *PDU, flags byte) *PDU {
	r := &PDU{}
	r.BHS[0], r.BHS[offFlags] = OpLoginResp, flags
	copy(r.BHS[8:14], c.isid[:])
	if flags&final != 0 && flags&3 == stageFull {
		r.BHS[14], r.BHS[15] = byte(c.tsih>>8), byte(c.tsih)
	}
	r.SetU32(offITT, p.ITT())
	c.Numbers(r, true)
	return r
}
