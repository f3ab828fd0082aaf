package lu

import (
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// How often and how long a request is sent again because the unit asked for it. BUSY and TASK SET FULL may last while an array fails over; a
// unit attention or an aborted command that comes back again and again is an error. So is a command that was under way each time its session was
// lost: a target that cannot bear it would be logged in to for ever.
const (
	maxImmediate = 8
	maxDelayed   = 200
	maxLost      = 8
	retryDelay   = 150 * time.Millisecond
)

// exception decides about a command that did not simply succeed: lost with its session, refused, or short.
func (q *Queue) exception(r *request) {
	t := &r.task
	switch t.Outcome {
	case iscsi.Lost, iscsi.NotSent:
		if t.Outcome == iscsi.Lost {
			r.lost++
		}
		if r.hopeless() {
			// What was sent may be at work at the target until the session is reinstated, so the request fails only then; that of an aborted device when
			// the path says so.
			if r.lost == 0 || q.ways.aborted && t.Outcome == iscsi.NotSent || !q.ways.target.Hold(t) {
				q.finish(r, -int32(q.ways.errno(r)))
			}
			return
		}
		if r.failsFast() && (t.Outcome == iscsi.NotSent && r.lost == 0 || t.Direction != iscsi.Write) {
			q.finish(r, -int32(unix.ENOLINK))
			return
		}
		if r.lent {
			q.unlend(r)
			return
		}
		if q.path.Hold(t) {
			q.counters.Retries++
			return
		}
		q.finish(r, -int32(q.ways.errno(r)))
		return
	case iscsi.TargetFailed:
		q.again(r, scsi.Action{Kind: scsi.RetryNow, Errno: unix.EREMOTEIO})
		return
	case iscsi.Aborted:
		// Task management has ended it, for itself or with others of its unit; the target is done with it.
		q.again(r, scsi.Action{Kind: scsi.RetryNow, Errno: unix.ETIMEDOUT})
		return
	}
	if t.Status == scsi.StatusGood {
		// GOOD with a residual: not every byte moved. The data that is there may be right, but which part the target left out is a matter of
		// trust; the whole command is sent again, a few times.
		q.again(r, scsi.Action{Kind: scsi.RetryNow, Errno: unix.EIO})
		return
	}
	var sense *scsi.Sense
	if s, err := scsi.ParseSense(t.Sense[:t.SenseLen]); err == nil {
		sense = &s
	}
	action := scsi.Classify(t.Status, sense)
	if action.Attention != scsi.AttentionNone {
		q.attention(action.Attention, sense)
	}
	if action.Kind == scsi.Fail && action.Attention == scsi.AttentionALUAChanged {
		if e, ok := q.path.(interface{ Elsewhere() bool }); ok && e.Elsewhere() {
			action.Kind = scsi.RetryDelay // until it is known which port takes it
		}
	}
	if action.Unsupported && q.withdraw(r, sense) {
		return
	}
	if action.Kind == scsi.Done {
		if t.Residual == 0 {
			if r.isRange() {
				q.rangeGood(r)
			} else {
				q.good(r)
			}
			return
		}
		action = scsi.Action{Kind: scsi.RetryNow, Errno: unix.EIO}
	}
	q.again(r, action)
}

// failsFast tells whether a layer above would rather hear of a lost session than wait: dm-multipath and md set REQ_FAILFAST_TRANSPORT, and take another
// device. A write that was sent is no such thing: it waits until it cannot come late any more, since it will be sent again by that device. Read-ahead has
// all the flags; to fail it would help nobody, and put an error into the kernel's log.
func (r *request) failsFast() bool {
	const mask = ublk.FlagFailfastTransport | ublk.FlagFailfastDriver
	return r.kernel.Flags()&mask == ublk.FlagFailfastTransport
}

// FailsFast tells whether a task that was not sent is to fail at once when there is no session.
func FailsFast(t *iscsi.Task) bool {
	switch h := t.Handler.(type) {
	case *request:
		return h.lost == 0 && h.failsFast()
	case *rangeRequest:
		return h.lost == 0 && (*request)(h).failsFast()
	}
	return false
}

// again sends a request once more, now or later, or gives it up.
func (q *Queue) again(r *request, a scsi.Action) {
	switch {
	case a.Kind == scsi.RetryNow && r.immediate < maxImmediate:
		r.immediate++
		q.counters.Retries++
		q.path.Submit(&r.task)
	case a.Kind == scsi.RetryDelay && r.delayed < maxDelayed:
		r.delayed++
		q.counters.Retries++
		q.clock.After(retryDelay, q, uint32(r.kernel.Tag()))
	default:
		q.finish(r, -int32(a.Errno))
	}
}

// Wake sends the request of a tag again after a pause. It implements [Waker].
func (q *Queue) Wake(token uint32) {
	q.path.Submit(&q.requests[token].task)
}
