package lu

// Shared is memory that applications share with this process, as one reactor sees it: data that lies here moves between the application and
// the adapter without a copy. The reactor owns it; all queues of the reactor use the same one.
type Shared struct {
	Mem    []byte // the mapping, from the buffer's first byte on
	Region int    // by which the transport knows it

	Requests uint64 // that moved their data here
	Bytes    uint64
	InFlight int // requests whose command may still reach the memory
}

// Bind says that the driver calls a buffer by an index: the answer of UBLK_U_CMD_REG_BUF. Unknown indexes are served with a copy, so the
// order of registering and binding does not matter.
func (q *Queue) Bind(index int, m *Shared) {
	for len(q.shared) <= index {
		q.shared = append(q.shared, nil)
	}
	q.shared[index] = m
}

// Unbind forgets an index. Requests that are under way keep the memory: Shared.InFlight counts them.
func (q *Queue) Unbind(index int) {
	if index < len(q.shared) {
		q.shared[index] = nil
	}
}

// share finds the data of a request in memory that is shared with the application.
func (q *Queue) share(r *request) bool {
	index, off, ok := r.kernel.Shared()
	if !ok || index >= len(q.shared) || q.shared[index] == nil {
		return false
	}
	m := q.shared[index]
	if off > int64(len(m.Mem)-r.length) {
		return false // the driver knows the buffer better than we do: let it copy
	}
	m.InFlight++
	r.shared, r.data, r.region = m, m.Mem[off:off+int64(r.length)], m.Region
	return true
}

// unshare lets go of the memory again. moved is what the request carried.
func (r *request) unshare(moved int) {
	m := r.shared
	r.shared = nil
	m.InFlight--
	if moved > 0 {
		m.Requests++
		m.Bytes += uint64(moved)
	}
}
