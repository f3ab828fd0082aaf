package testtarget

import "encoding/binary"

// SCSI status (SAM-5 section 5.3.1).
const (
	Good                = 0x00
	CheckCondition      = 0x02
	Busy                = 0x08
	ReservationConflict = 0x18
	TaskSetFull         = 0x28
	ACAActive           = 0x30
	TaskAborted         = 0x40
)

// Sense keys (SPC-4).
const (
	KeyNotReady       = 0x02
	KeyMediumError    = 0x03
	KeyIllegalRequest = 0x05
	KeyUnitAttention  = 0x06
	KeyDataProtect    = 0x07
	KeyAbortedCommand = 0x0b
	KeyMiscompare     = 0x0e
)

// Sense makes fixed format sense data (SPC-4 section 4.5.3).
func Sense(key, asc, ascq byte) []byte {
	s := make([]byte, 18)
	s[0], s[2], s[7], s[12], s[13] = 0x70, key, 10, asc, ascq
	return s
}

// result is what a command leaves: data for the initiator, status, sense data.
type result struct {
	in     []byte
	status byte
	sense  []byte
}

func data(b []byte, allocation int) result { return result{in: b[:min(len(b), allocation)]} }

func check(key, asc, ascq byte) result {
	return result{status: CheckCondition, sense: Sense(key, asc, ascq)}
}

func invalidField() result { return check(KeyIllegalRequest, 0x24, 0x00) }

func invalidParameter() result { return check(KeyIllegalRequest, 0x26, 0x00) }

// request is a command on its way through the device server.
type request struct {
	t     *Target
	u     *Unit
	nexus nexus
	lun   int
	cdb   []byte
	out   []byte // what the initiator sent
	edtl  int
}

// command is what the device server knows about an operation code, or about one of its service actions.
type command struct {
	name  string
	run   func(r *request) result
	class class  // what may keep it from running
	usage string // CDB usage data for REPORT SUPPORTED OPERATION CODES, hexadecimal, from byte 1 on; 0 where a bit is not evaluated

	// takes is how many bytes the command takes from the initiator; nil: what comes. u.mu is not held.
	takes func(u *Unit, cdb []byte) int

	// offered tells whether the unit has the command; nil: always.
	offered func(u *Unit) bool
}

// class says what holds a command up.
type class int

const (
	always class = iota // nothing: INQUIRY, REPORT LUNS, REQUEST SENSE
	status              // unit attentions and RESERVE(6), not persistent reservations or the access state
	query               // what does not touch the medium: RESERVE(6), access states without access
	reads               // reservations that exclude readers
	writes              // any reservation of somebody else's
)

// commands by operation code, and by operation code << 8 | service action where byte 1 holds one. Filled in by the files of the commands.
var commands = map[int]*command{}

// actions are the operation codes with a service action in the low five bits of byte 1.
var actions = map[byte]bool{0x5e: true, 0x5f: true, 0x9e: true, 0xa3: true}

func register(table map[int]*command) {
	for code, c := range table {
		commands[code] = c
	}
}

func lookup(cdb []byte) (*command, bool) {
	if actions[cdb[0]] {
		c := commands[int(cdb[0])<<8|int(cdb[1]&0x1f)]
		return c, c == nil
	}
	return commands[int(cdb[0])], false
}

// takes tells how many bytes a command takes from the initiator; -1 when it takes what comes.
func (c *Conn) takes(t *task) int {
	u := c.unit(t.lun)
	if u == nil {
		return -1
	}
	if k, _ := lookup(t.cdb); k != nil && k.takes != nil && (k.offered == nil || k.offered(u)) {
		return k.takes(u, t.cdb)
	}
	return -1
}

// run lets the unit carry out a command.
func (t *Target) run(k *task) result {
	u := t.unit(k.lun)
	r := &request{t: t, u: u, nexus: k.c.nexus(), lun: k.lun, cdb: k.cdb, out: k.data, edtl: k.edtl}
	if u == nil {
		return r.noUnit()
	}
	if u.Fault != nil {
		if status, sense := u.Fault(k.cdb); status != 0 {
			return result{status: status, sense: sense}
		}
	}
	if f, ok := u.takeFault(k.cdb); ok {
		return result{status: f.status, sense: f.sense}
	}
	c, badAction := lookup(k.cdb)
	if c == nil && badAction {
		return invalidField()
	}
	if c == nil || c.offered != nil && !c.offered(u) || u.Type != 0 && c.class >= reads {
		return check(KeyIllegalRequest, 0x20, 0x00) // INVALID COMMAND OPERATION CODE
	}
	if c.class != always {
		if asc, ascq, ok := u.takeAttention(r.nexus); ok {
			return check(KeyUnitAttention, asc, ascq)
		}
	}
	if held := u.holds(r.nexus, c); held.status != 0 {
		return held
	}
	if denied := u.access(r.nexus.port, c); denied.status != 0 {
		return denied
	}
	return c.run(r)
}

// noUnit answers for a LUN that has no unit (SPC-4, SAM-5).
func (r *request) noUnit() result {
	switch r.cdb[0] {
	case 0xa0:
		return reportLUNs(r)
	case 0x12:
		if r.cdb[1]&1 == 0 {
			b := standardInquiry(&Unit{})
			b[0] = 0x7f // no unit here
			return data(b, int(binary.BigEndian.Uint16(r.cdb[3:])))
		}
	case 0x03:
		return data(Sense(KeyIllegalRequest, 0x25, 0x00), int(r.cdb[4]))
	}
	return check(KeyIllegalRequest, 0x25, 0x00) // LOGICAL UNIT NOT SUPPORTED
}

// access answers a command that the asymmetric access state does not let through (SPC-4).
func (u *Unit) access(group uint16, c *command) result {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped && c.class >= reads {
		return check(KeyNotReady, 0x04, 0x02) // INITIALIZING COMMAND REQUIRED
	}
	state, ok := u.groups[group]
	if !ok || c.class < query {
		return result{}
	}
	switch state {
	case Standby:
		if c.class > query {
			return check(KeyNotReady, 0x04, 0x0b)
		}
	case Unavailable:
		return check(KeyNotReady, 0x04, 0x0c)
	case Offline:
		return check(KeyNotReady, 0x04, 0x12)
	case Transitioning:
		return check(KeyNotReady, 0x04, 0x0a)
	}
	return result{}
}

// decodeLUN takes the first level of a LUN, peripheral or flat (SAM-5 section 4.7.7); -1 for what it cannot tell.
func decodeLUN(b []byte) int {
	if b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
		return -1
	}
	switch b[0] >> 6 {
	case 0:
		if b[0] == 0 {
			return int(b[1])
		}
	case 1:
		return int(b[0]&0x3f)<<8 | int(b[1])
	}
	return -1
}

func encodeLUN(b []byte, lun int) {
	clear(b[:8])
	if lun < 256 {
		b[1] = byte(lun)
		return
	}
	b[0], b[1] = 0x40|byte(lun>>8), byte(lun)
}

func (c *Conn) unit(lun int) *Unit { return c.target.unit(lun) }

// nexus names the session of a connection; it is the I_T nexus of SCSI.
func (c *Conn) nexus() nexus { return nexus{c.initiator, c.isid, c.group} }
