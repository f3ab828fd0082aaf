//go:build !cgo

package rdma

import (
	"context"
	"net/netip"
)

// The types and functions of a build without cgo: the same shape, and nothing works.

// Device cannot exist without cgo.
type Device struct{ _ [0]func() }

// Conn cannot exist without cgo.
type Conn struct{ _ [0]func() }

// Listener cannot exist without cgo.
type Listener struct{ _ [0]func() }

// CQ cannot exist without cgo.
type CQ struct{ _ [0]func() }

// MR cannot exist without cgo.
type MR struct{ _ [0]func() }

// Devices returns ErrNotSupported.
func Devices() ([]DeviceInfo, error) { return nil, ErrNotSupported }

// Resolve returns ErrNotSupported.
func Resolve(ctx context.Context, cfg ResolveConfig) (*Conn, error) { return nil, ErrNotSupported }

// Listen returns ErrNotSupported.
func Listen(addr netip.AddrPort) (*Listener, error) { return nil, ErrNotSupported }

// Addr returns the zero AddrPort.
func (l *Listener) Addr() netip.AddrPort { return netip.AddrPort{} }

// Accept returns ErrNotSupported.
func (l *Listener) Accept(ctx context.Context) (*Conn, []byte, error) {
	return nil, nil, ErrNotSupported
}

// Close does nothing.
func (l *Listener) Close() error { return nil }

// Name returns "".
func (d *Device) Name() string { return "" }

// Software returns false.
func (d *Device) Software() bool { return false }

// Limits returns the zero Limits.
func (d *Device) Limits() Limits { return Limits{} }

// Register returns ErrNotSupported.
func (d *Device) Register(mem []byte, access Access) (*MR, error) { return nil, ErrNotSupported }

// NewCQ returns ErrNotSupported.
func (d *Device) NewCQ(entries int) (*CQ, error) { return nil, ErrNotSupported }

// LKey returns 0.
func (m *MR) LKey() uint32 { return 0 }

// RKey returns 0.
func (m *MR) RKey() uint32 { return 0 }

// Close does nothing.
func (m *MR) Close() error { return nil }

// Device returns nil.
func (c *Conn) Device() *Device { return nil }

// LocalAddr returns the zero AddrPort.
func (c *Conn) LocalAddr() netip.AddrPort { return netip.AddrPort{} }

// RemoteAddr returns the zero AddrPort.
func (c *Conn) RemoteAddr() netip.AddrPort { return netip.AddrPort{} }

func (c *Conn) String() string { return "rdma" }

// CreateQP returns ErrNotSupported.
func (c *Conn) CreateQP(cq *CQ, caps QPCaps, h WCHandler) error { return ErrNotSupported }

// QPAttr returns ErrNotSupported.
func (c *Conn) QPAttr() (QPAttr, error) { return QPAttr{}, ErrNotSupported }

// Connect returns ErrNotSupported.
func (c *Conn) Connect(ctx context.Context, p ConnectParams) (peerPrivate []byte, err error) {
	return nil, ErrNotSupported
}

// Accept returns ErrNotSupported.
func (c *Conn) Accept(ctx context.Context, p ConnectParams) error { return ErrNotSupported }

// Reject returns ErrNotSupported.
func (c *Conn) Reject(private []byte) error { return ErrNotSupported }

// OnEvent does nothing.
func (c *Conn) OnEvent(f func(Event)) {}

// Abort does nothing.
func (c *Conn) Abort() error { return nil }

// Disconnect does nothing.
func (c *Conn) Disconnect() error { return nil }

// Close does nothing.
func (c *Conn) Close() error { return nil }

// PostSend returns ErrNotSupported.
func (c *Conn) PostSend(wr SendWR) error { return ErrNotSupported }

// PostWrite returns ErrNotSupported.
func (c *Conn) PostWrite(wr SendWR, to Remote) error { return ErrNotSupported }

// PostRead returns ErrNotSupported.
func (c *Conn) PostRead(wr SendWR, from Remote) error { return ErrNotSupported }

// PostRecv returns ErrNotSupported.
func (c *Conn) PostRecv(wr RecvWR) error { return ErrNotSupported }

// Entries returns 0.
func (cq *CQ) Entries() int { return 0 }

// Device returns nil.
func (cq *CQ) Device() *Device { return nil }

// FD returns -1.
func (cq *CQ) FD() int { return -1 }

// Stats returns the zero CQStats.
func (cq *CQ) Stats() CQStats { return CQStats{} }

// Arm returns ErrNotSupported.
func (cq *CQ) Arm() error { return ErrNotSupported }

// Armed returns false.
func (cq *CQ) Armed() bool { return false }

// DrainEvents returns ErrNotSupported.
func (cq *CQ) DrainEvents() error { return ErrNotSupported }

// Poll returns ErrNotSupported.
func (cq *CQ) Poll() (int, error) { return 0, ErrNotSupported }

// Flush returns ErrNotSupported.
func (cq *CQ) Flush() error { return ErrNotSupported }

// Close does nothing.
func (cq *CQ) Close() error { return nil }
