package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

// This file is the registry of memory that programs share with the data plane: how it comes, how it goes, and what is said about it. What is done with each
// device is in registration.go, slices that are lent in arena.go.
//
//	 adding --buffer-add--> ready --REG_BUF, bind with each device--> ready
//	                          |
//	                          +--removing: UNREG_BUF, unbind with each device --buffer-remove--> gone
//
// A buffer that is neither ready nor gone has a file RUN/buffers/ID.unsettled, so that the next daemon removes what this one was about to add or to remove.

const (
	labelSchema = 1
	maxBuffers  = 1024           // of all users together, slices apart
	partLength  = ublk.MaxBuffer // longer memory is handed on in parts
)

// Tests shorten these.
var (
	watchEvery = 5 * time.Second // how often the mappings of adopted processes are looked at
	retryAfter = 5 * time.Second // a command to the driver that did not come through
)

// unitKey names a logical unit, whatever its device's number is.
type unitKey struct {
	Group string `json:"group"`
	LUN   uint64 `json:"lun"`
}

// label is what the data plane keeps of a buffer for the next daemon. Each part carries all of it.
type label struct {
	Schema  int       `json:"schema"`
	ID      uint32    `json:"id"`   // of the buffer, which is that of its first part
	Part    int       `json:"part"` // of Parts, from 0
	Parts   int       `json:"parts"`
	Kind    string    `json:"kind"`
	Offset  int64     `json:"offset"` // bytes into the file, of the whole buffer
	Length  int64     `json:"length"`
	Inode   inode     `json:"inode"`
	UID     uint32    `json:"uid"`
	Owner   string    `json:"owner,omitempty"` // unique name on Bus
	Bus     string    `json:"bus,omitempty"`   // id of the bus
	PID     int       `json:"pid,omitempty"`
	Start   uint64    `json:"start,omitempty"` // start time of PID
	Path    string    `json:"path,omitempty"`
	Only    []unitKey `json:"only,omitempty"` // empty: every device
	Created time.Time `json:"created"`
}

// bufferPart is what the data plane and the drivers know as one buffer.
type bufferPart struct {
	id             uint32
	offset, length int64 // bytes, into the file
}

// buffer is memory that a program shares. What is below the line is guarded by Service.mu.
type buffer struct {
	label
	file  memoryFile
	parts []bufferPart

	inPlane  bool // the data plane has all parts
	partly   bool // it has, or may have, some
	removing bool
	gone     chan struct{} // closed when nothing is left
	slice    sliceState    // of kind slice
}

// memory is the state of shared memory. Guarded by Service.mu.
type memory struct {
	next      uint32
	buffers   map[uint32]*buffer
	devices   map[*deviceMemory]struct{}
	processes map[int]*watched
	arenaWhy  string  // why there is no arena
	lend      keyLock // serialises lending
	busID     string  // of the bus that was joined last
}

// watched is an adopted process.
type watched struct {
	*process
	ended chan struct{} // closed when its watcher is to go
}

// Owner is a program on the bus.
type Owner struct {
	UID     uint32
	Name    string // its unique name
	Trusted bool   // root, or the daemon's own user
}

func newMemoryState() memory {
	return memory{
		next: 1, buffers: make(map[uint32]*buffer), devices: make(map[*deviceMemory]struct{}), processes: make(map[int]*watched),
	}
}

func (b *buffer) covers(part uint32) bool { return part >= b.ID && part < b.ID+uint32(len(b.parts)) }

// serves tells whether the buffer is meant for a device.
func (b *buffer) serves(u unitKey) bool { return len(b.Only) == 0 || slices.Contains(b.Only, u) }

// idle tells whether nobody does I/O in the buffer.
func (b *buffer) idle() bool { return b.Kind == api.BufferSlice && b.slice.state == api.BufferFree }

// split makes the parts of a buffer. Each but the last has a length that is a multiple of every size of page.
func (b *buffer) split() {
	b.parts = nil
	for off := int64(0); off < b.Length; off += partLength {
		b.parts = append(b.parts, bufferPart{b.ID + uint32(len(b.parts)), b.Offset + off, min(partLength, b.Length-off)})
	}
	b.Parts = len(b.parts)
}

