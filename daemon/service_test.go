package daemon_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/ublk"
)

const (
	iqn    = "iqn.2003-01.org.example:t1"
	portal = "10.0.0.1:3260"
)

func TestMain(m *testing.M) {
	if p := os.Getenv("DAEMON_TEST_SOCKET"); p != "" { // see TestForeignUser
		_, err := client.New(p).Status(context.Background())
		fmt.Print(api.NameOf(err))
		os.Exit(0)
	}
	if os.Getenv("DAEMON_TEST_SHARER") != "" { // see TestAdopt
		if err := share(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

type lab struct {
	*daemontest.Lab
	t   *testing.T
	log *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{daemontest.NewLab(t.TempDir()), t, &syncBuffer{}}
	l.Log = l.log
	l.Plane.AddTarget(iqn, &daemontest.Target{ISER: true, TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 64<<20), daemontest.Disk(1, 1<<30)}})
	t.Cleanup(func() {
		l.Plane.Kill()
		if err := l.Check(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", l.log)
		}
	})
	return l
}

func (l *lab) start() *daemontest.Daemon {
	l.t.Helper()
	d, err := l.Start()
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { d.Kill() })
	return d
}

func (l *lab) clean() {
	l.t.Helper()
	if err := l.Clean(); err != nil {
		l.t.Error(err)
	}
}

func (l *lab) login(d *daemontest.Daemon) api.LoginReply {
	l.t.Helper()
	r, err := d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal})
	if err != nil {
		l.t.Fatal(err)
	}
	return r
}

// eventually waits for what an event brings about.
func eventually(t *testing.T, d *daemontest.Daemon, what string, cond func() bool) {
	t.Helper()
	changes, done := d.Watch()
	defer done()
	limit := time.After(20 * time.Second)
	for !cond() {
		select {
		case <-changes:
		case <-time.After(50 * time.Millisecond):
		case <-limit:
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestLoginLogout(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	r := l.login(d)
	if r.Session.State != api.SessionUp || r.Session.ID != 1 || r.Session.Transport != "iser" || len(r.Session.Connections) != 2 || len(r.Devices) != 2 {
		t.Errorf("reply %+v", r)
	}
	if c := r.Session.Connections; c[0].ISID[:2] != "80" || c[0].ISID[:8] != c[1].ISID[:8] || c[0].ISID == c[1].ISID {
		t.Errorf("ISIDs %s, %s", c[0].ISID, c[1].ISID)
	}
	want := ublk.Params{
		Attrs: ublk.AttrVolatileCache | ublk.AttrFUA, LogicalBlock: 512, PhysicalBlock: 4096, MaxSectors: 1024, Sectors: 64 << 20 / 512,
	}
	if diff := cmp.Diff(want, l.Blocks.Params(0)); diff != "" {
		t.Error(diff)
	}
	env, err := os.ReadFile(filepath.Join(l.RunDir(), "devices", "0.env"))
	if err != nil || !strings.Contains(string(env), "ISER_TARGET="+iqn+"\n") || !strings.Contains(string(env), "ID_PATH=ip-10.0.0.1:3260-iscsi-"+iqn+"-lun-0\n") {
		t.Errorf("properties: %s, %v", env, err)
	}
	devs := d.Devices(ctx, false).Devices
	if len(devs) != 2 || devs[0].Path != "/dev/ublkb0" || devs[1].Size != 1<<30 || devs[0].Stats.Reads != 11 || devs[0].Stats.BytesRegistered != 1<<30+45056 ||
		devs[0].State != api.DeviceLive || devs[0].QueueDepth != 128 || devs[0].Queues != 2 {
		t.Errorf("devices %+v", devs)
	}
	if s := d.Status(ctx); s.State != "running" || s.Sessions != 1 || s.Devices != 2 || len(s.Problems) != 0 || s.DataPlane.Reactors != 2 || !s.Ublk.Available {
		t.Errorf("status %+v", s)
	}
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrAlreadyLoggedIn) {
		t.Errorf("second login: %v", err)
	}
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: "10.0.0.9"}); !api.Is(err, api.ErrAlreadyLoggedIn) {
		t.Errorf("login through another portal: %v", err)
	}
	out, err := d.Logout(ctx, api.LogoutRequest{Session: "/dev/ublkb1"})
	if err != nil || !slices.Equal(out.Devices, []string{"/dev/ublkb0", "/dev/ublkb1"}) || out.Session.Target != iqn {
		t.Errorf("logout: %+v, %v", out, err)
	}
	l.clean()
	// Devices are made and taken apart at the same time, each in this order; their numbers follow the units.
	calls := l.Blocks.Calls()
	for _, id := range []string{"0", "1"} {
		of := slices.DeleteFunc(slices.Clone(calls), func(c string) bool { return !strings.HasSuffix(c, " "+id) })
		order := []string{"add " + id, "set " + id, "reg " + id, "reg " + id, "start " + id, "trystop " + id, "delete " + id}
		if diff := cmp.Diff(order, of); diff != "" {
			t.Error(diff)
		}
	}
	if slices.Index(calls, "add 0") > slices.Index(calls, "add 1") {
		t.Errorf("order of the numbers: %v", calls)
	}
	// Logging in again uses the same identifiers: that is what ends the tasks of a session that was lost.
	if again := l.login(d); again.Session.Connections[0].ISID != r.Session.Connections[0].ISID || again.Session.ID != 1 {
		t.Errorf("second session %+v", again.Session)
	}
	for _, s := range []string{"1", iqn} {
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: s}); err != nil && s == "1" {
			t.Error(err)
		} else if err == nil && s == iqn {
			t.Error("logged out twice")
		}
	}
	l.clean()
}

