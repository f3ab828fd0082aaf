package testtarget

import (
	"encoding/binary"
	"slices"
)

// Types of persistent reservations (SPC-4).
const (
	writeExclusive        = 1
	exclusiveAccess       = 3
	writeExclusiveRegs    = 5 // registrants only
	exclusiveAccessRegs   = 6
	writeExclusiveAllRegs = 7
	exclusiveAccessAll    = 8
)

var kinds = []byte{writeExclusive, exclusiveAccess, writeExclusiveRegs, exclusiveAccessRegs, writeExclusiveAllRegs, exclusiveAccessAll}

// reservation is the persistent reservation of a unit (SPC-4).
type reservation struct {
	keys       map[nexus]uint64
	generation uint32
	kind       byte  // 0: none
	holder     nexus // not for the types of all registrants
}

func (p *reservation) allRegistrants() bool {
	return p.kind == writeExclusiveAllRegs || p.kind == exclusiveAccessAll
}

func (p *reservation) holds(n nexus) bool {
	_, registered := p.keys[n]
	return p.kind != 0 && registered && (p.allRegistrants() || p.holder == n)
}

func init() {
	parameters := func(_ *Unit, cdb []byte) int { return int(binary.BigEndian.Uint32(cdb[5:])) }
	table := map[int]*command{
		0x16: {name: "RESERVE(6)", run: reserve6, class: status, usage: "00000000 07"},
		0x17: {name: "RELEASE(6)", run: release6, class: status, usage: "00000000 07"},
	}
	for action, name := range []string{"READ KEYS", "READ RESERVATION", "REPORT CAPABILITIES", "READ FULL STATUS"} {
		table[0x5e00|action] = &command{name: "PERSISTENT RESERVE IN " + name, run: reserveIn, class: status, usage: "1f0000000000ffff 07"}
	}
	for action, name := range []string{"REGISTER", "RESERVE", "RELEASE", "CLEAR", "PREEMPT", "PREEMPT AND ABORT", "REGISTER AND IGNORE EXISTING KEY"} {
		table[0x5f00|action] = &command{name: "PERSISTENT RESERVE OUT " + name, run: reserveOut, class: status, usage: "1fff0000ffffffff 07", takes: parameters}
	}
	for _, c := range table {
		if c.usage[:2] == "1f" {
			c.usage = "00" + c.usage[2:] // the service action itself is filled in
		}
	}
	register(table)
}

// holds answers a command that a reservation keeps from running (SPC-4 and SBC-3 have tables of it).
func (u *Unit) holds(n nexus, c *command) result {
	u.mu.Lock()
	defer u.mu.Unlock()
	conflict := result{status: ReservationConflict}
	if u.reserved != nil && *u.reserved != n && c.class != always && c.name != "RELEASE(6)" {
		return conflict
	}
	if len(u.pr.keys) > 0 && (c.name == "RESERVE(6)" || c.name == "RELEASE(6)") {
		return conflict
	}
	if u.pr.kind == 0 || c.class < reads || u.pr.holds(n) {
		return result{}
	}
	_, registered := u.pr.keys[n]
	switch u.pr.kind {
	case writeExclusive:
		if c.class == reads {
			return result{}
		}
	case writeExclusiveRegs, writeExclusiveAllRegs:
		if c.class == reads || registered {
			return result{}
		}
	case exclusiveAccessRegs, exclusiveAccessAll:
		if registered {
			return result{}
		}
	}
	return conflict
}

func reserve6(r *request) result {
	if r.cdb[1]&1 != 0 {
		return invalidField() // extents
	}
	r.u.mu.Lock()
	defer r.u.mu.Unlock()
	n := r.nexus
	r.u.reserved = &n
	return result{}
}

func release6(r *request) result {
	r.u.mu.Lock()
	defer r.u.mu.Unlock()
	if r.u.reserved != nil && *r.u.reserved == r.nexus {
		r.u.reserved = nil
	}
	return result{}
}

// registrants are the registered nexuses in a fixed order. u.mu is held.
func (p *reservation) registrants() []nexus {
	var list []nexus
	for n := range p.keys {
		list = append(list, n)
	}
	slices.SortFunc(list, nexus.compare)
	return list
}

func reserveIn(r *request) result {
	u, p := r.u, &r.u.pr
	u.mu.Lock()
	defer u.mu.Unlock()
	b := binary.BigEndian.AppendUint32(nil, p.generation)
	b = append(b, 0, 0, 0, 0)
	switch r.cdb[1] & 0x1f {
	case 0: // READ KEYS
		for _, n := range p.registrants() {
			b = binary.BigEndian.AppendUint64(b, p.keys[n])
		}
	case 1: // READ RESERVATION
		if p.kind != 0 {
			d := make([]byte, 16)
			if !p.allRegistrants() {
				binary.BigEndian.PutUint64(d, p.keys[p.holder])
			}
			d[13] = p.kind
			b = append(b, d...)
		}
	case 2: // REPORT CAPABILITIES: every type; TMV
		return data([]byte{0, 8, 0x10, 0x80, 0xea, 0x01, 0, 0}, int(binary.BigEndian.Uint16(r.cdb[7:])))
	case 3: // READ FULL STATUS
		for _, n := range p.registrants() {
			d := make([]byte, 24)
			binary.BigEndian.PutUint64(d, p.keys[n])
			if p.holds(n) {
				d[12], d[13] = 0x01, p.kind
			}
			binary.BigEndian.PutUint16(d[18:], n.port)
			id := n.transportID()
			binary.BigEndian.PutUint32(d[20:], uint32(len(id)))
			b = append(append(b, d...), id...)
		}
	}
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-8))
	return data(b, int(binary.BigEndian.Uint16(r.cdb[7:])))
}

