package testtarget

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// A Park holds commands back after all of their data has come and before the unit sees them, while others pass: a slow or lost command, a write
// that is carried out late, answers in another order. Task management ends parked commands as it ends any other.
type Park struct {
	target *Target
	fits   func(lun int, cdb []byte) bool

	mu      sync.Mutex // guards what follows
	changed chan struct{}
	list    []*task
	delay   time.Duration
	timers  []*time.Timer
}

// Park holds back commands that fit; nil fits all. It begins with the next command.
func (t *Target) Park(fits func(lun int, cdb []byte) bool) *Park {
	p := &Park{target: t, fits: fits, changed: make(chan struct{})}
	t.mu.Lock()
	t.parks = append(t.parks, p)
	t.mu.Unlock()
	return p
}

// Slow carries commands that fit out after a time. Close ends it.
func (t *Target) Slow(fits func(lun int, cdb []byte) bool, delay time.Duration) *Park {
	p := &Park{target: t, fits: fits, delay: delay, changed: make(chan struct{})}
	t.mu.Lock()
	t.parks = append(t.parks, p)
	t.mu.Unlock()
	return p
}

// parkFor finds the park that holds a command back.
func (t *Target) parkFor(k *task) *Park {
	t.mu.Lock()
	parks := slices.Clone(t.parks)
	t.mu.Unlock()
	for _, p := range parks {
		if p.fits == nil || p.fits(k.lun, k.cdb) {
			return p
		}
	}
	return nil
}

func (p *Park) add(k *task) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.delay > 0 {
		p.timers = append(p.timers, time.AfterFunc(p.delay, func() { k.c.resume(k) }))
		return
	}
	p.list = append(p.list, k)
	close(p.changed)
	p.changed = make(chan struct{})
}

// Waiting is how many commands are parked. Those that were aborted do not count.
func (p *Park) Waiting() int {
	n, _ := p.state()
	return n
}

func (p *Park) state() (n int, changed chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = slices.DeleteFunc(p.list, func(k *task) bool {
		k.c.mu.Lock()
		defer k.c.mu.Unlock()
		return k.c.parked[k.itt] != k
	})
	return len(p.list), p.changed
}

// Wait waits until n commands are parked.
func (p *Park) Wait(ctx context.Context, n int) error {
	for {
		have, changed := p.state()
		if have >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d commands are parked: %w", have, n, context.Cause(ctx))
		}
	}
}

// Release carries out the n oldest commands; a negative n means all. The park goes on.
func (p *Park) Release(n int) { p.release(n, false) }

// ReleaseReversed carries out all commands, the youngest first.
func (p *Park) ReleaseReversed() { p.release(-1, true) }

func (p *Park) release(n int, reversed bool) {
	p.state()
	p.mu.Lock()
	if n < 0 || n > len(p.list) {
		n = len(p.list)
	}
	list := slices.Clone(p.list[:n])
	p.list = slices.Delete(p.list, 0, n)
	p.mu.Unlock()
	if reversed {
		slices.Reverse(list)
	}
	for _, k := range list {
		k.c.resume(k)
	}
}

// Close holds nothing back any more and carries out what is parked.
func (p *Park) Close() {
	t := p.target
	t.mu.Lock()
	t.parks = slices.DeleteFunc(t.parks, func(o *Park) bool { return o == p })
	t.mu.Unlock()
	p.Release(-1)
}
