package bus

import (
	"context"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// UpgradeDataPlane replaces the data plane by the program that is installed now.
func (m manager) UpgradeDataPlane(msg dbus.Message, opts map[string]dbus.Variant) (map[string]dbus.Variant, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	var r api.UpgradeReply
	err := m.c.change(msg, actionUpgrade, func(ctx context.Context) (err error) {
		r, err = m.c.s.Upgrade(ctx, api.UpgradeRequest{})
		return err
	})
	if err != nil {
		return nil, dbusError(err)
	}
	devices, problems := []map[string]dbus.Variant{}, []string{}
	for _, d := range r.Devices {
		devices = append(devices, map[string]dbus.Variant{
			"device": dbus.MakeVariant(d.Device), "target": dbus.MakeVariant(valid(d.Target)), "lun": dbus.MakeVariant(d.LUN),
			"state": dbus.MakeVariant(d.State), "how": dbus.MakeVariant(d.How), "reason": dbus.MakeVariant(valid(d.Reason)), "pause_ms": dbus.MakeVariant(uint64(max(0, d.PauseMS))),
		})
	}
	for _, p := range r.Problems {
		problems = append(problems, valid(p))
	}
	return map[string]dbus.Variant{
		"old_pid": dbus.MakeVariant(uint32(r.Old.PID)), "old_build": dbus.MakeVariant(valid(r.Old.Build)),
		"new_pid": dbus.MakeVariant(uint32(r.New.PID)), "new_build": dbus.MakeVariant(valid(r.New.Build)),
		"pause_ms": dbus.MakeVariant(uint64(max(0, r.PauseMS))), "devices": dbus.MakeVariant(devices), "problems": dbus.MakeVariant(problems),
	}, nil
}