// bufferOfLocked finds the buffer that a part belongs to. Preconditions: s.mu is held.
func (s *Service) bufferOfLocked(part uint32) *buffer {
	for _, b := range s.mem.buffers {
		if b.covers(part) {
			return b
		}
	}
	return nil
}

func (s *Service) bufferDir() string { return filepath.Join(s.opt.RunDir, "buffers") }

func (s *Service) unsettledPath(id uint32) string {
	return filepath.Join(s.bufferDir(), strconv.FormatUint(uint64(id), 10)+".unsettled")
}

// unsettle notes that a buffer is neither here nor gone.
func (s *Service) unsettle(id uint32) error {
	if err := os.WriteFile(s.unsettledPath(id), nil, 0o600); err != nil {
		return api.Errorf(api.ErrDatabase, "%w", err)
	}
	return nil
}

func (s *Service) settleBuffer(id uint32) { s.removeFile(s.unsettledPath(id)) }

func (s *Service) removeFile(path string) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.WithError(err).Warn("a file stays behind")
	}
}

// sharedMemoryError tells why the driver has no shared memory, nil if it has.
func (s *Service) sharedMemoryError(ctx context.Context) error {
	f, err := s.features(ctx)
	if err != nil {
		return blockError(err)
	}
	if !f.Has(ublk.FeatureSharedMemory) {
		return api.Errorf(api.ErrNotSupported, "%s", noSharedMemory())
	}
	return nil
}

// noSharedMemory says that the kernel is too old.
func noSharedMemory() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail
	release, _, _ := strings.Cut(unix.ByteSliceToString(u.Release[:]), "-")
	return fmt.Sprintf("kernel %s has no shared memory for block devices (UBLK_F_SHMEM_ZC, 7.1 or later)", release)
}

// admitLocked tells whether there is room for more memory. Preconditions: s.mu is held.
func (s *Service) admitLocked(b *buffer, o Owner) error {
	var total, user int64
	n := 0
	for _, x := range s.mem.buffers {
		mine := x.UID == o.UID
		if x.Kind == api.BufferSlice {
			mine = x.slice.state == api.BufferLent && x.slice.UID == o.UID
		} else {
			total += x.Length
			n++
		}
		if mine {
			user += x.Length
		}
	}
	c := s.Config()
	limit, userLimit := int64(c.SharedLimit)<<20, int64(c.SharedUserLimit)<<20
	switch {
	case b.Kind != api.BufferSlice && total+b.Length > limit:
		return api.Errorf(api.ErrLimitsExceeded, "%d MiB more would be over the limit of all users: %d of %d MiB are registered (shared_limit)", b.Length>>20, total>>20, limit>>20)
	case !o.Trusted && user+b.Length > userLimit:
		return api.Errorf(api.ErrLimitsExceeded, "%d MiB more would be over the limit of user %d: %d of %d MiB are in use (shared_user_limit)",
			b.Length>>20, o.UID, user>>20, userLimit>>20)
	case b.Kind != api.BufferSlice && n >= maxBuffers:
		return api.Errorf(api.ErrLimitsExceeded, "%d buffers are registered; no more are possible", n)
	}
	for _, x := range s.mem.buffers {
		if x.Inode == b.Inode && x.Offset < b.Offset+b.Length && b.Offset < x.Offset+x.Length {
			return api.Errorf(api.ErrInvalidArgs, "the memory is registered already, as buffer %d", x.ID)
		}
	}
	return nil
}

// units turns paths of devices into units.
func (s *Service) units(paths []string) ([]unitKey, error) {
	var out []unitKey
	s.mu.Lock()
	defer s.mu.Unlock()
next:
	for _, p := range paths {
		for _, ss := range s.sessions {
			for _, d := range ss.devices {
				if d.path() == p || strings.TrimPrefix(d.path(), "/dev/") == p {
					if d.memory != nil && d.memory.why != "" {
						return nil, api.Errorf(api.ErrNotSupported, "%s: %s", d.path(), d.memory.why)
					}
					out = append(out, unitKey{d.Group, d.Unit.LUN})
					continue next
				}
			}
		}
		return nil, api.Errorf(api.ErrNotFound, "no device %q; see: iserctl device list", p)
	}
	return out, nil
}

