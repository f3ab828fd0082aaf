package dataplane

import (
	"time"

	"iserd.org/iserd/lu"
)

// clock holds the few timers of a reactor: retries of requests that a busy target has sent back. Nothing per I/O lives here, so a plain
// list is enough. The reactor owns it.
type clock struct {
	timers []timer
}

type timer struct {
	at    time.Time
	waker lu.Waker
	token uint32
}

// After wakes w after d, on the reactor.
func (c *clock) After(d time.Duration, w lu.Waker, token uint32) {
	c.timers = append(c.timers, timer{at: time.Now().Add(d), waker: w, token: token})
}

// advance wakes what is due.
func (c *clock) advance(now time.Time) {
	for i := 0; i < len(c.timers); {
		t := c.timers[i]
		if t.at.After(now) {
			i++
			continue
		}
		last := len(c.timers) - 1
		c.timers[i] = c.timers[last]
		c.timers[last] = timer{}
		c.timers = c.timers[:last]
		t.waker.Wake(t.token)
	}
}

// until tells how long a reactor may sleep: to its next timer, and no longer than a second when sessions want their pings looked after.
// A negative duration means for ever.
func (c *clock) until(now time.Time, sessions bool) time.Duration {
	d := time.Duration(-1)
	if sessions {
		d = time.Second
	}
	for _, t := range c.timers {
		left := max(t.at.Sub(now), time.Millisecond)
		if d < 0 || left < d {
			d = left
		}
	}
	return d
}
