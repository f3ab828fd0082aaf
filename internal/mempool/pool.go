package mempool

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Block sizes in bytes. Both are powers of two.
const (
	MinBlock = 4 << 10
	MaxBlock = 1 << 20

	minShift = 12
	orders   = 9       // block sizes 4 KiB << 0 to 4 KiB << 8
	hugePage = 2 << 20 // alignment that lets the kernel use huge pages
)

// ErrInUse says that buffers are still out.
var ErrInUse = errors.New("buffers are in use")

// Region is mapped memory that may be registered with an adapter as a whole. It lives until its pool is closed.
type Region struct {
	Mem []byte // MaxBlock-aligned, a multiple of MaxBlock long
	ID  int    // small and unique in the process while the region lives: an index for tables of registrations
}

// regions hands out the IDs.
var regions struct {
	sync.Mutex
	last int
	free []int // of regions that were dropped
}

// Adopt makes a region of memory that somebody else has mapped, mem staying his.
func Adopt(mem []byte) *Region {
	regions.Lock()
	defer regions.Unlock()
	if n := len(regions.free); n > 0 {
		id := regions.free[n-1]
		regions.free = regions.free[:n-1]
		return &Region{Mem: mem, ID: id}
	}
	regions.last++
	return &Region{Mem: mem, ID: regions.last}
}

// Drop ends an adopted region: its ID may be used again. No registration of it is left. The memory is not touched.
func (r *Region) Drop() {
	regions.Lock()
	defer regions.Unlock()
	regions.free = append(regions.free, r.ID)
	r.Mem, r.ID = nil, 0
}

// Buffer is a piece of a region. The zero Buffer is no buffer.
type Buffer struct {
	region *Region
	first  int32 // first MinBlock unit in the region
	order  int8  // block size is MinBlock << order
	n      int32 // bytes asked for
}

// Bytes is the buffer as Get was asked for it; its capacity is that of the block behind it.
func (b Buffer) Bytes() []byte {
	if b.region == nil {
		return nil
	}
	off := int(b.first) << minShift
	return b.region.Mem[off : off+int(b.n) : off+MinBlock<<b.order]
}

// Len is the number of bytes that Get was asked for.
func (b Buffer) Len() int { return int(b.n) }

// Addr is the address of the first byte, for work requests and submission entries.
func (b Buffer) Addr() uintptr {
	if b.region == nil {
		return 0
	}
	return uintptr(unsafe.Pointer(unsafe.SliceData(b.region.Mem))) + uintptr(b.first)<<minShift
}

// Region is the region that the buffer lies in, nil for the zero Buffer.
func (b Buffer) Region() *Region { return b.region }

// Valid reports whether b came from Get.
func (b Buffer) Valid() bool { return b.region != nil }

// Pool is an allocator over one region. Its methods belong to one goroutine.
//
// Bookkeeping is per unit of MinBlock: state of the unit that starts a block tells what the block is, and free blocks of one order form
// a doubly linked list through next and prev.
type Pool struct {
	region  Region
	mapping []byte // region.Mem and what was mapped to align it
	head    [orders]int32
	next    []int32
	prev    []int32
	state   []int8
	inUse   int

	// Blocks that were given back lately, by order, not merged with their buddies: the next request is mostly of the same size.
	recent  [orders][recentBlocks]int32
	nrecent [orders]int
}

const recentBlocks = 32

// States of a unit; a non-negative state is the order of a free block that starts here.
const (
	inside int8 = -1  // no block starts here
	taken  int8 = -16 // taken + order: a block that is handed out starts here
	kept   int8 = -32 // kept + order: a block in recent starts here
	none        = int32(-1)
)

// New maps a region of at least size bytes, rounded up to a multiple of MaxBlock, and asks the kernel for huge pages behind it. The
// memory is kept out of children (MADV_DONTFORK), because a copy-on-write after fork would part it from what an adapter has pinned.
//
// Errors: a wrapped errno of mmap(2).
func New(size int) (*Pool, error) {
	if size <= 0 || size > 1<<42 {
		return nil, fmt.Errorf("buffer pool of %d bytes: size out of range", size)
	}
	size = (size + MaxBlock - 1) &^ (MaxBlock - 1)
	m, err := unix.Mmap(-1, 0, size+hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map buffer pool of %d bytes: %w", size, err)
	}
	skip := int(-uintptr(unsafe.Pointer(&m[0])) & (hugePage - 1))
	units := size >> minShift
	p := &Pool{
		region:  *Adopt(m[skip : skip+size : skip+size]),
		mapping: m,
		next:    make([]int32, units),
		prev:    make([]int32, units),
		state:   make([]int8, units),
	}
	// Advice only: a kernel without it serves small pages, and a process that does not fork needs no DONTFORK.
	_ = unix.Madvise(p.region.Mem, unix.MADV_HUGEPAGE)
	_ = unix.Madvise(p.region.Mem, unix.MADV_DONTFORK)
	for i := range p.state {
		p.state[i] = inside
	}
	for i := range p.head {
		p.head[i] = none
	}
	for u := units - MaxBlock/MinBlock; u >= 0; u -= MaxBlock / MinBlock { // low addresses are handed out first
		p.push(int32(u), orders-1)
	}
	return p, nil
}

