package bus

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// variants gives settings their bus form: text is s, lists are as, numbers are i (-1: without end), Yes and No are b. What is not set is not there.
func variants(s *api.Settings) map[string]dbus.Variant {
	out := make(map[string]dbus.Variant)
	for i := range api.SettingTable {
		r := &api.SettingTable[i]
		text := r.Text(s)
		if text == "" {
			continue
		}
		switch r.Kind {
		case api.KindList:
			out[r.Name] = dbus.MakeVariant(strings.Split(text, ","))
		case api.KindBool:
			out[r.Name] = dbus.MakeVariant(text == "Yes")
		case api.KindBytes, api.KindNumber, api.KindSeconds:
			n, err := strconv.Atoi(text)
			if err != nil {
				n = api.Forever
			}
			out[r.Name] = dbus.MakeVariant(int32(n))
		default:
			out[r.Name] = dbus.MakeVariant(text)
		}
	}
	return out
}

// assignments reads settings that came over the bus.
func assignments(in map[string]dbus.Variant) (map[string]string, error) {
	out := make(map[string]string, len(in))
	for name, v := range in {
		r, err := api.FindSetting(name)
		if err != nil {
			return nil, err
		}
		switch x := v.Value().(type) {
		case string:
			out[name] = x
		case []string:
			out[name] = strings.Join(x, ",")
		case bool:
			out[name] = map[bool]string{true: "Yes", false: "No"}[x]
		case int32:
			out[name] = strconv.Itoa(int(x))
			if x == api.Forever && r.Forever {
				out[name] = "forever"
			}
		case uint32, uint16, int64, uint64, byte:
			out[name] = fmt.Sprint(x)
		default:
			return nil, api.Errorf(api.ErrInvalidArgs, "setting %s has type %s, expected s, as, b or i", name, v.Signature())
		}
	}
	return out, nil
}

// secret checks the bytes of a caller. They are not needed after the request.
func secret(b []byte) (api.Secret, error) {
	defer clear(b)
	if len(b) == 0 {
		return api.Secret{}, nil // removes it
	}
	if err := api.CheckSecret(b); err != nil {
		return api.Secret{}, err
	}
	return api.NewSecret(b), nil
}

// alter is a change of settings, of a record or of a portal.
func (c *connection) alter(msg dbus.Message, set map[string]dbus.Variant, unset []string, r api.SettingsRequest, do func(context.Context, api.SettingsRequest) error) *dbus.Error {
	var err error
	if r.Set, err = assignments(set); err != nil {
		return dbusError(err)
	}
	r.Unset = unset
	return dbusError(c.change(msg, actionModify, func(ctx context.Context) error { return do(ctx, r) }))
}

func (n node) request() (api.SettingsRequest, error) {
	x, err := n.find()
	return api.SettingsRequest{Target: x.Target, Portal: x.Portal().String()}, err
}

func (n node) do(ctx context.Context, r api.SettingsRequest) error {
	_, err := n.c.s.SetNode(ctx, r)
	return err
}

// Set changes settings of the record.
func (n node) Set(msg dbus.Message, settings map[string]dbus.Variant) *dbus.Error {
	r, err := n.request()
	if err != nil {
		return dbusError(err)
	}
	return n.c.alter(msg, settings, nil, r, n.do)
}

// Unset takes settings back to their defaults.
func (n node) Unset(msg dbus.Message, names []string) *dbus.Error {
	r, err := n.request()
	if err != nil {
		return dbusError(err)
	}
	return n.c.alter(msg, nil, names, r, n.do)
}

// SetSecret stores a secret, or removes it when it is empty. It cannot be read.
func (n node) SetSecret(msg dbus.Message, name string, value []byte) *dbus.Error {
	s, err := secret(value)
	if err != nil {
		return dbusError(err)
	}
	r, err := n.request()
	if err != nil {
		return dbusError(err)
	}
	return dbusError(n.c.change(msg, actionModify, func(ctx context.Context) error {
		_, err := n.c.s.SetNodeSecret(ctx, api.SecretRequest{Target: r.Target, Portal: r.Portal, Name: name, Secret: s})
		return err
	}))
}

func (m manager) do(ctx context.Context, r api.SettingsRequest) error {
	_, err := m.c.s.SetPortal(ctx, r)
	return err
}

// SetDiscovery changes how a portal is asked.
func (m manager) SetDiscovery(msg dbus.Message, portal string, settings map[string]dbus.Variant) *dbus.Error {
	return m.c.alter(msg, settings, nil, api.SettingsRequest{Portal: portal}, m.do)
}

// UnsetDiscovery takes settings back to their defaults.
func (m manager) UnsetDiscovery(msg dbus.Message, portal string, names []string) *dbus.Error {
	return m.c.alter(msg, nil, names, api.SettingsRequest{Portal: portal}, m.do)
}

// SetDiscoverySecret stores a secret for discoveries, or removes it when it is empty.
func (m manager) SetDiscoverySecret(msg dbus.Message, portal, name string, value []byte) *dbus.Error {
	s, err := secret(value)
	if err != nil {
		return dbusError(err)
	}
	return dbusError(m.c.change(msg, actionModify, func(ctx context.Context) error {
		_, err := m.c.s.SetPortalSecret(ctx, api.SecretRequest{Portal: portal, Name: name, Secret: s})
		return err
	}))
}

// GetDiscovery tells how a portal is asked, and which secrets are stored.
func (m manager) GetDiscovery(portal string) (map[string]dbus.Variant, []string, *dbus.Error) {
	p, err := api.ParsePortal(portal)
	if err != nil {
		return nil, nil, dbusError(err)
	}
	for _, x := range m.c.s.Portals().Portals {
		if x.Portal() == p {
			return variants(&x.Settings), x.Secrets, nil
		}
	}
	return map[string]dbus.Variant{}, []string{}, nil
}

// DeleteDiscovery forgets how a portal is asked, secrets included.
func (m manager) DeleteDiscovery(msg dbus.Message, portal string) *dbus.Error {
	return dbusError(m.c.change(msg, actionModify, func(ctx context.Context) error {
		_, err := m.c.s.DeletePortal(ctx, api.NodeFilter{Portal: portal})
		return err
	}))
}

// DiscoverFirmware reads what the firmware has booted from.
func (m manager) DiscoverFirmware(msg dbus.Message, opts map[string]dbus.Variant) ([]map[string]dbus.Variant, *dbus.Error) {
	o := options{m: opts}
	r := api.FirmwareRequest{Save: option[bool](&o, "persist")}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	var reply api.FirmwareReply
	err := m.c.change(msg, actionDiscover, func(ctx context.Context) (err error) {
		reply, err = m.c.s.Firmware(ctx, r)
		return err
	})
	out := make([]map[string]dbus.Variant, 0, len(reply.Targets))
	for _, t := range reply.Targets {
		out = append(out, map[string]dbus.Variant{
			"target": dbus.MakeVariant(t.Target), "address": dbus.MakeVariant(t.Address), "port": dbus.MakeVariant(t.Port), "lun": dbus.MakeVariant(int32(t.LUN)),
			"boot": dbus.MakeVariant(t.Boot), "auth": dbus.MakeVariant(t.Auth),
		})
	}
	return out, dbusError(err)
}
