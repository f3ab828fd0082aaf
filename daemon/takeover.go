package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// This file hands the sessions and devices of a data plane that has ended, however it ended, to the next one.
//
//	data plane ends      the kernel keeps the devices, requests wait (QUIESCED)         orphanAll
//	next one is there    what it does not have is found in memory and in RUN/devices    adoptOrphans
//	                     the sessions are restored: every path logs in with its ISID    takeOver
//	                     each device is opened, fetched, made live                      takeOverDevice
//
// The devices do not wait for the logins: the data plane holds what the kernel delivers until the path's session is back, and that
// login has ended at the target whatever the dead data plane had sent. So the fence stands before the first repetition.

// releaseTimeout is how long the kernel may take to let go of a device whose data plane has ended: it unpins memory and closes queue pairs first.
const releaseTimeout = 60 * time.Second

// orphanAll notes that the data plane has ended.
func (s *Service) orphanAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ss := range s.sessions {
		if ss.state != api.SessionLogin { // a login at work finds out by itself
			s.orphanLocked(ss)
		}
	}
	for _, b := range s.mem.buffers {
		b.inPlane, b.partly = false, false
	}
	s.changedLocked()
}

// orphanLocked makes a session one that waits for the next data plane, unless it does already. Preconditions: s.mu is held.
func (s *Service) orphanLocked(ss *session) {
	ss.group.State = ipc.GroupRecovering
	ss.group.Error = &ipc.Error{Code: api.ErrConnectionFailed, Text: "the data plane has ended; its requests wait for the next one"}
	ss.group.Sessions = nil
	if !ss.orphan {
		ss.orphan, ss.group.Since = true, time.Now()
	}
	if ss.state != api.SessionClosing {
		ss.state = api.SessionRecovering
	}
	for id, d := range ss.devices {
		// One that had lost its unit may get it back.
		if d.state == api.DeviceLive || d.state == api.DeviceDead && d.reason != "" {
			ss.devices[id] = &device{deviceRecord: d.deviceRecord, state: api.DeviceWaiting, memory: d.memory}
		}
	}
}

// adoptOrphans adds to next, the sessions that the data plane has, what only this service, or RUN/devices, knows of. old are devices that were known before
// and have not been found again. From then on next is what is known. It returns how many devices there are in all.
func (s *Service) adoptOrphans(ctx context.Context, next map[string]*session, recs map[int]deviceRecord, old map[int]*deviceMemory) int {
	known := make(map[int]bool)
	for _, ss := range next {
		for id := range ss.devices {
			known[id] = true
		}
	}
	type orphan struct {
		deviceRecord
		features ublk.Features
	}
	var list []orphan
	for _, id := range slices.Sorted(maps.Keys(recs)) {
		if r := recs[id]; !known[id] {
			if state, f := s.driverState(ctx, &r); state != api.DeviceDead && f.Has(ublk.FeatureRecovery) {
				list = append(list, orphan{r, f})
			}
		}
	}
	numbers := make(map[string]int)
	for _, o := range list {
		if _, n, err := s.isids.Get(o.Group); err == nil {
			numbers[o.Group] = n
		}
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	list = slices.DeleteFunc(list, func(o orphan) bool { // logged out meanwhile
		_, err := os.Stat(filepath.Join(s.deviceDir(), strconv.Itoa(o.UblkID)+".json"))
		return err != nil
	})
	for id, ss := range s.sessions {
		if next[id] == nil && ss.state != api.SessionLogin {
			s.orphanLocked(ss)
			next[id] = ss
			for n := range ss.devices {
				known[n] = true
				delete(old, n)
			}
		}
	}
	for _, o := range list {
		if known[o.UblkID] {
			continue
		}
		ss := next[o.Group]
		if ss == nil {
			ss = &session{number: numbers[o.Group], devices: make(map[int]*device), reasons: make(map[uint64]string)}
			ss.group = ipc.Group{
				ID: o.Group, Target: o.Target, Portal: o.Portal, TPGT: o.TPGT, Transport: o.Transport, Others: o.Others, InitiatorName: s.name,
				TransportReason: "it was used before the data plane was restarted",
			}
			s.orphanLocked(ss)
			next[o.Group] = ss
		}
		if !slices.ContainsFunc(ss.group.Units, func(u ipc.Unit) bool { return u.LUN == o.Unit.LUN }) {
			ss.group.Units = append(slices.Clone(ss.group.Units), o.Unit)
		}
		d := &device{deviceRecord: o.deviceRecord, state: api.DeviceWaiting}
		if d.memory = old[o.UblkID]; d.memory == nil || d.memory.phase == phaseGone {
			d.memory = s.newDeviceMemoryLocked(o.UblkID, unitKey{o.Group, o.Unit.LUN}, o.features, planeConn{}, phaseLive)
			d.memory.adopted, d.memory.strange = true, true
		}
		delete(old, o.UblkID)
		ss.devices[o.UblkID] = d
	}
	n := 0
	for _, ss := range next {
		n += len(ss.devices)
	}
	s.sessions = next
	for _, dm := range old { // devices that are no more
		if dm != nil {
			s.dropMemoryLocked(dm)
		}
	}
	s.changedLocked()
	return n
}

// retryTakeOver is the time between attempts to take over what did not come at first.
const retryTakeOver = 5 * time.Second

// runTakeOver tries again as long as something waits and the data plane is the same.
func (s *Service) runTakeOver(ctx context.Context, pc planeConn) {
	for s.waiting() && sleep(ctx, retryTakeOver) && pc.client.Err() == nil {
		s.takeOver(ctx, pc)
	}
}

// waiting tells whether a session or a device waits for a data plane.
func (s *Service) waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ss := range s.sessions {
		if ss.waits() {
			return true
		}
	}
	return false
}

