package dataplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/scsi"
)

// Persistent reservations. A unit is reached through one session per reactor, and each of them is an I_T nexus to the target (RFC 7143 section 4.4.3:
// the ISID is part of the initiator port's name). So a key is registered by every session, and a reservation has to be of a type that lets all
// registered nexuses in.
//
// A registration outlives the loss of its nexus (SPC-4, persistent reservations: it is ended by the service actions, or by a loss of power without
// APTPL), and a session that is reinstated with its ISID is the same nexus again. Not every target keeps to that: LIO forgets the registrations of an
// initiator without an explicit ACL when its session ends. So a session that comes back registers again before requests may use it, but only if nobody
// has taken the registration away meanwhile: an initiator that was preempted must stay out, or fencing would be worth nothing.

// registration is what the sessions of a group are registered with at a unit.
type registration struct {
	key            uint64
	allTargetPorts bool
	persistLoss    bool
	generation     uint32 // PRGENERATION when all of them were
}

// reserve runs a service action, on every session where that is needed. One that fails half way is taken back as far as that is possible.
func (p *Plane) reserve(ctx context.Context, r ipc.ReserveRequest) (ipc.ReserveReply, error) {
	g, err := p.group(r.Group)
	if err != nil {
		return ipc.ReserveReply{}, err
	}
	action, kind := scsi.ReserveOut(r.Action), scsi.ReservationType(r.Type)
	if err := checkReserve(r, len(g.paths)); err != nil {
		return ipc.ReserveReply{}, &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("%v: %v", action, err)}
	}
	if !g.reserving.TryLock() {
		return ipc.ReserveReply{}, &ipc.Error{Code: api.ErrBusy, Text: "another reservation command for this target is at work"}
	}
	defer g.reserving.Unlock()
	ctx, cancel := commandContext(ctx, r.Timeout)
	defer cancel()
	lun := scsi.LUN(r.LUN)
	q := scsi.ReserveParameters{
		Key: r.Key, ActionKey: r.ActionKey, PersistLoss: r.PersistLoss, AllTargetPorts: r.AllTargetPorts, ReservationType: kind,
	}
	paths := g.paths
	switch action {
	case scsi.Reserve, scsi.Clear, scsi.Preempt, scsi.PreemptAndAbort:
		paths = paths[:1] // one nexus does it for all
	}
	for i, path := range paths {
		err := executor{p: path}.persistentReserveOut(ctx, lun, action, q)
		if err == nil {
			continue
		}
		err = fmt.Errorf("%v by session %d of %d: %w", action, i+1, len(g.paths), err)
		if i > 0 {
			err = fmt.Errorf("%w; %s", err, g.takeBack(ctx, lun, action, q, i))
		}
		return ipc.ReserveReply{Sessions: i}, reserveError(err)
	}
	g.noteReserve(ctx, lun, action, q)
	return ipc.ReserveReply{Sessions: len(paths)}, nil
}

// checkReserve refuses what makes no sense, and what would lock our own sessions out.
func checkReserve(r ipc.ReserveRequest, sessions int) error {
	action, kind := scsi.ReserveOut(r.Action), scsi.ReservationType(r.Type)
	switch action {
	case scsi.Register, scsi.RegisterAndIgnoreExistingKey:
		return nil
	case scsi.Clear:
		if r.Key == 0 {
			return errors.New("the key is missing")
		}
		return nil
	case scsi.Reserve, scsi.Release, scsi.Preempt, scsi.PreemptAndAbort:
	default:
		return errors.New("this service action is not supported")
	}
	switch {
	case r.Key == 0:
		return errors.New("the key is missing")
	case !kind.Valid():
		return fmt.Errorf("%v does not exist", kind)
	case action == scsi.Release:
		return nil
	case kind.OneNexus() && sessions > 1:
		return fmt.Errorf("%v lets only the session in that made the reservation, and the device has %d of them (one per CPU): use the type "+
			"Registrants Only or All Registrants, or run the daemon with reactors = 1", kind, sessions)
	case action == scsi.Reserve:
		return nil
	case sessions > 1 && (r.ActionKey == r.Key || r.ActionKey == 0):
		return fmt.Errorf("to preempt the key %#x would take the registrations of this device's other sessions away", r.ActionKey)
	}
	return nil
}

// persistentReserveOut runs PERSISTENT RESERVE OUT.
func (e executor) persistentReserveOut(ctx context.Context, lun scsi.LUN, action scsi.ReserveOut, q scsi.ReserveParameters) error {
	c := command{lun: lun, out: make([]byte, scsi.ReserveParametersLength)}
	scsi.PersistentReserveOut(&c.cdb, c.out, action, q)
	a, err := e.settle(ctx, c)
	if err != nil {
		return err
	}
	return a.err()
}

// err is the failure that the unit reports, nil for none.
func (a *answer) err() error {
	if a.Status == scsi.StatusGood {
		return nil
	}
	e := &scsi.StatusError{Status: a.Status, Residual: a.residual}
	if s, err := scsi.ParseSense(a.Sense); err == nil {
		e.Sense = &s
		if s.Key == scsi.KeyRecoveredError {
			return nil
		}
	}
	return e
}

