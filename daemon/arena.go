package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

// This file lends memory that is registered with every device before it starts, so that no request ever waits for a registration.
//
//	free --Borrow--> lent --returned, or the borrower leaves the bus--> returned --nobody holds it, nothing in flight, zeroed--> free
//
// A slice goes to nobody else while its former borrower still has it open or mapped. What the kernel cannot tell is who has pinned its pages otherwise, such as
// buffers registered with an io_uring: lending is for programs that the polkit rule trusts that far.

// tidyPause bounds the time between attempts to make a returned slice free.
const (
	firstTidyPause = 50 * time.Millisecond
	lastTidyPause  = 5 * time.Second
)

// sliceState is how a slice of the arena stands. It is kept in RUN/buffers/slice-ID.json while the slice is not as new.
type sliceState struct {
	Owner string    `json:"owner"` // unique name on Bus, "" when nobody has it
	Bus   string    `json:"bus"`
	UID   uint32    `json:"uid"`   // of the last borrower
	Mixed bool      `json:"mixed"` // only UID may have it again: the kernel does not tell whether a former borrower still has it
	Since time.Time `json:"since"`

	state  string   // api.BufferFree, BufferLent or BufferReturned
	handed *os.File // what the borrower got: a description of its own
}

func (s *Service) slicePath(id uint32) string {
	return filepath.Join(s.bufferDir(), fmt.Sprintf("slice-%d.json", id))
}

func (s *Service) writeSlice(id uint32, st sliceState) error {
	b, err := json.Marshal(struct {
		sliceState
		State string `json:"state"`
	}{st, st.state})
	if err == nil {
		tmp := s.slicePath(id) + ".tmp"
		if err = os.WriteFile(tmp, b, 0o600); err == nil {
			err = os.Rename(tmp, s.slicePath(id))
		}
	}
	if err != nil {
		return api.Errorf(api.ErrDatabase, "note slice: %w", err)
	}
	return nil
}

// readSlice reads how a slice stood. One that was being tidied is returned.
func (s *Service) readSlice(id uint32) sliceState {
	var x struct {
		sliceState
		State string `json:"state"`
	}
	b, err := os.ReadFile(s.slicePath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return sliceState{state: api.BufferFree}
	}
	if err == nil {
		err = json.Unmarshal(b, &x)
	}
	if err != nil {
		s.log.WithError(err).Error("who has a slice is not known; it is not lent until it is nobody's")
		x.sliceState, x.State = sliceState{}, api.BufferReturned
	}
	x.state = x.State
	return x.sliceState
}

// forgetSlice removes what is kept of a slice.
func (s *Service) forgetSlice(b *buffer) {
	if b.Kind != api.BufferSlice {
		return
	}
	s.mu.Lock()
	handed := b.slice.handed
	b.slice.handed = nil
	s.mu.Unlock()
	if handed != nil {
		_ = handed.Close()
	}
	s.removeFile(s.slicePath(b.ID))
}

// arenaLocked counts the slices. Preconditions: s.mu is held.
func (s *Service) arenaLocked() api.Arena {
	a := api.Arena{SliceSize: uint64(s.Config().SharedSlice) << 20, Reason: s.mem.arenaWhy}
	for _, b := range s.mem.buffers {
		if b.Kind != api.BufferSlice || b.removing {
			continue
		}
		a.Slices++
		switch b.slice.state {
		case api.BufferFree:
			a.Free++
		case api.BufferLent:
			a.Lent++
		default:
			a.Returned++
		}
	}
	return a
}

// setUpArena makes the slices that are configured and missing, and removes those that are too many or of another size, lent ones once they are back.
func (s *Service) setUpArena(ctx context.Context, pc planeConn) {
	why := ""
	size := int64(s.Config().SharedSlice) << 20
	want := s.Config().SharedArena / s.Config().SharedSlice
	if want == 0 {
		why = "no memory is configured for it (shared_arena)"
	}
	if err := s.sharedMemoryError(ctx); err != nil {
		want, why = 0, oneLine(err)
	}
	have := 0
	for _, b := range s.buffersWhere(func(b *buffer) bool { return b.Kind == api.BufferSlice && !b.removing }) {
		if have < want && b.Length == size {
			have++
			continue
		}
		s.mu.Lock()
		free := b.slice.state == api.BufferFree
		s.mu.Unlock()
		if free {
			s.removing(b)
		}
	}
	for ; have < want; have++ {
		if err := s.newSlice(ctx, pc, size); err != nil {
			s.log.WithError(err).Error("memory to lend cannot be had")
			why = oneLine(err)
			break
		}
	}
	s.mu.Lock()
	s.mem.arenaWhy = why
	s.changedLocked()
	s.mu.Unlock()
}

