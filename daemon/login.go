package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/records"
	"iserd.org/iserd/internal/ipc"
)

// candidate is one way to reach a target.
type candidate struct {
	key       records.Key
	transport string
	settings  api.Settings
	at        api.Portal // where to ask: the key's portal, or the one to which the target has moved
}

// Login makes a session group with a target and a block device for each usable unit. A failure of any kind leaves nothing behind, except
// that one unit's device which cannot be made does not undo those of the other units: the unit's Reason tells.
//
// Without a portal the stored records of the target are tried one after the other, those that discovery saw over RDMA first, until one
// answers. A target that is logged in is AlreadyLoggedIn, through whatever portal: two block devices for one unit would not see each
// other's writes in the page cache.
func (s *Service) Login(ctx context.Context, r api.LoginRequest) (api.LoginReply, error) {
	cands, err := s.candidates(r)
	if err != nil {
		return api.LoginReply{}, err
	}
	// What cannot work is said before a target is bothered.
	if _, err := s.features(ctx); err != nil {
		return api.LoginReply{}, blockError(err)
	}
	unlock, err := s.targets.lock(ctx, r.Target, "a login")
	if err != nil {
		return api.LoginReply{}, api.Wrap(err, api.ErrTimeout, "login %s", r.Target)
	}
	defer unlock()
	if err := s.clearForLogin(ctx, r.Target); err != nil {
		return api.LoginReply{}, err
	}
	pc, err := s.plane.get(ctx)
	if err != nil {
		return api.LoginReply{}, err
	}
	if pc.hello.Reactors > records.MaxReactors {
		return api.LoginReply{}, api.Errorf(api.ErrLimitsExceeded, "the data plane has %d threads; %d sessions per target are possible", pc.hello.Reactors, records.MaxReactors)
	}
	var last error
	for i, c := range cands {
		timeout := r.Timeout.Duration()
		if timeout == 0 {
			timeout = api.SecondsOr(c.settings.LoginTimeout, s.Config().LoginTimeout)
		}
		reply, err := s.loginOne(ctx, pc, c, s.others(c, cands), timeout)
		if err == nil {
			return reply, nil
		}
		if i > 0 {
			err = api.Wrap(err, api.ErrInternal, "%s; then", oneLine(last))
		}
		last = err
		// Another portal helps when this one could not be reached; a target that refused will refuse again.
		if n := api.NameOf(err); ctx.Err() != nil || n != api.ErrConnectionFailed && n != api.ErrTimeout && n != api.ErrTransportUnavailable {
			break
		}
	}
	return api.LoginReply{}, last
}

// candidates checks a request and lists the portals to try.
func (s *Service) candidates(r api.LoginRequest) ([]candidate, error) {
	if err := api.CheckName(r.Target); err != nil {
		return nil, err
	}
	asked := r.Transport
	transport, err := api.CheckTransport(r.Transport)
	if err != nil {
		return nil, err
	}
	list, err := s.match(api.NodeFilter{Target: r.Target, Portal: r.Portal})
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		if r.Portal == "" {
			return nil, api.Errorf(api.ErrNotFound, "no record of %s; give --portal, or store what a portal offers: iserctl discover ADDR --save", r.Target)
		}
		p, err := api.ParsePortal(r.Portal)
		if err != nil {
			return nil, err
		}
		return []candidate{{key: records.MakeKey(r.Target, p), transport: transport, at: p}}, nil
	}
	var out []candidate
	for _, n := range list {
		t := n.Settings.Transport
		if asked != "" {
			t = transport
		}
		if r.Portal == "" && t != api.TransportAuto && len(n.Found.Transports) > 0 && !slices.Contains(n.Found.Transports, t) && len(list) > 1 {
			continue // the target offers this portal, but not over that transport
		}
		c := candidate{key: n.Key, transport: t, settings: n.Settings.Settings, at: n.Portal()}
		if n.MovedTo != "" {
			moved := c
			if moved.at, err = api.ParsePortal(n.MovedTo); err == nil {
				out = append(out, moved)
			}
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, api.Errorf(api.ErrTransportUnavailable, "no portal of %s was seen over %s", r.Target, transport)
	}
	rank := make(map[string]int, len(list))
	for _, n := range list {
		v := 0
		if n.Found.Missing {
			v += 2
		}
		if !slices.Contains(n.Found.Transports, api.TransportISER) {
			v++
		}
		rank[n.ID()] = v
	}
	slices.SortStableFunc(out, func(a, b candidate) int { return rank[a.key.ID()] - rank[b.key.ID()] })
	return out, nil
}

