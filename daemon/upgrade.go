package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// This file replaces the data plane while its devices are in use:
//
//	prepare     the next data plane starts, and waits for its turn; if it cannot, nothing has happened
//	lock        nobody logs in or out; no memory is being registered
//	note        RUN/upgrade.json says which data plane is about to end: from here on there is no way back
//	QUIESCE     the kernel holds new requests back; those under way are answered
//	end         SIGKILL: what was answered needs no farewell, and what was not is sent again by the next one, as after any death
//	take over   takeover.go: sessions with the same ISIDs, devices, memory
//
// The old data plane is not asked to log out: whatever a logout would fail is an I/O error, and the kernel gives up a killed process's connections as fast.
// The next one logs in with the ISIDs of the old one, which ends at the target what is left there; after a hand-over in order that is nothing.
//
// A data plane that was quiesced cannot serve any more. A daemon that finds one by the note ends it, and goes on from there.

const (
	quiesceTimeout = 500 * time.Millisecond // for each queue to have an idle tag
	drainTimeout   = 3 * time.Second        // for requests under way to be answered
	drainPoll      = 2 * time.Millisecond
	handOverLimit  = 60 * time.Second // for sessions and devices to come back
)

// Successor is a data plane that is ready, and serves when it is told to. If it is dropped, or this process ends before that, it ends.
type Successor struct {
	Hello  ipc.HelloReply
	Serve  func() error
	Drop   func()
	Exited <-chan error // why it has ended
}

// handed is a device, or a session without one, on its way from one data plane to the next.
type handed struct {
	*device         // nil for a session without devices
	group    string // of the session
	up       bool   // the session was up
	waits    bool   // for a data plane, already
	how, why string
	since    time.Time // of its pause
	back     time.Time // of its end; zero while it lasts
	state    string
}

// Upgrade replaces the data plane by the program that is installed now, under load and without an I/O error. A data plane that is not running is started.
// It goes on when ctx ends.
func (s *Service) Upgrade(ctx context.Context, _ api.UpgradeRequest) (api.UpgradeReply, error) {
	type outcome struct {
		reply api.UpgradeReply
		err   error
	}
	done := make(chan outcome, 1)
	s.mu.Lock()
	switch {
	case s.upgrading:
		s.mu.Unlock()
		return api.UpgradeReply{}, api.Errorf(api.ErrBusy, "an upgrade of the data plane is at work")
	case s.life.Err() != nil:
		s.mu.Unlock()
		return api.UpgradeReply{}, errEnding
	}
	s.upgrading = true
	s.jobLocked(func(ctx context.Context) {
		reply, err := s.upgrade(ctx)
		if err != nil {
			s.log.WithError(err).Error("upgrade of the data plane")
		} else {
			s.log.WithFields(map[string]any{"pid": reply.New.PID, "build": reply.New.Build, "old_pid": reply.Old.PID, "old_build": reply.Old.Build}).
				Infof("the data plane was replaced; %d devices paused for at most %d ms", len(reply.Devices), reply.PauseMS)
		}
		s.mu.Lock()
		s.upgrading = false
		s.mu.Unlock()
		done <- outcome{reply, err}
	})
	s.mu.Unlock()
	select {
	case o := <-done:
		return o.reply, o.err
	case <-ctx.Done():
	}
	select {
	case o := <-done:
		return o.reply, o.err
	case <-s.life.Done(): // the daemon ends, and with it its callers' contexts: they hear how far it came
		o := <-done
		return o.reply, o.err
	case <-time.After(endingPause):
		return api.UpgradeReply{}, api.Wrap(ctx.Err(), api.ErrCancelled, "the upgrade goes on without you")
	}
}

// endingPause is how long a caller that has left is taken for one whom the end of the daemon has cut off.
const endingPause = 100 * time.Millisecond

var errEnding = api.Errorf(api.ErrAgain, "the daemon is ending; the next one takes the devices over")

