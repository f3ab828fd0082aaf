package testtarget

import (
	"encoding/binary"
	"encoding/hex"
	"slices"
	"strings"
)

// The primary commands (SPC-4): what any kind of unit answers.
func init() {
	register(map[int]*command{
		0x00:   {name: "TEST UNIT READY", run: testUnitReady, class: status, usage: "00000000 07"},
		0x03:   {name: "REQUEST SENSE", run: requestSense, class: always, usage: "000000ff 07"},
		0x12:   {name: "INQUIRY", run: inquiry, class: always, usage: "01ffffff 07"},
		0x1a:   {name: "MODE SENSE(6)", run: modeSense, class: query, usage: "08ffffff 07"},
		0x5a:   {name: "MODE SENSE(10)", run: modeSense, class: query, usage: "18ffff000000ffff 07"},
		0x15:   {name: "MODE SELECT(6)", run: modeSelect, class: writes, usage: "110000ff 07"},
		0x55:   {name: "MODE SELECT(10)", run: modeSelect, class: writes, usage: "110000000000ffff 07"},
		0xa0:   {name: "REPORT LUNS", run: reportLUNs, class: always, usage: "00ff000000ffffffff00 07"},
		0xa30a: {name: "REPORT TARGET PORT GROUPS", run: reportTargetPortGroups, class: status, usage: "e000000000ffffffff00 07", offered: hasGroups},
		0xa30c: {name: "REPORT SUPPORTED OPERATION CODES", run: nil, class: status, usage: "0087ffffffffffffff00 07"},
		0x1b:   {name: "START STOP UNIT", run: startStop, class: status, usage: "01000003 07"},
		0x1d:   {name: "SEND DIAGNOSTIC", run: sendDiagnostic, class: reads, usage: "04000000 07"},
		0x9e10: {name: "READ CAPACITY(16)", run: readCapacity16, class: query, usage: "100000000000000000ffffffff00 07"},
		0x25:   {name: "READ CAPACITY(10)", run: readCapacity10, class: query, usage: "0000000000000000 07"},
	})
	commands[0xa30c].run = reportOpcodes // which reads the table
}

func testUnitReady(r *request) result {
	r.u.mu.Lock()
	defer r.u.mu.Unlock()
	if r.u.stopped {
		return check(KeyNotReady, 0x04, 0x02)
	}
	return result{}
}

func requestSense(r *request) result {
	if r.cdb[1]&1 != 0 {
		return invalidField() // descriptor format
	}
	s := Sense(0, 0, 0)
	if asc, ascq, ok := r.u.takeAttention(r.nexus); ok {
		s = Sense(KeyUnitAttention, asc, ascq)
	}
	return data(s, int(r.cdb[4]))
}

func reportLUNs(r *request) result {
	report, n := r.cdb[2], int(binary.BigEndian.Uint32(r.cdb[6:]))
	if report > 2 || n < 16 {
		return invalidField()
	}
	b := make([]byte, 8)
	for lun, u := range r.t.units() {
		if u != nil && report != 1 { // 1: well known units only, of which there is none
			var l [8]byte
			encodeLUN(l[:], lun)
			b = append(b, l[:]...)
			u.clearAttention(r.nexus, 0x3f, 0x0e)
		}
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-8))
	return data(b, n)
}

func readCapacity10(r *request) result {
	if r.cdb[8]&1 == 0 && binary.BigEndian.Uint32(r.cdb[2:]) != 0 {
		return invalidField()
	}
	b := make([]byte, 8)
	r.u.mu.Lock()
	binary.BigEndian.PutUint32(b, uint32(min(r.u.blocks()-1, 0xffffffff)))
	r.u.mu.Unlock()
	binary.BigEndian.PutUint32(b[4:], uint32(r.u.BlockSize))
	return data(b, 8)
}

func readCapacity16(r *request) result {
	b := make([]byte, 32)
	r.u.mu.Lock()
	binary.BigEndian.PutUint64(b, r.u.blocks()-1)
	r.u.mu.Unlock()
	binary.BigEndian.PutUint32(b[8:], uint32(r.u.BlockSize))
	b[13] = byte(r.u.PhysicalBlocks & 15)
	if r.u.Thin {
		b[14] = 0xc0 // LBPME, LBPRZ
	}
	return data(b, int(binary.BigEndian.Uint32(r.cdb[10:])))
}

