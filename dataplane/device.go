package dataplane

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// device is one ublk device that the data plane serves: a queue on each reactor.
type device struct {
	id     int
	group  *group
	lun    scsi.LUN
	char   *ublk.Device
	queues []*deviceQueue
	doubts atomic.Uint64 // how often a queue has parked its requests because the unit may be another one

	mu      sync.Mutex
	unit    *lu.Unit  // replaced, never changed
	changed string    // why the unit is not served any more: it is gone, or another one; "" while it is
	doubted time.Time // since when requests wait for an answer to that question; zero if they do not
	state   string
	gone    chan struct{} // closed when every queue has ended
	left    int
}

// deviceQueue is one queue with the reactor that owns it.
type deviceQueue struct {
	reactor *Reactor
	kernel  *ublk.Queue
	lu      *lu.Queue
	fan     *fan // nil: one session has all requests
}

// attach serves a unit through the ublk device that the control plane has added. When it returns every tag is fetched, or will be at the
// reactors' next turn, and the device may be started.
func (p *Plane) attach(ctx context.Context, a ipc.AttachRequest) (err error) {
	p.mu.Lock()
	g := p.groups[a.Group]
	_, taken := p.devices[a.UblkID]
	taken = taken || p.attaching[a.UblkID] != nil
	if !taken {
		done := make(chan struct{})
		p.attaching[a.UblkID] = done
		defer func() {
			p.mu.Lock()
			delete(p.attaching, a.UblkID)
			p.mu.Unlock()
			close(done)
		}()
	}
	p.mu.Unlock()
	switch {
	case g == nil:
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("session group %q does not exist", a.Group)}
	case taken:
		return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("device %d is already served", a.UblkID)}
	case a.Queues < 1 || a.Queues > len(p.reactors):
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("%d queues; there are %d reactors", a.Queues, len(p.reactors))}
	case a.Depth < 1 || a.Depth > uapi.UBLK_MAX_QUEUE_DEPTH:
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("queue depth %d; 1 to %d are possible", a.Depth, uapi.UBLK_MAX_QUEUE_DEPTH)}
	}
	unit := g.unit(a.LUN)
	if unit == nil || !unit.Usable {
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("target %s has no usable logical unit %#x", g.request.Target, a.LUN)}
	}
	if unit.WWID != a.WWID || unit.Serial != a.Serial {
		return &ipc.Error{Code: api.ErrAgain, Text: fmt.Sprintf("target %s has another logical unit under %#x now", g.request.Target, a.LUN)}
	}
	if err := g.settle(ctx, unit.LUN); err != nil {
		return classify(err)
	}
	char, err := ublk.Open(a.UblkID)
	if err != nil {
		return err
	}
	d := &device{id: a.UblkID, group: g, unit: unit, lun: unit.LUN, char: char, state: ipc.DeviceServing, gone: make(chan struct{}), left: a.Queues}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	g.mu.Lock()
	tcp := slices.ContainsFunc(g.routes, func(r ipc.Route) bool { return r.Transport == ipc.TransportTCP })
	g.mu.Unlock()
	if a.Recover {
		d.doubts.Add(1)
		d.doubted = time.Now()
	}
	for i := range a.Queues {
		r := p.reactors[i]
		q := &deviceQueue{reactor: r}
		r.Call(func() {
			way := g.way(i, unit.LUN)
			q.fan, _ = way.(*fan)
			q.lu = lu.NewQueue(lu.Config{
				Unit: unit, Depth: a.Depth, Path: way, Memory: r.memory, Clock: &r.clock, Notice: d.notice,
			})
			if a.Recover {
				q.lu.Park() // the unit may have become another one while nobody looked
			}
			q.kernel, err = char.OpenQueue(r.ring, i, a.Depth, q.lu)
			if err != nil {
				return
			}
			if tcp {
				q.kernel.OpenLending() // without, everything is copied
			}
			q.kernel.OnGone(d.queueGone)
			for _, p := range g.on(i) {
				p.join(q.lu)
			}
			if q.fan != nil {
				q.fan.enter()
			}
			q.lu.Carry(g.paths[i].overTCP())
		})
		if err != nil {
			return err
		}
		d.queues = append(d.queues, q)
	}
	p.mu.Lock()
	p.devices[d.id] = d
	p.mu.Unlock()
	if !a.Recover { // else its requests wait, and the sessions that come ask
		if err = g.confirm(ctx, d); err != nil {
			p.mu.Lock()
			delete(p.devices, d.id)
			p.mu.Unlock()
			return classify(err)
		}
	}
	g.mu.Lock()
	g.devices++
	g.mu.Unlock()
	switch {
	case a.Recover:
		g.notices.hurry()
	case g.unit(a.LUN) != unit: // the target was asked again meanwhile
		g.notices.look()
	}
	if g.several {
		g.notices.states() // its target port may be shut
	}
	p.log.WithField("dev", d.id).WithField("target", g.request.Target).WithField("lun", unit.LUN.String()).Info("serving")
	return nil
}

