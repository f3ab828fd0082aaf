package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
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

// end is a unit as it is reached by a route.
type end struct {
	route int
	lun   scsi.LUN
}

// belongs notes to which target port group a path's port belongs, as the unit told through its session.
func (g *group) belongs(p *path, u *lu.Unit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if u.PortGroup == nil || !g.several {
		delete(g.ports, reach{p, u.LUN})
		p.reactor.Do(func() {
			delete(p.access, u.LUN)
			p.chosen()
		})
		return
	}
	g.ports[reach{p, u.LUN}] = *u.PortGroup
	g.ends[end{p.by, u.LUN}] = *u.PortGroup
}

// confirm asks by every session whether a unit is the one that the device is made for, and finds out by which target port groups it is
// reached. It is for a device that is not started yet, but known, so that a session that comes later asks, too. Nothing is asked where there is one portal.
func (g *group) confirm(ctx context.Context, d *device) error {
	if !g.several {
		return nil
	}
	for _, p := range g.paths {
		var session *iscsi.Session
		if p.reactor.Call(func() { session = p.session }); session == nil {
			continue
		}
		now, err := lu.Identify(ctx, executor{p: p, session: session}, d.lun)
		if errors.Is(err, iscsi.ErrSessionLost) {
			continue
		}
		if err == nil {
			err = now.Err
		}
		if err != nil {
			return fmt.Errorf("logical unit %v by session %d: %w", d.lun, p.index, err)
		}
		if why := d.unit.Changed(now); why != "" {
			return &ipc.Error{Code: api.ErrNotSupported, Text: fmt.Sprintf("logical unit %v is not the same by all portals of %s (%s): "+
				"log in by one of them, with path_policy=single or --portal", d.lun, g.request.Target, why)}
		}
		g.belongs(p, now)
	}
	g.readAccess(ctx, d.lun)
	return nil
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
	var refused *scsi.StatusError
	switch {
	case errors.As(err, &refused):
		log.WithError(err).Warn("the unit does not tell by which ports it is reached best")
		return false
	case err != nil: // a session that is lost, or comes
		return g.ctx.Err() == nil && !errors.Is(err, errNoSession)
	}
	g.mu.Lock()
	g.states[lun] = states
	g.mu.Unlock()
	changed := false
	for p, id := range ports {
		i := slices.IndexFunc(states, func(x scsi.TargetPortGroup) bool { return x.ID == id })
		if i < 0 {
			continue
		}
		now := access{asymmetric: true, group: id, state: states[i].State, preferred: states[i].Preferred}
		again = again || now.state == scsi.Transitioning
		p.reactor.Call(func() {
			if old := p.access[lun]; old != now {
				changed = true
				log.WithField("session", p.index).Infof("reached by a port that is %v", now)
				p.access[lun] = now
				p.chosen()
			}
		})
	}
	if changed {
		g.plane.notifyGroup(g)
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

// shutOut counts the units that cannot be described because the target ports of all sessions are shut for them.
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

// moveOn sends sessions whose target port is shut for a unit with a device to a portal where fewer are, or of which nothing is known yet. Their paths
// stay there until that changes. It tells whether there was a session to send.
func (g *group) moveOn() (needed bool) {
	if g.fanned || !g.several {
		return false
	}
	var luns []scsi.LUN
	for _, d := range g.served() {
		luns = append(luns, d.lun)
	}
	for _, p := range g.paths {
		up := false
		if p.reactor.Call(func() { up = p.session != nil }); !up {
			continue // its recovery tries every portal
		}
		g.mu.Lock()
		to := p.at
		shut, known := g.shutLocked(p.at, luns)
		for i := p.after(p.at); shut > 0 && known && i != p.at; i = p.after(i) {
			if n, known := g.shutLocked(i, luns); !known || n < shut {
				to = i
				break
			}
		}
		moves := to != p.at
		if moves {
			p.home = to
		}
		portal := g.routes[to].Portal
		g.mu.Unlock()
		if moves {
			needed = true
			g.log(p).Warnf("the session goes to %s: %d units are reached by a port that takes no commands", portal, shut)
			p.leaveRoute()
		}
	}
	return needed
}

// shutLocked counts the units for which the target port at the end of a route is shut. known is false if the route has not been used yet. Preconditions:
// group.mu is held.
func (g *group) shutLocked(route int, luns []scsi.LUN) (n int, known bool) {
	for _, lun := range luns {
		states, asymmetric := g.states[lun]
		if !asymmetric {
			continue
		}
		id, ok := g.ends[end{route, lun}]
		if !ok {
			return 0, false
		}
		for _, x := range states {
			if a := (access{asymmetric: true, state: x.State}); x.ID == id && !a.active() && x.State != scsi.Transitioning {
				n++
			}
		}
	}
	return n, true
}
