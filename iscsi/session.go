package iscsi

import (
	"errors"
	"fmt"
	"time"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/iscsi/serial"
	"iserd.org/iserd/scsi"
)

// The way of a command, in the order of this file: Submit takes it, or queues it while the window is closed; send numbers it and hands it to
// the Datamover; ControlNotify brings the response; finish returns it and lets the next one go.

// State is the state of a session with one connection, by the names of RFC 7143 section 8.1.3.
type State uint8

// The states. A Session exists from the end of its login on, so the states before LOGGED_IN belong to the login exchange.
const (
	StateLoggedIn    State = iota // full feature phase
	StateInLogout                 // Logout Request sent
	StateCleanupWait              // the connection is being terminated; its memory may still be reached
	StateFree                     // ended; every task has been handed back
)

func (s State) String() string {
	switch s {
	case StateLoggedIn:
		return "LOGGED_IN"
	case StateInLogout:
		return "IN_LOGOUT"
	case StateCleanupWait:
		return "CLEANUP_WAIT"
	}
	return "FREE"
}

// Options are what the owner of a session decides.
type Options struct {
	MaxOutstanding int           // commands in flight at most; 0 means what the Datamover can carry
	PingInterval   time.Duration // a NOP-Out goes out when nothing was received for so long; 0 means never
	PingEpoch      time.Time     // unless zero: it goes out up to half the interval earlier, at a time that idle sessions with the same epoch have in common
	PingTimeout    time.Duration // the session fails when a NOP-Out is not answered in time

	// Down runs on the owner when the session has ended, after the last TaskDone; err is nil after a logout that was asked for.
	Down func(err error)

	// Async runs on the owner for an Asynchronous Message that does not end the session: a SCSI event with its sense data, or a vendor's with
	// its own data (RFC 7143 section 11.9.1). data is only valid during the call.
	Async func(event pdu.AsyncEvent, lun scsi.LUN, data []byte)

	// Rejected runs on the owner for a Reject that has no other consequence.
	Rejected func(*RejectError)

	// Soon runs on the owner when the session wants a call of Tick before the time that the last one has given.
	Soon func()
}

// meter is what a Datamover has that receives more than the PDUs it passes up: a long transfer over a slow link is a sign of life, too.
type meter interface {
	Received() uint64 // bytes so far
}

// controlSlots are the tags kept for NOP-Out, task management, text and logout requests, so that they never wait behind commands.
const controlSlots = 10

// noTag is the reserved Initiator Task Tag.
const noTag = 0xffffffff

// Session is one session in the full feature phase, with its only connection.
type Session struct {
	mover   Datamover
	options Options
	state   State
	reason  error // why the session ended

	window    serial.Window
	cmdSN     uint32 // of the next command
	expStatSN uint32

	unordered bool // StatSN is not to be relied on: see Limits

	slots      []*Task  // by slot of the ITT; nil when free
	generation []uint16 // by slot, the upper half of the ITT: an answer to an earlier use of the slot is recognised
	free       []uint16 // free slots, last in first out
	inFlight   int

	waiting struct {
		head, tail *Task
		n          int
	}
	waited uint64

	received uint64 // PDUs, so that a tick sees whether anything came
	seen     uint64
	meter    meter // nil if the Datamover has none
	lastRecv time.Time
	ping     struct {
		tag  uint32 // noTag when none is under way
		sent time.Time
	}
	logoutTag uint32
	logout    func(error)
	loggedOut bool // the target has agreed to the end

	leaving *leaving // nil unless the target has asked for the end

	managing [lastFunction + 1][]*management // by function; the first is under way
	settling []*management                   // of those, the ones that are complete but for settleTime
	frozen   int                             // reasons for which no command may be sent: functions that end many tasks, an orderly end

	limit      uint32 // unexpected PDUs that may be outstanding, 0 for any number: MaxOutstandingUnexpectedPDUs (RFC 7145 section 6.7)
	unexpected uint32 // those sent and not retired
	lastCmdSN  uint32 // of the last of them

	bhs pdu.BHS // of the PDU being built; the Datamover copies it
}

