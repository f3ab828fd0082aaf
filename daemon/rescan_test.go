package daemon_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

// byLUN are the devices by the number of their unit.
func byLUN(d *daemontest.Daemon) map[uint16]api.Device {
	m := make(map[uint16]api.Device)
	for _, x := range d.Devices(context.Background(), false).Devices {
		m[x.LUN] = x
	}
	return m
}

func rescan(t *testing.T, d *daemontest.Daemon) api.RescanResult {
	t.Helper()
	r, err := d.Rescan(context.Background(), api.RescanRequest{Session: iqn})
	if err != nil || len(r.Sessions) != 1 {
		t.Fatalf("rescan: %+v, %v", r, err)
	}
	return r.Sessions[0]
}

// Units that appear get a device, units that vanish lose theirs, by an event and by asking.
func TestUnitsComeAndGo(t *testing.T) {
	for _, tell := range []bool{true, false} {
		l := newLab(t)
		d := l.start()
		l.login(d)
		disk0, disk1, disk2 := daemontest.Disk(0, 64<<20), daemontest.Disk(1, 1<<30), daemontest.Disk(2, 32<<20)
		tape := ipc.Unit{LUN: 3 << 48, Number: 3, DeviceType: 1, Reason: "tape: only disks can be served as block devices"}

		l.Plane.SetUnits(iqn, tell, disk0, disk1, disk2, tape)
		if !tell {
			if r := rescan(t, d); !slices.Equal(r.Added, []string{"/dev/ublkb2"}) || len(r.Removed)+len(r.Grown)+len(r.Problems) != 0 {
				t.Errorf("a unit more: %+v", r)
			}
		}
		eventually(t, d, "a third device", func() bool { return len(byLUN(d)) == 3 })
		u := d.Devices(context.Background(), false).Unserved
		if len(u) != 1 || u[0].LUN != 3 || u[0].Type != "tape" || u[0].Reason != tape.Reason || u[0].Target != iqn || u[0].SessionID == 0 {
			t.Errorf("units without a device: %+v", u)
		}

		l.Blocks.Hold(1, "mounted at /data")
		l.Plane.SetUnits(iqn, tell, disk0, tape)
		if !tell {
			r := rescan(t, d)
			if !slices.Equal(r.Removed, []string{"/dev/ublkb2"}) || len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "/dev/ublkb1: no unit: /dev/ublkb1 is in use: mounted at /data") {
				t.Errorf("two units less: %+v", r)
			}
		}
		eventually(t, d, "one device less and one dead", func() bool {
			m := byLUN(d)
			return len(m) == 2 && m[0].State == api.DeviceLive && m[1].State == api.DeviceDead && m[1].Reason == "no unit"
		})
		eventually(t, d, "the units without a device", func() bool {
			s := d.Sessions().Sessions[0]
			return len(s.Units) == 3 && s.Units[1].LUN == 3 && s.Units[2].LUN == 1 && s.Units[2].Device == "" && s.Units[2].Reason == "no unit"
		})

		// The unit comes back while its device is still there: it goes on.
		l.Plane.SetUnits(iqn, tell, disk0, disk1)
		if !tell {
			rescan(t, d)
		}
		eventually(t, d, "the device lives again", func() bool { x := byLUN(d)[1]; return x.State == api.DeviceLive && x.Reason == "" && x.UblkID == 1 })

		// Another unit under the number: never under the same device.
		other := disk1
		other.WWID = "naa.60014050000000000000000000000bad"
		l.Plane.SetUnits(iqn, tell, disk0, other)
		if !tell {
			rescan(t, d)
		}
		eventually(t, d, "the device is dead", func() bool {
			x := byLUN(d)[1]
			return x.State == api.DeviceDead && x.Reason == "another unit" && x.WWID == disk1.WWID
		})
		u = d.Devices(context.Background(), false).Unserved
		if len(u) != 1 || u[0].WWID != other.WWID || !strings.Contains(u[0].Reason, "/dev/ublkb1") || !strings.Contains(u[0].Reason, "iserctl rescan") {
			t.Errorf("the other unit: %+v", u)
		}
		// Nor does a command for the device reach it.
		inquiry := api.ScsiRequest{Unit: api.UnitName{Name: "/dev/ublkb1"}, CDB: api.Hex{0x12, 0, 0, 0, 36, 0}, In: 36}
		if _, err := d.Scsi(context.Background(), inquiry); !api.Is(err, api.ErrNotFound) || !strings.Contains(err.Error(), "another unit") {
			t.Errorf("INQUIRY of the dead device: %v", err)
		}
		l.Blocks.Hold(1)
		if r := rescan(t, d); !slices.Equal(r.Removed, []string{"/dev/ublkb1"}) || !slices.Equal(r.Added, []string{"/dev/ublkb1"}) || len(r.Problems) != 0 {
			t.Errorf("nobody uses the device any more: %+v", r)
		}
		eventually(t, d, "a device for the other unit", func() bool { x := byLUN(d)[1]; return x.State == api.DeviceLive && x.WWID == other.WWID })

		if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
			t.Fatal(err)
		}
		l.clean()
	}
}

