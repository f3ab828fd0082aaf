//go:build cgo

package rdma

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// resolved returns a connection to l's address that has a QP.
func resolved(t *testing.T, to netip.AddrPort) *end {
	t.Helper()
	c, err := Resolve(testContext(t), ResolveConfig{Target: to})
	if err != nil {
		t.Fatal(err)
	}
	e := &end{t: t, conn: c}
	if err := e.equip(QPCaps{MaxSend: 8, MaxRecv: 8}, 4096, nil); err != nil {
		t.Fatal(err)
	}
	return e
}

var someParams = ConnectParams{PrivateData: []byte("hello"), RetryCount: 7, RNRRetryCount: 7}

func TestDevices(t *testing.T) {
	listenOn(t, addr4).Close()
	devs, err := Devices()
	if err != nil {
		t.Fatal(err)
	}
	var found bool
	for _, d := range devs {
		t.Logf("%+v", d)
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				found = found || g.Addr == addr4 && p.State == "ACTIVE"
			}
		}
		if d.Name == "" || d.NodeGUID == 0 {
			t.Errorf("incomplete: %+v", d)
		}
	}
	if !found {
		t.Errorf("no active port has %s", addr4)
	}
}

func TestAddresses(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{cfg: ResolveConfig{Source: addr4}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	if a.conn.RemoteAddr() != l.Addr() || a.conn.LocalAddr().Addr() != addr4 || a.conn.LocalAddr().Port() == 0 {
		t.Errorf("active: %s to %s", a.conn.LocalAddr(), a.conn.RemoteAddr())
	}
	if p.conn.RemoteAddr() != a.conn.LocalAddr() || p.conn.LocalAddr() != a.conn.RemoteAddr() {
		t.Errorf("passive: %s to %s", p.conn.LocalAddr(), p.conn.RemoteAddr())
	}
	if a.conn.Device() != p.conn.Device() || Live().PDs != 1 {
		t.Errorf("%p and %p: one adapter, one Device", a.conn.Device(), p.conn.Device())
	}
	t.Logf("%s: %+v", a.conn.Device().Name(), a.conn.Device().Limits())
}

// TestLinkLocal connects to the interface's own link-local address, which exists per zone only.
func TestLinkLocal(t *testing.T) {
	listenOn(t, addr4).Close()
	var ll netip.Addr
	devs, _ := Devices()
	for _, d := range devs {
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				if g.Addr.IsLinkLocalUnicast() && g.Netdev != "" && g.Addr.Is6() {
					ll = g.Addr.WithZone(g.Netdev)
				}
			}
		}
	}
	if !ll.IsValid() {
		t.Skip("no adapter has a link-local address")
	}
	l, err := Listen(netip.AddrPortFrom(ll, 0))
	if err != nil {
		// A GID derived from the MAC need not be an address of the interface.
		t.Skipf("listen on %s: %v", ll, err)
	}
	defer l.Close()
	a, p := connect(t, l, options{})
	if a.conn.RemoteAddr().Addr() != ll {
		t.Errorf("connected to %s, want %s", a.conn.RemoteAddr(), ll)
	}
	a.close()
	p.close()
	if _, err := Resolve(testContext(t), ResolveConfig{Target: netip.AddrPortFrom(ll.WithZone(""), 3260)}); err == nil ||
		!strings.Contains(err.Error(), "zone") {
		t.Errorf("link-local address without zone: %v", err)
	}
}

