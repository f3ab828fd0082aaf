package daemon

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/scsi"
)

// unitPlace is where a logical unit is.
type unitPlace struct {
	group string
	lun   uint64
	names []string // transport IDs of the sessions, as SPC has them
}

// findUnit looks a unit up. One that is named by a session need not be among those that the target reported.
func (s *Service) findUnit(u api.UnitName) (unitPlace, error) {
	group, _, err := s.find(u.Name)
	if err != nil {
		return unitPlace{}, err
	}
	name, isDevice := strings.CutPrefix(strings.TrimPrefix(u.Name, "/dev/"), "ublkb")
	s.mu.Lock()
	defer s.mu.Unlock()
	ss := s.sessions[group]
	if ss == nil {
		return unitPlace{}, api.Errorf(api.ErrSessionNotFound, "the session has just been ended")
	}
	p := unitPlace{group: group}
	for _, c := range ss.group.Sessions {
		p.names = append(p.names, fmt.Sprintf("%s,i,0x%x", ss.group.InitiatorName, c.ISID[:]))
	}
	id, err := strconv.Atoi(name)
	switch {
	case isDevice && u.LUN != nil:
		return p, api.Errorf(api.ErrInvalidArgs, "%s is one logical unit already: name a session to choose another one", u.Name)
	case isDevice && err == nil && ss.devices[id] != nil && ss.devices[id].reason != "":
		return p, api.Errorf(api.ErrNotFound, "%s: %s; what is there now is reached by the session and --lun", ss.devices[id].path(), ss.devices[id].reason)
	case isDevice && err == nil && ss.devices[id] != nil:
		p.lun = ss.devices[id].Unit.LUN
		return p, nil
	case u.LUN == nil:
		return p, api.Errorf(api.ErrInvalidArgs, "%s is a session: give the number of a logical unit", u.Name)
	}
	p.lun = uint64(scsi.NewLUN(*u.LUN))
	for i := range ss.group.Units { // by the address that the target gave it
		if ss.group.Units[i].Number == *u.LUN {
			p.lun = ss.group.Units[i].LUN
		}
	}
	return p, nil
}

// commandMargin is how long the answer of the data plane may take beyond a command's own time.
const commandMargin = 5 * time.Second

// command checks a time-out, and makes a context that leaves room for the answer.
func command(ctx context.Context, timeout api.Seconds) (context.Context, context.CancelFunc, time.Duration, error) {
	d := timeout.Duration()
	switch {
	case d == 0:
		d = 30 * time.Second
	case d < 0 || d > 15*time.Minute:
		return ctx, func() {}, 0, api.Errorf(api.ErrInvalidArgs, "time-out of %v: expected up to 15 minutes", d)
	}
	ctx, cancel := context.WithTimeout(ctx, d+commandMargin)
	return ctx, cancel, d, nil
}

// Scsi sends one command to a logical unit and returns what the unit answered. A command that changes something needs Force: nothing on this side
// learns of it.
func (s *Service) Scsi(ctx context.Context, r api.ScsiRequest) (api.ScsiReply, error) {
	reply := api.ScsiReply{Version: api.Version}
	switch {
	case len(r.CDB) == 0:
		return reply, api.Errorf(api.ErrInvalidArgs, "the command is missing")
	case r.In < 0 || r.In > ipc.MaxScsiData || len(r.Out) > ipc.MaxScsiData:
		return reply, api.Errorf(api.ErrInvalidArgs, "%d bytes of data: a command may move %d", max(r.In, len(r.Out)), ipc.MaxScsiData)
	case r.In > 0 && len(r.Out) > 0:
		return reply, api.Errorf(api.ErrInvalidArgs, "a command reads or writes, not both")
	}
	if n := scsi.CDBLength(r.CDB[0]); n != 0 && len(r.CDB) < n {
		return reply, api.Errorf(api.ErrInvalidArgs, "command %#02x has %d bytes, %d were given", r.CDB[0], n, len(r.CDB))
	}
	if ok, why := scsi.ReadsOnly(r.CDB); !ok && !r.Force {
		return reply, api.Errorf(api.ErrInvalidArgs, "command %#02x is sent only with --force (force in the API): %s", r.CDB[0], why)
	}
	place, err := s.findUnit(r.Unit)
	if err != nil {
		return reply, err
	}
	ctx, cancel, timeout, err := command(ctx, r.Timeout)
	defer cancel()
	if err != nil {
		return reply, err
	}
	a, err := s.scsi(ctx, place, ipc.ScsiRequest{CDB: r.CDB, In: r.In, Out: r.Out, Timeout: timeout, SkipAttention: r.SkipAttention})
	if err != nil {
		return reply, api.Wrap(err, api.ErrInternal, "command %#02x to %s", r.CDB[0], r.Unit.Name)
	}
	reply.Status, reply.StatusName, reply.Sense, reply.Data, reply.Residual = a.Status, scsi.Status(a.Status).String(), a.Sense, a.Data, a.Residual
	if sense, err := scsi.ParseSense(a.Sense); err == nil {
		reply.SenseText = sense.String()
	}
	return reply, nil
}

