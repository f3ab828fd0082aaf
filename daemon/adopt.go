package daemon

import (
	"context"
	"errors"
	"slices"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// adopt replaces what is known about sessions and devices by what the data plane says, cross-checked with the driver and the records in
// RUN/devices. It changes nothing outside this process; settle does.
func (s *Service) adopt(ctx context.Context, pc planeConn) error {
	sctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	var st ipc.State
	if err := pc.call(sctx, ipc.MethodState, ipc.Empty{}, &st); err != nil {
		return err
	}
	s.adoptBuffers(pc, st)
	old := make(map[int]*deviceMemory)
	s.mu.Lock()
	for _, ss := range s.sessions {
		for id, d := range ss.devices {
			old[id] = d.memory
		}
	}
	s.mu.Unlock()
	recs := s.readDevices()
	next := make(map[string]*session, len(st.Groups))
	for _, g := range st.Groups {
		if err := api.CheckName(g.Target); err != nil {
			s.log.WithError(err).Errorf("session group %s of the data plane cannot be adopted", g.ID)
			continue
		}
		if g.MovedTo != "" { // nobody listened when the target said so
			s.noteMoveDuring(g)
		}
		number, ok := s.isids.Number(g.ID)
		if !ok {
			if _, n, err := s.isids.Get(g.ID); err == nil {
				number = n
			}
		}
		next[g.ID] = &session{
			number: number, state: stateOf(g), group: g, devices: make(map[int]*device), reasons: make(map[uint64]string),
		}
	}
	for _, d := range st.Devices {
		ss := next[d.Group]
		if ss == nil {
			s.log.WithField("dev", devicePath(d.UblkID)).Errorf("device belongs to unknown session group %s", d.Group)
			continue
		}
		r, ok := recs[d.UblkID]
		if !ok || r.Group != d.Group || r.Unit.LUN != d.LUN {
			if r, ok = s.rebuild(ss.group, d, pc.hello.PID); !ok {
				s.log.WithField("dev", devicePath(d.UblkID)).Errorf("device serves a unit that session group %s does not have", d.Group)
				continue
			}
		}
		x := &device{deviceRecord: r}
		var features ublk.Features
		x.state, features = s.driverState(ctx, &r)
		if d.State != ipc.DeviceServing {
			x.state = api.DeviceDead
		}
		x.memory = s.adoptMemory(old[d.UblkID], d, features, pc, st)
		if x.state == api.DeviceWaiting { // a take-over was not finished: perhaps not all memory was bound
			x.memory.strange = true
		}
		delete(old, d.UblkID)
		ss.devices[d.UblkID] = x
	}
	n := s.adoptOrphans(ctx, next, recs, old)
	if len(next) > 0 {
		s.log.WithField("pid", pc.hello.PID).Infof("adopted %d sessions with %d devices", len(next), n)
	}
	return nil
}

func stateOf(g ipc.Group) string {
	switch g.State {
	case ipc.GroupUp:
		return api.SessionUp
	case ipc.GroupRecovering:
		return api.SessionRecovering
	}
	return api.SessionFailed
}

// rebuild makes the record of a device whose file is lost from what the data plane says.
func (s *Service) rebuild(g ipc.Group, d ipc.Device, pid int) (deviceRecord, bool) {
	for _, u := range g.Units {
		if u.LUN != d.LUN {
			continue
		}
		r := deviceRecord{
			Schema: deviceSchema, UblkID: d.UblkID, Group: g.ID, Target: g.Target, Portal: g.Portal, Transport: g.Transport, TPGT: g.TPGT, Others: g.Others, PID: pid,
			Queues: len(d.Queues), Depth: s.Config().QueueDepth, MaxIO: s.Config().MaxIO, Unit: u, Created: g.Since,
		}
		if err := s.writeDevice(r); err != nil {
			s.log.WithError(err).Error("device record is lost and cannot be written again")
		}
		return r, true
	}
	return deviceRecord{}, false
}

// driverState asks the driver how a device stands, and for its features. If there is no driver to ask, the data plane's word is good enough.
func (s *Service) driverState(ctx context.Context, r *deviceRecord) (string, ublk.Features) {
	b, err := s.control()
	if err != nil {
		return api.DeviceLive, 0
	}
	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, r.UblkID) })
	switch {
	case errors.Is(err, ublk.ErrNotFound):
		return api.DeviceDead, 0
	case err != nil:
		return api.DeviceLive, 0
	case info.ServerTag != s.serverTag(r.Group, r.Unit.LUN):
		return api.DeviceDead, 0
	case info.State == ublk.StateLive:
		return api.DeviceLive, info.Features
	case info.State == ublk.StateQuiesced, info.State == ublk.StateFailIO:
		return api.DeviceWaiting, info.Features
	}
	return api.DeviceDead, info.Features
}

