package daemon

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// keyLock is a set of locks by name that are waited for with a context.
type keyLock struct {
	mu    sync.Mutex
	locks map[string]*keyEntry

	all     chan struct{} // while somebody has all of them, or waits for them; closed when they are free
	allWork string        // what that is for
}

type keyEntry struct {
	held  chan struct{} // has room for one: the holder
	users int           // holder and waiters

	work      string // what the holder does
	interrupt func() // makes a holder that goes on later anyway leave; nil for one that does not
}

// lock waits until key is free, for some work. The function it returns frees it. The error says what is at work instead.
func (k *keyLock) lock(ctx context.Context, key, work string) (unlock func(), err error) {
	return k.lockFor(ctx, key, work, nil)
}

// lockFor is lock for work that calls of interrupt may break off.
func (k *keyLock) lockFor(ctx context.Context, key, work string, interrupt func()) (unlock func(), err error) {
	for {
		k.mu.Lock()
		all, now := k.all, k.allWork
		if all == nil {
			break
		}
		k.mu.Unlock()
		select {
		case <-all:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s is at work: %w", now, ctx.Err())
		}
	}
	e := k.entryLocked(key)
	k.mu.Unlock()

	select {
	case e.held <- struct{}{}:
		k.mu.Lock()
		if k.all != nil { // who waits for all of them comes first
			k.mu.Unlock()
			<-e.held
			k.leave(key, e)
			return k.lockFor(ctx, key, work, interrupt)
		}
		e.work, e.interrupt = work, interrupt
		k.mu.Unlock()
		return func() {
			k.mu.Lock()
			e.work, e.interrupt = "", nil
			k.mu.Unlock()
			<-e.held
			k.leave(key, e)
		}, nil
	case <-ctx.Done():
		k.mu.Lock()
		now := e.work
		k.mu.Unlock()
		k.leave(key, e)
		if now == "" {
			now = "another request"
		}
		return nil, fmt.Errorf("%s is at work: %w", now, ctx.Err())
	}
}

// entryLocked finds or makes the entry of a key, for one more user. Preconditions: k.mu is held.
func (k *keyLock) entryLocked(key string) *keyEntry {
	if k.locks == nil {
		k.locks = make(map[string]*keyEntry)
	}
	e := k.locks[key]
	if e == nil {
		e = &keyEntry{held: make(chan struct{}, 1)}
		k.locks[key] = e
	}
	e.users++
	return e
}

// leave forgets a user of an entry.
func (k *keyLock) leave(key string, e *keyEntry) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e.users--; e.users == 0 {
		delete(k.locks, key)
	}
}

// lockAll waits until nobody holds any key, and keeps everybody out until the function it returns is called. Holders that can go on later leave. Only one
// may be at work. The error says which key is held, and for what.
func (k *keyLock) lockAll(ctx context.Context, work string) (unlock func(), err error) {
	k.mu.Lock()
	k.all, k.allWork = make(chan struct{}), work
	k.mu.Unlock()
	free := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		close(k.all)
		k.all = nil
	}
	t := time.NewTicker(interruptPause)
	defer t.Stop()
	for {
		held, freed := k.heldNow()
		if freed == nil {
			return free, nil
		}
		select {
		case freed <- struct{}{}: // the holder has left
			<-freed
		case <-t.C:
		case <-ctx.Done():
			free()
			return nil, fmt.Errorf("%s: %w", held, ctx.Err())
		}
	}
}

// heldNow finds a key that is held and tells which, for what, and where to wait for its holder; nil when none is. A holder that can go on later is told to
// leave.
func (k *keyLock) heldNow() (what string, freed chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key, e := range k.locks {
		if e.work == "" && len(e.held) == 0 {
			continue
		}
		if e.interrupt != nil {
			e.interrupt()
		}
		work := e.work
		if work == "" {
			work = "another request"
		}
		return fmt.Sprintf("%s of %s is at work", work, key), e.held
	}
	return "", nil
}

// lockSoon is lock that makes holders leave which can go on later.
func (k *keyLock) lockSoon(ctx context.Context, key, work string) (unlock func(), err error) {
	done := make(chan struct{})
	defer close(done)
	go func() {
		t := time.NewTicker(interruptPause)
		defer t.Stop()
		for {
			k.mu.Lock()
			var interrupt func()
			if e := k.locks[key]; e != nil {
				interrupt = e.interrupt
			}
			k.mu.Unlock()
			if interrupt != nil {
				interrupt()
			}
			select {
			case <-done:
				return
			case <-t.C: // another holder of that kind may have come first
			}
		}
	}()
	return k.lock(ctx, key, work)
}

// interruptPause is the time between two looks at who holds a lock.
const interruptPause = 100 * time.Millisecond