// upgrade does the work of Upgrade. ctx ends with the daemon.
func (s *Service) upgrade(ctx context.Context) (api.UpgradeReply, error) {
	pc, err := s.plane.now()
	if err != nil {
		return s.bringBack(ctx)
	}
	if s.opt.Kill == nil {
		return api.UpgradeReply{}, api.Errorf(api.ErrNotSupported, "the data plane cannot be ended from here")
	}
	list, err := s.handOver(ctx, pc)
	if err != nil {
		return api.UpgradeReply{}, err
	}
	return s.await(ctx, api.DataPlane{PID: pc.hello.PID, Build: pc.hello.Build}, list)
}

// bringBack has a data plane started that is not there, without waiting for the next attempt.
func (s *Service) bringBack(ctx context.Context) (api.UpgradeReply, error) {
	list := slices.DeleteFunc(s.handedDevices(), func(x *handed) bool { return !x.waits })
	for _, x := range list {
		x.up, x.how, x.why = true, api.HandOverReissued, "the data plane had ended before"
	}
	s.plane.expect()
	return s.await(ctx, api.DataPlane{}, list)
}

// prepare has the next data plane get ready while the old one serves. The successor is nil if somebody else starts it.
func (s *Service) prepare(ctx context.Context, pc planeConn) (*Successor, error) {
	if s.opt.Prepare == nil {
		return nil, nil
	}
	pctx, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	next, err := s.opt.Prepare(pctx, pc.hello.PID)
	if queues := DeviceQueues(s.opt.RunDir); err == nil && next != nil && next.Hello.Reactors < queues {
		next.Drop()
		next, err = nil, fmt.Errorf("it has %d threads, the devices have %d queues", next.Hello.Reactors, queues)
	}
	if err != nil {
		return nil, api.Errorf(api.ErrAgain, "the new data plane does not start: %w; process %d goes on serving, nothing was changed", err, pc.hello.PID)
	}
	return next, nil
}

// handOver ends the data plane, with its requests answered as far as that can be had, and has the next one serve. It returns what has to come back.
func (s *Service) handOver(ctx context.Context, pc planeConn) ([]*handed, error) {
	pid := pc.hello.PID
	next, err := s.prepare(ctx, pc)
	if err != nil {
		return nil, err
	}
	given := next == nil
	defer func() {
		if !given {
			next.Drop()
		}
	}()
	lctx, cancel := s.bounded(ctx)
	free, err := s.targets.lockAll(lctx, "an upgrade of the data plane")
	cancel()
	if err != nil {
		return nil, api.Wrap(err, api.ErrTimeout, "upgrade: nothing was changed, try again")
	}
	defer free()
	list := s.handedDevices()
	defer s.reopenMemories(list)
	if err := s.closeMemories(ctx, list); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, errEnding
	}
	if pc.client.Err() != nil {
		return nil, api.Errorf(api.ErrAgain, "upgrade: the data plane, process %d, has just been lost; nothing was changed, try again", pid)
	}
	start, err := s.noteUpgrade(pid)
	if err != nil {
		return nil, api.Errorf(api.ErrDatabase, "upgrade: nothing was changed: %w", err)
	}

	// From here on it comes to its end, whoever ends: each step has its time.
	ctx = context.WithoutCancel(ctx)
	s.plane.hold()
	begin := time.Now()
	s.quiesce(ctx, list)
	quiesced := time.Now()
	s.drain(ctx, pc, list)
	drained := time.Now()
	s.noteClean(list)
	s.plane.replace(pid, next)
	given = true
	if now, serr := startTime(pid); serr != nil || now != start { // never another process of the same number
		err = unix.ESRCH
	} else {
		err = s.opt.Kill(pid)
	}
	if err != nil {
		s.plane.takeBack()
		s.noteClean(nil)
	}
	switch {
	case errors.Is(err, unix.ESRCH): // it has ended by itself, and another one may be on its way already
		return list, nil
	case err != nil:
		s.plane.set(api.DataPlaneUp, pc, "")
		return nil, api.Errorf(api.ErrInternal, "the devices wait, and the data plane, process %d, cannot be ended (%w): kill -9 it", pid, err)
	}
	select {
	case <-pc.client.Done():
	case <-time.After(deathTimeout):
		return nil, api.Errorf(api.ErrInternal, "the devices wait: the data plane, process %d, was killed and is still there; "+
			"they are taken over when it is gone", pid)
	}
	s.log.WithField("pid", pid).Infof("ended the data plane: new requests held back after %v, the others answered after %v, gone after %v",
		quiesced.Sub(begin).Round(time.Millisecond), drained.Sub(begin).Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
	return list, nil
}

