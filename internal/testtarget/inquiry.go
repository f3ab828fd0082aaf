package testtarget

import (
	"encoding/binary"
	"fmt"
)

func inquiry(r *request) result {
	n := int(binary.BigEndian.Uint16(r.cdb[3:]))
	if r.cdb[1]&1 == 0 {
		if r.cdb[2] != 0 {
			return invalidField()
		}
		return data(standardInquiry(r.u), n)
	}
	b := r.page(r.cdb[2])
	if b == nil {
		return invalidField()
	}
	return data(b, n)
}

func standardInquiry(u *Unit) []byte {
	b := make([]byte, 74)
	b[0] = u.Type
	b[2], b[3], b[4], b[7] = 0x06, 0x02, byte(len(b)-5), 0x02  // SPC-4, response format 2, CmdQue
	for i, version := range []uint16{0x0960, 0x0460, 0x04c0} { // iSCSI, SPC-4, SBC-3
		binary.BigEndian.PutUint16(b[58+2*i:], version)
	}
	if hasGroups(u) {
		b[5] = 0x10 // TPGS: states change by the target only
	}
	copy(b[8:], "ISERD   ")
	copy(b[16:], "TEST TARGET     ")
	copy(b[32:], "1   ")
	return b
}

// page returns a vital product data page, nil for one that there is not.
func (r *request) page(code byte) []byte {
	u := r.u
	u.mu.Lock()
	serial := u.Serial
	u.mu.Unlock()
	var body []byte
	switch code {
	case 0x00:
		body = []byte{0x00, 0x80, 0x83, 0x86, 0xb0, 0xb1}
		if u.Thin {
			body = append(body, 0xb2)
		}
		if u.Type != 0 {
			body = body[:4]
		}
	case 0x80:
		body = []byte(serial)
	case 0x83:
		body = r.designators(serial)
	case 0x86: // extended INQUIRY data: SIMPSUP
		body = make([]byte, 60)
		body[1] = 0x01
	case 0xb0: // block limits (SBC-3)
		body = make([]byte, 60)
		largest := uint32(transferMax / u.BlockSize)
		body[1] = compareMax                                            // COMPARE AND WRITE: blocks at most
		binary.BigEndian.PutUint16(body[2:], 1<<(u.PhysicalBlocks&15))  // optimal transfer length granularity
		binary.BigEndian.PutUint32(body[4:], largest)                   // maximum transfer length
		binary.BigEndian.PutUint32(body[8:], uint32(65536/u.BlockSize)) // optimal transfer length
		if hasUnmap(u) {
			binary.BigEndian.PutUint32(body[16:], unmapMax) // maximum UNMAP LBA count
			binary.BigEndian.PutUint32(body[20:], unmapDescriptors)
			binary.BigEndian.PutUint32(body[24:], uint32(1<<(u.PhysicalBlocks&15)))
		}
		if hasWriteSame(u) {
			binary.BigEndian.PutUint64(body[32:], writeSameMax)
		}
	case 0xb1:
		body = make([]byte, 60)
		body[1] = 1 // non-rotating
	case 0xb2:
		if !u.Thin {
			return nil
		}
		body = make([]byte, 4)
		body[1] = 0x04 // LBPRZ
		if hasUnmap(u) {
			body[1] |= 0x80 // LBPU
		}
		if hasWriteSame(u) {
			body[1] |= 0x60 // LBPWS, LBPWS10
		}
		body[2] = 0x02 // thin provisioned
	default:
		return nil
	}
	if u.Type != 0 && code >= 0xb0 {
		return nil
	}
	return append([]byte{u.Type, code, byte(len(body) >> 8), byte(len(body))}, body...)
}

// designators name the unit by T10 vendor ID and NAA, both made of the serial number, and the port by its number, group and iSCSI name
// (SPC-4).
func (r *request) designators(serial string) []byte {
	t10 := append([]byte("ISERD   "), serial...)
	b := append([]byte{0x02, 0x01, 0, byte(len(t10))}, t10...)
	naa := make([]byte, 16) // NAA 6, by FNV-1a
	h := uint64(14695981039346656037)
	for _, ch := range []byte(serial) {
		h = (h ^ uint64(ch)) * 1099511628211
	}
	naa[0] = 0x60
	binary.BigEndian.PutUint64(naa[8:], h)
	b = append(append(b, 0x01, 0x03, 0, 16), naa...)
	group := r.nexus.port
	b = append(b, 0x51, 0x94, 0, 4, 0, 0, byte(group>>8), byte(group)) // relative target port
	b = append(b, 0x51, 0x95, 0, 4, 0, 0, byte(group>>8), byte(group)) // target port group
	name := fmt.Sprintf("%s,t,0x%04x", r.t.config.Name, group)
	name += "\x00\x00\x00\x00"[:4-len(name)%4] // at least one zero byte
	return append(append(b, 0x53, 0x98, 0, byte(len(name))), name...)
}
