package daemon

import (
	"context"
	"testing"
	"time"
)

// HoldTarget keeps a target's lock, as work that takes its time does, until the function is called.
func (s *Service) HoldTarget(t *testing.T, target string) (unlock func()) {
	t.Helper()
	unlock, err := s.targets.lock(context.Background(), target, "a test")
	if err != nil {
		t.Fatal(err)
	}
	return unlock
}

// Hurry shortens what is repeated in the background. The function undoes it.
func Hurry(retry, watch time.Duration) (undo func()) {
	r, w := retryAfter, watchEvery
	retryAfter, watchEvery = retry, watch
	return func() { retryAfter, watchEvery = r, w }
}
