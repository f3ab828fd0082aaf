package daemontest

import (
	"slices"

	"iserd.org/iserd/internal/ipc"
)

// SetUnits changes what a target offers. A control plane that is connected hears of it if tell is set, else when it asks.
//
// A unit that has a device and is gone, or another one now, is marked as the data plane does.
func (p *Plane) SetUnits(target string, tell bool, units ...ipc.Unit) {
	p.mu.Lock()
	s := p.server
	var told []ipc.Group
	for _, g := range p.groups {
		if g.Target == target {
			g.Units = units
			told = append(told, p.showLocked(g))
		}
	}
	p.mu.Unlock()
	for _, g := range told {
		if tell {
			_ = s.Notify(ipc.EventGroup, g)
		}
	}
}

// showLocked is a group as the control plane sees it: units whose device is for another one, or for none, are marked. Preconditions: mu is held.
func (p *Plane) showLocked(g *ipc.Group) ipc.Group {
	x := *g
	x.Units = slices.Clone(g.Units)
	for _, d := range p.devices {
		if d.Group != g.ID {
			continue
		}
		i := slices.IndexFunc(x.Units, func(u ipc.Unit) bool { return u.LUN == d.LUN })
		switch {
		case i < 0:
			x.Units = append(x.Units, ipc.Unit{LUN: d.LUN, Number: uint16(d.LUN >> 48), DeviceType: 0x1f, Reason: "no unit", Changed: "no unit"})
		case x.Units[i].WWID != p.served[d.UblkID].WWID:
			x.Units[i].Changed = "another unit"
		}
	}
	return x
}

// rescan answers as the data plane does that has just asked the target.
func (p *Plane) rescan(group string) (any, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groups[group]
	if g == nil {
		return nil, &ipc.Error{Code: "SessionNotFound", Text: "no such group"}
	}
	p.rescans++
	return p.showLocked(g), nil
}

// Rescans tells how often a rescan was asked for.
func (p *Plane) Rescans() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rescans
}

// unitOf is the unit that a device is made for. Preconditions: mu is held.
func (p *Plane) unitOf(group string, lun uint64) ipc.Unit {
	for _, u := range p.groups[group].Units {
		if u.LUN == lun {
			return u
		}
	}
	return ipc.Unit{}
}
