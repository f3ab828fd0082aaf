//go:build cgo

package rdma

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestSizes prints what layout.go asserts at compile time, on the two 64-bit architectures that are supported.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"ibv_sge", unsafe.Sizeof(sge{}), 16},
		{"ibv_send_wr", unsafe.Sizeof(sendWR{}), 128},
		{"ibv_recv_wr", unsafe.Sizeof(recvWR{}), 32},
		{"ibv_wc", unsafe.Sizeof(wcEntry{}), 48},
	} {
		if c.got != c.want {
			t.Errorf("struct %s has %d bytes, want %d", c.name, c.got, c.want)
		}
	}
}

// TestStatusNames compares the table with libibverbs' own, up to wording: each status must be known to both.
func TestStatusNames(t *testing.T) {
	for s := StatusSuccess; s <= StatusTagRendezvous; s++ {
		theirs := statusStr(s)
		if theirs == "" || theirs == "unknown" {
			t.Errorf("status %d (%s) is %q to libibverbs", uint32(s), s, theirs)
		}
	}
	if s := statusStr(StatusRNRRetryExceeded); !strings.Contains(s, "RNR") {
		t.Errorf("status 13 is %q", s)
	}
}

func TestACKExponent(t *testing.T) {
	for _, c := range []struct {
		d time.Duration
		n uint8
	}{
		{1, 1}, {4096, 1}, {8192, 1}, {8193, 2}, {16384, 2}, {15 * time.Millisecond, 12}, {time.Second, 18}, {time.Hour, 30},
		{24 * time.Hour, 31},
	} {
		if n := ackExponent(c.d); n != c.n {
			t.Errorf("%v: exponent %d, want %d", c.d, n, c.n)
		}
		if c.n < 31 && (ackDuration(c.n) < c.d || c.n > 1 && ackDuration(c.n-1) >= c.d) {
			t.Errorf("%v: 4.096 us * 2^%d = %v is not the least that is enough", c.d, c.n, ackDuration(c.n))
		}
	}
	if ackDuration(0) != 0 {
		t.Error("0 is not without end")
	}
}

func TestSockaddr(t *testing.T) {
	for _, s := range []string{"10.0.0.1:3260", "[fd00::1]:3260", "[::]:0", "0.0.0.0:65535", "[fe80::1%lo]:1", "[::ffff:10.0.0.1]:5"} {
		in := netip.MustParseAddrPort(s)
		sa, err := sockaddr(in)
		if err != nil {
			t.Errorf("%s: %v", s, err)
			continue
		}
		want := netip.AddrPortFrom(in.Addr().Unmap(), in.Port())
		if out := addrPort(asSockaddr(sa)); out != want {
			t.Errorf("%s became %s", s, out)
		}
	}
	for s, text := range map[string]string{
		"[fe80::1]:3260":            "needs a zone",
		"[fe80::1%no-such-if]:3260": "zone of address",
	} {
		if _, err := sockaddr(netip.MustParseAddrPort(s)); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", s, err)
		}
	}
	if _, err := sockaddr(netip.AddrPort{}); err == nil {
		t.Error("no address is an address")
	}
}