// clearForLogin makes sure that no session with the target is there. One that has failed is taken down if nobody uses its devices.
// Preconditions: the target's lock is held.
func (s *Service) clearForLogin(ctx context.Context, target string) error {
	s.mu.Lock()
	var found *session
	state, where, id := "", "", ""
	for g, ss := range s.sessions {
		if ss.group.Target == target {
			found, state, where, id = ss, ss.state, ss.group.Portal, g
		}
	}
	s.mu.Unlock()
	switch {
	case found == nil:
		return nil
	case state != api.SessionFailed:
		return api.Errorf(api.ErrAlreadyLoggedIn, "%s is already logged in at %s", target, where)
	}
	if _, err := s.end(ctx, id, false); err != nil {
		return api.Wrap(err, api.ErrInternal, "%s has a failed session that cannot be ended", target)
	}
	return nil
}

// loginOne tries one portal. Preconditions: the target's lock is held.
func (s *Service) loginOne(ctx context.Context, pc planeConn, c candidate, others []ipc.Route, timeout time.Duration) (api.LoginReply, error) {
	reply := api.LoginReply{Version: api.Version, Devices: []api.Device{}}
	id := c.key.ID()
	s.forgetAborted(id)
	isid, number, err := s.isids.Get(id)
	if err != nil {
		return reply, api.Errorf(api.ErrDatabase, "%w", err)
	}
	portal, err := resolve(ctx, c.at, timeout)
	if err != nil {
		return reply, err
	}
	req, err := s.loginRequest(pc, id, c.key.Target, &c.settings)
	if err != nil {
		return reply, err
	}
	req.Portal, req.Transport, req.Others, req.ISID, req.Timeout = portal.String(), ipc.Transport(c.transport), others, isid, timeout
	ss := &session{number: number, state: api.SessionLogin, devices: make(map[int]*device), reasons: make(map[uint64]string)}
	ss.group = ipc.Group{ID: id, Target: req.Target, Portal: req.Portal, TPGT: 0, Settings: c.settings}
	s.mu.Lock()
	s.sessions[id] = ss
	s.mu.Unlock()
	done := false
	defer func() {
		if done {
			return
		}
		// The data plane may have logged in although its answer did not come: take it back in any case.
		uctx, cancel := s.undo(ctx)
		defer cancel()
		err := pc.call(uctx, ipc.MethodLogout, ipc.LogoutRequest{Group: id}, nil)
		if err != nil && !api.Is(err, api.ErrSessionNotFound) && !api.Is(err, api.ErrNotFound) {
			s.log.WithError(err).WithField("target", req.Target).Error("logout after a failed login failed")
		}
		s.mu.Lock()
		if s.sessions[id] == ss {
			delete(s.sessions, id)
		}
		s.changedLocked()
		s.mu.Unlock()
	}()

	// The data plane keeps the time-out; the margin is for its answer.
	lctx, cancel := context.WithTimeout(ctx, timeout+5*time.Second)
	var g ipc.Group
	err = pc.call(lctx, ipc.MethodLogin, req, &g)
	cancel()
	if err != nil {
		return reply, s.explain(ctx, err, req.Target, portal, c)
	}
	s.mu.Lock()
	ss.group = g
	s.mu.Unlock()
	s.noteMove(id, c.at, g.MovedTo)
	log := s.log.WithFields(map[string]any{"target": g.Target, "portal": g.Portal})
	log.Infof("logged in over %s: %s", g.Transport, g.TransportReason)

	usable, err := s.serveUnits(ctx, pc, ss, g.Units)
	if err != nil {
		return reply, err
	}
	s.mu.Lock()
	if s.sessions[id] != ss {
		// The data plane that logged in has ended, and the next one has begun without this session.
		made := slices.Collect(maps.Values(ss.devices))
		s.mu.Unlock()
		for _, d := range made {
			s.stopAndRemove(ctx, pc, ss, d)
		}
		return reply, api.Errorf(api.ErrAgain, "login %s: the data plane ended meanwhile; try again", g.Target)
	}
	defer s.mu.Unlock()
	if usable > 0 && len(ss.devices) == 0 {
		var why []string
		for _, r := range ss.reasons {
			why = append(why, r)
		}
		slices.Sort(why)
		return reply, api.Errorf(api.ErrNotSupported, "login %s: no logical unit can be served: %s", g.Target, strings.Join(slices.Compact(why), "; "))
	}
	if usable == 0 {
		log.Warn("the target offers no logical unit that can be served")
	}
	done = true
	if ss.state == api.SessionLogin { // an event may have come meanwhile
		ss.state = api.SessionUp
		s.kickAllLocked()
		if ss.told {
			s.reconcileAnyhowLocked(ss)
		}
	}
	reply.Session = ss.show()
	for _, d := range ss.devices {
		reply.Devices = append(reply.Devices, d.show(ss))
	}
	slices.SortFunc(reply.Devices, func(a, b api.Device) int { return a.UblkID - b.UblkID })
	s.changedLocked()
	return reply, nil
}

