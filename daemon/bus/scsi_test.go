package bus

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/scsi"
)

// Commands and reservations by the bus reach the unit that is meant, and only for those who may.
func TestScsi(t *testing.T) {
	var allowed atomic.Bool
	allowed.Store(true)
	f := start(t, func(uint32) bool { return allowed.Load() })
	if _, err := f.d.Login(context.Background(), api.LoginRequest{Target: iqn, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return len(f.d.Devices(context.Background(), false).Devices) == 2 })
	f.Plane.Answer("12", ipc.ScsiReply{Data: []byte("inquiry")})
	f.Plane.Answer("2a", ipc.ScsiReply{Status: 0x18})
	f.Plane.Answer("5e00", ipc.ScsiReply{Data: []byte{0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 9}})
	f.Plane.Answer("5e01", ipc.ScsiReply{Data: []byte{0, 0, 0, 3, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 5, 0, 0}})
	dev, s := devicePath(1), sessionPath(1)
	waitFor(t, func() bool {
		return f.call(dev, propertiesName+".GetAll", deviceInterface).Err == nil && f.call(s, propertiesName+".GetAll", sessionInterface).Err == nil
	})
	execute := func(p dbus.ObjectPath, iface string, args ...any) (status byte, sense, data []byte, residual int64, err error) {
		err = f.call(p, iface+".ExecuteCommand", args...).Store(&status, &sense, &data, &residual)
		return status, sense, data, residual, err
	}
	inquiry := []byte{0x12, 0, 0, 0, 10, 0}
	status, _, data, residual, err := execute(dev, deviceInterface, inquiry, []byte{}, uint32(10), opts{"timeout": dbus.MakeVariant(uint32(3))})
	if err != nil || status != 0 || string(data) != "inquiry" || residual != 3 {
		t.Errorf("device: status %#x, data %q, residual %d, %v", status, data, residual, err)
	}
	if _, _, _, _, err := execute(s, sessionInterface, uint16(5), inquiry, []byte{}, uint32(10), opts{"skip_attention": dbus.MakeVariant(true)}); err != nil {
		t.Error(err)
	}
	write := []byte{0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0}
	_, _, _, _, err = execute(dev, deviceInterface, write, []byte("data"), uint32(0), opts{})
	wantName(t, err, api.ErrInvalidArgs)
	status, _, _, _, err = execute(dev, deviceInterface, write, []byte("data"), uint32(0), opts{"force": dbus.MakeVariant(true)})
	if err != nil || status != 0x18 {
		t.Errorf("write: status %#x, %v", status, err)
	}
	_, _, _, _, err = execute(dev, deviceInterface, inquiry, []byte{}, uint32(1<<31), opts{})
	wantName(t, err, api.ErrInvalidArgs)
	_, _, _, _, err = execute(dev, deviceInterface, inquiry, []byte{}, uint32(1), opts{"lun": dbus.MakeVariant(uint16(1))})
	wantName(t, err, api.ErrInvalidArgs)
	sent, _ := f.Plane.Commands()
	if len(sent) != 3 || sent[0].LUN != 1<<48 || !bytes.Equal(sent[0].CDB, inquiry) || sent[0].In != 10 || sent[0].Timeout.Seconds() != 3 ||
		sent[1].LUN != 5<<48 || !sent[1].SkipAttention || sent[2].LUN != 1<<48 || string(sent[2].Out) != "data" {
		t.Errorf("commands %+v", sent)
	}

	var generation, sessions uint32
	var keys []uint64
	var held bool
	var key uint64
	var kind string
	if err := f.call(dev, deviceInterface+".GetReservation", opts{}).Store(&generation, &keys, &held, &key, &kind); err != nil ||
		generation != 3 || len(keys) != 1 || keys[0] != 9 || !held || key != 9 || kind != "Write Exclusive - Registrants Only" {
		t.Errorf("reservation %d %v %v %d %q, %v", generation, keys, held, key, kind, err)
	}
	if err := f.call(dev, deviceInterface+".Reserve", "preempt", opts{
		"key": dbus.MakeVariant(uint64(1)), "new_key": dbus.MakeVariant(uint64(2)), "type": dbus.MakeVariant("ea-ro"),
	}).Store(&sessions); err != nil || sessions != 2 {
		t.Errorf("%d sessions, %v", sessions, err)
	}
	_, reserves := f.Plane.Commands()
	if len(reserves) != 1 || reserves[0].Action != uint8(scsi.Preempt) || reserves[0].Key != 1 || reserves[0].ActionKey != 2 ||
		reserves[0].Type != uint8(scsi.ExclusiveAccessRegistrantsOnly) || reserves[0].LUN != 1<<48 {
		t.Errorf("reserve %+v", reserves)
	}
	wantName(t, f.call(dev, deviceInterface+".Reserve", "steal", opts{}).Err, api.ErrInvalidArgs)
	wantName(t, f.call(dev, deviceInterface+".Reserve", "reserve", opts{"key": dbus.MakeVariant("1")}).Err, api.ErrInvalidArgs)

	allowed.Store(false)
	_, _, _, _, err = execute(dev, deviceInterface, inquiry, []byte{}, uint32(10), opts{})
	wantName(t, err, api.ErrAccessDenied)
	_, _, _, _, err = execute(s, sessionInterface, uint16(0), inquiry, []byte{}, uint32(10), opts{})
	wantName(t, err, api.ErrAccessDenied)
	wantName(t, f.call(dev, deviceInterface+".GetReservation", opts{}).Err, api.ErrAccessDenied)
	wantName(t, f.call(dev, deviceInterface+".Reserve", "clear", opts{"key": dbus.MakeVariant(uint64(1))}).Err, api.ErrAccessDenied)
	allowed.Store(true)
	if err := f.call(s, sessionInterface+".Logout", opts{}).Err; err != nil {
		t.Fatal(err)
	}
}

func wantName(t *testing.T, err error, name string) {
	t.Helper()
	var e dbus.Error
	if !errors.As(err, &e) || e.Name != name {
		t.Errorf("error %v, want %s", err, name)
	}
}