// newTestQP is a queue pair that no adapter knows, for the chain alone.
func newTestQP(t testing.TB, caps QPCaps) *Conn {
	q, err := newQueuePair(&CQ{}, caps, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(q.free)
	q.slot, q.tag = 0x1234, 0x1234<<slotShift
	return &Conn{qp: q}
}

// TestChain posts random work requests and reads them back the way the library does, by following pointers.
func TestChain(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	c := newTestQP(t, QPCaps{MaxSend: 50, MaxRecv: 20})
	var sends []SendWR
	var remotes []Remote
	for i := range 50 {
		wr := SendWR{WRID: r.Uint64() & WRIDMask, NumSGE: r.IntN(MaxSGE + 1), Signaled: i%2 == 0, Inline: i%3 == 0}
		for j := range wr.NumSGE {
			wr.SGE[j] = SGE{Addr: uintptr(r.Uint64()), Len: r.Uint32(), LKey: r.Uint32()}
		}
		rem := Remote{Addr: r.Uint64(), RKey: r.Uint32()}
		var err error
		switch i % 3 {
		case 0:
			rem = Remote{}
			err = c.PostSend(wr)
		case 1:
			err = c.PostWrite(wr, rem)
		case 2:
			err = c.PostRead(wr, rem)
		}
		if err != nil {
			t.Fatal(err)
		}
		sends, remotes = append(sends, wr), append(remotes, rem)
	}
	e := &c.qp.send[0]
	for i, wr := range sends {
		op := [...]Op{OpSend, OpWrite, OpRead}[i%3]
		if e.wrID != uint64(op)<<62|0x1234<<48|wr.WRID || int(e.numSGE) != wr.NumSGE || e.opcode != [...]uint32{2, 0, 4}[i%3] {
			t.Fatalf("send %d: %+v", i, e)
		}
		if (e.flags&2 != 0) != wr.Signaled || (e.flags&8 != 0) != wr.Inline || e.remoteAddr != remotes[i].Addr || e.rkey != remotes[i].RKey {
			t.Fatalf("send %d: %+v", i, e)
		}
		for j := range wr.NumSGE {
			s := (*sge)(unsafe.Add(at[sge](e.sgList), uintptr(j)*unsafe.Sizeof(sge{})))
			if s.addr != uint64(wr.SGE[j].Addr) || s.len != wr.SGE[j].Len || s.lkey != wr.SGE[j].LKey {
				t.Fatalf("send %d SGE %d: %+v", i, j, s)
			}
		}
		if i+1 < len(sends) {
			e = (*sendWR)(at[sendWR](e.next))
		}
	}
	if e.next != 0 {
		t.Error("the chain goes on")
	}
	if err := c.PostSend(SendWR{}); err != ErrFull {
		t.Error(err)
	}
	for i := range 20 {
		if err := c.PostRecv(RecvWR{WRID: uint64(i), NumSGE: 1}); err != nil {
			t.Fatal(err)
		}
	}
	rv := &c.qp.recv[0]
	for i := range 20 {
		if rv.wrID != 1<<62|0x1234<<48|uint64(i) || rv.numSGE != 1 || rv.sgList != uintptr(unsafe.Pointer(&c.qp.recvSGE[2*i])) {
			t.Fatalf("receive %d: %+v", i, rv)
		}
		if i < 19 {
			rv = (*recvWR)(at[recvWR](rv.next))
		}
	}
	if cq := c.qp.cq; cq.dirty != c.qp || cq.dirtyTail != c.qp || c.qp.nextWork != nil {
		t.Error("one QP with work is not on the list once")
	}
}

// at makes a pointer of an address outside the Go heap.
func at[T any](addr uintptr) unsafe.Pointer {
	return *(*unsafe.Pointer)(unsafe.Pointer(&addr))
}

// TestPostAllocs: posting alone allocates nothing, on any host.
func TestPostAllocs(t *testing.T) {
	c := newTestQP(t, QPCaps{MaxSend: 4, MaxRecv: 4})
	if n := testing.AllocsPerRun(100, func() {
		for range 4 {
			if c.PostSend(SendWR{WRID: 1, NumSGE: 1}) != nil || c.PostRecv(RecvWR{WRID: 2, NumSGE: 1}) != nil {
				t.Error("post failed")
			}
		}
		c.qp.nsend, c.qp.nrecv = 0, 0
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkPost is the cost of one SEND up to, and without, the crossing into C.
func BenchmarkPost(b *testing.B) {
	c := newTestQP(b, QPCaps{MaxSend: 64, MaxRecv: 1})
	wr := SendWR{WRID: 1, NumSGE: 2, Signaled: true}
	for b.Loop() {
		if c.PostSend(wr) == ErrFull {
			c.qp.nsend = 0
		}
	}
}

func TestWaiterErrors(t *testing.T) {
	if e := errnoOf(nil); e != unix.EIO {
		t.Error(e)
	}
	if statusErrno(-110) != unix.ETIMEDOUT || statusErrno(19) != unix.ENODEV || statusErrno(0) != unix.EIO {
		t.Error("status of an event")
	}
}

func TestIsRemoval(t *testing.T) {
	const path = "@/devices/virtual/infiniband_verbs/uverbs1\x00"
	for _, c := range []struct {
		msg  string
		want bool
	}{
		{"remove" + path + "ACTION=remove\x00SUBSYSTEM=infiniband_verbs\x00SEQNUM=7\x00", true},
		{"add" + path + "ACTION=add\x00SUBSYSTEM=infiniband_verbs\x00", false},
		{"remove" + path + "ACTION=remove\x00SUBSYSTEM=net\x00", false},
		{"remove@/devices/x/uverbs11\x00SUBSYSTEM=infiniband_verbs\x00", false},
		{"remove@/uverbs1", false},
		{"", false},
		{"libudev\x00\xfe\xed\xca\xfe", false},
	} {
		if got := isRemoval([]byte(c.msg), "uverbs1"); got != c.want {
			t.Errorf("%q: %v", c.msg, got)
		}
	}
}
