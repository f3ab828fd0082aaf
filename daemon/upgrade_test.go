package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// newUpgradeLab has sessions that come back at once.
func newUpgradeLab(t *testing.T) *lab {
	l := newLab(t)
	l.Plane.Prompt, l.Config.SharedArena = true, 0
	t.Cleanup(func() {
		if n := l.Plane.Waiting(); n != 0 {
			t.Errorf("%d successors were neither dropped nor told to serve", n)
		}
		if _, err := os.Stat(filepath.Join(l.RunDir(), "upgrade.json")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the note of an upgrade stays behind: %v", err)
		}
	})
	return l
}

func upgrade(d *daemontest.Daemon) (api.UpgradeReply, error) {
	return d.Upgrade(context.Background(), api.UpgradeRequest{})
}

// wantError checks the name and the words of a failure.
func wantError(t *testing.T, err error, name string, words ...string) {
	t.Helper()
	if !api.Is(err, name) || slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(err.Error(), w) }) {
		t.Errorf("error %v, want %s with %q", err, name, words)
	}
}

// handed checks that all devices are live, and how they came.
func handed(t *testing.T, r api.UpgradeReply, how ...string) {
	t.Helper()
	var got []string
	for _, x := range r.Devices {
		got = append(got, x.How)
		if x.State != api.DeviceLive || x.PauseMS < 0 || x.PauseMS > r.PauseMS || (x.How == api.HandOverReissued) != (x.Reason != "") {
			t.Errorf("device %+v, the longest pause is %d ms", x, r.PauseMS)
		}
	}
	if !slices.Equal(got, how) || len(r.Problems) != 0 {
		t.Errorf("devices %+v, problems %q; want %q", r.Devices, r.Problems, how)
	}
}

// calls returns the driver's commands of some names.
func (l *lab) calls(names ...string) (list []string) {
	for _, c := range l.Blocks.Calls() {
		if name, _, _ := strings.Cut(c, " "); slices.Contains(names, name) {
			list = append(list, c)
		}
	}
	return list
}

// Devices in use, with shared memory, go to the next data plane and to the one after it: quiesced, then taken over, and neither stopped nor made again.
func TestUpgrade(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	path := shm(t, 1<<20)
	if _, err := d.AddPath(context.Background(), api.BufferAddRequest{Path: path}); err != nil {
		t.Fatal(err)
	}
	l.wantRegistered(d, 1, 1)
	for _, id := range l.Blocks.Left() {
		l.Blocks.Hold(id, "mount /data")
	}
	for round, build := range []string{"second", "third"} {
		old := "test"
		if round == 1 {
			old = "second"
		}
		before := len(l.Blocks.Calls())
		l.Plane.Install(build)
		r, err := upgrade(d)
		if err != nil {
			t.Fatal(err)
		}
		if r.Old.Build != old || r.New.Build != build || r.New.PID == 0 || l.Plane.Starts() != round+2 {
			t.Errorf("%+v after %d starts", r, l.Plane.Starts())
		}
		handed(t, r, api.HandOverQuiesced, api.HandOverQuiesced)
		var names []string
		for _, c := range l.Blocks.Calls()[before:] {
			names = append(names, c[:strings.IndexByte(c, ' ')])
		}
		slices.SortStableFunc(names[2:], strings.Compare)
		if want := []string{"quiesce", "quiesce", "recover", "recover", "recovered", "recovered"}; !slices.Equal(names, want) {
			t.Errorf("commands %v", l.Blocks.Calls()[before:])
		}
		l.wantRegistered(d, 1, 1)
		if st := d.Status(context.Background()).DataPlane; st.Version != build || st.State != api.DataPlaneUp {
			t.Errorf("status %+v", st)
		}
	}
	if cut := l.Blocks.Cut(); len(cut) != 0 {
		t.Errorf("devices %v had requests when the data plane ended", cut)
	}
	for _, r := range l.Plane.Restored() {
		if !r.Clean {
			t.Errorf("restored as if something were under way: %+v", r)
		}
	}
	l.Blocks.Hold(0)
	l.Blocks.Hold(1)
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.Plane.Reactors-- // without devices there may be fewer
	if r, err := upgrade(d); err != nil || len(r.Devices) != 0 || r.PauseMS != 0 {
		t.Errorf("with nobody logged in: %+v, %v", r, err)
	}
}

