package dataplane

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// group is a session group: the sessions of this initiator with one portal of one target, one on each reactor, and the logical units that
// they reach.
type group struct {
	plane   *Plane
	request ipc.LoginRequest
	paths   []*path

	fanned  bool // there are several paths on each reactor, see fan.go
	several bool // there are routes to several portals

	inherited []scsi.LUN // units that had devices in an earlier data plane
	back      backOff    // of runReturn, of which there is one at a time

	ctx    context.Context // ends with the group
	cancel context.CancelFunc
	tasks  sync.WaitGroup // recovery goroutines, and the one that watches the units

	notices notices
	looking sync.Mutex // held while the target is asked for its units

	mu        sync.Mutex    // guards what follows, and path.info and path.down
	transport ipc.Transport // of the first route
	routes    []ipc.Route   // in the order of preference; they do not change
	returning bool          // runReturn is at work
	reason    string
	tpgt      uint16
	movedTo   string // portal to which the target has moved for good; "" if it has not
	state     string
	since     time.Time
	err       error
	failed    int               // paths without a session
	units     []*lu.Unit        // replaced, never changed
	unlooked  map[scsi.LUN]bool // what units says of these was found wrong, and the target has not been asked yet
	devices   int

	ports      map[reach]uint16 // target port groups by which units are reached: see access.go
	ends       map[end]uint16   // likewise, by route
	states     map[scsi.LUN][]scsi.TargetPortGroup
	debts      debts                     // what lost sessions may still change: see fence.go
	registered map[scsi.LUN]registration // persistent reservations: the keys that the sessions are registered with
	reserving  sync.Mutex                // held while one of them changes
}

// replacementTimeout is how long requests wait for a lost session to come back before they fail, unless the setting says otherwise.
const replacementTimeout = 30 * time.Second

// newGroup logs in on every reactor and asks for the units. On an error nothing is left behind.
func (p *Plane) newGroup(ctx context.Context, request ipc.LoginRequest) (*group, error) {
	g := p.emptyGroup(request)
	whole := false
	defer func() {
		if !whole { // also after a panic over what the target has sent
			g.end(ctx)
		}
	}()
	if err := g.login(ctx); err != nil {
		return nil, err
	}
	units, err := g.probe(ctx)
	if err != nil {
		return nil, fmt.Errorf("logical units of %s: %w", request.Target, err)
	}
	g.mu.Lock()
	g.units, whole = units, true
	g.mu.Unlock()
	g.tasks.Add(1)
	go g.runWatch()
	return g, nil
}

