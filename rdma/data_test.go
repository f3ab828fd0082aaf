//go:build cgo

package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPingPong sends numbered messages of changing length both ways, with a window, batches and reposted receives.
func TestPingPong(t *testing.T) {
	for _, ip := range []netip.Addr{addr4, addr6} {
		t.Run(ip.String(), func(t *testing.T) {
			const messages, window, size = 5000, 32, 1024
			l := listenOn(t, ip)
			a, p := connect(t, l, options{recvs: func(e *end) {
				for i := range window {
					e.recv(uint64(i), i*size, size)
				}
			}})
			defer noLeak(t)
			defer l.Close()
			defer a.close()
			defer p.close()

			// The passive end answers message i with message i: same length, bytes inverted. Sends use the second half of the memory.
			length := func(i int) int { return 1 + i*37%size }
			var sent, answered, echoed, inflight int
			p.on = func(wc *WC) {
				if err := wc.Err(); err != nil {
					t.Fatal(err)
				}
				if wc.Op != OpRecv {
					return
				}
				slot := int(wc.WRID)
				if int(wc.Bytes) != length(echoed) {
					t.Fatalf("message %d has %d bytes, want %d", echoed, wc.Bytes, length(echoed))
				}
				in, off := p.mem[slot*size:][:wc.Bytes], (window+echoed%window)*size
				for j, b := range in {
					p.mem[off+j] = ^b
				}
				p.recv(uint64(slot), slot*size, size)
				p.send(uint64(echoed), off, int(wc.Bytes))
				echoed++
			}
			a.on = func(wc *WC) {
				if err := wc.Err(); err != nil {
					t.Fatal(err)
				}
				if wc.Op != OpRecv {
					return
				}
				slot := int(wc.WRID)
				for j, b := range a.mem[slot*size:][:wc.Bytes] {
					if b != ^byte(answered+j) {
						t.Fatalf("answer %d differs at byte %d", answered, j)
					}
				}
				if int(wc.Bytes) != length(answered) {
					t.Fatalf("answer %d has %d bytes, want %d", answered, wc.Bytes, length(answered))
				}
				a.recv(uint64(slot), slot*size, size)
				answered++
				inflight--
			}
			pump(t, func() bool {
				for sent < messages && inflight < window {
					off := (window + sent%window) * size
					for j := range length(sent) {
						a.mem[off+j] = byte(sent + j)
					}
					a.send(uint64(sent), off, length(sent))
					sent++
					inflight++
				}
				return answered == messages
			}, a, p)
			s := a.cq.Stats()
			t.Logf("active end: %d work requests in %d crossings, %d completions in %d polls (%d empty)", s.WRs, s.Posts, s.WCs, s.Polls,
				s.EmptyPolls)
			if s.Posts*2 > s.WRs {
				t.Errorf("%d crossings for %d work requests: nothing was batched", s.Posts, s.WRs)
			}
		})
	}
}

// TestRemoteAccess has the passive end write to and read from the active end's memory, as a target does.
func TestRemoteAccess(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{memory: 4 << 20})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	const n = 1 << 20
	r := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		p.mem[i] = byte(r.Uint32())
		a.mem[2*n+i] = byte(r.Uint32())
	}
	// Write the first MiB to the peer's second, read the peer's third to our fourth; two SGEs each.
	pieces := func(off, first int) [MaxSGE]SGE {
		return [MaxSGE]SGE{p.sge(off, first)[0], p.sge(off+first, n-first)[0]}
	}
	if err := p.conn.PostWrite(SendWR{WRID: 1, SGE: pieces(0, 1000), NumSGE: 2, Signaled: true}, a.remote(n)); err != nil {
		t.Fatal(err)
	}
	if err := p.conn.PostRead(SendWR{WRID: 2, SGE: pieces(3*n, 4096), NumSGE: 2, Signaled: true}, a.remote(2*n)); err != nil {
		t.Fatal(err)
	}
	pump(t, func() bool { return len(p.wcs) == 2 }, a, p)
	for i, want := range []Op{OpWrite, OpRead} {
		if wc := p.wcs[i]; wc.Err() != nil || wc.Op != want || wc.WRID != uint64(i+1) {
			t.Errorf("completion %d: %+v: %v", i, wc, wc.Err())
		}
	}
	if !bytes.Equal(a.mem[n:2*n], p.mem[:n]) || !bytes.Equal(p.mem[3*n:], a.mem[2*n:3*n]) {
		t.Error("data differ")
	}
	// A wrong key fails the request and the QP, with the status that says so.
	bad := a.remote(0)
	bad.RKey ^= 0xff
	if err := p.conn.PostWrite(SendWR{WRID: 3, SGE: p.sge(0, 64), NumSGE: 1}, bad); err != nil {
		t.Fatal(err)
	}
	pump(t, func() bool { return len(p.wcs) == 3 }, a, p)
	if wc := p.wcs[2]; !errors.Is(wc.Err(), StatusRemoteAccess) || wc.WRID != 3 || wc.Op != OpWrite {
		t.Errorf("wrong key: %+v: %v", wc, wc.Err())
	}
}

