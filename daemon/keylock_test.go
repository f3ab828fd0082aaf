package daemon

import (
	"context"
	"strings"
	"testing"
	"time"
)

// Who wants all locks waits for those who hold one, comes before those who wait for one, and keeps out whoever comes; holders that can go on later leave.
func TestLockAll(t *testing.T) {
	var k keyLock
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	first, err := k.lock(ctx, "a", "a login")
	if err != nil {
		t.Fatal(err)
	}
	waiter := make(chan func(), 2)
	wait := func(key string) {
		unlock, err := k.lock(ctx, key, "a logout")
		if err != nil {
			t.Error(err)
		}
		waiter <- unlock
	}
	users := func(key string) int {
		k.mu.Lock()
		defer k.mu.Unlock()
		if e := k.locks[key]; e != nil {
			return e.users
		}
		return 0
	}
	until := func(what string, cond func() bool) {
		t.Helper()
		for !cond() {
			if ctx.Err() != nil {
				t.Fatal(what)
			}
			time.Sleep(time.Millisecond)
		}
	}
	go wait("a")
	until("nobody waits for a", func() bool { return users("a") == 2 })
	short, stop := context.WithTimeout(ctx, 10*time.Millisecond)
	if _, err := k.lockAll(short, "an upgrade"); err == nil || !strings.Contains(err.Error(), "a login of a is at work") {
		t.Errorf("all, while one is held: %v", err)
	}
	stop()

	left := make(chan struct{})
	patient, err := k.lockFor(ctx, "b", "a take-over", func() {
		select {
		case <-left:
		default:
			close(left)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-left
		patient()
		first()
	}()
	free, err := k.lockAll(ctx, "an upgrade")
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-waiter:
		t.Error("one who waited for a lock has it while all are held")
	default:
	}
	short, stop = context.WithTimeout(ctx, 10*time.Millisecond)
	defer stop()
	if _, err := k.lock(short, "c", "a login"); err == nil || !strings.Contains(err.Error(), "an upgrade is at work") {
		t.Errorf("one, while all are held: %v", err)
	}
	go wait("c")
	free()
	for range 2 {
		(<-waiter)()
	}
	until("locks are left", func() bool { return users("a")+users("b")+users("c") == 0 })
}
