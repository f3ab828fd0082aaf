package dataplane

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iser"
	"iserd.org/iserd/scsi"
)

// A path has its session by one route at a time: a portal of the target with a transport. When the session is lost and does not come back by its route
// the others are tried, in the order of preference; when a route that is preferred answers again the session goes back. A session takes its ISID along, so
// that behind a portal of the same portal group it reinstates the one before; behind another group the units are reset first (fence.go). In both cases
// nothing that was sent by the old route is at work when requests are sent again by the new one.

// plan sets the routes of a group and where its paths begin. Preconditions: the first route's transport is known.
func (g *group) plan() {
	first := ipc.Route{Portal: g.request.Portal, Transport: g.transport}
	routes := []ipc.Route{first}
	add := func(r ipc.Route) {
		if !slices.Contains(routes, r) {
			routes = append(routes, r)
		}
	}
	// A transport that was left to us is iSER wherever that is possible, and TCP when nothing else is left.
	for _, t := range []ipc.Transport{g.transport, ipc.TransportISER, ipc.TransportTCP} {
		for _, o := range append([]ipc.Route{{Portal: g.request.Portal, Transport: g.request.Transport}}, g.request.Others...) {
			if o.Transport == t || o.Transport == ipc.TransportAuto || o.Transport == "" {
				add(ipc.Route{Portal: o.Portal, Transport: t})
			}
		}
	}
	policy := g.request.Policy
	if policy == "" || policy == api.PathSingle {
		routes = routes[:1]
	}
	equal := 1 // routes that are as good as the first
	for equal < len(routes) && routes[equal].Transport == first.Transport {
		equal++
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.routes = routes
	g.several = slices.ContainsFunc(routes, func(r ipc.Route) bool { return r.Portal != first.Portal })
	if policy == api.PathRoundRobin || policy == api.PathLeastQueued {
		n := len(g.paths)
		for j := 1; j < equal && (j+1)*n <= maxSessions; j++ {
			for _, p := range g.paths[:n] {
				g.paths = append(g.paths, &path{group: g, reactor: p.reactor, access: map[scsi.LUN]access{}, index: len(g.paths), home: j})
			}
		}
		g.fanned = len(g.paths) > n
	}
	for i, p := range g.paths {
		if policy == api.PathSpread {
			p.home = i % equal
		}
		p.at = p.home
		for k := range routes {
			c := (p.home + k) % len(routes)
			if own := c == p.home || c >= equal && routes[c].Portal == routes[p.home].Portal; own || !g.fanned { // the others have paths of their own
				p.choices = append(p.choices, c)
			}
		}
	}
}

// maxSessions is how many ISIDs a group owns, see [ipc.LoginRequest].
const maxSessions = 64

// after is the route to try after one. Preconditions: g.mu is held, or nothing else runs.
func (p *path) after(i int) int { return p.choices[(slices.Index(p.choices, i)+1)%len(p.choices)] }

// attemptTimeout bounds an attempt to bring a session back by one route while there are others.
const attemptTimeout = 4 * time.Second

// errNoRoute is for a session that is lost before the first login of its group is over.
var errNoRoute = errors.New("the group is being made")

// attempt logs in by the routes, beginning with the one at which the path is, until one answers.
func (p *path) attempt(ctx context.Context) (err error) {
	g := p.group
	g.mu.Lock()
	routes, i, back := g.routes, p.at, p.last.there
	g.mu.Unlock()
	if len(routes) == 0 {
		return errNoRoute
	}
	limit := api.SecondsOr(g.request.Settings.LoginTimeout, loginTimeout)
	if len(p.choices) > 1 && back {
		limit = min(limit, attemptTimeout)
	}
	for k := range p.choices {
		if k > 0 {
			i = p.after(i)
		}
		g.mu.Lock()
		p.by = i
		g.mu.Unlock()
		tctx, cancel := context.WithTimeout(ctx, limit)
		e := p.login(tctx, routes[i])
		cancel()
		if e == nil {
			p.arrived(i)
			return nil
		}
		if k > 0 {
			e = errors.Join(err, e)
		}
		if err = e; ctx.Err() != nil {
			break
		}
	}
	return err
}

// arrived notes by which route a path has its session.
func (p *path) arrived(i int) {
	g := p.group
	g.mu.Lock()
	r, from := g.routes[i], g.routes[p.at]
	moved, away := i != p.at, i != p.home
	p.at = i
	start := away && !g.returning
	g.returning = g.returning || away
	if start {
		g.tasks.Add(1)
	}
	g.mu.Unlock()
	p.reactor.Call(func() {
		for _, q := range p.queues {
			q.Carry(r.Transport == ipc.TransportTCP)
		}
	})
	if moved {
		g.log(p).Warnf("session goes by %s over %s now, instead of %s over %s", r.Portal, r.Transport, from.Portal, from.Transport)
	}
	if start {
		go g.runReturn()
	}
}

// Pauses between looks at whether a preferred route answers again. One that does not makes the next look come later; a return that fails, or does not last,
// much later.
const (
	firstReturn = 5 * time.Second
	lastProbe   = 30 * time.Second
	lastReturn  = 5 * time.Minute
	probeLimit  = 3 * time.Second
)

// errReturn ends a session that is to go by another route and has nothing under way, errLeave one that has.
var (
	errReturn = errors.New("the session goes by another portal")
	errLeave  = fmt.Errorf("%w, although requests are under way", iscsi.ErrSessionLost)
)

// backOff is the pause before the next look of a group.
type backOff struct {
	probe   time.Duration // as long as nothing answers
	settle  time.Duration // after a return; 0 before the first
	arrived time.Time     // when sessions were sent back the last time
}

// pause is how long to wait now.
func (b *backOff) pause(now time.Time) time.Duration {
	return max(b.probe, b.settle-now.Sub(b.arrived))
}

// silent notes that no preferred route has answered.
func (b *backOff) silent() { b.probe = min(2*b.probe, lastProbe) }

// returned notes that sessions were sent back. It is told a return that lasted from one that did not by when there is one again.
func (b *backOff) returned(now time.Time, first time.Duration) {
	if b.settle == 0 || now.Sub(b.arrived) > 2*lastReturn {
		b.settle = first
	}
	b.probe, b.arrived, b.settle = first, now, min(2*b.settle, lastReturn)
}

// runReturn brings sessions back to the routes that they prefer, until all are there or the group ends.
func (g *group) runReturn() {
	defer g.tasks.Done()
	first := g.plane.patience.back
	g.back.probe = first // settle and arrived stay as the runs before have left them
	for {
		select {
		case <-time.After(g.back.pause(time.Now())):
		case <-g.ctx.Done():
			return
		}
		g.mu.Lock()
		var away []*path
		for _, p := range g.paths {
			if p.at != p.home {
				away = append(away, p)
			}
		}
		g.returning = len(away) > 0
		g.mu.Unlock()
		if len(away) == 0 {
			return
		}
		returned := false
		for _, p := range away {
			if p.answers(g.homeOf(p)) == nil {
				returned = p.leaveRoute() || returned
			}
		}
		if returned { // one whose login fails there is away again at the next look
			g.back.returned(time.Now(), first)
		} else {
			g.back.silent()
		}
	}
}

// homeOf is the route that a path prefers, where its portal is now.
func (g *group) homeOf(p *path) ipc.Route {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.routes[p.home]
	if r.Portal == g.request.Portal && g.movedTo != "" {
		r.Portal = g.movedTo
	}
	return r
}

// overTCP tells whether the path's session is, or was, over TCP. It may be called on the reactor.
func (p *path) overTCP() bool {
	g := p.group
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.routes[p.at].Transport == ipc.TransportTCP
}

// drainLimit is how long a session that is to go back may take to answer what it has.
const drainLimit = 2 * time.Second

// leaveRoute ends the path's session so that it is made again by the preferred route. What comes meanwhile waits, and what is under way is answered first:
// then nothing has to be repeated, and no unit reset. It returns false, and the session goes on, when that takes too long, or the group ends.
func (p *path) leaveRoute() bool {
	g := p.group
	var session *iscsi.Session
	p.reactor.Call(func() {
		session, p.session, p.draining = p.session, nil, p.session
		p.chosen()
	})
	if session == nil {
		return false // lost a moment ago
	}
	left := 0
	count := func() {
		if left = session.Queued(); session.State() != iscsi.StateLoggedIn {
			left = 0
		}
	}
	for end := time.Now().Add(drainLimit); ; time.Sleep(2 * time.Millisecond) {
		if p.reactor.Call(count); left == 0 || time.Now().After(end) || g.ctx.Err() != nil {
			break
		}
	}
	other := g.strangers()
	left = 0
	p.reactor.Call(func() {
		p.draining = nil
		switch left = session.Queued(); {
		case session.State() != iscsi.StateLoggedIn: // lost meanwhile
		case (left > 0 || g.ctx.Err() != nil) && g.settled(): // nobody asked it for a reset while it looked gone
			p.resume(session, other)
		default:
			g.mu.Lock()
			p.at = p.home // where the recovery begins
			g.mu.Unlock()
			if left > 0 {
				session.Terminate(errLeave)
			} else {
				session.Terminate(errReturn)
			}
		}
	})
	return left == 0 && g.ctx.Err() == nil
}

// answers tells whether a target is at the end of a route: a discovery session is made there. Less would not do: isert waits for the login of whoever
// connects, and listens to nobody else meanwhile.
func (p *path) answers(r ipc.Route) error {
	g := p.group
	ctx, cancel := context.WithTimeout(g.ctx, probeLimit)
	defer cancel()
	port, err := g.plane.open(ctx, p.reactor, r.Transport, r.Portal, settings.BindingOf(&g.request.Settings), 0)
	if err != nil {
		return err
	}
	defer port.Close()
	config := login.Config{InitiatorName: g.request.InitiatorName, SessionType: login.Discovery, Transport: login.TCP}
	if r.Transport == ipc.TransportISER {
		keys := login.DefaultKeys(login.ISER, login.Discovery)
		keys.MaxRecvDataSegmentLength = iser.LoginDataSegmentLength
		config.Transport, config.Keys = login.ISER, &keys
	}
	config.ISID[0] = 0x80 // a random one: it must not reinstate anything
	rand.Read(config.ISID[1:])
	result, err := iscsi.Login(ctx, port, config)
	var refused *login.LoginError
	if errors.As(err, &refused) && refused.Class == classInitiator {
		return nil // it is there, and wants more of whom it tells its names
	}
	if err == nil {
		_ = iscsi.NewExchange(port, result).Logout(ctx) // the target may end it in its own way
	}
	return err
}

// classInitiator is the status class of refusals that are about the initiator (RFC 7143 section 11.13.5).
const classInitiator = 2