// A unit that grows has its device grown, under whoever uses it; one that shrinks does not.
func TestGrow(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hold(0, "mounted at /data")
	disk1 := daemontest.Disk(1, 1<<30)
	l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 128<<20), disk1)
	eventually(t, d, "the device grows", func() bool { return byLUN(d)[0].Size == 128<<20 })
	if p := l.Blocks.Params(0); p.Sectors != 128<<20/512 {
		t.Errorf("parameters %+v", p)
	}

	l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 32<<20), disk1)
	eventually(t, d, "a warning of the shrunk unit", func() bool {
		x := byLUN(d)[0]
		return x.Size == 128<<20 && x.State == api.DeviceLive && len(x.Warnings) == 1 && strings.Contains(x.Warnings[0], "shrunk from 134217728 to 33554432")
	})
	readOnly := daemontest.Disk(0, 128<<20)
	readOnly.ReadOnly = true
	l.Plane.SetUnits(iqn, true, readOnly, disk1)
	eventually(t, d, "a warning of the protected unit", func() bool {
		x := byLUN(d)[0]
		return len(x.Warnings) == 1 && strings.Contains(x.Warnings[0], "write protected")
	})

	// A driver that refuses is not asked again and again, but when somebody asks.
	l.Blocks.Fail("size", errors.New("no"))
	l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 256<<20), disk1)
	eventually(t, d, "a warning that it did not grow", func() bool { x := byLUN(d)[0]; return len(x.Warnings) == 1 && strings.HasSuffix(x.Warnings[0], ": no") })
	n := len(l.Blocks.Calls())
	l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 256<<20), disk1)
	if r := rescan(t, d); !slices.Equal(r.Grown, []string{"/dev/ublkb0"}) || len(r.Problems) != 0 {
		t.Errorf("rescan: %+v", r)
	}
	if calls := l.Blocks.Calls()[n:]; !slices.Equal(calls, []string{"size 0"}) {
		t.Errorf("calls %v", calls)
	}
	if x := byLUN(d)[0]; x.Size != 256<<20 || len(x.Warnings) != 0 {
		t.Errorf("device %+v", x)
	}
	if r := rescan(t, d); len(r.Added)+len(r.Removed)+len(r.Grown)+len(r.Problems) != 0 {
		t.Errorf("nothing has changed: %+v", r)
	}
	if l.Plane.Rescans() != 2 {
		t.Errorf("%d rescans", l.Plane.Rescans())
	}
}

// swapper puts another unit in the place of one while its device starts.
type swapper struct {
	*daemontest.Blocks
	swap func()
}

func (b *swapper) Start(ctx context.Context, id, pid int) error {
	if id == 1 && b.swap != nil {
		b.swap()
		b.swap = nil
	}
	return b.Blocks.Start(ctx, id, pid)
}