func TestErrors(t *testing.T) {
	l := newLab(t)
	l.Plane.AddTarget(iqn+"-tcp", &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	l.Plane.AddTarget(iqn+"-auth", &daemontest.Target{Err: &ipc.Error{Code: "AuthenticationFailed", Text: "status 02/01"}})
	l.Plane.AddTarget(iqn+"-hang", &daemontest.Target{Hang: true})
	l.Plane.AddTarget(iqn+"-empty", &daemontest.Target{})
	unavailable := &daemontest.Target{Err: &ipc.Error{Code: "LoginFailed", Text: "status 03/01"}}
	l.Plane.AddTarget(iqn+"-busy", unavailable)
	l.Plane.AddTarget(iqn+"-lost", unavailable)
	l.Portals[portal] = &daemontest.Portal{
		Lists: map[string][]daemon.Found{"tcp": {{Target: iqn + "-busy", Address: "10.0.0.1", Port: 3260}}}, Errs: map[string]error{"iser": errors.New("no")},
	}
	l.Portals["10.0.0.2:3260"] = &daemontest.Portal{Errs: map[string]error{"tcp": errors.New("no"), "iser": errors.New("no")}}
	d := l.start()
	ctx := context.Background()
	for _, r := range []struct {
		req  api.LoginRequest
		name string
	}{
		{api.LoginRequest{Target: "disk"}, api.ErrInvalidArgs},
		{api.LoginRequest{Target: iqn, Portal: "1.2.3"}, api.ErrInvalidArgs},
		{api.LoginRequest{Target: iqn, Portal: portal, Transport: "fc"}, api.ErrInvalidArgs},
		{api.LoginRequest{Target: iqn}, api.ErrNotFound},
		{api.LoginRequest{Target: iqn + "-none", Portal: portal}, api.ErrNotFound},
		{api.LoginRequest{Target: iqn + "-tcp", Portal: portal, Transport: "iser"}, api.ErrTransportUnavailable},
		{api.LoginRequest{Target: iqn + "-auth", Portal: portal}, api.ErrAuthenticationFailed},
		{api.LoginRequest{Target: iqn + "-hang", Portal: portal, Timeout: 0.05}, api.ErrTimeout},
		{api.LoginRequest{Target: iqn + "-busy", Portal: portal}, api.ErrLoginFailed},
		{api.LoginRequest{Target: iqn + "-lost", Portal: portal}, api.ErrNotFound},        // LIO's way of saying so
		{api.LoginRequest{Target: iqn + "-lost", Portal: "10.0.0.2"}, api.ErrLoginFailed}, // a portal that does not tell
	} {
		if _, err := d.Login(ctx, r.req); !api.Is(err, r.name) {
			t.Errorf("login %+v: %v (%s), want %s", r.req, err, api.NameOf(err), r.name)
		}
	}
	for _, s := range []string{"/dev/ublkb7", "99"} {
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: s}); !api.Is(err, api.ErrSessionNotFound) {
			t.Errorf("logout %s: %v", s, err)
		}
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); !api.Is(err, api.ErrNotFound) {
		t.Errorf("logout: %v", err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: "/dev/sda"}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("logout of a foreign device: %v", err)
	}
	l.clean()
	// A target without units gives a session without devices.
	if r, err := d.Login(ctx, api.LoginRequest{Target: iqn + "-empty", Portal: portal}); err != nil || len(r.Devices) != 0 {
		t.Errorf("empty target: %+v, %v", r, err)
	}
	if r, err := d.Login(ctx, api.LoginRequest{Target: iqn + "-tcp", Portal: portal}); err != nil || r.Session.Transport != "tcp" || r.Session.TransportReason == "" {
		t.Errorf("auto: %+v, %v", r, err)
	}
}