// TestAccessEndsWithMR: a peer that still has the key writes nowhere once the MR is closed.
func TestAccessEndsWithMR(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	to := a.remote(0)
	if err := a.mr.Close(); err != nil {
		t.Fatal(err)
	}
	p.mem[0] = 1
	if err := p.conn.PostWrite(SendWR{SGE: p.sge(0, 1), NumSGE: 1, Signaled: true}, to); err != nil {
		t.Fatal(err)
	}
	pump(t, func() bool { return len(p.wcs) == 1 }, a, p)
	if !errors.Is(p.wcs[0].Err(), StatusRemoteAccess) || a.mem[0] != 0 {
		t.Errorf("write after MR close: %v, memory %d", p.wcs[0].Err(), a.mem[0])
	}
}

// TestArmed fills the queue with more than one batch before it is armed: those completions raise no notification, so the queue may only pass for
// armed when all of them were taken.
func TestArmed(t *testing.T) {
	const messages = pollBatch + 30
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{caps: QPCaps{MaxSend: messages, MaxRecv: messages}, recvs: func(e *end) {
		for i := range messages {
			e.recv(uint64(i), 0, 8)
		}
	}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	if err := p.cq.Flush(); err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		a.send(uint64(i), 0, 8)
	}
	pump(t, func() bool { return len(a.wcs) == messages }, a) // acknowledged, hence there
	if err := p.cq.Arm(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		n     int
		armed bool
	}{{pollBatch, false}, {messages - pollBatch, true}, {0, true}} {
		if p.cq.Armed() && want.n > 0 {
			t.Errorf("armed with %d completions in the queue", want.n)
		}
		if n, err := p.cq.Poll(); err != nil || n != want.n || p.cq.Armed() != want.armed {
			t.Errorf("polled %d (%v), armed %v; want %d, %v", n, err, p.cq.Armed(), want.n, want.armed)
		}
	}
	if len(p.wcs) != messages {
		t.Errorf("%d of %d messages", len(p.wcs), messages)
	}
}

// TestEventMode sleeps in poll(2) between the messages.
func TestEventMode(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{recvs: func(e *end) { e.recv(0, 0, 64) }})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	readable := func(timeout int) bool {
		fds := []unix.PollFd{{Fd: int32(p.cq.FD()), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, timeout)
		if err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
		return n == 1
	}
	var got int
	p.on = func(wc *WC) {
		if err := wc.Err(); err != nil {
			t.Fatal(err)
		}
		got++
		p.recv(0, 0, 64)
	}
	for i := range 100 {
		if err := errors.Join(p.cq.Flush(), p.cq.Arm()); err != nil {
			t.Fatal(err)
		}
		if n, err := p.cq.Poll(); err != nil || n != 0 {
			t.Fatal(n, err)
		}
		if i == 0 && readable(0) {
			t.Fatal("readable before anything was sent")
		}
		a.send(uint64(i), 0, 8)
		if err := a.cq.Flush(); err != nil {
			t.Fatal(err)
		}
		for !readable(1000) {
		}
		if err := p.cq.DrainEvents(); err != nil {
			t.Fatal(err)
		}
		if readable(0) {
			t.Fatal("still readable after DrainEvents")
		}
		pump(t, func() bool { return got == i+1 && len(a.wcs) == i+1 }, a, p)
	}
	if s := p.cq.Stats(); s.Events != 100 {
		t.Errorf("%d events for 100 sleeps", s.Events)
	}
}