// handedDevices lists what the data plane has.
func (s *Service) handedDevices() []*handed {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*handed
	for id, ss := range s.sessions {
		if ss.state == api.SessionLogin {
			continue
		}
		up := ss.state == api.SessionUp && !ss.orphan
		if len(ss.devices) == 0 {
			list = append(list, &handed{group: id, up: up, waits: ss.orphan, since: ss.group.Since})
		}
		for _, d := range ss.devices {
			if d.state == api.DeviceLive || d.state == api.DeviceWaiting {
				list = append(list, &handed{device: d, group: id, up: up, waits: ss.orphan || d.state == api.DeviceWaiting, since: ss.group.Since, state: d.state})
			}
		}
	}
	return list
}

// closeMemories ends registering. No command may be under way when the data plane ends: the kernel would wait with it for requests that only the next one
// answers, and the next one for the command (see registration.go).
func (s *Service) closeMemories(ctx context.Context, list []*handed) error {
	var work errgroup.Group
	for _, x := range list {
		if x.device == nil || x.memory == nil {
			continue
		}
		work.Go(func() error {
			s.closeMemory(ctx, x.memory)
			s.mu.Lock()
			working := x.memory.working
			s.mu.Unlock()
			if _, noted := s.readNote(x.UblkID); working || noted { // the kernel may have the command still
				return api.Errorf(api.ErrAgain, "upgrade: memory is being registered with %s, which does not end; nothing was changed, try again", x.path())
			}
			return nil
		})
	}
	return work.Wait()
}

// reopenMemories is the way back from closeMemories.
func (s *Service) reopenMemories(list []*handed) {
	for _, x := range list {
		if x.device != nil {
			s.reopenMemory(x.memory)
		}
	}
}

// quiesce has the kernel hold new requests back. A device for which it does not is handed over like that of a data plane that has died.
func (s *Service) quiesce(ctx context.Context, list []*handed) {
	b, err := s.control()
	now := time.Now()
	var work errgroup.Group
	work.SetLimit(4 * atOnce)
	for _, x := range list {
		x.how, x.since = api.HandOverReissued, now
		switch {
		case x.device == nil:
		case err != nil:
			x.why = oneLine(err)
		case x.device.state != api.DeviceLive:
			x.why = "the device was " + x.device.state
		case !x.up:
			x.why = "its session was not up"
		default:
			work.Go(func() error {
				x.since = time.Now()
				switch err := s.run(ctx, func(ctx context.Context) error { return b.Quiesce(ctx, x.UblkID, quiesceTimeout) }); {
				case err == nil:
					x.how = api.HandOverQuiesced
				case errors.Is(err, ublk.ErrNotSupported):
					x.why = "the kernel cannot quiesce devices; Linux 6.16 and later can"
				default:
					x.why = oneLine(err)
				}
				return nil
			})
		}
	}
	_ = work.Wait()
}

// drain waits until the data plane has answered what it has of the devices that are quiesced. It looks twice, because an answer reaches the kernel with the
// end of the reactor's turn; once is enough if the kernel has every tag back.
func (s *Service) drain(ctx context.Context, pc planeConn, list []*handed) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	var err error
	left := make(map[int]int) // requests under way, by device
	quiet := 0
	_ = waitQuiet(ctx, drainPoll, func() bool {
		var st ipc.State
		if err = pc.call(ctx, ipc.MethodState, ipc.Empty{}, &st); err != nil {
			return true
		}
		clear(left)
		gone := true
		for _, x := range list {
			for _, d := range st.Devices {
				if x.how != api.HandOverQuiesced || d.UblkID != x.UblkID {
					continue
				}
				gone = gone && d.State == ipc.DeviceGone
				for _, q := range d.Queues {
					if q.InFlight > 0 {
						left[d.UblkID] += q.InFlight
					}
				}
			}
		}
		if quiet++; len(left) > 0 {
			quiet = 0
		}
		return quiet == 2 || quiet == 1 && gone
	})
	for _, x := range list {
		switch {
		case x.how != api.HandOverQuiesced:
		case err != nil && len(left) == 0:
			x.how, x.why = api.HandOverReissued, "the old data plane did not say whether all is answered: "+oneLine(err)
		case left[x.UblkID] > 0:
			x.how, x.why = api.HandOverReissued, fmt.Sprintf("%d requests were not answered within %v", left[x.UblkID], drainTimeout)
		}
	}
}