// scsi runs a command at a place.
func (s *Service) scsi(ctx context.Context, place unitPlace, r ipc.ScsiRequest) (ipc.ScsiReply, error) {
	var a ipc.ScsiReply
	pc, err := s.plane.get(ctx)
	if err != nil {
		return a, err
	}
	r.Group, r.LUN = place.group, place.lun
	return a, pc.call(ctx, ipc.MethodScsi, r, &a)
}

// reserveActions are the service actions by their names.
var reserveActions = map[string]scsi.ReserveOut{
	api.ReserveRegister: scsi.Register, api.ReserveRegisterIgnore: scsi.RegisterAndIgnoreExistingKey, api.ReserveReserve: scsi.Reserve,
	api.ReserveRelease: scsi.Release, api.ReserveClear: scsi.Clear, api.ReservePreempt: scsi.Preempt, api.ReservePreemptAbort: scsi.PreemptAndAbort,
}

// Reserve changes persistent reservations, in the name of all sessions that the unit's device has.
func (s *Service) Reserve(ctx context.Context, r api.ReserveRequest) (api.ReserveReply, error) {
	reply := api.ReserveReply{Version: api.Version}
	action, ok := reserveActions[r.Action]
	if !ok {
		return reply, api.Errorf(api.ErrInvalidArgs, "reserve: there is no action %q", r.Action)
	}
	q := ipc.ReserveRequest{
		Action: uint8(action), Key: uint64(r.Key), ActionKey: uint64(r.NewKey), PersistLoss: r.PersistLoss, AllTargetPorts: r.AllTargetPorts,
	}
	if r.Type != "" {
		t, err := scsi.ParseReservationType(r.Type)
		if err != nil {
			return reply, api.Errorf(api.ErrInvalidArgs, "reserve: %w", err)
		}
		q.Type = uint8(t)
	}
	place, err := s.findUnit(r.Unit)
	if err != nil {
		return reply, err
	}
	ctx, cancel, timeout, err := command(ctx, r.Timeout)
	defer cancel()
	if err != nil {
		return reply, err
	}
	pc, err := s.plane.get(ctx)
	if err != nil {
		return reply, err
	}
	q.Group, q.LUN, q.Timeout = place.group, place.lun, timeout
	var a ipc.ReserveReply
	if err := pc.call(ctx, ipc.MethodReserve, q, &a); err != nil {
		return reply, api.Wrap(err, api.ErrInternal, "reserve %s", r.Unit.Name)
	}
	reply.Sessions = a.Sessions
	s.log.WithFields(map[string]any{"unit": r.Unit.Name, "action": r.Action}).Info("persistent reservations changed")
	return reply, nil
}

// reservationActions are the service actions of the questions.
var reservationActions = map[string]scsi.ReserveIn{
	api.AskKeys: scsi.ReadKeys, api.AskReservation: scsi.ReadReservation, api.AskCapabilities: scsi.ReportCapabilities,
	api.AskFullStatus: scsi.ReadFullStatus,
}

