package daemon

import (
	"context"
	"errors"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// bytesOf is the size of a unit.
func bytesOf(u *ipc.Unit) uint64 { return u.Blocks * uint64(u.LogicalBlockSize) }

// grow gives a live block device the size that its unit has now, and returns the device's new record. The kernel tells file systems and udev. A
// device is never made smaller: what its user keeps beyond the new end would be lost.
func (s *Service) grow(ctx context.Context, d *device, u *ipc.Unit) (deviceRecord, error) {
	r := d.deviceRecord
	params, _, err := limits(u, d.MaxIO)
	if err != nil {
		return r, err
	}
	b, err := s.control()
	if err != nil {
		return r, err
	}
	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Info(ctx, d.UblkID) })
	if err == nil && !info.Features.Has(ublk.FeatureUpdateSize) {
		err = errNoResize
	}
	if err == nil {
		err = s.run(ctx, func(ctx context.Context) error { return b.UpdateSize(ctx, d.UblkID, params.Sectors) })
	}
	if err != nil {
		return r, err
	}
	r.Unit.Blocks = u.Blocks
	if err := s.writeDevice(r); err != nil {
		s.log.WithError(err).WithField("dev", d.path()).Error("the new size is not recorded; it is found again by the next iserd")
	}
	return r, nil
}

// errNoResize says that the driver cannot change the size of a device.
var errNoResize = errors.New("the kernel cannot change the size of a live device; 6.16 and later can")
