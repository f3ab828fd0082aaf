package lu

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/ublk"
)

// TestLend serves large requests from their own pages, and small ones not.
func TestLend(t *testing.T) {
	d := &disk{content: make([]byte, 8<<20), shift: 9, reaches: true}
	q, pool, _ := newTestQueue(t, testUnit(512, 1<<20), d, 4<<20)
	data := bytes.Repeat([]byte("0123456789abcdef"), lendFrom/16)
	w := &block{op: ublk.OpWrite, tag: 1, sector: 64, data: data, lendable: true}
	r := &block{op: ublk.OpRead, tag: 2, sector: 64, data: make([]byte, len(data)), lendable: true}
	for _, b := range []*block{w, r} {
		q.submit(b)
		if len(b.results) > 0 {
			t.Fatalf("%v: done before its pages were lent", b.op)
		}
		q.lentTo(&q.requests[b.tag], nil)
		if len(b.results) != 1 || int(b.results[0]) != len(data) || b.copies != 0 {
			t.Fatalf("%v: results %v, %d copies", b.op, b.results, b.copies)
		}
	}
	small := &block{op: ublk.OpRead, tag: 3, sector: 64, data: make([]byte, 4096), lendable: true}
	q.submit(small)
	if small.lends != 0 || len(small.results) != 1 || small.copies != 1 {
		t.Errorf("small read: %d lends, %d copies, results %v", small.lends, small.copies, small.results)
	}
	if !bytes.Equal(r.data, data) || !bytes.Equal(small.data, data[:4096]) {
		t.Error("reads differ from what was written")
	}
	if c := q.Counters(); c.LentRequests != 2 || c.LentBytes != uint64(2*len(data)) || c.Reads != 2 || c.Writes != 1 || c.InFlight != 0 {
		t.Errorf("counters %+v", c)
	}
	if n := pool.InUse(); n != 0 {
		t.Errorf("%d bytes of the pool in use", n)
	}
}

// TestLendFails goes on with a copy when the driver, the session, or the next session does not take the pages.
func TestLendFails(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789abcdef"), lendFrom/16)
	for _, c := range []struct {
		name    string
		driver  error // answer to Lend
		outcome []iscsi.Outcome
	}{
		{"driver", unix.EINVAL, nil},
		{"session", nil, []iscsi.Outcome{iscsi.NotSent}},
		{"lost", nil, []iscsi.Outcome{iscsi.Lost}},
		{"lost twice", nil, []iscsi.Outcome{iscsi.Lost, iscsi.Lost}},
	} {
		for _, op := range []ublk.Op{ublk.OpRead, ublk.OpWrite} {
			t.Run(c.name+" "+op.String(), func(t *testing.T) {
				d := &disk{content: make([]byte, 8<<20), shift: 9, reaches: true, hold: true}
				d.answer = func(n int, k *iscsi.Task) bool {
					if n > len(c.outcome) {
						if k.Pages != nil {
							t.Error("sent again with pages")
						}
						return false
					}
					k.Outcome = c.outcome[n-1]
					return true
				}
				q, _, _ := newTestQueue(t, testUnit(512, 1<<20), d, 4<<20)
				b := &block{op: op, tag: 1, data: make([]byte, len(data)), lendable: true}
				if op == ublk.OpWrite {
					copy(b.data, data)
				} else {
					copy(d.content, data)
				}
				q.submit(b)
				q.lentTo(&q.requests[b.tag], c.driver)
				for _, k := range d.held {
					d.Submit(k)
				}
				if len(b.results) != 1 || int(b.results[0]) != len(data) || b.copies != 1 {
					t.Fatalf("results %v, %d copies", b.results, b.copies)
				}
				if !bytes.Equal(b.data, data) || !bytes.Equal(d.content[:len(data)], data) {
					t.Error("data differs")
				}
				if n := q.Counters().LentRequests; n != 0 {
					t.Errorf("%d requests counted as lent", n)
				}
			})
		}
	}
}
