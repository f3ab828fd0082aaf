package testtarget

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
)

// A Unit is a logical unit in memory or in a file. Its exported fields are set before the target starts. One unit may be served by several
// targets, as the paths to it.
type Unit struct {
	BlockSize      int    // bytes; 0 means 512
	PhysicalBlocks int    // logical blocks in a physical one, as a power of two: 3 with blocks of 512 bytes is 512e
	Serial         string // unit serial number; "" means one made of the LUN
	ReadOnly       bool
	Type           byte // peripheral device type; 0 is a disk, and only that can do more than answer INQUIRY and TEST UNIT READY

	// Thin makes the unit forget blocks on UNMAP and WRITE SAME, and count those that it holds. Space bounds what it can hold, in bytes; 0
	// means no bound.
	Thin  bool
	Space int64

	// NoWriteSame and NoUnmap take the commands away that a thin unit has, and their limits.
	NoWriteSame, NoUnmap bool

	// Fault is asked before each command; a status other than 0 is sent instead of executing it, with sense if not nil. It runs on
	// the connection's goroutine.
	Fault func(cdb []byte) (status byte, sense []byte)

	mu         sync.Mutex // guards what follows
	store      store
	held       held
	targets    map[*Target]bool
	attentions map[nexus][][2]byte
	faults     []fault
	groups     map[uint16]byte // asymmetric access state by target port group; nil: the unit knows none
	stopped    bool            // by START STOP UNIT
	swp        bool            // software write protect, by MODE SELECT
	reserved   *nexus          // RESERVE(6)
	pr         reservation
	resets     int
}

type fault struct {
	count  int // how many commands more; negative: for ever
	opcode int // -1: any
	status byte
	sense  []byte
}

// NewUnit makes a unit of size bytes in memory, which is taken up as it is written.
func NewUnit(size int) *Unit { return newUnit(&memory{chunks: map[int64][]byte{}, n: int64(size)}) }

// NewFileUnit makes a unit of a file, which it makes or cuts to size bytes; 0 means the size that the file has.
func NewFileUnit(path string, size int64) (*Unit, error) {
	s, err := openFile(path, size)
	if err != nil {
		return nil, fmt.Errorf("unit: %w", err)
	}
	return newUnit(s), nil
}

func newUnit(s store) *Unit {
	return &Unit{store: s, held: held{}, targets: map[*Target]bool{}, attentions: map[nexus][][2]byte{}}
}

// Close closes the file of a unit that has one.
func (u *Unit) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.store.close()
}

// serve tells a unit that t serves it.
func (u *Unit) serve(t *Target, lun int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.BlockSize == 0 {
		u.BlockSize = 512
	}
	if u.Serial == "" {
		u.Serial = fmt.Sprintf("iserd-test-%04d", lun)
	}
	u.targets[t] = true
}

// ports are the targets that serve the unit.
func (u *Unit) ports() []*Target {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Collect(maps.Keys(u.targets))
}

// Size is the size in bytes.
func (u *Unit) Size() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.store.size()
}

// Resize changes the size in bytes and tells nobody; content is kept as far as it fits. [Unit.Grow] tells.
func (u *Unit) Resize(size int) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.store.resize(int64(size))
}

// Grow changes the size in bytes and raises the unit attention CAPACITY DATA HAS CHANGED. It shrinks as well.
func (u *Unit) Grow(size int64) error {
	u.mu.Lock()
	err := u.store.resize(size)
	u.mu.Unlock()
	if err == nil {
		u.Attention(0x2a, 0x09)
	}
	return err
}

// SetSerial makes another unit of this one: serial number and designators of VPD page 83 change. Nobody is told; INQUIRY DATA HAS CHANGED
// is Attention(0x3f, 0x03).
func (u *Unit) SetSerial(serial string) {
	u.mu.Lock()
	u.Serial = serial
	u.mu.Unlock()
}

// ReadAt copies content out; it implements io.ReaderAt for a range inside the unit.
func (u *Unit) ReadAt(b []byte, off int64) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if off < 0 || off+int64(len(b)) > u.store.size() {
		return 0, errors.New("range is not inside the unit")
	}
	return len(b), u.store.read(b, off)
}

// WriteAt copies content in; it implements io.WriterAt for a range inside the unit.
func (u *Unit) WriteAt(b []byte, off int64) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if off < 0 || off+int64(len(b)) > u.store.size() {
		return 0, errors.New("range is not inside the unit")
	}
	bs := int64(max(u.BlockSize, 512))
	if u.Thin {
		u.held.set(uint64(off/bs), uint64((off+int64(len(b))+bs-1)/bs-off/bs))
	}
	return len(b), u.store.write(b, off)
}

func (u *Unit) blocks() uint64 { return uint64(u.store.size() / int64(u.BlockSize)) }

// Held is how many bytes of a thin unit hold data.
func (u *Unit) Held() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return int64(u.held.count()) * int64(u.BlockSize)
}

// Resets is how often the unit was reset by task management.
func (u *Unit) Resets() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.resets
}