// login brings every path up; the first decides about the transport.
func (g *group) login(ctx context.Context) error {
	if err := g.chooseTransport(ctx); err != nil {
		return err
	}
	g.plan()
	n := len(g.plane.reactors)
	for _, p := range g.paths[1:n] {
		if err := p.firstLogin(ctx, p.attempt); err != nil {
			return fmt.Errorf("session %d of %d: %w", p.index+1, len(g.paths), err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	var work errgroup.Group
	for _, p := range g.paths[n:] { // the first portal does for a beginning
		work.Go(func() error {
			if err := p.attempt(ctx); err != nil {
				g.beginLate(p, err)
			}
			return nil
		})
	}
	return work.Wait()
}

// beginLate makes a path that could not log in one whose session was lost.
func (g *group) beginLate(p *path, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx.Err() != nil {
		return
	}
	g.log(p).WithError(err).Warn("no session by this portal yet")
	p.info = ipc.Session{Reactor: p.reactor.index, State: "FAILED", Negotiated: map[string]string{}}
	g.failed++
	g.state, g.err = ipc.GroupRecovering, err
	g.tasks.Add(1)
	go func() {
		defer g.tasks.Done()
		p.runRecovery(0, 0)
	}()
}

// probe asks for the units. If the target ports by which all sessions reach some are shut for them, the other portals are tried.
func (g *group) probe(ctx context.Context) (best []*lu.Unit, err error) {
	exec, limit, err := g.asker()
	if err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		units, err := lu.ProbeAll(ctx, exec, limit)
		if err != nil {
			return nil, err
		}
		if best == nil || shutOut(units) < shutOut(best) {
			best = units
		}
		if shutOut(best) == 0 || g.fanned || !g.several || try+1 >= len(g.routes) {
			return best, nil
		}
		for _, p := range g.paths {
			g.mu.Lock()
			p.home = p.after(p.at)
			g.mu.Unlock()
			p.leaveRoute()
		}
		exec = executor{p: g.paths[0]} // waits for its session
	}
}

// chooseTransport logs the first path in. If the choice is ours, iSER comes first and TCP is taken when there is no way to reach the portal
// over RDMA; a target that was reached and refused the login is not asked again.
func (g *group) chooseTransport(ctx context.Context) error {
	switch g.request.Transport {
	case ipc.TransportISER, ipc.TransportTCP:
		g.reason = fmt.Sprintf("%s was asked for", g.request.Transport)
		return g.paths[0].firstLogin(ctx, g.first)
	}
	g.transport = ipc.TransportISER
	// The attempt may not use up the time of the whole login: a portal that drops RDMA requests never answers.
	try, cancel := context.WithTimeout(ctx, g.request.Timeout/3)
	err := g.paths[0].firstLogin(try, g.first)
	cancel()
	if err == nil {
		g.reason = "the portal answers over RDMA"
		return nil
	}
	if refusedByTarget(err) || ctx.Err() != nil {
		return err
	}
	g.transport = ipc.TransportTCP
	if tcpErr := g.paths[0].firstLogin(ctx, g.first); tcpErr != nil {
		return fmt.Errorf("%w (and over RDMA before: %v)", tcpErr, err)
	}
	g.reason = "fell back to TCP: " + err.Error()
	return nil
}

// first logs the first path in where the group is to begin.
func (g *group) first(ctx context.Context) error {
	return g.paths[0].login(ctx, ipc.Route{Portal: g.request.Portal, Transport: g.transport})
}

// sessionEnded notes the end of a path's session and brings it back unless it was asked to end.
func (g *group) sessionEnded(p *path, err error) {
	g.mu.Lock()
	p.info.State = iscsi.StateFree.String()
	if err == nil || errors.Is(err, errLoggedOut) || g.ctx.Err() != nil {
		g.mu.Unlock()
		return
	}
	p.info.State = "FAILED"
	g.failed++
	if g.state == ipc.GroupUp {
		g.state, g.since = ipc.GroupRecovering, time.Now()
	}
	g.err = err
	lived := time.Since(p.since)
	g.tasks.Add(1)
	g.mu.Unlock()
	var end *iscsi.TargetEndError
	stay := time.Duration(0)
	if errors.As(err, &end) {
		stay = min(end.Time2Wait, replacementTimeout)
	}
	if errors.Is(err, errReturn) {
		g.log(p).WithError(err).Info("session goes back")
	} else {
		g.log(p).WithError(err).Warn("session lost; logging in again")
	}
	g.plane.notifyGroup(g) // before a recovery that is quick
	go func() {
		defer g.tasks.Done()
		p.runRecovery(lived, stay)
	}()
}

// Pauses between the attempts to log in again. The first is made at once; but a target that takes a login and drops it, again and again, is left alone
// for longer each time. One that is away is asked often, for requests wait for it: all sessions together ask a hundred times a second at most.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second // behind a short life, or with very many sessions
	shortLife  = 10 * time.Second
	eachPause  = 10 * time.Millisecond // times the number of sessions
)

// connectAgain bounds how long a connection request over TCP is waited for when a session is brought back. The kernel repeats it after 1, 3, 7 s and so on;
// this is sooner when the network comes back in between.
const connectAgain = 2 * time.Second

// log is the log with what names a session.
func (g *group) log(p *path) *logrus.Entry {
	return g.plane.log.WithField("target", g.request.Target).WithField("portal", g.request.Portal).WithField("session", p.index)
}

// runRecovery logs the path in again, for ever, until the group ends. Requests wait for the replacement timeout, then they fail. lived is how long
// the lost session was there, stay how long the target wants not to be asked (RFC 7143 section 7.5.2).
func (p *path) runRecovery(lived, stay time.Duration) {
	g := p.group
	log := g.log(p)
	back := false // guarded by g.mu
	loss := 0
	p.reactor.Call(func() { loss = p.losses })
	expire := afterSetting(g.request.Settings.ReplacementTimeout, replacementTimeout, func() {
		g.mu.Lock()
		late := back
		if !late && !g.whollyServedLocked() {
			g.state = ipc.GroupFailed
		}
		g.mu.Unlock()
		if late {
			return
		}
		p.fenceOff(g.ctx)
		p.reactor.Do(func() {
			g.mu.Lock()
			late := back // while units were being reset
			g.mu.Unlock()
			if !late && p.session == nil && p.losses == loss {
				p.fail()
			}
		})
		if g.ctx.Err() != nil {
			return
		}
		log.Error("no session within the replacement timeout: requests fail from now on")
		g.plane.notifyGroup(g)
	})
	defer expire()
	if g.fanned {
		stop, over := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(over)
			p.runHandOver(stop)
		}()
		defer func() { close(stop); <-over }()
	}
	if lived >= shortLife {
		p.shun = 0
	}
	wait := max(p.shun, stay)
	p.shun = min(max(2*p.shun, firstPause), lastPause)
	limit := min(lastPause, max(2*firstPause, time.Duration(len(g.paths))*eachPause))
	for pause := firstPause; ; pause = min(2*pause, limit) {
		if wait > 0 {
			select {
			case <-time.After(wait):
			case <-g.ctx.Done():
				return
			}
		}
		wait = pause
		err := p.attempt(g.ctx)
		if err == nil {
			break
		}
		log.WithError(err).Debug("login attempt failed")
		g.mu.Lock()
		news := g.err == nil || g.err.Error() != err.Error()
		g.err = err
		g.mu.Unlock()
		if g.ctx.Err() != nil {
			return
		}
		if news {
			g.plane.notifyGroup(g) // why it is not back yet, which need not be why it was lost
		}
	}
	g.mu.Lock()
	back = true
	g.failed--
	whole := g.failed == 0
	switch {
	case whole:
		g.state, g.since, g.err = ipc.GroupUp, time.Now(), nil
	case g.state == ipc.GroupFailed && g.whollyServedLocked():
		g.state = ipc.GroupRecovering
	}
	g.mu.Unlock()
	if whole {
		g.notices.hurry() // much may have changed while nobody could tell us
	}
	log.Info("session is back")
	g.plane.notifyGroup(g)
}

// whollyServedLocked tells whether every reactor has a session in spite of those that are lost. Preconditions: g.mu is held.
func (g *group) whollyServedLocked() bool {
	if !g.fanned {
		return false
	}
	up := map[*Reactor]bool{}
	for _, p := range g.paths {
		if p.info.State == iscsi.StateLoggedIn.String() {
			up[p.reactor] = true
		}
	}
	return len(up) == len(g.plane.reactors)
}

// loginTimeout bounds one attempt to bring a session back, unless the setting says otherwise.
const loginTimeout = 15 * time.Second

// end logs every path out. What goes wrong is returned, but nothing stays.
func (g *group) end(ctx context.Context) error {
	g.mu.Lock()
	g.cancel() // under the lock, so that no recovery starts after the wait has begun
	g.mu.Unlock()
	g.tasks.Wait()
	var first error
	for _, p := range g.paths {
		if err := p.logout(ctx); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// unit finds a logical unit of the group. One of which it is only known that it is not what it was is not found.
func (g *group) unit(lun uint64) *lu.Unit {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, u := range g.units {
		if uint64(u.LUN) == lun && !g.unlooked[u.LUN] {
			return u
		}
	}
	return nil
}