// clean undoes what a daemon that died had begun: devices that are recorded and not served go, and memory that it shared is as it should be. It runs before
// anybody can log in, and so make a device that is not known here.
func (s *Service) clean(ctx context.Context, pc planeConn) {
	known := make(map[int]bool)
	s.mu.Lock()
	for _, ss := range s.sessions {
		for id := range ss.devices {
			known[id] = true
		}
	}
	s.mu.Unlock()
	for id, r := range s.readDevices() {
		if !known[id] {
			s.bury(ctx, pc, r)
		}
	}
	s.sweep(ctx, pc, known)
	s.restoreBuffers(ctx, pc) // devices register early what there is when they are made
}

// settle finishes what a daemon that died had begun: devices that are stopped and not removed go, units of a session that have no device get one.
func (s *Service) settle(ctx context.Context, pc planeConn) {
	type job struct {
		ss   *session
		dead []*device
	}
	s.takeOver(ctx, pc)
	if s.waiting() {
		s.job(func(ctx context.Context) { s.runTakeOver(ctx, pc) })
	}
	var jobs []job
	s.mu.Lock()
	s.kickAllLocked()
	for _, ss := range s.sessions {
		j := job{ss: ss}
		for _, d := range ss.devices {
			if d.state == api.DeviceDead {
				j.dead = append(j.dead, d)
			}
		}
		jobs = append(jobs, j)
	}
	s.mu.Unlock()
	for _, j := range jobs {
		s.mu.Lock()
		target, id := j.ss.group.Target, j.ss.group.ID
		s.mu.Unlock()
		unlock, err := s.targets.lock(ctx, target, "a look at what an earlier daemon has left")
		if err != nil {
			return
		}
		s.mu.Lock()
		current := s.sessions[id] == j.ss
		dead := slices.DeleteFunc(j.dead, func(d *device) bool { return j.ss.devices[d.UblkID] != d })
		s.mu.Unlock()
		if !current { // logged out meanwhile
			unlock()
			continue
		}
		for _, d := range dead {
			s.stopAndRemove(ctx, pc, j.ss, d)
		}
		if _, err := s.reconcile(ctx, pc, j.ss); err != nil {
			s.log.WithError(err).WithField("target", target).Error("devices are missing")
		}
		unlock()
	}
}

// sweep deletes devices that carry our mark, have no record and are not among the known ones.
func (s *Service) sweep(ctx context.Context, pc planeConn, known map[int]bool) {
	ids, err := s.opt.Devices()
	if err != nil {
		s.log.WithError(err).Error("block devices cannot be listed")
		return
	}
	recorded := s.readDevices()
	for _, id := range ids {
		if _, ok := recorded[id]; ok || known[id] {
			continue
		}
		b, err := s.control()
		if err != nil {
			return
		}
		info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, id) })
		if err == nil && info.ServerTag>>16 == s.instanceTag()>>16 && !waits(info) {
			s.discard(ctx, pc, b, &device{deviceRecord: deviceRecord{UblkID: id}})
		}
	}
}

// waits tells whether a device has requests that wait for the next data plane: perhaps somebody's file system.
func waits(info ublk.DeviceInfo) bool {
	return info.State == ublk.StateQuiesced && info.Features.Has(ublk.FeatureRecovery)
}

// discard stops and removes a device that nobody serves.
func (s *Service) discard(ctx context.Context, pc planeConn, b Blocks, d *device) {
	ctx, cancel := s.undo(ctx)
	defer cancel()
	s.logged(s.run(ctx, func(ctx context.Context) error { return b.Stop(ctx, d.UblkID) }), d.UblkID, "stop")
	err := s.remove(ctx, pc, d)
	s.logged(err, d.UblkID, "remove")
	if err == nil {
		s.log.WithField("dev", d.path()).Warn("removed a device that nobody served")
	}
}

