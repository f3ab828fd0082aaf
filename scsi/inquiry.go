package scsi

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// DeviceType is the peripheral device type of INQUIRY data.
type DeviceType uint8

// Peripheral device types that an operator meets (SPC-4).
const (
	TypeDisk       DeviceType = 0x00
	TypeTape       DeviceType = 0x01
	TypeProcessor  DeviceType = 0x03
	TypeWriteOnce  DeviceType = 0x04
	TypeCDDVD      DeviceType = 0x05
	TypeOptical    DeviceType = 0x07
	TypeChanger    DeviceType = 0x08
	TypeController DeviceType = 0x0c
	TypeEnclosure  DeviceType = 0x0d
	TypeReduced    DeviceType = 0x0e
	TypeZoned      DeviceType = 0x14
	TypeWellKnown  DeviceType = 0x1e
	TypeNone       DeviceType = 0x1f
)

var deviceTypeNames = map[DeviceType]string{
	TypeDisk: "disk", TypeTape: "tape", TypeProcessor: "processor", TypeWriteOnce: "write-once", TypeCDDVD: "cd/dvd",
	TypeOptical: "optical memory", TypeChanger: "medium changer", TypeController: "storage array controller",
	TypeEnclosure: "enclosure services", TypeReduced: "simplified disk", TypeZoned: "zoned disk", TypeWellKnown: "well known unit",
	TypeNone: "no device",
}

// String is a short name.
func (t DeviceType) String() string {
	if n, ok := deviceTypeNames[t]; ok {
		return n
	}
	return fmt.Sprintf("device type %#02x", uint8(t))
}

// Inquiry is the part of the standard INQUIRY data that this initiator uses. Text is printable ASCII without the padding.
type Inquiry struct {
	Connected bool       // peripheral qualifier 0: a unit is there
	Type      DeviceType // 1Fh with another qualifier: no unit under this number
	Removable bool
	Version   uint8 // of SPC, as coded there: 5 SPC-3, 6 SPC-4, 7 SPC-5
	Protect   bool  // formats with protection information are supported
	TPGS      uint8 // ALUA: 0 none, 1 implicit, 2 explicit, 3 both
	CmdQue    bool  // command queuing
	Vendor    string
	Product   string
	Revision  string
}

// ParseInquiry reads standard INQUIRY data. Targets send 36 bytes or more; with 5 to 35 the fields that are missing stay empty.
//
// Source: SPC-4, standard INQUIRY data.
func ParseInquiry(b []byte) (Inquiry, error) {
	if len(b) < 5 {
		return Inquiry{}, shortError("INQUIRY data", len(b), 5)
	}
	b = b[:min(len(b), 5+int(b[4]))]
	q := Inquiry{
		Connected: b[0]>>5 == 0,
		Type:      DeviceType(b[0] & 0x1f),
		Removable: b[1]&0x80 != 0,
		Version:   b[2],
	}
	if len(b) > 7 {
		q.TPGS = b[5] >> 4 & 3
		q.Protect = b[5]&1 != 0
		q.CmdQue = b[7]&2 != 0
	}
	q.Vendor = text(b, 8, 16)
	q.Product = text(b, 16, 32)
	q.Revision = text(b, 32, 36)
	return q, nil
}

// text is b[from:to] as far as it is there, printable ASCII only, trimmed. Other bytes become "?": they are a target's to choose and go
// to logs and terminals.
func text(b []byte, from, to int) string {
	if from >= len(b) {
		return ""
	}
	c := []byte(string(b[from:min(to, len(b))]))
	for i := range c {
		if c[i] == 0 {
			c[i] = ' '
		} else if c[i] < 0x20 || c[i] > 0x7e {
			c[i] = '?'
		}
	}
	return strings.TrimSpace(string(c))
}

// VPD pages.
const (
	PageSupported       uint8 = 0x00
	PageSerialNumber    uint8 = 0x80
	PageIdentification  uint8 = 0x83
	PageBlockLimits     uint8 = 0xb0
	PageCharacteristics uint8 = 0xb1
	PageProvisioning    uint8 = 0xb2
)

// vpdPayload checks the header of a VPD page and gives the bytes after it, as many as there are. A target that does not know EVPD answers
// with standard data, which shows as another page code.
//
//	off len
//	  0   1  peripheral qualifier and type
//	  1   1  page code
//	  2   2  page length, bytes after this field
func vpdPayload(b []byte, page uint8) ([]byte, error) {
	if len(b) < 4 {
		return nil, shortError(fmt.Sprintf("VPD page %02x", page), len(b), 4)
	}
	if b[1] != page {
		return nil, fmt.Errorf("scsi: VPD page %02x was asked for, page %02x came", page, b[1])
	}
	return b[4:min(len(b), 4+int(binary.BigEndian.Uint16(b[2:])))], nil
}

// ParseSupportedPages reads VPD page 00: the pages that the unit has, in ascending order as the unit lists them.
func ParseSupportedPages(b []byte) ([]uint8, error) {
	p, err := vpdPayload(b, PageSupported)
	if err != nil {
		return nil, err
	}
	return append([]uint8{}, p[:min(len(p), 255)]...), nil
}

// ParseSerialNumber reads VPD page 80, as printable ASCII without padding.
func ParseSerialNumber(b []byte) (string, error) {
	p, err := vpdPayload(b, PageSerialNumber)
	if err != nil {
		return "", err
	}
	return text(p, 0, len(p)), nil
}