func TestNoDriver(t *testing.T) {
	l := newLab(t)
	l.NoBlocks = fmt.Errorf("open /dev/ublk-control: %w: load the module with `modprobe ublk_drv`", ublk.ErrNotSupported)
	d := l.start()
	_, err := d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal})
	if !api.Is(err, api.ErrNotSupported) || !strings.Contains(err.Error(), "modprobe") {
		t.Errorf("login: %v", err)
	}
	if n := l.Plane.Logins(); n != 0 {
		t.Errorf("%d logins at the target although no device can be made", n)
	}
	if s := d.Status(context.Background()); s.State != "degraded" || s.Ublk.Available || len(s.Problems) != 1 {
		t.Errorf("status %+v", s)
	}
	l.NoBlocks = nil // the module is loaded: no restart needed
	l.login(d)
}

// TestRollback fails each step for one of two units, then for the only one.
func TestRollback(t *testing.T) {
	for _, step := range []string{"add", "set", "start", "attach"} {
		t.Run(step, func(t *testing.T) {
			l := newLab(t)
			l.Plane.AddTarget(iqn+"-one", &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
			d := l.start()
			breakIt := func() {
				if step == "attach" {
					l.Plane.FailAttach(errors.New("broken"))
				} else {
					l.Blocks.Fail(step, errors.New("broken"))
				}
			}
			breakIt()
			_, err := d.Login(context.Background(), api.LoginRequest{Target: iqn + "-one", Portal: portal})
			if !api.Is(err, api.ErrNotSupported) || !strings.Contains(err.Error(), "broken") {
				t.Errorf("login: %v", err)
			}
			l.clean()
			if n := len(d.Sessions().Sessions); n != 0 {
				t.Errorf("%d sessions listed", n)
			}

			breakIt()
			r := l.login(d)
			if len(r.Devices) != 1 || len(r.Session.Units) != 2 {
				t.Fatalf("%+v", r)
			}
			// The units are served at the same time: either of them may have met the failure.
			for _, u := range r.Session.Units {
				if served := u.LUN == r.Devices[0].LUN; served != (u.Device == r.Devices[0].Path) || served != (u.Reason == "") ||
					!served && !strings.Contains(u.Reason, "broken") {
					t.Errorf("device of LUN %d, unit %+v", r.Devices[0].LUN, u)
				}
			}
			if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
				t.Error(err)
			}
			l.clean()
		})
	}
}

func TestUnusableUnits(t *testing.T) {
	l := newLab(t)
	units := []ipc.Unit{
		daemontest.Disk(0, 1<<20), daemontest.Disk(1, 1<<20), daemontest.Disk(2, 1<<20), daemontest.Disk(3, 0), daemontest.Disk(4, 1<<20), daemontest.Disk(5, 1<<20),
	}
	units[1].Usable, units[1].Reason = false, "it is a tape"
	units[2].LogicalBlockSize = 520
	units[4].MaxTransfer = 2048
	units[5].Blocks = 1 << 63
	l.Plane.AddTarget(iqn, &daemontest.Target{Units: units})
	d := l.start()
	r := l.login(d)
	if len(r.Devices) != 1 {
		t.Errorf("%d devices", len(r.Devices))
	}
	for i, want := range []string{"", "tape", "520", "0 blocks", "2048", "size of"} {
		if u := r.Session.Units[i]; !strings.Contains(u.Reason, want) || (u.Device != "") != (i == 0) {
			t.Errorf("unit %d: %+v, want %q", i, u, want)
		}
	}
}