// A data plane that does not get ready leaves everything as it is.
func TestUpgradeNotReady(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	before := len(l.Blocks.Calls())
	l.Plane.Unready(errors.New("no such file"))
	_, err := upgrade(d)
	wantError(t, err, api.ErrAgain, "no such file; process ", "nothing was changed")
	l.Plane.Unready(nil)
	l.Plane.Reactors-- // fewer than the devices have queues
	_, err = upgrade(d)
	wantError(t, err, api.ErrAgain, "it has 1 threads, the devices have 2 queues")
	l.Plane.Reactors++
	if c := l.Blocks.Calls()[before:]; len(c) != 0 || l.Plane.Starts() != 1 {
		t.Errorf("commands %v, %d starts", c, l.Plane.Starts())
	}
	if _, err := upgrade(d); err != nil {
		t.Error(err)
	}
}

// A data plane that ends when it is to serve leaves the devices waiting, with what to do; the next upgrade brings them back.
func TestUpgradeDoesNotServe(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	l.Plane.Broken(errors.New("cannot load shared library"))
	_, err := upgrade(d)
	wantError(t, err, api.ErrAgain, "cannot load shared library; 2 devices wait, without errors: install one that works, then run iserctl daemon upgrade")
	for _, x := range d.Devices(context.Background(), false).Devices {
		if x.State != api.DeviceWaiting {
			t.Errorf("device %+v", x)
		}
	}
	_, err = upgrade(d)
	wantError(t, err, api.ErrAgain, "2 devices wait")
	l.Plane.Broken(nil)
	l.Plane.Install("mended")
	r, err := upgrade(d)
	if err != nil || r.Old.PID != 0 || r.New.Build != "mended" {
		t.Errorf("%+v, %v", r, err)
	}
	handed(t, r, api.HandOverReissued, api.HandOverReissued)
	l.live(d, 2, 2)
}

// Requests that are not answered, a session that is not up, a kernel that does not quiesce: the device goes over as after a death, and it is said why.
func TestUpgradeReissues(t *testing.T) {
	for _, c := range []struct {
		name, why string
		how       []string
		set       func(l *lab, d *daemontest.Daemon)
	}{
		{"hanging", "requests were not answered within 3s", []string{api.HandOverReissued, api.HandOverQuiesced}, func(l *lab, _ *daemontest.Daemon) {
			l.Blocks.Hang(0)
		}},
		{"refused", "QUIESCE_DEV: broken", []string{api.HandOverReissued, api.HandOverQuiesced}, func(l *lab, _ *daemontest.Daemon) {
			l.Blocks.Fail("quiesce 0", errors.New("QUIESCE_DEV: broken"))
		}},
		{"lost", "its session was not up", []string{api.HandOverReissued, api.HandOverReissued}, func(l *lab, d *daemontest.Daemon) {
			l.Plane.SetGroup(iqn, ipc.GroupRecovering, &ipc.Error{Code: "ConnectionFailed", Text: "gone"})
			eventually(l.t, d, "recovering", func() bool { return d.Sessions().Sessions[0].State == api.SessionRecovering })
		}},
		{"old kernel", "6.16", []string{api.HandOverReissued, api.HandOverReissued}, func(l *lab, _ *daemontest.Daemon) { l.Blocks.NoQuiesce() }},
		{"silent", "did not say", []string{api.HandOverReissued, api.HandOverReissued}, func(l *lab, _ *daemontest.Daemon) { l.Plane.Mute() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newUpgradeLab(t)
			d := l.start()
			l.login(d)
			c.set(l, d)
			r, err := upgrade(d)
			if err != nil {
				t.Fatal(err)
			}
			handed(t, r, c.how...)
			if len(r.Devices) > 0 && !strings.Contains(r.Devices[0].Reason, c.why) {
				t.Errorf("reason %q", r.Devices[0].Reason)
			}
			l.live(d, 2, 2)
			for _, r := range l.Plane.Restored() {
				if r.Clean {
					t.Errorf("restored as if nothing had been under way: %+v", r)
				}
			}
		})
	}
}

