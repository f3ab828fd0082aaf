package targets

import (
	"crypto/sha1"
	"fmt"
	"net/netip"
	"os"
)

// Kind is what a logical unit is made of.
type Kind string

// The kinds of unit.
const (
	Ramdisk Kind = "ramdisk" // memory; contents are lost with the target
	FileIO  Kind = "fileio"  // a regular file
	IBlock  Kind = "iblock"  // a block device; LIO only
)

// Unit is one logical unit of a target.
type Unit struct {
	Kind      Kind
	Size      int64  // bytes, a multiple of 4096; for IBlock the device's own when 0
	Path      string // FileIO: the file, made when it does not exist. IBlock: the device
	BlockSize int    // logical block size, bytes; 512 when 0. A ramdisk or file can have 512 to 4096
	Serial    string // unit serial number (VPD 0x80 and 0x83); made from the target's name and the number when empty
	Product   string // product identification, at most 16 characters; the target's own when empty

	WriteCache bool              // LIO: report a volatile write cache and buffer writes to the file
	Attributes map[string]string // LIO: attributes of the back end, by the names in its folder attrib
}

// Portal is an address at which a target listens.
type Portal struct {
	Addr netip.AddrPort
	ISER bool // besides TCP also iSER
}

// ParsePortal makes a Portal of text such as "10.0.0.1:3260" or "[fd00::1]:3260"; it panics on others, being meant for constants.
func ParsePortal(s string, iser bool) Portal {
	return Portal{Addr: netip.MustParseAddrPort(s), ISER: iser}
}

// serial returns the unit's serial number: 32 hexadecimal digits that are the same whenever the same target is made.
func (u Unit) serial(target string, lun int) string {
	if u.Serial != "" {
		return u.Serial
	}
	sum := sha1.Sum(fmt.Appendf(nil, "%s/%d", target, lun))
	return fmt.Sprintf("%x", sum[:16])
}

// ensureFile makes path a file of at least size bytes, sparse.
func ensureFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Mode().IsRegular() && st.Size() < size {
		return f.Truncate(size)
	}
	return nil
}
