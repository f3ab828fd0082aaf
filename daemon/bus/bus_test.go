package bus

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/introspect"
	"github.com/google/go-cmp/cmp"
	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/require"
	dbusfiles "iserd.org/iserd/packaging/dbus"
)

const (
	iqn    = "iqn.2003-01.org.example:t1"
	portal = "10.0.0.1:3260"
)

func TestMain(m *testing.M) {
	if a := os.Getenv("BUS_TEST_ADDRESS"); a != "" { // see TestOtherUser
		asOtherUser(a)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// startBus runs a private dbus-daemon under the rules of a system bus and the project's own policy file. It returns the address and a
// function that kills it.
func startBus(t *testing.T, dir string) (address string, kill func()) {
	t.Helper()
	exe, err := exec.LookPath("dbus-daemon")
	require.Need(t, "dbus", err)
	rules, err := dbusfiles.Files.ReadFile("org.iserd.Iser1.conf")
	if err != nil {
		t.Fatal(err)
	}
	policy := filepath.Join(dir, "policy.conf")
	if err := os.WriteFile(policy, rules, 0o644); err != nil {
		t.Fatal(err)
	}
	conf := fmt.Sprintf(`<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=%s/bus</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
    <allow own="org.freedesktop.PolicyKit1"/>
    <allow send_destination="org.freedesktop.PolicyKit1"/>
  </policy>
  <include>%s</include>
</busconfig>`, dir, policy)
	path := filepath.Join(dir, "bus.conf")
	if err := os.WriteFile(path, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "--config-file="+path, "--nofork", "--nopidfile", "--print-address")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := false
	kill = func() {
		if !dead {
			dead = true
			_ = cmd.Process.Kill()
			_, _ = io.Copy(io.Discard, out)
			_ = cmd.Wait()
		}
	}
	t.Cleanup(kill)
	line := make([]byte, 1024)
	n, err := out.Read(line)
	if err != nil {
		t.Fatalf("dbus-daemon: %v", err)
	}
	return strings.TrimSpace(string(line[:n])), kill
}

type fixture struct {
	*daemontest.Lab
	t    *testing.T
	d    *daemontest.Daemon
	conn *dbus.Conn
	sigs chan *dbus.Signal
	stop func()
}

// start runs a control plane on a private bus and a client beside it.
func start(t *testing.T, trust func(uint32) bool) *fixture {
	t.Helper()
	dir := t.TempDir()
	address, _ := startBus(t, dir)
	f := &fixture{Lab: daemontest.NewLab(dir), t: t}
	f.Plane.AddTarget(iqn, &daemontest.Target{ISER: true, TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 64<<20), daemontest.Disk(1, 1<<30)}})
	f.Portals[portal] = &daemontest.Portal{Lists: map[string][]daemon.Found{"iser": {{Target: iqn, Address: "10.0.0.1", Port: 3260, TPGT: 1}}}}
	var err error
	if f.d, err = f.Start(); err != nil {
		t.Fatal(err)
	}
	f.stop = runBus(f.d, address, trust)
	t.Cleanup(func() {
		f.stop()
		f.d.Kill()
		f.Plane.Kill()
		if err := f.Check(); err != nil {
			t.Error(err)
		}
	})
	f.conn = connect(t, address)
	waitName(t, f.conn, f.d)
	if err := f.conn.AddMatchSignal(dbus.WithMatchSender(busName)); err != nil {
		t.Fatal(err)
	}
	f.sigs = make(chan *dbus.Signal, 1000)
	f.conn.Signal(f.sigs)
	return f
}

// runBus runs the door to the bus; the function ends it.
func runBus(d *daemontest.Daemon, address string, trust func(uint32) bool) (stop func()) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(ctx, d.Service, Options{Address: address, Log: logrus.NewEntry(log)}, trust)
	}()
	return func() { cancel(); <-done }
}

func connect(t *testing.T, address string) *dbus.Conn {
	t.Helper()
	conn, err := dbus.Connect(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func waitName(t *testing.T, conn *dbus.Conn, d *daemontest.Daemon) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		var has bool
		if err := conn.BusObject().Call("org.freedesktop.DBus.NameHasOwner", 0, busName).Store(&has); err != nil {
			t.Fatal(err)
		}
		if has {
			return
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-limit:
			t.Fatalf("nobody owns %s: %s", busName, d.Status(context.Background()).Bus)
		}
	}
}