// Of two at once the second is refused; the first goes on without its caller.
func TestUpgradeTwice(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	unlock := d.HoldTarget(t, iqn)
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan error, 1)
	go func() {
		_, err := d.Upgrade(ctx, api.UpgradeRequest{})
		first <- err
	}()
	eventually(t, d, "the first is at work", func() bool { return l.Plane.Waiting() == 1 })
	_, err := upgrade(d)
	wantError(t, err, api.ErrBusy, "an upgrade of the data plane is at work")
	cancel()
	if err := <-first; !api.Is(err, api.ErrCancelled) {
		t.Errorf("first: %v", err)
	}
	unlock()
	l.live(d, 2, 2)
	eventually(t, d, "the first has ended", func() bool {
		_, err := upgrade(d)
		return !api.Is(err, api.ErrBusy)
	})
}

// Work that does not end keeps the data plane as it is: a login, a registration of memory.
func TestUpgradeHeldUp(t *testing.T) {
	l := newUpgradeLab(t)
	l.Config.ControlTimeout = 200 * time.Millisecond
	d := l.start()
	l.login(d)
	unlock := d.HoldTarget(t, iqn)
	_, err := upgrade(d)
	wantError(t, err, api.ErrTimeout, "a test of "+iqn+" is at work", "nothing was changed")
	unlock()

	l.Blocks.Stall(0, true)
	if _, err := d.AddPath(context.Background(), api.BufferAddRequest{Path: shm(t, 1<<20)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, d, "the registration is at work", func() bool { return len(l.calls("reg")) > 0 })
	_, err = upgrade(d)
	l.Blocks.Stall(0, false)
	wantError(t, err, api.ErrAgain, "memory is being registered with /dev/ublkb0")
}

// gate is a driver in which the first Quiesce waits.
type gate struct {
	*daemontest.Blocks
	reached, open chan struct{}
}

func newGate(l *lab) *gate {
	g := &gate{l.Blocks, make(chan struct{}, 9), make(chan struct{})}
	l.OpenBlocks = func() (daemon.Blocks, error) { return g, nil }
	return g
}

func (g *gate) Quiesce(ctx context.Context, id int, timeout time.Duration) error {
	g.reached <- struct{}{}
	<-g.open
	return g.Blocks.Quiesce(ctx, id, timeout)
}

// A login that comes in the middle waits, and finds the next data plane.
func TestUpgradeKeepsLoginsOut(t *testing.T) {
	l := newUpgradeLab(t)
	const other = "iqn.2003-01.org.example:other"
	l.Plane.AddTarget(other, &daemontest.Target{TPGT: 1, Units: []ipc.Unit{daemontest.Disk(5, 1<<20)}})
	g := newGate(l)
	d := l.start()
	l.login(d)
	upgraded, loggedIn := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := upgrade(d)
		upgraded <- err
	}()
	<-g.reached
	go func() {
		_, err := d.Login(context.Background(), api.LoginRequest{Target: other, Portal: portal})
		loggedIn <- err
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := d.Logout(ctx, api.LogoutRequest{Session: iqn})
	wantError(t, err, api.ErrTimeout, "an upgrade of the data plane is at work")
	if n := l.Plane.Logins(); n != 1 {
		t.Errorf("%d logins in the middle of an upgrade", n)
	}
	close(g.open)
	if err := errors.Join(<-upgraded, <-loggedIn); err != nil {
		t.Fatal(err)
	}
	l.live(d, 2, 3)
}

// A daemon that is told to end in the middle ends the old data plane still; the next daemon takes the devices over.
func TestUpgradeDaemonEnds(t *testing.T) {
	l := newUpgradeLab(t)
	g := newGate(l)
	d := l.start()
	l.login(d)
	upgraded, ended := make(chan error, 1), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background()) // of a request that the end of the daemon cuts off
	defer cancel()
	go func() {
		_, err := d.Upgrade(ctx, api.UpgradeRequest{})
		upgraded <- err
	}()
	<-g.reached
	go func() {
		cancel()
		d.Stop()
		close(ended)
	}()
	eventually(t, d, "the daemon is about to end", func() bool {
		_, err := upgrade(d)
		return err != nil && d.Ending()
	})
	close(g.open)
	wantError(t, <-upgraded, api.ErrAgain, "the next one takes the devices over")
	<-ended
	if cut := l.Blocks.Cut(); l.Plane.Serving() || len(cut) != 0 {
		t.Errorf("the old data plane is still there: %v; devices %v had requests when it ended", l.Plane.Serving(), cut)
	}
	d = l.start()
	l.live(d, 2, 2)
}