// AddPath registers a file on tmpfs or hugetlbfs for the administrator. It stays registered until it is removed.
func (s *Service) AddPath(ctx context.Context, r api.BufferAddRequest) (api.BuffersReply, error) {
	if err := s.sharedMemoryError(ctx); err != nil {
		return api.BuffersReply{}, err
	}
	only, err := s.units(r.Devices)
	if err != nil {
		return api.BuffersReply{}, err
	}
	m, err := openMemory(r.Path)
	if err != nil {
		return api.BuffersReply{}, err
	}
	const most = 1 << 62
	length, err := m.span(int64(min(r.Offset, most)), int64(min(r.Length, most)))
	if err != nil {
		_ = m.Close()
		return api.BuffersReply{}, api.Errorf(api.ErrInvalidArgs, "%s: %w", r.Path, err)
	}
	b := &buffer{file: m, label: label{Kind: api.BufferPath, Offset: int64(r.Offset), Length: length, Path: r.Path, Only: only}}
	if err := s.addBuffer(ctx, b, Owner{Trusted: true}); err != nil {
		return api.BuffersReply{}, err
	}
	return s.buffersReply(ctx, b), nil
}

// AddClient registers memory that a program on the bus brings, for as long as the program is there. The file stays the caller's.
func (s *Service) AddClient(ctx context.Context, o Owner, file *os.File, devices []string) (api.Buffer, error) {
	if err := s.sharedMemoryError(ctx); err != nil {
		return api.Buffer{}, err
	}
	only, err := s.units(devices)
	if err != nil {
		return api.Buffer{}, err
	}
	m, err := checkClient(file)
	if err != nil {
		return api.Buffer{}, err
	}
	if m.size == 0 || m.size%m.page != 0 {
		return api.Buffer{}, api.Errorf(api.ErrInvalidArgs, "the memfd has %d bytes, expected a multiple of its page size, %d", m.size, m.page)
	}
	err = control(file, func(fd int) error {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			m.File = os.NewFile(uintptr(n), "memory of a program")
		}
		return err
	})
	if err != nil {
		return api.Buffer{}, api.Errorf(api.ErrInternal, "keep the memfd: %w", err)
	}
	b := &buffer{file: m, label: label{Kind: api.BufferMemfd, Length: m.size, UID: o.UID, Owner: o.Name, Bus: s.currentBus(), Only: only}}
	if err := s.addBuffer(ctx, b, o); err != nil {
		return api.Buffer{}, err
	}
	return s.buffersReply(ctx, b).Buffers[0], nil
}

// currentBus is the id of the bus that was joined last.
func (s *Service) currentBus() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mem.busID
}

// Adopt registers the shared memory of a process that knows nothing of it, until the process ends.
func (s *Service) Adopt(ctx context.Context, r api.BufferAdoptRequest) (api.BuffersReply, error) {
	var reply api.BuffersReply
	if err := s.sharedMemoryError(ctx); err != nil {
		return reply, err
	}
	only, err := s.units(r.Devices)
	if err != nil {
		return reply, err
	}
	minimum := int64(min(r.Minimum, 1<<62))
	if minimum == 0 {
		minimum = minimumMapping
	}
	if r.PID == os.Getpid() || r.PID == s.plane.status().PID {
		return reply, api.Errorf(api.ErrInvalidArgs, "process %d is the daemon itself", r.PID)
	}
	p, err := openProcess(r.PID, 0)
	if err != nil {
		return reply, err
	}
	ranges, notes, err := sharedMemory(r.PID, minimum)
	if err == nil && len(ranges) == 0 {
		text := ""
		if len(notes) > 0 {
			text = ": " + strings.Join(notes, "; ")
		}
		err = api.Errorf(api.ErrNotSupported, "process %d has no shared memory of at least %d bytes that can be registered%s", r.PID, minimum, text)
	}
	if err != nil {
		p.close()
		return reply, err
	}
	var added []*buffer
	for i, c := range ranges {
		b := &buffer{file: c.memoryFile, label: label{
			Kind: api.BufferProcess, Offset: c.offset, Length: c.length, UID: p.uid, PID: p.pid, Start: p.start, Path: c.name, Only: only,
		}}
		if err = s.addBuffer(ctx, b, Owner{UID: p.uid, Trusted: true}); err != nil {
			closeRanges(ranges[i+1:])
			break
		}
		added = append(added, b)
	}
	if err != nil { // all or nothing
		p.close()
		for _, b := range added {
			s.removing(b)
		}
		return reply, api.Wrap(err, api.ErrInternal, "adopt process %d", r.PID)
	}
	s.watch(p)
	reply = s.buffersReply(ctx, added...)
	reply.Notes = append(reply.Notes, notes...)
	return reply, nil
}

