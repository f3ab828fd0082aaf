package daemon

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

// A target may change its logical units while it is logged in. The data plane finds out, and lets no request reach a unit that is not the one a device
// was made for; what is here makes the block devices follow: units that appear get one, units that are gone lose theirs when nobody uses it,
// units that have grown have theirs grown (grow.go).

// plan is what a device has to become.
type plan struct {
	reason string   // it is not to be served any more
	notes  []string // it cannot follow its unit
	grow   *ipc.Unit
}

// planLocked compares a device with its unit. Preconditions: s.mu is held.
func planLocked(d *device, units []ipc.Unit) (p plan) {
	i := slices.IndexFunc(units, func(u ipc.Unit) bool { return u.LUN == d.Unit.LUN })
	if i < 0 {
		p.reason = "the target has no unit under this number any more"
		return p
	}
	u := &units[i]
	if p.reason = u.Changed; p.reason != "" {
		return p
	}
	if u.Blocks == 0 || !u.Usable {
		return p // it did not answer: what is known stays
	}
	switch old := d.Unit.Blocks; {
	case u.Blocks > old && u.Blocks == d.stuck:
		p.notes = slices.DeleteFunc(slices.Clone(d.notes), func(n string) bool { return !strings.HasPrefix(n, notGrown(&d.Unit, u)) })
	case u.Blocks > old:
		p.grow = u
	case u.Blocks < old:
		p.notes = append(p.notes, fmt.Sprintf("the unit has shrunk from %d to %d bytes; the block device keeps its size, requests beyond the end of the unit fail",
			bytesOf(&d.Unit), bytesOf(u)))
	}
	switch {
	case u.ReadOnly && !d.Unit.ReadOnly:
		p.notes = append(p.notes, "the unit is write protected now: writes fail")
	case !u.ReadOnly && d.Unit.ReadOnly:
		p.notes = append(p.notes, "the unit is not write protected any more; log out and in to write to it")
	}
	return p
}

// differs tells whether a device is not yet what it has to become.
func (p *plan) differs(d *device) bool {
	return p.reason != d.reason || p.grow != nil || !slices.Equal(p.notes, d.notes)
}

// needsLocked tells whether the devices of a session have to follow its units. Preconditions: s.mu is held.
func (s *Service) needsLocked(ss *session) bool {
	if ss.state != api.SessionUp {
		return false
	}
	has := make(map[uint64]bool)
	for _, d := range ss.devices {
		if has[d.Unit.LUN] = true; d.state != api.DeviceLive && d.reason == "" {
			continue // it is being made or taken away
		}
		if p := planLocked(d, ss.group.Units); p.differs(d) {
			return true
		}
	}
	for _, u := range ss.group.Units {
		if u.Usable && u.Changed == "" && !has[u.LUN] && ss.reasons[u.LUN] == "" {
			return true
		}
	}
	return false
}

// reconcileSoonLocked makes the devices follow the units in the background, if they have to: the target's lock may be held. Preconditions: s.mu
// is held.
func (s *Service) reconcileSoonLocked(ss *session) {
	if s.needsLocked(ss) {
		s.reconcileAnyhowLocked(ss)
	}
}

// reconcileAnyhowLocked is reconcileSoonLocked when what is known of the units may be old. Preconditions: s.mu is held.
func (s *Service) reconcileAnyhowLocked(ss *session) {
	if ss.reconciling || s.life.Err() != nil {
		return
	}
	ss.reconciling = true
	s.jobs.Add(1)
	go func() {
		defer s.jobs.Done()
		s.mu.Lock()
		target, group := ss.group.Target, ss.group.ID
		s.mu.Unlock()
		unlock, err := s.targets.lock(s.life, target, "a look at its logical units")
		if err != nil {
			return
		}
		defer unlock()
		s.mu.Lock()
		ss.reconciling = false // events from here on begin another one
		current := s.sessions[group] == ss
		s.mu.Unlock()
		pc, err := s.plane.now()
		if err != nil || !current {
			return // whoever connects next does it
		}
		if _, err := s.reconcile(s.life, pc, ss); err != nil {
			s.log.WithError(err).WithField("target", target).Error("the block devices do not follow the target's units")
		}
	}()
}