// waits tells whether the session or a device of it waits for a data plane. Preconditions: Service.mu is held.
func (ss *session) waits() bool {
	if ss.orphan {
		return true
	}
	for _, d := range ss.devices {
		if d.state == api.DeviceWaiting {
			return true
		}
	}
	return false
}

// takeOver gives the data plane what adoptOrphans has found, and finishes what an earlier attempt has begun.
func (s *Service) takeOver(ctx context.Context, pc planeConn) {
	var work errgroup.Group
	s.mu.Lock()
	for _, ss := range s.sessions {
		if ss.waits() {
			work.Go(func() error {
				s.takeOverSession(ctx, pc, ss)
				return nil
			})
		}
	}
	s.mu.Unlock()
	_ = work.Wait()
}

func (s *Service) takeOverSession(ctx context.Context, pc planeConn, ss *session) {
	s.mu.Lock()
	target, id := ss.group.Target, ss.group.ID
	s.mu.Unlock()
	patient, cancel := context.WithCancel(ctx) // for what may take long, and can be done later as well
	defer cancel()
	unlock, err := s.targets.lockFor(ctx, target, "a take-over", cancel)
	if err != nil {
		return
	}
	defer unlock()
	s.mu.Lock()
	current, orphan, group := s.sessions[id] == ss, ss.orphan, ss.group
	group.Units = slices.Clone(group.Units)
	for _, d := range ss.devices { // what a device was made for, whatever stands under the number now
		if i := slices.IndexFunc(group.Units, func(u ipc.Unit) bool { return u.LUN == d.Unit.LUN }); i >= 0 {
			group.Units[i] = d.Unit
		} else {
			group.Units = append(group.Units, d.Unit)
		}
	}
	s.mu.Unlock()
	if !current {
		return // logged out meanwhile
	}
	log := s.log.WithFields(map[string]any{"target": target, "portal": group.Portal})
	if orphan {
		g, err := s.restoreSession(ctx, pc, group)
		s.mu.Lock()
		said := ss.group.Error != nil && err != nil && ss.group.Error.Text == oneLine(err)
		if err != nil {
			ss.group.Error = &ipc.Error{Code: api.NameOf(err), Text: oneLine(err)}
		} else {
			ss.group, ss.state, ss.orphan = g, stateOf(g), false
		}
		s.changedLocked()
		s.mu.Unlock()
		if err != nil {
			if !said {
				log.WithError(err).Error("the new data plane does not take the session; its devices wait")
			}
			return
		}
	}
	var st ipc.State
	if err := s.run(ctx, func(ctx context.Context) error { return pc.call(ctx, ipc.MethodState, ipc.Empty{}, &st) }); err != nil {
		log.WithError(err).Error("the devices wait: the data plane does not say what it has")
		return
	}
	var work errgroup.Group
	work.SetLimit(atOnce)
	s.mu.Lock()
	attached := make(map[*device]bool) // of those that wait
	for _, d := range ss.devices {
		there := slices.ContainsFunc(st.Devices, func(x ipc.Device) bool { return x.UblkID == d.UblkID })
		if d.state == api.DeviceWaiting || d.state == api.DeviceLive && !there {
			attached[d] = there
		}
	}
	s.mu.Unlock()
	var taken atomic.Int32
	for d, there := range attached {
		work.Go(func() error {
			r, err := s.takeOverDevice(ctx, patient, pc, d, there)
			s.mu.Lock()
			defer s.mu.Unlock()
			defer s.changedLocked()
			switch {
			case errors.Is(err, ublk.ErrNotFound):
				delete(ss.devices, d.UblkID)
				s.dropMemoryLocked(d.memory)
				s.removeDevice(d.UblkID)
			case err != nil:
				why := "its device waits: " + oneLine(err)
				if ss.reasons[d.Unit.LUN] != why { // it is tried again and again
					log.WithError(err).WithField("dev", d.path()).Error("a device could not be taken over; its requests wait. iserctl device abort ends them with errors")
				}
				ss.reasons[d.Unit.LUN] = why
			default:
				delete(ss.reasons, d.Unit.LUN)
				ss.devices[d.UblkID] = &device{deviceRecord: r, state: api.DeviceLive, memory: d.memory}
				s.kickLocked(d.memory)
				taken.Add(1)
			}
			return nil
		})
	}
	_ = work.Wait()
	if n := taken.Load(); n > 0 {
		log.Infof("took over %d devices", n)
	}
}

