package daemontest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/ublk"
)

// Blocks plays the block driver. It outlives daemons, as a kernel does; Close only counts.
type Blocks struct {
	plane *Plane

	mu      sync.Mutex
	devs    map[int]*ublk.DeviceInfo
	params  map[int]ublk.Params
	holders map[int][]string
	fail    map[string]error // by command, once
	calls   []string
	faults  []string
	set     ublk.Features
	regs    map[int]map[int]registration // by device and index
	stall   map[int]bool                 // devices whose REG_BUF and UNREG_BUF do not come through
	queue   map[int]map[string]string    // attributes
	hangs   map[int]bool                 // devices with requests that the target does not answer
	quiet   map[int]bool                 // devices that are quiesced, and whose server is still there
	cut     []int                        // devices whose server ended before it had answered everything
}

// registration is memory that a device knows.
type registration struct {
	dev, ino uint64
	off, n   int64
}

// NewBlocks makes a driver whose devices are served by p.
func NewBlocks(p *Plane) *Blocks {
	return &Blocks{plane: p, devs: make(map[int]*ublk.DeviceInfo), params: make(map[int]ublk.Params), holders: make(map[int][]string), fail: make(map[string]error),
		set: 0xfffff, regs: make(map[int]map[int]registration), stall: make(map[int]bool), queue: make(map[int]map[string]string),
		hangs: make(map[int]bool), quiet: make(map[int]bool),
	}
}

// NoQuiesce makes the driver one of a kernel before 6.16.
func (b *Blocks) NoQuiesce() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set &^= ublk.FeatureSharedMemory | ublk.FeatureQuiesce
}

// Old makes the driver one of a kernel before 7.1.
func (b *Blocks) Old() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set &^= ublk.FeatureSharedMemory
}

// Stall makes commands about memory of a device hang until their deadline, as requests that nobody answers do.
func (b *Blocks) Stall(id int, on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stall[id] = on
}

// Registered counts the buffers that a device knows.
func (b *Blocks) Registered(id int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.regs[id])
}

// Attribute is a queue attribute of a device.
func (b *Blocks) Attribute(id int, name string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queue[id][name]
}

// QueueAttribute fits daemon.Options.
func (b *Blocks) QueueAttribute(id int, name, value string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.devs[id]
	if d == nil || d.State != ublk.StateLive {
		return "", fmt.Errorf("ublk device %d: %w", id, ublk.ErrNotFound)
	}
	if b.queue[id] == nil {
		b.queue[id] = map[string]string{"nomerges": "0", "scheduler": "[mq-deadline] none"}
	}
	old := b.queue[id][name]
	if value != "" {
		b.queue[id][name] = value
	}
	return old, nil
}

// memoryCommand checks what REG_BUF and UNREG_BUF have in common. Preconditions: mu is held.
func (b *Blocks) memoryCommand(ctx context.Context, command string, id int) error {
	d, err := b.begin(ctx, command, id)
	if err != nil {
		return err
	}
	if !d.Features.Has(ublk.FeatureSharedMemory) {
		return fmt.Errorf("ublk device %d: %s: %w", id, command, ublk.ErrNotSupported)
	}
	if b.quiet[id] {
		b.faults = append(b.faults, fmt.Sprintf("%s of device %d, which is quiesced", command, id))
	}
	if d.State == ublk.StateLive {
		b.plane.mu.Lock()
		x := b.plane.devices[id]
		up := x != nil && b.plane.groups[x.Group] != nil && b.plane.groups[x.Group].State == "up"
		b.plane.mu.Unlock()
		if !up {
			b.faults = append(b.faults, fmt.Sprintf("%s of device %d while its session is not up", command, id))
		}
	} else if d.PID != -1 {
		b.faults = append(b.faults, fmt.Sprintf("%s of device %d, which is %v", command, id, d.State))
	}
	if b.stall[id] {
		b.mu.Unlock()
		<-ctx.Done()
		b.mu.Lock()
		return &ublk.CtrlError{Dev: id, Command: command, Err: ctx.Err(), Pending: true}
	}
	return nil
}

