package bus

import (
	"context"
	"strconv"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// Reload has the daemon read its configuration again.
func (m manager) Reload(msg dbus.Message, opts map[string]dbus.Variant) ([]map[string]dbus.Variant, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	var r api.ReloadReply
	err := m.c.change(msg, actionReload, func(ctx context.Context) (err error) {
		r, err = m.c.s.Reload(ctx, api.ReloadRequest{})
		return err
	})
	if err != nil {
		return nil, dbusError(err)
	}
	out := make([]map[string]dbus.Variant, 0, len(r.Changes))
	for _, c := range r.Changes {
		kept := make([]string, 0, len(c.KeptBy))
		for _, k := range c.KeptBy {
			kept = append(kept, valid(k))
		}
		out = append(out, map[string]dbus.Variant{
			"name": dbus.MakeVariant(c.Name), "old": configValue(c.Old), "new": configValue(c.New), "origin": dbus.MakeVariant(valid(c.Origin.String())),
			"effect": dbus.MakeVariant(c.Effect), "kept_by": dbus.MakeVariant(kept),
		})
	}
	return out, nil
}

// GetConfiguration tells what the daemon goes by.
func (m manager) GetConfiguration() ([]map[string]dbus.Variant, *dbus.Error) {
	out := []map[string]dbus.Variant{}
	for _, o := range m.c.s.Configuration().Options {
		x := map[string]dbus.Variant{
			"name": dbus.MakeVariant(o.Name), "value": configValue(o.Value), "origin": dbus.MakeVariant(valid(o.Origin.String())), "effect": dbus.MakeVariant(o.Effect),
		}
		if o.InForce != nil {
			x["in_force"] = configValue(*o.InForce)
		}
		if o.Unknown {
			x["unknown"] = dbus.MakeVariant(true)
		}
		out = append(out, x)
	}
	return out, nil
}

// configValue gives a value its bus form.
func configValue(v api.ConfigValue) dbus.Variant {
	if n, err := strconv.ParseInt(v.Text, 10, 64); v.Number && err == nil {
		return dbus.MakeVariant(n)
	}
	return dbus.MakeVariant(valid(v.Text))
}
