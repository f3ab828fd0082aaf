// Package ibft reads the iSCSI Boot Firmware Table: how the firmware has set up its network interfaces, and to which targets it has logged in to
// boot. The kernel (module iscsi_ibft) shows the table as files under /sys/firmware/ibft:
//
//	initiator/    initiator-name, flags
//	ethernetN/    flags, mac, ip-addr, prefix-len or subnet-mask, gateway, primary-dns, secondary-dns, dhcp, vlan, hostname
//	targetN/      flags, target-name, ip-addr, port, lun, nic-assoc, chap-type, chap-name, chap-secret, rev-chap-name, rev-chap-name-secret
//
// A file whose field is empty in the table is not there. Only the daemon reads it: the kernel lets nobody read without CAP_SYS_ADMIN.
//
// Sources: Documentation/ABI/testing/sysfs-ibft, drivers/scsi/iscsi_boot_sysfs.c and drivers/firmware/iscsi_ibft.c of Linux; the table itself is
// "iSCSI Boot Firmware Table (iBFT)" version 1.03.
package ibft

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"iserd.org/iserd/api"
)

// Dir is where the kernel shows the table.
const Dir = "/sys/firmware/ibft"

// ErrNone tells that the firmware has left no table, or that the kernel's module for it is not loaded.
var ErrNone = errors.New("the firmware has left no iSCSI boot table (iBFT)")

// Table is what the firmware has left. What is not in the table is the zero value.
type Table struct {
	Initiator string // a name, or ""
	NICs      []NIC
	Targets   []Target
	Notes     []string // entries that were left out, and why
}

// NIC is a network interface.
type NIC struct {
	Index        int
	Boot         bool // the firmware has booted through it
	MAC          net.HardwareAddr
	Address      netip.Addr
	PrefixLength int
	Gateway      netip.Addr
	DNS          []netip.Addr
	DHCP         netip.Addr
	VLAN         int
	Hostname     string
}

// Target is a target that the firmware was told of.
type Target struct {
	Index        int
	Boot         bool
	Name         string // a valid iSCSI name
	Address      netip.Addr
	Port         uint16
	LUN          int // -1 when the kernel's text of it has more than one reading
	NIC          int // index of its interface
	User         string
	Secret       api.Secret
	TargetUser   string
	TargetSecret api.Secret
}

// Flags of an entry: bits of the table's own.
const (
	flagValid = 1 << 0
	flagBoot  = 1 << 1
)

// maxEntries bounds how many interfaces and targets are read; the table itself has two of each.
const maxEntries = 64

// Read reads the table from dir. Entries that are not marked valid are left out, and those that make no sense are noted.
//
// Errors: [ErrNone]; else what reading a file gave.
func Read(dir string) (*Table, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is not there; is the module iscsi_ibft loaded?", ErrNone, dir)
	}
	if err != nil {
		return nil, fmt.Errorf("read the boot table: %w", err)
	}
	t := &Table{}
	for i, e := range entries {
		if i >= maxEntries {
			break
		}
		d := folder{path: filepath.Join(dir, e.Name())}
		name := e.Name()
		switch {
		case name == "initiator":
			t.initiator(&d)
		case strings.HasPrefix(name, "ethernet"):
			t.nic(&d, strings.TrimPrefix(name, "ethernet"))
		case strings.HasPrefix(name, "target"):
			t.target(&d, strings.TrimPrefix(name, "target"))
		}
		if d.err != nil {
			return nil, fmt.Errorf("read the boot table: %w", d.err)
		}
	}
	slices.SortFunc(t.NICs, func(a, b NIC) int { return a.Index - b.Index })
	slices.SortFunc(t.Targets, func(a, b Target) int { return a.Index - b.Index })
	return t, nil
}

func (t *Table) note(format string, args ...any) {
	t.Notes = append(t.Notes, fmt.Sprintf(format, args...))
}

func (t *Table) initiator(d *folder) {
	if flags, _ := d.number("flags"); flags&flagValid == 0 {
		return
	}
	name := strings.ToLower(d.text("initiator-name"))
	if name == "" {
		return
	}
	if err := api.CheckName(name); err != nil {
		t.note("initiator left out: %v", err)
		return
	}
	t.Initiator = name
}

