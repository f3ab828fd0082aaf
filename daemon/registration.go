package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// This file brings each device in step with the registry: what is to be registered with it and is not, and the other way round. One goroutine for
// each device does so, one command after the other, and only while the device is live and its session is up: REG_BUF and UNREG_BUF stop the
// device's requests until those in flight are answered, and a queue whose requests wait for a session would hang them, and every later command.
// Before START_DEV there is nothing to stop, so what is there then is registered at no cost.
//
// The driver does not tell what is registered. A command is noted in RUN/buffers/device-N before it is issued; a daemon that finds the note of a dead one
// compares with the bindings of the data plane: an index without a binding can only be that of the noted command, and it is the lowest one
// that has no binding, because that is the one the driver takes.

// phase of a device as far as memory is concerned.
type phase int

const (
	phaseStarting phase = iota // attached, not started: registering is free
	phaseLive
	phaseGone // being taken away: nothing more is registered
)

// deviceMemory is how shared memory stands with one device.
type deviceMemory struct {
	ublkID int
	unit   unitKey
	why    string // why it can have none, "" if it can

	// Guarded by Service.mu.
	phase   phase
	pc      planeConn
	index   map[uint32]int   // by part: as the driver calls it, and the data plane knows
	failed  map[uint32]error // by part: refused by the driver or the data plane, for good
	late    error            // why the last command did not come through
	pause   time.Time        // until when nothing is tried
	noted   bool             // a command was noted whose end is not known
	working bool             // its goroutine runs
	doing   uint32           // part that is being registered, 0 for none
	tuned   bool             // merging is off, by us
	since   ipc.TierCount    // requests when the last of the memory that is in use was registered
	recount bool             // since is to be taken again
	used    bool             // somebody uses memory that is registered
	adopted bool             // made by another daemon, which may have turned merging off
	strange bool             // the driver may have memory registered that nobody knows any more
}

// work is one device's state as a command needs it.
type work struct {
	*deviceMemory
	conn     planeConn
	starting bool
}

// has tells whether a part of b is registered, or may be in a moment.
func (dm *deviceMemory) has(b *buffer) bool {
	for _, p := range b.parts {
		if _, ok := dm.index[p.id]; ok || dm.doing == p.id {
			return true
		}
	}
	return false
}

// note is a command that is being issued.
type note struct {
	Part       uint32 `json:"part"`
	Unregister bool   `json:"unregister"`
	Index      int    `json:"index"` // of Unregister
}

func (s *Service) notePath(id int) string {
	return filepath.Join(s.bufferDir(), "device-"+strconv.Itoa(id))
}

func (s *Service) writeNote(id int, n note) error {
	b, err := json.Marshal(n)
	if err == nil {
		tmp := s.notePath(id) + ".tmp"
		if err = os.WriteFile(tmp, b, 0o600); err == nil {
			err = os.Rename(tmp, s.notePath(id))
		}
	}
	if err != nil {
		return api.Errorf(api.ErrDatabase, "note command: %w", err)
	}
	return nil
}

func (s *Service) removeNote(id int) { s.removeFile(s.notePath(id)) }

// readNote returns the note of a command that was not finished.
func (s *Service) readNote(id int) (n note, ok bool) {
	b, err := os.ReadFile(s.notePath(id))
	if err != nil {
		return n, false
	}
	if err := json.Unmarshal(b, &n); err != nil {
		s.log.WithError(err).Errorf("%s makes no sense", s.notePath(id))
		return n, false
	}
	return n, true
}