func (f *fixture) call(path dbus.ObjectPath, method string, args ...any) *dbus.Call {
	f.t.Helper()
	return f.conn.Object(busName, path).Call(method, 0, args...)
}

func (f *fixture) get(path dbus.ObjectPath, iface, name string) any {
	f.t.Helper()
	v, err := f.conn.Object(busName, path).GetProperty(iface + "." + name)
	if err != nil {
		f.t.Fatalf("%s %s: %v", path, name, err)
	}
	return v.Value()
}

// signals collects what was said until a signal with the name and path.
func (f *fixture) until(path dbus.ObjectPath, name string) []string {
	f.t.Helper()
	var seen []string
	limit := time.After(20 * time.Second)
	for {
		select {
		case s := <-f.sigs:
			word := s.Name[strings.LastIndexByte(s.Name, '.')+1:] + " " + string(s.Path)
			if s.Path == root {
				p, _ := s.Body[0].(dbus.ObjectPath)
				word = s.Name[strings.LastIndexByte(s.Name, '.')+1:] + " " + string(p)
			}
			seen = append(seen, word)
			if word == name+" "+string(path) {
				return seen
			}
		case <-limit:
			f.t.Fatalf("no %s of %s; seen %q", name, path, seen)
		}
	}
}

type opts = map[string]dbus.Variant

