package iser

import (
	"fmt"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/rdma"
)

// A Domain is the memory that one adapter may reach on behalf of one reactor: the regions that were registered, by region ID.
//
// It is made on a control goroutine; then it is its reactor's. Close after every connection that uses it has gone.
type Domain struct {
	Device *rdma.Device
	mrs    []*rdma.MR // by mempool.Region.ID; nil where a region is not registered here
	lent   []bool     // the registration is somebody else's
}

// NewDomain registers regions for data with dev, which the target may reach by RDMA Read and Write. Beside the messages of a connection this
// is the only registration of memory there is: an I/O only names it.
func NewDomain(dev *rdma.Device, data ...*mempool.Region) (*Domain, error) {
	d := &Domain{Device: dev}
	for _, r := range data {
		mr, err := d.Register(r)
		if err != nil {
			d.Close()
			return nil, err
		}
		d.Keep(r.ID, mr)
	}
	return d, nil
}

// Register registers a region for data, which the domain does not know before Keep. Any goroutine may do it; it may wait for the adapter.
func (d *Domain) Register(r *mempool.Region) (*rdma.MR, error) {
	mr, err := d.Device.Register(r.Mem, rdma.LocalWrite|rdma.RemoteRead|rdma.RemoteWrite)
	if err != nil {
		return nil, fmt.Errorf("register %d MiB with %s: %w", len(r.Mem)>>20, d.Device.Name(), err)
	}
	return mr, nil
}

// Keep adds the registration of a region, which becomes the domain's.
func (d *Domain) Keep(region int, mr *rdma.MR) { d.set(region, mr, false) }

func (d *Domain) set(region int, mr *rdma.MR, lent bool) {
	for len(d.mrs) <= region {
		d.mrs = append(d.mrs, nil)
		d.lent = append(d.lent, false)
	}
	d.mrs[region], d.lent[region] = mr, lent
}

// Lend adds the registration of a region that other domains of the same adapter use too; it stays the caller's.
func (d *Domain) Lend(region int, mr *rdma.MR) { d.set(region, mr, true) }

// Withdraw takes back what Lend has added. No command that names the region may be under way.
func (d *Domain) Withdraw(region int) {
	if region < len(d.mrs) && d.lent[region] {
		d.set(region, nil, false)
	}
}

// mr finds the registration of a region; nil if there is none.
func (d *Domain) mr(region int) *rdma.MR {
	if region < 0 || region >= len(d.mrs) {
		return nil
	}
	return d.mrs[region]
}

// Close lets go of the registrations.
func (d *Domain) Close() error {
	var first error
	for i, mr := range d.mrs {
		if mr == nil || d.lent[i] {
			continue
		}
		if err := mr.Close(); err != nil && first == nil {
			first = err
		}
		d.mrs[i] = nil
	}
	return first
}
