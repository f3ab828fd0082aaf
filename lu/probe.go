package lu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// Result is the answer to one command.
type Result struct {
	Status scsi.Status
	Sense  []byte
	Data   []byte // what the target sent, at most what was asked for
	Err    error  // the command was not answered
}

// An Executor runs one command that reads at most n bytes. It is safe for concurrent use.
type Executor interface {
	Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (Result, error)
}

// maxUnits bounds how many logical units of one target are looked at.
const maxUnits = 1024

// ProbeAll asks a target for its logical units and describes each. limit is what the transport carries in one command, bytes. A unit that
// cannot be served is in the list, with the reason. Well known units are left out: they are no devices.
func ProbeAll(ctx context.Context, x Executor, limit int) ([]*Unit, error) {
	luns, err := reportLuns(ctx, x)
	if err != nil {
		return nil, err
	}
	distinct := make([]scsi.LUN, 0, len(luns))
	seen := map[uint64]bool{}
	for _, lun := range luns {
		key := uint64(lun)
		if lun.SingleLevel() {
			key = lun.Number() // the same unit once more, perhaps in another addressing form, must not become two devices
		}
		if !lun.WellKnown() && !seen[key] {
			seen[key] = true
			distinct = append(distinct, lun)
		}
	}
	units := make([]*Unit, len(distinct))
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(probesAtOnce)
	for i, lun := range distinct {
		work.Go(func() (err error) {
			units[i], err = ProbeOne(ctx, x, lun, limit)
			return err
		})
	}
	return units, work.Wait()
}

// probesAtOnce is how many units are asked at a time. Each is a dozen commands, one after the other.
const probesAtOnce = 8

// ProbeOne is [Probe] that describes a unit which does not answer as one that cannot be served. An error means that nothing could be asked.
func ProbeOne(ctx context.Context, x Executor, lun scsi.LUN, limit int) (*Unit, error) {
	u, err := Probe(ctx, x, lun, limit)
	if err == nil {
		return u, nil
	}
	if ctx.Err() != nil || errors.Is(err, iscsi.ErrSessionLost) {
		return nil, fmt.Errorf("logical unit %v: %w", lun, err)
	}
	return unanswered(lun, err), nil
}

// unanswered describes a unit that did not answer.
func unanswered(lun scsi.LUN, err error) *Unit {
	u := &Unit{LUN: lun, DeviceType: uint8(scsi.TypeNone)}
	if u.Absent = errors.Is(err, scsi.ErrUnitGone); !u.Absent {
		u.Err = err
	}
	u.refuse("%v", err)
	return u
}

// reportLuns lists the units: REPORT LUNS to LUN 0, and to the well known unit for it where LUN 0 refuses, with a longer buffer if the list did not
// fit. A target that does not know the command has LUN 0 only (it became mandatory with SPC-3).
func reportLuns(ctx context.Context, x Executor) ([]scsi.LUN, error) {
	at := scsi.LUN(0)
	for n := 2 << 10; ; {
		var cdb scsi.CDB
		scsi.ReportLuns(&cdb, uint32(n))
		data, err := command(ctx, x, at, cdb, n)
		var refused *scsi.StatusError
		if errors.As(err, &refused) && at == 0 {
			at = scsi.ReportLunsWellKnown
			continue
		}
		if errors.Is(err, scsi.ErrIllegalRequest) || errors.Is(err, scsi.ErrUnitGone) {
			return []scsi.LUN{0}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("REPORT LUNS: %w", err)
		}
		luns, needed, err := scsi.ParseReportLuns(data)
		if err != nil {
			return nil, err
		}
		if needed <= n || n >= 8*maxUnits+8 {
			if len(luns) > maxUnits {
				luns = luns[:maxUnits]
			}
			return luns, nil
		}
		n = min(needed, 8*maxUnits+8)
	}
}

// Probe describes one logical unit. An error means that the unit did not answer what every unit must.
func Probe(ctx context.Context, x Executor, lun scsi.LUN, limit int) (*Unit, error) {
	for try := 0; ; try++ {
		w := &witness{Executor: x}
		u, err := describe(ctx, w, lun, limit)
		if !w.changed || try == 2 {
			return u, err
		}
	}
}

// witness notes that the unit may have become another one while it was asked: then what it said before does not count.
type witness struct {
	Executor
	asked   bool // something of the identity has been answered
	changed bool
}

// Execute runs one command.
func (w *witness) Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (Result, error) {
	r, err := w.Executor.Execute(ctx, lun, cdb, n)
	switch {
	case err != nil:
	case r.Status == scsi.StatusGood:
		w.asked = true
	default:
		if s, err := scsi.ParseSense(r.Sense); err == nil && w.asked && scsi.Classify(r.Status, &s).Attention == scsi.AttentionInquiryChanged {
			w.changed = true
		}
	}
	return r, err
}

