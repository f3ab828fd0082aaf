package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// What a lost session has sent may be at work at the target until that session is reinstated. Requests that wait for the reinstatement are safe; those
// that fail before it are not: whoever sent them may write again, through the session of another reactor, and the old write may come after the new
// one. So the units are reset by another session first (LOGICAL UNIT RESET ends the tasks of every nexus, SAM-5 section 7.4), or, when there is none,
// by the first that comes back.

// debt is a unit for which a lost session may have commands at work that change it, though the requests behind them have failed, or are to be sent by a
// session that does not reinstate it.
type debt struct {
	path *path
	lun  scsi.LUN
}

// debts are those of a group. The losses of its sessions are counted, and each debt has the number of its loss: a reset pays for what was lost before it
// began, and nothing is owed for what was lost before a reset.
type debts struct {
	// Guarded by group.mu.
	owed  map[debt]uint64
	last  uint64              // loss
	reset map[scsi.LUN]uint64 // the last loss before the last reset

	paying chan struct{} // held, by filling it, while resets are under way: one is enough for all sessions
}

// fenceLimit is how long requests whose time is over wait for units to be reset.
const fenceLimit = time.Second

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
		if p.clean {
			return // what waits was never sent
		}
		for _, q := range p.queues {
			if !g.fanned && q.Counters().InFlight > 0 { // of a fan, what was lost waits below
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

// fenceOff has the units reset that p's lost session may still change, before p's requests fail. If that takes too long the sessions that might write to
// them end, and log in again: none goes on before the units are reset.
func (p *path) fenceOff(ctx context.Context) {
	if p.fenceBy(ctx, p.peers, fenceLimit) || p.group.ctx.Err() != nil {
		return // a logout ends all of them
	}
	for _, o := range p.peers() { // also those that have come meanwhile
		o.path.reactor.Call(func() {
			if o.path.session == o.session && !p.group.settled() {
				o.session.Terminate(errUnfenced)
			}
		})
	}
}

// peer is a session of another path.
type peer struct {
	path    *path
	session *iscsi.Session
}

// peers are the sessions of the other paths.
func (p *path) peers() (list []peer) {
	for _, o := range p.group.paths {
		var session *iscsi.Session
		if o.reactor.Call(func() { session = o.session }); o != p && session != nil {
			list = append(list, peer{o, session})
		}
	}
	return list
}

// fenceBy has the units reset that p's lost session may still change, by the first of the peers that gets it done. It returns false when none does within
// the limit.
func (p *path) fenceBy(ctx context.Context, peers func() []peer, limit time.Duration) bool {
	g := p.group
	g.owe(p, p.atLarge())
	for _, o := range peers() {
		if g.settled() {
			return true
		}
		limit /= 2 // one that does not answer leaves time for others
		ctx, cancel := context.WithTimeout(ctx, limit)
		err := o.path.fence(ctx, o.session)
		cancel()
		if err != nil && g.ctx.Err() == nil {
			g.log(o.path).WithError(err).Warn("a unit that a lost session may still change was not reset")
		}
	}
	return g.settled()
}

// errUnfenced ends a session that must not write before its units have been reset.
var errUnfenced = errors.New("a lost session may still change its units, and they could not be reset in time")

// settle has a unit reset that a lost session may still change, before a new device uses it. If there is no session the first that comes does it.
func (g *group) settle(ctx context.Context, lun scsi.LUN) error {
	g.mu.Lock()
	owed := false
	for d := range g.debts.owed {
		owed = owed || d.lun == lun
	}
	g.mu.Unlock()
	if !owed {
		return nil
	}
	for _, p := range g.paths {
		var session *iscsi.Session
		if p.reactor.Call(func() { session = p.session }); session != nil {
			return p.fence(ctx, session)
		}
	}
	return nil
}

// fence resets, through a session of p's, the units that lost sessions may still change. A unit that refuses to be reset is left alone:
// there is nothing else that could be done about it, and it is logged.
func (p *path) fence(ctx context.Context, session *iscsi.Session) error {
	g := p.group
	if g.settled() {
		return nil
	}
	select {
	case g.debts.paying <- struct{}{}:
		defer func() { <-g.debts.paying }()
	case <-ctx.Done():
		return fmt.Errorf("%w: other resets are under way", iscsi.ErrTimeout)
	}
	g.mu.Lock()
	luns := map[scsi.LUN]bool{}
	for d := range g.debts.owed {
		luns[d.lun] = true
	}
	g.mu.Unlock()
	for _, lun := range slices.Sorted(maps.Keys(luns)) {
		g.mu.Lock()
		begun := g.debts.last
		g.mu.Unlock()
		err := p.resetUnit(ctx, session, lun)
		log := g.log(p).WithField("lun", lun.String())
		var refused *iscsi.TaskManagementError
		var rejected *iscsi.RejectError
		switch {
		case err == nil:
			log.Warn("the unit was reset: nothing that a lost session has sent to it comes later")
		case errors.As(err, &refused), errors.As(err, &rejected):
			log.WithError(err).Error("the unit cannot be reset: a write that fails with its session may still take effect")
		default:
			return fmt.Errorf("LOGICAL UNIT RESET of %v on behalf of a lost session: %w", lun, err)
		}
		g.mu.Lock()
		maps.DeleteFunc(g.debts.owed, func(d debt, n uint64) bool { return d.lun == lun && n <= begun })
		g.debts.reset[lun] = begun
		g.mu.Unlock()
	}
	return nil
}

// settled tells whether no unit has to be reset before a session goes on. It may be called on a reactor.
func (g *group) settled() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.debts.owed) == 0
}

// reinstated notes that p has logged in with the portal group tpgt. With the group of the session before it is that session's reinstatement, which has
// ended its tasks. With another one it is a session with another port of the target, and the one before goes on there (RFC 7143 section 4.4.3.1).
func (p *path) reinstated(tpgt uint16) {
	g := p.group
	g.mu.Lock()
	moved := p.last.there && (p.last.tpgt != tpgt || p.last.unknown)
	if !moved {
		maps.DeleteFunc(g.debts.owed, func(d debt, _ uint64) bool { return d.path == p })
	}
	g.mu.Unlock()
	if !moved {
		return
	}
	if luns := p.atLarge(); len(luns) > 0 {
		g.log(p).Warnf("the target has sent the session to another portal group, %d instead of %d", tpgt, p.last.tpgt)
		g.owe(p, luns)
	}
}

// owe notes that units have to be reset. It may be called on a reactor.
func (g *group) owe(p *path, luns map[scsi.LUN]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for lun := range luns {
		if done, ok := g.debts.reset[lun]; !ok || done < p.lostAt {
			g.debts.owed[debt{p, lun}] = p.lostAt
		}
	}
}

// resetUnit sends LOGICAL UNIT RESET and waits for the target's word. Commands of the session wait for that, so a session that does not get it ends,
// whether or not somebody still waits here.
func (p *path) resetUnit(ctx context.Context, session *iscsi.Session, lun scsi.LUN) error {
	limit := p.group.plane.patience.reset
	answer := make(chan error, 2)
	timer := time.AfterFunc(limit, func() {
		p.reactor.Do(func() {
			session.Terminate(fmt.Errorf("%w: no answer to LOGICAL UNIT RESET in %v", iscsi.ErrTimeout, limit))
		})
	})
	complete := func() {
		timer.Stop()
		answer <- nil
	}
	p.reactor.Call(func() {
		p.escalations.resets++
		session.Manage(iscsi.TaskManagement{Function: pdu.LogicalUnitReset, LUN: lun, Complete: complete}, func(err error) {
			timer.Stop()
			answer <- err
		})
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