// Reservation tells about persistent reservations.
func (s *Service) Reservation(ctx context.Context, r api.ReservationRequest) (api.ReservationReply, error) {
	reply := api.ReservationReply{Version: api.Version}
	action, ok := reservationActions[r.What]
	if !ok {
		return reply, api.Errorf(api.ErrInvalidArgs, "reservations: nothing is known of %q", r.What)
	}
	place, err := s.findUnit(r.Unit)
	if err != nil {
		return reply, err
	}
	ctx, cancel, timeout, err := command(ctx, r.Timeout)
	defer cancel()
	if err != nil {
		return reply, err
	}
	// The answer tells how long it is, and may have grown before it is asked for again.
	for n := 8 << 10; ; n = 0xfffc {
		var cdb scsi.CDB
		scsi.PersistentReserveIn(&cdb, action, uint16(n))
		a, err := s.scsi(ctx, place, ipc.ScsiRequest{CDB: cdb[:10], In: n, Timeout: timeout, SkipAttention: true})
		if err == nil {
			err = statusError(a)
		}
		if err != nil {
			return reply, api.Wrap(err, api.ErrInternal, "reservations of %s", r.Unit.Name)
		}
		needed, err := reservationReply(&reply, action, a.Data, place.names)
		if err != nil {
			return reply, api.Errorf(api.ErrProtocolError, "reservations of %s: %w", r.Unit.Name, err)
		}
		if needed <= n || n == 0xfffc {
			return reply, nil
		}
	}
}

// reservationReply reads the answer, and returns how long the whole of it is, bytes.
func reservationReply(reply *api.ReservationReply, action scsi.ReserveIn, data []byte, own []string) (needed int, err error) {
	reply.Keys, reply.Registrations = nil, nil
	switch action {
	case scsi.ReadKeys:
		var k scsi.RegisteredKeys
		k, needed, err = scsi.ParseReadKeys(data)
		reply.Generation, reply.Keys = k.Generation, []api.Key{}
		for _, key := range k.Keys {
			reply.Keys = append(reply.Keys, api.Key(key))
		}
	case scsi.ReadReservation:
		var h scsi.Reservation
		h, err = scsi.ParseReadReservation(data)
		if reply.Generation = h.Generation; h.Held {
			reply.Held = &api.Reservation{Key: api.Key(h.Key), Type: h.Type.String()}
		}
	case scsi.ReportCapabilities:
		var c scsi.ReserveCapabilities
		c, err = scsi.ParseReserveCapabilities(data)
		out := &api.ReservationCapabilities{
			PersistLoss: c.PersistLoss, PersistLossActive: c.PersistLossActive, AllTargetPorts: c.AllTargetPorts, SpecifyInitiators: c.SpecifyInitiators,
			CompatibleReserve: c.CompatibleReserve,
		}
		for _, t := range c.Types {
			out.Types = append(out.Types, t.String())
		}
		reply.Capabilities = out
	case scsi.ReadFullStatus:
		var list []scsi.Registration
		reply.Generation, list, needed, err = scsi.ParseFullStatus(data)
		reply.Registrations = []api.Registration{}
		for _, x := range list {
			y := api.Registration{Key: api.Key(x.Key), Initiator: x.Initiator, TargetPort: x.TargetPort, AllTargetPorts: x.AllTargetPorts, Holder: x.Holder}
			if x.Holder {
				y.Type = x.Type.String()
			}
			for _, name := range own {
				// LIO ends the name before the ISID, and has only half of that (iscsi_get_pr_transport_id in target_core_fabric_lib.c).
				y.Own = y.Own || x.Initiator != "" && strings.HasPrefix(name, strings.ToLower(x.Initiator)) && len(x.Initiator) >= strings.Index(name, ",i,0x")
			}
			reply.Registrations = append(reply.Registrations, y)
		}
	}
	return needed, err
}

// statusError is the failure that a unit reports, nil for none.
func statusError(a ipc.ScsiReply) error {
	if scsi.Status(a.Status) == scsi.StatusGood {
		return nil
	}
	e := &scsi.StatusError{Status: scsi.Status(a.Status), Residual: a.Residual}
	if sense, err := scsi.ParseSense(a.Sense); err == nil {
		e.Sense = &sense
	}
	switch {
	case errors.Is(e, scsi.ErrUnitGone):
		return api.Errorf(api.ErrNotFound, "%w", e)
	case errors.Is(e, scsi.ErrIllegalRequest):
		return api.Errorf(api.ErrNotSupported, "%w", e)
	}
	if errors.Is(e, scsi.ErrReservationConflict) {
		return api.Errorf(api.ErrReservationConflict, "%w", e)
	}
	return api.Errorf(api.ErrCommandFailed, "%w", e)
}