// job runs f on a goroutine that Run waits for. ctx ends with the service.
func (s *Service) job(f func(ctx context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobLocked(f)
}

func (s *Service) jobLocked(f func(ctx context.Context)) {
	if s.life.Err() != nil {
		return
	}
	s.jobs.Add(1)
	go func() {
		defer s.jobs.Done()
		f(s.life)
	}()
}

// newDeviceMemoryLocked makes the state of a device. Preconditions: s.mu is held.
func (s *Service) newDeviceMemoryLocked(id int, unit unitKey, f ublk.Features, pc planeConn, p phase) *deviceMemory {
	dm := &deviceMemory{ublkID: id, unit: unit, phase: p, pc: pc, index: make(map[uint32]int), failed: make(map[uint32]error)}
	if !f.Has(ublk.FeatureSharedMemory) {
		dm.why = "the device was made without shared memory"
		if known, err := s.knownFeatures(); err == nil && !known.Has(ublk.FeatureSharedMemory) {
			dm.why = noSharedMemory()
		}
	}
	s.mem.devices[dm] = struct{}{}
	return dm
}

// notReadyLocked tells why commands for a device have to wait, "" if they need not. Preconditions: s.mu is held.
func (s *Service) notReadyLocked(dm *deviceMemory) string {
	if dm.phase == phaseStarting {
		return ""
	}
	ss := s.sessions[dm.unit.Group]
	if ss == nil || ss.devices[dm.ublkID] == nil || ss.devices[dm.ublkID].memory != dm || dm.phase == phaseGone {
		return "the device is being taken away"
	}
	if ss.state != api.SessionUp {
		return "the session is " + ss.state
	}
	if st := ss.devices[dm.ublkID].state; st != api.DeviceLive {
		return "the device is " + st
	}
	if dm.pc.client == nil || dm.pc.client.Err() != nil {
		return "the data plane is away"
	}
	return ""
}

// kickAllLocked has every device brought in step. Preconditions: s.mu is held.
func (s *Service) kickAllLocked() {
	for dm := range s.mem.devices {
		s.kickLocked(dm)
	}
}

func (s *Service) kickLocked(dm *deviceMemory) {
	if dm.working || dm.phase != phaseLive || s.nextLocked(dm) == nil {
		return
	}
	dm.working = true
	s.jobLocked(func(ctx context.Context) { s.runRegistrations(ctx, dm) })
	if s.life.Err() != nil {
		dm.working = false
	}
}

// runRegistrations does what is to be done until nothing is left or possible.
func (s *Service) runRegistrations(ctx context.Context, dm *deviceMemory) {
	for {
		s.mu.Lock()
		next := s.nextLocked(dm)
		if next == nil || ctx.Err() != nil {
			dm.working = false
			s.changedLocked()
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		if next(ctx) {
			continue
		}
		s.mu.Lock()
		dm.pause = time.Now().Add(retryAfter)
		s.mu.Unlock()
		time.AfterFunc(retryAfter, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.kickLocked(dm)
		})
	}
}

// nextLocked returns the next thing to do, which tells whether to go on at once. Preconditions: s.mu is held.
func (s *Service) nextLocked(dm *deviceMemory) func(context.Context) bool {
	if dm.why != "" || dm.phase == phaseGone || s.notReadyLocked(dm) != "" || time.Now().Before(dm.pause) {
		return nil
	}
	w := work{dm, dm.pc, dm.phase == phaseStarting}
	if dm.strange && !s.wantedLocked(dm) {
		return nil
	}
	if dm.strange {
		return func(ctx context.Context) bool { return s.purge(ctx, w) }
	}
	if dm.noted && !w.starting {
		return func(ctx context.Context) bool { return s.finishNoted(ctx, w) }
	}
	for _, part := range slices.Sorted(maps.Keys(dm.index)) {
		if b := s.bufferOfLocked(part); b == nil || b.removing {
			index := dm.index[part]
			return func(ctx context.Context) bool { return s.unregister(ctx, w, part, index) }
		}
	}
	for _, id := range slices.Sorted(maps.Keys(s.mem.buffers)) {
		b := s.mem.buffers[id]
		if !b.inPlane || b.removing || !b.serves(dm.unit) {
			continue
		}
		for _, p := range b.parts {
			if _, ok := dm.index[p.id]; !ok && dm.failed[p.id] == nil {
				return func(ctx context.Context) bool { return s.register(ctx, w, b, p) }
			}
		}
	}
	used := false
	for part := range dm.index {
		b := s.bufferOfLocked(part)
		used = used || b != nil && !b.idle()
	}
	if used != dm.used && !w.starting {
		return func(ctx context.Context) bool { return s.tune(ctx, w, used) }
	}
	if dm.recount {
		return func(ctx context.Context) bool { return s.recount(ctx, w) }
	}
	return nil
}

// wantedLocked tells whether a program has memory that serves the device. Until then the driver is not made to forget what it may have registered: each such
// command keeps all requests from the device until those under way are answered, and a data plane that dies meanwhile would leave it so. What nobody knows
// does no harm: requests from there are copied. Preconditions: s.mu is held.
func (s *Service) wantedLocked(dm *deviceMemory) bool {
	for _, b := range s.mem.buffers {
		if b.inPlane && !b.removing && b.serves(dm.unit) && !b.idle() {
			return true
		}
	}
	return false
}

// recount has requests from registered memory counted from now on: before, some of the memory was not registered yet.
func (s *Service) recount(ctx context.Context, dm work) bool {
	since := s.requests(ctx, dm)
	s.mu.Lock()
	defer s.mu.Unlock()
	dm.since, dm.recount = since, false
	return true
}

// requests are those that a device has served, as far as the data plane tells.
func (s *Service) requests(ctx context.Context, dm work) (n ipc.TierCount) {
	var st ipc.State
	if err := s.run(ctx, func(ctx context.Context) error { return dm.conn.call(ctx, ipc.MethodState, ipc.Empty{}, &st) }); err == nil {
		for _, d := range st.Devices {
			if d.UblkID == dm.ublkID {
				n = tierRequests(d.Queues)
			}
		}
	}
	return n
}

// live asks the driver once more whether a device is live, which it answers whatever else is at work.
func (s *Service) live(ctx context.Context, b Blocks, dm work) error {
	if dm.starting {
		return nil
	}
	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, dm.ublkID) })
	if err == nil && info.State != ublk.StateLive {
		err = fmt.Errorf("the device is %v", info.State)
	}
	return err
}