// TestAbort checks that every outstanding work request comes back exactly once.
func TestAbort(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	for i := range 64 {
		a.recv(uint64(i), i*64, 64)
	}
	// The peer has no receive: sends stay outstanding, the unsignalled ones as well.
	for i := range 32 {
		if err := a.conn.PostSend(SendWR{WRID: uint64(i), SGE: a.sge(0, 8), NumSGE: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.cq.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := a.conn.Abort(); err != nil {
		t.Fatal(err)
	}
	// Posting on a QP in error is legal, and comes back flushed as well.
	for i := range 8 {
		a.send(uint64(100+i), 0, 8)
	}
	pump(t, func() bool { return len(a.wcs) >= 64+32+8 }, a)
	seen := map[string]int{}
	for _, wc := range a.wcs {
		if !errors.Is(wc.Err(), StatusFlushed) {
			t.Errorf("%+v: %v", wc, wc.Err())
		}
		seen[fmt.Sprintf("%v %d", wc.Op, wc.WRID)]++
	}
	if len(seen) != 64+32+8 {
		t.Errorf("%d different work requests came back of %d", len(seen), 64+32+8)
	}
	if attr, err := a.conn.QPAttr(); err != nil || attr.State != "ERR" {
		t.Errorf("%+v, %v", attr, err)
	}
}

// TestNotPosted has the adapter refuse one QP's work requests: its handler gets them back, and the other QP of the batch works on.
func TestNotPosted(t *testing.T) {
	l := listenOn(t, addr4)
	caps := QPCaps{MaxSend: 16, MaxRecv: 16, MaxInline: 32}
	var cq *CQ
	a, pa := connect(t, l, options{caps: caps})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer pa.close()
	cq, err := a.conn.Device().NewCQ(64)
	if err != nil {
		t.Fatal(err)
	}
	b, pb := connect(t, l, options{caps: caps, cq: [2]*CQ{cq, nil}})
	defer pb.close()
	defer b.close()
	c, pc := connect(t, l, options{caps: caps, cq: [2]*CQ{cq, nil}})
	defer pc.close()
	defer c.close()

	// b: a good send, then one with more inline data than the adapter takes, then another; c: a good one.
	pb.recv(0, 0, 64)
	pc.recv(0, 0, 64)
	if err := errors.Join(pb.cq.Flush(), pc.cq.Flush()); err != nil {
		t.Fatal(err)
	}
	b.recv(7, 0, 64)
	b.send(1, 0, 8)
	if err := b.conn.PostSend(SendWR{WRID: 2, SGE: b.sge(0, 1<<20), NumSGE: 1, Inline: true, Signaled: true}); err != nil {
		t.Fatal(err)
	}
	b.send(3, 0, 8)
	c.send(4, 0, 8)
	err = cq.Flush()
	var ve *VerbError
	if !errors.As(err, &ve) || ve.Call == "" {
		t.Fatalf("Flush returned %v", err)
	}
	t.Log(err)
	if len(b.wcs) != 2 || b.wcs[0].WRID != 2 || b.wcs[1].WRID != 3 || b.wcs[0].Status != StatusNotPosted {
		t.Fatalf("refused work requests: %+v", b.wcs)
	}
	if err := b.conn.PostSend(SendWR{}); err != ErrDown {
		t.Errorf("post on a failed QP: %v", err)
	}
	pump(t, func() bool { return len(b.wcs) == 4 && len(c.wcs) == 1 && len(pc.wcs) == 1 }, c, pc)
	for _, wc := range b.wcs[2:] { // the first send may have been on its way already
		if wc.WRID == 7 && !errors.Is(wc.Err(), StatusFlushed) {
			t.Errorf("receive of the failed QP: %v", wc.Err())
		}
	}
	if err := errors.Join(c.wcs[0].Err(), pc.wcs[0].Err()); err != nil {
		t.Errorf("the other queue pair: %v", err)
	}
}

// TestSlots closes and creates QPs on one CQ, with completions left behind each time: a handler sees its own only.
func TestSlots(t *testing.T) {
	l := listenOn(t, addr4)
	defer noLeak(t)
	defer l.Close()
	keep, keepPeer := connect(t, l, options{})
	defer keep.close()
	defer keepPeer.close()
	cq, err := keep.conn.Device().NewCQ(256)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	caps := QPCaps{MaxSend: 16, MaxRecv: 16}
	slots := map[uint16]bool{}
	var stale int
	for round := range 20 {
		a, p := connect(t, l, options{caps: caps, cq: [2]*CQ{cq, nil}})
		slots[a.conn.qp.slot] = true
		for i := range 16 {
			a.recv(uint64(round*100+i), 0, 64)
		}
		if err := cq.Flush(); err != nil {
			t.Fatal(err)
		}
		a.conn.Abort()
		if round%2 == 0 { // see all come back
			pump(t, func() bool { return len(a.wcs) == 16 }, a)
		}
		for _, wc := range a.wcs {
			if int(wc.WRID)/100 != round {
				t.Fatalf("round %d got work request %d", round, wc.WRID)
			}
		}
		a.conn.Close()
		a.mr.Close()
		p.close()
		n := len(a.wcs)
		for range 3 {
			if _, err := cq.Poll(); err != nil {
				t.Fatal(err)
			}
		}
		if len(a.wcs) != n {
			t.Fatal("handler was called after Close")
		}
	}
	stale = int(cq.Stats().Stale)
	t.Logf("%d stale completions were dropped, %d slots used", stale, len(slots))
	if len(slots) > 3 {
		t.Errorf("%d slots for one connection at a time: slots are not used again", len(slots))
	}
}

// TestFull: a chain takes as many as the QP's capacity.
func TestFull(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{caps: QPCaps{MaxSend: 4, MaxRecv: 2}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	for range 4 {
		a.send(0, 0, 1)
	}
	if err := a.conn.PostSend(SendWR{}); err != ErrFull {
		t.Errorf("fifth send: %v", err)
	}
	for range 2 {
		a.recv(0, 0, 1)
	}
	if err := a.conn.PostRecv(RecvWR{}); err != ErrFull {
		t.Errorf("third receive: %v", err)
	}
	if err := p.conn.PostSend(SendWR{WRID: 1 << 48}); err != ErrWR {
		t.Errorf("WRID of 49 bits: %v", err)
	}
	if err := p.conn.PostRecv(RecvWR{NumSGE: 3}); err != ErrWR {
		t.Errorf("three SGEs: %v", err)
	}
	a.conn.Close()
	if err := a.conn.PostSend(SendWR{}); err != ErrDown {
		t.Errorf("post after Close: %v", err)
	}
	if err := a.cq.Flush(); err != nil {
		t.Errorf("flush with a closed connection: %v", err)
	}
}

// TestReceiverNotReady: a send that found no receive is repeated soon after there is one.
func TestReceiverNotReady(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	a.send(1, 0, 8)
	start := time.Now()
	pump(t, func() bool { return time.Since(start) > 20*time.Millisecond }, a)
	if len(a.wcs) != 0 {
		t.Fatalf("a send without a receive completed: %+v", a.wcs)
	}
	p.recv(2, 0, 64)
	start = time.Now()
	pump(t, func() bool { return len(a.wcs) == 1 && len(p.wcs) == 1 }, p, a)
	d := time.Since(start)
	t.Logf("%v after the receive was posted: %v, %v", d, a.wcs[0].Err(), p.wcs[0].Err())
	if d > 300*time.Millisecond {
		t.Error("that is the rdma_cm's default of 655 ms")
	}
}

// TestAllocs: a full turn of posting, flushing and polling allocates nothing.
func TestAllocs(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{recvs: func(e *end) {
		for i := range 8 {
			e.recv(uint64(i), i*64, 64)
		}
	}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	var received, completed int
	p.on = func(wc *WC) {
		if wc.Status != StatusSuccess {
			t.Error(wc.Err())
		}
		received++
		if err := p.conn.PostRecv(RecvWR{WRID: wc.WRID, SGE: p.sge(int(wc.WRID)*64, 64), NumSGE: 1}); err != nil {
			t.Error(err)
		}
	}
	a.on = func(wc *WC) { completed++ }
	turn := func() {
		received, completed = 0, 0
		for i := range 8 {
			if err := a.conn.PostSend(SendWR{WRID: uint64(i), SGE: a.sge(0, 32), NumSGE: 1, Signaled: true}); err != nil {
				t.Error(err)
			}
		}
		for received < 8 || completed < 8 {
			if p.cq.Flush() != nil || a.cq.Flush() != nil { // receives before the sends that need them
				t.Error("flush failed")
			}
			a.cq.Poll()
			p.cq.Poll()
			a.cq.Arm()
			a.cq.DrainEvents()
		}
	}
	if n := testing.AllocsPerRun(200, turn); n != 0 {
		t.Errorf("%v allocations per turn of 8 messages", n)
	}
}

// BenchmarkPoll is the cost of an empty poll: one crossing into C.
func BenchmarkPoll(b *testing.B) {
	l := listenOn(b, addr4)
	a, p := connect(b, l, options{})
	defer a.close()
	defer p.close()
	for b.Loop() {
		a.cq.Poll()
	}
}

// BenchmarkMessages sends messages of 76 bytes one way, in batches; an operation is one message.
func BenchmarkMessages(b *testing.B) {
	for _, batch := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			l := listenOn(b, addr4)
			a, p := connect(b, l, options{recvs: func(e *end) {
				for i := range 64 {
					e.recv(uint64(i), i*128, 128)
				}
			}})
			defer a.close()
			defer p.close()
			var received, completed int
			p.on = func(wc *WC) {
				received++
				p.conn.PostRecv(RecvWR{WRID: wc.WRID, SGE: p.sge(int(wc.WRID)*128, 128), NumSGE: 1})
			}
			a.on = func(wc *WC) { completed++ }
			b.ReportAllocs()
			for n := 0; n < b.N; n += batch {
				received, completed = 0, 0
				for i := range batch {
					a.conn.PostSend(SendWR{WRID: uint64(i), SGE: a.sge(0, 76), NumSGE: 1, Signaled: true})
				}
				for received < batch || completed < batch {
					p.cq.Flush()
					a.cq.Flush()
					a.cq.Poll()
					p.cq.Poll()
				}
			}
		})
	}
}
