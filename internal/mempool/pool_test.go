package mempool

import (
	"errors"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

func newPool(t testing.TB, size int) *Pool {
	t.Helper()
	p, err := New(size)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestOrders(t *testing.T) {
	for _, c := range []struct{ n, block int }{
		{1, 4096}, {512, 4096}, {4096, 4096}, {4097, 8192}, {8192, 8192}, {65536, 65536}, {65537, 131072}, {524289, 1 << 20}, {1 << 20, 1 << 20},
	} {
		if got := MinBlock << orderOf(c.n); got != c.block {
			t.Errorf("%d bytes take a block of %d, want %d", c.n, got, c.block)
		}
	}
}

func TestRegion(t *testing.T) {
	a, b := newPool(t, 1), newPool(t, 3<<20+1)
	if a.Size() != 1<<20 || b.Size() != 4<<20 {
		t.Errorf("sizes %d and %d", a.Size(), b.Size())
	}
	if a.Region().ID == b.Region().ID || a.Region().ID <= 0 {
		t.Errorf("region ids %d and %d", a.Region().ID, b.Region().ID)
	}
	if uintptr(unsafe.Pointer(&a.Region().Mem[0]))%MaxBlock != 0 {
		t.Error("region is not aligned to its largest block")
	}
	buf, ok := b.Get(5000)
	if !ok || buf.Len() != 5000 || len(buf.Bytes()) != 5000 || cap(buf.Bytes()) != 8192 {
		t.Fatalf("buffer of 5000: %v, length %d, capacity %d", ok, len(buf.Bytes()), cap(buf.Bytes()))
	}
	if buf.Addr() != uintptr(unsafe.Pointer(&buf.Bytes()[0])) || buf.Region() != b.Region() || !buf.Valid() {
		t.Error("address or region of a buffer is wrong")
	}
	if b.InUse() != 8192 {
		t.Errorf("in use: %d", b.InUse())
	}
	if err := b.Close(); !errors.Is(err, ErrInUse) {
		t.Errorf("close with a buffer out: %v", err)
	}
	b.Put(buf)
	for _, p := range []*Pool{a, b, b} {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, ok := b.Get(1); ok {
		t.Error("buffer from a closed pool")
	}
	if _, err := New(0); err == nil {
		t.Error("empty pool accepted")
	}
}

func TestLimits(t *testing.T) {
	p := newPool(t, 2<<20)
	defer p.Close()
	for _, n := range []int{-1, 0, MaxBlock + 1} {
		if _, ok := p.Get(n); ok {
			t.Errorf("buffer of %d bytes", n)
		}
	}
	p.Put(Buffer{})
	a, _ := p.Get(MaxBlock)
	b, _ := p.Get(MaxBlock)
	if _, ok := p.Get(1); ok {
		t.Error("buffer out of an exhausted pool")
	}
	p.Put(a)
	p.Put(b)
	if (Buffer{}).Bytes() != nil || (Buffer{}).Addr() != 0 {
		t.Error("the zero buffer has memory")
	}
}

func TestDoublePut(t *testing.T) {
	p, q := newPool(t, 1<<20), newPool(t, 1<<20)
	defer p.Close()
	defer q.Close()
	b, _ := p.Get(10000)
	mustPanic := func(name string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s went unnoticed", name)
			}
		}()
		f()
	}
	mustPanic("buffer of another pool", func() { q.Put(b) })
	p.Put(b)
	mustPanic("second Put", func() { p.Put(b) })
}

// twin is the obvious version: a map of units, searched from the start.
type twin struct{ used []bool }

func (w *twin) fits(n int) bool {
	units := MinBlock << orderOf(n) >> minShift
	for u := 0; u+units <= len(w.used); u += units {
		free := true
		for _, x := range w.used[u : u+units] {
			free = free && !x
		}
		if free {
			return true
		}
	}
	return false
}

// TestTwin compares the pool with the obvious version: Get succeeds exactly when an aligned free range exists, buffers never overlap, they
// are aligned to their size, and everything coalesces in the end.
func TestTwin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := New(4 << 20)
		if err != nil {
			t.Fatal(err)
		}
		w := &twin{used: make([]bool, p.Size()>>minShift)}
		var out []Buffer
		mark := func(b Buffer, v bool) {
			for u := int(b.first); u < int(b.first)+1<<b.order; u++ {
				if w.used[u] == v {
					t.Fatalf("unit %d of %+v was already %v", u, b, v)
				}
				w.used[u] = v
			}
		}
		size := rapid.OneOf(rapid.IntRange(1, MaxBlock), rapid.IntRange(1, 64<<10), rapid.SampledFrom([]int{4096, 8192, 65536, 131072, 1 << 20}))
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			if len(out) > 0 && rapid.IntRange(0, 9).Draw(t, "kind") < 4 {
				i := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				mark(out[i], false)
				p.Put(out[i])
				out[i] = out[len(out)-1]
				out = out[:len(out)-1]
				continue
			}
			n := size.Draw(t, "bytes")
			want := w.fits(n)
			b, ok := p.Get(n)
			if ok != want {
				t.Fatalf("Get(%d) is %v, the obvious version says %v", n, ok, want)
			}
			if !ok {
				continue
			}
			if b.Len() != n || int(b.first)%(1<<b.order) != 0 || MinBlock<<b.order < n {
				t.Fatalf("Get(%d) gave %+v", n, b)
			}
			mark(b, true)
			out = append(out, b)
		}
		inUse := 0
		for _, u := range w.used {
			if u {
				inUse += MinBlock
			}
		}
		if p.InUse() != inUse {
			t.Fatalf("in use %d, counted %d", p.InUse(), inUse)
		}
		for _, b := range out {
			p.Put(b)
		}
		for range p.Size() / MaxBlock {
			if _, ok := p.Get(MaxBlock); !ok {
				t.Fatal("free memory did not coalesce")
			}
		}
		p.inUse = 0
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestMemory writes the whole of every buffer and reads it back: no two share a byte.
func TestMemory(t *testing.T) {
	p := newPool(t, 2<<20)
	defer p.Close()
	var out []Buffer
	for i := 0; ; i++ {
		b, ok := p.Get(4096 << (i % 6))
		if !ok {
			break
		}
		for j := range b.Bytes() {
			b.Bytes()[j] = byte(i)
		}
		out = append(out, b)
	}
	for i, b := range out {
		for j, v := range b.Bytes() {
			if v != byte(i) {
				t.Fatalf("buffer %d, byte %d: %d", i, j, v)
			}
		}
		p.Put(b)
	}
}

func TestNoAllocation(t *testing.T) {
	p := newPool(t, 4<<20)
	defer p.Close()
	var sink byte
	n := testing.AllocsPerRun(1000, func() {
		a, _ := p.Get(4096)
		b, _ := p.Get(300000)
		sink += a.Bytes()[0] + b.Bytes()[1]
		p.Put(a)
		p.Put(b)
	})
	if n != 0 {
		t.Errorf("%v allocations per pair", n)
	}
	_ = sink
}

func BenchmarkGetPut(b *testing.B) {
	p := newPool(b, 4<<20)
	defer p.Close()
	for b.Loop() {
		x, _ := p.Get(4096)
		p.Put(x)
	}
}
