//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"unsafe"
)

// sockaddr returns addr as a struct sockaddr_in or sockaddr_in6.
func sockaddr(addr netip.AddrPort) (*C.struct_sockaddr_storage, error) {
	var ss C.struct_sockaddr_storage
	ip := addr.Addr().Unmap()
	switch {
	case ip.Is4():
		sa := (*C.struct_sockaddr_in)(unsafe.Pointer(&ss))
		sa.sin_family = C.AF_INET
		binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&sa.sin_port))[:], addr.Port())
		*(*[4]byte)(unsafe.Pointer(&sa.sin_addr)) = ip.As4()
	case ip.Is6():
		sa := (*C.struct_sockaddr_in6)(unsafe.Pointer(&ss))
		sa.sin6_family = C.AF_INET6
		binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&sa.sin6_port))[:], addr.Port())
		*(*[16]byte)(unsafe.Pointer(&sa.sin6_addr)) = ip.As16()
		scope, err := scopeID(ip)
		if err != nil {
			return nil, err
		}
		sa.sin6_scope_id = C.uint32_t(scope)
	default:
		return nil, fmt.Errorf("address %q is not an IP address", addr)
	}
	return &ss, nil
}

// scopeID returns the interface number of ip's zone, a name or a number.
func scopeID(ip netip.Addr) (uint32, error) {
	zone := ip.Zone()
	if zone == "" {
		if ip.IsLinkLocalUnicast() {
			return 0, fmt.Errorf("link-local address %s needs a zone: write %s%%INTERFACE", ip, ip)
		}
		return 0, nil
	}
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n), nil
	}
	ifc, err := net.InterfaceByName(zone)
	if err != nil {
		return 0, fmt.Errorf("zone of address %s: %w", ip, err)
	}
	return uint32(ifc.Index), nil
}

// addrPort reads a struct sockaddr. It is the zero AddrPort for other families.
func addrPort(sa *C.struct_sockaddr) netip.AddrPort {
	if sa == nil {
		return netip.AddrPort{}
	}
	switch sa.sa_family {
	case C.AF_INET:
		in := (*C.struct_sockaddr_in)(unsafe.Pointer(sa))
		port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&in.sin_port))[:])
		return netip.AddrPortFrom(netip.AddrFrom4(*(*[4]byte)(unsafe.Pointer(&in.sin_addr))), port)
	case C.AF_INET6:
		in := (*C.struct_sockaddr_in6)(unsafe.Pointer(sa))
		port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&in.sin6_port))[:])
		ip := netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&in.sin6_addr)))
		if n := uint32(in.sin6_scope_id); n != 0 && ip.IsLinkLocalUnicast() {
			zone := strconv.FormatUint(uint64(n), 10)
			if ifc, err := net.InterfaceByIndex(int(n)); err == nil {
				zone = ifc.Name
			}
			ip = ip.WithZone(zone)
		}
		return netip.AddrPortFrom(ip, port)
	}
	return netip.AddrPort{}
}

// asSockaddr is the general view of ss.
func asSockaddr(ss *C.struct_sockaddr_storage) *C.struct_sockaddr {
	return (*C.struct_sockaddr)(unsafe.Pointer(ss))
}