func (t *Table) nic(d *folder, number string) {
	index, err := strconv.Atoi(number)
	flags, _ := d.number("flags")
	if err != nil || flags&flagValid == 0 {
		return
	}
	n := NIC{Index: index, Boot: flags&flagBoot != 0, Hostname: d.text("hostname"), Address: d.address("ip-addr"), Gateway: d.address("gateway"), DHCP: d.address("dhcp")}
	if n.MAC, err = net.ParseMAC(d.text("mac")); err != nil {
		t.note("network interface %d left out: its MAC address cannot be read", index)
		return
	}
	n.VLAN, _ = d.number("vlan")
	n.PrefixLength, _ = d.number("prefix-len")
	if n.PrefixLength == 0 {
		n.PrefixLength = maskLength(d.address("subnet-mask"))
	}
	for _, name := range []string{"primary-dns", "secondary-dns"} {
		if a := d.address(name); a.IsValid() {
			n.DNS = append(n.DNS, a)
		}
	}
	t.NICs = append(t.NICs, n)
}

func (t *Table) target(d *folder, number string) {
	index, err := strconv.Atoi(number)
	flags, _ := d.number("flags")
	if err != nil || flags&flagValid == 0 {
		return
	}
	x := Target{Index: index, Boot: flags&flagBoot != 0, Name: strings.ToLower(d.text("target-name")), Address: d.address("ip-addr"), LUN: lun(d.text("lun"))}
	if err := api.CheckName(x.Name); err != nil {
		t.note("target %d left out: %v", index, err)
		return
	}
	port, ok := d.number("port")
	if !x.Address.IsValid() || !ok || port < 1 || port > 65535 {
		t.note("target %d left out: %s has no address and port", index, x.Name)
		return
	}
	x.Port = uint16(port)
	x.NIC, _ = d.number("nic-assoc")
	// 0 none, 1 CHAP, 2 mutual CHAP.
	if kind, _ := d.number("chap-type"); kind >= 1 {
		x.User, x.Secret = d.text("chap-name"), d.secret("chap-secret")
		if kind >= 2 {
			x.TargetUser, x.TargetSecret = d.text("rev-chap-name"), d.secret("rev-chap-name-secret")
		}
	}
	t.Targets = append(t.Targets, x)
}

// lun reads the kernel's text of the 8 bytes of a LUN: each in hexadecimal and without leading zeroes, so that only a text of eight digits has one
// reading. It returns the number of a simple LUN (peripheral addressing), else -1.
func lun(text string) int {
	if len(text) != 8 {
		return -1
	}
	var b [8]uint64
	for i := range b {
		v, err := strconv.ParseUint(text[i:i+1], 16, 8)
		if err != nil || i != 1 && v != 0 {
			return -1
		}
		b[i] = v
	}
	return int(b[1])
}

func maskLength(mask netip.Addr) int {
	if !mask.Is4() {
		return 0
	}
	b := mask.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	n := bits.LeadingZeros32(^v)
	if v<<n != 0 {
		return 0
	}
	return n
}

// folder reads the files of one entry. The first failure sticks.
type folder struct {
	path string
	err  error
}

// read returns a file's content without the newline, nil if it is not there.
func (d *folder) read(name string) []byte {
	f, err := os.Open(filepath.Join(d.path, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var b []byte
	if err == nil {
		b, err = io.ReadAll(io.LimitReader(f, 4096))
		_ = f.Close()
	}
	if err != nil && d.err == nil {
		d.err = err
	}
	return bytes.TrimSuffix(b, []byte("\n"))
}

// text is a file as text; what no terminal should see becomes '?'.
func (d *folder) text(name string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '�' {
			return '?'
		}
		return r
	}, strings.TrimRight(string(d.read(name)), "\x00"))
}

func (d *folder) secret(name string) api.Secret {
	b := d.read(name)
	if len(b) > api.MaxSecretLen {
		b = nil
	}
	return api.NewSecret(b)
}

func (d *folder) number(name string) (int, bool) {
	n, err := strconv.Atoi(strings.TrimSpace(string(d.read(name))))
	return n, err == nil && n >= 0
}

func (d *folder) address(name string) netip.Addr {
	a, err := netip.ParseAddr(strings.TrimSpace(string(d.read(name))))
	if err != nil || a.IsUnspecified() {
		return netip.Addr{}
	}
	return a.Unmap()
}
