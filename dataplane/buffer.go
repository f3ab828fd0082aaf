package dataplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/rdma"
)

// buffer is memory that applications share with the data plane: mapped here, registered once with every RDMA device that carries a
// session, and known to each reactor. The control plane registers it with the block driver, from its own mapping.
type buffer struct {
	id     uint32
	label  json.RawMessage
	offset int64
	file   *os.File
	region *mempool.Region
	shares []*lu.Shared // by reactor, each owned by its reactor
	mrs    map[*rdma.Device]*rdma.MR
	bound  []ipc.BufferBinding
}

// buffers are all of them, and the adapters that they are registered with.
type buffers struct {
	mu       sync.Mutex // held over registrations, which may take a while; never taken on a reactor
	list     map[uint32]*buffer
	adapters map[*adapter]bool
}

// drainTimeout is how long a buffer that is removed may be waited for, while commands that were under way end.
const drainTimeout = 5 * time.Second

// addBuffer maps a range of the file that came with the request and registers it.
func (p *Plane) addBuffer(ctx context.Context, r ipc.BufferAddRequest) (err error) {
	files := ipc.Files(ctx)
	page := int64(os.Getpagesize())
	switch {
	case len(files) != 1:
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("%d descriptors; one belongs to a buffer", len(files))}
	case r.Length <= 0 || r.Length%page != 0 || r.Offset < 0 || r.Offset%page != 0 || r.Offset+r.Length < 0:
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("range %d+%d is not made of whole pages", r.Offset, r.Length)}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(files[0].Fd()), &st); err != nil {
		return fmt.Errorf("buffer %d: fstat: %w", r.ID, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(files[0].Fd()), &fs); err != nil {
		return fmt.Errorf("buffer %d: fstatfs: %w", r.ID, err)
	}
	// On hugetlbfs the block is the page, and a mapping can only be undone in whole pages.
	if huge := int64(fs.Bsize); fs.Type == unix.HUGETLBFS_MAGIC && (r.Length%huge != 0 || r.Offset%huge != 0) {
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("range %d+%d is not made of whole pages of %d bytes", r.Offset, r.Length, huge)}
	}
	if r.Offset+r.Length > st.Size {
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("range %d+%d is beyond the file's end at %d", r.Offset, r.Length, st.Size)}
	}
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	if p.buffers.list[r.ID] != nil {
		return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("buffer %d is there already", r.ID)}
	}
	fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("buffer %d: dup: %w", r.ID, err)
	}
	b := &buffer{id: r.ID, label: r.Label, offset: r.Offset, file: os.NewFile(uintptr(fd), "buffer"), mrs: make(map[*rdma.Device]*rdma.MR)}
	mem, err := unix.Mmap(fd, r.Offset, int(r.Length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	switch {
	case err == nil:
	case fs.Type == unix.HUGETLBFS_MAGIC && errors.Is(err, unix.ENOMEM): // mapping reserves the pages
		b.file.Close()
		return &ipc.Error{Code: api.ErrLimitsExceeded, Text: fmt.Sprintf(
			"map %d bytes: %d huge pages of %d KiB are wanted and fewer are free; make more (vm.nr_hugepages)", r.Length, r.Length/int64(fs.Bsize), fs.Bsize>>10)}
	default:
		b.file.Close()
		return fmt.Errorf("buffer %d: map %d bytes: %w", r.ID, r.Length, err)
	}
	// Only memory that is kept out of children stays the same pages after a fork.
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	b.region = mempool.Adopt(mem)
	for range p.reactors {
		b.shares = append(b.shares, &lu.Shared{Mem: mem, Region: b.region.ID})
	}
	for a := range p.buffers.adapters {
		if err := b.register(a.domain.Device); err != nil {
			b.free(nil)
			return &ipc.Error{Code: api.ErrLimitsExceeded, Text: fmt.Sprintf("buffer %d: %v", r.ID, err)}
		}
	}
	for a := range p.buffers.adapters {
		a.reactor.Call(func() { a.domain.Lend(b.region.ID, b.mrs[a.domain.Device]) })
	}
	p.buffers.list[b.id] = b
	p.log.WithField("buffer", b.id).WithField("bytes", r.Length).Info("shared memory added")
	return nil
}

// register makes the one registration of the buffer with a device.
func (b *buffer) register(dev *rdma.Device) error {
	if b.mrs[dev] != nil {
		return nil
	}
	mr, err := dev.Register(b.region.Mem, rdma.LocalWrite|rdma.RemoteRead|rdma.RemoteWrite)
	if err != nil {
		return err
	}
	b.mrs[dev] = mr
	return nil
}

// free gives everything back. Nobody uses the buffer: adapters that knew it have forgotten it.
func (b *buffer) free(adapters map[*adapter]bool) {
	for a := range adapters {
		a.reactor.Call(func() { a.domain.Withdraw(b.region.ID) })
	}
	for _, mr := range b.mrs {
		mr.Close()
	}
	mem := b.region.Mem
	b.region.Drop()
	unix.Munmap(mem)
	b.file.Close()
}

// joinBuffers registers every buffer with an adapter that no connection uses yet, and those to come.
func (p *Plane) joinBuffers(a *adapter) error {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	for _, b := range p.buffers.list {
		if err := b.register(a.domain.Device); err != nil {
			p.forgetDevice(a.domain.Device)
			return fmt.Errorf("shared memory %d: %w", b.id, err)
		}
		a.domain.Lend(b.region.ID, b.mrs[a.domain.Device])
	}
	p.buffers.adapters[a] = true
	return nil
}

// leaveBuffers takes back what joinBuffers did. No connection uses the adapter and its reactor has forgotten it.
func (p *Plane) leaveBuffers(a *adapter) {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	delete(p.buffers.adapters, a)
	for _, b := range p.buffers.list {
		a.domain.Withdraw(b.region.ID)
	}
	p.forgetDevice(a.domain.Device)
}

// forgetDevice gives a device's registrations back unless an adapter uses them.
func (p *Plane) forgetDevice(dev *rdma.Device) {
	for a := range p.buffers.adapters {
		if a.domain.Device == dev {
			return
		}
	}
	for _, b := range p.buffers.list {
		if mr := b.mrs[dev]; mr != nil {
			mr.Close()
			delete(b.mrs, dev)
		}
	}
}

// removeBuffer lets go of a buffer that no device's driver knows any more.
func (p *Plane) removeBuffer(ctx context.Context, id uint32) error {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	b := p.buffers.list[id]
	switch {
	case b == nil:
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("buffer %d does not exist", id)}
	case len(b.bound) > 0:
		return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("buffer %d is bound to device %d", id, b.bound[0].UblkID)}
	}
	// UNREG_BUF has waited for the requests. Commands outlive them only when a device was deleted under them.
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	for n := p.inFlight(b); n > 0; n = p.inFlight(b) {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("buffer %d: the target may still reach it for %d commands", id, n)}
		}
	}
	delete(p.buffers.list, id)
	b.free(p.buffers.adapters)
	p.log.WithField("buffer", id).Info("shared memory removed")
	return nil
}