func TestLoginLogout(t *testing.T) {
	f := start(t, trusted)
	var found []map[string]dbus.Variant
	err := f.call(managerPath, managerInterface+".DiscoverSendTargets", "10.0.0.1", opts{"persist": dbus.MakeVariant(true), "port": dbus.MakeVariant(uint16(3260))}).Store(&found)
	if err != nil || len(found) != 1 || found[0]["target"].Value() != iqn || found[0]["port"].Value() != uint16(3260) {
		t.Fatalf("discover: %v, %v", found, err)
	}
	var nodes []dbus.ObjectPath
	if err := f.call(managerPath, managerInterface+".LookupNode", iqn, "10.0.0.1").Store(&nodes); err != nil || len(nodes) != 1 {
		t.Fatalf("lookup: %v, %v", nodes, err)
	}
	f.until(nodes[0], "InterfacesAdded")
	if a := f.get(nodes[0], nodeInterface, "Target"); a != iqn {
		t.Errorf("target %v", a)
	}
	var s dbus.ObjectPath
	if err := f.call(nodes[0], nodeInterface+".Login", opts{}).Store(&s); err != nil || s != sessionPath(1) {
		t.Fatalf("login: %v, %v", s, err)
	}
	f.until(s, "InterfacesAdded")
	if st := f.get(s, sessionInterface, "State"); st != "up" {
		t.Errorf("state %v", st)
	}
	if n := f.get(s, sessionInterface, "Node"); n != nodes[0] {
		t.Errorf("node %v", n)
	}
	if x := f.get(nodes[0], nodeInterface, "Sessions"); !reflect.DeepEqual(x, []dbus.ObjectPath{s}) {
		t.Errorf("sessions %v", x)
	}
	if x := f.get(s, sessionInterface, "Devices"); !reflect.DeepEqual(x, []dbus.ObjectPath{devicePath(0), devicePath(1)}) {
		t.Errorf("devices %v", x)
	}
	var dev dbus.ObjectPath
	if err := f.call(managerPath, managerInterface+".LookupDevice", "/dev/ublkb1").Store(&dev); err != nil || dev != devicePath(1) {
		t.Errorf("lookup: %v, %v", dev, err)
	}
	if x := f.get(dev, deviceInterface, "Size"); x != uint64(1<<30) {
		t.Errorf("size %v", x)
	}
	var stats map[string]uint64
	if err := f.call(dev, deviceInterface+".GetStatistics", opts{}).Store(&stats); err != nil || stats["reads"] != 11 || len(stats) != 15 {
		t.Errorf("statistics %v, %v", stats, err)
	}
	var all map[dbus.ObjectPath]map[string]map[string]dbus.Variant
	if err := f.call(root, objectManager+".GetManagedObjects").Store(&all); err != nil || len(all) != 7 {
		t.Errorf("managed objects %v, %v", all, err)
	}

	// The target's units have changed.
	f.Plane.SetUnits(iqn, false, daemontest.Disk(0, 64<<20), daemontest.Disk(1, 2<<30), ipc.Unit{LUN: 5 << 48, Number: 5, DeviceType: 1, Reason: "tape"})
	var result map[string]dbus.Variant
	if err := f.call(s, sessionInterface+".Rescan", opts{}).Store(&result); err != nil {
		t.Fatal(err)
	}
	if grown, ok := result["grown"].Value().([]string); !ok || !slices.Equal(grown, []string{"/dev/ublkb1"}) {
		t.Errorf("rescan %v", result)
	}
	if size := f.get(devicePath(1), deviceInterface, "Size"); size != uint64(2<<30) {
		t.Errorf("size %v", size)
	}
	if u, ok := f.get(s, sessionInterface, "Units").([][]any); !ok || len(u) != 3 || fmt.Sprint(u[2]) != "[5  tape tape]" || u[1][1] != "/dev/ublkb1" {
		t.Errorf("units %v", f.get(s, sessionInterface, "Units"))
	}

	// A device ends, in use or not, and comes back.
	f.Blocks.Hold(1, "mount /data")
	var refused dbus.Error
	if err := f.call(devicePath(1), deviceInterface+".Abort", opts{}).Err; !errors.As(err, &refused) || refused.Name != api.ErrBusy {
		t.Errorf("abort of a device in use: %v", err)
	}
	if err := f.call(devicePath(1), deviceInterface+".Abort", opts{"force": dbus.MakeVariant(true)}).Err; err != nil {
		t.Errorf("abort: %v", err)
	}
	f.until(devicePath(1), "InterfacesRemoved")
	if err := f.call(s, sessionInterface+".Rescan", opts{}).Err; err != nil {
		t.Error(err)
	}
	f.until(devicePath(1), "InterfacesAdded")

	// A failing session is an edge and a level.
	f.Plane.SetGroup(iqn, ipc.GroupFailed, &ipc.Error{Code: "ConnectionFailed", Text: "gone"})
	seen := f.until(s, "StateChanged")
	if !slices.Contains(seen, "PropertiesChanged "+string(s)) {
		t.Errorf("signals %q", seen)
	}
	if x, ok := f.get(s, sessionInterface, "LastError").([]any); !ok || x[0] != api.ErrConnectionFailed {
		t.Errorf("last error %v", x)
	}

	if err := f.call(s, sessionInterface+".Logout", opts{}).Err; err != nil {
		t.Fatal(err)
	}
	seen = f.until(s, "InterfacesRemoved")
	if !slices.Contains(seen, "InterfacesRemoved "+string(devicePath(0))) {
		t.Errorf("signals %q", seen)
	}
	if err := f.Clean(); err != nil {
		t.Error(err)
	}
	if err := f.call(nodes[0], nodeInterface+".Delete", opts{}).Err; err != nil {
		t.Error(err)
	}
	f.until(nodes[0], "InterfacesRemoved")
}

