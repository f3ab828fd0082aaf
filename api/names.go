package api

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// DefaultPort is the iSCSI port that IANA assigned.
const DefaultPort = 3260

// MaxNameLen is the longest iSCSI name, in bytes (RFC 7143 section 4.2.7.2).
const MaxNameLen = 223

// CheckName tells whether name is an iSCSI name of one of the three types of RFC 7143 section 4.2.7: iqn. (date, reversed domain,
// optional colon and text), eui. (16 hexadecimal digits) or naa. (16 or 32). The error is ErrInvalidArgs.
//
// Names are used in text keys, file contents and bus properties; what passes has no character outside a-z, 0-9, '-', '.' and ':' (an
// upper case letter is accepted in eui and naa digits) and, beyond ASCII, nothing: the few targets with other letters are refused,
// because RFC 3722 preparation is not done here.
func CheckName(name string) error {
	bad := func(why string) error {
		return Errorf(ErrInvalidArgs, "%s is not an iSCSI name: %s", quote(name), why)
	}
	if name == "" {
		return bad("it is empty")
	}
	if len(name) > MaxNameLen {
		return bad("it is longer than 223 bytes")
	}
	switch {
	case strings.HasPrefix(name, "iqn."):
		return checkIQN(name, bad)
	case strings.HasPrefix(name, "eui."):
		if n := len(name) - 4; n != 16 || !isHex(name[4:]) {
			return bad("eui. wants 16 hexadecimal digits")
		}
	case strings.HasPrefix(name, "naa."):
		if n := len(name) - 4; n != 16 && n != 32 || !isHex(name[4:]) {
			return bad("naa. wants 16 or 32 hexadecimal digits")
		}
	default:
		return bad("it must start with iqn., eui. or naa.")
	}
	return nil
}

func checkIQN(name string, bad func(string) error) error {
	for _, r := range name {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '.', r == ':', r == '_':
			// '_' is outside RFC 3722, but targets in the field use it.
		case r >= 'A' && r <= 'Z':
			return bad("iqn names are lower case (RFC 3722)")
		default:
			return bad("only a-z, 0-9, '-', '.' and ':' are allowed")
		}
	}
	rest := name[4:]
	if len(rest) < 8 || !digits(rest[:4]) || rest[4] != '-' || !digits(rest[5:7]) || rest[7] != '.' {
		return bad("iqn. wants a date and a domain, as in iqn.2003-01.org.example:disk1")
	}
	if m := rest[5:7]; m < "01" || m > "12" {
		return bad("the month " + m + " does not exist")
	}
	domain, _, _ := strings.Cut(rest[8:], ":")
	if domain == "" || strings.HasPrefix(domain, ".") || strings.HasSuffix(domain, ".") || strings.Contains(domain, "..") {
		return bad("the domain after the date is missing or has an empty part")
	}
	return nil
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

func isHex(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
			return false
		}
	}
	return s != ""
}

// quote makes a name from outside printable and short.
func quote(s string) string {
	if len(s) > 80 {
		s = s[:80] + "…"
	}
	return strconv.Quote(s)
}

// Portal is an address and a TCP or RDMA port at which a target listens. The zero value is no portal.
type Portal struct {
	Address string // an IP address (IPv6 without brackets, with a zone where it needs one) or a host name
	Port    uint16
}

// ParsePortal reads ADDR, ADDR:PORT, [V6] or [V6]:PORT, where ADDR is an IP address or a host name; a bare IPv6 address is an address without a
// port. The port is DefaultPort if absent. The error is ErrInvalidArgs; nothing is looked up.
func ParsePortal(s string) (Portal, error) {
	bad := func(why string) (Portal, error) {
		return Portal{}, Errorf(ErrInvalidArgs, "%s is not an address: %s", quote(s), why)
	}
	if s == "" {
		return bad("it is empty")
	}
	host, port := s, uint16(DefaultPort)
	bracketed := strings.HasPrefix(s, "[")
	if _, err := netip.ParseAddr(s); err != nil { // not a bare address
		h, p, err := net.SplitHostPort(s)
		switch {
		case err == nil:
			n, err := strconv.ParseUint(p, 10, 16)
			if err != nil || n == 0 || !digits(p) {
				return bad("the port is not a number from 1 to 65535")
			}
			host, port = h, uint16(n)
		case bracketed && strings.HasSuffix(s, "]"):
			host = s[1 : len(s)-1]
		case strings.ContainsAny(s, ":[]"):
			return bad("expected ADDR, ADDR:PORT or [ADDR]:PORT")
		}
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if bracketed && !a.Is6() {
			return bad("brackets are for IPv6 addresses")
		}
		if a.Is4In6() {
			a = a.Unmap()
		}
		if a.IsUnspecified() || a.IsMulticast() {
			return bad("a portal has a unicast address")
		}
		if z := a.Zone(); z != "" && checkZone(z) != "" {
			return bad(checkZone(z))
		}
		return Portal{Address: a.String(), Port: port}, nil
	}
	if bracketed {
		return bad("brackets are for IPv6 addresses")
	}
	if err := checkHost(host); err != "" {
		return bad(err)
	}
	return Portal{Address: strings.ToLower(host), Port: port}, nil
}

// checkZone allows what Linux allows in the name of a network interface, less the odd characters. It returns what is wrong, or "".
func checkZone(z string) string {
	for i := range len(z) {
		c := z[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') || len(z) > 15 {
			return "the zone after % is not the name of a network interface"
		}
	}
	return ""
}

// checkHost applies the letter-digit-hyphen rule. It returns what is wrong, or "".
func checkHost(h string) string {
	h = strings.TrimSuffix(h, ".")
	if h == "" || len(h) > 253 {
		return "expected an IP address or a host name"
	}
	labels := strings.Split(h, ".")
	allDigits := true
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return "expected an IP address or a host name"
		}
		for i := range len(l) {
			c := l[i]
			if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
				return "expected an IP address or a host name"
			}
		}
		allDigits = allDigits && digits(l)
	}
	if allDigits {
		return "it looks like an IPv4 address but is none"
	}
	return ""
}

// String formats p as ADDR:PORT, with brackets around IPv6.
func (p Portal) String() string { return net.JoinHostPort(p.Address, strconv.Itoa(int(p.Port))) }

// Transports that a caller may ask for.
const (
	TransportAuto = "auto"
	TransportISER = "iser"
	TransportTCP  = "tcp"
)

// CheckTransport accepts auto, iser and tcp, and "" for auto. The error is ErrInvalidArgs.
func CheckTransport(t string) (string, error) {
	switch t {
	case "":
		return TransportAuto, nil
	case TransportAuto, TransportISER, TransportTCP:
		return t, nil
	}
	return "", Errorf(ErrInvalidArgs, "%s is not a transport: expected auto, iser or tcp", quote(t))
}