// TestConcurrent: 50 callers log in to one target, 5 to another, and all log out again.
func TestConcurrent(t *testing.T) {
	l := newLab(t)
	l.Plane.AddTarget(iqn+"-b", &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	d := l.start()
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[string]int{}
	each := func(n int, target string, f func(string) error) {
		for range n {
			wg.Add(1)
			go func() {
				defer wg.Done()
				err := f(target)
				mu.Lock()
				defer mu.Unlock()
				count[target+" "+api.NameOf(err)]++
			}()
		}
	}
	login := func(target string) error {
		_, err := d.Login(context.Background(), api.LoginRequest{Target: target, Portal: portal})
		return err
	}
	each(50, iqn, login)
	each(5, iqn+"-b", login)
	wg.Wait()
	want := map[string]int{iqn + " ": 1, iqn + " " + api.ErrAlreadyLoggedIn: 49, iqn + "-b ": 1, iqn + "-b " + api.ErrAlreadyLoggedIn: 4}
	if diff := cmp.Diff(want, count); diff != "" {
		t.Error(diff)
	}
	if n := l.Plane.Logins(); n != 2 {
		t.Errorf("%d logins reached the data plane", n)
	}
	clear(count)
	logout := func(target string) error {
		_, err := d.Logout(context.Background(), api.LogoutRequest{Session: target})
		return err
	}
	each(50, iqn, logout)
	each(5, iqn+"-b", logout)
	wg.Wait()
	if count[iqn+" "] != 1 || count[iqn+"-b "] != 1 {
		t.Errorf("logouts %v", count)
	}
	l.clean()

	// Anything at once: nothing may stay behind.
	each(10, iqn, login)
	each(10, iqn, logout)
	each(5, iqn+"-b", login)
	each(5, iqn+"-b", logout)
	wg.Wait()
	_ = logout(iqn)
	_ = logout(iqn + "-b")
	l.clean()
}

func TestLogoutBusy(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	ctx := context.Background()
	l.Blocks.Hold(1, "mount /data", "fio (pid 42)")
	before := len(l.Blocks.Calls())
	for _, force := range []bool{false, true} { // a session that works is never taken away by force
		_, err := d.Logout(ctx, api.LogoutRequest{Session: iqn, Force: force})
		if !api.Is(err, api.ErrBusy) || !strings.Contains(err.Error(), "/dev/ublkb1 is in use: mount /data, fio (pid 42)") {
			t.Errorf("logout (force %v): %v", force, err)
		}
	}
	if c := l.Blocks.Calls(); len(c) != before {
		t.Errorf("commands were issued: %v", c[before:])
	}
	if s := d.Sessions().Sessions; len(s) != 1 || s[0].State != api.SessionUp {
		t.Errorf("sessions %+v", s)
	}
	l.Blocks.Hold(1)

	// Somebody opens the second device after the holders were looked at, when the first one is already gone: it is served again.
	raced := &racing{Blocks: l.Blocks}
	l.OpenBlocks = func() (daemon.Blocks, error) { return raced, nil }
	d.Kill()
	d = l.start()
	_, err := d.Logout(ctx, api.LogoutRequest{Session: iqn})
	if !api.Is(err, api.ErrBusy) || !strings.Contains(err.Error(), "/dev/ublkb1 is in use:") {
		t.Errorf("logout: %v", err)
	}
	devs := d.Devices(ctx, false).Devices
	if len(devs) != 2 || d.Sessions().Sessions[0].State != api.SessionUp {
		t.Errorf("after the refused logout: %+v", devs)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// racing refuses the first TryStop of device 1.
type racing struct {
	*daemontest.Blocks
	once sync.Once
}

func (r *racing) TryStop(ctx context.Context, id int) error {
	var err error
	if id == 1 {
		r.once.Do(func() { err = fmt.Errorf("ublk device 1: %w", ublk.ErrBusy) })
	}
	if err != nil {
		return err
	}
	return r.Blocks.TryStop(ctx, id)
}

// TestOldKernel: TRY_STOP_DEV is not there before 7.0.
func TestOldKernel(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Fail("trystop", ublk.ErrNotSupported)
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// TestRestart: a new daemon shows what the old one left and can end it.
func TestRestart(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	ctx := context.Background()
	before, sessions := d.Devices(ctx, false), d.Sessions()
	d.Kill()
	calls := len(l.Blocks.Calls())
	d = l.start()
	if diff := cmp.Diff(before, d.Devices(ctx, false)); diff != "" {
		t.Error("devices differ: ", diff)
	}
	if diff := cmp.Diff(sessions, d.Sessions()); diff != "" {
		t.Error("sessions differ: ", diff)
	}
	if c := l.Blocks.Calls(); len(c) != calls {
		t.Errorf("the restart issued %v", c[calls:])
	}
	if l.Plane.Starts() != 1 {
		t.Errorf("data plane started %d times", l.Plane.Starts())
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: "/dev/ublkb0"}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// TestRestartHalfWay: the old daemon died in the middle of a login.
func TestRestartHalfWay(t *testing.T) {
	ctx := context.Background()
	t.Run("device records lost", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.login(d)
		before := d.Devices(ctx, false)
		d.Kill()
		for _, f := range []string{"0.json", "1.json"} {
			if err := os.Remove(filepath.Join(l.RunDir(), "devices", f)); err != nil {
				t.Fatal(err)
			}
		}
		d = l.start()
		if diff := cmp.Diff(before, d.Devices(ctx, false)); diff != "" {
			t.Error(diff)
		}
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Error(err)
		}
		l.clean()
	})
	t.Run("unit without device", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.Blocks.Fail("add", errors.New("as if killed here"))
		if r := l.login(d); len(r.Devices) != 1 {
			t.Fatalf("%+v", r)
		}
		d.Kill()
		d = l.start()
		if devs := d.Devices(ctx, false).Devices; len(devs) != 2 {
			t.Errorf("%+v", devs)
		}
	})
	t.Run("device attached and not started", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.login(d)
		d.Kill()
		// As between attach and START_DEV.
		if err := l.Blocks.Stop(timeout(t), 1); err != nil {
			t.Fatal(err)
		}
		d = l.start()
		devs := d.Devices(ctx, false).Devices
		if len(devs) != 2 || devs[1].State != api.DeviceLive {
			t.Errorf("%+v", devs)
		}
	})
	t.Run("device added and not attached", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.login(d)
		d.Kill()
		if err := l.Blocks.Stop(timeout(t), 1); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Plane.Handle(ctx, ipc.MethodDetach, json.RawMessage(`{"ublk_id":1}`)); err != nil {
			t.Fatal(err)
		}
		d = l.start()
		if devs := d.Devices(ctx, false).Devices; len(devs) != 2 {
			t.Errorf("%+v", devs)
		}
		if b := l.Blocks.Left(); len(b) != 2 {
			t.Errorf("block devices %v", b)
		}
	})
	t.Run("device added, its record lost", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.login(d)
		d.Kill()
		if err := l.Blocks.Stop(timeout(t), 1); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Plane.Handle(ctx, ipc.MethodDetach, json.RawMessage(`{"ublk_id":1}`)); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(l.RunDir(), "devices", "1.json")); err != nil {
			t.Fatal(err)
		}
		l.Blocks.Foreign(7)
		d = l.start()
		if devs := d.Devices(ctx, false).Devices; len(devs) != 2 {
			t.Errorf("%+v", devs)
		}
		if b := l.Blocks.Left(); !slices.Equal(b, []int{0, 1, 7}) {
			t.Errorf("block devices %v", b)
		}
	})
	t.Run("number taken by another program", func(t *testing.T) {
		l := newLab(t)
		d := l.start()
		l.login(d)
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
			t.Fatal(err)
		}
		l.login(d)
		rec, err := os.ReadFile(filepath.Join(l.RunDir(), "devices", "1.json"))
		if err != nil {
			t.Fatal(err)
		}
		d.Kill()
		l.Blocks.Foreign(7)
		text := strings.Replace(string(rec), `"ublk_id": 1`, `"ublk_id": 7`, 1)
		if err := os.WriteFile(filepath.Join(l.RunDir(), "devices", "7.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l.start()
		if b := l.Blocks.Left(); !slices.Equal(b, []int{0, 1, 7}) {
			t.Errorf("block devices %v", b)
		}
		if _, err := os.Stat(filepath.Join(l.RunDir(), "devices", "7.json")); err == nil {
			t.Error("the stale record is still there")
		}
	})
}

