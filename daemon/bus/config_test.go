package bus

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/config"
)

// The configuration is read again for those who may, and shown to all.
func TestReload(t *testing.T) {
	var allowed atomic.Bool
	f := start(t, func(uint32) bool { return allowed.Load() })
	configure := func(text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(f.ConfigFile()), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f.ConfigFile(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	configure("queue_depth = 7\nlog_level = \"warn\"\nshared_arena = 0\n")
	method := managerInterface + ".Reload"
	wantName(t, f.call(managerPath, method, opts{}).Err, api.ErrAccessDenied)
	if n := f.d.Config().QueueDepth; n != 128 {
		t.Errorf("somebody who may not has changed queue_depth to %d", n)
	}
	// polkit is asked for the action of its own.
	pk := connect(t, f.address())
	asked := make(chan string, 1)
	if err := pk.Export(authority{func(_, action string, _ uint32) (bool, bool) { asked <- action; return false, true }}, polkitPath,
		"org.freedesktop.PolicyKit1.Authority"); err != nil {
		t.Fatal(err)
	}
	if r, err := pk.RequestName(polkitName, 0); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatal(r, err)
	}
	wantName(t, f.call(managerPath, method, opts{}).Err, api.ErrInteractiveRequired)
	if action := <-asked; action != "org.iserd.iser1.reload" {
		t.Errorf("polkit was asked for %s", action)
	}
	allowed.Store(true)
	wantName(t, f.call(managerPath, method, opts{"now": dbus.MakeVariant(true)}).Err, api.ErrInvalidArgs)
	var changes []map[string]dbus.Variant
	if err := f.call(managerPath, method, opts{}).Store(&changes); err != nil {
		t.Fatal(err)
	}
	if len(changes) != 3 || changes[0]["name"].Value() != "log_level" || changes[0]["new"].Value() != "warn" || changes[1]["old"].Value() != int64(128) ||
		changes[1]["new"].Value() != int64(7) || changes[1]["effect"].Value() != api.EffectDevice || changes[1]["origin"].Value() != f.ConfigFile()+":1" ||
		changes[2]["effect"].Value() != api.EffectDaemon || changes[1]["kept_by"].Signature().String() != "as" {
		t.Errorf("changes %v", changes)
	}

	allowed.Store(false)
	var list []map[string]dbus.Variant
	if err := f.call(managerPath, managerInterface+".GetConfiguration").Store(&list); err != nil {
		t.Fatal(err)
	}
	got := map[any]map[string]dbus.Variant{}
	for _, o := range list {
		got[o["name"].Value()] = o
	}
	if len(got) != len(config.Options) || got["queue_depth"]["value"].Value() != int64(7) || got["max_io"]["origin"].Value() != "default" ||
		got["shared_arena"]["in_force"].Value() != int64(8) || got["login_timeout"]["value"].Value() != "30s" {
		t.Errorf("configuration %v", list)
	}
	if _, waits := got["queue_depth"]["in_force"]; waits {
		t.Errorf("queue_depth %v", got["queue_depth"])
	}

	allowed.Store(true)
	configure("queue_depth = 0\nlog_lvel = 1\n")
	err := f.call(managerPath, method, opts{}).Err
	wantName(t, err, api.ErrInvalidArgs)
	if text := err.Error(); !strings.Contains(text, "iserd.toml:1: queue_depth is 0") || !strings.Contains(text, "iserd.toml:2: unknown key") {
		t.Errorf("error %q", text)
	}
}