// A unit that is swapped while its device is being made, at a login or later: the device ends up as that of the unit that is there.
func TestUnitSwappedWhileMade(t *testing.T) {
	other := daemontest.Disk(1, 1<<30)
	other.WWID = "naa.60014050000000000000000000000bad"
	for _, at := range []string{"login", "rescan"} {
		t.Run(at, func(t *testing.T) {
			l := newLab(t)
			var d *daemontest.Daemon
			s := &swapper{Blocks: l.Blocks, swap: func() {
				l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 64<<20), other) // the device is attached for what was there before
				d.Devices(context.Background(), true)                          // the data plane's answer comes after the event
			}}
			l.OpenBlocks = func() (daemon.Blocks, error) { return s, nil }
			if at == "rescan" {
				l.Plane.AddTarget(iqn, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 64<<20)}})
			}
			d = l.start()
			l.login(d)
			if at == "rescan" {
				l.Plane.SetUnits(iqn, true, daemontest.Disk(0, 64<<20), daemontest.Disk(1, 1<<30))
			}
			eventually(t, d, "a device for the other unit", func() bool { x := byLUN(d)[1]; return x.State == api.DeviceLive && x.WWID == other.WWID })
			if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
				t.Fatal(err)
			}
			l.clean()
		})
	}
}

// A unit that the data plane knows as another one is tried again, as what it is then.
func TestUnitOutdated(t *testing.T) {
	t.Cleanup(daemon.Hurry(20*time.Millisecond, time.Second))
	l := newLab(t)
	d := l.start()
	l.Plane.Fail(ipc.MethodAttach, 0, &ipc.Error{Code: api.ErrAgain, Text: "another logical unit now"})
	l.login(d)
	eventually(t, d, "both devices", func() bool { return len(byLUN(d)) == 2 })
	if _, err := d.Logout(context.Background(), api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	l.clean()
}

// What changed while no daemon was there is made up for by the next one.
func TestUnitsChangeWithoutDaemon(t *testing.T) {
	l := newLab(t)
	d := l.start()
	l.login(d)
	l.Blocks.Hold(0, "mounted at /data")
	l.Blocks.Hold(1, "mounted at /srv")
	d.Kill()
	l.Plane.SetUnits(iqn, false, daemontest.Disk(0, 128<<20), daemontest.Disk(2, 1<<20))
	d = l.start()
	m := byLUN(d)
	if len(m) != 3 || m[0].Size != 128<<20 || m[1].State != api.DeviceDead || m[1].Reason == "" || m[2].State != api.DeviceLive {
		t.Errorf("devices %+v", m)
	}
	// And the one after it knows the size, too.
	d.Kill()
	d = l.start()
	if m := byLUN(d); len(m) != 3 || m[0].Size != 128<<20 || m[1].State != api.DeviceDead {
		t.Errorf("devices %+v", m)
	}
}

func TestRescanFails(t *testing.T) {
	l := newLab(t)
	d := l.start()
	if _, err := d.Rescan(context.Background(), api.RescanRequest{Session: iqn}); !api.Is(err, api.ErrNotFound) {
		t.Errorf("not logged in: %v", err)
	}
	if r, err := d.Rescan(context.Background(), api.RescanRequest{}); err != nil || len(r.Sessions) != 0 {
		t.Errorf("nobody logged in: %+v, %v", r, err)
	}
	l.login(d)
	failure := &ipc.Error{Code: api.ErrConnectionFailed, Text: "no session with the target"}
	l.Plane.Fail(ipc.MethodRescan, 0, failure)
	if _, err := d.Rescan(context.Background(), api.RescanRequest{Session: iqn}); !api.Is(err, api.ErrConnectionFailed) {
		t.Errorf("no session: %v", err)
	}
	l.Plane.Fail(ipc.MethodRescan, 0, failure)
	if r, err := d.Rescan(context.Background(), api.RescanRequest{}); err != nil || len(r.Sessions) != 1 || r.Sessions[0].Error == nil {
		t.Errorf("one of all: %+v, %v", r, err)
	}
}