// restoreSession makes a session group known to the data plane.
func (s *Service) restoreSession(ctx context.Context, pc planeConn, group ipc.Group) (g ipc.Group, err error) {
	isid, _, err := s.isids.Get(group.ID)
	if err != nil {
		return g, api.Errorf(api.ErrDatabase, "%w", err)
	}
	set := group.Settings
	if n, err := s.nodes.Get(group.ID); err == nil {
		set = n.Settings.Settings
	}
	login, err := s.loginRequest(pc, group.ID, group.Target, &set)
	if err != nil {
		return g, err
	}
	login.Portal, login.Transport, login.ISID = group.Portal, group.Transport, isid
	login.Others = group.Others
	login.Timeout = api.SecondsOr(set.LoginTimeout, s.Config().LoginTimeout)
	r := ipc.RestoreRequest{LoginRequest: login, TPGT: group.TPGT, Units: group.Units}
	s.mu.Lock()
	r.Clean = s.answered[group.ID]
	delete(s.answered, group.ID)
	s.mu.Unlock()
	err = s.run(ctx, func(ctx context.Context) error { return pc.call(ctx, ipc.MethodRestore, r, &g) })
	return g, err
}

// takeOverDevice makes a device that waits live again. It returns the new record. patient is the context for what waits for the kernel.
func (s *Service) takeOverDevice(ctx, patient context.Context, pc planeConn, d *device, attached bool) (r deviceRecord, err error) {
	b, err := s.control()
	if err != nil {
		return r, err
	}
	if state, _ := s.driverState(ctx, &d.deviceRecord); attached && state == api.DeviceLive {
		return d.deviceRecord, nil // an earlier attempt came through after all
	}
	if !attached {
		if err := s.awaitRelease(patient, b, d.UblkID); err != nil {
			return r, err
		}
		attach := ipc.AttachRequest{
			Group: d.Group, LUN: d.Unit.LUN, WWID: d.Unit.WWID, Serial: d.Unit.Serial,
			UblkID: d.UblkID, Queues: d.Queues, Depth: d.Depth, MaxIO: d.MaxIO, Recover: true,
		}
		if err := s.run(ctx, func(ctx context.Context) error { return pc.call(ctx, ipc.MethodAttach, attach, nil) }); err != nil {
			return r, api.Wrap(err, api.ErrInternal, "attach %s", d.path())
		}
		s.bindAgain(ctx, pc, d.memory)
	}
	if err := s.run(patient, func(ctx context.Context) error { return b.EndRecovery(ctx, d.UblkID, pc.hello.PID) }); err != nil {
		return r, blockError(err)
	}
	r = d.deviceRecord
	r.PID = pc.hello.PID
	if err := s.writeDevice(r); err != nil {
		s.log.WithError(err).WithField("dev", d.path()).Error("the device's record is as old as its last data plane")
	}
	return r, nil
}

// awaitRelease waits until the kernel has taken a device from its dead data plane, which no event tells, and prepares it for the next one.
func (s *Service) awaitRelease(ctx context.Context, b Blocks, id int) error {
	wctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	var err error
	wait := waitQuiet(wctx, 10*time.Millisecond, func() bool {
		err = s.run(wctx, func(ctx context.Context) error { return b.StartRecovery(ctx, id) })
		return !errors.Is(err, ublk.ErrBusy)
	})
	if wait != nil && errors.Is(err, ublk.ErrBusy) {
		return fmt.Errorf("the kernel has not taken it from the former data plane within %v: %w", releaseTimeout, err)
	}
	if errors.Is(err, ublk.ErrNotFound) {
		return err
	}
	return blockError(err)
}

// bindAgain tells a new data plane how the driver calls the memory that it has been given again. What it cannot be told is copied.
func (s *Service) bindAgain(ctx context.Context, pc planeConn, dm *deviceMemory) {
	s.mu.Lock()
	dm.pc, dm.pause = pc, time.Time{}
	index := maps.Clone(dm.index)
	s.mu.Unlock()
	for part, i := range index {
		bind := ipc.BufferBindRequest{UblkID: dm.ublkID, Index: i, ID: part}
		err := s.run(ctx, func(ctx context.Context) error { return pc.call(ctx, ipc.MethodBufferBind, bind, nil) })
		if err != nil && !api.Is(err, api.ErrNotFound) {
			s.log.WithError(err).WithFields(map[string]any{"dev": devicePath(dm.ublkID), "buffer": part}).Warn("requests from this memory are copied")
		}
	}
}
