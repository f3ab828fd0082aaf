package bus

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// addNode stores a record over the bus.
func (f *fixture) addNode() dbus.ObjectPath {
	f.t.Helper()
	var n dbus.ObjectPath
	if err := f.call(managerPath, managerInterface+".AddNode", iqn, "10.0.0.1", uint16(3260), opts{}).Store(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

func TestSettings(t *testing.T) {
	f := start(t, trusted)
	n := f.addNode()
	v := func(x any) dbus.Variant { return dbus.MakeVariant(x) }
	if err := f.call(n, nodeInterface+".Set", opts{
		"chap_user": v("host"), "chap_algorithms": v([]string{"SHA256", "MD5"}), "immediate_data": v(false), "max_burst_length": v(uint32(65536)),
		"replacement_timeout": v(int32(-1)), "login_timeout": v("2m"), "data_digest": v("CRC32C,None"),
	}).Err; err != nil {
		t.Fatal(err)
	}
	want := opts{
		"transport": v("auto"), "chap_user": v("host"), "chap_algorithms": v([]string{"SHA256", "MD5"}), "immediate_data": v(false), "max_burst_length": v(int32(65536)),
		"replacement_timeout": v(int32(-1)), "login_timeout": v(int32(120)), "data_digest": v("CRC32C,None"),
	}
	if got := f.get(n, nodeInterface, "Settings"); !reflect.DeepEqual(got, want) {
		t.Errorf("settings %v, want %v", got, want)
	}
	f.until(n, "PropertiesChanged")
	// What was read can be written.
	if err := f.call(n, nodeInterface+".Set", want).Err; err != nil {
		t.Error(err)
	}
	if err := f.call(n, nodeInterface+".Unset", []string{"chap_algorithms", "replacement_timeout"}).Err; err != nil {
		t.Error(err)
	}
	delete(want, "chap_algorithms")
	delete(want, "replacement_timeout")
	if got := f.get(n, nodeInterface, "Settings"); !reflect.DeepEqual(got, want) {
		t.Errorf("settings %v, want %v", got, want)
	}
	if err := f.call(n, nodeInterface+".SetSecret", api.CHAPSecret, []byte("hush: our secret")).Err; err != nil {
		t.Fatal(err)
	}
	if got := f.get(n, nodeInterface, "Secrets"); !reflect.DeepEqual(got, []string{api.CHAPSecret}) {
		t.Errorf("secrets %v", got)
	}
	var s dbus.ObjectPath
	if err := f.call(n, nodeInterface+".Login", opts{}).Store(&s); err != nil {
		t.Fatal(err)
	}
	if asked := f.Plane.Asked(); len(asked) != 1 || string(asked[0].Secret.Reveal()) != "hush: our secret" || asked[0].Settings.CHAPUser != "host" {
		t.Errorf("asked %+v", asked)
	}
	if err := f.call(n, nodeInterface+".SetSecret", api.CHAPSecret, []byte{}).Err; err != nil {
		t.Error(err)
	}
	if err := f.call(n, nodeInterface+".Set", opts{"auth": v("none")}).Err; err != nil {
		t.Error(err)
	}
	if got := f.get(n, nodeInterface, "Pending"); !reflect.DeepEqual(got, []string{"auth"}) {
		t.Errorf("pending %v", got)
	}
	if got := f.get(n, nodeInterface, "Secrets"); !reflect.DeepEqual(got, []string{}) {
		t.Errorf("secrets %v", got)
	}
	// Nothing that can be asked for shows a secret.
	var all map[dbus.ObjectPath]map[string]map[string]dbus.Variant
	if err := f.call(root, objectManager+".GetManagedObjects").Store(&all); err != nil || strings.Contains(fmt.Sprint(all), "hush") {
		t.Errorf("managed objects %v, %v", all, err)
	}
	for _, c := range []*dbus.Call{
		f.call(n, nodeInterface+".Set", opts{"colour": v("red")}), f.call(n, nodeInterface+".Set", opts{}), f.call(n, nodeInterface+".Unset", []string{"colour"}),
		f.call(n, nodeInterface+".Set", opts{"max_burst_length": v(1.5)}), f.call(n, nodeInterface+".Set", opts{"max_burst_length": v(int32(-1))}),
		f.call(n, nodeInterface+".Set", opts{api.CHAPSecret: v("hush: x")}), f.call(n, nodeInterface+".SetSecret", "password", []byte("hush: x")),
		f.call(n, nodeInterface+".SetSecret", api.CHAPSecret, make([]byte, 256)),
	} {
		var e dbus.Error
		if !errors.As(c.Err, &e) || e.Name != api.ErrInvalidArgs || strings.Contains(fmt.Sprint(e.Body), "hush") {
			t.Errorf("%s%v: %v", c.Method, c.Args, c.Err)
		}
	}
	if err := f.call(s, sessionInterface+".Logout", opts{}).Err; err != nil {
		t.Error(err)
	}
}

func TestDiscoverySettings(t *testing.T) {
	f := start(t, trusted)
	v := func(x any) dbus.Variant { return dbus.MakeVariant(x) }
	if err := f.call(managerPath, managerInterface+".SetDiscovery", "10.0.0.1", opts{"chap_user": v("host"), "source_address": v("10.0.0.2")}).Err; err != nil {
		t.Fatal(err)
	}
	if err := f.call(managerPath, managerInterface+".SetDiscoverySecret", "10.0.0.1", api.CHAPSecret, []byte("hush")).Err; err != nil {
		t.Fatal(err)
	}
	if err := f.call(managerPath, managerInterface+".UnsetDiscovery", "10.0.0.1", []string{"source_address"}).Err; err != nil {
		t.Fatal(err)
	}
	read := func() (opts, []string) {
		t.Helper()
		var s opts
		var names []string
		if err := f.call(managerPath, managerInterface+".GetDiscovery", "10.0.0.1").Store(&s, &names); err != nil {
			t.Fatal(err)
		}
		return s, names
	}
	if s, names := read(); !reflect.DeepEqual(s, opts{"chap_user": v("host")}) || !slices.Equal(names, []string{api.CHAPSecret}) {
		t.Errorf("%v, %v", s, names)
	}
	var found []map[string]dbus.Variant
	if err := f.call(managerPath, managerInterface+".DiscoverSendTargets", "10.0.0.1", opts{"settings": v(opts{"chap_user": v("guest")})}).Store(&found); err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	q := f.Questions()
	if last := q[len(q)-1]; last.Settings.CHAPUser != "guest" || string(last.Secrets.Secret.Reveal()) != "hush" {
		t.Errorf("asked %+v", last)
	}
	if err := f.call(managerPath, managerInterface+".DeleteDiscovery", "10.0.0.1").Err; err != nil {
		t.Error(err)
	}
	if s, names := read(); len(s) != 0 || len(names) != 0 {
		t.Errorf("%v, %v", s, names)
	}
	var e dbus.Error
	if err := f.call(managerPath, managerInterface+".DiscoverFirmware", opts{}).Err; !errors.As(err, &e) || e.Name != api.ErrNotFound {
		t.Errorf("no firmware table: %v", err)
	}
	if err := os.CopyFS(filepath.Join(f.Dir, "ibft"), os.DirFS("../../discovery/ibft/testdata")); err != nil {
		t.Fatal(err)
	}
	if err := f.call(managerPath, managerInterface+".DiscoverFirmware", opts{"persist": v(true)}).Store(&found); err != nil || len(found) != 2 || found[0]["lun"].Value() != int32(0) {
		t.Errorf("%v, %v", found, err)
	}
}

// Who may not change anything may not change settings or secrets, and nothing is written.
func TestSettingsRefused(t *testing.T) {
	f := start(t, func(uint32) bool { return false })
	if _, err := f.d.AddNode(iqn, portal); err != nil {
		t.Fatal(err)
	}
	n, _, _ := f.d.Inventory()
	path := nodePath(n[0].ID)
	f.until(path, "InterfacesAdded")
	v := func(x any) dbus.Variant { return dbus.MakeVariant(x) }
	for _, c := range []*dbus.Call{
		f.call(path, nodeInterface+".Set", opts{"auth": v("none")}), f.call(path, nodeInterface+".Unset", []string{"auth"}),
		f.call(path, nodeInterface+".SetSecret", api.CHAPSecret, []byte("hush")),
		f.call(managerPath, managerInterface+".SetDiscovery", portal, opts{"auth": v("none")}),
		f.call(managerPath, managerInterface+".UnsetDiscovery", portal, []string{"auth"}),
		f.call(managerPath, managerInterface+".SetDiscoverySecret", portal, api.CHAPSecret, []byte("hush")),
		f.call(managerPath, managerInterface+".DeleteDiscovery", portal), f.call(managerPath, managerInterface+".DiscoverFirmware", opts{}),
	} {
		var e dbus.Error
		if !errors.As(c.Err, &e) || e.Name != api.ErrAccessDenied {
			t.Errorf("%s: %v", c.Method, c.Err)
		}
	}
	for _, dir := range []string{"secrets", "portals"} {
		_ = filepath.WalkDir(filepath.Join(f.Dir, "state", dir), func(p string, e fs.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				t.Errorf("%s is there, %v", p, err)
			}
			return nil
		})
	}
}