func TestErrors(t *testing.T) {
	f := start(t, trusted)
	login := func(o opts) *dbus.Call { return f.call(managerPath, managerInterface+".Login", iqn, o) }
	var s dbus.ObjectPath
	if err := login(opts{"portal": dbus.MakeVariant(portal), "transport": dbus.MakeVariant("tcp")}).Store(&s); err != nil {
		t.Fatal(err)
	}
	if n := f.get(s, sessionInterface, "Node"); n != noObject {
		t.Errorf("node %v of a target that is not stored", n)
	}
	f.Blocks.Hold(0, "mount /data")
	for _, r := range []struct {
		call *dbus.Call
		name string
	}{
		{login(opts{"portal": dbus.MakeVariant(portal)}), api.ErrAlreadyLoggedIn},
		{login(opts{"portl": dbus.MakeVariant(portal)}), api.ErrInvalidArgs},
		{login(opts{"portal": dbus.MakeVariant(uint32(1))}), api.ErrInvalidArgs},
		{f.call(managerPath, managerInterface+".Login", "disk", opts{}), api.ErrInvalidArgs},
		{f.call(managerPath, managerInterface+".DiscoverSendTargets", "10.0.0.300", opts{}), api.ErrInvalidArgs},
		{f.call(managerPath, managerInterface+".AddNode", iqn, "x/y", uint16(0), opts{}), api.ErrInvalidArgs},
		{f.call(managerPath, managerInterface+".LookupDevice", "/dev/sda"), api.ErrNotFound},
		{f.call(s, sessionInterface+".Logout", opts{}), api.ErrBusy},
		{f.call(sessionPath(77), sessionInterface+".Logout", opts{}), "org.freedesktop.DBus.Error.UnknownInterface"},
		{f.call(s, propertiesName+".Set", sessionInterface, "State", dbus.MakeVariant("x")), "org.freedesktop.DBus.Error.PropertyReadOnly"},
		{f.call(s, propertiesName+".Get", sessionInterface, "Nope"), "org.freedesktop.DBus.Error.UnknownProperty"},
		{f.call(s, propertiesName+".GetAll", "org.example.Nope"), "org.freedesktop.DBus.Error.UnknownInterface"},
	} {
		var e dbus.Error
		if !errors.As(r.call.Err, &e) || e.Name != r.name {
			t.Errorf("%s%v: %v, want %s", r.call.Method, r.call.Args, r.call.Err, r.name)
		}
	}
}

// TestXML compares the files with what is there: methods by reflection, properties by their values, and what Introspect answers.
func TestXML(t *testing.T) {
	f := start(t, trusted)
	if _, err := f.d.AddNode(iqn, portal); err != nil {
		t.Fatal(err)
	}
	if _, err := f.d.Login(context.Background(), api.LoginRequest{Target: iqn}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return len(f.d.Devices(context.Background(), false).Devices) == 2 })
	nodes, _, _ := f.d.Inventory()
	for iface, x := range map[string]struct {
		path dbus.ObjectPath
		obj  any
	}{
		managerInterface: {managerPath, manager{}}, nodeInterface: {nodePath(nodes[0].ID), node{}}, sessionInterface: {sessionPath(1), session{}},
		deviceInterface: {devicePath(0), device{}}, bufferInterface: {bufferPath(1), buffer{}},
	} {
		b, err := dbusfiles.Files.ReadFile("interfaces/" + iface + ".xml")
		if err != nil {
			t.Fatal(err)
		}
		var want introspect.Node
		if err := xml.Unmarshal(b, &want); err != nil {
			t.Fatalf("%s: %v", iface, err)
		}
		if len(want.Interfaces) != 1 || want.Interfaces[0].Name != iface {
			t.Fatalf("%s.xml holds %v", iface, want.Interfaces)
		}
		w := want.Interfaces[0]
		// Methods.
		var have, listed []string
		for _, m := range introspect.Methods(x.obj) {
			have = append(have, signature(m))
		}
		for _, m := range w.Methods {
			listed = append(listed, signature(m))
		}
		slices.Sort(have)
		slices.Sort(listed)
		if d := cmp.Diff(listed, have); d != "" {
			t.Errorf("%s methods: %s", iface, d)
		}
		// Properties.
		var props map[string]dbus.Variant // as received: Store would work out the signatures again
		waitFor(t, func() bool {
			call := f.call(x.path, propertiesName+".GetAll", iface)
			if call.Err == nil {
				props, _ = call.Body[0].(map[string]dbus.Variant)
			}
			return call.Err == nil
		})
		haveProps, listedProps := map[string]string{}, map[string]string{}
		for n, v := range props {
			haveProps[n] = v.Signature().String()
		}
		for _, p := range w.Properties {
			listedProps[p.Name] = p.Type
			if p.Access != "read" {
				t.Errorf("%s.%s: access %s", iface, p.Name, p.Access)
			}
		}
		if d := cmp.Diff(listedProps, haveProps); d != "" {
			t.Errorf("%s properties: %s", iface, d)
		}
		// Introspection.
		got, err := introspect.Call(f.conn.Object(busName, x.path))
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(got.Interfaces, func(i introspect.Interface) bool { return i.Name == iface })
		if i < 0 {
			t.Fatalf("%s does not show %s", x.path, iface)
		}
		if d := cmp.Diff(w, got.Interfaces[i]); d != "" {
			t.Errorf("%s: %s", iface, d)
		}
	}
	// From the root one can walk to every object.
	for p, want := range map[dbus.ObjectPath]string{root: "Manager buffer device node session", root + "/device": "0 1"} {
		n, err := introspect.Call(f.conn.Object(busName, p))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, c := range n.Children {
			got = append(got, c.Name)
		}
		slices.Sort(got)
		if strings.Join(got, " ") != want {
			t.Errorf("children of %s: %q", p, got)
		}
	}
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	limit := time.Now().Add(20 * time.Second)
	for !cond() {
		if time.Now().After(limit) {
			t.Fatal("it did not happen")
		}
		time.Sleep(5 * time.Millisecond) // the service has told the bus, which nothing tells us
	}
}