// noteClean notes the session groups whose devices have all been quiesced and have had all their answers.
func (s *Service) noteClean(list []*handed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answered = map[string]bool{}
	for _, x := range list {
		if x.device != nil {
			s.answered[x.group] = true
		}
	}
	for _, x := range list {
		if x.device != nil && x.how != api.HandOverQuiesced {
			delete(s.answered, x.group)
		}
	}
}

// await waits until all is back, and tells. It fails when there is no data plane.
func (s *Service) await(ctx context.Context, old api.DataPlane, list []*handed) (api.UpgradeReply, error) {
	changes, done := s.Watch()
	defer done()
	limit := time.NewTimer(handOverLimit)
	defer limit.Stop()
	reply := api.UpgradeReply{Version: api.Version, Old: old, Devices: []api.HandedDevice{}, Problems: []string{}}
	for late := false; ; {
		st, h, why := s.plane.outcome()
		var waiting []string
		if st == api.DataPlaneUp {
			waiting = s.lookBack(list)
		}
		switch {
		case st == api.DataPlaneUp && (len(waiting) == 0 || late):
			reply.New = api.DataPlane{PID: h.PID, Build: h.Build}
			reply.Problems = append(reply.Problems, waiting...)
			s.tellHanded(&reply, list)
			return reply, nil
		case st == api.DataPlaneDown || late:
			return reply, api.Errorf(api.ErrAgain, "no data plane serves: %s; %d devices wait, without errors: install one that works, then run "+
				"iserctl daemon upgrade (it is tried again every few seconds, too)", why, countDevices(list))
		}
		select {
		case <-changes:
		case <-limit.C:
			late = true
		case <-ctx.Done():
			return reply, errEnding
		}
	}
}

func countDevices(list []*handed) (n int) {
	for _, x := range list {
		if x.device != nil {
			n++
		}
	}
	return n
}

// lookBack notes what has come back, and says what has not.
func (s *Service) lookBack(list []*handed) (waiting []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range list {
		if !x.back.IsZero() {
			continue
		}
		ss := s.sessions[x.group]
		if ss == nil {
			x.back = time.Now() // logged out meanwhile
			continue
		}
		text := ""
		if ss.orphan || x.up && ss.state != api.SessionUp {
			text = fmt.Sprintf("the session with %s is %s", ss.group.Target, ss.state)
			if ss.group.Error != nil {
				text += ": " + ss.group.Error.Text
			}
		}
		if x.device != nil {
			now := ss.devices[x.UblkID]
			if now == nil {
				x.back, x.state = time.Now(), api.DeviceDead
				continue
			}
			if x.state = now.state; now.state == api.DeviceWaiting {
				text = fmt.Sprintf("%s waits: %s", x.path(), cmp.Or(ss.reasons[x.Unit.LUN], text, "it is not taken over yet"))
			}
		}
		if text == "" {
			x.back = time.Now()
		} else if !slices.Contains(waiting, text) {
			waiting = append(waiting, text)
		}
	}
	slices.Sort(waiting)
	return waiting
}

