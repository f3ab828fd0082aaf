package pdu

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// DefaultPort is the port of iSCSI and of iSER.
const DefaultPort = 3260

// Address is the address of a target portal, as in TargetAddress.
type Address struct {
	Host   string // IPv4 or IPv6 address (no brackets, zone allowed) or DNS name, lower case
	Port   uint16 // 3260 where the text had none
	TPGT   uint16 // target portal group tag
	HasTag bool   // TPGT was in the text; a login redirection has none
}

// ParseAddress reads "host[:port][,tag]", where host is an IPv4 address, an IPv6 address in brackets, or a DNS name.
//
// The text may come from a target: only characters of host names and addresses pass, and the port is not 0.
//
// Source: RFC 7143 section 13, key TargetAddress.
func ParseAddress(s string) (Address, error) {
	a := Address{Port: DefaultPort}
	fail := func(why string) (Address, error) { return Address{}, fmt.Errorf("address %q: %s", clip(s), why) }
	host, tag, found := strings.Cut(s, ",")
	if found {
		n, ok := parseDecimal(tag)
		if !ok {
			return fail("portal group tag is not a number from 0 to 65535")
		}
		a.TPGT, a.HasTag = n, true
	}
	port := ""
	if strings.HasPrefix(host, "[") {
		var ok bool
		if host, port, ok = strings.Cut(host[1:], "]"); !ok {
			return fail("no closing bracket")
		}
		ip, err := netip.ParseAddr(host)
		if err != nil || !ip.Is6() || strings.ContainsFunc(ip.Zone(), notHostRune) {
			return fail("no IPv6 address in the brackets")
		}
		a.Host = ip.String()
		if port != "" && port[0] != ':' {
			return fail("text after the bracket")
		}
	} else {
		if i := strings.IndexByte(host, ':'); i >= 0 {
			host, port = host[:i], host[i:]
		}
		if !validHost(host) {
			return fail("want an IPv4 address, an IPv6 address in brackets or a host name")
		}
		a.Host = asciiLower(host)
	}
	if port != "" {
		n, ok := parseDecimal(port[1:])
		if !ok || n == 0 {
			return fail("port is not a number from 1 to 65535")
		}
		a.Port = n
	}
	return a, nil
}

// HostPort is the address for a dialler: "10.0.0.1:3260", "[fe80::1%eth0]:3260".
func (a Address) HostPort() string { return net.JoinHostPort(a.Host, strconv.Itoa(int(a.Port))) }

// String is the form of the wire, with the tag where there is one.
func (a Address) String() string {
	if a.HasTag {
		return a.HostPort() + "," + strconv.Itoa(int(a.TPGT))
	}
	return a.HostPort()
}

// validHost accepts IPv4 addresses and DNS names. A name of digits and dots only has to be an IPv4 address.
func validHost(s string) bool {
	if len(s) == 0 || len(s) > 253 {
		return false
	}
	digits := true
	for label := range strings.SplitSeq(strings.TrimSuffix(s, "."), ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' || strings.ContainsFunc(label, notHostRune) {
			return false
		}
		digits = digits && strings.Trim(label, "0123456789") == ""
	}
	if digits {
		ip, err := netip.ParseAddr(s)
		return err == nil && ip.Is4()
	}
	return true
}

func notHostRune(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
}

// parseDecimal reads 1 to 5 digits, without sign.
func parseDecimal(s string) (uint16, bool) {
	if len(s) == 0 || len(s) > 5 || s[0] == '+' {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil
}