// readKeys runs READ KEYS.
func (e executor) readKeys(ctx context.Context, lun scsi.LUN) (scsi.RegisteredKeys, error) {
	for n := 1 << 10; ; {
		c := command{lun: lun, in: n}
		scsi.PersistentReserveIn(&c.cdb, scsi.ReadKeys, uint16(n))
		a, err := e.settle(ctx, c)
		if err == nil {
			err = a.err()
		}
		if err != nil {
			return scsi.RegisteredKeys{}, err
		}
		keys, needed, err := scsi.ParseReadKeys(a.Data)
		if err != nil || needed <= n || n == 0xfff8 {
			return keys, err
		}
		n = min(needed, 0xfff8)
	}
}

// takeBack undoes a service action on the sessions that have carried it out already, and says how that went.
func (g *group) takeBack(ctx context.Context, lun scsi.LUN, action scsi.ReserveOut, q scsi.ReserveParameters, n int) string {
	if action != scsi.Register {
		return fmt.Sprintf("%d of %d sessions have done it: repeat the command", n, len(g.paths))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	back := scsi.ReserveParameters{Key: q.ActionKey, ActionKey: q.Key}
	for _, p := range g.paths[:n] {
		if err := (executor{p: p}).persistentReserveOut(ctx, lun, scsi.Register, back); err != nil {
			return fmt.Sprintf("session %d cannot take it back (%v): use register-ignore", p.reactor.index+1, err)
		}
	}
	return "taken back"
}

// noteReserve keeps what a session that comes back needs to know.
func (g *group) noteReserve(ctx context.Context, lun scsi.LUN, action scsi.ReserveOut, q scsi.ReserveParameters) {
	g.mu.Lock()
	now := g.registered[lun]
	g.mu.Unlock()
	switch action {
	case scsi.Register, scsi.RegisterAndIgnoreExistingKey:
		now = registration{key: q.ActionKey, allTargetPorts: q.AllTargetPorts, persistLoss: q.PersistLoss}
	case scsi.Clear:
		now.key = 0
	}
	if now.key != 0 {
		keys, err := executor{p: g.paths[0]}.readKeys(ctx, lun)
		if err != nil || !slices.Contains(keys.Keys, now.key) {
			now.key = 0 // what cannot be told from a registration that was taken away is not made again
		}
		now.generation = keys.Generation
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if now.key == 0 {
		delete(g.registered, lun)
		return
	}
	if g.registered == nil {
		g.registered = make(map[scsi.LUN]registration)
	}
	g.registered[lun] = now
}

// restoreTimeout bounds how long a session that has come back is kept from requests for the sake of its registrations.
const restoreTimeout = 10 * time.Second

// restoreRegistrations registers a session that has come back at every unit where it was. A registration that somebody has taken away stays away: the
// key is not among those that are registered any more (PREEMPT removes all nexuses with a key at once), and the generation has moved on. The error
// says that the session was lost.
func (p *path) restoreRegistrations(ctx context.Context, exec executor, except map[scsi.LUN]bool) error {
	g := p.group
	g.mu.Lock()
	list := make(map[scsi.LUN]registration, len(g.registered))
	for lun, r := range g.registered {
		if !except[lun] {
			list[lun] = r
		}
	}
	g.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	for lun, r := range list {
		log := g.log(p).WithField("lun", lun.String())
		generation, err := exec.restore(ctx, lun, r)
		var status *scsi.StatusError
		switch {
		case err == nil:
			log.Infof("registered again with key %#x", r.key)
			g.mu.Lock()
			if now, ok := g.registered[lun]; ok && now.key == r.key {
				now.generation = generation
				g.registered[lun] = now
			}
			g.mu.Unlock()
		case errors.Is(err, errPreempted), errors.As(err, &status):
			log.WithError(err).Error("not registered again: the device may meet a reservation conflict; see: iserctl scsi reserve keys")
		default:
			return fmt.Errorf("register again at unit %v: %w", lun, err)
		}
	}
	return nil
}

// errPreempted tells that a registration has been taken away.
var errPreempted = errors.New("somebody has taken the registration away")

// restore registers one nexus again, and returns the generation after that.
func (e executor) restore(ctx context.Context, lun scsi.LUN, r registration) (uint32, error) {
	keys, err := e.readKeys(ctx, lun)
	if err != nil {
		return 0, err
	}
	if !slices.Contains(keys.Keys, r.key) && keys.Generation != r.generation {
		return 0, fmt.Errorf("%w: key %#x is not there, and the generation went from %d to %d", errPreempted, r.key, r.generation, keys.Generation)
	}
	q := scsi.ReserveParameters{ActionKey: r.key, PersistLoss: r.persistLoss, AllTargetPorts: r.allTargetPorts}
	if err := e.persistentReserveOut(ctx, lun, scsi.RegisterAndIgnoreExistingKey, q); err != nil {
		return 0, err
	}
	keys, err = e.readKeys(ctx, lun)
	return keys.Generation, err
}

// reserveError names a failure.
func reserveError(err error) error {
	switch {
	case errors.Is(err, scsi.ErrReservationConflict):
		return &ipc.Error{Code: api.ErrReservationConflict, Text: err.Error() + ": the key is not the one that is registered, or another initiator holds the unit"}
	case errors.Is(err, scsi.ErrIllegalRequest):
		return &ipc.Error{Code: api.ErrNotSupported, Text: err.Error()}
	}
	return commandError(err)
}
