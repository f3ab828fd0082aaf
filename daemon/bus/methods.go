package bus

import (
	"context"
	"math"
	"net"
	"strconv"
	"strings"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// dbusError gives a failure its bus form.
func dbusError(err error) *dbus.Error {
	if err == nil {
		return nil
	}
	return dbus.NewError(api.NameOf(err), []any{valid(strings.Join(strings.Fields(err.Error()), " "))})
}

// options reads the a{sv} of a method. Each key may be asked for once; done complains about the rest.
type options struct {
	m   map[string]dbus.Variant
	err error
}

func option[T any](o *options, name string) (out T) {
	v, ok := o.m[name]
	if !ok {
		return out
	}
	delete(o.m, name)
	out, ok = v.Value().(T)
	if !ok && o.err == nil {
		o.err = api.Errorf(api.ErrInvalidArgs, "option %s has type %s, expected %s", name, v.Signature(), dbus.SignatureOf(out))
	}
	return out
}

func (o *options) done() error {
	if o.err != nil {
		return o.err
	}
	for k := range o.m {
		return api.Errorf(api.ErrInvalidArgs, "unknown option %q", valid(k))
	}
	return nil
}

// manager is org.iserd.Iser1.Manager.
type manager struct{ c *connection }

// DiscoverSendTargets asks a portal for its targets.
func (m manager) DiscoverSendTargets(msg dbus.Message, address string, opts map[string]dbus.Variant) ([]map[string]dbus.Variant, *dbus.Error) {
	o := options{m: opts}
	r := api.DiscoverRequest{Portal: address, Transport: option[string](&o, "transport"), Save: option[bool](&o, "persist"), Timeout: api.Seconds(option[uint32](&o, "timeout"))}
	var err error
	if r.Set, err = assignments(option[map[string]dbus.Variant](&o, "settings")); err != nil {
		return nil, dbusError(err)
	}
	if port := option[uint16](&o, "port"); port != 0 {
		r.Portal = net.JoinHostPort(strings.Trim(address, "[]"), strconv.Itoa(int(port)))
	}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	var reply api.TargetsReply
	err = m.c.change(msg, actionDiscover, func(ctx context.Context) (err error) {
		reply, err = m.c.s.Discover(ctx, r)
		return err
	})
	out := make([]map[string]dbus.Variant, 0, len(reply.Targets))
	for _, t := range reply.Targets {
		out = append(out, map[string]dbus.Variant{
			"target": dbus.MakeVariant(t.Target), "address": dbus.MakeVariant(t.Address), "port": dbus.MakeVariant(t.Port),
			"tpgt": dbus.MakeVariant(int32(t.TPGT)), "transports": dbus.MakeVariant(t.Transports),
		})
	}
	return out, dbusError(err)
}

// AddNode stores a record by hand.
func (m manager) AddNode(msg dbus.Message, target, address string, port uint16, opts map[string]dbus.Variant) (dbus.ObjectPath, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return noObject, dbusError(err)
	}
	if port == 0 {
		port = api.DefaultPort
	}
	path := noObject
	err := m.c.change(msg, actionModify, func(context.Context) error {
		n, err := m.c.s.AddNode(target, net.JoinHostPort(strings.Trim(address, "[]"), strconv.Itoa(int(port))))
		path = nodePath(n.ID)
		return err
	})
	return path, dbusError(err)
}

// LookupNode finds records.
func (m manager) LookupNode(target, portal string) ([]dbus.ObjectPath, *dbus.Error) {
	r, err := m.c.s.Nodes(api.NodeFilter{Target: target, Portal: portal})
	out := []dbus.ObjectPath{}
	for _, n := range r.Nodes {
		out = append(out, nodePath(n.ID))
	}
	return out, dbusError(err)
}

// LookupDevice finds a device by its path.
func (m manager) LookupDevice(path string) (dbus.ObjectPath, *dbus.Error) {
	_, _, devices := m.c.s.Inventory()
	for _, d := range devices {
		if d.Path == path {
			return devicePath(d.UblkID), nil
		}
	}
	return noObject, dbusError(api.Errorf(api.ErrNotFound, "no device %q", valid(path)))
}

// Login logs in to a target.
func (m manager) Login(msg dbus.Message, target string, opts map[string]dbus.Variant) (dbus.ObjectPath, *dbus.Error) {
	o := options{m: opts}
	return m.c.login(msg, api.LoginRequest{Target: target, Portal: option[string](&o, "portal")}, &o)
}

// login is Login of Manager and Node.
func (c *connection) login(msg dbus.Message, r api.LoginRequest, o *options) (dbus.ObjectPath, *dbus.Error) {
	r.Transport, r.Timeout = option[string](o, "transport"), api.Seconds(option[uint32](o, "timeout"))
	if err := o.done(); err != nil {
		return noObject, dbusError(err)
	}
	path := noObject
	err := c.change(msg, actionLogin, func(ctx context.Context) error {
		reply, err := c.s.Login(ctx, r)
		if err == nil {
			path = sessionPath(reply.Session.ID)
		}
		return err
	})
	return path, dbusError(err)
}