func TestRefused(t *testing.T) {
	l := listenOn(t, addr4)
	defer noLeak(t)
	defer l.Close()
	ctx := testContext(t)
	t.Run("no listener", func(t *testing.T) {
		e := resolved(t, netip.AddrPortFrom(addr4, 9))
		defer e.close()
		_, err := e.conn.Connect(ctx, someParams)
		var re *RejectError
		if !errors.Is(err, ErrRefused) || !errors.As(err, &re) {
			t.Fatalf("got %v", err)
		}
		t.Log(err)
		if re.Reason != RejectNoListener && re.Reason != RejectConsumer {
			t.Errorf("reason %d", re.Reason)
		}
	})
	t.Run("rejected", func(t *testing.T) {
		e := resolved(t, l.Addr())
		defer e.close()
		go func() {
			c, _, err := l.Accept(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			if err := c.Reject([]byte("go away")); err != nil {
				t.Error(err)
			}
			c.Close()
		}()
		_, err := e.conn.Connect(ctx, someParams)
		var re *RejectError
		if !errors.As(err, &re) || re.Reason != RejectConsumer || !strings.HasPrefix(string(re.PrivateData), "go away") {
			t.Fatalf("got %v, %+v", err, re)
		}
	})
	t.Run("twice", func(t *testing.T) {
		e := resolved(t, netip.AddrPortFrom(addr4, 9))
		defer e.close()
		e.conn.Connect(ctx, someParams)
		if _, err := e.conn.Connect(ctx, someParams); err == nil {
			t.Error("a second Connect worked")
		}
	})
}

func TestNoDevice(t *testing.T) {
	_, err := Resolve(testContext(t), ResolveConfig{Target: netip.MustParseAddrPort("127.0.0.1:3260")})
	if !errors.Is(err, ErrNoDevice) {
		t.Fatalf("127.0.0.1: %v", err)
	}
	t.Log(err)
	noLeak(t)
}

// TestNoAnswer: hosts that do not exist, and a listener whose application never answers.
func TestNoAnswer(t *testing.T) {
	l := listenOn(t, addr4)
	defer noLeak(t)
	defer l.Close()
	t.Run("no such host", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, err := Resolve(ctx, ResolveConfig{Target: netip.MustParseAddrPort("10.0.0.77:3260")})
		if !errors.Is(err, ErrUnreachable) && !errors.Is(err, ErrTimeout) {
			t.Errorf("got %v", err)
		}
		t.Log(err)
	})
	t.Run("no route", func(t *testing.T) {
		_, err := Resolve(testContext(t), ResolveConfig{Target: netip.MustParseAddrPort("192.0.2.1:3260")})
		if !errors.Is(err, ErrUnreachable) {
			t.Errorf("got %v", err)
		}
		t.Log(err)
	})
	t.Run("deadline while resolving", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := Resolve(ctx, ResolveConfig{Target: netip.MustParseAddrPort("10.0.0.78:3260")})
		if !errors.Is(err, ErrTimeout) {
			t.Errorf("got %v", err)
		}
		t.Log(err, time.Since(start))
	})
	t.Run("deadline while connecting", func(t *testing.T) {
		e := resolved(t, l.Addr())
		defer e.close()
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := e.conn.Connect(ctx, someParams)
		if !errors.Is(err, ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		t.Log(err, time.Since(start))
	})
	t.Run("cancel while connecting", func(t *testing.T) {
		e := resolved(t, l.Addr())
		defer e.close()
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(50*time.Millisecond, cancel)
		if _, err := e.conn.Connect(ctx, someParams); !errors.Is(err, context.Canceled) || errors.Is(err, ErrTimeout) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("close while connecting", func(t *testing.T) {
		e := resolved(t, l.Addr())
		defer e.close()
		time.AfterFunc(50*time.Millisecond, func() { e.conn.Close() })
		if _, err := e.conn.Connect(testContext(t), someParams); !errors.Is(err, ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("close while accepting", func(t *testing.T) {
		l2 := listenOn(t, addr4)
		time.AfterFunc(50*time.Millisecond, func() { l2.Close() })
		if _, _, err := l2.Accept(testContext(t)); !errors.Is(err, ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// TestEvents: the other side's disconnect arrives as an event and flushes the receives; Close works from the callback.
func TestEvents(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{recvs: func(e *end) { e.recv(1, 0, 64) }})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	if err := p.conn.Disconnect(); err != nil {
		t.Fatal(err)
	}
	pump(t, func() bool { return len(p.wcs) == 1 }, p)
	if !errors.Is(p.wcs[0].Err(), StatusFlushed) {
		t.Errorf("own receive: %v", p.wcs[0].Err())
	}
	// Registered after the fact: the event was kept. Without polling the flush cannot be seen, so the order does not matter.
	events := make(chan Event, 8)
	a.conn.OnEvent(func(e Event) { events <- e })
	if e := <-events; e.Kind != EventDisconnected {
		t.Fatalf("got %+v", e)
	}
	pump(t, func() bool { return len(a.wcs) == 1 }, a)
	if !errors.Is(a.wcs[0].Err(), StatusFlushed) {
		t.Errorf("peer's receive: %v", a.wcs[0].Err())
	}
	closed := make(chan error)
	p.conn.OnEvent(func(e Event) { closed <- p.conn.Close() })
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestSoftwareACKTimeout: soft RoCE is told apart from an adapter with hardware.
func TestSoftwareACKTimeout(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{cfg: ResolveConfig{ACKTimeout: 15 * time.Millisecond, SoftwareACKTimeout: 500 * time.Millisecond}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	want := 4096 * time.Nanosecond << 17
	if attr, err := a.conn.QPAttr(); err != nil || !a.conn.Device().Software() || attr.ACKTimeout != want {
		t.Errorf("%s: software %v, %+v, %v, want ACK time-out %v", a.conn.Device().Name(), a.conn.Device().Software(), attr, err, want)
	}
	if virtual("/sys/class/infiniband/none") {
		t.Error("what is not there is taken for software")
	}
}

// TestACKTimeout: set before route resolution it rules both QPs; the retry counts travel as well.
func TestACKTimeout(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{cfg: ResolveConfig{ACKTimeout: 15 * time.Millisecond},
		params: ConnectParams{PrivateData: []byte("hello"), RetryCount: 5, RNRRetryCount: 6, ResponderResources: 4, InitiatorDepth: 2}})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	aa, err := a.conn.QPAttr()
	if err != nil {
		t.Fatal(err)
	}
	pa, err := p.conn.QPAttr()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("active %+v", aa)
	t.Logf("passive %+v", pa)
	// The request carries the greater of the wish and the adapter's ACK delay, which is 2^15 for rxe; the default would be 2^17.
	own, peers := 4096*time.Nanosecond<<12, 4096*time.Nanosecond<<15
	if aa.ACKTimeout != own || pa.ACKTimeout > peers {
		t.Errorf("ACK time-outs %v and %v, want %v and at most %v", aa.ACKTimeout, pa.ACKTimeout, own, peers)
	}
	if aa.State != "RTS" || pa.State != "RTS" || aa.PeerQPN != pa.QPN || pa.PeerQPN != aa.QPN {
		t.Error("not connected to each other")
	}
	if aa.RetryCount != 5 || aa.ResponderResources < 2 {
		t.Errorf("active %+v", aa)
	}
}

// TestRounds opens and closes connections and looks for what is left.
func TestRounds(t *testing.T) {
	l := listenOn(t, addr4)
	round := func() {
		a, p := connect(t, l, options{memory: 4096, recvs: func(e *end) { e.recv(1, 0, 64) }})
		a.send(2, 0, 8)
		pump(t, func() bool { return len(a.wcs) == 1 && len(p.wcs) == 1 }, a, p)
		a.close()
		p.close()
	}
	round() // the library opens what it keeps
	// A descriptor that a goroutine was waiting for closes when that goroutine has left, shortly after Close.
	settled := func() (n int) {
		for n = descriptors(t); ; {
			time.Sleep(20 * time.Millisecond)
			if m := descriptors(t); m == n {
				return n
			} else {
				n = m
			}
		}
	}
	before := settled()
	for range 200 {
		round()
	}
	if after := settled(); after != before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
	l.Close()
	noLeak(t)
}

// TestOrderOfClose closes the objects in every order that is allowed.
func TestOrderOfClose(t *testing.T) {
	l := listenOn(t, addr4)
	defer noLeak(t)
	defer l.Close()
	for i, order := range []string{"conn cq mr", "mr conn cq", "conn mr cq", "conn conn mr mr cq cq"} {
		a, p := connect(t, l, options{memory: 4096})
		if err := a.cq.Close(); !errors.Is(err, ErrBusy) {
			t.Errorf("%d: CQ with a QP closed: %v", i, err)
		}
		for _, what := range strings.Fields(order) {
			var err error
			switch what {
			case "conn":
				err = a.conn.Close()
			case "cq":
				err = a.cq.Close()
			case "mr":
				err = a.mr.Close()
			}
			if err != nil {
				t.Errorf("%s: close %s: %v", order, what, err)
			}
		}
		p.close()
		if _, err := a.cq.Poll(); !errors.Is(err, ErrClosed) {
			t.Errorf("poll of a closed CQ: %v", err)
		}
	}
}

// TestErrors: what is refused before the adapter sees it.
func TestErrors(t *testing.T) {
	l := listenOn(t, addr4)
	a, p := connect(t, l, options{})
	defer noLeak(t)
	defer l.Close()
	defer a.close()
	defer p.close()
	c, err := Resolve(testContext(t), ResolveConfig{Target: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.CreateQP(a.cq, QPCaps{MaxSend: 1000, MaxRecv: 1000}, a); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Errorf("CQ too small: %v", err)
	}
	if err := c.CreateQP(a.cq, QPCaps{MaxSend: 1 << 30, MaxRecv: 1}, a); err == nil {
		t.Error("a QP of 2^30 sends")
	}
	if _, err := c.Connect(testContext(t), someParams); err == nil || !strings.Contains(err.Error(), "CreateQP") {
		t.Errorf("connect without QP: %v", err)
	}
	if err := c.PostSend(SendWR{}); err != ErrDown {
		t.Errorf("post without QP: %v", err)
	}
	if _, err := a.conn.Device().NewCQ(0); err == nil {
		t.Error("a CQ of no entries")
	}
	if _, err := a.conn.Device().Register(nil, LocalWrite); err == nil {
		t.Error("registered nothing")
	}
	hole := mmap(t, 8192)
	if err := unix.Mprotect(hole[4096:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	_, err = a.conn.Device().Register(hole, LocalWrite)
	var ve *VerbError
	if !errors.As(err, &ve) || !errors.Is(err, unix.EFAULT) {
		t.Errorf("memory without access: %v", err)
	}
}

// TestConcurrentClose closes connections from other goroutines while the owner of the CQ posts and polls.
func TestConcurrentClose(t *testing.T) {
	l := listenOn(t, addr4)
	defer noLeak(t)
	defer l.Close()
	keep, keepPeer := connect(t, l, options{})
	defer keepPeer.close()
	defer keep.close()
	cq, err := keep.conn.Device().NewCQ(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	for range 10 {
		var ends [4]*end
		var peers [4]*end
		for i := range ends {
			ends[i], peers[i] = connect(t, l, options{cq: [2]*CQ{cq, nil}})
			ends[i].on = func(*WC) {}
		}
		var open atomic.Int32
		for _, e := range ends {
			open.Add(1)
			go func() {
				e.conn.Close()
				open.Add(-1)
			}()
		}
		for open.Load() > 0 {
			for _, e := range ends {
				if err := e.conn.PostSend(SendWR{SGE: e.sge(0, 8), NumSGE: 1}); err != nil && err != ErrDown && err != ErrFull {
					t.Fatal(err)
				}
			}
			cq.Flush() // fails for QPs that overflow, which is fine here
			if _, err := cq.Poll(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := cq.Poll(); err != nil {
			t.Fatal(err)
		}
		for i, e := range ends {
			e.mr.Close()
			peers[i].close()
		}
	}
}

// TestProbe fails where REQUIRE=rdma and there is none, so that a laboratory run cannot pass empty.
func TestProbe(t *testing.T) {
	l, err := Listen(netip.AddrPortFrom(addr4, 0))
	require.Need(t, "rdma", err)
	l.Close()
}