// A daemon that dies in the middle leaves a data plane whose devices are quiesced, and look as if they had been stopped. The next daemon ends it and takes the
// devices over.
func TestUpgradeDaemonDies(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	if err := d.NoteUpgrade(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	d.Kill()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, id := range l.Blocks.Left() {
		if err := l.Blocks.Quiesce(ctx, id, time.Second); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 { // the data plane has answered all: its devices look as if they were gone
		if _, err := l.Plane.Handle(ctx, ipc.MethodState, []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	d = l.start()
	l.live(d, 2, 2)

	// A note of another process means nothing.
	d.Kill()
	note := fmt.Sprintf(`{"pid":%d,"start":1}`, os.Getpid())
	if err := os.WriteFile(filepath.Join(l.RunDir(), "upgrade.json"), []byte(note), 0o600); err != nil {
		t.Fatal(err)
	}
	d = l.start()
	l.live(d, 2, 2)
}

// A data plane that somebody else starts is ended, and the next one awaited.
func TestUpgradeExternal(t *testing.T) {
	l := newUpgradeLab(t)
	l.External = true
	start := func() {
		if err := os.MkdirAll(l.RunDir(), 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Plane.Launch(l.RunDir())(); err != nil {
			t.Fatal(err)
		}
	}
	start()
	d := l.start()
	l.login(d)
	changes, done := d.Watch()
	defer done()
	upgraded := make(chan error, 1)
	var r api.UpgradeReply
	go func() {
		var err error
		r, err = upgrade(d)
		upgraded <- err
	}()
	for l.Plane.Serving() {
		<-changes
	}
	l.Plane.Install("second")
	start()
	if err := <-upgraded; err != nil {
		t.Fatal(err)
	}
	handed(t, r, api.HandOverQuiesced, api.HandOverQuiesced)
	if r.New.Build != "second" {
		t.Errorf("%+v", r)
	}
}

// A data plane that cannot be ended is asked for again.
func TestUpgradeCannotEnd(t *testing.T) {
	l := newUpgradeLab(t)
	l.KillFails = ublk.ErrBusy
	d := l.start()
	l.login(d)
	_, err := upgrade(d)
	wantError(t, err, api.ErrInternal, "cannot be ended")
	l.KillFails = nil
	r, err := upgrade(d)
	if err != nil {
		t.Fatal(err)
	}
	handed(t, r, api.HandOverQuiesced, api.HandOverQuiesced)
	l.live(d, 2, 2)
}

// A data plane that dies by itself in the middle is replaced as after any death.
func TestUpgradeDiesMeanwhile(t *testing.T) {
	l := newUpgradeLab(t)
	d := l.start()
	l.login(d)
	l.KillFails = unix.ESRCH
	l.Dies = true
	r, err := upgrade(d)
	if err != nil {
		t.Fatal(err)
	}
	handed(t, r, api.HandOverQuiesced, api.HandOverQuiesced)
	l.live(d, 2, 2)
}
