package scenario

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// load is readers and writers that keep a device busy and know when requests were completed.
type load struct {
	device  *os.File
	ctx     context.Context
	stop    func()
	clients sync.WaitGroup

	mu   sync.Mutex  // guards what follows
	done []time.Time // completions since a mark
	errs []error
}

// loadClients is how many requests there are at a time.
const loadClients = 8

func startLoad(t *testing.T, path string, size uint64) *load {
	t.Helper()
	l := &load{device: openDirect(t, path)}
	l.ctx, l.stop = context.WithCancel(context.Background())
	t.Cleanup(l.stop)
	for i := range loadClients {
		b := newBlock()
		l.clients.Go(func() {
			for l.ctx.Err() == nil {
				do := l.device.ReadAt
				if i%2 == 1 {
					do = l.device.WriteAt
				}
				_, err := do(b, rand.Int64N(int64(size)/blockSize)*blockSize)
				l.completed(time.Now(), err)
			}
		})
	}
	return l
}

func (l *load) completed(at time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, at)
	if err != nil {
		l.errs = append(l.errs, err)
	}
}

// mark forgets the completions there were.
func (l *load) mark() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = []time.Time{time.Now()}
}

// resumed is when requests were completed again: the end of the longest pause between two completions since the mark. It waits until a few have been.
func (l *load) resumed(t *testing.T) (at time.Time) {
	t.Helper()
	waitFor(t, "requests are completed", 60*time.Second, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		var longest time.Duration
		behind := 0 // completions behind the pause
		for i := 1; i < len(l.done); i++ {
			behind++
			if pause := l.done[i].Sub(l.done[i-1]); pause > longest {
				longest, at, behind = pause, l.done[i], 0
			}
		}
		if behind < 4*loadClients {
			return fmt.Errorf("%d", behind)
		}
		return nil
	})
	return at
}

func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop()
	ended := make(chan struct{})
	go func() {
		l.clients.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(60 * time.Second):
		t.Fatal("a request does not return")
	}
	for _, err := range l.errs {
		t.Error(err)
	}
	l.device.Close()
}

// A data plane that has been up for less is not started again at once, see maxPause in daemon/plane.go.
const settled = 6 * time.Second

// outages are what recovery is measured after. The function makes one and returns when its cause had gone, and when the first request was completed.
var outages = []struct {
	name  string
	again func(t *testing.T, g *target, l *load) (from, to time.Time)
}{
	{"killed", func(t *testing.T, g *target, l *load) (from, to time.Time) {
		time.Sleep(settled) // without the supervisor's pause
		old := status(t).DataPlane.PID
		l.mark()
		from = time.Now()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		g.nextDataPlane(t, old)
		return from, l.resumed(t)
	}},
	{"away", func(t *testing.T, g *target, l *load) (from, to time.Time) {
		l.mark()
		g.enable(t, false)
		g.lost(t)
		time.Sleep(rand.N(5 * time.Second)) // the fault: its length
		from = time.Now()
		g.enable(t, true)
		g.whole(t)
		return from, l.resumed(t)
	}},
}

// How long requests stand still: from kill -9 of the data plane to the first request that its successor completes, and from the return of a target that was
// away to the first request. The figures are logged in the form of a benchmark, and decide nothing.
func TestRecoveryTime(t *testing.T) {
	for _, k := range kinds[:2] {
		for _, o := range outages {
			t.Run(k.name+"/"+o.name, func(t *testing.T) {
				g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
				g.login(t)
				dev := devices(t, g.name)[0]
				l := startLoad(t, dev.Path, dev.Size)
				var took []time.Duration
				for range rounds(t, 1) {
					progress(t, devices(t, g.name))
					from, to := o.again(t, g, l)
					took = append(took, to.Sub(from))
					g.whole(t)
				}
				l.end(t)
				g.logout(t)
				slices.Sort(took)
				at := func(part float64) string {
					i := min(len(took)-1, int(part*float64(len(took))))
					return fmt.Sprintf("%8.1f", took[i].Seconds()*1000)
				}
				t.Logf("BenchmarkRecovery/%s/%s %6d %s ms-median %s ms-p99", o.name, k.name, len(took), at(0.5), at(0.99))
			})
		}
	}
}
