package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// A device can always be ended, whatever its target, its data plane and its users do; nothing here waits for ever:
//
//	data plane answers         it fails the device's requests (dataplane/abort.go), then STOP_DEV has nothing to wait for
//	device waits for one       STOP_DEV fails the requests, which the kernel has
//	data plane does not answer it is killed, on demand: from then on its devices wait, and all but this one are taken over by the next
//
// STOP_DEV is never sent while the data plane has requests that it does not answer: it would hang, with the device.

// abortedReason is shown for a unit whose device was aborted. It is not served again before somebody asks for it.
const abortedReason = "aborted by the administrator; iserctl rescan serves it again"

// Abort ends a device: its requests fail, the block device goes away, users keep an open file without a disk. The session stays, with its other
// devices. Without Force a device that works is not taken from its users, and a data plane that does not answer is not killed.
func (s *Service) Abort(ctx context.Context, r api.AbortRequest) (api.AbortReply, error) {
	reply := api.AbortReply{Version: api.Version}
	name, ok := strings.CutPrefix(strings.TrimPrefix(r.Device, "/dev/"), "ublkb")
	id, err := strconv.Atoi(name)
	if !ok || err != nil || id < 0 {
		return reply, api.Errorf(api.ErrInvalidArgs, "%q: expected a device such as /dev/ublkb0", r.Device)
	}
	ss, d, err := s.deviceByNumber(ctx, id)
	if err != nil {
		return reply, err
	}
	if err := s.mayAbort(ss, d, r.Force); err != nil {
		return reply, err
	}
	ctx = context.WithoutCancel(ctx) // half of it helps nobody, and every step has its own time
	if _, err := s.reach(ctx, d, r.Force); err != nil {
		return reply, err
	}
	lctx, cancel := s.bounded(ctx)
	unlock, err := s.targets.lockSoon(lctx, d.Target, "an abort")
	cancel()
	if err != nil {
		return reply, api.Wrap(err, api.ErrTimeout, "abort %s: the target %s is being worked on; nothing was changed, try again", d.path(), d.Target)
	}
	defer unlock()
	ss, now, err := s.deviceByNumber(ctx, id)
	if err != nil {
		return reply, err
	}
	if now.Group != d.Group || now.Unit.LUN != d.Unit.LUN {
		return reply, api.Errorf(api.ErrNotFound, "%s has just become the device of another unit; nothing was changed", d.path())
	}
	if err := s.mayAbort(ss, now, r.Force); err != nil {
		return reply, err
	}
	if err := s.abort(ctx, ss, now); err != nil {
		return reply, err
	}
	reply.Device, reply.Target, reply.LUN = now.path(), now.Target, now.Unit.Number
	if ss != nil {
		reply.SessionID = ss.number
	}
	return reply, nil
}

// deviceByNumber finds a device and its session. A device that only its record tells of, because there was no data plane since the daemon began, has none.
func (s *Service) deviceByNumber(ctx context.Context, id int) (*session, *device, error) {
	s.mu.Lock()
	for _, ss := range s.sessions {
		if d := ss.devices[id]; d != nil {
			s.mu.Unlock()
			return ss, d, nil
		}
	}
	s.mu.Unlock()
	if r, ok := s.readDevices()[id]; ok {
		if _, f := s.driverState(ctx, &r); f != 0 { // it is there, and ours
			return nil, &device{deviceRecord: r, state: api.DeviceWaiting}, nil
		}
	}
	return nil, nil, api.Errorf(api.ErrNotFound, "no device %s; see: iserctl device list", devicePath(id))
}

// mayAbort refuses while somebody uses a device that works.
func (s *Service) mayAbort(ss *session, d *device, force bool) error {
	if force || ss == nil {
		return nil
	}
	s.mu.Lock()
	works := ss.state == api.SessionUp && !ss.orphan && d.state == api.DeviceLive
	s.mu.Unlock()
	if !works {
		return nil
	}
	holders, err := s.opt.Holders([]int{d.UblkID})
	if err != nil {
		return api.Errorf(api.ErrInternal, "who uses %s cannot be found out: %w", d.path(), err)
	}
	if list := holders[d.UblkID]; len(list) > 0 {
		return api.Errorf(api.ErrBusy, "%s is in use: %s; --force ends it with I/O errors for them", d.path(), strings.Join(list, ", "))
	}
	return nil
}

// answering is the data plane, if it answers.
func (s *Service) answering(ctx context.Context) (planeConn, error) {
	gctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	pc, err := s.plane.get(gctx)
	if err == nil {
		var st ipc.State
		err = pc.call(gctx, ipc.MethodState, ipc.Empty{}, &st)
	}
	return pc, err
}

