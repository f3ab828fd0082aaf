package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// Asymmetric logical unit access (ALUA, SPC-4 section 5.15): a unit may be reached better by some target ports than by others, and the target says by
// which. Each session belongs to a target port, whose group is in VPD page 83h as that session reads it; REPORT TARGET PORT GROUPS tells the state of every
// group. It is asked when a session or a device comes, when a unit attention or a NOT READY says that it has changed, and every second while a group is in
// transition. States are never set by us (implicit access).

// access is what a path's target port may do with a unit; the zero value is that of a unit without ALUA.
type access struct {
	asymmetric bool
	group      uint16
	state      scsi.AccessState
	preferred  bool
}

// rank orders paths to a unit: those with the highest are used. A port that takes no commands is better than none: it answers when it does again.
func (a access) rank() int {
	if !a.asymmetric {
		return 10
	}
	r := 2
	switch a.state {
	case scsi.ActiveOptimized:
		r = 10
	case scsi.ActiveNonOptimized:
		r = 8
	case scsi.LBADependent:
		r = 6
	case scsi.Transitioning:
		r = 4
	}
	if a.preferred && r > 4 {
		r++
	}
	return r
}

// active tells whether the port takes READ and WRITE commands.
func (a access) active() bool { return a.rank() > 4 }

func (a access) String() string {
	if !a.asymmetric {
		return "symmetric"
	}
	text := fmt.Sprintf("%v (target port group %d)", a.state, a.group)
	if a.preferred {
		text += ", preferred"
	}
	return text
}

// reach is a unit as a path reaches it: by one target port.
type reach struct {
	path *path
	lun  scsi.LUN
}

// belongs notes to which target port group a path's port belongs, as the unit told through its session.
func (g *group) belongs(p *path, u *lu.Unit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if u.PortGroup == nil || !g.several {
		delete(g.ports, reach{p, u.LUN})
		return
	}
	g.ports[reach{p, u.LUN}] = *u.PortGroup
}

// learn finds out by which target port groups a unit is reached, before there is a device for it.
func (g *group) learn(ctx context.Context, lun scsi.LUN) {
	if !g.several {
		return // there is nothing to choose from
	}
	for _, p := range g.paths {
		up := false
		if p.reactor.Call(func() { up = p.session != nil }); !up {
			continue // it learns when it comes
		}
		u, err := lu.Identify(ctx, executor{p: p}, lun)
		if err == nil && u.Err == nil {
			g.belongs(p, u)
		}
	}
	g.readAccess(ctx, lun)
}

// readAllAccess is readAccess for every unit that has ports. It tells whether a group is in transition, so that it is to be asked again.
func (g *group) readAllAccess(ctx context.Context) (again bool) {
	g.mu.Lock()
	luns := map[scsi.LUN]bool{}
	for x := range g.ports {
		luns[x.lun] = true
	}
	g.mu.Unlock()
	for _, lun := range slices.Sorted(maps.Keys(luns)) {
		again = g.readAccess(ctx, lun) || again
	}
	return again
}

// readAccess asks a unit for the states of its target port groups, and lets every path know.
func (g *group) readAccess(ctx context.Context, lun scsi.LUN) (again bool) {
	g.mu.Lock()
	ports := map[*path]uint16{}
	for x, id := range g.ports {
		if x.lun == lun {
			ports[x.path] = id
		}
	}
	g.mu.Unlock()
	if len(ports) == 0 {
		return false
	}
	log := g.logger().WithField("lun", lun.String())
	states, err := lu.PortGroups(ctx, asking{g}, lun)
	if err != nil {
		if g.ctx.Err() == nil && !errors.Is(err, errNoSession) {
			log.WithError(err).Warn("the unit does not tell by which ports it is reached best")
		}
		return !errors.Is(err, scsi.ErrIllegalRequest)
	}
	for p, id := range ports {
		i := slices.IndexFunc(states, func(x scsi.TargetPortGroup) bool { return x.ID == id })
		if i < 0 {
			continue
		}
		now := access{asymmetric: true, group: id, state: states[i].State, preferred: states[i].Preferred}
		again = again || now.state == scsi.Transitioning
		p.reactor.Call(func() {
			if old := p.access[lun]; old != now {
				log.WithField("session", p.index).Infof("reached by a port that is %v", now)
				p.access[lun] = now
				p.chosen()
			}
		})
	}
	return again
}

// movePause is how long sessions stay at a portal at least, when all are shut.
const movePause = 5 * time.Second

// accessPause is how long to wait before a unit whose target port groups are in transition is asked again.
const accessPause = time.Second

// asking runs single commands by whichever session gets them through: a target port that does not take one has the next asked. It implements
// [iserd.org/iserd/lu.Executor].
type asking struct{ g *group }

// Execute runs one command that reads at most n bytes.
func (a asking) Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (lu.Result, error) {
	r, err := lu.Result{}, errNoSession
	for _, p := range a.g.paths {
		up := false
		if p.reactor.Call(func() { up = p.session != nil || p.draining != nil }); !up {
			continue
		}
		if r, err = (executor{p: p}).Execute(ctx, lun, cdb, n); err == nil && !shut(r) || err != nil && !errors.Is(err, iscsi.ErrSessionLost) {
			break
		}
	}
	return r, err
}

// shut tells whether a command was refused because of the target port's state.
func shut(r lu.Result) bool {
	if r.Status != scsi.StatusCheckCondition {
		return false
	}
	s, err := scsi.ParseSense(r.Sense)
	return err == nil && s.Key != scsi.KeyUnitAttention && scsi.Classify(r.Status, &s).Attention == scsi.AttentionALUAChanged
}

// shutOut lists the units that cannot be described because the target ports of all sessions are shut for them.
func shutOut(units []*lu.Unit) (n int) {
	for _, u := range units {
		var status *scsi.StatusError
		if u.Err != nil && errors.As(u.Err, &status) && status.Sense != nil && status.Sense.Key != scsi.KeyUnitAttention &&
			scsi.Classify(status.Status, status.Sense).Attention == scsi.AttentionALUAChanged {
			n++
		}
	}
	return n
}

// Elsewhere tells whether a command that the target port does not let through may be sent again: the session can go to another portal.
func (p *path) Elsewhere() bool { return p.group.several }

// moveOn sends sessions whose target port is shut for a unit with a device to the next portal. Their paths stay there until it is shut, too. It tells whether
// there was one, and whether one could not be sent on yet.
func (g *group) moveOn() (moved, again bool) {
	if g.fanned || !g.several {
		return false, false
	}
	served := g.served()
	for _, p := range g.paths {
		closed := ""
		p.reactor.Call(func() {
			for _, d := range served {
				if a := p.access[d.lun]; !a.active() && a.state != scsi.Transitioning {
					closed = a.String()
				}
			}
		})
		if closed != "" {
			g.log(p).Warnf("the session goes to another portal: a unit is reached by a port that is %s", closed)
			g.mu.Lock()
			p.home = p.after(p.at)
			g.mu.Unlock()
			if p.leaveRoute() {
				moved = true
			} else {
				again = true
			}
		}
	}
	return moved, again
}