// newSlice adds a slice to the arena.
func (s *Service) newSlice(ctx context.Context, pc planeConn, size int64) error {
	m, err := newMemory("iserd arena", size)
	if err != nil {
		return api.Errorf(api.ErrLimitsExceeded, "%w", err)
	}
	b := &buffer{file: m, gone: make(chan struct{}), slice: sliceState{state: api.BufferFree}, label: label{
		Schema: labelSchema, Kind: api.BufferSlice, Length: size, Inode: m.inode, Created: time.Now().UTC(),
	}}
	s.mu.Lock()
	b.ID = s.mem.next
	b.split()
	s.mem.next += uint32(len(b.parts))
	s.mem.buffers[b.ID] = b
	s.mu.Unlock()
	if err := s.unsettle(b.ID); err != nil {
		s.removing(b)
		return err
	}
	if err := s.give(ctx, pc, b); err != nil {
		s.removing(b)
		return err
	}
	s.settleBuffer(b.ID)
	return nil
}

// Borrow lends a slice. The descriptor stays the service's: it is valid until the slice is returned, or the owner leaves the bus.
func (s *Service) Borrow(ctx context.Context, o Owner) (api.Buffer, *os.File, error) {
	none := func(err error) (api.Buffer, *os.File, error) { return api.Buffer{}, nil, err }
	if err := s.sharedMemoryError(ctx); err != nil {
		return none(err)
	}
	pc, err := s.plane.get(ctx)
	if err != nil {
		return none(err)
	}
	unlock, err := s.mem.lend.lock(ctx, "arena", "another slice")
	if err != nil {
		return none(api.Wrap(err, api.ErrTimeout, "borrow"))
	}
	defer unlock()
	s.mu.Lock()
	arena := s.arenaLocked()
	probe := &buffer{label: label{Kind: api.BufferSlice, Length: int64(arena.SliceSize), Inode: inode{Dev: ^uint64(0)}}}
	err = s.admitLocked(probe, o)
	s.mu.Unlock()
	if err != nil {
		return none(err)
	}
	if arena.Slices == 0 {
		return none(api.Errorf(api.ErrNotSupported, "there is no memory to lend: %s", arena.Reason))
	}
	b := s.freeSlice(ctx, pc, o)
	if b == nil {
		return none(api.Errorf(api.ErrLimitsExceeded, "all %d slices of %d MiB are lent or still in use by those who returned them; "+
			"shared_arena sets how many there are, and own memory can be registered", arena.Slices, arena.SliceSize>>20))
	}
	st := sliceState{Owner: o.Name, Bus: s.currentBus(), UID: o.UID, Since: time.Now().UTC(), state: api.BufferLent}
	if st.handed, err = b.file.reopen(); err != nil {
		return none(api.Errorf(api.ErrInternal, "open slice: %w", err))
	}
	if err := s.writeSlice(b.ID, st); err != nil {
		_ = st.handed.Close()
		return none(err)
	}
	s.mu.Lock()
	b.slice = st
	s.changedLocked()
	s.kickAllLocked()
	s.mu.Unlock()
	s.log.WithFields(map[string]any{"buffer": b.ID, "owner": o.Name, "uid": o.UID}).Info("slice lent")
	return s.buffersReply(ctx, b).Buffers[0], st.handed, nil
}

// freeSlice finds a slice that o may have. Preconditions: the arena's lock is held.
func (s *Service) freeSlice(ctx context.Context, pc planeConn, o Owner) *buffer {
	for _, tidied := range []bool{false, true} {
		var mixed *buffer
		for _, b := range s.buffersWhere(func(b *buffer) bool { return b.Kind == api.BufferSlice && !b.removing && b.inPlane }) {
			if tidied {
				s.tidy(ctx, pc, b)
			}
			s.mu.Lock()
			st := b.slice
			s.mu.Unlock()
			switch {
			case st.state != api.BufferFree:
			case !st.Mixed || st.UID == o.UID:
				return b
			default:
				mixed = b
			}
		}
		if mixed == nil {
			continue
		}
		// Another user had it, and nobody can tell whether that user has it still: it is replaced by a new one.
		s.removing(mixed)
		if err := s.newSlice(ctx, pc, mixed.Length); err != nil {
			s.log.WithError(err).Error("a slice cannot be replaced")
			continue
		}
		fresh := s.buffersWhere(func(b *buffer) bool {
			return b.Kind == api.BufferSlice && !b.removing && b.inPlane && b.slice.state == api.BufferFree && !b.slice.Mixed
		})
		if len(fresh) > 0 {
			_ = s.awaitBuffer(ctx, fresh[0]) // what is not registered yet is copied
			return fresh[0]
		}
	}
	return nil
}

// takeBack ends the lending of a slice.
func (s *Service) takeBack(b *buffer) {
	s.mu.Lock()
	if b.slice.state != api.BufferLent {
		s.mu.Unlock()
		return
	}
	st := b.slice
	handed := st.handed
	st.state, st.Owner, st.handed, st.Since = api.BufferReturned, "", nil, time.Now().UTC()
	b.slice = st
	s.changedLocked()
	s.kickAllLocked()
	s.mu.Unlock()
	if handed != nil {
		_ = handed.Close()
	}
	if err := s.writeSlice(b.ID, st); err != nil {
		s.log.WithError(err).Error("a slice is still marked as lent")
	}
	s.job(func(ctx context.Context) { s.runTidy(ctx, b) })
}

