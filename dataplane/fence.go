package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// What a lost session has sent may be at work at the target until that session is reinstated. Requests that wait for the reinstatement are safe; those
// that fail before it are not: whoever sent them may write again, through the session of another reactor, and the old write may come after the new
// one. So the units are reset by another session first (LOGICAL UNIT RESET ends the tasks of every nexus, SAM-5 section 7.4), or, when there is none,
// by the first that comes back.

// unfenced are the units for which a lost session may have commands at work that change them, though the requests behind them have failed. Guarded by
// group.mu.
type unfenced map[*path]map[scsi.LUN]bool

// atLarge are the units for which the lost session may have commands at work that change something: those with requests that are not done, wherever these
// wait by now, and those of single commands. Of a session that an earlier data plane had nothing is known, so these are all that have devices.
func (p *path) atLarge() map[scsi.LUN]bool {
	luns := map[scsi.LUN]bool{}
	g := p.group
	g.mu.Lock()
	old := p.last.old
	g.mu.Unlock()
	if old {
		for _, lun := range g.inherited {
			luns[lun] = true
		}
		for lun := range g.strangers() { // what stands there now was never written to
			delete(luns, lun)
		}
	}
	p.reactor.Call(func() {
		for _, q := range p.queues {
			if q.Counters().InFlight > 0 {
				luns[q.LUN()] = true
			}
		}
		for h := p.held.head; h != nil; h = h.next {
			if t := h.task; t.Outcome == iscsi.Lost && t.Direction != iscsi.Read {
				luns[t.LUN] = true
			}
		}
	})
	return luns
}

// fenceOff has the units reset that p's lost session may still change, before p's requests fail. What no other session could do is left to the first that
// comes back, and no other goes on before that.
func (p *path) fenceOff(ctx context.Context) {
	luns := p.atLarge()
	if len(luns) == 0 {
		return
	}
	g := p.group
	g.unfence(p, luns)
	for _, o := range g.paths {
		var session *iscsi.Session
		o.reactor.Call(func() { session = o.session })
		if o == p || session == nil {
			continue
		}
		if err := o.fence(ctx, session); err != nil {
			if g.ctx.Err() != nil {
				return // a logout ends all of them
			}
			g.log(o).WithError(err).Error("the session is dropped: without a reset it must not write to units that a lost session may still change")
			o.reactor.Call(func() {
				if o.session == session {
					session.Terminate(err)
				}
			})
		}
	}
}

// fence resets, through a session of p's, the units that lost sessions may still change. A unit that refuses to be reset is left alone:
// there is nothing else that could be done about it, and it is logged.
func (p *path) fence(ctx context.Context, session *iscsi.Session) error {
	g := p.group
	g.mu.Lock()
	luns := map[scsi.LUN]bool{}
	for _, m := range g.unfenced {
		maps.Copy(luns, m)
	}
	g.mu.Unlock()
	for _, lun := range slices.Sorted(maps.Keys(luns)) {
		err := p.resetUnit(ctx, session, lun)
		log := g.log(p).WithField("lun", lun.String())
		var refused *iscsi.TaskManagementError
		switch {
		case err == nil:
			log.Warn("the unit was reset: requests of a lost session fail, and nothing of them may come later")
		case errors.As(err, &refused):
			log.WithError(err).Error("the unit cannot be reset: a write that fails with its session may still take effect")
		default:
			return fmt.Errorf("LOGICAL UNIT RESET of %v on behalf of a lost session: %w", lun, err)
		}
		g.mu.Lock()
		for o, m := range g.unfenced {
			if delete(m, lun); len(m) == 0 {
				delete(g.unfenced, o)
			}
		}
		g.mu.Unlock()
	}
	return nil
}

// fenced tells whether no unit has to be reset before p goes on. It runs on the reactor.
func (p *path) fenced() bool {
	g := p.group
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.unfenced) == 0
}

// reinstated notes that p has logged in with the portal group tpgt. With the group of the session before it is that session's reinstatement, which has
// ended its tasks. With another one it is a session with another port of the target, and the one before goes on there (RFC 7143 section 4.4.3.1).
func (p *path) reinstated(tpgt uint16) {
	g := p.group
	g.mu.Lock()
	moved := p.last.there && (p.last.tpgt != tpgt || p.last.unknown)
	if !moved {
		delete(g.unfenced, p)
	}
	g.mu.Unlock()
	if !moved {
		return
	}
	if luns := p.atLarge(); len(luns) > 0 {
		g.log(p).Warnf("the target has sent the session to another portal group, %d instead of %d", tpgt, p.last.tpgt)
		g.unfence(p, luns)
	}
}

// unfence notes that units have to be reset.
func (g *group) unfence(p *path, luns map[scsi.LUN]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.unfenced == nil {
		g.unfenced = unfenced{}
	}
	all := maps.Clone(luns)
	maps.Copy(all, g.unfenced[p])
	g.unfenced[p] = all
}

// resetUnit sends LOGICAL UNIT RESET and waits for the answer.
func (p *path) resetUnit(ctx context.Context, session *iscsi.Session, lun scsi.LUN) error {
	ctx, cancel := context.WithTimeout(ctx, p.group.plane.patience.reset)
	defer cancel()
	answer := make(chan error, 1)
	p.reactor.Call(func() {
		p.escalations.resets++
		session.Manage(iscsi.TaskManagement{Function: pdu.LogicalUnitReset, LUN: lun}, func(err error) { answer <- err })
	})
	select {
	case err := <-answer:
		if err == nil {
			p.wasReset(lun)
		}
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: no answer", iscsi.ErrTimeout)
	}
}
