package lu

import (
	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// Notice is what a unit says besides the answer to a request.
type Notice struct {
	Unit      *Unit
	Attention scsi.Attention // what changed, AttentionNone if nothing did
	Text      string         // for the operator
	Parked    bool           // requests of the queue wait until Proceed or Condemn is called
}

// ways are what a queue does with its requests beside sending them. They take the place of the path, so that a queue whose unit is not in doubt does
// not have to look.
//
//	target ----the unit may be another one---> parked ----it is----> condemned
//	  ^  ^------------it is not------------------|                      |
//	  +--------------------the old one is back--------------------------+
//
// Abort condemns a queue from any of them, and nothing leads back.
type ways struct {
	target    Path
	condemned bool
	aborted   bool // condemned for good
	parked    []*iscsi.Task
}

// condemned is a path on which every task fails.
type condemned struct{}

func (condemned) Submit(t *iscsi.Task) {
	t.Outcome = iscsi.NotSent
	t.Handler.TaskDone(t)
}
func (condemned) Reaches(iscsi.Direction) bool { return false }
func (condemned) Hold(*iscsi.Task) bool        { return false }

// parking is a path on which tasks wait. Parking is rare, so it may allocate.
type parking struct{ w *ways }

func (p parking) Submit(t *iscsi.Task) {
	if p.refuses() {
		p.w.target.Submit(t)
		return
	}
	p.w.parked = append(p.w.parked, t)
}
func (parking) Reaches(iscsi.Direction) bool { return false }
func (p parking) Hold(t *iscsi.Task) bool {
	if t.Outcome == iscsi.Lost && t.Direction == iscsi.Write {
		return p.w.target.Hold(t) // the session that comes asks who the unit is before it sends anything
	}
	if p.refuses() {
		return false
	}
	p.Submit(t)
	return true
}

// refuses tells whether the path lets everything fail, so that waiting for it is in vain.
func (p parking) refuses() bool {
	r, ok := p.w.target.(interface{ Refuses() bool })
	return ok && r.Refuses()
}

// errno is what a request gets that no path takes.
func (w *ways) errno(r *request) unix.Errno {
	switch {
	case w.aborted:
		return unix.EIO
	case w.condemned:
		return unix.ENODEV
	case r.lost > maxLost:
		return unix.EIO
	}
	return unix.ENOLINK
}

// Condemn makes every request fail with ENODEV: those that wait, and those that come. The unit is gone, or another one.
func (q *Queue) Condemn() {
	q.ways.condemned, q.path = true, condemned{}
	q.unpark()
	if w, ok := q.ways.target.(interface{ Drop() }); ok {
		w.Drop() // of what waits for a session, that which is hopeless
	}
}

// Abort is Condemn for good, and with EIO: the device is on its way out, whatever becomes of its unit.
func (q *Queue) Abort() {
	q.ways.aborted = true
	q.Condemn()
}

// Park lets requests wait until Proceed or Condemn is called: nobody has asked the unit yet who it is.
func (q *Queue) Park() {
	if !q.ways.condemned {
		q.path = parking{&q.ways}
	}
}

// Proceed sends requests to the target again, those that wait first.
func (q *Queue) Proceed() {
	if q.ways.aborted {
		return
	}
	q.ways.condemned, q.path = false, q.ways.target
	q.unpark()
}

// Drop gives tasks that wait to a path that refuses them; the queue stays as it is.
func (q *Queue) Drop() {
	if !(parking{&q.ways}).refuses() {
		return
	}
	list := q.ways.parked
	q.ways.parked = nil
	for _, t := range list {
		q.ways.target.Submit(t)
	}
}

// unpark gives tasks that wait to the path.
func (q *Queue) unpark() {
	list := q.ways.parked
	q.ways.parked = nil
	for _, t := range list {
		q.path.Submit(t)
	}
}

// Hopeless tells whether a task that was held is to fail instead of being sent again: its queue is condemned, or it was lost too often.
func Hopeless(t *iscsi.Task) bool {
	switch h := t.Handler.(type) {
	case *request:
		return h.hopeless()
	case *rangeRequest:
		return (*request)(h).hopeless()
	}
	return false
}

func (r *request) hopeless() bool { return r.queue.ways.condemned || r.lost > maxLost }

// Renew takes over what has changed at the unit: see [Unit.Renewed].
func (q *Queue) Renew(u *Unit) {
	old := q.unit
	q.unit = u
	q.long = u.Blocks > 1<<32
	// What the unit has refused is not tried again as long as it says the same of itself.
	if old == nil || old.Discard != u.Discard {
		q.ranges.discard = u.Discard
	}
	if old == nil || old.Zeroes != u.Zeroes || old.ZeroesUnmap != u.ZeroesUnmap {
		q.ranges.zeroes, q.ranges.unmapZeroes = u.Zeroes, u.ZeroesUnmap
	}
}

// tell passes a notice on.
func (q *Queue) tell(n Notice) {
	if q.notice != nil {
		q.notice(n)
	}
}

// Heard is for a unit attention that another command met than one of the queue's: the target tells it once. It runs on the queue's reactor.
func (q *Queue) Heard(a scsi.Attention, sense *scsi.Sense) { q.attention(a, sense) }

// LUN is that of the queue's unit.
func (q *Queue) LUN() scsi.LUN { return q.unit.LUN }

// attention passes a unit attention on. While the unit may be another one its requests wait: the command that met the attention was not executed, the
// next one would be (SAM-5 section 5.14).
func (q *Queue) attention(a scsi.Attention, sense *scsi.Sense) {
	if q.notice == nil || a == scsi.AttentionOther {
		return
	}
	n := Notice{Unit: q.unit, Attention: a}
	if sense != nil {
		n.Text = sense.String()
	}
	if a == scsi.AttentionInquiryChanged && !q.ways.condemned {
		q.path, n.Parked = parking{&q.ways}, true
	}
	q.notice(n)
}
