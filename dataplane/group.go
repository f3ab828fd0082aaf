package dataplane

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/lu"
)

// group is a session group: the sessions of this initiator with one portal of one target, one on each reactor, and the logical units that
// they reach.
type group struct {
	plane   *Plane
	request ipc.LoginRequest
	paths   []*path
	units   []*lu.Unit

	ctx    context.Context // ends with the group
	cancel context.CancelFunc
	tasks  sync.WaitGroup // recovery goroutines

	mu        sync.Mutex // guards what follows, and path.info and path.down
	transport ipc.Transport
	reason    string
	tpgt      uint16
	state     string
	since     time.Time
	err       error
	failed    int // paths without a session
	devices   int
}

// replacementTimeout is how long requests wait for a lost session to come back before they fail.
const replacementTimeout = 30 * time.Second

// newGroup logs in on every reactor and asks for the units. On an error nothing is left behind.
func (p *Plane) newGroup(ctx context.Context, request ipc.LoginRequest) (*group, error) {
	g := &group{plane: p, request: request, state: ipc.GroupUp, since: time.Now(), transport: request.Transport}
	g.ctx, g.cancel = context.WithCancel(p.ctx)
	for _, r := range p.reactors {
		g.paths = append(g.paths, &path{group: g, reactor: r})
	}
	whole := false
	defer func() {
		if !whole { // also after a panic over what the target has sent
			g.end(ctx)
		}
	}()
	if err := g.login(ctx); err != nil {
		return nil, err
	}
	exec := executor{g.paths[0]}
	limit := 0
	g.paths[0].reactor.Call(func() {
		if s := g.paths[0].session; s != nil {
			limit = s.MaxTransfer()
		}
	})
	units, err := lu.ProbeAll(ctx, exec, min(limit, mempool.MaxBlock))
	if err != nil {
		return nil, fmt.Errorf("logical units of %s: %w", request.Target, err)
	}
	g.units, whole = units, true
	return g, nil
}

// login brings every path up; the first decides about the transport.
func (g *group) login(ctx context.Context) error {
	if err := g.chooseTransport(ctx); err != nil {
		return err
	}
	for _, p := range g.paths[1:] {
		if err := p.firstLogin(ctx); err != nil {
			return fmt.Errorf("session %d of %d: %w", p.reactor.index+1, len(g.paths), err)
		}
	}
	return nil
}

// chooseTransport logs the first path in. If the choice is ours, iSER comes first and TCP is taken when there is no way to reach the portal
// over RDMA; a target that was reached and refused the login is not asked again.
func (g *group) chooseTransport(ctx context.Context) error {
	switch g.request.Transport {
	case ipc.TransportISER, ipc.TransportTCP:
		g.reason = fmt.Sprintf("%s was asked for", g.request.Transport)
		return g.paths[0].firstLogin(ctx)
	}
	g.transport = ipc.TransportISER
	// The attempt may not use up the time of the whole login: a portal that drops RDMA requests never answers.
	try, cancel := context.WithTimeout(ctx, g.request.Timeout/3)
	err := g.paths[0].firstLogin(try)
	cancel()
	if err == nil {
		g.reason = "the portal answers over RDMA"
		return nil
	}
	if refusedByTarget(err) || ctx.Err() != nil {
		return err
	}
	g.transport = ipc.TransportTCP
	if tcpErr := g.paths[0].firstLogin(ctx); tcpErr != nil {
		return fmt.Errorf("%w (and over RDMA before: %v)", tcpErr, err)
	}
	g.reason = "fell back to TCP: " + err.Error()
	return nil
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
	go func() {
		defer g.tasks.Done()
		p.runRecovery(lived)
	}()
	g.plane.log.WithField("target", g.request.Target).WithField("portal", g.request.Portal).WithField("session", p.reactor.index).
		WithError(err).Warn("session lost; logging in again")
	g.plane.notifyGroup(g)
}

// Pauses between the attempts to log in again. A session that ends soon after it began makes the next pause longer too, so that a target that
// takes a login and drops it is not stormed.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
	shortLife  = 10 * time.Second
)

// runRecovery logs the path in again, for ever, until the group ends. Requests wait for replacementTimeout, then they fail. lived is how long
// the lost session was there.
func (p *path) runRecovery(lived time.Duration) {
	g := p.group
	log := g.plane.log.WithField("target", g.request.Target).WithField("portal", g.request.Portal).WithField("session", p.reactor.index)
	back := false // guarded by g.mu
	expire := time.AfterFunc(replacementTimeout, func() {
		g.mu.Lock()
		late := back
		if !late {
			g.state = ipc.GroupFailed
		}
		g.mu.Unlock()
		if late {
			return
		}
		p.reactor.Do(func() {
			if p.session == nil {
				p.fail()
			}
		})
		log.Error("no session within the replacement timeout: requests fail from now on")
		g.plane.notifyGroup(g)
	})
	defer expire.Stop()
	if lived >= shortLife {
		p.pause = 0
	}
	for {
		if p.pause > 0 {
			select {
			case <-time.After(p.pause):
			case <-g.ctx.Done():
				return
			}
		}
		p.pause = min(max(2*p.pause, firstPause), lastPause)
		ctx, cancel := context.WithTimeout(g.ctx, loginTimeout)
		err := p.login(ctx)
		cancel()
		if err == nil {
			break
		}
		log.WithError(err).Debug("login attempt failed")
		g.mu.Lock()
		g.err = err
		g.mu.Unlock()
		if g.ctx.Err() != nil {
			return
		}
	}
	g.mu.Lock()
	back = true
	g.failed--
	if g.failed == 0 {
		g.state, g.since, g.err = ipc.GroupUp, time.Now(), nil
	}
	g.mu.Unlock()
	log.Info("session is back")
	g.plane.notifyGroup(g)
}

// loginTimeout bounds one attempt to bring a session back.
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

// unit finds a logical unit of the group.
func (g *group) unit(lun uint64) *lu.Unit {
	for _, u := range g.units {
		if uint64(u.LUN) == lun {
			return u
		}
	}
	return nil
}