// loginRequest fills in what the settings of a record say about its logins.
func (s *Service) loginRequest(pc planeConn, id, target string, set *api.Settings) (ipc.LoginRequest, error) {
	secrets, err := s.loginSecrets(id, set)
	if err != nil {
		return ipc.LoginRequest{}, api.Wrap(err, api.ErrDatabase, "login %s", target)
	}
	if names := set.Changed(&api.Settings{}); !pc.hello.Settings && len(names)+len(secrets.Names()) > 0 {
		return ipc.LoginRequest{}, api.Errorf(api.ErrNotSupported,
			"login %s: the data plane (pid %d, %s) is older than this daemon and does not know what is set (%s): log out everywhere, stop it, and log in again",
			target, pc.hello.PID, pc.hello.Build, strings.Join(append(names, secrets.Names()...), ", "))
	}
	return ipc.LoginRequest{
		Group: id, Target: target, InitiatorName: s.name, RequestTimeout: api.SecondsOr(set.RequestTimeout, s.Config().RequestTimeout),
		Settings: *set, Policy: cmp.Or(set.PathPolicy, api.PathFailover), Secret: secrets.Secret, TargetSecret: secrets.TargetSecret,
	}, nil
}

// others are the routes besides a candidate's by which its sessions may go: those of the candidates with the same settings. A secret belongs to a record, so
// where there is one the other portals must have it, too. A transport that was left open belongs to them: the next data plane is told only which was chosen.
func (s *Service) others(c candidate, all []candidate) []ipc.Route {
	routes := []ipc.Route{}
	if c.transport == api.TransportAuto {
		routes = append(routes, ipc.Route{Portal: c.at.String(), Transport: ipc.TransportAuto})
	}
	for _, o := range all {
		r := ipc.Route{Portal: o.at.String(), Transport: ipc.Transport(o.transport)}
		if o.at != c.at && len(c.settings.Changed(&o.settings)) == 0 && s.sameSecrets(c.key.ID(), o.key.ID()) && !slices.Contains(routes, r) {
			routes = append(routes, r)
		}
	}
	return routes
}

// sameSecrets tells whether two records have the same secrets for logins.
func (s *Service) sameSecrets(a, b string) bool {
	x, xerr := s.secrets.Get(a)
	y, yerr := s.secrets.Get(b)
	return xerr == nil && yerr == nil && x.Secret.Equal(y.Secret) && x.TargetSecret.Equal(y.TargetSecret)
}

// explain finds out whether a login failed because there is no such target: some targets say no more than "service unavailable" then (LIO:
// status 03/01), and trying again would not help. The portal itself knows; if it does not say, err stays as it is.
func (s *Service) explain(ctx context.Context, err error, target string, portal api.Portal, c candidate) error {
	if !api.Is(err, api.ErrLoginFailed) {
		return err
	}
	timeout := min(s.Config().DiscoveryTimeout, 5*time.Second)
	r, derr := s.discover(ctx, api.DiscoverRequest{Portal: portal.String(), Transport: c.transport, Timeout: api.Seconds(timeout.Seconds())}, binding(c.settings))
	if derr != nil || slices.ContainsFunc(r.Targets, func(t api.Target) bool { return t.Target == target }) {
		return err
	}
	return api.Errorf(api.ErrNotFound, "%s offers no target %s to this initiator (%w)", portal, target, err)
}

