package daemon_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

func abort(d *daemontest.Daemon, device string, force bool) (api.AbortReply, error) {
	return d.Abort(context.Background(), api.AbortRequest{Device: device, Force: force})
}

// aborted checks that unit 0 has no device, and why, and that unit 1 has one.
func aborted(t *testing.T, d *daemontest.Daemon) {
	t.Helper()
	r := d.Devices(context.Background(), false)
	if len(r.Devices) != 1 || r.Devices[0].LUN != 1 || len(r.Unserved) != 1 || r.Unserved[0].LUN != 0 || !strings.Contains(r.Unserved[0].Reason, "aborted by the administrator") {
		t.Errorf("devices %+v", r)
	}
}

// A device that works goes by force only while somebody uses it, the other one stays, and nothing brings it back but a rescan.
func TestAbort(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hold(0, "mount /data")
	l.Blocks.Hang(0)
	before := len(l.Blocks.Calls())
	if _, err := abort(d, "/dev/ublkb0", false); !api.Is(err, api.ErrBusy) || !strings.Contains(err.Error(), "/dev/ublkb0 is in use: mount /data; --force") {
		t.Errorf("abort: %v", err)
	}
	if c := l.Blocks.Calls(); len(c) != before {
		t.Errorf("commands were issued: %v", c[before:])
	}
	if r, err := abort(d, "ublkb0", true); err != nil || r.Device != "/dev/ublkb0" || r.Target != iqn || r.LUN != 0 || r.SessionID == 0 {
		t.Errorf("abort by force: %+v, %v", r, err)
	}
	aborted(t, d)
	for _, device := range []string{"/dev/ublkb0", "/dev/sda", "0", "/dev/ublkb"} {
		want := api.ErrInvalidArgs
		if device == "/dev/ublkb0" {
			want = api.ErrNotFound
		}
		if _, err := abort(d, device, true); !api.Is(err, want) {
			t.Errorf("abort %s: %v", device, err)
		}
	}

	// A change of the units, a data plane that comes back, another one, another daemon: the unit stays without a device.
	l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 64<<20), daemontest.Disk(1, 2<<30))
	eventually(t, d, "unit 1 has grown", func() bool { return byLUN(d)[1].Size == 2<<30 })
	aborted(t, d)
	d.Kill()
	d = l.start()
	aborted(t, d)
	l.Plane.Kill()
	l.Blocks.ServerDied()
	l.live(d, 2, 1)
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	eventually(t, d, "up", func() bool { return d.Sessions().Sessions[0].State == api.SessionUp })
	aborted(t, d)
	if r := rescan(t, d); !slices.Equal(r.Added, []string{"/dev/ublkb0"}) || len(r.Problems) != 0 {
		t.Errorf("rescan: %+v", r)
	}
	d.Kill()
	d = l.start()
	l.live(d, 2, 2)
}

// A session that is lost is no obstacle, users neither; a new login serves every unit.
func TestAbortLost(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hold(0, "mount /data")
	l.Blocks.Hang(0)
	l.Plane.SetGroup(iqn, ipc.GroupRecovering, &ipc.Error{Code: "ConnectionFailed", Text: "gone"})
	eventually(t, d, "recovering", func() bool { return d.Sessions().Sessions[0].State == api.SessionRecovering })
	if _, err := abort(d, "/dev/ublkb0", false); err != nil {
		t.Error(err)
	}
	aborted(t, d)
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	eventually(t, d, "up", func() bool { return d.Sessions().Sessions[0].State == api.SessionUp })
	aborted(t, d)
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	if r := l.login(d); len(r.Devices) != 2 {
		t.Errorf("login: %+v", r)
	}
}

// A device that no data plane takes over goes at once, while it is tried again and again.
func TestAbortWaiting(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Plane.Kill()
	l.Blocks.Hold(0, "mount /data")
	l.Blocks.Fail("recover 0", errors.New("broken"))
	l.Blocks.ServerDied()
	eventually(t, d, "the device waits", func() bool {
		r := byLUN(d)
		return l.Plane.Starts() == 2 && r[0].State == api.DeviceWaiting && r[1].State == api.DeviceLive
	})
	if _, err := abort(d, "/dev/ublkb0", false); err != nil {
		t.Error(err)
	}
	aborted(t, d)
}

// A daemon that has found no data plane since it began knows its devices from their records.
func TestAbortWithoutDataPlane(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	d.Kill()
	l.Plane.Kill()
	l.Plane.Broken(errors.New("no such program"))
	l.Blocks.ServerDied()
	l.Blocks.Foreign(7)
	d = l.start()
	if r, err := abort(d, "/dev/ublkb0", false); err != nil || r.Target != iqn {
		t.Errorf("abort: %+v, %v", r, err)
	}
	if _, err := abort(d, "/dev/ublkb7", true); !api.Is(err, api.ErrNotFound) {
		t.Errorf("abort of another program's device: %v", err)
	}
	if left := l.Blocks.Left(); !slices.Equal(left, []int{1, 7}) {
		t.Errorf("devices %v", left)
	}
}

// A data plane that does not answer is killed, by force, and the other device is taken over.
func TestAbortKills(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hang(0)
	l.Plane.Mute()
	if _, err := abort(d, "/dev/ublkb0", false); !api.Is(err, api.ErrAgain) || !strings.Contains(err.Error(), "--force kills it") {
		t.Errorf("abort: %v", err)
	}
	if _, err := abort(d, "/dev/ublkb0", true); err != nil {
		t.Errorf("abort by force: %v", err)
	}
	eventually(t, d, "the other device is taken over", func() bool { return l.Plane.Starts() > 1 && byLUN(d)[1].State == api.DeviceLive })
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	eventually(t, d, "up", func() bool { return d.Sessions().Sessions[0].State == api.SessionUp })
	eventually(t, d, "the reason", func() bool { return len(d.Devices(context.Background(), false).Unserved) == 1 })
	aborted(t, d)
}

// A data plane that cannot abort leaves the device as it is: to stop it would hang.
func TestAbortFails(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hang(0)
	l.Plane.Fail("abort", 0, &ipc.Error{Code: "InvalidArgs", Text: "method unknown"})
	if _, err := abort(d, "/dev/ublkb0", true); !api.Is(err, api.ErrAgain) || !strings.Contains(err.Error(), "method unknown") {
		t.Errorf("abort: %v", err)
	}
	if r := byLUN(d); len(r) != 2 || r[0].State != api.DeviceLive {
		t.Errorf("devices %+v", r)
	}
}

// Nobody is waited for without end: what is at work is named.
func TestAbortLocked(t *testing.T) {
	l := newLab(t)
	l.Config.ControlTimeout = 1e9
	d := l.start()
	l.login(d)
	unlock := d.HoldTarget(t, iqn)
	if _, err := abort(d, "/dev/ublkb0", true); !api.Is(err, api.ErrTimeout) || !strings.Contains(err.Error(), "a test is at work") {
		t.Errorf("abort: %v", err)
	}
	unlock()
	if _, err := abort(d, "/dev/ublkb0", true); err != nil {
		t.Error(err)
	}
	aborted(t, d)
}
