package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/test/bench/plan"
)

// outages is how often a fault is repeated in a run.
const outages = 10

// steady is how long all goes well before a fault. What has failed shortly before is tried again after a pause, which is not what is measured.
const steady = 11 * time.Second

// measureOutage takes the time for which requests stand still.
func (b *bench) measureOutage(ctx context.Context, c plan.Cell) (map[string]float64, error) {
	if err := b.site.need(ctx, wantOf(c)); err != nil {
		return nil, err
	}
	fault := map[plan.Fault]func(context.Context, *traffic) (time.Duration, error){
		plan.FaultKilled: b.site.killed, plan.FaultUpgrade: b.site.upgraded, plan.FaultAway: b.site.away,
	}[c.Fault]
	if fault == nil {
		return nil, fmt.Errorf("fault %q is unknown here", c.Fault)
	}
	t, err := startTraffic(b.site.paths[0])
	if err != nil {
		return nil, err
	}
	var took []float64
	for range outages {
		d, err := fault(ctx, t)
		if err != nil {
			t.end()
			return nil, b.site.orLeave(ctx, err)
		}
		took = append(took, d.Seconds())
	}
	if err := t.end(); err != nil {
		return nil, b.site.orLeave(ctx, fmt.Errorf("a request failed: %w", err))
	}
	slices.Sort(took)
	return map[string]float64{plan.StillMedian: (took[(outages-1)/2] + took[outages/2]) / 2, plan.StillMost: took[outages-1]}, nil
}

// killed ends the data plane with SIGKILL and returns the time until the first request that its successor completes.
func (s *site) killed(ctx context.Context, t *traffic) (time.Duration, error) {
	time.Sleep(steady)
	old := s.iserd.plane
	if err := t.flow(); err != nil {
		return 0, err
	}
	defer t.rest()
	begin := time.Now()
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		return 0, err
	}
	if err := s.iserd.nextPlane(ctx, old); err != nil {
		return 0, fmt.Errorf("%w; %s", err, lastWords())
	}
	if err := t.more(); err != nil {
		return 0, err
	}
	_, at := t.pause()
	return at.Sub(begin), nil
}

// upgraded has the data plane replaced and returns the longest time without a completion meanwhile.
func (s *site) upgraded(ctx context.Context, t *traffic) (time.Duration, error) {
	time.Sleep(steady)
	old := s.iserd.plane
	if err := t.flow(); err != nil {
		return 0, err
	}
	defer t.rest()
	if _, err := run(ctx, "iserctl", "daemon", "upgrade"); err != nil {
		return 0, err
	}
	if err := t.more(); err != nil {
		return 0, err
	}
	longest, _ := t.pause()
	return longest, s.iserd.nextPlane(ctx, old)
}

// away disables the target for up to five seconds, longer than it takes to notice, and returns the time from its return to the first completion.
func (s *site) away(_ context.Context, t *traffic) (time.Duration, error) {
	time.Sleep(steady)
	if err := t.flow(); err != nil {
		return 0, err
	}
	defer t.rest()
	if err := s.targets[0].SetEnabled(false); err != nil {
		return 0, err
	}
	time.Sleep(time.Second + rand.N(4*time.Second)) // the fault: its length
	t.mark()
	begin := time.Now()
	if err := s.targets[0].SetEnabled(true); err != nil {
		return 0, err
	}
	if err := t.more(); err != nil {
		return 0, err
	}
	_, at := t.pause() // it began with the mark
	return at.Sub(begin), nil
}

// nextPlane waits until another data plane than old serves.
func (d *iserd) nextPlane(ctx context.Context, old int) error {
	return await("the next data plane serves", func() error {
		var r api.StatusReply
		if err := ask(ctx, &r, "status"); err != nil {
			return err
		}
		if p := r.Status.DataPlane; p.State != api.DataPlaneUp || p.PID == old {
			return fmt.Errorf("data plane %d is %s", p.PID, p.State)
		}
		d.plane = r.Status.DataPlane.PID
		return nil
	})
}

// traffic is readers and writers that keep a device busy around a fault, and the moments at which their requests were completed.
type traffic struct {
	device  *os.File
	turn    sync.RWMutex // held for writing while nobody may begin a request: what is busy for long takes the host long
	ended   bool         // guarded by turn
	clients sync.WaitGroup

	mu   sync.Mutex // guards what follows
	done []time.Time
	err  error
}

// clients is how many requests there are at a time.
const clients = 8

func startTraffic(path string) (*traffic, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	t := &traffic{device: f}
	t.turn.Lock()
	for i := range clients {
		do := f.ReadAt
		if i%2 == 1 {
			do = f.WriteAt
		}
		block := alignedBlock()
		t.clients.Go(func() {
			for {
				t.turn.RLock()
				ended := t.ended
				t.turn.RUnlock()
				if ended {
					return
				}
				_, err := do(block, rand.Int64N(span/int64(len(block)))*int64(len(block)))
				t.mu.Lock()
				t.done = append(t.done, time.Now())
				if t.err == nil {
					t.err = err
				}
				t.mu.Unlock()
			}
		})
	}
	return t, nil
}

// alignedBlock makes a block of 4 KiB for direct I/O.
func alignedBlock() []byte {
	const n = 4 << 10
	b := make([]byte, 2*n) // the collector does not move it
	off := -uintptr(unsafe.Pointer(&b[0])) & (n - 1)
	return b[off : off+n : off+n]
}

// flow begins, and returns when requests are completed. After an error it has ended.
func (t *traffic) flow() error {
	t.turn.Unlock()
	err := t.more()
	if err != nil {
		t.rest()
	}
	t.mark()
	return err
}

// rest ends what flow has begun.
func (t *traffic) rest() { t.turn.Lock() }

// mark forgets the completions there were.
func (t *traffic) mark() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done = append(t.done[:0], time.Now())
}

// pause is the longest time between two completions since the mark, and when it ended.
func (t *traffic) pause() (longest time.Duration, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := 1; i < len(t.done); i++ {
		if d := t.done[i].Sub(t.done[i-1]); d > longest {
			longest, at = d, t.done[i]
		}
	}
	return longest, at
}

// more waits until a few more requests of each client were completed.
func (t *traffic) more() error {
	t.mu.Lock()
	had := len(t.done)
	t.mu.Unlock()
	return await("requests are completed", func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if n := len(t.done) - had; n < 8*clients && t.err == nil { // an error is told in the end
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// end ends the traffic and returns the first error of a request.
func (t *traffic) end() error {
	t.ended = true
	t.turn.Unlock()
	t.clients.Wait()
	if err := t.device.Close(); err != nil {
		return err
	}
	return t.err
}