// reach finds the data plane. One that does not answer is killed if force is set and the device, or whoever waits for an answer, needs it to go; a device
// that waits needs none, and gets an empty planeConn then.
func (s *Service) reach(ctx context.Context, d *device, force bool) (planeConn, error) {
	pc, why := s.answering(ctx)
	if why == nil {
		return pc, nil
	}
	b, err := s.control()
	if err != nil {
		return planeConn{}, err
	}
	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, d.UblkID) })
	if err != nil {
		return planeConn{}, blockError(err)
	}
	stuck, pid := pc.client != nil && pc.client.Err() == nil, info.PID
	if stuck {
		pid = pc.hello.PID
	}
	live := info.State == ublk.StateLive
	switch {
	case !live && !(stuck && force):
		return planeConn{}, nil
	case !stuck && isGone(pid): // the kernel is about to notice
	case !force:
		return planeConn{}, api.Errorf(api.ErrAgain, "%s: its data plane, process %d, does not answer (%s); "+
			"--force kills it, other devices then wait for the next one", d.path(), pid, oneLine(why))
	case s.opt.Kill == nil || pid <= 0:
		return planeConn{}, api.Errorf(api.ErrAgain, "%s: its data plane does not answer (%s) and cannot be killed from here", d.path(), oneLine(why))
	default:
		s.log.WithField("pid", pid).WithError(why).Error("the data plane does not answer and is killed, so that a device can be aborted")
		if err := s.opt.Kill(pid); err != nil {
			return planeConn{}, api.Errorf(api.ErrInternal, "kill the data plane, process %d: %w", pid, err)
		}
	}
	return planeConn{}, s.awaitQuiesced(ctx, b, d, pid)
}

// quiescePoll is the time between two questions to the driver how a device stands.
const quiescePoll = 10 * time.Millisecond

// awaitQuiesced waits until the kernel has taken a device from a data plane that has ended, which no event tells. Another one may have it by then.
func (s *Service) awaitQuiesced(ctx context.Context, b Blocks, d *device, pid int) error {
	wctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	var err error
	wait := waitQuiet(wctx, quiescePoll, func() bool {
		var info ublk.DeviceInfo
		info, err = step(wctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, d.UblkID) })
		return err != nil || info.State != ublk.StateLive || info.PID != pid
	})
	if err == nil && wait != nil {
		return api.Errorf(api.ErrAgain, "%s: the kernel has not taken it from process %d, which was killed, within %v; try again", d.path(), pid, releaseTimeout)
	}
	return blockError(err)
}

// abort does the work of Abort. Preconditions: the target's lock is held.
func (s *Service) abort(ctx context.Context, ss *session, d *device) error {
	b, err := s.control()
	if err != nil {
		return err
	}
	pc, why := s.answering(ctx)
	if why != nil {
		pc = planeConn{}
	} else {
		why = s.run(ctx, func(ctx context.Context) error {
			return pc.call(ctx, ipc.MethodAbort, ipc.AbortRequest{UblkID: d.UblkID}, nil)
		})
	}
	if why != nil { // nobody fails the requests but the kernel, and that only while it has them
		info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, d.UblkID) })
		if err != nil && !errors.Is(err, ublk.ErrNotFound) {
			return blockError(err)
		}
		if err == nil && info.State == ublk.StateLive {
			return api.Errorf(api.ErrAgain, "abort %s: its data plane, process %d, does not end its requests (%s); end that process, then abort again",
				d.path(), info.PID, oneLine(why))
		}
	}
	if err := s.noteAborted(unitKey{d.Group, d.Unit.LUN}); err != nil {
		s.log.WithError(err).WithField("dev", d.path()).Error("the next daemon will serve the unit of the aborted device again")
	}
	s.closeMemory(ctx, d.memory)
	if err := s.run(ctx, func(ctx context.Context) error { return s.stop(ctx, b, d, true) }); err != nil {
		return api.Wrap(err, api.ErrInternal, "abort %s: its requests fail, the block device stays; try again", d.path())
	}
	err = s.removeBy(ctx, pc, d, b.DeleteAsync)
	if ss != nil {
		s.mu.Lock()
		delete(ss.devices, d.UblkID)
		ss.reasons[d.Unit.LUN] = abortedReason
		s.changedLocked()
		s.mu.Unlock()
	}
	if err != nil {
		return api.Wrap(err, api.ErrInternal, "abort %s: the block device is gone, its number is not free yet", d.path())
	}
	s.log.WithFields(map[string]any{"dev": d.path(), "target": d.Target, "lun": d.Unit.Number}).Warn("aborted")
	return nil
}

func (s *Service) abortedFile() string { return filepath.Join(s.opt.RunDir, "aborted.json") }

// readAborted reads which units an earlier daemon was told not to serve.
func (s *Service) readAborted() map[unitKey]bool {
	m := make(map[unitKey]bool)
	var list []unitKey
	b, err := os.ReadFile(s.abortedFile())
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.WithError(err).Error("which devices were aborted is not known any more; their units are served again")
	}
	for _, u := range list {
		m[u] = true
	}
	return m
}

// noteAborted notes that a unit is not to be served before somebody asks for it.
func (s *Service) noteAborted(u unitKey) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aborted[u] = true
	return s.writeAbortedLocked()
}

// forgetAborted lets the units of a session group be served again.
func (s *Service) forgetAborted(group string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.aborted)
	for u := range s.aborted {
		if u.Group == group {
			delete(s.aborted, u)
		}
	}
	if len(s.aborted) == n {
		return
	}
	if err := s.writeAbortedLocked(); err != nil {
		s.log.WithError(err).Error("the next daemon will not serve units whose devices were aborted")
	}
}

// writeAbortedLocked stores the list; RUN is a tmpfs. Preconditions: s.mu is held.
func (s *Service) writeAbortedLocked() error {
	list := []unitKey{}
	for u := range s.aborted {
		list = append(list, u)
	}
	slices.SortFunc(list, func(a, b unitKey) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	b, err := json.Marshal(list)
	if err == nil {
		tmp := s.abortedFile() + ".tmp"
		if err = os.WriteFile(tmp, append(b, '\n'), 0o600); err == nil {
			err = os.Rename(tmp, s.abortedFile())
		}
	}
	return err
}
