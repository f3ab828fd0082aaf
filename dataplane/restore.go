package dataplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// restore makes the group of a data plane that is no more, without waiting for the target. Every path starts as one whose session was lost: what the
// kernel delivers again is held until that path has logged in with the ISID of the session that the request was sent by before. A request comes back by the
// queue that it was on, hence by the same path, so the reinstatement has ended the earlier attempt at the target (RFC 7143 section 6.3.5).
func (p *Plane) restore(_ context.Context, r ipc.RestoreRequest) (*ipc.Group, error) {
	if r.Transport != ipc.TransportISER && r.Transport != ipc.TransportTCP {
		return nil, &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("restore %s: transport %q", r.Target, r.Transport)}
	}
	p.mu.Lock()
	if p.groups[r.Group] != nil || p.pending[r.Group] {
		p.mu.Unlock()
		return nil, &ipc.Error{Code: api.ErrAlreadyLoggedIn, Text: fmt.Sprintf("target %s at %s is already logged in", r.Target, r.Portal)}
	}
	g := p.emptyGroup(r.LoginRequest)
	g.plan()
	g.state, g.failed, g.tpgt, g.reason = ipc.GroupRecovering, len(g.paths), r.TPGT, "it was used before the data plane was restarted"
	for i := range r.Units {
		g.units = append(g.units, unitOf(&r.Units[i]))
		g.inherited = append(g.inherited, scsi.LUN(r.Units[i].LUN))
	}
	g.tasks.Add(1 + len(g.paths))
	go g.runWatch()
	for _, path := range g.paths {
		path.info = ipc.Session{Reactor: path.reactor.index, State: "FAILED", Negotiated: map[string]string{}}
		path.last.there, path.last.old, path.last.tpgt = true, true, r.TPGT
		path.info.TPGT = r.TPGT
		if r.Clean {
			path.last.there, path.last.old = false, false
			continue
		}
		path.unsettled = g.fanned
		// A session may have gone to another portal right before the data plane ended, and nobody has heard of it. Of several sessions, which ISID belonged to
		// which portal depends on how many reactors there were.
		path.last.unknown = r.Policy != api.PathSingle && slices.ContainsFunc(r.Others, func(o ipc.Route) bool { return o.Portal != r.Portal })
	}
	for _, path := range g.paths {
		go func() {
			defer g.tasks.Done()
			path.runRecovery(0, 0)
		}()
	}
	p.groups[r.Group] = g
	p.mu.Unlock()
	p.log.WithField("target", r.Target).WithField("portal", r.Portal).Infof("restoring %d sessions, %d logical units", len(g.paths), len(g.units))
	return g.snapshot(), nil
}

// emptyGroup is a group before its first login.
func (p *Plane) emptyGroup(request ipc.LoginRequest) *group {
	g := &group{plane: p, request: request, state: ipc.GroupUp, since: time.Now(), transport: request.Transport}
	g.notices.wake, g.notices.urgent = make(chan struct{}, 1), make(chan struct{}, 1)
	g.debts.owed, g.debts.paying = map[debt]uint64{}, make(chan struct{}, 1)
	g.debts.reset = map[scsi.LUN]uint64{}
	g.ctx, g.cancel = context.WithCancel(p.ctx)
	g.ports, g.ends, g.states = map[reach]uint16{}, map[end]uint16{}, map[scsi.LUN][]scsi.TargetPortGroup{}
	for i, r := range p.reactors {
		g.paths = append(g.paths, &path{group: g, reactor: r, index: i, access: map[scsi.LUN]access{}})
	}
	return g
}

// unitOf is the reverse of unitMessage.
func unitOf(u *ipc.Unit) *lu.Unit {
	blocks := func(bytes uint64) uint64 { return bytes / uint64(max(u.LogicalBlockSize, 1)) }
	return &lu.Unit{
		LUN: scsi.LUN(u.LUN), Usable: u.Usable, Reason: u.Reason, DeviceType: u.DeviceType,
		Vendor: u.Vendor, Product: u.Product, Revision: u.Revision, Serial: u.Serial, WWID: u.WWID,
		Blocks: u.Blocks, LogicalBlockSize: u.LogicalBlockSize, PhysicalBlockSize: u.PhysicalBlockSize,
		AlignmentOffset: u.AlignmentOffset, OptimalIOSize: u.OptimalIOSize, MaxTransfer: int(u.MaxTransfer),
		ReadOnly: u.ReadOnly, WriteCache: u.WriteCache, FUA: u.FUA, Rotational: u.Rotational,
		MinIOSize: u.MinIOSize, MaxDiscard: blocks(u.MaxDiscard), DiscardGranularity: u.DiscardGranularity, DiscardAlignment: u.DiscardAlignment,
		MaxZeroes: blocks(u.MaxZeroes), Discard: lu.RangeMethod(u.Discard), Zeroes: lu.RangeMethod(u.Zeroes), ZeroesUnmap: u.ZeroesUnmap, CacheAssumed: u.CacheAssumed,
	}
}