// RegisterBuffer gives the lowest free index.
func (b *Blocks) RegisterBuffer(ctx context.Context, id int, file *os.File, off, n int64) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.memoryCommand(ctx, "reg", id); err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return 0, err
	}
	r := registration{st.Dev, st.Ino, off, n}
	if n > ublk.MaxBuffer || off%4096 != 0 || n%4096 != 0 || off+n > st.Size {
		b.faults = append(b.faults, fmt.Sprintf("reg of device %d: %+v of %d bytes", id, r, st.Size))
	}
	for _, x := range b.regs[id] {
		if x.dev == r.dev && x.ino == r.ino && x.off < r.off+r.n && r.off < x.off+x.n {
			return 0, fmt.Errorf("ublk device %d: REG_BUF: %w", id, ublk.ErrExist)
		}
	}
	if b.regs[id] == nil {
		b.regs[id] = make(map[int]registration)
	}
	index := 0
	for ; ; index++ {
		if _, ok := b.regs[id][index]; !ok {
			break
		}
	}
	b.regs[id][index] = r
	return index, nil
}

// UnregisterBuffer forgets memory.
func (b *Blocks) UnregisterBuffer(ctx context.Context, id, index int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.memoryCommand(ctx, "unreg", id); err != nil {
		return err
	}
	if _, ok := b.regs[id][index]; !ok {
		return fmt.Errorf("ublk device %d: UNREG_BUF: %w", id, ublk.ErrNoBuffer)
	}
	delete(b.regs[id], index)
	return nil
}

// Fail makes the next command of a name fail ("start", "add", ...), or that for one device ("start 1").
func (b *Blocks) Fail(command string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail[command] = err
}

// Hold marks a device as used by the holders; without any it is free again.
func (b *Blocks) Hold(id int, holders ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holders[id] = holders
}

// Hang lets a device have requests in flight that the target does not answer: to stop it while the data plane has them would hang.
func (b *Blocks) Hang(id int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hangs[id] = true
}

// Foreign makes a device of another program.
func (b *Blocks) Foreign(id int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.devs[id] = &ublk.DeviceInfo{ID: id, State: ublk.StateLive, PID: 1}
}

// Params returns what was set for a device.
func (b *Blocks) Params(id int) ublk.Params {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.params[id]
}

// ServerDied makes the devices wait for the next server, or dead without recovery flags.
func (b *Blocks) ServerDied() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, d := range b.devs {
		b.plane.mu.Lock()
		answered := b.quiet[id] && b.plane.draining[id] == 0 && !b.hangs[id]
		b.plane.mu.Unlock()
		if d.State == ublk.StateLive && !answered {
			b.cut = append(b.cut, id)
		}
		delete(b.quiet, id)
		if (d.State == ublk.StateLive || d.State == ublk.StateQuiesced) && d.Features.Has(ublk.FeatureRecovery|ublk.FeatureRecoveryReissue) {
			d.State, d.PID = ublk.StateQuiesced, -1
			continue
		}
		d.State, d.PID = ublk.StateDead, -1
	}
}

// Cut lists the devices whose server ended before it had answered everything, in order.
func (b *Blocks) Cut() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	slices.Sort(b.cut)
	return slices.Clone(b.cut)
}

// Left lists the devices that exist.
func (b *Blocks) Left() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.devs))
}

// Calls lists the state-changing commands so far, as "start 0".
func (b *Blocks) Calls() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.calls)
}

// Faults lists calls in an order that would hurt.
func (b *Blocks) Faults() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.faults)
}

// Holders fits daemon.Options.
func (b *Blocks) Holders([]int) (map[int][]string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.holders), nil
}