func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestDataPlaneDies: the devices stay, with their numbers, and the next data plane gets them; so it does if the daemon ends with it.
func TestDataPlaneDies(t *testing.T) {
	for _, both := range []bool{false, true} {
		t.Run(map[bool]string{false: "alone", true: "with the daemon"}[both], func(t *testing.T) {
			l := newLab(t)
			d := l.start()
			before := l.login(d)
			added := len(l.Blocks.Calls())
			for round := range 3 {
				if both {
					d.Kill()
				}
				l.Plane.Kill()
				l.Blocks.ServerDied()
				if both {
					d = l.start()
				}
				eventually(t, d, "new data plane", func() bool {
					r := d.Devices(context.Background(), false).Devices
					return l.Plane.Starts() == round+2 && len(r) == 2 && r[0].State == api.DeviceLive && r[1].State == api.DeviceLive
				})
				if groups, devs := l.Plane.Left(); len(groups) != 1 || !slices.Equal(devs, []int{0, 1}) {
					t.Errorf("data plane has %v, %v", groups, devs)
				}
			}
			s := d.Sessions().Sessions
			if len(s) != 1 || s[0].State != api.SessionRecovering || s[0].ID != before.Session.ID || s[0].Units[0].Device != "/dev/ublkb0" || s[0].Units[1].Device != "/dev/ublkb1" {
				t.Errorf("sessions %+v", s)
			}
			for _, c := range l.Blocks.Calls()[added:] {
				if !strings.HasPrefix(c, "recover") && !strings.HasPrefix(c, "unreg") && !strings.HasPrefix(c, "reg") {
					t.Errorf("command %s", c)
				}
			}
			if _, err := d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrAlreadyLoggedIn) {
				t.Errorf("second login: %v", err)
			}
			l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
			eventually(t, d, "session is up, and the memory to lend is registered once", func() bool {
				return d.Sessions().Sessions[0].State == api.SessionUp && l.Blocks.Registered(0) == 2 && l.Blocks.Registered(1) == 2
			})
			if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
				t.Error(err)
			}
			l.clean()
		})
	}
}

// TestConnectionLost: the data plane lives, only the connection broke; nothing changes.
func TestConnectionLost(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	before := d.Devices(context.Background(), false)
	c, err := ipc.Dial(context.Background(), filepath.Join(l.RunDir(), "io.sock")) // takes over
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	<-c.Done() // the daemon takes it back
	eventually(t, d, "reconnection", func() bool { return d.Status(context.Background()).DataPlane.State == api.DataPlaneUp })
	if diff := cmp.Diff(before, d.Devices(context.Background(), false)); diff != "" {
		t.Error(diff)
	}
	if l.Plane.Starts() != 1 {
		t.Errorf("data plane started %d times", l.Plane.Starts())
	}
}

