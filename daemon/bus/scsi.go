package bus

import (
	"context"
	"strconv"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// The polkit actions of single commands.
const (
	actionScsi    = "org.iserd.iser1.scsi-raw"
	actionReserve = "org.iserd.iser1.reserve"
)

// ExecuteCommand sends one SCSI command to the device's logical unit.
func (d device) ExecuteCommand(msg dbus.Message, cdb, out []byte, in uint32, opts map[string]dbus.Variant) (byte, []byte, []byte, int64, *dbus.Error) {
	return d.c.execute(msg, d.unit(), cdb, out, in, opts)
}

// ExecuteCommand sends one SCSI command to a logical unit of the session, which need not be served.
func (s session) ExecuteCommand(msg dbus.Message, lun uint16, cdb, out []byte, in uint32, opts map[string]dbus.Variant) (byte, []byte, []byte, int64, *dbus.Error) {
	return s.c.execute(msg, api.UnitName{Name: strconv.Itoa(s.number), LUN: &lun}, cdb, out, in, opts)
}

func (d device) unit() api.UnitName { return api.UnitName{Name: "/dev/ublkb" + strconv.Itoa(d.id)} }

// execute is ExecuteCommand of Device and Session.
func (c *connection) execute(msg dbus.Message, unit api.UnitName, cdb, out []byte, in uint32, opts map[string]dbus.Variant) (byte, []byte, []byte, int64, *dbus.Error) {
	o := options{m: opts}
	r := api.ScsiRequest{
		Unit: unit, CDB: cdb, In: int(min(in, 1<<30)), Out: out, Timeout: api.Seconds(option[uint32](&o, "timeout")), Force: option[bool](&o, "force"),
		SkipAttention: option[bool](&o, "skip_attention"),
	}
	if err := o.done(); err != nil {
		return 0, nil, nil, 0, dbusError(err)
	}
	var a api.ScsiReply
	err := c.change(msg, actionScsi, func(ctx context.Context) (err error) {
		a, err = c.s.Scsi(ctx, r)
		return err
	})
	return a.Status, a.Sense, a.Data, a.Residual, dbusError(err)
}

// GetReservation reads the registered keys and the reservation.
func (d device) GetReservation(msg dbus.Message, opts map[string]dbus.Variant) (generation uint32, keys []uint64, held bool, key uint64, kind string, derr *dbus.Error) {
	o := options{m: opts}
	r := api.ReservationRequest{Unit: d.unit(), Timeout: api.Seconds(option[uint32](&o, "timeout"))}
	if err := o.done(); err != nil {
		return 0, nil, false, 0, "", dbusError(err)
	}
	var k, h api.ReservationReply
	err := d.c.change(msg, actionReserve, func(ctx context.Context) (err error) {
		r.What = api.AskKeys
		if k, err = d.c.s.Reservation(ctx, r); err != nil {
			return err
		}
		r.What = api.AskReservation
		h, err = d.c.s.Reservation(ctx, r)
		return err
	})
	for _, x := range k.Keys {
		keys = append(keys, uint64(x))
	}
	if h.Held != nil {
		held, key, kind = true, uint64(h.Held.Key), h.Held.Type
	}
	return h.Generation, keys, held, key, kind, dbusError(err)
}

// Reserve changes registrations or the reservation.
func (d device) Reserve(msg dbus.Message, action string, opts map[string]dbus.Variant) (uint32, *dbus.Error) {
	o := options{m: opts}
	r := api.ReserveRequest{
		Unit: d.unit(), Action: action, Key: api.Key(option[uint64](&o, "key")), NewKey: api.Key(option[uint64](&o, "new_key")), Type: option[string](&o, "type"),
		PersistLoss: option[bool](&o, "persist_loss"), AllTargetPorts: option[bool](&o, "all_target_ports"), Timeout: api.Seconds(option[uint32](&o, "timeout")),
	}
	if err := o.done(); err != nil {
		return 0, dbusError(err)
	}
	var a api.ReserveReply
	err := d.c.change(msg, actionReserve, func(ctx context.Context) (err error) {
		a, err = d.c.s.Reserve(ctx, r)
		return err
	})
	return uint32(a.Sessions), dbusError(err)
}
