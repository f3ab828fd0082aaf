// Package settings turns what the user has set into what the layers below want: the way that connections take out of this host, and how a login
// proves who we are. The data plane and discovery use it for both transports.
package settings

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/rdma"
)

// Binding is the way out that the user has chosen: from an address, through a network interface, through an RDMA device. The zero value leaves it to
// the routes.
type Binding struct {
	source  netip.Addr
	network string // interface
	device  string // RDMA device
}

// BindingOf reads the settings, which have been checked.
func BindingOf(s *api.Settings) Binding {
	b := Binding{network: s.NetworkInterface, device: s.RDMADevice}
	b.source, _ = netip.ParseAddr(s.SourceAddress)
	return b
}

// Dialer connects over TCP by this way. An interface is bound with SO_BINDTODEVICE, so packets use no other, whatever the routes say.
func (b Binding) Dialer() *net.Dialer {
	d := new(net.Dialer)
	if b.source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(b.source, 0))
	}
	if b.network != "" {
		d.Control = func(_, _ string, c syscall.RawConn) error {
			var bindErr error
			err := c.Control(func(fd uintptr) { bindErr = unix.BindToDevice(int(fd), b.network) })
			if err == nil {
				err = bindErr
			}
			if err != nil {
				return fmt.Errorf("bind to network interface %s: %w", b.network, err)
			}
			return nil
		}
	}
	return d
}

// Source is the address from which an RDMA connection to target has to come, so that it goes this way; the zero Addr if any will do.
//
// Errors: [rdma.ErrNoDevice] when the interface or the device has no address of the target's family.
func (b Binding) Source(target netip.Addr) (netip.Addr, error) {
	switch {
	case b.source.IsValid():
		return b.source, nil
	case b.network != "":
		return addressOf(b.network, target)
	case b.device == "":
		return netip.Addr{}, nil
	}
	devices, err := rdma.Devices()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, d := range devices {
		if d.Name != b.device {
			continue
		}
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				if g.Netdev == "" {
					continue
				}
				if a, err := addressOf(g.Netdev, target); err == nil {
					return a, nil
				}
			}
		}
		return netip.Addr{}, fmt.Errorf("%w: RDMA device %s has no address to reach %s from", rdma.ErrNoDevice, b.device, target)
	}
	return netip.Addr{}, fmt.Errorf("%w: there is no RDMA device %s; see \"rdma link\"", rdma.ErrNoDevice, b.device)
}

// Check tells whether a connection that has found its device may use it.
func (b Binding) Check(device string) error {
	if b.device != "" && device != b.device {
		return fmt.Errorf("%w: the way to the portal goes through RDMA device %s, and rdma_device is %s", rdma.ErrNoDevice, device, b.device)
	}
	return nil
}

// addressOf finds an address of a network interface in the target's family and scope.
func addressOf(network string, target netip.Addr) (netip.Addr, error) {
	ifc, err := net.InterfaceByName(network)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: network interface %s: %w", rdma.ErrNoDevice, network, err)
	}
	list, err := ifc.Addrs()
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: network interface %s: %w", rdma.ErrNoDevice, network, err)
	}
	target = target.Unmap()
	for _, x := range list {
		ip, ok := x.(*net.IPNet)
		if !ok {
			continue
		}
		a, _ := netip.AddrFromSlice(ip.IP)
		a = a.Unmap()
		if a.Is4() != target.Is4() || a.Is6() && a.IsLinkLocalUnicast() != target.IsLinkLocalUnicast() {
			continue
		}
		if a.Is6() && a.IsLinkLocalUnicast() {
			a = a.WithZone(network)
		}
		return a, nil
	}
	return netip.Addr{}, fmt.Errorf("%w: network interface %s has no address to reach %s from", rdma.ErrNoDevice, network, target)
}