// queueGone notes that the kernel has taken back every tag of a queue: the device was stopped. It runs on the queue's reactor.
func (d *device) queueGone() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left--; d.left == 0 {
		d.state = ipc.DeviceGone
		close(d.gone)
	}
}

// attached finds a device, after an attach that is still at work.
func (p *Plane) attached(ctx context.Context, id int) (*device, error) {
	p.mu.Lock()
	attaching := p.attaching[id]
	p.mu.Unlock()
	if attaching != nil {
		select {
		case <-attaching:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.devices[id]
	if d == nil {
		return nil, &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("device %d is not served here", id)}
	}
	return d, nil
}

// detachTimeout is how long a stopped device's tags may take to come back.
const detachTimeout = 2 * time.Second

// detach lets go of a device that the control plane has stopped, or that was never started. An attach that is still at work, because nobody waits for its
// answer any more, comes first.
func (p *Plane) detach(ctx context.Context, id int) error {
	d, err := p.attached(ctx, id)
	if err != nil {
		return err
	}
	stopped := false
	select {
	case <-d.gone:
		stopped = true
	case <-time.After(detachTimeout):
		// Closing the queues cancels what is still fetched: the way of a device that was never started.
	case <-ctx.Done():
	}
	d.close()
	if stopped {
		select {
		case <-d.char.Released():
		case <-ctx.Done():
		}
	}
	p.mu.Lock()
	delete(p.devices, id)
	p.mu.Unlock()
	p.unbindDevice(id)
	d.group.mu.Lock()
	d.group.devices--
	d.group.mu.Unlock()
	return nil
}

// close ends the queues and lets go of the character device. A queue whose tags the kernel still holds stays with its reactor until DEL_DEV
// brings them back.
func (d *device) close() {
	for _, q := range d.queues {
		q.reactor.Call(func() {
			q.kernel.Close()
			for _, p := range d.group.on(q.reactor.index) {
				p.leave(q.lu)
			}
			if q.fan != nil {
				q.fan.exit()
			}
		})
	}
	d.char.Close()
}

// snapshot tells what the device is and has done.
func (d *device) snapshot() ipc.Device {
	d.mu.Lock()
	s := ipc.Device{UblkID: d.id, Group: d.group.request.Group, LUN: uint64(d.lun), State: d.state}
	d.mu.Unlock()
	for _, q := range d.queues {
		var c lu.Counters
		q.reactor.Call(func() { c = q.lu.Counters() })
		stats := ipc.QueueStats{
			Reads: c.Reads, Writes: c.Writes, Flushes: c.Flushes, Discards: c.Discards, Zeroes: c.Zeroes, ReadBytes: c.ReadBytes, WriteBytes: c.WriteBytes,
			Errors: c.Errors, Retries: c.Retries, InFlight: c.InFlight,
		}
		stats.Tiers.TCP, stats.Requests.TCP = c.TCPBytes, c.TCPRequests
		stats.Lent = ipc.LentCount{Requests: c.LentRequests, Bytes: c.LentBytes}
		stats.Tiers.Shared, stats.Requests.Shared = c.SharedBytes, c.SharedRequests
		stats.Tiers.Registered = c.ReadBytes + c.WriteBytes - c.TCPBytes - c.SharedBytes
		stats.Requests.Registered = c.Reads + c.Writes - c.TCPRequests - c.SharedRequests
		s.Queues = append(s.Queues, stats)
	}
	return s
}