// NewSession starts the full feature phase of a connection that has just logged in. It must be called on the connection's owner.
func NewSession(mover Datamover, result *login.Result, options Options, now time.Time) (*Session, error) {
	limits := mover.Limits()
	n := limits.Outstanding - controlSlots
	if options.MaxOutstanding > 0 && options.MaxOutstanding < n {
		n = options.MaxOutstanding
	}
	if n < 1 {
		return nil, fmt.Errorf("connection carries %d PDUs at once, too few for a session", limits.Outstanding)
	}
	s := &Session{
		mover:      mover,
		options:    options,
		window:     serial.Window{ExpCmdSN: result.ExpCmdSN, MaxCmdSN: result.MaxCmdSN},
		cmdSN:      result.CmdSN,
		expStatSN:  result.ExpStatSN,
		unordered:  limits.Unordered,
		limit:      result.Keys.TargetMaxOutstandingUnexpected,
		slots:      make([]*Task, n),
		generation: make([]uint16, n+controlSlots),
		free:       make([]uint16, 0, n),
		lastRecv:   now,
	}
	for i := n - 1; i >= 0; i-- {
		s.free = append(s.free, uint16(i))
	}
	s.ping.tag, s.logoutTag = noTag, noTag
	s.meter, _ = mover.(meter)
	if err := mover.EnableDatamover(s); err != nil {
		return nil, err
	}
	return s, nil
}

// State returns the state of the session.
func (s *Session) State() State { return s.state }

// InFlight returns how many commands wait for an answer of the target.
func (s *Session) InFlight() int { return s.inFlight }

// Queued is how many tasks the session has that are not done: those at the target, and those that wait for the command window.
func (s *Session) Queued() int { return s.inFlight + s.waiting.n }

// Reaches tells whether tasks of that direction may have Pages.
func (s *Session) Reaches(d Direction) bool {
	limits := s.mover.Limits()
	return d == Read && limits.PagesIn || d == Write && limits.PagesOut
}

// MaxTransfer is the data of one command, bytes at most.
func (s *Session) MaxTransfer() int { return s.mover.Limits().MaxTransfer }

// WindowWaits returns how often a command had to wait because the command window was closed or every tag was in use.
func (s *Session) WindowWaits() uint64 { return s.waited }

// Submit sends a task, or keeps it in order until the target's command window lets it go. The end is told to t.Handler, exactly once, and
// never from within Submit unless the session is already down, or does not reach the task's Pages.
//
// The command leaves at the next Flush.
func (s *Session) Submit(t *Task) {
	t.SenseLen, t.Residual, t.Overflow, t.next = 0, 0, false, nil
	if s.state != StateLoggedIn || t.Pages != nil && !s.Reaches(t.Direction) {
		t.Outcome = NotSent
		t.Handler.TaskDone(t)
		return
	}
	if s.waiting.head != nil || len(s.free) == 0 || !s.window.Open(s.cmdSN) || s.frozen != 0 {
		s.waited++
		if s.waiting.tail == nil {
			s.waiting.head = t
		} else {
			s.waiting.tail.next = t
		}
		s.waiting.tail = t
		s.waiting.n++
		return
	}
	s.send(t)
}

// Flush lets the commands of this turn leave.
func (s *Session) Flush() {
	if s.state >= StateCleanupWait {
		return
	}
	if err := s.mover.Flush(); err != nil {
		s.fail(err)
	}
}

// send numbers a task and hands it to the Datamover. Preconditions: a free slot and an open window.
func (s *Session) send(t *Task) {
	slot := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.slots[slot] = t
	s.inFlight++
	t.itt = uint32(s.generation[slot])<<16 | uint32(slot)
	t.cmdSN = s.cmdSN
	s.cmdSN++

	c := pdu.NewSCSICommand(&s.bhs)
	c.SetFinal(true)
	c.SetRead(t.Direction == Read)
	c.SetWrite(t.Direction == Write)
	c.SetAttribute(pdu.AttributeSimple)
	c.SetLUN(uint64(t.LUN))
	c.SetInitiatorTaskTag(t.itt)
	c.SetExpectedDataTransferLength(uint32(t.Length()))
	c.SetCmdSN(t.cmdSN)
	c.SetExpStatSN(s.expStatSN)
	*c.CDB() = t.CDB
	if err := s.mover.SendControl(&s.bhs, nil, t); err != nil {
		s.fail(err)
	}
}

// drain sends what has waited, as far as the window goes.
func (s *Session) drain() {
	if s.frozen != 0 {
		if s.leaving != nil && s.state == StateLoggedIn && s.inFlight == 0 {
			s.sendLeaving()
		}
		return
	}
	for s.waiting.head != nil && len(s.free) > 0 && s.window.Open(s.cmdSN) && s.state == StateLoggedIn {
		t := s.waiting.head
		s.waiting.head = t.next
		s.waiting.n--
		if t.next == nil {
			s.waiting.tail = nil
		}
		t.next = nil
		s.send(t)
	}
}