// describe asks for everything.
func describe(ctx context.Context, x Executor, lun scsi.LUN, limit int) (*Unit, error) {
	u, pages, err := identify(ctx, x, lun)
	if err != nil || !u.Usable {
		return u, err
	}
	capacity, err := readCapacity(ctx, x, lun)
	if err != nil {
		return nil, err
	}
	u.setCapacity(capacity)

	var limits scsi.BlockLimits
	if pages[scsi.PageBlockLimits] {
		if data, err := vpd(ctx, x, lun, scsi.PageBlockLimits); err == nil {
			limits, _ = scsi.ParseBlockLimits(data)
		}
	}
	u.setLimits(limits, limit)
	if pages[scsi.PageCharacteristics] {
		if data, err := vpd(ctx, x, lun, scsi.PageCharacteristics); err == nil {
			if c, err := scsi.ParseCharacteristics(data); err == nil {
				u.Rotational = c.RotationRate > 1
			}
		}
	}
	u.probeMode(ctx, x)
	u.probeRanges(ctx, x, capacity, limits, pages[scsi.PageProvisioning])
	return u, nil
}

// Identify describes a unit as far as it has to be known to tell it from another one: what [Unit.Changed] looks at, but for the block size.
func Identify(ctx context.Context, x Executor, lun scsi.LUN) (*Unit, error) {
	u, _, err := identify(ctx, x, lun)
	switch {
	case err == nil:
		return u, nil
	case ctx.Err() != nil || errors.Is(err, iscsi.ErrSessionLost):
		return nil, fmt.Errorf("logical unit %v: %w", lun, err)
	}
	return unanswered(lun, err), nil
}

// PortGroups asks a unit for the access states of its target port groups.
func PortGroups(ctx context.Context, x Executor, lun scsi.LUN) ([]scsi.TargetPortGroup, error) {
	const room = 4096
	var cdb scsi.CDB
	scsi.ReportTargetPortGroups(&cdb, room)
	data, err := command(ctx, x, lun, cdb, room)
	if err != nil {
		return nil, fmt.Errorf("REPORT TARGET PORT GROUPS: %w", err)
	}
	return scsi.ParseTargetPortGroups(data)
}

// identify asks who a unit is, and which VPD pages it has.
func identify(ctx context.Context, x Executor, lun scsi.LUN) (*Unit, map[uint8]bool, error) {
	u := &Unit{LUN: lun, Usable: true, DeviceType: uint8(scsi.TypeNone)}
	if !lun.SingleLevel() || lun.Number() > 0xffff {
		u.refuse("unit number %#016x has several levels or is longer than 16 bits", uint64(lun))
		return u, nil, nil
	}
	var cdb scsi.CDB
	scsi.InquiryStandard(&cdb, 255)
	data, err := command(ctx, x, lun, cdb, 255)
	if err != nil {
		return nil, nil, fmt.Errorf("INQUIRY: %w", err)
	}
	inquiry, err := scsi.ParseInquiry(data)
	if err != nil {
		return nil, nil, err
	}
	u.DeviceType = uint8(inquiry.Type)
	u.Vendor, u.Product, u.Revision = inquiry.Vendor, inquiry.Product, inquiry.Revision
	switch {
	case !inquiry.Connected:
		u.Absent = true
		u.refuse("no device is connected to this unit number")
		return u, nil, nil
	case inquiry.Type != scsi.TypeDisk:
		u.refuse("%v: only disks can be served as block devices", inquiry.Type)
		return u, nil, nil
	}
	pages, err := vpdPages(ctx, x, lun)
	if err != nil {
		return nil, nil, err
	}
	// A page that is refused although it is listed is as good as none; one that a busy unit or a lost session keeps back is no answer.
	if pages[scsi.PageSerialNumber] {
		data, err := vpd(ctx, x, lun, scsi.PageSerialNumber)
		if err != nil && !errors.Is(err, scsi.ErrIllegalRequest) {
			return nil, nil, fmt.Errorf("VPD page 80: %w", err)
		}
		u.Serial, _ = scsi.ParseSerialNumber(data)
	}
	if pages[scsi.PageIdentification] {
		data, err := vpd(ctx, x, lun, scsi.PageIdentification)
		if err != nil && !errors.Is(err, scsi.ErrIllegalRequest) {
			return nil, nil, fmt.Errorf("VPD page 83: %w", err)
		}
		if list, err := scsi.ParseDesignators(data); err == nil {
			u.WWID = scsi.Identity(list)
			if id, ok := scsi.PortGroup(list); ok && inquiry.TPGS != 0 {
				u.PortGroup = &id
			}
		}
	}
	return u, pages, nil
}

// probeRanges asks how blocks can be deallocated and zeroed. Which WRITE SAME a unit knows is asked only where no page tells.
func (u *Unit) probeRanges(ctx context.Context, x Executor, c scsi.Capacity, l scsi.BlockLimits, hasProvisioning bool) {
	var p scsi.Provisioning
	if hasProvisioning {
		data, err := vpd(ctx, x, u.LUN, scsi.PageProvisioning)
		if err == nil {
			p, err = scsi.ParseProvisioning(data)
		}
		hasProvisioning = err == nil
	}
	knows16 := c.Provisioned && p.WriteSame16 || l.MaxWriteSame > 0
	knows10 := false
	if !knows16 {
		knows16 = u.knows(ctx, x, scsi.OpWriteSame16)
	}
	if !knows16 {
		knows10 = u.knows(ctx, x, scsi.OpWriteSame10)
	}
	u.setRanges(c, l, p, hasProvisioning, knows16, knows10)
}

