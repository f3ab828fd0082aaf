package dataplane

import (
	"os"
	"sort"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/rdma"
)

// state tells everything that a control plane needs in order to take over.
func (p *Plane) state() ipc.State {
	p.mu.Lock()
	groups := make([]*group, 0, len(p.groups))
	for _, g := range p.groups {
		groups = append(groups, g)
	}
	devices := make([]*device, 0, len(p.devices))
	for _, d := range p.devices {
		devices = append(devices, d)
	}
	p.mu.Unlock()
	sort.Slice(groups, func(i, j int) bool { return groups[i].request.Group < groups[j].request.Group })
	sort.Slice(devices, func(i, j int) bool { return devices[i].id < devices[j].id })

	s := ipc.State{Groups: []ipc.Group{}, Devices: []ipc.Device{}}
	for _, g := range groups {
		s.Groups = append(s.Groups, *g.snapshot())
	}
	for _, d := range devices {
		s.Devices = append(s.Devices, d.snapshot())
	}
	s.Buffers = p.snapshotBuffers()
	for _, r := range p.reactors {
		s.Reactors = append(s.Reactors, r.counters())
	}
	s.Objects = p.objects()
	return s
}

// counters tells what the reactor did.
func (r *Reactor) counters() (s ipc.ReactorStats) {
	r.Call(func() {
		s = r.stats
		s.Enters = r.ring.Enters
		for _, cq := range r.cqs {
			c := cq.Stats()
			s.Doorbells += c.Posts
			s.Polls += c.Polls
			s.WCs += c.WCs
			s.Events += c.Events
		}
	})
	return s
}

// objects counts what the process holds of the system.
func (p *Plane) objects() ipc.Objects {
	live := rdma.Live()
	o := ipc.Objects{Connections: live.Conns, QPs: live.QPs, CQs: live.CQs, MRs: live.MRs}
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		o.Descriptors = len(entries) - 1 // the directory itself
	}
	for _, r := range p.reactors {
		r.Call(func() {
			for _, pool := range append([]*mempool.Pool{r.commands}, r.memory.Pools()...) {
				o.PoolBytes += pool.Size()
				o.PoolBytesUsed += pool.InUse()
			}
		})
	}
	return o
}

// snapshot tells what the group is.
func (g *group) snapshot() *ipc.Group {
	g.mu.Lock()
	s := &ipc.Group{
		ID: g.request.Group, Target: g.request.Target, Portal: g.request.Portal, TPGT: g.tpgt,
		Transport: g.transport, TransportReason: g.reason, State: g.state, Since: g.since,
		InitiatorName: g.request.InitiatorName, Sessions: []ipc.Session{}, Units: []ipc.Unit{},
		Settings: g.request.Settings, Others: g.request.Others, MovedTo: g.movedTo,
	}
	if g.err != nil {
		s.Error = classify(g.err)
	}
	for _, p := range g.paths {
		s.Sessions = append(s.Sessions, p.info)
	}
	g.mu.Unlock()
	for i, p := range g.paths {
		p.reactor.Call(func() {
			e := p.escalations
			for lun, a := range p.access {
				if s.Sessions[i].Access == nil {
					s.Sessions[i].Access = map[uint16]string{}
				}
				s.Sessions[i].Access[uint16(lun.Number())] = a.String()
			}
			s.Sessions[i].Aborts, s.Sessions[i].Resets, s.Sessions[i].Drops = e.aborts, e.resets, e.drops
			if p.session != nil {
				s.Sessions[i].Outstanding = p.session.InFlight()
				s.Sessions[i].WindowWaits = p.session.WindowWaits()
			}
		})
	}
	s.Units = g.unitMessages()
	return s
}

// unitMessage is the unit as the control plane sees it.
func unitMessage(u *lu.Unit) ipc.Unit {
	return ipc.Unit{
		LUN: uint64(u.LUN), Number: uint16(u.LUN.Number()), Usable: u.Usable, Reason: u.Reason, DeviceType: u.DeviceType,
		Vendor: u.Vendor, Product: u.Product, Revision: u.Revision, Serial: u.Serial, WWID: u.WWID,
		Blocks: u.Blocks, LogicalBlockSize: u.LogicalBlockSize, PhysicalBlockSize: u.PhysicalBlockSize,
		AlignmentOffset: u.AlignmentOffset, OptimalIOSize: u.OptimalIOSize, MaxTransfer: uint32(u.MaxTransfer),
		ReadOnly: u.ReadOnly, WriteCache: u.WriteCache, FUA: u.FUA, Rotational: u.Rotational,
		MinIOSize: u.MinIOSize, MaxDiscard: u.MaxDiscard * uint64(u.LogicalBlockSize), DiscardGranularity: u.DiscardGranularity,
		DiscardAlignment: u.DiscardAlignment, MaxZeroes: u.MaxZeroes * uint64(u.LogicalBlockSize),
		Discard: uint8(u.Discard), Zeroes: uint8(u.Zeroes), ZeroesUnmap: u.ZeroesUnmap, CacheAssumed: u.CacheAssumed,
	}
}

// notifyGroup tells the control plane about a group. What is told last is what is the newest. It must not run on a reactor.
func (p *Plane) notifyGroup(g *group) {
	p.telling.Lock()
	defer p.telling.Unlock()
	select {
	case p.events <- event{ipc.EventGroup, g.snapshot()}:
	default:
		p.log.Debug("the control plane does not take its events")
	}
}