// putOff notes why something is tried again later. It returns false, for nextLocked's functions.
func (s *Service) putOff(dm work, err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if dm.late == nil && s.life.Err() == nil {
		s.log.WithError(err).WithField("dev", devicePath(dm.ublkID)).Warn("shared memory: trying again")
	}
	dm.late = err
	s.changedLocked()
	return false
}

// register makes a part known to the driver, then to the data plane.
func (s *Service) register(ctx context.Context, dm work, b *buffer, p bufferPart) bool {
	s.mu.Lock()
	if b.removing {
		s.mu.Unlock()
		return true
	}
	dm.doing = p.id // so that the data plane keeps the buffer until it is known whether the device has it
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		dm.doing = 0
		s.changedLocked()
		s.mu.Unlock()
	}()
	blocks, err := s.control()
	if err == nil {
		err = s.live(ctx, blocks, dm)
	}
	if err == nil && !dm.starting {
		err = s.writeNote(dm.ublkID, note{Part: p.id})
	}
	if err != nil {
		return s.putOff(dm, err)
	}
	index, err := step(ctx, s, func(ctx context.Context) (int, error) {
		return blocks.RegisterBuffer(ctx, dm.ublkID, b.file.File, p.offset, p.length)
	})
	s.mu.Lock()
	late := dm.late != nil
	s.mu.Unlock()
	var ce *ublk.CtrlError
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, ublk.ErrBusy), errors.As(err, &ce) && ce.Pending,
		errors.Is(err, ublk.ErrExist) && late: // what came through late is being taken back
		return s.putOff(dm, err) // the note stays
	default:
		s.removeNote(dm.ublkID)
		s.refused(dm, p, blockError(err))
		return true
	}
	bind := ipc.BufferBindRequest{UblkID: dm.ublkID, Index: index, ID: p.id}
	err = s.run(ctx, func(ctx context.Context) error { return dm.conn.call(ctx, ipc.MethodBufferBind, bind, nil) })
	switch {
	case err == nil:
		s.mu.Lock()
		dm.index[p.id], dm.late, dm.recount = index, nil, dm.used
		s.changedLocked()
		s.mu.Unlock()
		s.removeNote(dm.ublkID)
		return true
	case dm.conn.client.Err() != nil || ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded):
		// Whether it is bound is known when the data plane is back.
		s.mu.Lock()
		dm.noted = !dm.starting
		s.mu.Unlock()
		return s.putOff(dm, err)
	}
	uerr := s.run(ctx, func(ctx context.Context) error { return blocks.UnregisterBuffer(ctx, dm.ublkID, index) })
	if uerr != nil && !errors.Is(uerr, ublk.ErrNoBuffer) && !errors.Is(uerr, ublk.ErrNotFound) {
		s.mu.Lock()
		dm.noted = !dm.starting
		s.mu.Unlock()
		return s.putOff(dm, uerr)
	}
	s.removeNote(dm.ublkID)
	s.refused(dm, p, err)
	return true
}

