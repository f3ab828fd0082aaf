package lu

import "iserd.org/iserd/internal/mempool"

// Memory hands out the I/O buffers of one reactor. It is shared by the queues of all devices of that reactor, so pinned memory follows the
// bytes in flight and not the number of devices: it begins with one pool and asks for more when a request finds none, up to what its owner
// grants. A request that finds none waits its turn, in order, and is served when a buffer comes back or a pool is added. The reactor owns it;
// there is no lock.
type Memory struct {
	pools   []*mempool.Pool
	grow    func() bool // asks for another pool; false if there will be none
	growing bool
	waiting struct{ head, tail *request }
	waits   uint64
}

// NewMemory serves buffers from pool, and from those that [Memory.Add] brings after grow was called. grow may be nil.
func NewMemory(pool *mempool.Pool, grow func() bool) *Memory {
	return &Memory{pools: []*mempool.Pool{pool}, grow: grow}
}

// Pools returns the pools, in the order in which they came.
func (m *Memory) Pools() []*mempool.Pool { return m.pools }

// Waits returns how often a request had to wait for a buffer.
func (m *Memory) Waits() uint64 { return m.waits }

// Add answers grow: with another pool, or with nil if it could not be had.
func (m *Memory) Add(pool *mempool.Pool) {
	m.growing = false
	if pool != nil {
		m.pools = append(m.pools, pool)
		m.serve()
	}
}

// find gives a buffer of n bytes if there is one.
func (m *Memory) find(n int) (mempool.Buffer, bool) {
	for _, p := range m.pools {
		if b, ok := p.Get(n); ok {
			return b, true
		}
	}
	if !m.growing && m.grow != nil {
		m.growing = m.grow()
	}
	return mempool.Buffer{}, false
}

// get gives r a buffer of n bytes, or queues r: then r is loaded later.
func (m *Memory) get(r *request, n int) bool {
	if m.waiting.head == nil {
		if b, ok := m.find(n); ok {
			r.take(b)
			return true
		}
	}
	m.waits++
	r.next = nil
	if m.waiting.tail == nil {
		m.waiting.head = r
	} else {
		m.waiting.tail.next = r
	}
	m.waiting.tail = r
	return false
}

// take makes b the memory of r.
func (r *request) take(b mempool.Buffer) {
	r.buffer, r.holds = b, true
	r.data, r.region = b.Bytes()[:r.length], b.Region().ID
}

// put takes the buffer of r back and serves those that wait.
func (m *Memory) put(r *request) {
	if !r.holds {
		return
	}
	for _, p := range m.pools {
		if p.Region() == r.buffer.Region() {
			p.Put(r.buffer)
			break
		}
	}
	r.buffer, r.holds = mempool.Buffer{}, false
	m.serve()
}

// serve loads requests that wait, as far as there are buffers.
func (m *Memory) serve() {
	for m.waiting.head != nil {
		w := m.waiting.head
		b, ok := m.find(w.length)
		if !ok {
			return
		}
		m.waiting.head = w.next
		if w.next == nil {
			m.waiting.tail = nil
		}
		w.next = nil
		w.take(b)
		w.queue.load(w)
	}
}