func signature(m introspect.Method) string {
	s := m.Name
	for _, a := range m.Args {
		s += " " + a.Direction + ":" + a.Type
	}
	return s
}

// authority is a polkit that can be told what to say.
type authority struct {
	answer func(subject string, action string, flags uint32) (bool, bool)
}

func (a authority) CheckAuthorization(subject struct {
	Kind    string
	Details map[string]dbus.Variant
}, action string, _ map[string]string, flags uint32, _ string) (struct {
	Authorized, Challenge bool
	Details               map[string]string
}, *dbus.Error) {
	name, _ := subject.Details["name"].Value().(string)
	var r struct {
		Authorized, Challenge bool
		Details               map[string]string
	}
	r.Details = map[string]string{}
	if subject.Kind == "system-bus-name" {
		r.Authorized, r.Challenge = a.answer(name, action, flags)
	}
	return r, nil
}

func TestPolkit(t *testing.T) {
	f := start(t, func(uint32) bool { return false }) // so that even root needs leave
	login := func(flags dbus.Flags) string {
		call := f.conn.Object(busName, managerPath).Call(managerInterface+".Login", flags, iqn, opts{"portal": dbus.MakeVariant(portal)})
		var e dbus.Error
		if errors.As(call.Err, &e) {
			return e.Name
		}
		return ""
	}
	if e := login(0); e != api.ErrAccessDenied {
		t.Errorf("without polkit: %q", e)
	}
	pk := connect(t, f.address())
	me := f.conn.Names()[0]
	var mu sync.Mutex
	var actions []string
	yes := false
	say := func(v bool) { mu.Lock(); defer mu.Unlock(); yes = v }
	a := authority{func(subject, action string, _ uint32) (bool, bool) {
		mu.Lock()
		defer mu.Unlock()
		actions = append(actions, action)
		return yes && subject == me, true
	}}
	if err := pk.Export(a, polkitPath, "org.freedesktop.PolicyKit1.Authority"); err != nil {
		t.Fatal(err)
	}
	if r, err := pk.RequestName(polkitName, 0); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatal(r, err)
	}
	if e := login(0); e != api.ErrInteractiveRequired {
		t.Errorf("challenge: %q", e)
	}
	if n := f.Plane.Logins(); n != 0 {
		t.Errorf("%d logins without leave", n)
	}
	say(true)
	if e := login(0); e != "" {
		t.Errorf("allowed: %q", e)
	}
	mu.Lock()
	if d := cmp.Diff([]string{actionLogin, actionLogin}, actions); d != "" {
		t.Error(d)
	}
	mu.Unlock()
	// Reading needs no leave.
	say(false)
	if x := f.get(sessionPath(1), sessionInterface, "State"); x != "up" {
		t.Errorf("state %v", x)
	}
}

func (f *fixture) address() string { return "unix:path=" + filepath.Join(f.Dir, "bus") }

// TestOtherUser calls as nobody, under the policy file and the real rule about users.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	f := start(t, trusted)
	bin, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(f.Dir, "x")
	if err := os.WriteFile(exe, bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for d := f.Dir; len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(f.Dir, "bus"), 0o777); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "BUS_TEST_ADDRESS="+f.address())
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if want := "read up login " + api.ErrAccessDenied; err != nil || string(out) != want {
		t.Errorf("%s, %v; want %s", out, err, want)
	}
	if n := f.Plane.Logins(); n != 0 {
		t.Errorf("%d logins", n)
	}
}

