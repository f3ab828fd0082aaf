package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// live waits for a new data plane with all devices.
func (l *lab) live(d *daemontest.Daemon, starts, devices int) {
	l.t.Helper()
	eventually(l.t, d, "the devices are live", func() bool {
		r := d.Devices(context.Background(), false).Devices
		return l.Plane.Starts() == starts && len(r) == devices && !slices.ContainsFunc(r, func(x api.Device) bool { return x.State != api.DeviceLive })
	})
}

// A step that fails leaves the device waiting, with the reason, and the next data plane finishes.
func TestTakeOverFails(t *testing.T) {
	for _, step := range []string{"recover", "recovered", "attach", "restore"} {
		t.Run(step, func(t *testing.T) {
			l := newLab(t)
			d := l.start()
			l.login(d)
			l.Plane.Kill()
			switch step {
			case "attach", "restore":
				l.Plane.Fail(step, 0, &ipc.Error{Code: "Internal", Text: "broken"})
			default:
				l.Blocks.Fail(step, errors.New("broken"))
			}
			l.Blocks.ServerDied()
			eventually(t, d, "a reason", func() bool {
				s := d.Sessions().Sessions
				return l.Plane.Starts() == 2 && len(s) == 1 && (strings.Contains(s[0].Units[0].Reason+s[0].Units[1].Reason, "broken") ||
					s[0].LastError != nil && strings.Contains(s[0].LastError.Text, "broken"))
			})
			waiting := slices.ContainsFunc(d.Devices(context.Background(), false).Devices, func(x api.Device) bool { return x.State == api.DeviceWaiting })
			if !waiting || len(l.Blocks.Left()) != 2 {
				t.Errorf("devices %+v", d.Devices(context.Background(), false))
			}
			l.Plane.Kill()
			l.Blocks.ServerDied()
			l.live(d, 3, 2)
			if s := d.Sessions().Sessions[0]; s.Units[0].Reason != "" || s.Units[1].Reason != "" {
				t.Errorf("%+v", s)
			}
			if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
				t.Error(err)
			}
			l.clean()
		})
	}
}

// A session whose devices wait for a data plane that does not come is ended by force only while somebody uses them.
func TestForceWaiting(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.login(d)
	l.Plane.Kill()
	l.Blocks.Fail("recover", errors.New("broken"))
	l.Blocks.ServerDied()
	eventually(t, d, "the devices wait", func() bool {
		return l.Plane.Starts() == 2 && slices.ContainsFunc(d.Devices(ctx, false).Devices, func(x api.Device) bool { return x.State == api.DeviceWaiting })
	})
	for id := range l.Blocks.Left() {
		l.Blocks.Hold(id, "mount /data")
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); !api.Is(err, api.ErrBusy) || !strings.Contains(err.Error(), "mount /data") || !strings.Contains(err.Error(), "--force") {
		t.Errorf("logout: %v", err)
	}
	if r, err := d.Logout(ctx, api.LogoutRequest{Session: iqn, Force: true}); err != nil || len(r.Devices) != 2 {
		t.Errorf("logout by force: %+v, %v", r, err)
	}
	l.clean()
}

// slow takes a while to let go of what a dead data plane had.
type slow struct {
	*daemontest.Blocks
	busy int
}

func (b *slow) StartRecovery(ctx context.Context, id int) error {
	if b.busy--; id == 0 && b.busy > 0 {
		return fmt.Errorf("START_USER_RECOVERY: %w", ublk.ErrBusy)
	}
	return b.Blocks.StartRecovery(ctx, id)
}

func TestTakeOverWaits(t *testing.T) {
	l := newLab(t)
	l.Plane.AddTarget(iqn, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	late := &slow{Blocks: l.Blocks, busy: 5}
	l.OpenBlocks = func() (daemon.Blocks, error) { return late, nil }
	d := l.start()
	l.login(d)
	l.Plane.Kill()
	l.Blocks.ServerDied()
	l.live(d, 2, 1)
	if late.busy > 0 {
		t.Errorf("%d refusals were not waited for", late.busy)
	}
}

// A daemon that ends in the middle of a take-over leaves devices that the data plane has and the kernel does not let run: the next one finishes.
func TestTakeOverTakenOver(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Plane.Kill()
	l.Blocks.Fail("recovered", errors.New("as if nobody had asked"))
	l.Blocks.ServerDied()
	eventually(t, d, "one device", func() bool {
		r := d.Devices(context.Background(), false).Devices
		return l.Plane.Starts() == 2 && len(r) == 2 && (r[0].State == api.DeviceLive) != (r[1].State == api.DeviceLive)
	})
	d.Kill()
	d = l.start()
	l.live(d, 2, 2)
	if n := len(slices.DeleteFunc(l.Blocks.Calls(), func(c string) bool { return !strings.HasPrefix(c, "recover ") })); n != 2 {
		t.Errorf("%d recoveries begun: %v", n, l.Blocks.Calls())
	}
}

// Whatever a caller is doing when the data plane ends, nothing is left that nobody knows of.
func TestDataPlaneDiesAtWork(t *testing.T) {
	for _, c := range []struct {
		at     string // the command that finds no data plane any more
		logout bool
	}{{"set", false}, {"start", false}, {"trystop", true}, {"delete", true}} {
		t.Run(c.at, func(t *testing.T) {
			l := newLab(t)
			k := &killer{Blocks: l.Blocks, plane: l.Plane}
			k.at.Store("")
			l.OpenBlocks = func() (daemon.Blocks, error) { return k, nil }
			d := l.start()
			if c.logout {
				l.login(d)
			}
			k.at.Store(c.at)
			if c.logout {
				_, _ = d.Logout(context.Background(), api.LogoutRequest{Session: iqn})
			} else {
				_, _ = d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal})
			}
			eventually(t, d, "new data plane", func() bool {
				return l.Plane.Starts() == 2 && d.Status(context.Background()).DataPlane.State == api.DataPlaneUp
			})
			eventually(t, d, "every device is known and live", func() bool {
				known := d.Devices(context.Background(), false).Devices
				_, served := l.Plane.Left()
				return len(known) == len(l.Blocks.Left()) && len(known) == len(served) && !slices.ContainsFunc(known, func(x api.Device) bool { return x.State != api.DeviceLive })
			})
			if s := d.Sessions().Sessions; len(s) > 0 {
				if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
					t.Error(err)
				}
			}
			l.clean()
		})
	}
}

// killer ends the data plane when a command for device 1 begins.
type killer struct {
	*daemontest.Blocks
	plane *daemontest.Plane
	at    atomic.Value // string
}

func (b *killer) hit(at string, id int) {
	if id == 1 && b.at.CompareAndSwap(at, "") {
		b.plane.Kill()
		b.Blocks.ServerDied()
	}
}

func (b *killer) SetParams(ctx context.Context, id int, p ublk.Params) error {
	b.hit("set", id)
	return b.Blocks.SetParams(ctx, id, p)
}

func (b *killer) Start(ctx context.Context, id, pid int) error {
	b.hit("start", id)
	return b.Blocks.Start(ctx, id, pid)
}

func (b *killer) TryStop(ctx context.Context, id int) error {
	b.hit("trystop", id)
	return b.Blocks.TryStop(ctx, id)
}

func (b *killer) Delete(ctx context.Context, id int) error {
	b.hit("delete", id)
	return b.Blocks.Delete(ctx, id)
}