func TestSessionFails(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	ctx := context.Background()
	state := func(want string) func() bool {
		return func() bool { return d.Sessions().Sessions[0].State == want }
	}
	l.Plane.SetGroup(iqn, ipc.GroupRecovering, &ipc.Error{Code: "ConnectionFailed", Text: "reset"})
	eventually(t, d, "recovering", state(api.SessionRecovering))
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrAlreadyLoggedIn) {
		t.Errorf("login while recovering: %v", err)
	}
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	eventually(t, d, "up again", state(api.SessionUp))
	l.Plane.SetGroup(iqn, ipc.GroupFailed, &ipc.Error{Code: "ConnectionFailed", Text: "gone for good"})
	eventually(t, d, "failed", state(api.SessionFailed))
	if s := d.Status(ctx); s.State != "degraded" || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "gone for good") {
		t.Errorf("status %+v", s)
	}
	l.Blocks.Hold(0, "mount /data")
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrBusy) {
		t.Errorf("login over a failed session in use: %v", err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); !api.Is(err, api.ErrBusy) || !strings.Contains(err.Error(), "--force") {
		t.Errorf("logout: %v", err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn, Force: true}); err != nil {
		t.Errorf("logout by force: %v", err)
	}
	l.clean()
	// A failed session that nobody uses gives way to a new login.
	l.login(d)
	l.Plane.SetGroup(iqn, ipc.GroupFailed, nil)
	eventually(t, d, "failed", state(api.SessionFailed))
	l.login(d)
}

func TestDeviceTakenAway(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	if err := l.Blocks.Stop(timeout(t), 0); err != nil {
		t.Fatal(err)
	}
	l.Plane.LoseDevice(0)
	eventually(t, d, "clean-up", func() bool {
		return slices.Equal(l.Blocks.Left(), []int{1}) && len(d.Devices(context.Background(), false).Devices) == 1
	})
	eventually(t, d, "a reason", func() bool { return d.Sessions().Sessions[0].Units[0].Reason != "" })
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// TestCallerLeaves: the caller goes away at each stage of a login; nothing stays.
func TestCallerLeaves(t *testing.T) {
	l := newLab(t)
	enter := make(chan struct{})
	l.Plane.AddTarget(iqn, &daemontest.Target{Hang: true, Enter: enter})
	d := l.start()
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() {
		_, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal})
		result <- err
	}()
	<-enter
	// A second caller waits for the lock and gives up.
	short, cancel2 := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel2()
	if _, err := d.Login(short, api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrTimeout) {
		t.Errorf("waiting caller: %v", err)
	}
	cancel()
	if err := <-result; !api.Is(err, api.ErrCancelled) {
		t.Errorf("caller that left: %v", err)
	}
	l.clean()

	for _, at := range []string{"add", "set", "start"} {
		l.Plane.AddTarget(iqn, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20), daemontest.Disk(1, 1<<20)}})
		ctx, cancel := context.WithCancel(context.Background())
		leaving := &leaver{Blocks: l.Blocks, at: at, cancel: cancel}
		l.OpenBlocks = func() (daemon.Blocks, error) { return leaving, nil }
		d.Kill()
		d = l.start()
		if _, err := d.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); err == nil {
			t.Errorf("%s: login went on", at)
		}
		l.clean()
		cancel()
	}
}

// leaver cancels the caller's context when a command for device 1 begins.
type leaver struct {
	*daemontest.Blocks
	at     string
	cancel context.CancelFunc
}

func (b *leaver) Add(ctx context.Context, s ublk.DeviceSpec) (ublk.DeviceInfo, error) {
	if b.at == "add" && len(b.Left()) == 1 {
		b.cancel()
	}
	return b.Blocks.Add(ctx, s)
}

func (b *leaver) SetParams(ctx context.Context, id int, p ublk.Params) error {
	if b.at == "set" && id == 1 {
		b.cancel()
	}
	return b.Blocks.SetParams(ctx, id, p)
}

func (b *leaver) Start(ctx context.Context, id, pid int) error {
	err := b.Blocks.Start(ctx, id, pid)
	if b.at == "start" && id == 1 {
		b.cancel()
	}
	return err
}

func TestStop(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	if left := d.Stop(); !left {
		t.Error("a serving data plane was ended")
	}
	if g, devs := l.Plane.Left(); len(g) != 1 || len(devs) != 2 {
		t.Errorf("after stop: %v, %v", g, devs)
	}
	d = l.start()
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	if left := d.Stop(); left {
		t.Error("an idle data plane was left")
	}
	if _, err := ipc.Dial(context.Background(), filepath.Join(l.RunDir(), "io.sock")); err == nil {
		t.Error("the data plane still answers")
	}
}

