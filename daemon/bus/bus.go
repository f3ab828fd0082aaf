package bus

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/introspect"
	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	dbusfiles "iserd.org/iserd/packaging/dbus"
)

const (
	objectManager  = "org.freedesktop.DBus.ObjectManager"
	propertiesName = "org.freedesktop.DBus.Properties"
	introspectable = "org.freedesktop.DBus.Introspectable"

	firstPause = 500 * time.Millisecond
	lastPause  = 15 * time.Second
	// callTimeout bounds a method as a whole; logins have their own, shorter bound.
	callTimeout = 20 * time.Minute
)

// Options say which bus to join.
type Options struct {
	Address string // "system", or an address as in DBUS_SESSION_BUS_ADDRESS
	Log     *logrus.Entry
}

// Run keeps the service on the bus until ctx ends. A bus that is not there is tried again, more and more rarely.
func Run(ctx context.Context, s *daemon.Service, opt Options) { run(ctx, s, opt, trusted) }

func run(ctx context.Context, s *daemon.Service, opt Options, trust func(uint32) bool) {
	pause := firstPause
	said := ""
	for {
		began := time.Now()
		err := serve(ctx, s, opt, trust)
		if ctx.Err() != nil {
			return
		}
		text := strings.Join(strings.Fields(err.Error()), " ")
		s.SetBus("not connected: " + text)
		if text != said {
			opt.Log.WithError(err).Info("not on the bus; trying again now and then")
			said = text
		}
		if time.Since(began) > lastPause {
			pause, said = firstPause, ""
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, lastPause)
	}
}

// connection is one life on the bus.
type connection struct {
	ctx     context.Context // ends with the connection
	conn    *dbus.Conn
	s       *daemon.Service
	log     *logrus.Entry
	trusted func(uint32) bool
	calls   sync.WaitGroup // methods at work; added to under mu while ctx lives

	mu   sync.Mutex
	tree tree // what the bus was told last
}

// serve joins the bus and stays until ctx or the connection ends.
func serve(ctx context.Context, s *daemon.Service, opt Options, trust func(uint32) bool) error {
	conn, closed, err := dialBus(opt.Address, newOutbox()...)
	if err != nil {
		return err
	}
	defer func() { <-closed }()
	defer func() { _ = conn.Close() }()
	if err := conn.Auth(nil); err != nil {
		return fmt.Errorf("authenticate: %w", err)
	}
	if err := conn.Hello(); err != nil {
		return err
	}
	cctx, cancel := context.WithCancel(ctx)
	c := &connection{ctx: cctx, conn: conn, s: s, log: opt.Log, trusted: trust, tree: tree{}}
	defer c.calls.Wait()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		cancel() // no call begins after this
	}()

	updates, stop := s.Watch()
	defer stop()
	if err := c.watchOwners(); err != nil {
		return err
	}
	if err := c.exportRoot(); err != nil {
		return err
	}
	if err := c.update(true); err != nil {
		return err
	}
	switch r, err := conn.RequestName(busName, dbus.NameFlagDoNotQueue); {
	case err != nil:
		return fmt.Errorf("own %s: %w", busName, err)
	case r != dbus.RequestNameReplyPrimaryOwner:
		return fmt.Errorf("own %s: another program has the name", busName)
	}
	s.SetBus("connected")
	opt.Log.Infof("on the bus as %s", busName)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-conn.Context().Done():
			return errors.New("connection to the bus lost")
		case <-updates:
			if err := c.update(false); err != nil {
				return err
			}
		}
	}
}

// change runs a method that changes something, for callers who may. Without an action f itself finds out who may.
func (c *connection) change(msg dbus.Message, action string, f func(context.Context) error) error {
	c.mu.Lock()
	if c.ctx.Err() != nil {
		c.mu.Unlock()
		return api.Errorf(api.ErrAgain, "the daemon is ending")
	}
	c.calls.Add(1)
	c.mu.Unlock()
	defer c.calls.Done()
	ctx, cancel := context.WithTimeout(c.ctx, callTimeout)
	defer cancel()
	if action != "" {
		if err := c.authorize(ctx, &msg, action); err != nil {
			return err
		}
	}
	err := f(ctx)
	// The objects that the answer names must be there when the caller gets it.
	if uerr := c.update(false); uerr != nil {
		c.log.WithError(uerr).Debug("bus")
	}
	return err
}