// bury deletes a recorded device that nobody serves, if it is still the one that was recorded.
func (s *Service) bury(ctx context.Context, pc planeConn, r deviceRecord) {
	log := s.log.WithField("dev", r.path())
	b, err := s.control()
	if errors.Is(err, ublk.ErrNotSupported) {
		s.removeDevice(r.UblkID) // no driver, no device
		return
	}
	if err != nil {
		log.WithError(err).Error("a device may be left from an earlier run")
		return
	}
	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, r.UblkID) })
	switch {
	case errors.Is(err, ublk.ErrNotFound):
		s.removeDevice(r.UblkID)
		return
	case err != nil:
		log.WithError(err).Error("a device may be left from an earlier run")
		return
	case info.ServerTag != s.serverTag(r.Group, r.Unit.LUN):
		log.Warn("the number now belongs to a device of another program; only the record is removed")
		s.removeDevice(r.UblkID)
		return
	case waits(info):
		log.Error("the device waits for a data plane and could not be looked at before; it stays")
		return
	}
	s.discard(ctx, pc, b, &device{deviceRecord: r})
}

// groupEvent takes over what the data plane says about a group.
func (s *Service) groupEvent(g ipc.Group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ss := s.sessions[g.ID]
	switch {
	case ss == nil:
		return
	case ss.state == api.SessionLogin && g.State != ipc.GroupFailed:
		ss.told = true // the answer to the login says the same, unless it was sent before
		return
	case ss.state == api.SessionClosing:
		ss.group = g // for the case that the logout is refused
		return
	}
	old := ss.state
	moved := ss.group.MovedTo != g.MovedTo
	ss.group, ss.state = g, stateOf(g)
	s.changedLocked()
	if moved {
		s.jobLocked(func(context.Context) { s.noteMoveDuring(g) }) // a record is written with fsync
	}
	s.kickAllLocked()
	s.reconcileSoonLocked(ss)
	if old == ss.state {
		return
	}
	log := s.log.WithFields(map[string]any{"target": g.Target, "portal": g.Portal})
	if g.Error != nil {
		log = log.WithField("err", g.Error.Text)
	}
	switch ss.state {
	case api.SessionFailed:
		log.Error("session failed")
	case api.SessionRecovering:
		log.Warn("session lost, being brought back")
	default:
		log.Info("session is up")
	}
}

// deviceEvent reacts to a device that the kernel took away without being asked by us (a stray DEL_DEV, say): what is left of it is
// cleared up, in the background because the target's lock may be held.
func (s *Service) deviceEvent(ctx context.Context, pc planeConn, d ipc.Device) {
	if d.State != ipc.DeviceGone {
		return
	}
	s.mu.Lock()
	ss := s.sessions[d.Group]
	s.mu.Unlock()
	if ss == nil {
		return
	}
	s.jobs.Add(1)
	go func() {
		defer s.jobs.Done()
		s.mu.Lock()
		target := ss.group.Target
		s.mu.Unlock()
		unlock, err := s.targets.lock(ctx, target, "the removal of a device that the kernel has taken away")
		if err != nil {
			return
		}
		defer unlock()
		s.mu.Lock()
		x := ss.devices[d.UblkID]
		current := s.sessions[d.Group] == ss
		s.mu.Unlock()
		if x == nil || !current {
			return // we took it away ourselves, meanwhile finished
		}
		// The number may already belong to the next device.
		var st ipc.State
		if err := pc.call(ctx, ipc.MethodState, ipc.Empty{}, &st); err != nil || !slices.ContainsFunc(st.Devices, func(now ipc.Device) bool {
			return now.UblkID == d.UblkID && now.State == ipc.DeviceGone
		}) {
			return
		}
		s.log.WithField("dev", x.path()).Error("the kernel has taken the device away; it is removed")
		s.stopAndRemove(ctx, pc, ss, x)
		s.mu.Lock()
		ss.reasons[d.LUN] = "its block device was taken away from outside; log out and in to get it back"
		s.changedLocked()
		s.mu.Unlock()
	}()
}
