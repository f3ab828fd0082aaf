package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// What the units of a target say of themselves while they are served. A unit attention on the data path, an asynchronous message, a session that came
// back, or the control plane makes a goroutine of the group ask the target for its units again; each device then goes on with what its unit has become,
// or is condemned. The control plane gets the group as it is now and does the rest: block devices that come, go, or grow.

// notices are what the reactors have to say about units, until the group's goroutine takes it. The lock is held for moments, and never per request.
type notices struct {
	mu     sync.Mutex
	list   []lu.Notice
	all    bool // look at the target's units whatever the list says
	access bool // ask for access states whatever the list says
	wake   chan struct{}
	urgent chan struct{} // requests wait for the look
}

// maxNotices bounds what may wait; what is more than that only makes the target be asked.
const maxNotices = 64

func (n *notices) add(x lu.Notice) {
	n.mu.Lock()
	if len(n.list) < maxNotices {
		n.list = append(n.list, x)
	} else {
		n.all = true
	}
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// look asks for a look at the target's units.
func (n *notices) look() {
	n.mu.Lock()
	n.all = true
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// hurry is look for somebody whose requests wait until it is done, and who cannot be there often.
func (n *notices) hurry() {
	n.look()
	select {
	case n.urgent <- struct{}{}:
	default:
	}
}

// states asks for a look at the access states.
func (n *notices) states() {
	n.mu.Lock()
	n.access = true
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

func (n *notices) take() (list []lu.Notice, all, access bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	list, all, access = n.list, n.all, n.access
	n.list, n.all, n.access = nil, false, false
	return list, all, access
}

// notice takes what a queue of the device has to say. It runs on the queue's reactor.
func (d *device) notice(n lu.Notice) {
	if n.Parked {
		d.doubts.Add(1)
	}
	d.group.notices.add(n)
}

// attention takes the sense data of an asynchronous message: a unit attention without a command. It runs on the reactor.
func (p *path) attention(lun scsi.LUN, sense []byte) {
	if s, err := scsi.ParseSense(sense); err == nil {
		a := scsi.Classify(scsi.StatusCheckCondition, &s)
		p.group.notices.add(lu.Notice{Unit: &lu.Unit{LUN: lun}, Attention: a.Attention, Text: s.String()})
	}
}

// heard takes the sense data that a single command met. A unit attention is told once on each session: the queue that it concerns would not hear of it
// any more, and its requests go on to what may be another unit. It runs on the reactor.
func (p *path) heard(lun scsi.LUN, sense []byte) {
	s, err := scsi.ParseSense(sense)
	if err != nil {
		return
	}
	a := scsi.Classify(scsi.StatusCheckCondition, &s).Attention
	switch a {
	case scsi.AttentionNone, scsi.AttentionOther, scsi.AttentionReset:
		return
	}
	for _, q := range p.queues {
		if q.LUN() == lun {
			q.Heard(a, &s)
			return
		}
	}
	p.group.notices.add(lu.Notice{Unit: &lu.Unit{LUN: lun}, Attention: a, Text: s.String()})
}

// Pauses of the watch: between two looks unless one is urgent, before a look that failed is repeated, and while a device is condemned, whose unit may come
// back. A unit that nobody could identify for doubtTimeout is condemned, so that its requests end.
const (
	lookPause    = 250 * time.Millisecond
	retryPause   = time.Second
	recheckPause = 5 * time.Second
	lookTimeout  = 30 * time.Second
	doubtTimeout = replacementTimeout
)

// runWatch takes notices until the group ends.
func (g *group) runWatch() {
	defer g.tasks.Done()
	said := map[string]time.Time{}
	var again, access <-chan time.Time
	var left time.Time // a portal
	for {
		look, states := false, false
		select {
		case <-g.ctx.Done():
			return
		case <-g.notices.wake:
		case <-again:
			look = true
		case <-access:
			states = true
		}
		list, all, moved := g.notices.take()
		states = states || moved
		for _, n := range list {
			if n.Parked {
				g.doubt(n.Unit.LUN)
			}
			look = g.say(n, said) || look
			states = states || n.Attention == scsi.AttentionALUAChanged
		}
		if states {
			access = nil
			ctx, cancel := context.WithTimeout(g.ctx, lookTimeout)
			if g.readAllAccess(ctx) {
				access = time.After(accessPause)
			}
			cancel()
			if rest := g.plane.patience.move - time.Since(left); rest > 0 {
				access = time.After(min(rest, accessPause))
			} else if g.moveOn() {
				left = time.Now()
				access = time.After(g.plane.patience.move)
			}
		}
		if look || all {
			again = nil
			ctx, cancel := context.WithTimeout(g.ctx, lookTimeout)
			err := g.look(ctx)
			cancel()
			if errors.Is(err, errNoSession) {
				// The session that comes back asks for a look, and requests wait for that one: it must find nobody asleep.
				again = time.After(retryPause)
				continue
			}
			switch {
			case err != nil && g.ctx.Err() == nil:
				g.logger().WithError(err).Warn("the logical units cannot be asked for; trying again")
				again = time.After(retryPause)
			case g.condemned():
				again = time.After(recheckPause)
			}
		}
		select {
		case <-g.ctx.Done():
			return
		case <-g.notices.urgent:
		case <-time.After(g.plane.patience.look):
		}
	}
}

// repeatPause is for how long the same notice is not logged again.
const repeatPause = 10 * time.Second

// say logs a notice and tells whether the target is to be asked for its units.
func (g *group) say(n lu.Notice, said map[string]time.Time) (look bool) {
	now := time.Now()
	for k, t := range said {
		if now.Sub(t) > repeatPause {
			delete(said, k)
		}
	}
	if key := fmt.Sprintf("%v/%d/%s", n.Unit.LUN, n.Attention, n.Text); said[key].IsZero() {
		said[key] = now
		log := g.logger().WithField("lun", n.Unit.LUN.String())
		switch n.Attention {
		case scsi.AttentionNone:
			log.Warn(n.Text)
		case scsi.AttentionDeferred:
			log.Errorf("a write that was reported as done has failed at the target: %s", n.Text)
		case scsi.AttentionSpaceThreshold:
			log.Warnf("the pool behind the unit is getting full: %s", n.Text)
		case scsi.AttentionReservation:
			log.Warnf("a reservation or registration was taken away: %s", n.Text)
		case scsi.AttentionReset, scsi.AttentionOther: // every new session begins with one
			log.Debugf("unit attention: %s", n.Text)
		default:
			log.Infof("%s: %s", n.Attention, n.Text)
		}
	}
	switch n.Attention {
	case scsi.AttentionCapacityChanged, scsi.AttentionLunsChanged, scsi.AttentionModeChanged, scsi.AttentionInquiryChanged:
		return true
	}
	return false
}

// errNoSession says that nobody can be asked.
var errNoSession = errors.New("no session with the target")

// asker is for commands by whichever session, and tells how many bytes each carries in one command.
func (g *group) asker() (lu.Executor, int, error) {
	least := math.MaxInt
	for _, p := range g.paths {
		limit := 0
		p.reactor.Call(func() {
			switch {
			case p.session != nil:
				limit = p.session.MaxTransfer()
			case p.draining != nil: // a command waits for the next one
				limit = p.draining.MaxTransfer()
			}
		})
		if limit > 0 {
			least = min(least, limit)
		}
	}
	if least == math.MaxInt {
		return nil, 0, errNoSession
	}
	return asking{g}, min(least, mempool.MaxBlock), nil
}

// look asks the target for its units, and lets each device go on accordingly. The control plane is told if anything has changed.
func (g *group) look(ctx context.Context) error {
	g.looking.Lock()
	defer g.looking.Unlock()
	before := g.unitMessages()
	g.mu.Lock()
	unlooked := maps.Clone(g.unlooked) // one that is added from here on has to be looked at again
	g.mu.Unlock()
	doubts := map[*device]uint64{}
	for _, d := range g.served() {
		doubts[d] = d.doubts.Load()
	}
	exec, limit, err := g.asker()
	var units []*lu.Unit
	if err == nil {
		units, err = lu.ProbeAll(ctx, exec, limit)
	}
	if errors.Is(err, errNoSession) {
		g.startAnew()
		return err
	}
	if err != nil {
		g.expire(err)
		return err
	}
	probed := slices.Clone(units) // a doubt is not answered by what was known before
	now := make(map[scsi.LUN]*lu.Unit, len(units))
	g.mu.Lock()
	for _, old := range g.units {
		now[old.LUN] = old
	}
	for i, u := range units {
		if old := now[u.LUN]; u.Err != nil && old != nil && old.Err == nil && !unlooked[u.LUN] {
			units[i] = old // it did not answer: what was known stays
		}
	}
	g.units = units
	for lun := range unlooked {
		delete(g.unlooked, lun)
	}
	g.mu.Unlock()
	clear(now)
	for _, u := range probed {
		now[u.LUN] = u
	}
	for _, d := range g.served() {
		u := now[d.lun]
		if u == nil { // the list may be wrong, the unit itself is not
			if u, err = lu.ProbeOne(ctx, exec, d.lun, limit); err != nil {
				return err
			}
		}
		d.judge(u, doubts[d])
		if u.Err != nil {
			g.expire(u.Err)
		}
	}
	if after := g.unitMessages(); !sameUnits(before, after) {
		g.plane.notifyGroup(g)
	}
	return nil
}

// served lists the devices of the group.
func (g *group) served() []*device {
	g.plane.mu.Lock()
	defer g.plane.mu.Unlock()
	var list []*device
	for _, d := range g.plane.devices {
		if d.group == g {
			list = append(list, d)
		}
	}
	return list
}

// condemned tells whether a device of the group is.
func (g *group) condemned() bool {
	for _, d := range g.served() {
		d.mu.Lock()
		yes := d.changed != "" || !d.doubted.IsZero()
		d.mu.Unlock()
		if yes {
			return true
		}
	}
	return false
}

// doubt notes that requests for a unit wait to know whether it is the right one.
func (g *group) doubt(lun scsi.LUN) {
	for _, d := range g.served() {
		d.mu.Lock()
		if d.lun == lun && d.doubted.IsZero() {
			d.doubted = time.Now()
		}
		d.mu.Unlock()
	}
}

// startAnew starts the time for an answer anew while there is nobody to ask: how long requests wait for a session is another matter.
func (g *group) startAnew() {
	for _, d := range g.served() {
		d.mu.Lock()
		if !d.doubted.IsZero() {
			d.doubted = time.Now()
		}
		d.mu.Unlock()
	}
}

// expire ends the wait of requests for a unit that nobody could identify.
func (g *group) expire(err error) {
	for _, d := range g.served() {
		d.mu.Lock()
		late := !d.doubted.IsZero() && time.Since(d.doubted) > doubtTimeout
		d.mu.Unlock()
		if late && d.condemn("the unit may be another one now, and could not be asked: "+err.Error()) {
			g.plane.notifyGroup(g)
		}
	}
}

// judge lets a device go on with its unit as it was found to be, or condemns it. doubts is how often requests were parked before the unit was asked:
// what came up since is not answered.
func (d *device) judge(now *lu.Unit, doubts uint64) {
	d.mu.Lock()
	old := d.unit
	d.mu.Unlock()
	if now.Err != nil {
		return
	}
	if why := old.Changed(now); why != "" {
		d.condemn(why)
		return
	}
	u := old.Renewed(now)
	d.mu.Lock()
	back := d.changed != ""
	d.unit, d.changed, d.doubted = u, "", time.Time{}
	d.mu.Unlock()
	if u.Blocks != old.Blocks {
		d.logger().Infof("the unit had %d blocks of %d bytes, it has %d", old.Blocks, u.LogicalBlockSize, u.Blocks)
	}
	if back {
		d.logger().Info("the unit is back; requests go there again")
	}
	for _, q := range d.queues {
		q.reactor.Call(func() {
			q.lu.Renew(u)
			if d.doubts.Load() == doubts {
				q.lu.Proceed()
			}
		})
	}
}

// condemn lets all requests of a device fail: nothing may reach what stands under its number now. It returns false if that was known.
func (d *device) condemn(why string) bool {
	d.mu.Lock()
	known := d.changed == why
	d.changed, d.doubted = why, time.Time{}
	d.mu.Unlock()
	for _, q := range d.queues {
		q.reactor.Call(q.lu.Condemn)
	}
	if !known {
		d.logger().Errorf("not served any more: %s", why)
	}
	return !known
}

// adopt gives a path its new session, if the units of the devices are what they were. done is closed when the session has ended.
//
// The login has ended the tasks of the session before (if it was with the same portal group of the target: see reinstated), so that requests which wait
// may be sent again; but what they were meant for may have been
// unmapped meanwhile, and another unit may stand in its place. New requests wait, too, until that is known.
func (p *path) adopt(ctx context.Context, session *iscsi.Session, tpgt uint16, done <-chan struct{}, note func()) error {
	exec := executor{p: p, session: session}
	err := p.prove(ctx, exec)
	other := p.group.strangers()
	if err == nil {
		err = p.restoreRegistrations(ctx, exec, other)
	}
	if err != nil {
		p.giveUpProof(session, err, done)
		return err
	}
	p.reinstated(tpgt)
	up, fenced := false, false
	for !fenced {
		// Each reset has its own time; the attempt's would make many units begin again and again.
		if err := p.fence(p.group.ctx, session); err != nil {
			p.giveUpProof(session, err, done)
			return err
		}
		p.reactor.Call(func() {
			if fenced = p.group.settled(); fenced {
				up = p.begin(session, other, note)
			}
		})
	}
	if !up {
		return fmt.Errorf("%w right after the login", iscsi.ErrSessionLost)
	}
	if p.group.several {
		p.group.notices.states() // its port may be another one
	}
	return nil
}

// begin makes a session that has proven itself the path's, notes what it is, and sends what waits. It runs on the reactor, and returns false when the session
// has ended.
func (p *path) begin(session *iscsi.Session, other map[scsi.LUN]bool, note func()) bool {
	if p.unproven != session {
		return false
	}
	p.unproven = nil
	note()
	p.resume(session, other)
	return true
}

// resume makes a session the path's, and sends what waits. Requests of units that are gone, or other ones, fail. It runs on the reactor.
func (p *path) resume(session *iscsi.Session, other map[scsi.LUN]bool) {
	p.session, p.refuse, p.unsettled = session, false, false
	defer p.chosen()
	p.release(func(t *iscsi.Task) {
		if _, single := t.Handler.(*execution); lu.Hopeless(t) || single && other[t.LUN] {
			t.Outcome = iscsi.NotSent
			t.Handler.TaskDone(t)
			return
		}
		session.Submit(t)
	})
}

// giveUpProof ends a session that the path cannot use. done is closed when it has ended.
func (p *path) giveUpProof(session *iscsi.Session, why error, done <-chan struct{}) {
	p.reactor.Call(func() {
		if p.unproven == session {
			session.Terminate(why)
		}
	})
	<-done
}

// strangers are the numbers under which another unit stands now than the one that a device was made for.
func (g *group) strangers() map[scsi.LUN]bool {
	m := map[scsi.LUN]bool{}
	for _, d := range g.served() {
		d.mu.Lock()
		if d.changed != "" {
			m[d.lun] = true
		}
		d.mu.Unlock()
	}
	return m
}

// prove compares the units of the devices on this path with those that the new session reaches. An error means that it could not be found out.
func (p *path) prove(ctx context.Context, exec executor) error {
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(provesAtOnce)
	var mu sync.Mutex
	told := false
	for _, d := range p.group.served() {
		if p.reactor.index >= len(d.queues) {
			continue
		}
		work.Go(func() error {
			now, err := lu.Identify(ctx, exec, d.lun)
			if err != nil {
				return err
			}
			if now.Err == nil {
				p.group.belongs(p, now)
			}
			d.mu.Lock()
			old := d.unit
			d.mu.Unlock()
			why := old.Changed(now)
			if now.Err != nil {
				why = "the unit did not tell who it is after the session came back: " + now.Err.Error()
			}
			if why == "" {
				return nil
			}
			g := p.group
			g.mu.Lock()
			if g.unlooked == nil {
				g.unlooked = map[scsi.LUN]bool{}
			}
			g.unlooked[d.lun] = true
			g.mu.Unlock()
			if d.condemn(why) {
				mu.Lock()
				told = true
				mu.Unlock()
			}
			return nil
		})
	}
	err := work.Wait()
	if told {
		p.group.notices.look()
		p.group.plane.notifyGroup(p.group)
	}
	return err
}

// provesAtOnce is how many units are asked at a time who they are.
const provesAtOnce = 16

// unitMessages are the units as the control plane sees them: those that the target lists, and those that are gone while there is a device.
func (g *group) unitMessages() []ipc.Unit {
	why := map[scsi.LUN]string{}
	for _, d := range g.served() {
		d.mu.Lock()
		if d.changed != "" {
			why[d.lun] = d.changed
		}
		d.mu.Unlock()
	}
	g.mu.Lock()
	units, unlooked := g.units, maps.Clone(g.unlooked)
	g.mu.Unlock()
	list := make([]ipc.Unit, 0, len(units))
	for _, u := range units {
		if unlooked[u.LUN] {
			continue // what stands there now is not known
		}
		m := unitMessage(u)
		m.Changed = why[u.LUN]
		delete(why, u.LUN)
		list = append(list, m)
	}
	for _, lun := range slices.Sorted(maps.Keys(why)) {
		text := why[lun]
		list = append(list, ipc.Unit{LUN: uint64(lun), Number: uint16(lun.Number()), Reason: text, DeviceType: uint8(scsi.TypeNone), Changed: text})
	}
	return list
}

// sameUnits compares lists of units.
func sameUnits(a, b []ipc.Unit) bool {
	if len(a) != len(b) {
		return false
	}
	m := make(map[uint64]ipc.Unit, len(a))
	for _, u := range a {
		m[u.LUN] = u
	}
	for _, u := range b {
		if old, ok := m[u.LUN]; !ok || old != u {
			return false
		}
	}
	return true
}

// rescan asks a target for its units because the control plane wants to know.
func (p *Plane) rescan(ctx context.Context, id string) (*ipc.Group, error) {
	p.mu.Lock()
	g := p.groups[id]
	p.mu.Unlock()
	if g == nil {
		return nil, &ipc.Error{Code: api.ErrSessionNotFound, Text: fmt.Sprintf("session group %q does not exist", id)}
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	if err := g.look(ctx); err != nil {
		if errors.Is(err, errNoSession) {
			return nil, &ipc.Error{Code: api.ErrConnectionFailed, Text: fmt.Sprintf("rescan %s: %v; it is being brought back", g.request.Target, err)}
		}
		return nil, classify(fmt.Errorf("rescan %s: %w", g.request.Target, err))
	}
	return g.snapshot(), nil
}

// logger names the target.
func (g *group) logger() *logrus.Entry {
	return g.plane.log.WithField("target", g.request.Target).WithField("portal", g.request.Portal)
}

// logger names the device and its unit.
func (d *device) logger() *logrus.Entry {
	return d.group.logger().WithField("dev", d.id).WithField("lun", d.lun.String())
}
