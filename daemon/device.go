package daemon

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/bits"
	"os"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

const minIO = 4096 // smallest limit of a request that the block layer works with, bytes

// serverTag marks a device as ours in the driver's own memory: "iser", 16 bits of a hash of the run directory, 16 bits of one of what it serves. It
// keeps a clean-up from deleting a device of another program that got the same number, and finds devices whose record is lost.
//
//	63        32 31       16 15      0
//	|  "iser"   |  instance |  unit  |
func (s *Service) serverTag(group string, lun uint64) uint64 {
	return s.instanceTag() | uint64(fold(fmt.Sprintf("%s/%x", group, lun)))
}

func (s *Service) instanceTag() uint64 {
	return 0x69736572<<32 | uint64(fold(s.opt.RunDir))<<16
}

func fold(text string) uint16 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(text))
	v := h.Sum32()
	return uint16(v>>16) ^ uint16(v)
}

// limits returns the properties of the block device for a unit, and the largest request in bytes.
func limits(u *ipc.Unit, configured int) (ublk.Params, int, error) {
	var p ublk.Params
	page := uint32(os.Getpagesize())
	lb := u.LogicalBlockSize
	if lb < ublk.SectorSize || lb > page || bits.OnesCount32(lb) != 1 {
		return p, 0, fmt.Errorf("logical block size of %d bytes: block devices have 512 to %d", lb, page)
	}
	hi, bytes := bits.Mul64(u.Blocks, uint64(lb))
	if u.Blocks == 0 || hi != 0 || bytes > 1<<63-1 {
		return p, 0, fmt.Errorf("size of %d blocks of %d bytes", u.Blocks, lb)
	}
	maxIO := configured
	if u.MaxTransfer != 0 {
		maxIO = min(maxIO, int(min(u.MaxTransfer, 1<<20)))
	}
	maxIO -= maxIO % int(max(lb, page))
	if maxIO < minIO {
		return p, 0, fmt.Errorf("the target takes at most %d bytes in a request, %d are needed", u.MaxTransfer, minIO)
	}
	p = ublk.Params{
		LogicalBlock: lb, PhysicalBlock: lb, MaxSectors: uint32(maxIO / ublk.SectorSize), Sectors: ublk.Sector(bytes / ublk.SectorSize),
	}
	// The rest are hints: what cannot be expressed is left out.
	// A block device starts with a physical block; where the unit does not, the hint would do harm.
	if pb := u.PhysicalBlockSize; pb > lb && pb <= 256<<20 && bits.OnesCount32(pb) == 1 && u.AlignmentOffset == 0 {
		p.PhysicalBlock = pb
	}
	if o := u.MinIOSize; o > p.PhysicalBlock && o <= 256<<20 && bits.OnesCount32(o) == 1 {
		p.MinIO = o
	}
	if o := u.OptimalIOSize; o >= p.PhysicalBlock && o <= 256<<20 && bits.OnesCount32(o) == 1 {
		p.OptimalIO = o
	}
	if u.ReadOnly {
		p.Attrs |= ublk.AttrReadOnly
	}
	if u.Rotational {
		p.Attrs |= ublk.AttrRotational
	}
	if u.WriteCache {
		p.Attrs |= ublk.AttrVolatileCache
		if u.FUA {
			p.Attrs |= ublk.AttrFUA
		}
	}
	if !u.ReadOnly {
		p.Discard = discardLimits(u)
	}
	return p, maxIO, nil
}

// wantedFeatures are what a device gets from a kernel that has them. With recovery a device outlives the data plane: requests wait, and those that were on
// their way are delivered again.
const wantedFeatures = ublk.FeatureUpdateSize | ublk.FeatureSharedMemory | ublk.FeatureRecovery | ublk.FeatureRecoveryReissue | ublk.FeatureQuiesce

