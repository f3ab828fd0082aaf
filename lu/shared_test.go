package lu

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// sharedRegion is the number of a region that no pool of these tests has.
const sharedRegion = 1 << 20

// Which requests go without a copy, and where their data then lies.
func TestShared(t *testing.T) {
	for _, c := range []struct {
		name  string
		index int // of the request's buffer, from 1
		off   int64
		copy  bool
	}{
		{"at the start", 3, 0, false},
		{"sub-page offset", 3, 512, false},
		{"to the last byte", 3, 1<<20 - 8192, false},
		{"beyond the end", 3, 1<<20 - 8191, true},
		{"far beyond the end", 3, 1<<32 - 512, true},
		{"index that was unbound", 2, 0, true},
		{"index never bound", 9, 0, true},
		{"not in shared memory", 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &disk{content: make([]byte, 1<<20), shift: 9}
			q, pool, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
			m, other := &Shared{Mem: make([]byte, 1<<20), Region: sharedRegion}, &Shared{Mem: make([]byte, 1<<20), Region: sharedRegion + 1}
			q.Bind(2, m)
			q.Bind(1, other)
			q.Unbind(1)
			q.Unbind(5)
			data := bytes.Repeat([]byte{0x5a}, 8192)
			pages := make([]byte, 8192)
			copy(pages, data)
			if !c.copy {
				copy(m.Mem[c.off:], data)
				clear(pages) // must not be looked at
			}
			w := &block{op: ublk.OpWrite, sector: 16, data: pages, shared: c.index, offset: c.off}
			q.submit(w)
			if !bytes.Equal(d.content[16*512:][:8192], data) {
				t.Error("the target got other data")
			}
			r := &block{op: ublk.OpRead, sector: 16, data: make([]byte, 8192), shared: c.index, offset: c.off}
			clear(m.Mem)
			q.submit(r)
			got, copies := r.data, 1
			if !c.copy {
				got, copies = m.Mem[c.off:][:8192], 0
			}
			if !bytes.Equal(got, data) || w.copies != copies || r.copies != copies {
				t.Errorf("data right: %v, %d and %d copies, want %d", bytes.Equal(got, data), w.copies, r.copies, copies)
			}
			shared := uint64(2 * (1 - copies))
			if n := q.Counters(); n.SharedRequests != shared || n.SharedBytes != shared*8192 || m.Requests != shared || m.Bytes != shared*8192 || m.InFlight != 0 {
				t.Errorf("counters %+v, buffer %d requests %d bytes %d in flight", n, m.Requests, m.Bytes, m.InFlight)
			}
			for i, task := range d.tasks {
				if region := task.Region; (region == sharedRegion) == c.copy {
					t.Errorf("task %d is in region %d", i, region)
				}
			}
			if pool.InUse() != 0 || other.Requests != 0 {
				t.Errorf("%d bytes of buffers in use, %d requests of another buffer", pool.InUse(), other.Requests)
			}
		})
	}
}

// A request in shared memory fails as a whole or succeeds as a whole: the driver takes a short result for success.
func TestSharedIsNeverShort(t *testing.T) {
	d := &disk{content: make([]byte, 1<<20), shift: 9}
	d.answer = func(_ int, t *iscsi.Task) bool {
		t.Status, t.Residual = scsi.StatusGood, 512
		return true
	}
	q, _, _ := newTestQueue(t, testUnit(512, 2048), d, 4<<20)
	m := &Shared{Mem: make([]byte, 1<<20), Region: sharedRegion}
	q.Bind(0, m)
	b := &block{op: ublk.OpRead, data: make([]byte, 4096), shared: 1}
	q.submit(b)
	if len(b.results) != 1 || b.results[0] != -int32(unix.EIO) || m.Requests != 0 || m.InFlight != 0 {
		t.Errorf("results %v, %d requests, %d in flight", b.results, m.Requests, m.InFlight)
	}
}