func found(n int) daemon.Found {
	return daemon.Found{Target: fmt.Sprintf("iqn.2003-01.org.example:t%d", n), Address: "10.0.0.1", Port: 3260, TPGT: 1}
}

func TestDiscover(t *testing.T) {
	l := newLab(t)
	refused := api.Errorf(api.ErrConnectionFailed, "connect to 10.0.0.1:3260: connection refused")
	noRDMA := api.Errorf(api.ErrTransportUnavailable, "no RDMA device")
	p := &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {found(2), found(1)}, "iser": {found(1)}}}
	l.Portals[portal] = p
	l.Portals["[fd00::1]:3260"] = &daemontest.Portal{Errs: map[string]error{"tcp": refused, "iser": noRDMA}}
	l.Portals["10.0.0.3:3260"] = &daemontest.Portal{
		Lists: map[string][]daemon.Found{"tcp": {{Target: "iqn.2003-01.org.example:../x", Address: "10.0.0.1", Port: 1}, {Target: iqn, Address: "a b", Port: 1}, found(4)}},
		Errs:  map[string]error{"iser": noRDMA},
	}
	d := l.start()
	ctx := context.Background()
	r, err := d.Discover(ctx, api.DiscoverRequest{Portal: "10.0.0.1", Save: true})
	if err != nil {
		t.Fatal(err)
	}
	want := []api.Target{
		{Target: iqn, Address: "10.0.0.1", Port: 3260, TPGT: 1, Transports: []string{"iser", "tcp"}, Saved: true},
		{Target: "iqn.2003-01.org.example:t2", Address: "10.0.0.1", Port: 3260, TPGT: 1, Transports: []string{"tcp"}, Saved: true},
	}
	if diff := cmp.Diff(want, r.Targets); diff != "" || len(r.Notes) != 0 {
		t.Error(diff, r.Notes)
	}
	nodes, err := d.Nodes(api.NodeFilter{})
	if err != nil || len(nodes.Nodes) != 2 || !slices.Equal(nodes.Nodes[0].SeenOver, []string{"iser", "tcp"}) {
		t.Errorf("nodes %+v, %v", nodes, err)
	}
	// Login by name works now, and the record knows of it.
	if r, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil || r.Session.Node != nodes.Nodes[0].ID {
		t.Errorf("login by name: %+v, %v", r, err)
	}
	if n, _ := d.Nodes(api.NodeFilter{Target: iqn}); n.Nodes[0].SessionState != api.SessionUp {
		t.Errorf("node %+v", n.Nodes[0])
	}
	if _, err := d.DeleteNodes(api.NodeFilter{Target: iqn}); !api.Is(err, api.ErrBusy) {
		t.Errorf("delete of a node in use: %v", err)
	}
	p.Lists["tcp"] = p.Lists["tcp"][1:] // t2 is gone
	if _, err := d.Discover(ctx, api.DiscoverRequest{Portal: "10.0.0.1", Save: true}); err != nil {
		t.Fatal(err)
	}
	if n, _ := d.Nodes(api.NodeFilter{}); len(n.Nodes) != 2 || !n.Nodes[1].Missing || n.Nodes[0].Missing {
		t.Errorf("after rediscovery: %+v", n.Nodes)
	}
	if r, err := d.DeleteNodes(api.NodeFilter{Target: "iqn.2003-01.org.example:t2"}); err != nil || len(r.Nodes) != 1 {
		t.Errorf("delete: %+v, %v", r, err)
	}
	if _, err := d.DeleteNodes(api.NodeFilter{Target: "iqn.2003-01.org.example:t2"}); !api.Is(err, api.ErrNotFound) {
		t.Errorf("delete: %v", err)
	}

	r, err = d.Discover(ctx, api.DiscoverRequest{Portal: "10.0.0.3"})
	if err != nil || len(r.Targets) != 1 || len(r.Notes) != 3 {
		t.Errorf("hostile list: %+v, %v", r, err)
	}
	_, err = d.Discover(ctx, api.DiscoverRequest{Portal: "fd00::1"})
	if !api.Is(err, api.ErrConnectionFailed) || !strings.Contains(err.Error(), "refused") || !strings.Contains(err.Error(), "RDMA") {
		t.Errorf("refused: %v", err)
	}
	if _, err = d.Discover(ctx, api.DiscoverRequest{Portal: "fd00::1", Transport: "iser"}); !api.Is(err, api.ErrTransportUnavailable) {
		t.Errorf("no RDMA: %v", err)
	}
	if _, err = d.Discover(ctx, api.DiscoverRequest{Portal: "10.9.9.9", Timeout: 0.05}); !api.Is(err, api.ErrTimeout) {
		t.Errorf("silent portal: %v", err)
	}
	if _, err = d.Discover(ctx, api.DiscoverRequest{Portal: "10.9.9"}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("malformed: %v", err)
	}
}

