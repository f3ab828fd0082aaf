package daemon_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/config"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

// configure writes the lab's configuration file.
func (l *lab) configure(lines ...string) {
	l.t.Helper()
	if err := os.MkdirAll(filepath.Dir(l.ConfigFile()), 0o755); err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(l.ConfigFile(), []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// reload reads it again, and gives the changes as words.
func (l *lab) reload(d *daemontest.Daemon) []string {
	l.t.Helper()
	r, err := d.Reload(context.Background(), api.ReloadRequest{})
	if err != nil {
		l.t.Fatal(err)
	}
	return words(r.Changes)
}

func words(list []api.ConfigChange) []string {
	out := []string{}
	for _, c := range list {
		out = append(out, strings.Join(append([]string{c.Name, c.Old.Text, c.New.Text, c.Effect}, c.KeptBy...), " "))
	}
	return out
}

// A login at work and the sessions that are there keep what they began with; the next login and new devices do not.
func TestReloadDuringLogin(t *testing.T) {
	l := newLab(t)
	enter, leave := make(chan struct{}), make(chan struct{})
	const second, third = iqn + "-second", iqn + "-third"
	l.Plane.AddTarget(second, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}, Enter: enter, Leave: leave})
	l.Plane.AddTarget(third, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	own := iqn + "-own"
	l.Plane.AddTarget(own, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}, Enter: enter, Leave: leave})
	d := l.start()
	ctx := context.Background()
	l.login(d)
	if _, err := d.AddNode(own, portal); err != nil {
		t.Fatal(err)
	}
	if _, err := d.SetNode(ctx, api.SettingsRequest{Target: own, Set: map[string]string{"request_timeout": "7"}}); err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 2)
	for _, target := range []string{own, second} { // the first has a request_timeout of its own, and keeps nothing
		go func() {
			_, err := d.Login(ctx, api.LoginRequest{Target: target, Portal: portal})
			result <- err
		}()
		<-enter
	}
	l.configure(`request_timeout = "45s"`, `login_timeout = "50s"`, `queue_depth = 32`)
	if d := cmp.Diff([]string{
		"login_timeout 30s 50s login", "request_timeout 30s 45s login " + iqn + " " + second, "queue_depth 128 32 device /dev/ublkb0 /dev/ublkb1",
	}, l.reload(d)); d != "" {
		t.Error(d)
	}
	if changes := l.reload(d); len(changes) != 0 {
		t.Errorf("the second time %q", changes)
	}
	for range 2 {
		leave <- struct{}{}
		if err := <-result; err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.Login(ctx, api.LoginRequest{Target: third, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		target         string
		login, request time.Duration
	}{{iqn, 30e9, 30e9}, {own, 30e9, 7e9}, {second, 30e9, 30e9}, {third, 50e9, 45e9}} {
		if r := l.Plane.Asked()[i]; r.Target != want.target || r.Timeout != want.login || r.RequestTimeout != want.request {
			t.Errorf("login %d: %s, login_timeout %v, request_timeout %v; want %+v", i, r.Target, r.Timeout, r.RequestTimeout, want)
		}
	}
	for _, x := range d.Devices(ctx, false).Devices {
		want := 32
		if x.Target == iqn {
			want = 128
		}
		if x.QueueDepth != want {
			t.Errorf("%s of %s has %d requests a queue, want %d", x.Path, x.Target, x.QueueDepth, want)
		}
	}
}

// With anything wrong nothing changes: neither what is right in the file, nor what the daemon goes by.
func TestReloadBad(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.configure(`queue_depth = 32`)
	l.reload(d)
	before := d.Config()
	l.configure(`queue_depth = 64`, `max_io = 3`, `log_lvel = "debug"`)
	_, err := d.Reload(ctx, api.ReloadRequest{})
	wantError(t, err, api.ErrInvalidArgs, "nothing was changed", "iserd.toml:2: max_io is 3", "iserd.toml:3: unknown key")
	if len(config.ProblemsOf(err)) != 2 {
		t.Errorf("problems of %v", err)
	}
	if now := d.Config(); now != before || now.QueueDepth != 32 {
		t.Errorf("in force %+v", now)
	}
	for _, want := range []string{"iserd.toml:2: max_io is 3", "iserd.toml:3: unknown key", "the configuration is not changed"} {
		if !strings.Contains(l.log.String(), want) {
			t.Errorf("the log lacks %q", want)
		}
	}
	// It is seen without a reload, too.
	r := d.Configuration()
	if len(r.Problems) != 2 || r.Problems[0].Option != "max_io" || r.Problems[1].Origin.Line != 3 || len(r.Changes) != 0 {
		t.Errorf("%+v", r)
	}
	l.configure(`queue_depth = 64`)
	if r = d.Configuration(); len(r.Problems) != 0 || !cmp.Equal(words(r.Changes), []string{"queue_depth 32 64 device"}) {
		t.Errorf("%+v", r)
	}
}

// What waits for the next start of the daemon or the data plane is told as long as it waits.
func TestReloadWaits(t *testing.T) {
	l := newLab(t)
	l.Plane.Prompt = true
	l.Plane.Start = &ipc.Start{BufferPool: 64}
	d := l.start()
	waits := func() map[string]string {
		out := map[string]string{}
		for _, o := range d.Configuration().Options {
			if o.InForce != nil {
				out[o.Name] = o.Value.Text + " not " + o.InForce.Text
			}
		}
		return out
	}
	if w := waits(); len(w) != 0 {
		t.Errorf("at the start %v wait", w)
	}
	l.configure(`initiator_name = "iqn.2026-11.org.iserd:other"`, `shared_arena = 0`, `reactors = 3`, `ack_timeout = "1s"`, `discovery_timeout = "3s"`, `log_level = "warn"`)
	if d := cmp.Diff([]string{
		"initiator_name  iqn.2026-11.org.iserd:other daemon", "log_level info warn now", "discovery_timeout 15s 3s now", "reactors 0 3 data-plane",
		"ack_timeout 0 1s data-plane", "shared_arena 8 0 daemon",
	}, l.reload(d)); d != "" {
		t.Error(d)
	}
	want := map[string]string{
		"initiator_name": "iqn.2026-11.org.iserd:other not " + d.InitiatorName(), "reactors": "3 not 0", "ack_timeout": "1s not 0", "shared_arena": "0 not 8",
	}
	if d := cmp.Diff(want, waits()); d != "" {
		t.Error(d)
	}
	// A data plane that is started goes by it.
	if c := d.Config(); c.Reactors != 3 || c.ACKTimeout != time.Second || c.SharedArena != 8 || c.InitiatorName != "" || c.DiscoveryTimeout != 3*time.Second {
		t.Errorf("in force %+v", c)
	}
	l.Plane.Start = &ipc.Start{BufferPool: 64, Reactors: 3, ACKTimeout: time.Second}
	if _, err := upgrade(d); err != nil {
		t.Fatal(err)
	}
	delete(want, "reactors")
	delete(want, "ack_timeout")
	if d := cmp.Diff(want, waits()); d != "" {
		t.Error(d)
	}
	// One that is too old does not say, and none does not either.
	unknown := func() (names []string) {
		for _, o := range d.Configuration().Options {
			if o.Unknown {
				names = append(names, o.Name)
			}
		}
		return names
	}
	if n := unknown(); len(n) != 0 {
		t.Errorf("%q are not known", n)
	}
	start := l.Plane.Start
	l.Plane.Start = nil
	if _, err := upgrade(d); err != nil {
		t.Fatal(err)
	}
	if n := unknown(); !slices.Equal(n, []string{"reactors", "buffer_pool", "ack_timeout"}) {
		t.Errorf("%q are not known", n)
	}
	l.Plane.Start = start
	if _, err := upgrade(d); err != nil {
		t.Fatal(err)
	}
	// A change that is taken back before it has counted waits no longer.
	l.configure(`reactors = 3`, `ack_timeout = "1s"`)
	l.reload(d)
	if w := waits(); len(w) != 0 {
		t.Errorf("%v wait", w)
	}
}

// Limits and time-outs that count at once do so for the next request.
func TestReloadNow(t *testing.T) {
	l := newLab(t)
	l.Portals[portal] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {{Target: iqn, Address: "10.0.0.1", Port: 3260, TPGT: 1}}}}
	d := l.start()
	ctx := context.Background()
	path := shm(t, 3<<20)
	l.configure(`shared_limit = 2`, `discovery_timeout = "3s"`)
	l.reload(d)
	if _, err := d.AddPath(ctx, api.BufferAddRequest{Path: path}); !api.Is(err, api.ErrLimitsExceeded) {
		t.Errorf("above the limit: %v", err)
	}
	l.configure(`shared_limit = 3`, `discovery_timeout = "3s"`)
	l.reload(d)
	if _, err := d.AddPath(ctx, api.BufferAddRequest{Path: path}); err != nil {
		t.Error(err)
	}
	if _, err := d.Discover(ctx, api.DiscoverRequest{Portal: portal, Transport: "tcp"}); err != nil {
		t.Fatal(err)
	}
	if q := l.Questions(); len(q) != 1 || q[0].Timeout != 3*time.Second {
		t.Errorf("the portal was asked %+v", q)
	}
}

// Reloads, looks and logins at once, over the socket.
func TestReloadAtOnce(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.configure(`queue_depth = 32`)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c := client.New(l.Socket())
			defer c.Close()
			for range 10 {
				if _, err := c.Reload(ctx, api.ReloadRequest{}); err != nil {
					t.Error(err)
				}
				r, err := c.Config(ctx)
				if err != nil || len(r.Options) != len(config.Options) || len(r.Changes) != 0 || len(r.Files) != 1 {
					t.Errorf("%+v, %v", r, err)
				}
			}
		})
	}
	for range 5 {
		l.login(d)
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	l.clean()
}
