package bus

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// The data plane is replaced for those who may; the answer tells of the devices.
func TestUpgradeDataPlane(t *testing.T) {
	var allowed atomic.Bool
	f := start(t, func(uint32) bool { return allowed.Load() })
	f.Plane.Prompt = true
	if _, err := f.d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	f.Plane.Install("second")
	method := managerInterface + ".UpgradeDataPlane"
	wantName(t, f.call(managerPath, method, opts{}).Err, api.ErrAccessDenied)
	if n := f.Plane.Starts(); n != 1 {
		t.Errorf("%d starts by somebody who may not", n)
	}
	allowed.Store(true)
	wantName(t, f.call(managerPath, method, opts{"now": dbus.MakeVariant(true)}).Err, api.ErrInvalidArgs)
	var r map[string]dbus.Variant
	if err := f.call(managerPath, method, opts{}).Store(&r); err != nil {
		t.Fatal(err)
	}
	devices, _ := r["devices"].Value().([]map[string]dbus.Variant)
	if len(devices) != 2 || devices[0]["device"].Value() != "/dev/ublkb0" || devices[0]["target"].Value() != iqn || devices[1]["lun"].Value() != uint16(1) ||
		devices[0]["how"].Value() != api.HandOverQuiesced || devices[0]["state"].Value() != api.DeviceLive {
		t.Errorf("devices %+v", devices)
	}
	if r["old_build"].Value() != "test" || r["new_build"].Value() != "second" || r["new_pid"].Value() == uint32(0) ||
		r["pause_ms"].Signature().String() != "t" || len(r["problems"].Value().([]string)) != 0 {
		t.Errorf("%+v", r)
	}
}
