package lu

import (
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/ublk"
)

// lendFrom is from how many bytes on a request lends its pages to the ring: the copy that it saves then costs more than the two operations that
// it takes.
const lendFrom = 32 << 10

// lend lets the data of a request stay in its pages, for the socket to send from and receive into. It returns false when that is not
// possible, or does not pay. Else Lent follows.
func (q *Queue) lend(r *request) bool {
	if _, _, shared := r.kernel.Shared(); r.length < lendFrom || shared {
		return false
	}
	d := iscsi.Read
	if r.kernel.Op() == ublk.OpWrite {
		d = iscsi.Write
	}
	return q.path.Reaches(d) && r.kernel.Lend()
}

// Lent goes on with a request whose pages the ring can reach, or cannot.
func (q *Queue) Lent(k *ublk.Request, err error) { q.lentTo(&q.requests[k.Tag()], err) }

func (q *Queue) lentTo(r *request, err error) {
	if err != nil {
		q.place(r)
		return
	}
	r.lent = true
	q.start(r)
}

// unlend goes on with a copy of the data: the session that is to carry it may not reach the pages.
func (q *Queue) unlend(r *request) {
	r.lent = false
	q.place(r)
}