// ControlNotify takes a PDU from the Datamover.
func (s *Session) ControlNotify(bhs *pdu.BHS, data []byte) {
	if s.state >= StateCleanupWait {
		return
	}
	s.received++
	var err error
	switch op := bhs.Opcode(); op {
	case pdu.OpSCSIResponse:
		err = s.scsiResponse(pdu.AsSCSIResponse(bhs), data)
	case pdu.OpNOPIn:
		err = s.nopIn(pdu.AsNOPIn(bhs), data)
	case pdu.OpAsyncMessage:
		err = s.asyncMessage(pdu.AsAsyncMessage(bhs), data)
	case pdu.OpLogoutResponse:
		err = s.logoutResponse(pdu.AsLogoutResponse(bhs))
	case pdu.OpTaskResponse:
		err = s.taskResponse(pdu.AsTaskResponse(bhs))
	case pdu.OpReject:
		err = s.reject(pdu.AsReject(bhs), data)
	default:
		err = violation("11.2.1.2", "opcode %v has no place here", op)
	}
	if err != nil {
		s.fail(err)
		return
	}
	s.drain() // any PDU may have opened the window
}

// status checks and advances StatSN, and takes over the window of a PDU that carries status.
func (s *Session) status(statSN, expCmdSN, maxCmdSN uint32) error {
	switch distance := serial.Distance(s.expStatSN, statSN); {
	case distance == 0:
		s.expStatSN++
	case s.unordered && distance > 0 && distance < maxDisorder:
		s.expStatSN = statSN + 1
	case s.unordered && distance < 0 && distance > -maxDisorder:
	default:
		// A gap is a lost status and a step back is a duplicate that error recovery level 0 cannot explain: either way the connection
		// can no longer be trusted (RFC 7143 section 7.1.4).
		return violation("4.2.2.2", "StatSN %d, expected %d", statSN, s.expStatSN)
	}
	s.window.Update(expCmdSN, maxCmdSN)
	return nil
}

// maxDisorder bounds how far a StatSN may be from the one that is expected where order is not kept: no more responses can be under way than
// there are tags.
const maxDisorder = 256

func (s *Session) scsiResponse(r pdu.SCSIResponse, data []byte) error {
	itt := r.InitiatorTaskTag()
	t := s.lookup(itt)
	if t == nil {
		return violation("11.2.1.8", "response to Initiator Task Tag %#08x, which is not outstanding", itt)
	}
	if err := s.status(r.StatSN(), r.ExpCmdSN(), r.MaxCmdSN()); err != nil {
		return err
	}
	t.Outcome, t.Response, t.Status = Responded, uint8(r.Response()), scsi.Status(r.Status())
	switch {
	case t.Response != 0:
		t.Outcome, t.Status = TargetFailed, 0 // status and flags mean nothing then (section 11.4.3)
	case r.Overflow():
		t.Overflow, t.Residual = true, r.ResidualCount()
	case r.Underflow():
		t.Residual = r.ResidualCount()
		if int64(t.Residual) > int64(t.Length()) {
			return violation("11.4.5.1", "underflow of %d bytes in a transfer of %d", t.Residual, t.Length())
		}
	}
	if len(data) > 0 {
		sense, err := pdu.SenseData(data)
		if err != nil {
			return err
		}
		t.SenseLen = copy(t.Sense[:], sense)
	}
	s.finish(t)
	return nil
}

// lookup finds the outstanding task of an Initiator Task Tag.
func (s *Session) lookup(itt uint32) *Task {
	slot := int(itt & 0xffff)
	if slot >= len(s.slots) || s.slots[slot] == nil || s.slots[slot].itt != itt {
		return nil
	}
	return s.slots[slot]
}

// finish frees the slot of a task and hands the task back.
func (s *Session) finish(t *Task) {
	slot := t.itt & 0xffff
	s.slots[slot] = nil
	s.generation[slot] = (s.generation[slot] + 1) & 0x7fff // never makes noTag
	s.free = append(s.free, uint16(slot))
	s.inFlight--
	t.Handler.TaskDone(t)
}

// controlTag returns a fresh tag in the control range, one index for each purpose.
func (s *Session) controlTag(index int) uint32 {
	slot := len(s.slots) + index
	s.generation[slot] = (s.generation[slot] + 1) & 0x7fff
	return uint32(s.generation[slot])<<16 | uint32(slot)
}