// FaultNext answers the next count commands (negative: all) with a status and sense data, without executing them; opcode -1 means any
// command. Several calls add up; faults that are used up are forgotten.
func (u *Unit) FaultNext(count, opcode int, status byte, sense []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.faults = append(u.faults, fault{count, opcode, status, sense})
}

// ClearFaults forgets what FaultNext has said.
func (u *Unit) ClearFaults() {
	u.mu.Lock()
	u.faults = nil
	u.mu.Unlock()
}

// takeFault tells what FaultNext has to say about a command.
func (u *Unit) takeFault(cdb []byte) (fault, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range u.faults {
		f := u.faults[i]
		if f.opcode >= 0 && byte(f.opcode) != cdb[0] {
			continue
		}
		if u.faults[i].count--; u.faults[i].count == 0 {
			u.faults = append(u.faults[:i:i], u.faults[i+1:]...)
		}
		return f, true
	}
	return fault{}, false
}

// Attention raises a unit attention condition for every session that is logged in.
func (u *Unit) Attention(asc, ascq byte) { u.attention(nexus{}, nexus{}, asc, ascq) }

// attention raises a unit attention condition for one nexus, or for all that are logged in but one; the zero nexus names none.
func (u *Unit) attention(only, but nexus, asc, ascq byte) {
	u.mu.Lock()
	var targets []*Target
	for t := range u.targets {
		targets = append(targets, t)
	}
	u.mu.Unlock()
	var who []nexus
	if only != (nexus{}) {
		who = append(who, only)
	} else {
		for _, t := range targets {
			who = append(who, t.nexuses()...)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, n := range who {
		if n != but && !slices.Contains(u.attentions[n], [2]byte{asc, ascq}) {
			u.attentions[n] = append(u.attentions[n], [2]byte{asc, ascq})
		}
	}
}

// takeAttention returns the oldest unit attention condition of a nexus, and clears it.
func (u *Unit) takeAttention(n nexus) (asc, ascq byte, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.attentions[n]
	if len(list) == 0 {
		return 0, 0, false
	}
	u.attentions[n] = list[1:]
	return list[0][0], list[0][1], true
}

// clearAttention clears one kind of condition for a nexus.
func (u *Unit) clearAttention(n nexus, asc, ascq byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var rest [][2]byte
	for _, a := range u.attentions[n] {
		if a != [2]byte{asc, ascq} {
			rest = append(rest, a)
		}
	}
	u.attentions[n] = rest
}

// reset is a logical unit reset: reservations by RESERVE(6) end, persistent ones stay (SAM-5).
func (u *Unit) reset() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reserved, u.stopped = nil, false
	u.resets++
}

// lost ends what a nexus holds when its session has ended.
func (u *Unit) lost(n nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reserved != nil && *u.reserved == n {
		u.reserved = nil
	}
	delete(u.attentions, n)
}

// Asymmetric access states (SPC-4).
const (
	ActiveOptimized    = 0x0
	ActiveNonOptimized = 0x1
	Standby            = 0x2
	Unavailable        = 0x3
	Offline            = 0xe
	Transitioning      = 0xf
)

// SetALUA gives the unit asymmetric access, and sets the state through a target port group ([Config.PortGroup]). A change raises
// ASYMMETRIC ACCESS STATE CHANGED.
func (u *Unit) SetALUA(group uint16, state byte) {
	u.mu.Lock()
	if u.groups == nil {
		u.groups = map[uint16]byte{}
	}
	old, known := u.groups[group]
	u.groups[group] = state
	u.mu.Unlock()
	if known && old != state {
		u.Attention(0x2a, 0x06)
	}
}

// held is the set of the blocks of a thin unit that hold data, in pieces of 1024 blocks.
type held map[uint64]*[16]uint64

func (h held) each(lba, n uint64, f func(piece uint64, word, bit uint)) {
	for ; n > 0; lba, n = lba+1, n-1 {
		f(lba>>10, uint(lba>>6&15), uint(lba&63))
	}
}

func (h held) set(lba, n uint64) {
	h.each(lba, n, func(piece uint64, word, bit uint) {
		p := h[piece]
		if p == nil {
			p = new([16]uint64)
			h[piece] = p
		}
		p[word] |= 1 << bit
	})
}

func (h held) clear(lba, n uint64) {
	h.each(lba, n, func(piece uint64, word, bit uint) {
		if p := h[piece]; p != nil {
			p[word] &^= 1 << bit
		}
	})
}

func (h held) has(lba uint64) bool {
	p := h[lba>>10]
	return p != nil && p[lba>>6&15]>>(lba&63)&1 != 0
}

// missing counts the blocks of a range that hold nothing.
func (h held) missing(lba, n uint64) (count uint64) {
	for end := lba + n; lba < end; lba++ {
		if !h.has(lba) {
			count++
		}
	}
	return count
}

func (h held) count() (n uint64) {
	for _, p := range h {
		for _, w := range p {
			for ; w != 0; w &= w - 1 {
				n++
			}
		}
	}
	return n
}