// discardLimits are how a unit deallocates and zeroes blocks.
func discardLimits(u *ipc.Unit) ublk.Discard {
	sectors := func(bytes uint64) uint32 { return uint32(min(bytes/ublk.SectorSize, 1<<31)) }
	d := ublk.Discard{MaxSectors: sectors(u.MaxDiscard), MaxWriteZeroesSectors: sectors(u.MaxZeroes)}
	if d.MaxSectors != 0 {
		d.Granularity, d.Alignment = u.DiscardGranularity, u.DiscardAlignment
	}
	return d
}

// transportFeatures are what a device gets for the sake of its transport: a socket reaches the pages of requests, an RDMA adapter does not.
func transportFeatures(t ipc.Transport) ublk.Features {
	if t == ipc.TransportTCP {
		return ublk.FeatureZeroCopy
	}
	return 0
}

// serve makes a block device for a unit of a group that is up, or nothing. It calls numbered once the device has its number, or gets none.
func (s *Service) serve(ctx context.Context, pc planeConn, g *ipc.Group, u *ipc.Unit, numbered func()) (*device, error) {
	defer numbered()
	b, err := s.control()
	if err != nil {
		return nil, err
	}
	features, err := s.features(ctx)
	if err != nil {
		return nil, blockError(err)
	}
	params, maxIO, err := limits(u, s.Config().MaxIO)
	if err != nil {
		return nil, api.Errorf(api.ErrNotSupported, "%w", err)
	}
	d := &device{state: api.DeviceStarting}
	d.deviceRecord = deviceRecord{
		Schema: deviceSchema, Group: g.ID, Target: g.Target, Portal: g.Portal, Transport: g.Transport, TPGT: g.TPGT, Others: g.Others, PID: pc.hello.PID,
		Unit: *u, Created: time.Now().UTC(),
	}
	spec := ublk.DeviceSpec{
		ID: -1, Queues: pc.hello.Reactors, Depth: s.Config().QueueDepth, MaxIOBytes: uint32(maxIO), ServerTag: s.serverTag(g.ID, u.LUN),
		Features: ublk.FeatureUserCopy | ublk.FeatureIoctlEncode | features&(wantedFeatures|transportFeatures(g.Transport)),
	}

	// Each step leaves behind what undoes it.
	var undo []func(context.Context)
	ok := false
	defer func() {
		if ok {
			return
		}
		ctx, cancel := s.undo(ctx)
		defer cancel()
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i](ctx)
		}
	}()

	info, err := step(ctx, s, func(ctx context.Context) (ublk.DeviceInfo, error) { return b.Add(ctx, spec) })
	if err != nil {
		return nil, blockError(err)
	}
	numbered()
	id := info.ID
	d.UblkID, d.Queues, d.Depth, d.MaxIO = id, info.Queues, info.Depth, int(info.MaxIOBytes)
	undo = append(undo, func(ctx context.Context) { s.logged(b.Delete(ctx, id), id, "delete") })
	params.MaxSectors = min(params.MaxSectors, info.MaxIOBytes/ublk.SectorSize)

	if err := s.run(ctx, func(ctx context.Context) error { return b.SetParams(ctx, id, params) }); err != nil {
		return nil, blockError(err)
	}
	undo = append(undo, func(context.Context) { s.removeDevice(id) })
	if err := s.writeDevice(d.deviceRecord); err != nil {
		return nil, api.Errorf(api.ErrDatabase, "%w", err)
	}
	// The attachment may have been made even if its answer did not come: it is always taken back. Stop first, so that the tags come home.
	s.mu.Lock()
	d.memory = s.newDeviceMemoryLocked(id, unitKey{g.ID, u.LUN}, info.Features, pc, phaseStarting)
	s.mu.Unlock()
	undo = append(undo, func(context.Context) { s.dropMemory(d.memory) })
	undo = append(undo, func(ctx context.Context) {
		s.closeMemory(ctx, d.memory)
		s.logged(b.Stop(ctx, id), id, "stop")
		s.logged(pc.call(ctx, ipc.MethodDetach, ipc.DetachRequest{UblkID: id}, nil), id, "detach")
	})
	attach := ipc.AttachRequest{Group: g.ID, LUN: u.LUN, WWID: u.WWID, Serial: u.Serial, UblkID: id, Queues: info.Queues, Depth: info.Depth, MaxIO: d.MaxIO}
	// A caller who leaves does not cut this short: what is undone next would overtake it.
	if err := s.run(context.WithoutCancel(ctx), func(ctx context.Context) error { return pc.call(ctx, ipc.MethodAttach, attach, nil) }); err != nil {
		return nil, api.Wrap(err, api.ErrInternal, "attach %s", d.path())
	}
	s.registerEarly(ctx, d.memory)
	if err := s.run(ctx, func(ctx context.Context) error { return b.Start(ctx, id, pc.hello.PID) }); err != nil {
		return nil, blockError(err)
	}
	s.noScheduler(ctx, id)
	ok = true
	d.state = api.DeviceLive
	s.log.WithFields(map[string]any{"dev": d.path(), "target": d.Target, "lun": u.Number}).Infof("serving %d MiB", u.Blocks*uint64(u.LogicalBlockSize)>>20)
	return d, nil
}

