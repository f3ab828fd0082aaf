package scsi

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
)

// Designator is one entry of VPD page 83.
type Designator struct {
	CodeSet     uint8 // 1 binary, 2 ASCII, 3 UTF-8
	Association uint8 // 0 logical unit, 1 target port, 2 target device
	Type        uint8 // 1 T10 vendor, 2 EUI-64, 3 NAA, 4 relative port, 5 port group, 8 SCSI name string
	ID          []byte
}

// Designator types and the association that names the unit itself (SPC-4).
const (
	designatorT10 uint8 = 1
	designatorEUI uint8 = 2
	designatorNAA uint8 = 3

	designatorPortGroup uint8 = 5

	associationUnit uint8 = 0
	associationPort uint8 = 1
)

// ParseDesignators reads VPD page 83. An entry that runs past the end of what arrived ends the list.
//
//	entry  0  1  protocol, code set        2  1  reserved
//	       1  1  PIV, association, type    3  1  length of the designator
//
// Source: SPC-4, Device Identification VPD page.
func ParseDesignators(b []byte) ([]Designator, error) {
	p, err := vpdPayload(b, PageIdentification)
	if err != nil {
		return nil, err
	}
	var list []Designator
	for len(p) >= 4 && len(p) >= 4+int(p[3]) {
		n := 4 + int(p[3])
		list = append(list, Designator{
			CodeSet:     p[0] & 0x0f,
			Association: p[1] >> 4 & 3,
			Type:        p[1] & 0x0f,
			ID:          append([]byte{}, p[4:n]...),
		})
		p = p[n:]
	}
	return list, nil
}

// PortGroup is the target port group of the port through which VPD page 83 was read; ok is false if it is not there.
func PortGroup(list []Designator) (id uint16, ok bool) {
	for _, d := range list {
		if d.Association == associationPort && d.Type == designatorPortGroup && len(d.ID) == 4 {
			return binary.BigEndian.Uint16(d.ID[2:]), true
		}
	}
	return 0, false
}

// Identity is the name under which a logical unit is known for life: "naa.6001405...", "eui.0025b5...", "t10.VENDOR_serial". It is empty
// when no designator of the unit qualifies; such a unit can not be told from another one, and must not be taken over after a reconnect.
//
// NAA goes before EUI, EUI before T10; within NAA the registered extended form (6) before 5, 3 and 2. Only lower-case hex digits, or in
// t10 the characters that [safeText] passes, so that it can be part of a path or a udev link.
func Identity(list []Designator) string {
	best, rank := "", 0
	for _, d := range list {
		if s, r := d.identity(); r > rank {
			best, rank = s, r
		}
	}
	return best
}

// identity is the text of one designator and its rank, 0 for a designator that does not name the unit.
func (d Designator) identity() (string, int) {
	if d.Association != associationUnit || len(d.ID) == 0 || allZero(d.ID) {
		return "", 0
	}
	switch d.Type {
	case designatorNAA:
		naa := d.ID[0] >> 4
		switch {
		case naa == 6 && len(d.ID) == 16:
			return "naa." + hex.EncodeToString(d.ID), 9
		case naa == 5 && len(d.ID) == 8:
			return "naa." + hex.EncodeToString(d.ID), 8
		case naa == 3 && len(d.ID) == 8:
			return "naa." + hex.EncodeToString(d.ID), 7
		case naa == 2 && len(d.ID) == 8:
			return "naa." + hex.EncodeToString(d.ID), 6
		}
	case designatorEUI:
		switch len(d.ID) {
		case 16:
			return "eui." + hex.EncodeToString(d.ID), 5
		case 12:
			return "eui." + hex.EncodeToString(d.ID), 4
		case 8:
			return "eui." + hex.EncodeToString(d.ID), 3
		}
	case designatorT10:
		// 8 bytes of vendor and no more name a vendor, not a unit.
		if len(d.ID) > 8 && strings.Trim(string(d.ID[8:]), " \x00") != "" {
			return "t10." + safeText(d.ID), 1
		}
	}
	return "", 0
}

// safeText makes a text of letters, digits and "-.:=@_" from any bytes. A run of blanks (padding) becomes one "_"; every other byte
// becomes "+" and two hex digits, so that different designators do not become the same text.
func safeText(b []byte) string {
	var s strings.Builder
	blank := false
	for _, c := range []byte(strings.Trim(string(b), " \x00")) {
		if c == ' ' {
			blank = true
			continue
		}
		if blank {
			s.WriteByte('_')
			blank = false
		}
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("-.:=@_", c) >= 0:
			s.WriteByte(c)
		default:
			fmt.Fprintf(&s, "+%02x", c)
		}
	}
	return s.String()
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