// update brings the objects in step with the service, and tells the bus unless quiet.
func (c *connection) update(quiet bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := snapshot(c.s)
	old := c.tree
	d := diff(old, now)
	c.tree = now
	for _, p := range d.removed {
		if err := c.export(p, nil); err != nil {
			return err
		}
		if err := c.emit(quiet, root, objectManager+".InterfacesRemoved", p, names(old[p])); err != nil {
			return err
		}
	}
	for _, p := range d.added {
		if err := c.export(p, now[p]); err != nil {
			return err
		}
		if err := c.emit(quiet, root, objectManager+".InterfacesAdded", p, now[p]); err != nil {
			return err
		}
	}
	for _, x := range d.changed {
		if err := c.emit(quiet, x.path, propertiesName+".PropertiesChanged", x.iface, x.now, []string{}); err != nil {
			return err
		}
		if st, ok := x.now["State"]; ok && x.iface == sessionInterface {
			reason := ""
			if e, ok := now[x.path][x.iface]["LastError"].Value().(nameAndText); ok {
				reason = e.Name
			}
			if err := c.emit(quiet, x.path, sessionInterface+".StateChanged", old[x.path][x.iface]["State"].Value(), st.Value(), reason, map[string]dbus.Variant{}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *connection) emit(quiet bool, p dbus.ObjectPath, name string, values ...any) error {
	if quiet {
		return nil
	}
	return c.conn.Emit(p, name, values...)
}

func names(i interfaces) []string {
	out := make([]string, 0, len(i))
	for n := range i {
		out = append(out, n)
	}
	return out
}

// export puts an object on the bus, or takes it away when there is nothing to show.
func (c *connection) export(p dbus.ObjectPath, show interfaces) error {
	iface, obj := c.object(p)
	for name, v := range map[string]any{iface: obj, propertiesName: object{c, p}, introspectable: about{interfaceFile(iface)}} {
		if show == nil {
			v = nil
		}
		if err := c.conn.Export(v, p, name); err != nil {
			return fmt.Errorf("export %s: %w", p, err)
		}
	}
	return nil
}

// object makes the Go side of a path that snapshot made.
func (c *connection) object(p dbus.ObjectPath) (iface string, obj any) {
	dir, last := path.Split(string(p))
	n, _ := strconv.Atoi(last)
	switch path.Base(dir) {
	case "node":
		return nodeInterface, node{c, last}
	case "session":
		return sessionInterface, session{c, n}
	case "device":
		return deviceInterface, device{c, n}
	case "buffer":
		return bufferInterface, buffer{c, uint32(n)}
	}
	return managerInterface, manager{c}
}

// object is org.freedesktop.DBus.Properties of one path.
type object struct {
	c    *connection
	path dbus.ObjectPath
}

func (o object) read(iface string) (properties, *dbus.Error) {
	o.c.mu.Lock()
	defer o.c.mu.Unlock()
	p := o.c.tree[o.path][iface]
	if p == nil {
		return nil, dbus.NewError("org.freedesktop.DBus.Error.UnknownInterface", []any{"no such interface"})
	}
	return p, nil // a tree is replaced, never changed
}

// Get reads a property.
func (o object) Get(iface, name string) (dbus.Variant, *dbus.Error) {
	p, err := o.read(iface)
	if err != nil {
		return dbus.Variant{}, err
	}
	v, ok := p[name]
	if !ok {
		return dbus.Variant{}, dbus.NewError("org.freedesktop.DBus.Error.UnknownProperty", []any{"no such property"})
	}
	return v, nil
}

// GetAll reads all properties.
func (o object) GetAll(iface string) (map[string]dbus.Variant, *dbus.Error) { return o.read(iface) }

// Set refuses: every property is read-only.
func (o object) Set(string, string, dbus.Variant) *dbus.Error {
	return dbus.NewError("org.freedesktop.DBus.Error.PropertyReadOnly", []any{"the property is read-only"})
}

// top is org.freedesktop.DBus.ObjectManager.
type top struct{ c *connection }

// GetManagedObjects lists all objects with their properties.
func (t top) GetManagedObjects() (map[dbus.ObjectPath]map[string]map[string]dbus.Variant, *dbus.Error) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	out := make(map[dbus.ObjectPath]map[string]map[string]dbus.Variant, len(t.c.tree))
	for p, ifaces := range t.c.tree {
		m := make(map[string]map[string]dbus.Variant, len(ifaces))
		for n, props := range ifaces {
			m[n] = props
		}
		out[p] = m
	}
	return out, nil
}

// about is org.freedesktop.DBus.Introspectable of a leaf.
type about struct{ ifaces []introspect.Interface }

// Introspect gives the XML.
func (a about) Introspect() (string, *dbus.Error) {
	return describe(&introspect.Node{Interfaces: append([]introspect.Interface{propertiesInterface, introspect.IntrospectData, introspect.PeerData}, a.ifaces...)}), nil
}

// aboutRoot is Introspectable of the root and of the branches below it.
type aboutRoot struct {
	c    *connection
	path dbus.ObjectPath
}

// Introspect gives the XML with the children that are there now.
func (a aboutRoot) Introspect() (string, *dbus.Error) {
	n := &introspect.Node{Interfaces: []introspect.Interface{introspect.IntrospectData, introspect.PeerData}}
	if a.path == root {
		n.Interfaces = append(n.Interfaces, managerOfObjects)
	}
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	seen := make(map[string]bool)
	for p := range a.c.tree {
		if rest, ok := strings.CutPrefix(string(p), string(a.path)+"/"); ok {
			child, _, _ := strings.Cut(rest, "/")
			if !seen[child] {
				seen[child] = true
				n.Children = append(n.Children, introspect.Node{Name: child})
			}
		}
	}
	return describe(n), nil
}

func (c *connection) exportRoot() error {
	if err := c.conn.Export(top{c}, root, objectManager); err != nil {
		return fmt.Errorf("export %s: %w", root, err)
	}
	for _, p := range []dbus.ObjectPath{root, root + "/node", root + "/session", root + "/device", root + "/buffer"} {
		if err := c.conn.Export(aboutRoot{c, p}, p, introspectable); err != nil {
			return fmt.Errorf("export %s: %w", p, err)
		}
	}
	return nil
}

func describe(n *introspect.Node) string {
	b, err := xml.Marshal(n)
	if err != nil {
		return "<node/>" // cannot happen: the type is made of strings
	}
	return strings.TrimSpace(introspect.IntrospectDeclarationString) + string(b)
}

// interfaceFile reads the XML of an interface.
func interfaceFile(name string) []introspect.Interface {
	b, err := dbusfiles.Files.ReadFile("interfaces/" + name + ".xml")
	if err != nil {
		return nil
	}
	var n introspect.Node
	if err := xml.Unmarshal(b, &n); err != nil {
		return nil // a test reads all files
	}
	return n.Interfaces
}

var propertiesInterface = introspect.Interface{
	Name: propertiesName,
	Methods: []introspect.Method{
		{Name: "Get", Args: []introspect.Arg{{Name: "interface", Type: "s", Direction: "in"}, {Name: "property", Type: "s", Direction: "in"}, {Name: "value", Type: "v", Direction: "out"}}},
		{Name: "GetAll", Args: []introspect.Arg{{Name: "interface", Type: "s", Direction: "in"}, {Name: "properties", Type: "a{sv}", Direction: "out"}}},
		{Name: "Set", Args: []introspect.Arg{{Name: "interface", Type: "s", Direction: "in"}, {Name: "property", Type: "s", Direction: "in"}, {Name: "value", Type: "v", Direction: "in"}}},
	},
	Signals: []introspect.Signal{{Name: "PropertiesChanged", Args: []introspect.Arg{{Name: "interface", Type: "s"}, {Name: "changed", Type: "a{sv}"}, {Name: "invalidated", Type: "as"}}}},
}

var managerOfObjects = introspect.Interface{
	Name:    objectManager,
	Methods: []introspect.Method{{Name: "GetManagedObjects", Args: []introspect.Arg{{Name: "objects", Type: "a{oa{sa{sv}}}", Direction: "out"}}}},
	Signals: []introspect.Signal{
		{Name: "InterfacesAdded", Args: []introspect.Arg{{Name: "object", Type: "o"}, {Name: "interfaces", Type: "a{sa{sv}}"}}},
		{Name: "InterfacesRemoved", Args: []introspect.Arg{{Name: "object", Type: "o"}, {Name: "interfaces", Type: "as"}}},
	},
}
