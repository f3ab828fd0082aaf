package history

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Operations for histories made by hand; call and ret are the moments of call and return.
func write(value uint64, call, ret time.Duration) Op {
	return Op{Write: true, Value: value, Call: call, Return: ret}
}

func failed(value uint64, call, ret time.Duration) Op {
	return Op{Write: true, Failed: true, Value: value, Call: call, Return: ret}
}

func read(value uint64, call, ret time.Duration) Op { return Op{Value: value, Call: call, Return: ret} }

func torn(call, ret time.Duration, words ...uint64) Op {
	return Op{Value: words[0], Words: words, Call: call, Return: ret}
}

// Histories made by hand: what blocks can do passes, what they cannot is found.
func TestCheck(t *testing.T) {
	for _, c := range []struct {
		name         string
		ops          []Op
		late, fenced bool // explained
	}{
		{"nothing", nil, true, true},
		{"in turn", []Op{read(0, 1, 2), write(1, 3, 4), read(1, 5, 6), write(2, 7, 8), read(2, 9, 10)}, true, true},
		{"at the same time, either first", []Op{write(1, 1, 10), write(2, 2, 9), read(1, 11, 12)}, true, true},
		{"seen before it returns", []Op{write(1, 1, 10), read(0, 2, 3), read(1, 4, 5)}, true, true},
		{"a failed write is seen at once", []Op{write(1, 1, 2), failed(2, 3, 4), read(2, 5, 6)}, true, true},
		{"a failed write is never seen", []Op{write(1, 1, 2), failed(2, 3, 4), read(1, 5, 6)}, true, true},
		{"a failed write is overwritten", []Op{failed(1, 1, 2), write(2, 3, 4), read(2, 5, 6)}, true, true},
		{"a failed read tells nothing", []Op{write(1, 1, 2), {Failed: true, Value: 7, Call: 3, Return: 4}, read(1, 5, 6)}, true, true},
		{"torn between two that run", []Op{write(1, 1, 2), write(2, 3, 10), torn(4, 5, 1, 2, 1), torn(6, 7, 2, 2, 1), read(2, 11, 12)}, true, true},
		{"blocks are apart", []Op{write(1, 1, 2), {Block: 1, Value: 0, Call: 3, Return: 4}, read(1, 5, 6)}, true, true},

		{"a failed write takes effect later", []Op{write(1, 1, 2), failed(2, 3, 4), read(1, 5, 6), read(2, 7, 8)}, true, false},
		{"a failed write over a newer one", []Op{failed(1, 1, 2), write(2, 3, 4), read(2, 5, 6), read(1, 7, 8)}, true, false},
		{"a failed write over a newer one that nobody has read", []Op{failed(1, 1, 2), write(2, 3, 4), read(1, 7, 8)}, true, false},

		{"an acknowledged write is lost", []Op{write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)}, false, false},
		{"the first write is lost", []Op{write(1, 1, 2), read(0, 3, 4)}, false, false},
		{"from nowhere", []Op{write(1, 1, 2), read(9, 3, 4)}, false, false},
		{"before it is written", []Op{read(1, 1, 2), write(1, 3, 4)}, false, false},
		{"back and forth", []Op{write(1, 1, 20), read(1, 2, 3), write(2, 4, 5), read(2, 6, 7), read(1, 8, 9)}, false, false},
		{"two readers see two orders", []Op{write(1, 1, 2), write(2, 1, 2), read(1, 3, 4), read(2, 5, 6), read(1, 7, 8)}, false, false},
		{"a failed write comes and goes", []Op{write(1, 1, 2), failed(2, 3, 4), read(2, 5, 6), read(1, 7, 8)}, false, false},
		{"one word is lost", []Op{write(1, 1, 2), write(2, 3, 4), torn(5, 6, 2, 2, 1)}, false, false},
		{"one word goes back", []Op{write(1, 1, 2), write(2, 3, 10), torn(4, 5, 1, 2), torn(6, 7, 2, 1), read(2, 11, 12)}, false, false},
		{"of the second block", []Op{write(1, 1, 2), {Block: 1, Value: 1, Call: 3, Return: 4}, read(1, 5, 6)}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for strength, want := range map[Strength]bool{Late: c.late, Fenced: c.fenced} {
				err := Check(c.ops, strength)
				if v := new(Violation); (err == nil) != want || err != nil && !errors.As(err, &v) {
					t.Errorf("%v: explained is to be %v: %v", strength, want, err)
				}
			}
		})
	}
}

// The operation that cannot be explained is named, and not those that come after it.
func TestTell(t *testing.T) {
	ops := []Op{write(1, 1, 2), read(1, 3, 4), write(2, 5, 6), write(3, 5, 30), read(1, 7, 8), write(4, 9, 10), read(4, 11, 12)}
	v := new(Violation)
	if err := Check(ops, Late); !errors.As(err, &v) {
		t.Fatal(err)
	}
	got := v.Tell()
	if want := "client 0, 7ns to 8ns: read 1 is not explained."; !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "write 3, still under way") {
		t.Errorf("it tells: %s", got)
	}
}

// A violation is drawn for whoever has to find out.
func TestDraw(t *testing.T) {
	v := new(Violation)
	if err := Check([]Op{write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)}, Fenced); !errors.As(err, &v) {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "violation.html")
	if err := v.Draw(path); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), "write 2") {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// Clients of blocks in memory, some of whose writes fail, are recorded and explained. When the memory then loses a write that was acknowledged, or
// one comes late, that is found.
func TestLog(t *testing.T) {
	const blocks, size = 3, 64
	var (
		mu     sync.Mutex
		medium [blocks][size]byte
	)
	l := New()
	put := func(client, block int, fails bool) []byte {
		data := make([]byte, size)
		l.Write(client, block, data, func() error {
			mu.Lock()
			defer mu.Unlock()
			if !fails || client%2 == 0 {
				medium[block] = [size]byte(data)
			}
			if fails {
				return errors.New("it fails")
			}
			return nil
		})
		return data
	}
	get := func(client, block int) {
		data := make([]byte, size)
		l.Read(client, block, data, func() error {
			mu.Lock()
			defer mu.Unlock()
			copy(data, medium[block][:])
			return nil
		})
	}
	var clients sync.WaitGroup
	for client := range 6 {
		clients.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(client)))
			for range 300 {
				if block := r.IntN(blocks); r.IntN(2) == 0 {
					get(client, block)
				} else {
					put(client, block, r.IntN(50) == 0)
				}
			}
		})
	}
	clients.Wait()
	late := put(1, 0, true)
	good := l.Take()
	if len(good) != 6*300+1 || len(l.Take()) != 0 {
		t.Errorf("%d operations", len(good))
	}
	for _, s := range []Strength{Late, Fenced} {
		if err := Check(good, s); err != nil {
			t.Error(err)
		}
	}
	before := medium[1]
	put(0, 1, false)
	medium[1] = before
	get(0, 1)
	if err := Check(append(good, l.Take()...), Late); err == nil {
		t.Error("a lost write is not found")
	}
	put(0, 0, false)
	get(0, 0)
	medium[0] = [size]byte(late)
	get(0, 0)
	bad := append(good, l.Take()...)
	if err := Check(bad, Fenced); err == nil {
		t.Error("a late write is not found")
	}
	if err := Check(bad, Late); err != nil {
		t.Errorf("a late write is excused: %v", err)
	}
}
