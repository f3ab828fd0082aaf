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
	k.mu.Lock()
	if k.locks == nil {
		k.locks = make(map[string]*keyEntry)
	}
	e := k.locks[key]
	if e == nil {
		e = &keyEntry{held: make(chan struct{}, 1)}
		k.locks[key] = e
	}
	e.users++
	k.mu.Unlock()

	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if e.users--; e.users == 0 {
			delete(k.locks, key)
		}
	}
	select {
	case e.held <- struct{}{}:
		k.mu.Lock()
		e.work, e.interrupt = work, interrupt
		k.mu.Unlock()
		return func() {
			k.mu.Lock()
			e.work, e.interrupt = "", nil
			k.mu.Unlock()
			<-e.held
			leave()
		}, nil
	case <-ctx.Done():
		k.mu.Lock()
		now := e.work
		k.mu.Unlock()
		leave()
		if now == "" {
			now = "another request"
		}
		return nil, fmt.Errorf("%s is at work: %w", now, ctx.Err())
	}
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
