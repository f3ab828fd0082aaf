package scsi

import (
	"encoding/binary"
	"fmt"
)

// LUN is an 8-byte logical unit number as a big endian value: the first byte on the wire is the most significant one.
//
// SAM-5 packs a number into it in one of several ways (the address method, top two bits of each level). Compare and send the whole value;
// [LUN.Number] is for people.
//
//	method 00  peripheral device   00bbbbbb nnnnnnnn     b bus (0 here), n number 0-255
//	method 01  flat space          01nnnnnn nnnnnnnn     n number 0-16383
//	method 10  logical unit        10tttttt bbbnnnnn     t target, b bus, n number 0-31
//	method 11  extended            11llmmmm ...          l length, m method: 01 well known, 02 extended flat (3 or 5 bytes)
type LUN uint64

// AddressMethod is how the first level of a LUN is packed.
type AddressMethod uint8

// Address methods (SAM-5).
const (
	MethodPeripheral  AddressMethod = 0
	MethodFlat        AddressMethod = 1
	MethodLogicalUnit AddressMethod = 2
	MethodExtended    AddressMethod = 3
)

// ReportLunsWellKnown is the well known logical unit that answers REPORT LUNS.
const ReportLunsWellKnown LUN = 0xc101 << 48

// NewLUN packs a number as targets do: peripheral device addressing up to 255, flat space above. Preconditions: number <= 16383.
func NewLUN(number uint16) LUN {
	if number > 255 {
		number = number&0x3fff | 0x4000
	}
	return LUN(number) << 48
}

// Method is the address method of the first level.
func (l LUN) Method() AddressMethod { return AddressMethod(l >> 62) }

// WellKnown tells whether this is a well known logical unit, such as the one for REPORT LUNS; none of them is a disk.
func (l LUN) WellKnown() bool { return l>>56 == 0xc1 }

// SingleLevel tells whether everything is in the first level: nothing is set behind the bytes that Number reads, and the bus and target
// fields are 0.
func (l LUN) SingleLevel() bool {
	switch l.Method() {
	case MethodPeripheral:
		return l<<16 == 0 && l>>56 == 0
	case MethodFlat:
		return l<<16 == 0
	case MethodLogicalUnit:
		return l<<16 == 0 && l>>56 == 0x80 && l>>48&0xe0 == 0
	}
	switch l >> 56 {
	case 0xc1:
		return l<<16 == 0
	case 0xd2:
		return l<<32 == 0
	case 0xe2:
		return l<<48 == 0
	}
	return false
}

// Number is the number as a person counts, taken from the first level: peripheral, flat, logical unit and extended flat addressing are
// unpacked. For any other form it is the whole value, which is larger than any number above.
func (l LUN) Number() uint64 {
	v := uint64(l)
	switch l.Method() {
	case MethodPeripheral:
		return v >> 48 & 0xff
	case MethodFlat:
		return v >> 48 & 0x3fff
	case MethodLogicalUnit:
		return v >> 48 & 0x1f
	}
	switch v >> 56 {
	case 0xd2: // length 1, method 2: 3 bytes
		return v >> 32 & 0xffffff
	case 0xe2: // length 2, method 2: 5 bytes
		return v >> 16 & 0xffffffffff
	}
	return v
}

// String is the number, or all 16 hex digits when the number alone would not tell the unit.
func (l LUN) String() string {
	if !l.SingleLevel() || l.WellKnown() {
		return fmt.Sprintf("%#016x", uint64(l))
	}
	return fmt.Sprint(l.Number())
}

// ParseReportLuns reads the answer to REPORT LUNS: the list, in its order, and the number of bytes that the whole answer has. needed above
// len(b) means that the list is cut off: ask again with that length. A length that is no multiple of 8 is an error.
//
// Source: SPC-4, REPORT LUNS parameter data.
func ParseReportLuns(b []byte) (luns []LUN, needed int, err error) {
	if len(b) < 8 {
		return nil, 0, shortError("REPORT LUNS data", len(b), 8)
	}
	n := binary.BigEndian.Uint32(b)
	if n%8 != 0 {
		return nil, 0, fmt.Errorf("scsi: REPORT LUNS list of %d bytes is no multiple of 8", n)
	}
	if n > maxLunListLength {
		return nil, 0, fmt.Errorf("scsi: REPORT LUNS list of %d bytes, at most %d are accepted", n, maxLunListLength)
	}
	needed = 8 + int(n)
	list := b[8:min(len(b), needed)]
	luns = make([]LUN, 0, len(list)/8)
	for ; len(list) >= 8; list = list[8:] {
		luns = append(luns, LUN(binary.BigEndian.Uint64(list)))
	}
	return luns, needed, nil
}

// maxLunListLength bounds what a target can make us ask for: 64 Ki units, four times what flat space addressing can name.
const maxLunListLength = 8 << 16

func shortError(what string, have, want int) error {
	return fmt.Errorf("scsi: %s of %d bytes, want at least %d", what, have, want)
}