// runTidy tries until a returned slice is free.
func (s *Service) runTidy(ctx context.Context, b *buffer) {
	pause := firstTidyPause
	for {
		unlock, err := s.mem.lend.lock(ctx, "arena", "another slice")
		if err != nil {
			return
		}
		if pc, err := s.plane.now(); err == nil {
			s.tidy(ctx, pc, b)
		}
		unlock()
		s.mu.Lock()
		over := b.slice.state != api.BufferReturned || b.removing
		s.mu.Unlock()
		if over || !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, lastTidyPause)
	}
}

// tidy makes a returned slice free, if nobody holds it and nothing is in flight in it. Preconditions: the arena's lock is held.
func (s *Service) tidy(ctx context.Context, pc planeConn, b *buffer) {
	s.mu.Lock()
	st, removing := b.slice, b.removing
	s.mu.Unlock()
	if st.state != api.BufferReturned || removing {
		return
	}
	// First who holds it, then what is in flight: nothing new can begin in between.
	held, sure := b.file.heldByOthers(os.Getpid(), pc.hello.PID)
	if held || !s.quiet(ctx, pc, b) {
		return
	}
	log := s.log.WithField("buffer", b.ID)
	if !b.file.whole() {
		log.Warn("a borrower has taken pages out of a slice; it is replaced")
		s.replace(ctx, pc, b)
		return
	}
	if err := b.file.scrub(); err != nil {
		log.WithError(err).Error("a slice cannot be overwritten; it is replaced")
		s.replace(ctx, pc, b)
		return
	}
	st.state, st.Mixed = api.BufferFree, !sure
	var err error
	if sure {
		s.removeFile(s.slicePath(b.ID))
	} else {
		err = s.writeSlice(b.ID, st)
	}
	if err != nil {
		log.WithError(err).Error("a slice stays returned")
		return
	}
	s.mu.Lock()
	b.slice = st
	s.changedLocked()
	s.kickAllLocked()
	s.mu.Unlock()
	log.Debug("slice is free again")
	if s.excess(b) {
		s.removing(b)
	}
}

func (s *Service) replace(ctx context.Context, pc planeConn, b *buffer) {
	s.removing(b)
	if s.excess(b) {
		return
	}
	if err := s.newSlice(ctx, pc, b.Length); err != nil {
		s.log.WithError(err).Error("a slice cannot be replaced")
	}
}

// excess tells whether the configuration asks for fewer slices, or others.
func (s *Service) excess(b *buffer) bool {
	n := len(s.buffersWhere(func(x *buffer) bool { return x.Kind == api.BufferSlice && (x == b || !x.removing) }))
	return b.Length != int64(s.Config().SharedSlice)<<20 || n > s.Config().SharedArena/s.Config().SharedSlice
}

// quiet tells whether no request is out that moves data in a slice. A data plane that does not count by buffer is quiet when the devices are.
func (s *Service) quiet(ctx context.Context, pc planeConn, b *buffer) bool {
	var st ipc.State
	if err := s.run(ctx, func(ctx context.Context) error { return pc.call(ctx, ipc.MethodState, ipc.Empty{}, &st) }); err != nil {
		return false
	}
	busy := make(map[int]bool)
	for _, d := range st.Devices {
		for _, q := range d.Queues {
			busy[d.UblkID] = busy[d.UblkID] || q.InFlight > 0
		}
	}
	for _, x := range st.Buffers {
		if !b.covers(x.ID) {
			continue
		}
		if x.InFlight != nil {
			if *x.InFlight > 0 {
				return false
			}
			continue
		}
		for _, y := range x.Bindings {
			if busy[y.UblkID] {
				return false
			}
		}
	}
	return true
}

// adoptSlice restores how a slice stood.
func (s *Service) adoptSlice(b *buffer) {
	b.slice = s.readSlice(b.ID)
	if b.slice.state == api.BufferReturned {
		s.job(func(ctx context.Context) { s.runTidy(ctx, b) })
	}
}

// sweepBufferFiles removes files of buffers and devices that are no more. Preconditions: what the data plane has is adopted.
func (s *Service) sweepBufferFiles() {
	files, _ := filepath.Glob(filepath.Join(s.bufferDir(), "*"))
	for _, f := range files {
		var id uint32
		var dev int
		name := filepath.Base(f)
		keep := false
		s.mu.Lock()
		switch {
		case scan(name, "slice-%d.json", &id), scan(name, "%d.unsettled", &id):
			keep = s.mem.buffers[id] != nil
		case scan(name, "device-%d", &dev):
			for dm := range s.mem.devices {
				keep = keep || dm.ublkID == dev
			}
		}
		s.mu.Unlock()
		if !keep {
			s.removeFile(f)
		}
	}
}

// scan reads the one number of a name of exactly that form.
func scan[T uint32 | int](name, form string, n *T) bool {
	_, err := fmt.Sscanf(name, form, n)
	return err == nil && name == fmt.Sprintf(form, *n)
}
