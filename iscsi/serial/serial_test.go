package serial

import (
	"math/rand/v2"
	"testing"
)

func TestOrder(t *testing.T) {
	for _, c := range []struct {
		a, b         uint32
		less, lessEq bool
	}{
		{0, 0, false, true},
		{0, 1, true, true},
		{1, 0, false, false},
		{0xffffffff, 0, true, true},
		{0, 0xffffffff, false, false},
		{0x7fffffff, 0x80000000, true, true},
		{0, 0x7fffffff, true, true},
		{0, 0x80000000, false, false}, // undefined by RFC 1982 section 3.2
		{0x80000000, 0, false, false},
		{0xfffffff0, 0x10, true, true},
	} {
		if got := Less(c.a, c.b); got != c.less {
			t.Errorf("Less(%#x, %#x) = %v", c.a, c.b, got)
		}
		if got := LessEq(c.a, c.b); got != c.lessEq {
			t.Errorf("LessEq(%#x, %#x) = %v", c.a, c.b, got)
		}
	}
}

// TestSlowTwin compares with 64-bit integers: a number and a small step from it, once around the wrap.
func TestSlowTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200000 {
		a := uint64(r.Uint32())
		d := int64(int32(r.Uint32()))
		if d == -half {
			continue
		}
		b := uint32(int64(a) + d)
		if got := Less(uint32(a), b); got != (d > 0) {
			t.Fatalf("Less(%#x, %#x) = %v, distance %d", a, b, got, d)
		}
		if got := LessEq(uint32(a), b); got != (d >= 0) {
			t.Fatalf("LessEq(%#x, %#x) = %v, distance %d", a, b, got, d)
		}
		if got := Distance(uint32(a), b); int64(got) != d {
			t.Fatalf("Distance(%#x, %#x) = %d, want %d", a, b, got, d)
		}
		if want := max(int64(a), int64(a)+d); Max(uint32(a), b) != uint32(want) {
			t.Fatalf("Max(%#x, %#x)", a, b)
		}
	}
}

func TestBetween(t *testing.T) {
	for _, c := range []struct {
		n, lo, hi uint32
		want      bool
	}{
		{5, 5, 5, true}, {4, 5, 9, false}, {9, 5, 9, true}, {10, 5, 9, false},
		{0, 0xfffffffe, 1, true}, {2, 0xfffffffe, 1, false}, {0xfffffffd, 0xfffffffe, 1, false},
		{5, 9, 5, false},
	} {
		if got := Between(c.n, c.lo, c.hi); got != c.want {
			t.Errorf("Between(%#x, %#x, %#x) = %v", c.n, c.lo, c.hi, got)
		}
	}
}

func TestWindow(t *testing.T) {
	w := Window{ExpCmdSN: 0xfffffffe, MaxCmdSN: 1}
	if got := w.Room(0xfffffffe); got != 4 {
		t.Fatalf("room %d over the wrap, want 4", got)
	}
	if w.Room(2) != 0 || w.Open(2) {
		t.Fatal("window open past MaxCmdSN")
	}
	if !w.Update(0, 9) || w != (Window{0, 9}) {
		t.Fatalf("window %+v after an advance", w)
	}
	if w.Update(0xffffffff, 5) || w != (Window{0, 9}) {
		t.Fatalf("window %+v after an old pair", w)
	}
	if w.Update(100, 98) || w != (Window{0, 9}) {
		t.Fatalf("window %+v after MaxCmdSN < ExpCmdSN-1", w)
	}
	if !w.Update(10, 9) || w.Room(10) != 0 {
		t.Fatalf("closed window %+v has room %d", w, w.Room(10))
	}
}