// logout is Logout of Node and Session.
func (c *connection) logout(msg dbus.Message, session string, opts map[string]dbus.Variant) *dbus.Error {
	o := options{m: opts}
	r := api.LogoutRequest{Session: session, Force: option[bool](&o, "force")}
	if err := o.done(); err != nil {
		return dbusError(err)
	}
	return dbusError(c.change(msg, actionLogout, func(ctx context.Context) error {
		_, err := c.s.Logout(ctx, r)
		return err
	}))
}

// node is org.iserd.Iser1.Node.
type node struct {
	c  *connection
	id string
}

// find reads the record.
func (n node) find() (api.Node, error) {
	nodes, _, _ := n.c.s.Inventory()
	for _, x := range nodes {
		if x.ID == n.id {
			return x, nil
		}
	}
	return api.Node{}, api.Errorf(api.ErrUnknownObject, "the record is gone")
}

// Login logs in to the target at this record's portal.
func (n node) Login(msg dbus.Message, opts map[string]dbus.Variant) (dbus.ObjectPath, *dbus.Error) {
	x, err := n.find()
	if err != nil {
		return noObject, dbusError(err)
	}
	return n.c.login(msg, api.LoginRequest{Target: x.Target, Portal: x.Portal().String()}, &options{m: opts})
}

// Logout ends the record's session.
func (n node) Logout(msg dbus.Message, opts map[string]dbus.Variant) *dbus.Error {
	_, sessions, _ := n.c.s.Inventory()
	for _, x := range sessions {
		if x.Node == n.id {
			return n.c.logout(msg, strconv.Itoa(x.ID), opts)
		}
	}
	return dbusError(api.Errorf(api.ErrSessionNotFound, "not logged in"))
}

// Delete removes the record.
func (n node) Delete(msg dbus.Message, opts map[string]dbus.Variant) *dbus.Error {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return dbusError(err)
	}
	x, err := n.find()
	if err != nil {
		return dbusError(err)
	}
	return dbusError(n.c.change(msg, actionModify, func(context.Context) error {
		_, err := n.c.s.DeleteNodes(api.NodeFilter{Target: x.Target, Portal: x.Portal().String()})
		return err
	}))
}

// session is org.iserd.Iser1.Session.
type session struct {
	c      *connection
	number int
}

// Logout ends the session.
func (s session) Logout(msg dbus.Message, opts map[string]dbus.Variant) *dbus.Error {
	return s.c.logout(msg, strconv.Itoa(s.number), opts)
}

// Rescan asks the target for its logical units again.
func (s session) Rescan(msg dbus.Message, opts map[string]dbus.Variant) (map[string]dbus.Variant, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	var reply api.RescanReply
	err := s.c.change(msg, actionLogin, func(ctx context.Context) (err error) {
		reply, err = s.c.s.Rescan(ctx, api.RescanRequest{Session: strconv.Itoa(s.number)})
		return err
	})
	out := make(map[string]dbus.Variant)
	for _, x := range reply.Sessions {
		out["added"], out["removed"], out["grown"] = dbus.MakeVariant(x.Added), dbus.MakeVariant(x.Removed), dbus.MakeVariant(x.Grown)
		problems := make([]string, 0, len(x.Problems))
		for _, p := range x.Problems {
			problems = append(problems, valid(p))
		}
		out["problems"] = dbus.MakeVariant(problems)
	}
	return out, dbusError(err)
}

// device is org.iserd.Iser1.Device.
type device struct {
	c  *connection
	id int
}

// Abort ends the device.
func (d device) Abort(msg dbus.Message, opts map[string]dbus.Variant) *dbus.Error {
	o := options{m: opts}
	r := api.AbortRequest{Device: d.unit().Name, Force: option[bool](&o, "force")}
	if err := o.done(); err != nil {
		return dbusError(err)
	}
	return dbusError(d.c.change(msg, actionLogout, func(ctx context.Context) error {
		_, err := d.c.s.Abort(ctx, r)
		return err
	}))
}

// GetStatistics reads the counters.
func (d device) GetStatistics(opts map[string]dbus.Variant) (map[string]uint64, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	for _, x := range d.c.s.Devices(d.c.ctx, false).Devices {
		if x.UblkID != d.id {
			continue
		}
		s := x.Stats
		return map[string]uint64{
			"reads": s.Reads, "writes": s.Writes, "flushes": s.Flushes, "read_bytes": s.ReadBytes, "write_bytes": s.WriteBytes, "errors": s.Errors,
			"retries": s.Retries, "in_flight": uint64(min(max(0, s.InFlight), math.MaxInt32)), "bytes_shared": s.BytesShared, "bytes_registered": s.BytesRegistered,
			"bytes_tcp": s.BytesTCP, "requests_shared": s.RequestsShared, "requests_registered": s.RequestsRegistered, "requests_tcp": s.RequestsTCP,
			"bytes_lent": s.BytesLent,
		}, nil
	}
	return nil, dbusError(api.Errorf(api.ErrUnknownObject, "the device is gone"))
}
