package dataplane

import "time"

// spinner decides whether a reactor without work polls on or sleeps. Polling pays when the answer of a target comes sooner than a sleep
// and a wake-up take, and is a loss, to the target too if it shares the processor, when it does not. Nobody but experience knows which: a
// poll that was in vain makes the next attempt wait for twice as many sleeps, one that found something makes it come at once.
type spinner struct {
	until time.Time // zero when not polling
	left  int       // sleeps before the next attempt
	skip  int       // what left is set to by a failure
	polls uint32
}

const (
	spinBudget = 20 * time.Microsecond // about what a sleep and a wake-up cost
	spinRest   = 1 << 14               // sleeps between attempts where they keep failing
)

// goOn is called after each turn and tells whether to poll on; worked says that the turn found something.
func (s *spinner) goOn(worked bool) bool {
	switch {
	case worked && s.until.IsZero():
		if s.left > 0 {
			s.left--
			return false
		}
		s.until = time.Now().Add(spinBudget)
		return true
	case worked:
		s.skip = 0
		s.until = time.Now().Add(spinBudget)
		return true
	case s.until.IsZero():
		return false
	}
	if s.polls++; s.polls%8 != 0 || time.Now().Before(s.until) {
		return true
	}
	s.until = time.Time{}
	s.skip = min(2*s.skip+1, spinRest)
	s.left = s.skip
	return false
}
