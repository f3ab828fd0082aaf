package lu

import (
	"context"
	"errors"
	"fmt"
	"time"

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

// An Executor runs one command that reads at most n bytes.
type Executor interface {
	Execute(ctx context.Context, lun scsi.LUN, cdb [16]byte, n int) (Result, error)
}

// maxUnits bounds how many logical units of one target are looked at.
const maxUnits = 1024

// ProbeAll asks a target for its logical units and describes each. limit is what the transport carries in one command, bytes. A unit that
// cannot be served is in the list, with the reason.
func ProbeAll(ctx context.Context, x Executor, limit int) ([]*Unit, error) {
	luns, err := reportLuns(ctx, x)
	if err != nil {
		return nil, err
	}
	units := make([]*Unit, 0, len(luns))
	seen := map[uint64]bool{}
	for _, lun := range luns {
		if seen[lun.Number()] {
			continue // the same unit once more, perhaps in another addressing form: it must not become two devices
		}
		seen[lun.Number()] = true
		u, err := Probe(ctx, x, lun, limit)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, iscsi.ErrSessionLost) {
				return nil, fmt.Errorf("logical unit %v: %w", lun, err)
			}
			u = &Unit{LUN: lun}
			u.refuse("%v", err)
		}
		units = append(units, u)
	}
	return units, nil
}

// reportLuns lists the units, by the well-known way: REPORT LUNS to LUN 0, with a longer buffer if the list did not fit.
func reportLuns(ctx context.Context, x Executor) ([]scsi.LUN, error) {
	for n := 2 << 10; ; {
		var cdb scsi.CDB
		scsi.ReportLuns(&cdb, uint32(n))
		data, err := command(ctx, x, 0, cdb, n)
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
	u := &Unit{LUN: lun, Usable: true, DeviceType: uint8(scsi.TypeNone)}
	if !lun.SingleLevel() || lun.Number() > 0xffff {
		u.refuse("unit number %v has several levels or is longer than 16 bits", lun)
		return u, nil
	}
	var cdb scsi.CDB

	scsi.InquiryStandard(&cdb, 255)
	data, err := command(ctx, x, lun, cdb, 255)
	if err != nil {
		return nil, fmt.Errorf("INQUIRY: %w", err)
	}
	inquiry, err := scsi.ParseInquiry(data)
	if err != nil {
		return nil, err
	}
	u.DeviceType = uint8(inquiry.Type)
	u.Vendor, u.Product, u.Revision = inquiry.Vendor, inquiry.Product, inquiry.Revision
	switch {
	case !inquiry.Connected:
		u.refuse("no device is connected to this unit number")
		return u, nil
	case inquiry.Type != scsi.TypeDisk:
		u.refuse("%v: only disks can be served as block devices", inquiry.Type)
		return u, nil
	}

	pages := vpdPages(ctx, x, lun)
	if pages[scsi.PageSerialNumber] {
		if data, err := vpd(ctx, x, lun, scsi.PageSerialNumber); err == nil {
			u.Serial, _ = scsi.ParseSerialNumber(data)
		}
	}
	if pages[scsi.PageIdentification] {
		if data, err := vpd(ctx, x, lun, scsi.PageIdentification); err == nil {
			if list, err := scsi.ParseDesignators(data); err == nil {
				u.WWID = scsi.Identity(list)
			}
		}
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
	return u, nil
}

// probeMode asks for write protection, write cache and FUA. A unit that does not say is taken to have a volatile cache: a flush too many
// costs time, one too few costs data.
func (u *Unit) probeMode(ctx context.Context, x Executor) {
	u.WriteCache = true
	var cdb scsi.CDB
	scsi.ModeSense6(&cdb, scsi.ModePageCaching, 192)
	data, err := command(ctx, x, u.LUN, cdb, 192)
	if err != nil {
		// Some units have no caching page but answer for all pages.
		scsi.ModeSense6(&cdb, scsi.ModePageAll, 192)
		if data, err = command(ctx, x, u.LUN, cdb, 192); err != nil {
			return
		}
	}
	mode, err := scsi.ParseModeSense6(data)
	if err != nil {
		return
	}
	u.ReadOnly, u.FUA = mode.WriteProtected, mode.DPOFUA
	if mode.Caching {
		u.WriteCache = mode.WCE
	}
}

// vpdPages asks which VPD pages there are; none when the unit does not say.
func vpdPages(ctx context.Context, x Executor, lun scsi.LUN) map[uint8]bool {
	m := map[uint8]bool{}
	data, err := vpd(ctx, x, lun, scsi.PageSupported)
	if err != nil {
		return m
	}
	pages, err := scsi.ParseSupportedPages(data)
	if err != nil {
		return m
	}
	for _, p := range pages {
		m[p] = true
	}
	return m
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