// addBuffer gives memory to the data plane and registers it with the devices that are up. It takes over the file. A failure leaves nothing behind.
func (s *Service) addBuffer(ctx context.Context, b *buffer, o Owner) error {
	b.Schema, b.Inode, b.Created, b.gone = labelSchema, b.file.inode, time.Now().UTC(), make(chan struct{})
	pc, err := s.plane.get(ctx)
	if err == nil {
		s.mu.Lock()
		if err = s.admitLocked(b, o); err == nil {
			b.ID = s.mem.next
			b.split()
			s.mem.next += uint32(len(b.parts))
			s.mem.buffers[b.ID] = b
		}
		s.mu.Unlock()
	}
	if err != nil {
		_ = b.file.Close()
		return err
	}
	if err = s.unsettle(b.ID); err == nil {
		err = s.give(ctx, pc, b)
	}
	if err == nil {
		err = s.awaitBuffer(ctx, b)
	}
	if err != nil {
		s.removing(b)
		uctx, cancel := s.undo(ctx)
		defer cancel()
		select { // so that the caller may try again at once
		case <-b.gone:
		case <-uctx.Done():
		case <-s.life.Done(): // the next daemon goes on
		}
		return err
	}
	s.settleBuffer(b.ID)
	s.log.WithFields(map[string]any{"buffer": b.ID, "kind": b.Kind}).Infof("registered %d KiB of shared memory", b.Length>>10)
	return nil
}

