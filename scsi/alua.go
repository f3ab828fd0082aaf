package scsi

import (
	"encoding/binary"
	"fmt"
)

// AccessState is the asymmetric access state (ALUA) of a target port group.
type AccessState uint8

// Access states (SPC-4).
const (
	ActiveOptimized    AccessState = 0x0
	ActiveNonOptimized AccessState = 0x1
	Standby            AccessState = 0x2
	Unavailable        AccessState = 0x3
	LBADependent       AccessState = 0x4
	Offline            AccessState = 0xe
	Transitioning      AccessState = 0xf
)

var accessStateNames = map[AccessState]string{
	ActiveOptimized: "active/optimized", ActiveNonOptimized: "active/non-optimized", Standby: "standby", Unavailable: "unavailable",
	LBADependent: "logical block dependent", Offline: "offline", Transitioning: "transitioning",
}

// String is the name that SPC uses.
func (s AccessState) String() string {
	if n, ok := accessStateNames[s]; ok {
		return n
	}
	return fmt.Sprintf("access state %#x", uint8(s))
}

// TargetPortGroup is one group of the answer to REPORT TARGET PORT GROUPS.
type TargetPortGroup struct {
	ID        uint16
	State     AccessState
	Preferred bool
	Ports     []uint16 // relative target port identifiers
}

// ParseTargetPortGroups reads the answer to REPORT TARGET PORT GROUPS with the short header. A group that runs past the end of what arrived
// ends the list.
//
//	group  0  1  0x80 preferred, 0x0f state      7  1  number of ports
//	       2  2  group                           8  4  per port; the relative identifier is in its last two bytes
//
// Source: SPC-4, REPORT TARGET PORT GROUPS parameter data.
func ParseTargetPortGroups(b []byte) ([]TargetPortGroup, error) {
	if len(b) < 4 {
		return nil, shortError("REPORT TARGET PORT GROUPS data", len(b), 4)
	}
	n := binary.BigEndian.Uint32(b)
	p := b[4:]
	if uint64(n) < uint64(len(p)) {
		p = p[:n]
	}
	var groups []TargetPortGroup
	for len(p) >= 8 && len(p) >= 8+4*int(p[7]) {
		g := TargetPortGroup{ID: binary.BigEndian.Uint16(p[2:]), State: AccessState(p[0] & 0x0f), Preferred: p[0]&0x80 != 0}
		end := 8 + 4*int(p[7])
		for off := 8; off < end; off += 4 {
			g.Ports = append(g.Ports, binary.BigEndian.Uint16(p[off+2:]))
		}
		groups = append(groups, g)
		p = p[end:]
	}
	return groups, nil
}