// Mode pages (SPC-4, SBC-3): control with SWP, and caching with WCE set; only SWP can be changed.
func (u *Unit) pages(which byte) []byte {
	caching := make([]byte, 20)
	caching[0], caching[1], caching[2] = 0x08, 18, 0x04
	control := make([]byte, 12)
	control[0], control[1] = 0x0a, 10
	if u.softProtect() {
		control[4] |= 0x08
	}
	switch which {
	case 0x08:
		return caching
	case 0x0a:
		return control
	case 0x3f:
		return append(caching, control...)
	}
	return nil
}

func modeSense(r *request) result {
	cdb := r.cdb
	pages := r.u.pages(cdb[2] & 0x3f)
	if pages == nil || cdb[3] != 0 && cdb[3] != 0xff {
		return invalidField()
	}
	switch cdb[2] >> 6 {
	case 1: // what can be changed
		for at := 0; at < len(pages); at += 2 + int(pages[at+1]) {
			code := pages[at]
			clear(pages[at+2 : at+2+int(pages[at+1])])
			if code == 0x0a {
				pages[at+4] = 0x08
			}
		}
	case 3:
		return check(KeyIllegalRequest, 0x39, 0x00) // SAVING PARAMETERS NOT SUPPORTED
	}
	device := byte(0x10) // DPOFUA
	if r.u.ReadOnly || r.u.softProtect() {
		device |= 0x80
	}
	if cdb[0] == 0x1a {
		b := append([]byte{0, 0, device, 0}, pages...)
		b[0] = byte(len(b) - 1)
		return data(b, int(cdb[4]))
	}
	b := append([]byte{0, 0, 0, device, 0, 0, 0, 0}, pages...)
	binary.BigEndian.PutUint16(b, uint16(len(b)-2))
	return data(b, int(binary.BigEndian.Uint16(cdb[7:])))
}

func modeSelect(r *request) result {
	if r.cdb[1]&0x11 != 0x10 { // PF, and no saved pages
		return invalidField()
	}
	header, n := 4, int(r.cdb[4])
	if r.cdb[0] == 0x55 {
		header, n = 8, int(binary.BigEndian.Uint16(r.cdb[7:]))
	}
	b := r.out[:min(n, len(r.out))]
	if len(b) == 0 {
		return result{}
	}
	if len(b) < header {
		return check(KeyIllegalRequest, 0x1a, 0x00) // PARAMETER LIST LENGTH ERROR
	}
	descriptors := int(b[header-1])
	if header == 8 {
		descriptors = int(binary.BigEndian.Uint16(b[6:]))
	}
	if descriptors != 0 {
		return invalidParameter()
	}
	swp := r.u.softProtect()
	for b = b[header:]; len(b) > 0; {
		if len(b) < 2 || len(b) < 2+int(b[1]) {
			return check(KeyIllegalRequest, 0x1a, 0x00)
		}
		page := b[:2+int(b[1])]
		now := r.u.pages(page[0] & 0x3f)
		if now == nil || page[0]&0x3f == 0x3f || len(now) != len(page) {
			return invalidParameter()
		}
		for i := 2; i < len(page); i++ {
			change := page[i] ^ now[i]
			if page[0]&0x3f == 0x0a && i == 4 {
				swp = page[4]&0x08 != 0
				change &^= 0x08
			}
			if change != 0 {
				return invalidParameter()
			}
		}
		b = b[len(page):]
	}
	if swp != r.u.softProtect() {
		r.u.mu.Lock()
		r.u.swp = swp
		r.u.mu.Unlock()
		r.u.attention(nexus{}, r.nexus, 0x2a, 0x01) // MODE PARAMETERS CHANGED
	}
	return result{}
}

func (u *Unit) softProtect() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.swp
}