// TestPortalsInTurn: of several stored portals the first may be dead.
func TestPortalsInTurn(t *testing.T) {
	l := newLab(t)
	a, b := found(1), found(1)
	b.Address = "10.0.0.2"
	l.Portals[portal] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {a, b}, "iser": {b}}}
	d := l.start()
	ctx := context.Background()
	if _, err := d.Discover(ctx, api.DiscoverRequest{Portal: "10.0.0.1", Save: true}); err != nil {
		t.Fatal(err)
	}
	if r, err := d.Login(ctx, api.LoginRequest{Target: iqn}); err != nil || r.Session.Address != "10.0.0.2" {
		t.Errorf("the portal seen over RDMA comes first: %+v, %v", r.Session, err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	l.Plane.AddTarget(iqn, &daemontest.Target{Err: &ipc.Error{Code: "ConnectionFailed", Text: "refused"}})
	before := l.Plane.Logins()
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); !api.Is(err, api.ErrConnectionFailed) || l.Plane.Logins() != before+2 {
		t.Errorf("all dead: %v, %d logins", err, l.Plane.Logins()-before)
	}
	l.Plane.AddTarget(iqn, &daemontest.Target{Err: &ipc.Error{Code: "FatalLogin", Text: "no"}})
	before = l.Plane.Logins()
	if _, err := d.Login(ctx, api.LoginRequest{Target: iqn}); !api.Is(err, api.ErrFatalLogin) || l.Plane.Logins() != before+1 {
		t.Errorf("refused: %v, %d logins", err, l.Plane.Logins()-before)
	}
	l.clean()
}

func TestSocket(t *testing.T) {
	l := newLab(t)
	l.start()
	c := client.New(l.Socket())
	defer c.Close()
	ctx := context.Background()
	if fi, err := os.Stat(l.Socket()); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v", fi.Mode(), err)
	}
	if r, err := c.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); err != nil || len(r.Devices) != 2 {
		t.Errorf("login %+v, %v", r, err)
	}
	if _, err := c.Login(ctx, api.LoginRequest{Target: iqn, Portal: portal}); !api.Is(err, api.ErrAlreadyLoggedIn) || api.ExitCode(err) != 15 {
		t.Errorf("second login: %v", err)
	}
	if r, err := c.Devices(ctx); err != nil || len(r.Devices) != 2 || r.Version != api.Version {
		t.Errorf("devices %+v, %v", r, err)
	}
	if _, err := c.Login(ctx, api.LoginRequest{Target: strings.Repeat("x", 100<<10)}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("large body: %v", err)
	}
	if r, err := c.Status(ctx); err != nil || r.Status.Sessions != 1 {
		t.Errorf("status %+v, %v", r, err)
	}
	if r, err := c.AddNode(ctx, iqn, "[fd00::1]"); err != nil || len(r.Nodes) != 1 || r.Nodes[0].Address != "fd00::1" {
		t.Errorf("add: %+v, %v", r, err)
	}
	if r, err := c.Nodes(ctx, api.NodeFilter{Portal: "fd00::1"}); err != nil || len(r.Nodes) != 1 {
		t.Errorf("nodes: %+v, %v", r, err)
	}
	if _, err := c.Nodes(ctx, api.NodeFilter{Target: "x"}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("nodes: %v", err)
	}
	if r, err := c.Logout(ctx, api.LogoutRequest{Session: "1"}); err != nil || len(r.Devices) != 2 {
		t.Errorf("logout: %+v, %v", r, err)
	}
	if r, err := c.Sessions(ctx); err != nil || r.Sessions == nil || len(r.Sessions) != 0 {
		t.Errorf("sessions: %+v, %v", r, err)
	}
	none := client.New(filepath.Join(t.TempDir(), "none"))
	defer none.Close()
	if _, err := none.Status(ctx); !api.Is(err, api.ErrDaemonUnreachable) || api.ExitCode(err) != 20 {
		t.Errorf("no daemon: %v", err)
	}
}

// TestForeignUser: only the credentials stand between another user and the socket.
func TestForeignUser(t *testing.T) {
	if os.Geteuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	l := newLab(t)
	l.start()
	bin, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(l.Dir, "x")
	if err := os.WriteFile(exe, bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for d := l.RunDir(); len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// 0600 as it is: the kernel refuses. Wide open: the daemon refuses.
	for _, mode := range []os.FileMode{0o600, 0o777} {
		if err := os.Chmod(l.Socket(), mode); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), "DAEMON_TEST_SOCKET="+l.Socket())
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != api.ErrAccessDenied {
			t.Errorf("mode %v: %s, %v", mode, out, err)
		}
	}
}