// give hands a buffer to the data plane, and has it registered with the devices.
func (s *Service) give(ctx context.Context, pc planeConn, b *buffer) error {
	s.mu.Lock()
	b.partly = true
	s.mu.Unlock()
	for i, p := range b.parts {
		l := b.label
		l.Part = i
		text, err := json.Marshal(l)
		if err != nil {
			return api.Errorf(api.ErrInternal, "encode label: %w", err)
		}
		err = s.run(ctx, func(ctx context.Context) error {
			return pc.callFiles(ctx, ipc.MethodBufferAdd, ipc.BufferAddRequest{ID: p.id, Offset: p.offset, Length: p.length, Label: text}, nil, []*os.File{b.file.File})
		})
		if err != nil {
			return api.Wrap(err, api.ErrInternal, "share memory")
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b.inPlane = true
	s.changedLocked()
	s.kickAllLocked()
	return nil
}

// awaitBuffer waits until a new buffer is registered with each device that is up. The error is the first that a driver gave.
func (s *Service) awaitBuffer(ctx context.Context, b *buffer) error {
	ctx, cancel := context.WithTimeout(ctx, 2*s.Config().ControlTimeout)
	defer cancel()
	changes, done := s.Watch()
	defer done()
	for {
		s.mu.Lock()
		open := 0
		var failed error
		for dm := range s.mem.devices {
			if dm.why != "" || dm.phase != phaseLive || !b.serves(dm.unit) {
				continue
			}
			ready := s.notReadyLocked(dm) == ""
			for _, p := range b.parts {
				if err := dm.failed[p.id]; err != nil && failed == nil {
					failed = api.Wrap(err, api.ErrInternal, "register with %s", devicePath(dm.ublkID))
				}
				if _, ok := dm.index[p.id]; !ok && ready && dm.failed[p.id] == nil {
					open++
				}
			}
		}
		removing := b.removing
		s.mu.Unlock()
		switch {
		case failed != nil:
			return failed
		case removing:
			return api.Errorf(api.ErrCancelled, "the memory was removed again meanwhile")
		case open == 0:
			return nil
		}
		select {
		case <-changes:
		case <-ctx.Done():
			if err := context.Cause(ctx); errors.Is(err, context.Canceled) {
				return api.Wrap(err, api.ErrCancelled, "register memory")
			}
			return nil // a driver is slow: it goes on in the background, and the list tells
		}
	}
}

// RemoveBuffer ends the registration of a buffer, or takes a slice back. may tells whether the caller is allowed to; nil allows all.
func (s *Service) RemoveBuffer(ctx context.Context, id uint32, may func(owner string) error) (api.BuffersReply, error) {
	s.mu.Lock()
	b := s.mem.buffers[id]
	lent := b != nil && b.Kind == api.BufferSlice && b.slice.state == api.BufferLent
	owner := ""
	if b != nil {
		owner = b.Owner
	}
	if lent {
		owner = b.slice.Owner
	}
	s.mu.Unlock()
	switch {
	case b == nil:
		return api.BuffersReply{}, api.Errorf(api.ErrNotFound, "no buffer %d; see: iserctl buffer list", id)
	case b.Kind == api.BufferSlice && !lent:
		return api.BuffersReply{}, api.Errorf(api.ErrInvalidArgs, "buffer %d is a slice of the arena that nobody has; shared_arena sets how many there are", id)
	}
	if may != nil {
		if err := may(owner); err != nil {
			return api.BuffersReply{}, err
		}
	}
	if lent {
		s.takeBack(b)
		return s.buffersReply(ctx, b), nil
	}
	s.removing(b)
	s.awaitGone(ctx, b)
	return s.buffersReply(ctx, b), nil
}

// RemoveProcess ends the registration of all memory of an adopted process.
func (s *Service) RemoveProcess(ctx context.Context, pid int) (api.BuffersReply, error) {
	list := s.buffersWhere(func(b *buffer) bool { return b.Kind == api.BufferProcess && b.PID == pid })
	if len(list) == 0 {
		return api.BuffersReply{}, api.Errorf(api.ErrNotFound, "no process %d was adopted; see: iserctl buffer list", pid)
	}
	for _, b := range list {
		s.removing(b)
	}
	s.awaitGone(ctx, list...)
	return s.buffersReply(ctx, list...), nil
}

func (s *Service) buffersWhere(f func(*buffer) bool) []*buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*buffer
	for _, id := range slices.Sorted(maps.Keys(s.mem.buffers)) {
		if b := s.mem.buffers[id]; f(b) {
			out = append(out, b)
		}
	}
	return out
}

// awaitGone waits until buffers are gone, or wait only for devices that are not up.
func (s *Service) awaitGone(ctx context.Context, list ...*buffer) {
	ctx, cancel := context.WithTimeout(ctx, 2*s.Config().ControlTimeout)
	defer cancel()
	changes, done := s.Watch()
	defer done()
	for {
		open := false
		s.mu.Lock()
		for _, b := range list {
			select {
			case <-b.gone:
			default:
				held, ready := false, false
				for dm := range s.mem.devices {
					if dm.has(b) {
						held, ready = true, ready || s.notReadyLocked(dm) == ""
					}
				}
				open = open || !held || ready
			}
		}
		s.mu.Unlock()
		if !open {
			return
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// removing starts the end of a buffer. It is over when b.gone is closed.
func (s *Service) removing(b *buffer) {
	s.mu.Lock()
	if b.removing {
		s.mu.Unlock()
		return
	}
	b.removing = true
	s.changedLocked()
	s.mu.Unlock()
	if err := s.unsettle(b.ID); err != nil {
		s.log.WithError(err).Error("the removal of a buffer would not go on after a restart")
	}
	s.mu.Lock()
	s.kickAllLocked()
	s.mu.Unlock()
	s.job(func(ctx context.Context) { s.runRemoval(ctx, b) })
}

// runRemoval waits until no device has the buffer any more, then takes it from the data plane.
func (s *Service) runRemoval(ctx context.Context, b *buffer) {
	changes, done := s.Watch()
	defer done()
	for {
		s.mu.Lock()
		held := false
		for dm := range s.mem.devices {
			held = held || dm.has(b)
		}
		partly := b.partly
		s.mu.Unlock()
		if !held && (!partly || s.takeFromPlane(ctx, b)) {
			break
		}
		select {
		case <-changes:
		case <-time.After(retryAfter):
		case <-ctx.Done():
			return
		}
	}
	_ = b.file.Close()
	s.forgetSlice(b)
	s.settleBuffer(b.ID)
	s.mu.Lock()
	delete(s.mem.buffers, b.ID)
	for dm := range s.mem.devices {
		for _, p := range b.parts {
			delete(dm.failed, p.id)
		}
	}
	last := true
	for _, x := range s.mem.buffers {
		last = last && (b.PID == 0 || x.PID != b.PID)
	}
	if w := s.mem.processes[b.PID]; last && w != nil {
		delete(s.mem.processes, b.PID)
		close(w.ended)
		w.close()
	}
	close(b.gone)
	s.changedLocked()
	s.mu.Unlock()
	s.log.WithFields(map[string]any{"buffer": b.ID, "kind": b.Kind}).Info("shared memory is no longer registered")
}

// takeFromPlane has the data plane let go of a buffer. It tells whether that is done.
func (s *Service) takeFromPlane(ctx context.Context, b *buffer) bool {
	pc, err := s.plane.now()
	if err != nil {
		return false // it comes back, or its end makes partly false
	}
	for _, p := range b.parts {
		err := s.run(ctx, func(ctx context.Context) error {
			return pc.call(ctx, ipc.MethodBufferRemove, ipc.BufferRemoveRequest{ID: p.id}, nil)
		})
		if err != nil && !api.Is(err, api.ErrNotFound) {
			if ctx.Err() == nil && pc.client.Err() == nil {
				s.log.WithError(err).WithField("buffer", b.ID).Error("the data plane does not let go of shared memory; trying again")
			}
			return false
		}
	}
	return true
}

// watch removes an adopted process's buffers when it ends, executes another program, or unmaps them.
func (s *Service) watch(p *process) {
	w := &watched{process: p, ended: make(chan struct{})}
	s.mu.Lock()
	if s.mem.processes[p.pid] != nil || s.life.Err() != nil { // adopted before: that one watches
		s.mu.Unlock()
		p.close()
		return
	}
	s.mem.processes[p.pid] = w
	s.mu.Unlock()
	end := make(chan struct{})
	s.job(func(context.Context) { defer close(end); p.wait() })
	s.job(func(ctx context.Context) {
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			over := false
			select {
			case <-ctx.Done():
				p.close() // ends wait
				return
			case <-w.ended:
				return
			case <-end:
				over = true
			case <-tick.C:
			}
			maps := p.mapped()
			for _, b := range s.buffersWhere(func(b *buffer) bool { return b.Kind == api.BufferProcess && b.PID == p.pid && !b.removing }) {
				if over || !has(maps, b.Inode, b.Offset, b.Length) {
					s.log.WithFields(map[string]any{"buffer": b.ID, "pid": p.pid}).Info("the process has ended or no longer has the memory")
					s.removing(b)
				}
			}
			if over {
				return
			}
		}
	})
}

// BusJoined tells that the daemon is on a bus: what belongs to programs that are not there any more is taken back. alive tells whether a unique name
// is there.
func (s *Service) BusJoined(id string, alive func(name string) bool) {
	s.mu.Lock()
	s.mem.busID = id
	s.mu.Unlock()
	gone := make(map[string]bool)
	for _, b := range s.buffersWhere(func(b *buffer) bool { return b.holder() != "" }) {
		name := b.holder()
		if b.bus() != id || !alive(name) {
			gone[name] = true
		}
	}
	for name := range gone {
		s.OwnerGone(name)
	}
}

// holder is the bus name whose end is the end of b, or of its being lent.
func (b *buffer) holder() string {
	if b.Kind == api.BufferSlice {
		return b.slice.Owner
	}
	return b.Owner
}

func (b *buffer) bus() string {
	if b.Kind == api.BufferSlice {
		return b.slice.Bus
	}
	return b.Bus
}

// Owners lists the unique names that have memory.
func (s *Service) Owners() []string {
	var out []string
	for _, b := range s.buffersWhere(func(b *buffer) bool { return b.holder() != "" && !b.removing }) {
		out = append(out, b.holder())
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// OwnerGone takes back what a program on the bus had.
func (s *Service) OwnerGone(name string) {
	for _, b := range s.buffersWhere(func(b *buffer) bool { return b.holder() == name && !b.removing }) {
		s.log.WithFields(map[string]any{"buffer": b.ID, "owner": name}).Info("the program has left the bus; its shared memory is taken back")
		if b.Kind == api.BufferSlice {
			s.takeBack(b)
		} else {
			s.removing(b)
		}
	}
}

// Buffers lists shared memory, by id.
func (s *Service) Buffers(ctx context.Context) api.BuffersReply {
	return s.buffersReply(ctx, s.buffersWhere(func(*buffer) bool { return true })...)
}

// BufferInventory lists shared memory without counters. It asks nobody.
func (s *Service) BufferInventory() []api.Buffer {
	list := s.buffersWhere(func(*buffer) bool { return true })
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]api.Buffer, 0, len(list))
	for _, b := range list {
		out = append(out, s.showBufferLocked(b, nil))
	}
	return out
}

func (s *Service) buffersReply(ctx context.Context, list ...*buffer) api.BuffersReply {
	hits := make(map[uint32]ipc.Buffer)
	if st, err := s.plane.state(ctx); err == nil {
		for _, b := range st.Buffers {
			hits[b.ID] = b
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := api.BuffersReply{Version: api.Version, Buffers: []api.Buffer{}, Arena: s.arenaLocked(), Notes: []string{}}
	for _, b := range list {
		r.Buffers = append(r.Buffers, s.showBufferLocked(b, hits))
	}
	return r
}

// showBufferLocked gives the public form. Preconditions: s.mu is held.
func (s *Service) showBufferLocked(b *buffer, hits map[uint32]ipc.Buffer) api.Buffer {
	out := api.Buffer{
		ID: b.ID, Kind: b.Kind, State: api.BufferReady, Length: uint64(b.Length), PageSize: uint64(b.file.page), UID: b.UID, Owner: b.Owner, PID: b.PID,
		Path: b.Path, Since: b.Created, Devices: []api.BufferDevice{},
	}
	for dm := range s.mem.devices {
		if dm.why != "" || dm.phase == phaseGone || !b.serves(dm.unit) && !dm.has(b) {
			continue
		}
		d := api.BufferDevice{UblkID: dm.ublkID, Path: devicePath(dm.ublkID), State: api.BufferRegistered}
		for _, p := range b.parts {
			if err := dm.failed[p.id]; err != nil {
				d.State, d.Reason = api.BufferFailed, oneLine(err)
				break
			}
			if _, ok := dm.index[p.id]; !ok {
				d.State, d.Reason = api.BufferPending, s.notReadyLocked(dm)
				if d.Reason == "" {
					d.Reason = "being registered"
					if dm.late != nil {
						d.Reason = oneLine(dm.late)
					}
				}
			}
		}
		if b.removing {
			if !dm.has(b) {
				continue
			}
			d.State, d.Reason = api.BufferPending, s.notReadyLocked(dm)
		}
		if d.State != api.BufferRegistered {
			out.State = api.BufferWaiting
		}
		out.Devices = append(out.Devices, d)
	}
	slices.SortFunc(out.Devices, func(a, b api.BufferDevice) int { return a.UblkID - b.UblkID })
	if !b.inPlane {
		out.State = api.BufferWaiting
	}
	if b.Kind == api.BufferSlice {
		out.State, out.Owner, out.UID = b.slice.state, b.slice.Owner, b.slice.UID
		if b.slice.state != api.BufferFree {
			out.Since = b.slice.Since
		}
	}
	if b.removing {
		out.State = api.BufferRemoving
	}
	for _, p := range b.parts {
		out.Requests += hits[p.id].Requests
		out.Bytes += hits[p.id].Bytes
	}
	return out
}

// adoptBuffers takes over what the data plane has: buffers that this daemon does not know come with the label that another one gave them.
func (s *Service) adoptBuffers(pc planeConn, st ipc.State) {
	found := make(map[uint32]*buffer) // by id of the buffer
	var strange []uint32
	s.mu.Lock()
	for _, b := range s.mem.buffers {
		b.inPlane, b.partly = false, false
	}
	s.mu.Unlock()
	here := make(map[uint32]int) // parts of each buffer
	for _, x := range st.Buffers {
		s.mu.Lock()
		if b := s.bufferOfLocked(x.ID); b != nil {
			here[b.ID]++
			s.mu.Unlock()
			continue
		}
		s.mu.Unlock()
		var l label
		if err := json.Unmarshal(x.Label, &l); err != nil || l.Schema != labelSchema || l.ID == 0 || l.Part < 0 || x.ID != l.ID+uint32(l.Part) || l.Length <= 0 {
			strange = append(strange, x.ID)
			continue
		}
		here[l.ID]++
		if found[l.ID] != nil {
			continue
		}
		b := &buffer{label: l, gone: make(chan struct{})}
		b.split()
		f, err := fetchFile(pc.hello.PID, x.Descriptor)
		if err == nil {
			b.file, err = statMemory(f)
		}
		if err == nil && b.file.inode != l.Inode {
			err = errors.New("it is another file now")
		}
		if err != nil {
			s.log.WithError(err).WithField("buffer", l.ID).Error("shared memory cannot be taken over and is removed")
			b.removing = true
		}
		found[l.ID] = b
	}
	for _, id := range strange { // of another version, or damaged: it is not known what it is, so it goes
		s.log.WithField("buffer", id).Error("the data plane has memory that this daemon knows nothing of; it is removed")
		b := &buffer{label: label{ID: id, Kind: "unknown"}, gone: make(chan struct{}), removing: true}
		b.parts = []bufferPart{{id: id}}
		here[id], found[id] = 1, b
	}
	processes := make(map[int]*process)
	var removing []*buffer
	for _, id := range slices.Sorted(maps.Keys(found)) {
		b := found[id]
		_, err := os.Stat(s.unsettledPath(id))
		gone := b.removing || err == nil || here[id] < len(b.parts)
		if b.Kind == api.BufferProcess && !gone {
			p := processes[b.PID]
			if p == nil {
				if p, err = openProcess(b.PID, b.Start); err == nil {
					processes[b.PID] = p
				}
			}
			gone = p == nil
		}
		b.removing = false
		if b.Kind == api.BufferSlice {
			s.adoptSlice(b)
		}
		s.mu.Lock()
		s.mem.buffers[id] = b
		s.mem.next = max(s.mem.next, id+uint32(len(b.parts)))
		s.mu.Unlock()
		if gone {
			removing = append(removing, b)
		}
	}
	s.mu.Lock()
	for id, n := range here {
		b := s.mem.buffers[id]
		b.inPlane, b.partly = n == len(b.parts), true
		if !b.inPlane && !b.removing && !slices.Contains(removing, b) {
			removing = append(removing, b)
		}
	}
	s.changedLocked()
	s.mu.Unlock()
	for _, b := range removing {
		s.removing(b)
	}
	for _, p := range processes {
		s.watch(p)
	}
	if n := len(found); n > 0 {
		s.log.Infof("adopted %d buffers of shared memory", n)
	}
}

// adoptMemory makes the state of a device's registrations from what the data plane says.
func (s *Service) adoptMemory(old *deviceMemory, d ipc.Device, f ublk.Features, pc planeConn, st ipc.State) *deviceMemory {
	index := bindings(st, d.UblkID)
	_, noted := s.readNote(d.UblkID)
	s.mu.Lock()
	defer s.mu.Unlock()
	dm := old
	if dm == nil || dm.phase == phaseGone || dm.unit != (unitKey{d.Group, d.LUN}) {
		dm = s.newDeviceMemoryLocked(d.UblkID, unitKey{d.Group, d.LUN}, f, pc, phaseLive)
		dm.adopted = true
	}
	dm.pc, dm.index, dm.pause = pc, index, time.Time{}
	dm.noted = dm.noted || noted
	return dm
}

// restoreBuffers gives a data plane what it does not have, and completes the arena. Buffers whose owner went meanwhile are on their way out already.
func (s *Service) restoreBuffers(ctx context.Context, pc planeConn) {
	for _, b := range s.buffersWhere(func(b *buffer) bool { return !b.inPlane && !b.removing }) {
		if err := s.give(ctx, pc, b); err != nil {
			if ctx.Err() != nil {
				return
			}
			s.log.WithError(err).WithField("buffer", b.ID).Error("shared memory cannot be given to the new data plane and is no longer registered")
			s.removing(b)
		}
	}
	s.setUpArena(ctx, pc)
	s.sweepBufferFiles()
}

// closeFiles lets go of the descriptors. The data plane keeps its own, which the next daemon gets.
func (s *Service) closeFiles() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.mem.buffers {
		if b.file.File != nil {
			_ = b.file.Close()
		}
		if b.slice.handed != nil {
			_ = b.slice.handed.Close()
		}
	}
	for _, w := range s.mem.processes {
		w.close()
	}
}
