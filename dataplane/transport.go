package dataplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsitcp"
	"iserd.org/iserd/iser"
	"iserd.org/iserd/rdma"
)

// port is a connection on its way through the login, of either transport.
type port interface {
	iscsi.Port
	// configure tells the login what the transport offers.
	configure(c *login.Config)
	// attach makes the connection a Datamover of the reactor, and runs on it.
	attach(r *Reactor) (iscsi.Datamover, error)
	// device is the RDMA device, if any.
	device() string
}

// open connects to a portal for a session on r, by the way that was asked for. connect bounds how long a TCP connection may take; 0 leaves that to ctx.
func (p *Plane) open(ctx context.Context, r *Reactor, t ipc.Transport, portal string, way settings.Binding, connect time.Duration) (port, error) {
	if t == ipc.TransportISER {
		var a *adapter
		port, err := iser.DialBy(ctx, iser.Way{Source: way.Source, ACKTimeout: p.config.ACKTimeout}, portal, func(dev *rdma.Device) (iser.Config, error) {
			err := way.Check(dev.Name())
			if err != nil {
				return iser.Config{}, err
			}
			if a, err = r.adapter(dev); err != nil {
				return iser.Config{}, err
			}
			return iser.Config{Owner: r, CQ: a.cq, Domain: a.domain, Released: func() { go r.release(a) }}, nil
		})
		if err != nil {
			return nil, err
		}
		return rdmaPort{port, a}, nil
	}
	dialer := way.Dialer()
	dialer.Timeout = connect
	port, err := iscsitcp.DialBy(ctx, dialer, portal)
	if err != nil {
		return nil, err
	}
	return tcpPort{port}, nil
}

type rdmaPort struct {
	*iser.Port
	a *adapter
}

func (p rdmaPort) configure(c *login.Config) {
	keys := login.DefaultKeys(login.ISER, login.Normal)
	keys.InitiatorRecvDataSegmentLength = iser.InitiatorRecvDataSegmentLength
	keys.TargetRecvDataSegmentLength = iser.TargetRecvDataSegmentLength
	keys.MaxOutstandingUnexpectedPDUs = iser.Unexpected
	keys.ImmediateData = true // used for a command whose data is immediate as a whole: see package iser
	c.Transport, c.Keys = login.ISER, &keys
}

func (p rdmaPort) attach(*Reactor) (iscsi.Datamover, error) { return p.Conn(), nil }

func (p rdmaPort) device() string { return p.a.domain.Device.Name() }

type tcpPort struct{ *iscsitcp.Port }

func (p tcpPort) configure(c *login.Config) {
	keys := login.DefaultKeys(login.TCP, login.Normal)
	keys.MaxRecvDataSegmentLength = iscsitcp.MaxRecvDataSegmentLength
	c.Transport, c.Keys = login.TCP, &keys
}

func (p tcpPort) attach(r *Reactor) (iscsi.Datamover, error) {
	return p.Attach(r.ring, iscsitcp.Config{Outstanding: iser.Outstanding})
}

func (p tcpPort) device() string { return "" }

// adapter is what a reactor needs of one RDMA device while it has connections there.
type adapter struct {
	cq      *rdma.CQ
	domain  *iser.Domain
	reactor *Reactor
	slot    uring.Slot
	users   int // connections; guarded by Reactor.lock
}

// adapter returns what the reactor needs of an RDMA device for one more connection, made when it is the first one: a completion queue, and
// the registration of the reactor's buffer pool. Each call is followed by one of release.
func (r *Reactor) adapter(dev *rdma.Device) (*adapter, error) {
	r.lock.Lock()
	defer r.lock.Unlock()
	if a := r.devices[dev]; a != nil {
		a.users++
		return a, nil
	}
	domain, err := iser.NewDomain(dev, r.regions()...)
	if err != nil {
		return nil, err
	}
	cq, err := dev.NewCQ(min(cqEntries, dev.Limits().MaxCQE))
	if err != nil {
		domain.Close()
		return nil, fmt.Errorf("completion queue on %s: %w", dev.Name(), err)
	}
	a := &adapter{cq: cq, domain: domain, reactor: r, users: 1}
	if err := r.plane.joinBuffers(a); err != nil {
		cq.Close()
		domain.Close()
		return nil, err
	}
	r.Call(func() {
		a.slot = r.ring.Attach(a)
		a.arm()
		r.cqs = append(r.cqs, cq)
	})
	r.devices[dev] = a
	return a, nil
}

// release takes a connection off the adapter. With the last one everything is given back to the device, which could not be removed otherwise.
// It must not run on the reactor.
func (r *Reactor) release(a *adapter) {
	r.lock.Lock()
	defer r.lock.Unlock()
	if a.users--; a.users > 0 || r.devices[a.domain.Device] != a { // Stop has taken it
		return
	}
	delete(r.devices, a.domain.Device)
	r.Call(func() {
		sqe := r.ring.SQE()
		sqe.PrepCancel(a.slot.Key(pollToken))
		sqe.UserData = a.slot.Key(cancelToken)
		r.ring.Detach(a.slot)
		r.cqs = slices.DeleteFunc(slices.Clone(r.cqs), func(cq *rdma.CQ) bool { return cq == a.cq })
	})
	a.close()
}

// The operations of an adapter on the ring.
const (
	pollToken   = 0
	cancelToken = 1
)

// arm lets an event of the completion channel wake the ring.
func (a *adapter) arm() {
	sqe := a.reactor.ring.SQE()
	sqe.PrepPollMultishot(a.cq.FD(), unix.POLLIN)
	sqe.UserData = a.slot.Key(pollToken)
}

// Complete takes a wake-up of the completion channel. What it announces is found by the poll of the next turn.
func (a *adapter) Complete(_ uint32, res int32, flags uint32) {
	a.cq.DrainEvents()
	if flags&uapi.IORING_CQE_F_MORE == 0 && res >= 0 {
		a.arm()
	}
}

// close frees what the adapter holds. No connection uses it and the reactor does not poll it any more.
func (a *adapter) close() {
	a.reactor.plane.leaveBuffers(a)
	a.cq.Close()
	a.domain.Close()
}

// addFlusher lets a session take part in the turns.
func (r *Reactor) addFlusher(f flusher) {
	r.flushers = append(r.flushers, f)
	r.clock.soon()
}

// removeFlusher ends that.
func (r *Reactor) removeFlusher(f flusher) {
	for i, g := range r.flushers {
		if g == f {
			// A new slice: the loop may be walking over the old one.
			r.flushers = append(append([]flusher(nil), r.flushers[:i]...), r.flushers[i+1:]...)
			return
		}
	}
}