// tellHanded fills in what became of the devices.
func (s *Service) tellHanded(reply *api.UpgradeReply, list []*handed) {
	for _, x := range list {
		if x.device == nil {
			continue
		}
		end := x.back
		if end.IsZero() {
			end = time.Now()
		}
		d := api.HandedDevice{
			Device: x.path(), Target: x.Target, LUN: x.Unit.Number, State: x.state, How: x.how, Reason: x.why, PauseMS: end.Sub(x.since).Milliseconds(),
		}
		reply.PauseMS = max(reply.PauseMS, d.PauseMS)
		reply.Devices = append(reply.Devices, d)
	}
	slices.SortFunc(reply.Devices, func(a, b api.HandedDevice) int {
		return cmp.Or(cmp.Compare(len(a.Device), len(b.Device)), cmp.Compare(a.Device, b.Device))
	})
}

// upgradeNote names a data plane that is about to end, though it may still answer.
type upgradeNote struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after boot
}

func (s *Service) upgradeFile() string { return filepath.Join(s.opt.RunDir, "upgrade.json") }

// noteUpgrade notes that a data plane is about to end. It returns when that was started, which no other process of the same number was.
func (s *Service) noteUpgrade(pid int) (start uint64, err error) {
	if start, err = startTime(pid); err != nil {
		return 0, err
	}
	b, err := json.Marshal(upgradeNote{PID: pid, Start: start})
	if err != nil {
		return 0, err
	}
	tmp := s.upgradeFile() + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return 0, err
	}
	return start, os.Rename(tmp, s.upgradeFile())
}

// forgetUpgrade removes the note: the data plane that it names is gone.
func (s *Service) forgetUpgrade() { s.removeFile(s.upgradeFile()) }

// finishUpgrade ends a data plane that was about to be replaced when the daemon ended, or lost it: its devices may be quiesced, and look dead. It tells
// whether this is such a one.
func (s *Service) finishUpgrade(pc planeConn) bool {
	pid := pc.hello.PID
	b, err := os.ReadFile(s.upgradeFile())
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	var n upgradeNote
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil {
		s.log.WithError(err).Errorf("%s makes no sense", s.upgradeFile())
		return false
	}
	if start, err := startTime(pid); err != nil || n.PID != pid || n.Start != start {
		s.forgetUpgrade()
		return false
	}
	log := s.log.WithField("pid", pid)
	if s.opt.Kill == nil {
		log.Error("the data plane was to be replaced and cannot be ended from here: kill -9 it")
		return true
	}
	log.Warn("the data plane was being replaced when it was last seen; it is ended now, and the next one takes over")
	s.plane.replace(pid, nil)
	if err := s.opt.Kill(pid); err != nil {
		s.plane.takeBack()
		log.WithError(err).Error("the data plane is to be replaced and cannot be ended: kill -9 it")
	}
	return true
}

// The plane's part.

// hold makes requests wait for the next data plane.
func (p *plane) hold() {
	p.mu.Lock()
	c := p.conn
	p.mu.Unlock()
	p.set(api.DataPlaneStarting, c, "the data plane is being replaced")
}

// replace says that the data plane is being ended, and what serves after it; nil for one that is started then.
func (p *plane) replace(pid int, next *Successor) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ending, p.next = pid, next
	p.expectLocked()
}

// takeBack is the way back from replace. A successor that does not serve yet is dropped.
func (p *plane) takeBack() {
	p.mu.Lock()
	next := p.next
	p.ending, p.next = 0, nil
	p.mu.Unlock()
	if next != nil {
		next.Drop()
	}
}

// expect has the next data plane looked for, or started, at once.
func (p *plane) expect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expectLocked()
	select {
	case p.hurry <- struct{}{}:
	default:
	}
}

// expectLocked has the outcome of what is tried from now on count. Preconditions: p.mu is held.
func (p *plane) expectLocked() {
	p.asked, p.failures = time.Now(), 0
	p.soon = p.asked.Add(launchTimeout)
}

// outcome tells how the attempts to get the next data plane have gone: it is starting, up, or down for the reason.
func (p *plane) outcome() (state string, h ipc.HelloReply, why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.ending != 0 || p.st == api.DataPlaneUp && p.conn.client.Err() != nil || p.st == api.DataPlaneDown && p.failures == 0:
		return api.DataPlaneStarting, h, p.why
	}
	return p.st, p.conn.hello, p.why
}