// serveUnits makes a device for each usable unit that has none. It returns how many are usable. The error is the context's: then what was
// made is taken away again. Preconditions: the target's lock is held.
func (s *Service) serveUnits(ctx context.Context, pc planeConn, ss *session, units []ipc.Unit) (usable int, err error) {
	served := make(map[uint64]bool)
	s.mu.Lock()
	for _, d := range ss.devices {
		served[d.Unit.LUN] = true
	}
	for _, u := range units {
		if s.aborted[unitKey{ss.group.ID, u.LUN}] && u.Usable && !served[u.LUN] {
			served[u.LUN] = true
			ss.reasons[u.LUN] = abortedReason
		}
	}
	g := ss.group
	s.mu.Unlock()
	// The devices get their numbers in the order of the units; everything after that is done for several at a time.
	made := make([]*device, len(units))
	var work errgroup.Group
	work.SetLimit(atOnce)
	for i := range units {
		u := &units[i]
		if !u.Usable {
			continue
		}
		usable++
		if served[u.LUN] || ctx.Err() != nil {
			continue
		}
		numbered := make(chan struct{})
		work.Go(func() error {
			d, err := s.serve(ctx, pc, &g, u, sync.OnceFunc(func() { close(numbered) }))
			made[i] = d
			if ctx.Err() == nil {
				s.served(ss, u, d, err)
			}
			return nil
		})
		<-numbered
	}
	_ = work.Wait()
	if ctx.Err() != nil {
		for _, d := range made {
			if d != nil {
				work.Go(func() error {
					s.stopAndRemove(ctx, pc, ss, d)
					return nil
				})
			}
		}
		_ = work.Wait()
		return usable, api.Wrap(ctx.Err(), api.ErrCancelled, "login %s", g.Target)
	}
	return usable, nil
}

// atOnce is how many devices are made or taken apart at a time. Each waits for the kernel most of the time, for grace periods above all.
const atOnce = 8

// served notes what became of a unit.
func (s *Service) served(ss *session, u *ipc.Unit, d *device, err error) {
	s.mu.Lock()
	if err != nil {
		ss.reasons[u.LUN] = oneLine(err)
		if api.Is(err, api.ErrAgain) {
			time.AfterFunc(retryAfter, func() { s.serveAgain(ss, u.LUN) })
		}
	} else {
		delete(ss.reasons, u.LUN)
		ss.devices[d.UblkID] = d
		d.memory.phase = phaseLive
		s.kickLocked(d.memory)
	}
	s.changedLocked()
	target := ss.group.Target
	s.mu.Unlock()
	if err != nil {
		s.log.WithError(err).WithFields(map[string]any{"target": target, "lun": u.Number}).Error("logical unit cannot be served")
	}
}

// serveAgain tries a unit again that was not what it was taken for.
func (s *Service) serveAgain(ss *session, lun uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[ss.group.ID] == ss {
		delete(ss.reasons, lun)
		s.reconcileSoonLocked(ss)
	}
}

// stopAndRemove takes back a device that was made a moment ago.
func (s *Service) stopAndRemove(ctx context.Context, pc planeConn, ss *session, d *device) {
	ctx, cancel := s.undo(ctx)
	defer cancel()
	if b, err := s.control(); err == nil {
		s.logged(s.run(ctx, func(ctx context.Context) error { return b.Stop(ctx, d.UblkID) }), d.UblkID, "stop")
	}
	s.logged(s.remove(ctx, pc, d), d.UblkID, "remove")
	s.mu.Lock()
	delete(ss.devices, d.UblkID)
	s.changedLocked()
	s.mu.Unlock()
}

// resolve turns a host name into an address; the data plane knows only addresses.
func resolve(ctx context.Context, p api.Portal, timeout time.Duration) (api.Portal, error) {
	if _, err := netip.ParseAddr(p.Address); err == nil {
		return p, nil
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", p.Address)
	if err != nil || len(addrs) == 0 {
		if err == nil {
			err = fmt.Errorf("no address")
		}
		return p, api.Errorf(api.ErrConnectionFailed, "look up %s: %w", p.Address, err)
	}
	p.Address = addrs[0].Unmap().String()
	return p, nil
}