func startStop(r *request) result {
	if condition := r.cdb[4] >> 4; condition != 0 {
		return invalidField() // no power conditions
	}
	if r.cdb[4]&0x02 != 0 {
		return invalidField() // LOEJ: the medium cannot be ejected
	}
	r.u.mu.Lock()
	r.u.stopped = r.cdb[4]&1 == 0
	r.u.mu.Unlock()
	return result{}
}

func sendDiagnostic(r *request) result {
	if r.cdb[1]&0x04 == 0 || r.cdb[1]&0xf3 != 0 {
		return invalidField() // only the default self-test
	}
	return result{}
}

func hasGroups(u *Unit) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.groups != nil
}

// reportTargetPortGroups has one port for each group, with the group's number (SPC-4).
func reportTargetPortGroups(r *request) result {
	header := 4
	if r.cdb[1]>>5 == 1 {
		header = 8
	}
	b := make([]byte, header)
	r.u.mu.Lock()
	var groups []uint16
	for g := range r.u.groups {
		groups = append(groups, g)
	}
	slices.Sort(groups)
	for _, g := range groups {
		d := make([]byte, 12)
		d[0] = r.u.groups[g]
		d[1] = 0x8f | 0x40 // every state but logical block dependent
		binary.BigEndian.PutUint16(d[2:], g)
		d[5], d[7] = 0x02, 1 // changed by the target; one port
		binary.BigEndian.PutUint16(d[10:], g)
		b = append(b, d...)
	}
	r.u.mu.Unlock()
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	if header == 8 {
		b[4] = 0x10
	}
	return data(b, int(binary.BigEndian.Uint32(r.cdb[6:])))
}

// cdbLength is the length of a CDB by its operation code (SPC-4).
func cdbLength(op byte) int { return [8]int{6, 10, 10, 0, 16, 12, 0, 0}[op>>5] }

// usageData is the CDB usage data of a command (SPC-4).
func usageData(code int, c *command) []byte {
	op := byte(code)
	if code > 0xff {
		op = byte(code >> 8)
	}
	b := []byte{op}
	for _, part := range strings.Fields(c.usage) {
		p, err := hex.DecodeString(part)
		if err != nil {
			panic(c.name + ": " + err.Error())
		}
		b = append(b, p...)
	}
	if code > 0xff {
		b[1] |= byte(code)
	}
	return b
}

// reportOpcodes answers REPORT SUPPORTED OPERATION CODES (SPC-4).
func reportOpcodes(r *request) result {
	allocation := int(binary.BigEndian.Uint32(r.cdb[6:]))
	timeouts, option := r.cdb[2]&0x80 != 0, r.cdb[2]&7
	has := func(c *command) bool { return c != nil && (c.offered == nil || c.offered(r.u)) }
	descriptor := make([]byte, 12) // no time-outs to tell
	descriptor[1] = 10
	if option == 0 {
		var codes []int
		for code, c := range commands {
			if has(c) {
				codes = append(codes, code)
			}
		}
		slices.Sort(codes)
		b := make([]byte, 4)
		for _, code := range codes {
			d := make([]byte, 8)
			d[0] = byte(code)
			if code > 0xff {
				d[0], d[3], d[5] = byte(code>>8), byte(code), 0x01
			}
			d[7] = byte(cdbLength(d[0]))
			if timeouts {
				d[5] |= 0x02
				d = append(d, descriptor...)
			}
			b = append(b, d...)
		}
		binary.BigEndian.PutUint32(b, uint32(len(b)-4))
		return data(b, allocation)
	}
	op, action := r.cdb[3], int(binary.BigEndian.Uint16(r.cdb[4:]))
	code := int(op)
	switch {
	case option == 1 && actions[op], option == 2 && !actions[op], option > 3:
		return invalidField()
	case actions[op]:
		code = int(op)<<8 | action
	}
	b := []byte{0, 0x01, 0, 0}
	if c := commands[code]; has(c) {
		b[1] = 0x03
		usage := usageData(code, c)
		b[3] = byte(len(usage))
		b = append(b, usage...)
		if timeouts {
			b[1] |= 0x80
			b = append(b, descriptor...)
		}
	}
	return data(b, allocation)
}
