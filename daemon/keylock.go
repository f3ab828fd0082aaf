package daemon

import (
	"context"
	"sync"
)

// keyLock is a set of locks by name that are waited for with a context.
type keyLock struct {
	mu    sync.Mutex
	locks map[string]*keyEntry
}

type keyEntry struct {
	held  chan struct{} // has room for one: the holder
	users int           // holder and waiters
}

// lock waits until key is free. The function it returns frees it.
func (k *keyLock) lock(ctx context.Context, key string) (unlock func(), err error) {
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
		return func() { <-e.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