// knows asks whether the unit knows a command; one that cannot say does not.
func (u *Unit) knows(ctx context.Context, x Executor, op uint8) bool {
	var cdb scsi.CDB
	scsi.ReportOperationCode(&cdb, op, 64)
	data, err := command(ctx, x, u.LUN, cdb, 64)
	if err != nil {
		return false
	}
	yes, err := scsi.ParseOperationSupport(data)
	return err == nil && yes
}

// probeMode asks for write protection, write cache and FUA. A unit that does not say is taken to have a volatile cache: a flush too many
// costs time, one too few costs data.
func (u *Unit) probeMode(ctx context.Context, x Executor) {
	u.WriteCache, u.CacheAssumed = true, true
	mode, err := modeSense(ctx, x, u.LUN)
	if err != nil {
		return
	}
	u.ReadOnly, u.FUA = mode.WriteProtected, mode.DPOFUA
	if mode.Caching {
		u.WriteCache, u.CacheAssumed = mode.WCE, false
	}
}

// modeSense asks for the caching page, with MODE SENSE(6) and where that is refused with MODE SENSE(10). Some units have no caching page but answer
// for all pages; the header with the write protection comes in either case.
func modeSense(ctx context.Context, x Executor, lun scsi.LUN) (mode scsi.Mode, err error) {
	for _, page := range []uint8{scsi.ModePageCaching, scsi.ModePageAll} {
		var cdb scsi.CDB
		var data []byte
		scsi.ModeSense6(&cdb, page, 192)
		if data, err = command(ctx, x, lun, cdb, 192); err == nil {
			return scsi.ParseModeSense6(data)
		}
		scsi.ModeSense10(&cdb, page, 512)
		if data, err = command(ctx, x, lun, cdb, 512); err == nil {
			return scsi.ParseModeSense10(data)
		}
	}
	return mode, fmt.Errorf("MODE SENSE: %w", err)
}

// vpdPages asks which VPD pages there are; none when the unit does not know them.
func vpdPages(ctx context.Context, x Executor, lun scsi.LUN) (map[uint8]bool, error) {
	m := map[uint8]bool{}
	data, err := vpd(ctx, x, lun, scsi.PageSupported)
	if err != nil && !errors.Is(err, scsi.ErrIllegalRequest) {
		return nil, fmt.Errorf("VPD page 00: %w", err)
	}
	pages, err := scsi.ParseSupportedPages(data)
	if err != nil {
		return m, nil
	}
	for _, p := range pages {
		m[p] = true
	}
	return m, nil
}

func vpd(ctx context.Context, x Executor, lun scsi.LUN, page uint8) ([]byte, error) {
	var cdb scsi.CDB
	scsi.InquiryVPD(&cdb, page, 1024)
	return command(ctx, x, lun, cdb, 1024)
}

// readCapacity asks by the 16-byte command, which tells more, and by the 10-byte one where that is unknown.
func readCapacity(ctx context.Context, x Executor, lun scsi.LUN) (scsi.Capacity, error) {
	var cdb scsi.CDB
	scsi.ReadCapacity16(&cdb, 32)
	data, err := command(ctx, x, lun, cdb, 32)
	if err == nil {
		return scsi.ParseReadCapacity16(data)
	}
	if !errors.Is(err, scsi.ErrIllegalRequest) {
		return scsi.Capacity{}, fmt.Errorf("READ CAPACITY(16): %w", err)
	}
	scsi.ReadCapacity10(&cdb)
	if data, err = command(ctx, x, lun, cdb, 8); err != nil {
		return scsi.Capacity{}, fmt.Errorf("READ CAPACITY(10): %w", err)
	}
	return scsi.ParseReadCapacity10(data)
}

// command runs one command until it succeeds, fails for good, or was tried often enough. The first command of a new nexus meets a unit
// attention (SAM-5 section 5.14): it only tells that something happened before we came.
func command(ctx context.Context, x Executor, lun scsi.LUN, cdb [16]byte, n int) ([]byte, error) {
	for try := 0; ; try++ {
		r, err := x.Execute(ctx, lun, cdb, n)
		if err != nil {
			return nil, err
		}
		if r.Status == scsi.StatusGood {
			return r.Data, nil
		}
		var sense *scsi.Sense
		if s, err := scsi.ParseSense(r.Sense); err == nil {
			sense = &s
		}
		action := scsi.Classify(r.Status, sense)
		if action.Kind == scsi.Done {
			return r.Data, nil
		}
		if action.Kind == scsi.Fail || try >= 20 {
			return nil, &scsi.StatusError{Status: r.Status, Sense: sense}
		}
		if action.Kind == scsi.RetryDelay {
			select {
			case <-time.After(250 * time.Millisecond):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}
