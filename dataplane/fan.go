package dataplane

import (
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// fan is the way of one queue's requests when several sessions of its reactor lead to the unit, one by each portal (path_policy round-robin and
// least-queued): each request goes by one of those whose target port has the best access state for the unit (access.go). Nothing is locked, and nothing
// allocated as long as there is a session. It implements [iserd.org/iserd/lu.Path].
//
// What a lost session has sent is not sent again by another one just so: a write may be at work at the target, and would come after a newer one. Reads and
// what was not sent go elsewhere at once. Writes wait until their session is back, which ends the old ones (reinstatement), or for handOverPause: then
// another session has the unit reset (fence.go), and they go by that one.
type fan struct {
	lun     scsi.LUN
	least   bool // the session with the fewest commands, instead of one after the other
	paths   []*path
	best    []*path // with a session, and in the best state
	turn    int
	waiting []*iscsi.Task // there is no session at all
	ended   bool
}

// way is how the requests of a reactor reach a unit.
func (g *group) way(reactor int, lun scsi.LUN) lu.Path {
	if !g.fanned {
		return g.paths[reactor]
	}
	return &fan{lun: lun, least: g.request.Policy == api.PathLeastQueued, paths: g.on(reactor)}
}

// on lists the paths of a reactor.
func (g *group) on(reactor int) []*path {
	var list []*path
	for _, p := range g.paths {
		if p.reactor.index == reactor {
			list = append(list, p)
		}
	}
	return list
}

// enter and exit keep the fans to which sessions matter. They run on the reactor.
func (f *fan) enter() {
	for _, p := range f.paths {
		p.fans = append(p.fans, f)
	}
	f.choose()
}

func (f *fan) exit() {
	for _, p := range f.paths {
		p.fans = slices.DeleteFunc(p.fans, func(x *fan) bool { return x == f })
	}
	f.ended, f.best = true, nil
	f.Drop() // nobody would send it
}

// Submit sends a task by one of the sessions.
func (f *fan) Submit(t *iscsi.Task) {
	switch len(f.best) {
	case 0:
		f.wait(t)
	case 1:
		f.best[0].session.Submit(t)
	default:
		f.next().session.Submit(t)
	}
}

// next picks a path by the policy. Preconditions: there are some.
func (f *fan) next() *path {
	if f.turn++; f.turn >= len(f.best) {
		f.turn = 0
	}
	p := f.best[f.turn]
	if f.least {
		for _, o := range f.best {
			if o.session.Queued() < p.session.Queued() {
				p = o
			}
		}
	}
	return p
}

// wait keeps a task that was not sent until there is a session, unless there will be none.
func (f *fan) wait(t *iscsi.Task) {
	if f.ended || lu.FailsFast(t) || f.Refuses() {
		t.Outcome = iscsi.NotSent
		t.Handler.TaskDone(t)
		return
	}
	f.waiting = append(f.waiting, t)
}

// Reaches tells whether every session moves data that is not mapped in this process. Writes are copied: one that was lost must be known as such when it is
// copied after all.
func (f *fan) Reaches(d iscsi.Direction) bool {
	for _, p := range f.best {
		if !p.session.Reaches(d) {
			return false
		}
	}
	return d == iscsi.Read && len(f.best) > 0
}

// Refuses tells whether tasks fail at once: no path has a session, and all have waited long enough.
func (f *fan) Refuses() bool {
	for _, p := range f.paths {
		if !p.Refuses() {
			return false
		}
	}
	return true
}

// Hold takes a task that a session hands back: see above.
func (f *fan) Hold(t *iscsi.Task) bool {
	if t.Outcome == iscsi.Lost && t.Direction == iscsi.Write {
		for _, p := range f.paths {
			if k := p.keeper; k != nil && k.State() == iscsi.StateFree { // its tasks come back one after the other, before it is forgotten: see lost
				return p.Hold(t)
			}
		}
	}
	if f.ended || lu.Hopeless(t) {
		return false
	}
	f.choose() // without the one that is ending
	if len(f.best) == 0 && f.Refuses() {
		return false
	}
	f.Submit(t)
	return true
}

// Elsewhere tells that a command that a target port does not let through may be sent again: another one may take it, or the same one in a moment.
func (f *fan) Elsewhere() bool { return true }

// choose finds out which paths are used, and sends what waits. It is called whenever a session of one comes or goes, or an access state changes.
func (f *fan) choose() {
	f.best = f.best[:0]
	if slices.ContainsFunc(f.paths, func(p *path) bool { return p.unsettled }) {
		return // requests that an earlier data plane has sent by that one come again, and not by another one before it is settled
	}
	top := 0
	for _, p := range f.paths {
		if p.session == nil || p.session.State() != iscsi.StateLoggedIn {
			continue
		}
		switch r := p.access[f.lun].rank(); {
		case r > top:
			top, f.best = r, append(f.best[:0], p)
		case r == top:
			f.best = append(f.best, p)
		}
	}
	if len(f.best) > 0 || f.Refuses() {
		f.Drop()
	}
}

// Drop sends tasks that wait, or lets them fail.
func (f *fan) Drop() {
	list := f.waiting
	f.waiting = nil
	for _, t := range list {
		if lu.Hopeless(t) {
			t.Outcome = iscsi.NotSent
			t.Handler.TaskDone(t)
			continue
		}
		f.Submit(t)
	}
}

// chosen tells the fans of a path that its session, or an access state, is another one. It runs on the reactor.
func (p *path) chosen() {
	for _, f := range p.fans {
		f.choose()
	}
}

// handOverPause is how long a lost session may take to come back before its writes go by another one: a reset is felt by everybody who uses the unit.
const handOverPause = time.Second

// runHandOver gives the writes of a lost session to the other sessions of its reactor, when it does not come back soon. It ends when stop is closed.
func (p *path) runHandOver(stop <-chan struct{}) {
	g := p.group
	tick := time.NewTicker(handOverPause)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return
		case <-g.ctx.Done():
			return
		}
		held, loss := false, 0
		p.reactor.Call(func() {
			loss = p.losses
			for h := p.held.head; h != nil; h = h.next {
				_, single := h.task.Handler.(*execution)
				held = held || !single
			}
			held = p.session == nil && (held || p.unsettled)
		})
		siblings := func() []peer {
			return slices.DeleteFunc(p.peers(), func(o peer) bool { return o.path.reactor != p.reactor })
		}
		if !held || len(siblings()) == 0 || !p.fenceBy(g.ctx, siblings, g.plane.patience.reset) {
			continue
		}
		p.reactor.Call(func() {
			if p.session != nil || p.losses != loss || !g.settled() {
				return
			}
			n := 0
			p.release(func(t *iscsi.Task) {
				if _, single := t.Handler.(*execution); single { // whoever waits for it has asked for this session
					p.Hold(t)
					return
				}
				n++
				t.Outcome = iscsi.NotSent
				t.Handler.TaskDone(t)
			})
			p.unsettled = false
			p.chosen()
			if n > 0 {
				g.log(p).WithField("requests", n).Warn("what the lost session had sent goes by another one")
			}
		})
	}
}