// begin notes a call and returns the device. Preconditions: mu is held.
func (b *Blocks) begin(ctx context.Context, command string, id int) (*ublk.DeviceInfo, error) {
	b.calls = append(b.calls, fmt.Sprintf("%s %d", command, id))
	if _, ok := ctx.Deadline(); !ok {
		b.faults = append(b.faults, fmt.Sprintf("%s of device %d without a deadline", command, id))
	}
	for _, key := range []string{command, fmt.Sprintf("%s %d", command, id)} {
		if err := b.fail[key]; err != nil {
			delete(b.fail, key)
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d := b.devs[id]
	if d == nil && command != "add" {
		return nil, fmt.Errorf("ublk device %d: %w", id, ublk.ErrNotFound)
	}
	return d, nil
}

// Features has all of kernel 7.1, or of one before.
func (b *Blocks) Features(context.Context) (ublk.Features, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.set, nil
}

// Add makes a device with the lowest free number.
func (b *Blocks) Add(ctx context.Context, spec ublk.DeviceSpec) (ublk.DeviceInfo, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := 0
	for b.devs[id] != nil {
		id++
	}
	if _, err := b.begin(ctx, "add", id); err != nil {
		return ublk.DeviceInfo{}, err
	}
	d := &ublk.DeviceInfo{
		ID: id, Queues: spec.Queues, Depth: spec.Depth, MaxIOBytes: spec.MaxIOBytes, State: ublk.StateDead, PID: -1, Features: spec.Features, ServerTag: spec.ServerTag,
	}
	b.devs[id] = d
	return *d, nil
}

// SetParams checks as the driver does.
func (b *Blocks) SetParams(ctx context.Context, id int, p ublk.Params) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "set", id)
	if err != nil {
		return err
	}
	if err := p.Validate(); err != nil {
		return err
	}
	if p.MaxSectors > d.MaxIOBytes/512 {
		return unix.EINVAL
	}
	b.params[id] = p
	return nil
}

// Start wants the queues to be fetching.
func (b *Blocks) Start(ctx context.Context, id, pid int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "start", id)
	if err != nil {
		return err
	}
	b.plane.mu.Lock()
	attached, alive := b.plane.devices[id] != nil, b.plane.server != nil
	b.plane.mu.Unlock()
	if !alive {
		return unix.EINVAL
	}
	if !attached || b.params[id].Sectors == 0 {
		b.faults = append(b.faults, fmt.Sprintf("device %d started before it was attached and had parameters", id))
		return unix.EINVAL
	}
	d.State, d.PID = ublk.StateLive, pid
	return nil
}

// StartRecovery wants the device to be waiting, and the former server to be gone.
func (b *Blocks) StartRecovery(ctx context.Context, id int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "recover", id)
	if err != nil {
		return err
	}
	if d.State != ublk.StateQuiesced {
		return fmt.Errorf("ublk device %d: START_USER_RECOVERY: %w", id, ublk.ErrBusy)
	}
	return nil
}

// EndRecovery wants the queues to be fetching, and the session to be on its way.
func (b *Blocks) EndRecovery(ctx context.Context, id, pid int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "recovered", id)
	if err != nil {
		return err
	}
	b.plane.mu.Lock()
	x := b.plane.devices[id]
	ready, alive := x != nil && b.plane.groups[x.Group] != nil, b.plane.server != nil
	b.plane.mu.Unlock()
	if !alive {
		return unix.EBUSY // the kernel has taken the tags back
	}
	if !ready || d.State != ublk.StateQuiesced {
		b.faults = append(b.faults, fmt.Sprintf("recovery of device %d, which is %v, ended before it was attached", id, d.State))
		return unix.EBUSY
	}
	d.State, d.PID = ublk.StateLive, pid
	return nil
}

