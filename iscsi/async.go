package iscsi

import (
	"fmt"
	"time"

	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// TargetEndError tells that a session ended because the target said so in an Asynchronous Message (RFC 7143 section 11.9.1). It is
// [ErrTargetAsked].
type TargetEndError struct {
	Event     pdu.AsyncEvent
	Time2Wait time.Duration // how long to stay away before the next login
	Orderly   bool          // the session was logged out: nothing of it is left at the target
}

func (e *TargetEndError) Error() string {
	what := "target drops the connection"
	switch e.Event {
	case pdu.AsyncLogoutRequest:
		what = "target asks for logout"
	case pdu.AsyncDropAll:
		what = "target drops the session"
	case pdu.AsyncNegotiate:
		what = "target asks for a new negotiation"
	}
	return fmt.Sprintf("%v: %s", ErrTargetAsked, what)
}

// Unwrap makes it [ErrTargetAsked].
func (e *TargetEndError) Unwrap() error { return ErrTargetAsked }

// asyncMessage does what an event asks for.
func (s *Session) asyncMessage(a pdu.AsyncMessage, data []byte) error {
	if err := s.status(a.StatSN(), a.ExpCmdSN(), a.MaxCmdSN()); err != nil {
		return err
	}
	event := a.Event()
	switch event {
	case pdu.AsyncLogoutRequest, pdu.AsyncNegotiate:
		// A target that wants to negotiate has to take a logout as well (section 11.9.1); the login that follows negotiates everything.
		s.leave(event, a.Timeout())
		return nil
	case pdu.AsyncDropConnection, pdu.AsyncDropAll:
		return &TargetEndError{Event: event, Time2Wait: a.Time2Wait()}
	case pdu.AsyncTasksTerminated:
		return violation("11.9.1", "tasks of a unit are terminated, which only TaskReporting=FastAbort allows")
	case pdu.AsyncSCSI:
		sense, err := pdu.SenseData(data)
		if err != nil {
			return err
		}
		data = sense
	}
	if s.options.Async != nil {
		s.options.Async(event, scsi.LUN(a.LUN()), data)
	}
	return nil
}

// An orderly end at the target's request: no new command leaves, those that are outstanding may end, then the session is logged out and the
// connection given up. What waits is handed back as NotSent, for the session that follows.
//
//	event --> commands end, or half of the target's time is over --> Logout Request --> response --> target closes, or a second is over --> Down
//
// A target that sends no response within the other half, or within shortest, has the connection terminated.
type leaving struct {
	reason  *TargetEndError
	allowed time.Duration // what is left of the present step
	until   time.Time     // the end of the present step; zero until the next tick sets it
}

const (
	shortest     = 2 * time.Second // for the answer to a Logout Request, however short of time the target is
	closeTimeout = time.Second     // for the target to close the connection after its Logout Response
)

// leave begins an orderly end.
func (s *Session) leave(event pdu.AsyncEvent, within time.Duration) {
	if s.leaving != nil || s.state != StateLoggedIn {
		return
	}
	s.leaving = &leaving{reason: &TargetEndError{Event: event}, allowed: within / 2}
	s.frozen++
	s.soon()
	if s.inFlight == 0 || within == 0 {
		s.sendLeaving()
	}
}

// step begins the next step of an orderly end, which may take d.
func (s *Session) step(d time.Duration) {
	s.leaving.allowed, s.leaving.until = d, time.Time{}
	s.soon()
}

// sendLeaving sends the Logout Request of an orderly end.
func (s *Session) sendLeaving() {
	s.step(max(s.leaving.allowed, shortest))
	s.sendLogout(func(err error) {
		if err != nil {
			return // the session ends with it
		}
		s.leaving.reason.Orderly = true
		s.step(closeTimeout)
	})
}

// tickLeaving lets time pass in an orderly end.
func (s *Session) tickLeaving(now time.Time) (next time.Time) {
	l := s.leaving
	if l.until.IsZero() {
		l.until = now.Add(l.allowed)
	}
	if now.Before(l.until) {
		return l.until
	}
	if s.state == StateLoggedIn {
		s.sendLeaving()
		return now // the step has begun anew
	}
	s.fail(l.reason)
	return time.Time{}
}

// soon asks the owner for a call of Tick.
func (s *Session) soon() {
	if s.options.Soon != nil {
		s.options.Soon()
	}
}
