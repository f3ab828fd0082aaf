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

// NoteUpgrade notes that a data plane is about to end, as an upgrade does.
func (s *Service) NoteUpgrade(pid int) error {
	_, err := s.noteUpgrade(pid)
	return err
}

// Ending tells whether the daemon was told to end.
func (s *Service) Ending() bool { return s.life.Err() != nil }

// Hurry shortens what is repeated in the background. The function undoes it.
func Hurry(retry, watch time.Duration) (undo func()) {
	r, w := retryAfter, watchEvery
	retryAfter, watchEvery = retry, watch
	return func() { retryAfter, watchEvery = r, w }
}