// reconcile makes the devices of a session follow its units as they are known. Preconditions: the target's lock is held.
func (s *Service) reconcile(ctx context.Context, pc planeConn, ss *session) (api.RescanResult, error) {
	s.mu.Lock()
	r := api.RescanResult{SessionID: ss.number, Target: ss.group.Target, Added: []string{}, Removed: []string{}, Grown: []string{}, Problems: []string{}}
	up := ss.state == api.SessionUp
	s.mu.Unlock()
	if !up {
		return r, nil
	}
	units, err := s.unitsNow(ctx, pc, ss)
	if err != nil {
		return r, err
	}
	s.mu.Lock()
	var list []*device
	plans := make(map[*device]plan)
	before := make(map[int]bool)
	for _, d := range ss.devices {
		before[d.UblkID] = true
		if d.state == api.DeviceLive || d.reason != "" {
			list = append(list, d)
			plans[d] = planLocked(d, units)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b *device) int { return cmp.Compare(a.UblkID, b.UblkID) })
	for _, d := range list {
		p := plans[d]
		if p.reason != "" {
			if err := s.lose(ctx, pc, ss, d, p.reason); err != nil {
				r.Problems = append(r.Problems, oneLine(err))
			} else {
				r.Removed = append(r.Removed, d.path())
				units = s.forgive(ss, d.Unit.LUN)
				delete(before, d.UblkID)
			}
		} else {
			grown, notes := s.follow(ctx, ss, d, p)
			if grown {
				r.Grown = append(r.Grown, d.path())
			}
			for _, n := range notes {
				r.Problems = append(r.Problems, d.path()+": "+n)
			}
		}
	}
	_, err = s.serveUnits(ctx, pc, ss, units)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reconcileSoonLocked(ss) // what an event has said of a device that was being made
	var added []int
	for id := range ss.devices {
		if !before[id] {
			added = append(added, id)
		}
	}
	slices.Sort(added)
	for _, id := range added {
		r.Added = append(r.Added, devicePath(id))
	}
	for _, u := range units {
		if why := ss.reasons[u.LUN]; why != "" {
			r.Problems = append(r.Problems, fmt.Sprintf("logical unit %d: %s", u.Number, why))
		}
	}
	return r, err
}

// unitsNow are the units as the data plane knows them at this moment. What an event has said may be about a device that is gone meanwhile. Preconditions:
// the target's lock is held.
func (s *Service) unitsNow(ctx context.Context, pc planeConn, ss *session) ([]ipc.Unit, error) {
	sctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	var st ipc.State
	if err := pc.call(sctx, ipc.MethodState, ipc.Empty{}, &st); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range st.Groups {
		if g.ID == ss.group.ID {
			ss.group.Units = g.Units
		}
	}
	return ss.group.Units, nil
}

// forgive takes the mark off a unit whose device is gone, as the data plane does, and returns the units as they are known then. A unit that was listed
// for the sake of its device only is listed no more.
func (s *Service) forgive(ss *session, lun uint64) []ipc.Unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	units := slices.Clone(ss.group.Units)
	i := slices.IndexFunc(units, func(u ipc.Unit) bool { return u.LUN == lun })
	switch {
	case i < 0:
	case !units[i].Usable && units[i].Reason == units[i].Changed:
		units = slices.Delete(units, i, i+1)
	default:
		units[i].Changed = ""
	}
	ss.group.Units = units
	delete(ss.reasons, lun)
	return units
}

// lose takes away a device whose unit is gone. One that is in use stays, dead, and the error names the holders.
func (s *Service) lose(ctx context.Context, pc planeConn, ss *session, d *device, reason string) error {
	log := s.log.WithFields(map[string]any{"dev": d.path(), "target": d.Target, "lun": d.Unit.Number})
	err := s.checkHolders([]*device{d}, false)
	if err == nil {
		var b Blocks
		if b, err = s.control(); err == nil {
			_, err = s.takeApart(ctx, pc, b, ss, []*device{d}, false)
		}
	}
	if err == nil {
		log.Warnf("removed: %s", reason)
		return nil
	}
	x := *d
	x.state, x.reason, x.notes = api.DeviceDead, reason, nil
	if s.replaceDevice(ss, d, &x) && d.reason != reason {
		log.WithError(err).Errorf("every request fails: %s", reason)
	}
	return api.Wrap(err, api.ErrBusy, "%s: %s", d.path(), reason)
}

// follow lets a device be what its unit has become. notes are what it cannot follow.
func (s *Service) follow(ctx context.Context, ss *session, d *device, p plan) (grown bool, notes []string) {
	log := s.log.WithFields(map[string]any{"dev": d.path(), "target": d.Target, "lun": d.Unit.Number})
	x := *d
	x.reason, x.notes = "", p.notes
	if d.reason != "" {
		x.state = api.DeviceLive
	}
	if p.grow != nil {
		record, err := s.grow(ctx, d, p.grow)
		if grown = err == nil; grown {
			x.deviceRecord = record
		} else {
			x.stuck = p.grow.Blocks
			x.notes = append(x.notes, notGrown(&d.Unit, p.grow)+": "+oneLine(err))
		}
	}
	if (p.differs(d) || grown) && s.replaceDevice(ss, d, &x) {
		if d.reason != "" {
			log.Info("the unit is back; requests go there again")
		}
		if grown {
			log.Infof("grown from %d to %d bytes", bytesOf(&d.Unit), bytesOf(&x.Unit))
		}
		for _, n := range x.notes {
			if !slices.Contains(d.notes, n) {
				log.Error(n)
			}
		}
	}
	return grown, x.notes
}