// refused notes that a part cannot be registered with a device.
func (s *Service) refused(dm work, p bufferPart, err error) {
	s.log.WithError(err).WithFields(map[string]any{"dev": devicePath(dm.ublkID), "buffer": p.id}).Warn("memory is not registered; requests from it are copied")
	s.mu.Lock()
	defer s.mu.Unlock()
	dm.failed[p.id] = err
	s.changedLocked()
}

// unregister makes the driver forget a part, then the data plane.
func (s *Service) unregister(ctx context.Context, dm work, part uint32, index int) bool {
	blocks, err := s.control()
	if err == nil {
		err = s.live(ctx, blocks, dm)
	}
	if err == nil {
		err = s.writeNote(dm.ublkID, note{Part: part, Unregister: true, Index: index})
	}
	if err == nil {
		err = s.run(ctx, func(ctx context.Context) error { return blocks.UnregisterBuffer(ctx, dm.ublkID, index) })
	}
	if err == nil || errors.Is(err, ublk.ErrNoBuffer) {
		unbind := ipc.BufferBindRequest{UblkID: dm.ublkID, Index: index, ID: part}
		err = s.run(ctx, func(ctx context.Context) error { return dm.conn.call(ctx, ipc.MethodBufferUnbind, unbind, nil) })
	}
	if err != nil && !api.Is(err, api.ErrNotFound) {
		return s.putOff(dm, err)
	}
	s.mu.Lock()
	delete(dm.index, part)
	dm.late = nil
	s.changedLocked()
	s.mu.Unlock()
	s.removeNote(dm.ublkID)
	return true
}

// purge makes the driver forget what it has registered for daemons and data planes that are no more. Indices are given from the lowest free one on, so
// that after a long gap there are none.
func (s *Service) purge(ctx context.Context, dm work) bool {
	s.mu.Lock()
	known := slices.Collect(maps.Values(dm.index))
	s.mu.Unlock()
	for index, gap := 0, 0; gap < longGap; index++ {
		if slices.Contains(known, index) {
			continue
		}
		s.mu.Lock()
		why := s.notReadyLocked(dm.deviceMemory)
		s.mu.Unlock()
		if why != "" {
			return true // nothing more is done until that is over
		}
		blocks, err := s.control()
		if err == nil {
			err = s.live(ctx, blocks, dm)
		}
		if err == nil {
			err = s.run(ctx, func(ctx context.Context) error { return blocks.UnregisterBuffer(ctx, dm.ublkID, index) })
		}
		switch {
		case err == nil:
			gap = 0
		case errors.Is(err, ublk.ErrNoBuffer):
			gap++
		default:
			return s.putOff(dm, err)
		}
	}
	s.removeNote(dm.ublkID)
	s.mu.Lock()
	dm.strange, dm.noted, dm.late = false, false, nil
	s.changedLocked()
	s.mu.Unlock()
	return true
}

// longGap is more than the buffers that come and go at a device.
const longGap = 64

// finishNoted finishes or undoes a command whose end is not known.
func (s *Service) finishNoted(ctx context.Context, dm work) bool {
	n, ok := s.readNote(dm.ublkID)
	if ok {
		blocks, err := s.control()
		if err == nil {
			err = s.live(ctx, blocks, dm)
		}
		var st ipc.State
		if err == nil {
			err = s.run(ctx, func(ctx context.Context) error { return dm.conn.call(ctx, ipc.MethodState, ipc.Empty{}, &st) })
		}
		if err != nil {
			return s.putOff(dm, err)
		}
		index := bindings(st, dm.ublkID)
		s.mu.Lock()
		dm.index = index
		s.mu.Unlock()
		if n.Unregister {
			return s.finishUnregister(ctx, dm, n)
		}
		if _, bound := index[n.Part]; !bound {
			used := slices.Sorted(maps.Values(index))
			lowest := 0
			for slices.Contains(used, lowest) {
				lowest++
			}
			err := s.run(ctx, func(ctx context.Context) error { return blocks.UnregisterBuffer(ctx, dm.ublkID, lowest) })
			if err != nil && !errors.Is(err, ublk.ErrNoBuffer) {
				return s.putOff(dm, err)
			}
		}
	}
	s.mu.Lock()
	dm.noted, dm.late = false, nil
	s.changedLocked()
	s.mu.Unlock()
	s.removeNote(dm.ublkID)
	return true
}

