package dataplane

import (
	"context"
	"fmt"
	"time"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// A device is aborted when somebody wants it to end in spite of its users. New requests and those that wait for a session fail at once; those that
// the target has not answered end when it is done with them, by its own word or because their session ends:
//
//	under way ──answered──> they are done
//	      │ no answer in 2 s, or some left after 4 s
//	      v
//	ABORT TASK SET ──confirmed──> they fail
//	      │ no answer in 5 s, or refused (LIO knows no ABORT TASK SET)
//	      v
//	the session ends ──> they fail; the requests of other devices wait for the next session, as after any lost one

const (
	abortPause = 20 * time.Millisecond // between two looks at what the target has not answered
	abortGrace = 2 * time.Second       // between two answers of a target that works; twice as long in all
)

// abortStep is what is done about the tasks that the target has not answered.
type abortStep int

const (
	abortWait abortStep = iota
	abortAsk            // the target to end them
	abortDrop           // the session
)

// abort fails every request of a device, from now on and for good. When it returns no request of the device waits for the target.
func (p *Plane) abort(ctx context.Context, id int) error {
	d, err := p.attached(ctx, id)
	if err != nil {
		return err
	}
	d.logger().Warn("aborted: every request fails from now on")
	for _, q := range d.queues {
		q.reactor.Call(q.lu.Abort)
	}
	begin := time.Now()
	var asked time.Time // when the target was asked to end what it has
	last, progress := 0, begin
	tick := time.NewTicker(abortPause)
	defer tick.Stop()
	for {
		left, do := 0, abortWait
		if asked.IsZero() && (time.Since(progress) >= abortGrace || time.Since(begin) >= 2*abortGrace) {
			asked = time.Now()
		}
		switch {
		case asked.IsZero():
		case time.Since(asked) >= p.patience.abort:
			do = abortDrop
		default:
			do = abortAsk
		}
		for _, q := range d.queues {
			q.reactor.Call(func() {
				paths := d.group.on(q.reactor.index)
				for _, p := range paths {
					if q.lu.Counters().InFlight > 0 {
						p.dropHeld(d.lun)
					}
				}
				n := q.lu.Counters().InFlight // with the target, on the way there, or where their data is copied
				for _, p := range paths {
					if n > 0 {
						p.abortTasks(d.lun, do)
					}
				}
				left += n
			})
		}
		if left == 0 {
			return nil
		}
		if left != last {
			last, progress = left, time.Now()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("device %d: %d commands are still with the target: %w", id, left, ctx.Err())
		}
	}
}

// dropHeld fails the tasks of an aborted device that wait for the next session. What the lost one has sent of them may still be at work at the target: no
// session that comes, and no other device of the unit, goes on before that is over. It runs on the reactor.
func (p *path) dropHeld(lun scsi.LUN) {
	if p.session != nil {
		return
	}
	p.group.owe(p, map[scsi.LUN]bool{lun: true})
	p.release(func(t *iscsi.Task) {
		if t.LUN != lun || !lu.Hopeless(t) {
			p.Hold(t)
			return
		}
		t.Outcome = iscsi.NotSent
		t.Handler.TaskDone(t)
	})
}

// abortTasks does something about the tasks of an aborted device that the session has. It runs on the reactor.
func (p *path) abortTasks(lun scsi.LUN, do abortStep) {
	d := p.keeper
	if d == nil || p.unproven != nil || d.State() != iscsi.StateLoggedIn {
		return // a session that ends hands its tasks back, and they fail
	}
	switch do {
	case abortDrop:
		d.drop(fmt.Errorf("%w: the commands of an aborted device (logical unit %v) were not ended", iscsi.ErrTimeout, lun))
	case abortAsk:
		if d.step == nil && d.InFlight() > 0 {
			d.begin(&step{function: pdu.AbortTaskSet, lun: lun, since: time.Now()})
		}
	}
}