// orderOf is the smallest order whose block holds n bytes, 1 <= n <= MaxBlock.
func orderOf(n int) int {
	return max(bits.Len(uint(n-1))-minShift, 0)
}

// Get takes a buffer of n bytes, 1 to MaxBlock, aligned to the power of two that holds n. It is false when no block is free or n is
// out of range. The contents are whatever was there.
func (p *Pool) Get(n int) (Buffer, bool) {
	if n <= 0 || n > MaxBlock {
		return Buffer{}, false
	}
	want := orderOf(n)
	if k := p.nrecent[want]; k > 0 {
		u := p.recent[want][k-1]
		p.nrecent[want] = k - 1
		return p.take(u, want, n), true
	}
	b, ok := p.split(want, n)
	if !ok && p.merge() {
		b, ok = p.split(want, n)
	}
	return b, ok
}

// take hands a block out.
func (p *Pool) take(u int32, order, n int) Buffer {
	p.state[u] = taken + int8(order)
	p.inUse += MinBlock << order
	return Buffer{region: &p.region, first: u, order: int8(order), n: int32(n)}
}

// split takes a block off the lists, cut to size.
func (p *Pool) split(want, n int) (Buffer, bool) {
	have := want
	for have < orders && p.head[have] == none {
		have++
	}
	if have == orders {
		return Buffer{}, false
	}
	u := p.head[have]
	p.remove(u, have)
	for have > want { // keep the lower half, free the upper
		have--
		p.push(u+1<<have, have)
	}
	return p.take(u, want, n), true
}

// merge gives the recent blocks to the lists; false if there are none.
func (p *Pool) merge() bool {
	some := false
	for order := range p.recent {
		for ; p.nrecent[order] > 0; p.nrecent[order]-- {
			p.free(p.recent[order][p.nrecent[order]-1], order)
			some = true
		}
	}
	return some
}

// Put returns a buffer. Nobody may touch its memory afterwards, adapters included. Returning the zero Buffer does nothing; returning a
// buffer twice, or to another pool, panics: a bug here.
func (p *Pool) Put(b Buffer) {
	if b.region == nil {
		return
	}
	u, order := b.first, int(b.order)
	if b.region != &p.region || p.state[u] != taken+b.order {
		panic(fmt.Sprintf("mempool: buffer at unit %d, %d bytes, is not out of this pool", b.first, b.n))
	}
	p.inUse -= MinBlock << order
	if k := p.nrecent[order]; k < recentBlocks {
		p.recent[order][k] = u
		p.nrecent[order] = k + 1
		p.state[u] = kept + int8(order)
		return
	}
	p.free(u, order)
}

// free enters a block into the lists, merged with its buddies.
func (p *Pool) free(u int32, order int) {
	p.state[u] = inside
	for order < orders-1 {
		buddy := u ^ 1<<order
		if p.state[buddy] != int8(order) {
			break
		}
		p.remove(buddy, order)
		u &^= 1 << order
		order++
	}
	p.push(u, order)
}

// push enters the block at unit u into the list of free blocks of its order.
func (p *Pool) push(u int32, order int) {
	h := p.head[order]
	p.next[u], p.prev[u] = h, none
	if h != none {
		p.prev[h] = u
	}
	p.head[order] = u
	p.state[u] = int8(order)
}

// remove takes the free block at unit u out of its list.
func (p *Pool) remove(u int32, order int) {
	n, v := p.next[u], p.prev[u]
	if v == none {
		p.head[order] = n
	} else {
		p.next[v] = n
	}
	if n != none {
		p.prev[n] = v
	}
	p.state[u] = inside
}

// Region is the memory of the pool.
func (p *Pool) Region() *Region { return &p.region }

// Size is the length of the region in bytes.
func (p *Pool) Size() int { return len(p.region.Mem) }

// InUse is the number of bytes in blocks that are handed out.
func (p *Pool) InUse() int { return p.inUse }

// Close unmaps the region. Registrations of it must have ended before. Errors: ErrInUse, and the pool stays, while a buffer is out.
func (p *Pool) Close() error {
	if p.mapping == nil {
		return nil
	}
	if p.inUse != 0 {
		return fmt.Errorf("close buffer pool: %w: %d bytes", ErrInUse, p.inUse)
	}
	m := p.mapping
	p.mapping, p.region.Mem = nil, nil
	p.nrecent = [orders]int{}
	for i := range p.head {
		p.head[i] = none
	}
	if err := unix.Munmap(m); err != nil {
		return fmt.Errorf("close buffer pool: %w", err)
	}
	return nil
}
