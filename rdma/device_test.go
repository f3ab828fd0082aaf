//go:build cgo

package rdma

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// The addresses of the laboratory's soft RoCE device.
var (
	addr4 = netip.MustParseAddr("10.0.0.1")
	addr6 = netip.MustParseAddr("fd00::1")
)

// listenOn skips the test where no adapter serves ip.
func listenOn(t testing.TB, ip netip.Addr) *Listener {
	t.Helper()
	l, err := Listen(netip.AddrPortFrom(ip, 0))
	if err != nil {
		require.Need(t, "rdma", err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func mmap(t testing.TB, n int) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	return mem
}

func addrOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// end is one side of a test connection: it records completions and, when on is set, passes them on.
type end struct {
	t    testing.TB
	conn *Conn
	cq   *CQ
	mr   *MR
	mem  []byte
	wcs  []WC
	on   func(wc *WC)
}

func (e *end) HandleWC(wc *WC) {
	if e.on != nil {
		e.on(wc)
		return
	}
	e.wcs = append(e.wcs, *wc)
}

// sge names n bytes at off of the end's memory.
func (e *end) sge(off, n int) [MaxSGE]SGE {
	return [MaxSGE]SGE{{Addr: addrOf(e.mem) + uintptr(off), Len: uint32(n), LKey: e.mr.LKey()}}
}

func (e *end) recv(id uint64, off, n int) {
	e.t.Helper()
	if err := e.conn.PostRecv(RecvWR{WRID: id, SGE: e.sge(off, n), NumSGE: 1}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) send(id uint64, off, n int) {
	e.t.Helper()
	if err := e.conn.PostSend(SendWR{WRID: id, SGE: e.sge(off, n), NumSGE: 1, Signaled: true}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) remote(off int) Remote {
	return Remote{Addr: uint64(addrOf(e.mem)) + uint64(off), RKey: e.mr.RKey()}
}

// equip makes memory, CQ (unless given) and QP for a resolved connection.
func (e *end) equip(caps QPCaps, memory int, cq *CQ) error {
	e.mem = mmap(e.t, memory)
	var err error
	if e.mr, err = e.conn.Device().Register(e.mem, LocalWrite|RemoteRead|RemoteWrite); err != nil {
		return err
	}
	if e.cq = cq; cq == nil {
		if e.cq, err = e.conn.Device().NewCQ(caps.MaxSend + caps.MaxRecv); err != nil {
			return err
		}
	}
	return e.conn.CreateQP(e.cq, caps, e)
}

// close closes everything the end made. A shared CQ closes with its last end.
func (e *end) close() {
	e.t.Helper()
	if e.conn != nil {
		if err := e.conn.Close(); err != nil {
			e.t.Error(err)
		}
	}
	if e.mr != nil {
		if err := e.mr.Close(); err != nil {
			e.t.Error(err)
		}
	}
	if e.cq != nil {
		if err := e.cq.Close(); err != nil && !errors.Is(err, ErrBusy) {
			e.t.Error(err)
		}
	}
}

// options of a pair of ends.
type options struct {
	ip     netip.Addr
	caps   QPCaps
	memory int
	cq     [2]*CQ       // shared ones, active and passive
	recvs  func(e *end) // posts receives before the connection
	cfg    ResolveConfig
	params ConnectParams
}

// connect makes two connected ends in this process. The caller closes them.
func connect(t testing.TB, l *Listener, o options) (active, passive *end) {
	t.Helper()
	if o.caps == (QPCaps{}) {
		o.caps = QPCaps{MaxSend: 64, MaxRecv: 64, MaxInline: 64}
	}
	if o.memory == 0 {
		o.memory = 1 << 20
	}
	if o.params.RetryCount == 0 {
		o.params = ConnectParams{PrivateData: []byte("hello"), ResponderResources: MaxResources, InitiatorDepth: MaxResources,
			RetryCount: 7, RNRRetryCount: 7}
	}
	ctx := testContext(t)
	active, passive = &end{t: t}, &end{t: t}
	errc := make(chan error, 1)
	go func() {
		errc <- func() (err error) {
			var private []byte
			if passive.conn, private, err = l.Accept(ctx); err != nil {
				return err
			}
			if string(private[:5]) != "hello" {
				return fmt.Errorf("private data of the request: %q", private)
			}
			if err := passive.equip(o.caps, o.memory, o.cq[1]); err != nil {
				return err
			}
			if o.recvs != nil {
				o.recvs(passive)
				if err := passive.cq.Flush(); err != nil {
					return err
				}
			}
			p := o.params
			p.PrivateData = []byte("welcome")
			return passive.conn.Accept(ctx, p)
		}()
	}()
	cfg := o.cfg
	cfg.Target = l.Addr()
	var err error
	if active.conn, err = Resolve(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if err := active.equip(o.caps, o.memory, o.cq[0]); err != nil {
		t.Fatal(err)
	}
	if o.recvs != nil {
		o.recvs(active)
		if err := active.cq.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	private, err := active.conn.Connect(ctx, o.params)
	if err != nil {
		t.Fatal(err)
	}
	if string(private[:7]) != "welcome" {
		t.Fatalf("private data of the reply: %q", private)
	}
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
	return active, passive
}

// pump flushes and polls the queues of the ends until done, or fails.
func pump(t testing.TB, done func() bool, ends ...*end) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); {
		for _, e := range ends {
			if err := e.cq.Flush(); err != nil {
				t.Fatal(err)
			}
			if _, err := e.cq.Poll(); err != nil {
				t.Fatal(err)
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing moves any more")
		}
	}
}

// descriptors counts the open descriptors of the process.
func descriptors(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// noLeak fails when objects are left.
func noLeak(t testing.TB) {
	t.Helper()
	if l := Live(); l != (Counts{}) {
		t.Errorf("left open: %+v", l)
	}
}