// notGrown tells of a device that is smaller than its unit.
func notGrown(old, now *ipc.Unit) string {
	return fmt.Sprintf("the unit has grown from %d to %d bytes, the block device has not; log out and in, or try again with: iserctl rescan", bytesOf(old), bytesOf(now))
}

// replaceDevice puts a changed copy in the place of a device, if it is still there.
func (s *Service) replaceDevice(ss *session, d, x *device) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss.devices[d.UblkID] != d {
		return false
	}
	ss.devices[d.UblkID] = x
	s.changedLocked()
	return true
}

// Rescan asks targets for their logical units and makes the block devices follow.
func (s *Service) Rescan(ctx context.Context, r api.RescanRequest) (api.RescanReply, error) {
	reply := api.RescanReply{Version: api.Version, Sessions: []api.RescanResult{}}
	var groups []string
	if r.Session != "" {
		group, _, err := s.find(r.Session)
		if err != nil {
			return reply, err
		}
		groups = append(groups, group)
	} else {
		s.mu.Lock()
		for id := range s.sessions {
			groups = append(groups, id)
		}
		slices.SortFunc(groups, func(a, b string) int { return s.sessions[a].number - s.sessions[b].number })
		s.mu.Unlock()
	}
	for _, id := range groups {
		x, err := s.rescan(ctx, id)
		if err != nil {
			if r.Session != "" || ctx.Err() != nil {
				return reply, err
			}
			if x.Target == "" {
				continue // it has just been ended
			}
			x.Error = &api.Error{Name: api.NameOf(err), Text: oneLine(err)}
		}
		reply.Sessions = append(reply.Sessions, x)
	}
	return reply, nil
}

// rescan does the work of Rescan for one session.
func (s *Service) rescan(ctx context.Context, id string) (x api.RescanResult, err error) {
	ended := api.Errorf(api.ErrSessionNotFound, "the session has just been ended")
	s.mu.Lock()
	ss := s.sessions[id]
	if ss == nil {
		s.mu.Unlock()
		return x, ended
	}
	x = api.RescanResult{SessionID: ss.number, Target: ss.group.Target, Added: []string{}, Removed: []string{}, Grown: []string{}, Problems: []string{}}
	s.mu.Unlock()
	unlock, err := s.targets.lock(ctx, x.Target, "a rescan")
	if err != nil {
		return x, api.Wrap(err, api.ErrTimeout, "rescan %s", x.Target)
	}
	defer unlock()
	pc, err := s.plane.get(ctx)
	if err != nil {
		return x, err
	}
	var g ipc.Group
	if err := pc.call(ctx, ipc.MethodRescan, ipc.RescanRequest{Group: id}, &g); err != nil {
		return x, err
	}
	s.mu.Lock()
	if s.sessions[id] != ss {
		s.mu.Unlock()
		return x, ended
	}
	ss.group = g
	ss.state = stateOf(g)
	for _, d := range ss.devices { // try again what did not work before
		if d.stuck != 0 {
			y := *d
			y.stuck = 0
			ss.devices[d.UblkID] = &y
		}
	}
	s.changedLocked()
	s.mu.Unlock()
	s.forgetAborted(id) // whoever asks wants them back
	x, err = s.reconcile(ctx, pc, ss)
	if err != nil {
		return x, api.Wrap(err, api.ErrInternal, "rescan %s", x.Target)
	}
	return x, nil
}

// unservedLocked lists the units without a device. Preconditions: s.mu is held.
func (s *Service) unservedLocked() []api.UnservedUnit {
	list := []api.UnservedUnit{}
	for _, ss := range s.sessions {
		if ss.state == api.SessionLogin {
			continue
		}
		for _, u := range ss.show().Units {
			if u.Device == "" {
				list = append(list, api.UnservedUnit{SessionID: ss.number, Target: ss.group.Target, Unit: u})
			}
		}
	}
	slices.SortFunc(list, func(a, b api.UnservedUnit) int {
		return cmp.Or(cmp.Compare(a.SessionID, b.SessionID), cmp.Compare(a.LUN, b.LUN))
	})
	return list
}