// The control tags by purpose.
const (
	tagPing = iota
	tagLogout
	tagManage = iota // and the function, which begins at 1: the last is controlSlots - 1
)

// Tick lets time pass: it pings an idle target and fails a session whose target does not answer. It returns when it wants to be called
// next, at the latest; the zero time for never. Earlier and later calls do no harm.
func (s *Session) Tick(now time.Time) (next time.Time) {
	if s.state >= StateCleanupWait {
		return time.Time{}
	}
	next = s.tick(now)
	if s.leaving != nil && s.state < StateCleanupWait {
		if end := s.tickLeaving(now); next.IsZero() || !end.IsZero() && end.Before(next) {
			next = end
		}
	}
	if len(s.settling) > 0 && s.state < StateCleanupWait {
		if end := s.tickSettling(now); next.IsZero() || !end.IsZero() && end.Before(next) {
			next = end
		}
	}
	return next
}

// tick is Tick for the ping.
func (s *Session) tick(now time.Time) (next time.Time) {
	if activity := s.activity(); activity != s.seen {
		s.seen, s.lastRecv = activity, now
	}
	if s.ping.tag != noTag {
		// Anything received after the ping proves that the target lived then; the answer itself may wait behind data.
		last := s.ping.sent
		if s.lastRecv.After(last) {
			last = s.lastRecv
		}
		if silence := now.Sub(last); silence > s.options.PingTimeout {
			s.fail(fmt.Errorf("%w: no answer to NOP-Out and nothing else for %v", ErrTimeout, silence.Round(time.Second)))
			return time.Time{}
		}
		// Looked at again before that, since the answer does not ask for a tick.
		next = last.Add(s.options.PingTimeout + 1)
		if soon := now.Add(s.options.PingInterval); soon.Before(next) {
			next = soon
		}
		return next
	}
	if s.options.PingInterval <= 0 || s.state != StateLoggedIn {
		return time.Time{}
	}
	if due := s.pingDue(); now.Before(due) {
		return due
	}
	n := pdu.NewNOPOut(&s.bhs)
	if !s.number() {
		return now.Add(s.options.PingInterval)
	}
	s.ping.tag, s.ping.sent = s.controlTag(tagPing), now
	n.SetInitiatorTaskTag(s.ping.tag)
	if err := s.mover.SendControl(&s.bhs, nil, nil); err != nil {
		s.fail(err)
		return time.Time{}
	}
	s.Flush()
	return now.Add(s.options.PingInterval)
}

// pingDue is when an idle target is asked.
func (s *Session) pingDue() time.Time {
	due := s.lastRecv.Add(s.options.PingInterval)
	if epoch, step := s.options.PingEpoch, s.options.PingInterval/2; !epoch.IsZero() && step > 0 {
		due = epoch.Add(due.Sub(epoch).Truncate(step))
	}
	return due
}

// number makes the PDU in s.bhs immediate and gives it its numbers. Where the target has said how many such PDUs it can take besides the command
// window, one that is too many takes a place in the window instead (RFC 7145 section 8.1.1). It returns false when there is none either.
func (s *Session) number() bool {
	s.bhs.SetCmdSN(s.cmdSN)
	s.bhs.SetExpStatSN(s.expStatSN)
	if s.limit != 0 {
		if serial.Less(s.lastCmdSN, s.window.ExpCmdSN) {
			s.unexpected = 0 // the target has taken a command that came after them
		}
		if s.unexpected >= s.limit {
			if !s.window.Open(s.cmdSN) {
				return false
			}
			s.cmdSN++
			return true
		}
		s.unexpected++
		s.lastCmdSN = s.cmdSN
	}
	s.bhs.SetImmediate(true)
	return true
}

// activity grows with whatever the target sends.
func (s *Session) activity() uint64 {
	if s.meter != nil {
		return s.received + s.meter.Received()
	}
	return s.received
}