func asOtherUser(address string) {
	conn, err := dbus.Connect(address)
	if err != nil {
		fmt.Print(err)
		return
	}
	defer func() { _ = conn.Close() }()
	m := conn.Object(busName, managerPath)
	v, err := m.GetProperty(managerInterface + ".DataPlaneState")
	if err != nil {
		fmt.Print(err)
		return
	}
	err = m.Call(managerInterface+".Login", 0, iqn, opts{"portal": dbus.MakeVariant(portal)}).Err
	name := "ok"
	var e dbus.Error
	if errors.As(err, &e) {
		name = e.Name
	}
	fmt.Printf("read %v login %s", v.Value(), name)
}

// TestBusComesAndGoes: the daemon works without a bus, joins one that appears, and joins again after it was restarted.
func TestBusComesAndGoes(t *testing.T) {
	dir := t.TempDir()
	_, kill := startBus(t, dir)
	kill()
	if err := os.Remove(filepath.Join(dir, "bus")); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	address := "unix:path=" + filepath.Join(dir, "bus")
	l := daemontest.NewLab(dir)
	l.Plane.AddTarget(iqn, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	d, err := l.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Plane.Kill()
	defer d.Kill()
	stop := runBus(d, address, trusted)
	defer stop()
	if _, err := d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return strings.HasPrefix(d.Status(context.Background()).Bus, "not connected") })
	for range 2 {
		_, kill := startBus(t, dir)
		waitFor(t, func() bool { return d.Status(context.Background()).Bus == "connected" })
		conn := connect(t, address)
		var all map[dbus.ObjectPath]map[string]map[string]dbus.Variant
		if err := conn.Object(busName, root).Call(objectManager+".GetManagedObjects", 0).Store(&all); err != nil || len(all) != 5 {
			t.Errorf("managed objects %v, %v", all, err)
		}
		kill()
		_ = os.Remove(filepath.Join(dir, "bus"))
		waitFor(t, func() bool { return d.Status(context.Background()).Bus != "connected" })
	}
}

// TestSecondOwner: the name is taken; the daemon goes on without the bus and says why.
func TestSecondOwner(t *testing.T) {
	dir := t.TempDir()
	address, _ := startBus(t, dir)
	other := connect(t, address)
	if r, err := other.RequestName(busName, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatal(r, err)
	}
	l := daemontest.NewLab(dir)
	d, err := l.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Plane.Kill()
	defer d.Kill()
	stop := runBus(d, address, trusted)
	defer stop()
	waitFor(t, func() bool {
		return strings.Contains(d.Status(context.Background()).Bus, "another program has the name")
	})
	if _, err := other.ReleaseName(busName); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return d.Status(context.Background()).Bus == "connected" })
}

func TestDiff(t *testing.T) {
	v := func(x any) dbus.Variant { return dbus.MakeVariant(x) }
	a := tree{"/a": {"i": {"x": v(1), "y": v("s")}}, "/b": {"i": {"x": v(1)}}}
	b := tree{"/a": {"i": {"x": v(2), "y": v("s")}}, "/c": {"i": {"x": v(1)}}}
	d := diff(a, b)
	if !slices.Equal(d.removed, []dbus.ObjectPath{"/b"}) || !slices.Equal(d.added, []dbus.ObjectPath{"/c"}) || len(d.changed) != 1 || len(d.changed[0].now) != 1 {
		t.Errorf("%+v", d)
	}
	if d := diff(a, a); len(d.removed)+len(d.added)+len(d.changed) != 0 {
		t.Errorf("%+v", d)
	}
}

// TestPolicy: every action that a method asks for is declared, and nothing else.
func TestPolicy(t *testing.T) {
	b, err := os.ReadFile("../../packaging/polkit/org.iserd.iser1.policy")
	if errors.Is(err, os.ErrNotExist) {
		require.Need(t, "source", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var p struct {
		Actions []struct {
			ID string `xml:"id,attr"`
		} `xml:"action"`
	}
	if err := xml.Unmarshal(b, &p); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, a := range p.Actions {
		got = append(got, a.ID)
	}
	want := []string{actionDiscover, actionLogin, actionLogout, actionModify, actionRegister, actionAdopt, actionUpgrade, actionReload, actionScsi, actionReserve}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