func (s *Service) finishUnregister(ctx context.Context, dm work, n note) bool {
	if s.unregister(ctx, dm, n.Part, n.Index) {
		s.mu.Lock()
		dm.noted = false
		s.mu.Unlock()
		return true
	}
	return false
}

// bindings are what the data plane knows for a device.
func bindings(st ipc.State, id int) map[uint32]int {
	out := make(map[uint32]int)
	for _, b := range st.Buffers {
		for _, x := range b.Bindings {
			if x.UblkID == id {
				out[b.ID] = x.Index
			}
		}
	}
	return out
}

// tune sets a live device up for memory that somebody uses, or back: requests that are merged have their data in several places, which the
// driver does not recognise.
func (s *Service) tune(ctx context.Context, dm work, used bool) bool {
	var since ipc.TierCount
	if used {
		since = s.requests(ctx, dm)
	}
	s.mu.Lock()
	tuned, adopted := dm.tuned, dm.adopted
	s.mu.Unlock()
	switch {
	case used:
		old, err := s.queueAttribute(ctx, dm.ublkID, "nomerges", "")
		tuned = err == nil && adopted && old == "2"
		if err == nil && old == "0" {
			_, err = s.queueAttribute(ctx, dm.ublkID, "nomerges", "2")
			tuned = err == nil
		}
		if err != nil {
			s.log.WithError(err).WithField("dev", devicePath(dm.ublkID)).Warn("merging stays on; requests that are merged are copied")
		}
	case tuned:
		if _, err := s.queueAttribute(ctx, dm.ublkID, "nomerges", "0"); err != nil {
			s.log.WithError(err).WithField("dev", devicePath(dm.ublkID)).Warn("merging stays off")
		}
		tuned = false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	dm.used, dm.tuned, dm.since = used, tuned, since
	s.changedLocked()
	return true
}

// queueAttribute reads an attribute of a block device's queue, and writes it unless value is "". Writing may wait for requests, and cannot be
// interrupted: it is left behind when ctx ends.
func (s *Service) queueAttribute(ctx context.Context, id int, name, value string) (old string, err error) {
	if s.opt.QueueAttribute == nil {
		return "", errors.New("no queue attributes")
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	type result struct {
		old string
		err error
	}
	done := make(chan result, 1)
	go func() {
		old, err := s.opt.QueueAttribute(id, name, value)
		done <- result{old, err}
	}()
	select {
	case r := <-done:
		return r.old, r.err
	case <-ctx.Done():
		return "", fmt.Errorf("queue attribute %s: %w", name, ctx.Err())
	}
}

// registerEarly registers everything with a device that is attached and not started, which stops nobody.
func (s *Service) registerEarly(ctx context.Context, dm *deviceMemory) {
	s.mu.Lock()
	dm.working = true
	s.mu.Unlock()
	for ctx.Err() == nil {
		s.mu.Lock()
		next := s.nextLocked(dm)
		s.mu.Unlock()
		if next == nil || !next(ctx) {
			break
		}
	}
	s.mu.Lock()
	dm.working = false
	s.mu.Unlock()
}

// closeMemory ends registering for a device that is about to be taken away, and waits for the command at work.
func (s *Service) closeMemory(ctx context.Context, dm *deviceMemory) {
	if dm == nil {
		return
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	changes, done := s.Watch()
	defer done()
	for {
		s.mu.Lock()
		dm.phase = phaseGone
		working := dm.working
		s.mu.Unlock()
		if !working {
			return
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// reopenMemory is the way back from closeMemory, for a device that stays.
func (s *Service) reopenMemory(dm *deviceMemory) {
	if dm == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.mem.devices[dm]; known {
		dm.phase = phaseLive
		s.kickLocked(dm)
	}
}

// dropMemory forgets a device that is gone, and with it all that was registered.
func (s *Service) dropMemory(dm *deviceMemory) {
	if dm == nil {
		return
	}
	s.removeNote(dm.ublkID)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropMemoryLocked(dm)
}

func (s *Service) dropMemoryLocked(dm *deviceMemory) {
	dm.phase = phaseGone
	dm.index = make(map[uint32]int)
	delete(s.mem.devices, dm)
	s.changedLocked()
}