func (p *Plane) inFlight(b *buffer) int {
	n := 0
	for i, r := range p.reactors {
		r.Call(func() { n += b.shares[i].InFlight })
	}
	return n
}

// bindBuffer tells a device's queues what the driver means by an index; with on false, that it means nothing any more.
func (p *Plane) bindBuffer(r ipc.BufferBindRequest, on bool) error {
	if r.Index < 0 || r.Index > 65535 {
		return &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("buffer index %d; the driver counts from 0 to 65535", r.Index)}
	}
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	p.mu.Lock()
	d := p.devices[r.UblkID]
	p.mu.Unlock()
	b := p.buffers.list[r.ID]
	binding := ipc.BufferBinding{UblkID: r.UblkID, Index: r.Index}
	switch {
	case d == nil:
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("device %d is not served here", r.UblkID)}
	case b == nil:
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("buffer %d does not exist", r.ID)}
	case on && p.boundAs(binding) != nil:
		return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("index %d of device %d is bound already", r.Index, r.UblkID)}
	case !on && p.boundAs(binding) != b:
		return &ipc.Error{Code: api.ErrNotFound, Text: fmt.Sprintf("index %d of device %d is not buffer %d", r.Index, r.UblkID, r.ID)}
	}
	for _, q := range d.queues {
		q.reactor.Call(func() {
			if on {
				q.lu.Bind(r.Index, b.shares[q.reactor.index])
			} else {
				q.lu.Unbind(r.Index)
			}
		})
	}
	if on {
		b.bound = append(b.bound, binding)
	} else {
		b.bound = slices.DeleteFunc(b.bound, func(x ipc.BufferBinding) bool { return x == binding })
	}
	return nil
}

// boundAs finds the buffer of a binding.
func (p *Plane) boundAs(x ipc.BufferBinding) *buffer {
	for _, b := range p.buffers.list {
		if slices.Contains(b.bound, x) {
			return b
		}
	}
	return nil
}

// unbindDevice forgets the bindings of a device that has gone.
func (p *Plane) unbindDevice(id int) {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	for _, b := range p.buffers.list {
		b.bound = slices.DeleteFunc(b.bound, func(x ipc.BufferBinding) bool { return x.UblkID == id })
	}
}

// closeBuffers lets go of all of them, at the end.
func (p *Plane) closeBuffers() error {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	var err error
	for id, b := range p.buffers.list {
		if n := p.inFlight(b); n > 0 {
			err = errors.Join(err, fmt.Errorf("shared memory %d: %d commands under way", id, n))
			continue
		}
		delete(p.buffers.list, id)
		b.free(p.buffers.adapters)
	}
	return err
}

// snapshotBuffers tells what they are and have done.
func (p *Plane) snapshotBuffers() []ipc.Buffer {
	p.buffers.mu.Lock()
	defer p.buffers.mu.Unlock()
	out := []ipc.Buffer{}
	for _, b := range p.buffers.list {
		x := ipc.Buffer{
			ID: b.id, Offset: b.offset, Length: int64(len(b.region.Mem)), Label: b.label, Descriptor: int(b.file.Fd()),
			Bindings: append([]ipc.BufferBinding{}, b.bound...),
		}
		n := 0
		for i, r := range p.reactors {
			r.Call(func() {
				x.Requests += b.shares[i].Requests
				x.Bytes += b.shares[i].Bytes
				n += b.shares[i].InFlight
			})
		}
		x.InFlight = &n
		out = append(out, x)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}
