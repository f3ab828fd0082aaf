package dataplane

import (
	"time"

	"iserd.org/iserd/lu"
)

// clock holds the few timers of a reactor: retries of requests that a busy target has sent back. Nothing per I/O lives here, so a plain
// list is enough. The reactor owns it.
type clock struct {
	timers []timer
	ticks  time.Time // when the sessions want to be looked after; zero for at once
	idle   bool      // no session wants anything
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

// tick lets the sessions look after their pings, if that is due.
func (c *clock) tick(now time.Time, sessions []flusher) {
	if c.idle || now.Before(c.ticks) {
		return
	}
	c.idle = true
	for _, s := range sessions {
		if next := s.Tick(now); !next.IsZero() && (c.idle || next.Before(c.ticks)) {
			c.idle, c.ticks = false, next
		}
	}
}

// soon makes the next tick one that looks at every session: one has come.
func (c *clock) soon() { c.idle, c.ticks = false, time.Time{} }

// until tells how long a reactor may sleep: to its next timer or tick. A negative duration means for ever.
func (c *clock) until(now time.Time) time.Duration {
	d := time.Duration(-1)
	if !c.idle {
		d = max(c.ticks.Sub(now), time.Millisecond)
	}
	for _, t := range c.timers {
		left := max(t.at.Sub(now), time.Millisecond)
		if d < 0 || left < d {
			d = left
		}
	}
	return d
}
