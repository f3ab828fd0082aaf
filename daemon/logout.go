package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// Logout ends a session: its devices go away, then the session. While one of the devices is in use it is Busy, with the holders named,
// and nothing has changed. With Force a session that has failed, or waits for a data plane, is ended although its devices are in use.
func (s *Service) Logout(ctx context.Context, r api.LogoutRequest) (api.LogoutReply, error) {
	group, target, err := s.find(r.Session)
	if err != nil {
		return api.LogoutReply{}, err
	}
	unlock, err := s.targets.lock(ctx, target, "a logout")
	if err != nil {
		return api.LogoutReply{}, api.Wrap(err, api.ErrTimeout, "logout %s", target)
	}
	defer unlock()
	return s.end(ctx, group, r.Force)
}

// find turns what a person says into a group: target name, session number, device path or name.
func (s *Service) find(what string) (group, target string, err error) {
	name, isDev := strings.CutPrefix(strings.TrimPrefix(what, "/dev/"), "ublkb")
	number, numErr := strconv.Atoi(what)
	devID, devErr := strconv.Atoi(name)
	var match func(ss *session) bool
	switch {
	case numErr == nil && number > 0:
		match = func(ss *session) bool { return ss.number == number }
	case isDev && devErr == nil && devID >= 0:
		match = func(ss *session) bool { return ss.devices[devID] != nil }
	default:
		if err := api.CheckName(what); err != nil {
			return "", "", api.Errorf(api.ErrInvalidArgs, "%w; a session number or a device such as /dev/ublkb0 is possible, too", err)
		}
		match = func(ss *session) bool { return ss.group.Target == what }
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for g, ss := range s.sessions {
		if match(ss) {
			return g, ss.group.Target, nil
		}
	}
	name = api.ErrSessionNotFound
	if !isDev && numErr != nil {
		name = api.ErrNotFound
	}
	return "", "", api.Errorf(name, "no session matches %s; see: iserctl session list", what)
}

// end does the work of Logout. Preconditions: the target's lock is held.
func (s *Service) end(ctx context.Context, group string, force bool) (api.LogoutReply, error) {
	reply := api.LogoutReply{Version: api.Version, Devices: []string{}}
	s.mu.Lock()
	ss := s.sessions[group]
	if ss == nil {
		s.mu.Unlock()
		return reply, api.Errorf(api.ErrSessionNotFound, "the session has just been ended")
	}
	failed := ss.state == api.SessionFailed
	lost := failed || ss.waits() // its requests cannot be answered now
	target := ss.group.Target
	patience := s.Config().LoginTimeout + api.SecondsOr(ss.group.Settings.LogoutTimeout, 0)
	devices := make([]*device, 0, len(ss.devices))
	for _, d := range ss.devices {
		devices = append(devices, d)
	}
	reply.Session = ss.show()
	s.mu.Unlock()
	slices.SortFunc(devices, func(a, b *device) int { return a.UblkID - b.UblkID })
	force = force && lost

	if !force {
		if err := s.checkHolders(devices, lost); err != nil {
			return reply, err
		}
	}
	pc, err := s.plane.get(ctx)
	if err != nil && !lost {
		return reply, err
	}
	b, err := s.control()
	if err != nil && len(devices) > 0 {
		return reply, err
	}
	s.setState(ss, api.SessionClosing)

	// From here on the caller's context does not count: half a logout helps nobody.
	ctx = context.WithoutCancel(ctx)
	gone, err := s.takeApart(ctx, pc, b, ss, devices, force)
	if err != nil {
		s.restore(ctx, pc, ss, gone, failed)
		return reply, err
	}
	for _, d := range gone {
		reply.Devices = append(reply.Devices, d.path())
	}
	if pc.client != nil {
		lctx, cancel := context.WithTimeout(ctx, patience)
		err := pc.call(lctx, ipc.MethodLogout, ipc.LogoutRequest{Group: group}, nil)
		cancel()
		if err != nil && !api.Is(err, api.ErrSessionNotFound) && !api.Is(err, api.ErrNotFound) && pc.client.Err() == nil {
			s.setState(ss, api.SessionFailed)
			return reply, api.Wrap(err, api.ErrLogoutFailed, "logout %s", target)
		}
	}
	s.mu.Lock()
	delete(s.sessions, group)
	s.changedLocked()
	s.mu.Unlock()
	s.forgetAborted(group)
	s.log.WithField("target", target).Info("logged out")
	return reply, nil
}

// takeApart stops and removes devices, several at a time. It ends with the first failure, after what is at work then; gone are those that are no more,
// in the order of devices.
func (s *Service) takeApart(ctx context.Context, pc planeConn, b Blocks, ss *session, devices []*device, force bool) (gone []*device, err error) {
	s.mu.Lock()
	target := ss.group.Target
	s.mu.Unlock()
	work, wctx := errgroup.WithContext(ctx)
	work.SetLimit(atOnce)
	removed := make([]bool, len(devices))
	for i, d := range devices {
		work.Go(func() error {
			if wctx.Err() != nil {
				return nil // another one has failed
			}
			s.closeMemory(ctx, d.memory) // nothing is registered with a device that stops
			if err := s.run(ctx, func(ctx context.Context) error { return s.stop(ctx, b, d, force) }); err != nil {
				s.reopenMemory(d.memory)
				return err
			}
			forget := b.Delete
			if force { // its users may keep it open
				forget = b.DeleteAsync
			}
			if err := s.removeBy(ctx, pc, d, forget); err != nil {
				s.setDevice(ss, d, api.DeviceDead)
				return api.Wrap(err, api.ErrLogoutFailed, "logout %s", target)
			}
			removed[i] = true
			s.mu.Lock()
			delete(ss.devices, d.UblkID)
			s.changedLocked()
			s.mu.Unlock()
			return nil
		})
	}
	err = work.Wait()
	for i, d := range devices {
		if removed[i] {
			gone = append(gone, d)
		}
	}
	return gone, err
}

// checkHolders refuses while a device is used.
func (s *Service) checkHolders(devices []*device, lost bool) error {
	ids := make([]int, 0, len(devices))
	for _, d := range devices {
		ids = append(ids, d.UblkID)
	}
	holders, err := s.opt.Holders(ids)
	if err != nil {
		return api.Errorf(api.ErrInternal, "who uses the devices cannot be found out: %w", err)
	}
	for _, d := range devices {
		if list := holders[d.UblkID]; len(list) > 0 {
			return busy(d, list, lost)
		}
	}
	return nil
}

func busy(d *device, holders []string, lost bool) error {
	text := fmt.Sprintf("%s is in use: %s", d.path(), strings.Join(holders, ", "))
	if lost {
		text += "; its requests are not answered, --force ends it with I/O errors for them"
	}
	return api.Errorf(api.ErrBusy, "%s", text)
}

// stop makes the block device go away, unless somebody uses it.
func (s *Service) stop(ctx context.Context, b Blocks, d *device, force bool) error {
	err := error(nil)
	if !force {
		err = b.TryStop(ctx, d.UblkID)
	}
	if force || errors.Is(err, ublk.ErrNotSupported) { // before kernel 7.0; the holders have been looked at
		err = b.Stop(ctx, d.UblkID)
	}
	switch {
	case err == nil, errors.Is(err, ublk.ErrNotFound):
		return nil
	case errors.Is(err, ublk.ErrBusy):
		all, herr := s.opt.Holders([]int{d.UblkID})
		holders := all[d.UblkID]
		if herr != nil || len(holders) == 0 {
			holders = []string{"the kernel says so; the holder cannot be found"}
		}
		return busy(d, holders, false)
	}
	return blockError(err)
}

// restore gives a session that could not be ended its devices back.
func (s *Service) restore(ctx context.Context, pc planeConn, ss *session, gone []*device, failed bool) {
	s.mu.Lock()
	ss.state = stateOf(ss.group) // events kept it up to date meanwhile
	if failed {
		ss.state = api.SessionFailed
	}
	up, units := ss.state == api.SessionUp, ss.group.Units
	s.changedLocked()
	s.kickAllLocked()
	s.mu.Unlock()
	if !up || len(gone) == 0 || pc.client == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 4*s.Config().ControlTimeout)
	defer cancel()
	if _, err := s.serveUnits(ctx, pc, ss, units); err != nil {
		s.log.WithError(err).Error("devices that were stopped are not served again")
	}
}

func (s *Service) setState(ss *session, state string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss.state != state {
		ss.state = state
		s.changedLocked()
	}
}

// setDevice replaces a device by one in another state.
func (s *Service) setDevice(ss *session, d *device, state string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss.devices[d.UblkID] == d && d.state != state {
		x := *d
		x.state = state
		ss.devices[d.UblkID] = &x
		s.changedLocked()
	}
}

// waitQuiet waits for a condition that no event announces, such as the end of a process that is not ours.
func waitQuiet(ctx context.Context, every time.Duration, done func() bool) error {
	t := time.NewTicker(every)
	defer t.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
	return nil
}
