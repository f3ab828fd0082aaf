package iser

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"iserd.org/iserd/rdma"
)

// ACKTimeout is how long the adapter waits for an acknowledgement before it sends again. The default of the connection manager for RoCE is
// 0.54 s, which turns one lost packet in a thousand into a standstill; 16 ms keeps most of the rate and is still far above the round
// trip of a data centre.
const ACKTimeout = 16 * time.Millisecond

// SoftwareACKTimeout is that for an adapter without hardware. It answers when the processor gets to it, and on a busy machine that can be
// later than any network is: what is then sent again only adds to the load, and soft RoCE (Linux 7.3) is not safe against an RDMA Read that is
// sent again while its first answer comes: its completer reports success before all data is there.
const SoftwareACKTimeout = 2 * time.Second

// Way is how to reach a portal. The zero Way leaves it to the routes and the adapter.
type Way struct {
	Source     func(portal netip.Addr) (netip.Addr, error) // gives the address to connect from; the zero Addr leaves it to the routes. May be nil
	ACKTimeout time.Duration                               // 0: ACKTimeout, or SoftwareACKTimeout
}

// Dial connects to a portal over RDMA and returns a [Port] for the login. pick gives the owner, the completion queue and the memory for a
// connection on the adapter that the route goes through; its Released runs once, also when Dial fails.
//
// Errors: [rdma.ErrNoDevice] when no adapter serves the address, [rdma.ErrRefused] when nobody listens for RDMA there, [rdma.ErrTimeout],
// [rdma.ErrUnreachable].
func Dial(ctx context.Context, portal string, pick func(*rdma.Device) (Config, error)) (*Port, error) {
	return DialBy(ctx, Way{}, portal, pick)
}

// DialBy is Dial by a way.
func DialBy(ctx context.Context, way Way, portal string, pick func(*rdma.Device) (Config, error)) (*Port, error) {
	addr, err := resolve(ctx, portal)
	if err != nil {
		return nil, err
	}
	resolve := rdma.ResolveConfig{Target: addr, ACKTimeout: ACKTimeout, SoftwareACKTimeout: SoftwareACKTimeout}
	if way.ACKTimeout != 0 {
		resolve.ACKTimeout, resolve.SoftwareACKTimeout = way.ACKTimeout, 0
	}
	if way.Source != nil {
		if resolve.Source, err = way.Source(addr.Addr()); err != nil {
			return nil, err
		}
	}
	link, err := rdma.Resolve(ctx, resolve)
	if err != nil {
		return nil, err
	}
	config, err := pick(link.Device())
	if err != nil {
		link.Close()
		return nil, err
	}
	memory, err := newMemory(link.Device())
	if err != nil {
		if config.Released != nil {
			config.Released()
		}
		link.Close()
		return nil, err
	}
	type made struct {
		conn *Conn
		err  error
	}
	ch := make(chan made, 1)
	config.Owner.Do(func() {
		conn, err := newConn(link, config, memory)
		ch <- made{conn, err}
	})
	m := <-ch
	if m.err != nil {
		memory.free()
		if config.Released != nil {
			config.Released()
		}
		link.Close()
		return nil, m.err
	}
	port := NewPort(m.conn, link.LocalAddr().String())
	if err := m.conn.connect(ctx); err != nil {
		port.Close()
		return nil, err
	}
	return port, nil
}

// resolve turns ADDR:PORT or NAME:PORT into an address.
func resolve(ctx context.Context, portal string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(portal); err == nil {
		return a, nil
	}
	host, service, err := net.SplitHostPort(portal)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("portal %q: %w", portal, err)
	}
	port, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("portal %q: port %q is not a number below 65536", portal, service)
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("portal %q: %w", portal, err)
	}
	return netip.AddrPortFrom(addrs[0].Unmap(), uint16(port)), nil
}