func (s *Session) nopIn(n pdu.NOPIn, data []byte) error {
	s.window.Update(n.ExpCmdSN(), n.MaxCmdSN())
	switch {
	case n.InitiatorTaskTag() != noTag:
		if n.InitiatorTaskTag() != s.ping.tag {
			return violation("11.19.1", "NOP-In answers tag %#08x, which no NOP-Out has", n.InitiatorTaskTag())
		}
		s.pong()
		return s.status(n.StatSN(), n.ExpCmdSN(), n.MaxCmdSN())
	case n.TargetTransferTag() != noTag:
		// The target pings: answer with its tag, LUN and data. StatSN is the next one and does not advance (section 11.19.2). The answer is
		// expected, and so does not count as an immediate one (RFC 7145 section 8.1.1.2).
		lun := n.LUN()
		ttt := n.TargetTransferTag()
		o := pdu.NewNOPOut(&s.bhs)
		o.SetImmediate(true)
		o.SetLUN(lun)
		o.SetInitiatorTaskTag(noTag)
		o.SetTargetTransferTag(ttt)
		o.SetCmdSN(s.cmdSN)
		o.SetExpStatSN(s.expStatSN)
		return s.mover.SendControl(&s.bhs, data, nil)
	}
	return nil
}

// pong notes that the ping was answered. The target was alive when it was asked, which is the time that the next call of Tick goes by.
func (s *Session) pong() {
	s.ping.tag, s.lastRecv = noTag, s.ping.sent
	s.seen = s.activity()
}

// Logout asks the target to end the session. done runs on the owner with nil when the target agreed; the target then ends the connection, and
// Down follows. Should it not do so, Terminate does. Outstanding tasks must have ended before: the target ends what is left (RFC 7143
// section 11.14).
//
// The connection is left to the target because LIO is still at work on the logout when its response arrives: isert warns about a command that
// is released twice when the initiator disconnects in that moment (seen on Linux 7.2).
func (s *Session) Logout(done func(error)) {
	if s.leaving != nil && s.state == StateInLogout { // it is under way at the target's request
		s.leaving = nil
		if s.loggedOut {
			done(nil)
		} else {
			s.logout = done
		}
		return
	}
	if s.state != StateLoggedIn {
		done(fmt.Errorf("session is in state %v", s.state))
		return
	}
	s.leaving = nil // now it is our own wish
	s.sendLogout(done)
}

// sendLogout sends the Logout Request.
func (s *Session) sendLogout(done func(error)) {
	s.state, s.logout, s.logoutTag = StateInLogout, done, s.controlTag(tagLogout)
	l := pdu.NewLogoutRequest(&s.bhs, pdu.CloseSession)
	l.SetInitiatorTaskTag(s.logoutTag)
	if !s.number() {
		s.fail(fmt.Errorf("target takes no Logout Request: its window is closed and %d unexpected PDUs are outstanding", s.unexpected))
		return
	}
	if err := s.mover.SendControl(&s.bhs, nil, nil); err != nil {
		s.fail(err)
		return
	}
	s.Flush()
}

func (s *Session) logoutResponse(l pdu.LogoutResponse) error {
	if s.state != StateInLogout || l.InitiatorTaskTag() != s.logoutTag {
		return violation("11.15", "Logout Response that nobody asked for")
	}
	done := s.logout
	s.logout = nil
	if code := l.Response(); code != pdu.LogoutSuccess {
		err := fmt.Errorf("target refuses logout: %v", code)
		done(err)
		return err
	}
	s.loggedOut = true
	done(nil)
	return nil
}

// Terminate ends the session without asking the target. Down follows.
func (s *Session) Terminate(reason error) { s.end(reason) }

// fail ends the session because of err.
func (s *Session) fail(err error) {
	if err == nil {
		err = errors.New("connection lost")
	}
	s.end(err)
}

func (s *Session) end(reason error) {
	if s.state >= StateCleanupWait {
		return
	}
	s.state, s.reason = StateCleanupWait, reason
	s.mover.ConnectionTerminate(reason)
}

// ConnectionTerminateNotify takes the end of the connection from the Datamover: nothing of a task can be reached any more, so every task is
// handed back.
func (s *Session) ConnectionTerminateNotify(err error) {
	if s.state == StateFree {
		return
	}
	if s.state != StateCleanupWait {
		s.reason = err
	}
	s.state = StateFree
	for _, t := range s.slots {
		if t != nil {
			t.Outcome = Lost
			s.finish(t)
		}
	}
	for s.waiting.head != nil {
		t := s.waiting.head
		s.waiting.head, t.next = t.next, nil
		t.Outcome = NotSent
		t.Handler.TaskDone(t)
	}
	s.waiting.tail, s.waiting.n = nil, 0
	s.unmanaged()
	if s.logout != nil {
		s.logout(err)
		s.logout = nil
	}
	if s.options.Down != nil {
		switch {
		case s.leaving != nil && (s.loggedOut || s.reason == nil):
			s.reason = s.leaving.reason
		case s.loggedOut:
			s.reason = nil
		}
		s.options.Down(s.reason)
	}
}