// noScheduler takes the I/O scheduler away, which a device with one queue gets: it would hold requests back that the target sorts itself, and merge them.
func (s *Service) noScheduler(ctx context.Context, id int) {
	now, err := s.queueAttribute(ctx, id, "scheduler", "")
	if err == nil && now != "none" && !strings.Contains(now, "[none]") {
		_, err = s.queueAttribute(ctx, id, "scheduler", "none")
	}
	if err != nil && s.opt.QueueAttribute != nil {
		s.log.WithError(err).WithField("dev", devicePath(id)).Warn("the I/O scheduler stays as it is")
	}
}

// run gives one step its own deadline.
func (s *Service) run(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	return f(ctx)
}

func step[T any](ctx context.Context, s *Service, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	return f(ctx)
}

// blockError names a failure of the block driver.
func blockError(err error) error {
	name := api.ErrInternal
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ublk.ErrNotSupported):
		name = api.ErrNotSupported
	case errors.Is(err, ublk.ErrBusy):
		name = api.ErrBusy
	case errors.Is(err, os.ErrPermission):
		name = api.ErrAccessDenied
	}
	return api.Wrap(err, name, "block device")
}

// logged notes a failure of a clean-up step, which nobody is there to be told.
func (s *Service) logged(err error, id int, what string) {
	if err == nil || errors.Is(err, ublk.ErrNotFound) || api.Is(err, api.ErrNotFound) {
		return
	}
	s.log.WithError(err).WithField("dev", devicePath(id)).Errorf("%s failed; the device may stay behind", what)
}

// remove takes a stopped device apart: the data plane lets go of it, the driver forgets it, its files go. Every step is tried.
func (s *Service) remove(ctx context.Context, pc planeConn, d *device) error {
	b, err := s.control()
	if err != nil {
		return err
	}
	return s.removeBy(ctx, pc, d, b.Delete)
}

// removeBy is remove with the command that the driver gets to forget the device.
func (s *Service) removeBy(ctx context.Context, pc planeConn, d *device, forget func(ctx context.Context, id int) error) error {
	ctx, cancel := s.undo(ctx)
	defer cancel()
	s.closeMemory(ctx, d.memory)
	var errs []error
	if pc.client != nil {
		err := s.run(ctx, func(ctx context.Context) error {
			return pc.call(ctx, ipc.MethodDetach, ipc.DetachRequest{UblkID: d.UblkID}, nil)
		})
		if err != nil && !api.Is(err, api.ErrNotFound) && pc.client.Err() == nil { // what a dead data plane had is let go of
			errs = append(errs, api.Wrap(err, api.ErrInternal, "detach %s", d.path()))
		}
	}
	if len(errs) == 0 {
		s.dropMemory(d.memory) // no request comes any more, whatever becomes of the device
	}
	err := s.run(ctx, func(ctx context.Context) error { return forget(ctx, d.UblkID) })
	if err != nil && !errors.Is(err, ublk.ErrNotFound) {
		errs = append(errs, blockError(err))
	} else {
		s.removeDevice(d.UblkID)
	}
	return errors.Join(errs...)
}
