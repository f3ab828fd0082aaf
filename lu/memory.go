package lu

import "iserd.org/iserd/internal/mempool"

// Memory hands out the I/O buffers of one reactor. It is shared by the queues of all devices of that reactor, so pinned memory follows the
// bytes in flight and not the number of devices. A request that finds none waits its turn, in order, and is served when a buffer
// comes back. The reactor owns it; there is no lock.
type Memory struct {
	pool    *mempool.Pool
	waiting struct{ head, tail *request }
	waits   uint64
}

// NewMemory serves buffers from pool.
func NewMemory(pool *mempool.Pool) *Memory { return &Memory{pool: pool} }

// Waits returns how often a request had to wait for a buffer.
func (m *Memory) Waits() uint64 { return m.waits }

// get gives r a buffer of n bytes, or queues r: then r is loaded later.
func (m *Memory) get(r *request, n int) bool {
	if m.waiting.head == nil {
		if b, ok := m.pool.Get(n); ok {
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
	m.pool.Put(r.buffer)
	r.buffer, r.holds = mempool.Buffer{}, false
	for m.waiting.head != nil {
		w := m.waiting.head
		b, ok := m.pool.Get(w.length)
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
