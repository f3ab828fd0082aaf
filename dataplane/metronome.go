package dataplane

import (
	"time"

	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
)

// metronome lets a busy reactor wait without a time-out of its own, which would cost a timer set up and taken down at each wait: while
// there is work, one timer of the ring ticks for all of them. At each beat the reactor looks at the time; a beat that finds nothing done since
// the one before is the last, and the reactor sleeps deeply from then on.
type metronome struct {
	reactor *Reactor
	slot    uring.Slot
	period  uapi.KernelTimespec
	running bool
	turns   uint64 // at the last beat
	quiet   bool   // nothing was done between the last two beats
	streak  int    // turns with work since the last deep sleep of some length
}

const (
	beat = 4 * time.Millisecond

	// warmUp is how many turns with work make a reactor busy. A ping and its answer are fewer.
	warmUp = 4
)

func (m *metronome) open(r *Reactor) {
	m.reactor, m.quiet = r, true
	m.period = uapi.KernelTimespec{Nsec: int64(beat)}
	m.slot = r.ring.Attach(m)
}

// worked notes a turn that found work.
func (m *metronome) worked() {
	if m.streak++; m.streak < warmUp {
		return
	}
	m.quiet = false
	if !m.running {
		m.start()
	}
}

func (m *metronome) start() {
	m.running, m.turns = true, m.reactor.stats.Turns
	sqe := m.reactor.ring.SQE()
	sqe.PrepTimeout(&m.period, 0, 0)
	sqe.UserData = m.slot.Key(0)
}

// Complete takes a beat.
func (m *metronome) Complete(uint32, int32, uint32) {
	r := m.reactor
	r.beats++
	r.tick(time.Now())
	m.running = false
	if m.quiet = r.stats.Turns == m.turns; !m.quiet {
		m.start()
	}
}