// Quiesce takes the idle tags from a live device's server, which answers what it has a little later, unless the target hangs.
func (b *Blocks) Quiesce(ctx context.Context, id int, timeout time.Duration) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "quiesce", id)
	switch {
	case err != nil:
		return err
	case !b.set.Has(ublk.FeatureQuiesce):
		return &ublk.CtrlError{Dev: id, Command: "QUIESCE_DEV", Err: ublk.ErrNotSupported, Feature: ublk.FeatureQuiesce}
	case d.State != ublk.StateLive || timeout == 0:
		b.faults = append(b.faults, fmt.Sprintf("quiesce of device %d, which is %v, within %v", id, d.State, timeout))
		return unix.EBUSY
	}
	b.quiet[id] = true
	b.plane.mu.Lock()
	defer b.plane.mu.Unlock()
	if x := b.plane.devices[id]; x != nil && !b.hangs[id] {
		b.plane.draining[id] = 3
	}
	return nil
}

func (b *Blocks) stopLocked(id int) {
	if b.quiet[id] {
		b.faults = append(b.faults, fmt.Sprintf("stop of device %d, which is quiesced: its users lose it", id))
	}
	b.devs[id].State = ublk.StateDead
	b.plane.mu.Lock()
	defer b.plane.mu.Unlock()
	b.plane.stopped[id] = true
	if d := b.plane.devices[id]; d != nil {
		d.State = "gone"
	}
}

// Stop takes the block device away.
func (b *Blocks) Stop(ctx context.Context, id int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "stop", id)
	if err != nil {
		return err
	}
	if hangs := b.hangs[id]; hangs && d.State == ublk.StateLive {
		b.plane.mu.Lock()
		answers := b.plane.aborted[id] && !b.plane.mute
		b.plane.mu.Unlock()
		if !answers {
			b.faults = append(b.faults, fmt.Sprintf("stop of device %d while requests are in flight that nobody answers", id))
			return context.DeadlineExceeded
		}
	}
	b.stopLocked(id)
	return nil
}

// TryStop is Stop unless somebody holds the device.
func (b *Blocks) TryStop(ctx context.Context, id int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, err := b.begin(ctx, "trystop", id); err != nil {
		return err
	}
	if len(b.holders[id]) > 0 {
		return fmt.Errorf("ublk device %d: %w", id, ublk.ErrBusy)
	}
	b.stopLocked(id)
	return nil
}

// DeleteAsync is Delete: nobody holds a descriptor here.
func (b *Blocks) DeleteAsync(ctx context.Context, id int) error { return b.Delete(ctx, id) }

// Delete would wait for ever while the data plane has the device open.
func (b *Blocks) Delete(ctx context.Context, id int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, err := b.begin(ctx, "delete", id); err != nil {
		return err
	}
	b.plane.mu.Lock()
	open := b.plane.devices[id] != nil && b.plane.server != nil
	b.plane.mu.Unlock()
	if open {
		b.faults = append(b.faults, fmt.Sprintf("device %d deleted while the data plane has it open", id))
		return context.DeadlineExceeded
	}
	delete(b.devs, id)
	delete(b.params, id)
	delete(b.holders, id)
	delete(b.hangs, id)
	delete(b.regs, id)
	delete(b.queue, id)
	return nil
}

// UpdateSize grows or shrinks a live device.
func (b *Blocks) UpdateSize(ctx context.Context, id int, size ublk.Sector) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.begin(ctx, "size", id)
	if err != nil {
		return err
	}
	p := b.params[id]
	if d.State != ublk.StateLive || size < p.Sectors {
		b.faults = append(b.faults, fmt.Sprintf("device %d, which is %v, resized from %d to %d sectors", id, d.State, p.Sectors, size))
		return unix.EINVAL
	}
	p.Sectors = size
	b.params[id] = p
	return nil
}

// Info reads a device.
func (b *Blocks) Info(_ context.Context, id int) (ublk.DeviceInfo, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d := b.devs[id]; d != nil {
		return *d, nil
	}
	return ublk.DeviceInfo{}, fmt.Errorf("ublk device %d: %w", id, ublk.ErrNotFound)
}

// Close does nothing: the driver stays.
func (b *Blocks) Close() error { return nil }