func reserveOut(r *request) result {
	list := int(binary.BigEndian.Uint32(r.cdb[5:]))
	if list != 24 || len(r.out) < 24 {
		return check(KeyIllegalRequest, 0x1a, 0x00)
	}
	key, action := binary.BigEndian.Uint64(r.out), binary.BigEndian.Uint64(r.out[8:])
	if r.out[20]&0x0d != 0 {
		return invalidParameter() // SPEC_I_PT, ALL_TG_PT, APTPL are not supported
	}
	u := r.u
	var told []notice
	defer func() {
		for _, n := range told {
			u.attention(n.to, nexus{}, 0x2a, n.ascq)
		}
	}()
	u.mu.Lock()
	defer u.mu.Unlock()
	p := &u.pr
	own, registered := p.keys[r.nexus]
	conflict := result{status: ReservationConflict}
	kind, scope := r.cdb[2]&0x0f, r.cdb[2]>>4
	op := r.cdb[1] & 0x1f
	switch op {
	case 0, 6: // REGISTER, REGISTER AND IGNORE EXISTING KEY
		if op == 0 && (registered && key != own || !registered && key != 0) {
			return conflict
		}
		if action == 0 {
			if registered {
				told = u.unregister(r.nexus)
				p.generation++
			}
			return result{}
		}
		if p.keys == nil {
			p.keys = map[nexus]uint64{}
		}
		p.keys[r.nexus] = action
		p.generation++
		return result{}
	}
	if !registered || key != own {
		return conflict
	}
	if (scope != 0 || !slices.Contains(kinds, kind)) && (op == 1 || op == 2 && p.kind != 0) {
		return invalidField()
	}
	switch op {
	case 1: // RESERVE
		if p.kind != 0 && (!p.holds(r.nexus) || p.kind != kind) {
			return conflict
		}
		p.kind, p.holder = kind, r.nexus
	case 2: // RELEASE
		if p.kind == 0 || !p.holds(r.nexus) {
			return result{}
		}
		if p.kind != kind {
			return check(KeyIllegalRequest, 0x26, 0x04) // INVALID RELEASE OF PERSISTENT RESERVATION
		}
		told = p.releaseNotices(r.nexus)
		p.kind, p.holder = 0, nexus{}
	case 3: // CLEAR
		for n := range p.keys {
			if n != r.nexus {
				told = append(told, notice{n, 0x03}) // RESERVATIONS PREEMPTED
			}
		}
		p.keys, p.kind, p.holder = nil, 0, nexus{}
		p.generation++
	case 4, 5: // PREEMPT, PREEMPT AND ABORT
		return p.preempt(r, action, kind, &told)
	}
	return result{}
}

// notice is a unit attention for a nexus whose registration or reservation somebody else has ended; ASC is 2a.
type notice struct {
	to   nexus
	ascq byte
}

// releaseNotices tells the other registrants when a reservation of theirs ends (SPC-4).
func (p *reservation) releaseNotices(by nexus) (list []notice) {
	if p.kind < writeExclusiveRegs {
		return nil
	}
	for n := range p.keys {
		if n != by {
			list = append(list, notice{n, 0x04}) // RESERVATIONS RELEASED
		}
	}
	return list
}

// unregister removes a registration, and the reservation with it if it goes (SPC-4). u.mu is held.
func (u *Unit) unregister(n nexus) (told []notice) {
	p := &u.pr
	held := p.holds(n)
	if held && (!p.allRegistrants() || len(p.keys) == 1) {
		told = p.releaseNotices(n)
		p.kind, p.holder = 0, nexus{}
	}
	delete(p.keys, n)
	return told
}

// preempt is PREEMPT and PREEMPT AND ABORT (SPC-4).
func (p *reservation) preempt(r *request, victim uint64, kind byte, told *[]notice) result {
	byKey := func(n nexus) bool { return p.keys[n] == victim }
	takeOver := false
	switch {
	case p.kind != 0 && p.allRegistrants():
		if victim == 0 {
			byKey, takeOver = func(n nexus) bool { return true }, true
		}
	case p.kind != 0 && p.keys[p.holder] == victim:
		takeOver = true
	case victim == 0:
		return invalidParameter()
	}
	found := takeOver
	var gone []nexus
	for n := range p.keys {
		if byKey(n) {
			found = true
			if n != r.nexus || !takeOver && victim == p.keys[r.nexus] {
				gone = append(gone, n)
			}
		}
	}
	if !found {
		return result{status: ReservationConflict}
	}
	for _, n := range gone {
		delete(p.keys, n)
		if n != r.nexus {
			*told = append(*told, notice{n, 0x05}) // REGISTRATIONS PREEMPTED
		}
		if p.kind != 0 && !p.allRegistrants() && p.holder == n {
			takeOver = true
		}
	}
	if takeOver {
		if old := p.kind; old != kind && old >= writeExclusiveRegs {
			for n := range p.keys {
				if n != r.nexus {
					*told = append(*told, notice{n, 0x04})
				}
			}
		}
		p.kind, p.holder = kind, r.nexus
	}
	p.generation++
	if r.cdb[1]&0x1f == 5 {
		for _, n := range gone {
			if n != r.nexus {
				r.t.abortTasks(n, r.lun)
			}
		}
	}
	return result{}
}
