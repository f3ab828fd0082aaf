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
	PingTimeout    time.Duration // the session fails when a NOP-Out is not answered in time

	// Down runs on the owner when the session has ended, after the last TaskDone; err is nil after a logout that was asked for.
	Down func(err error)

	// Async runs on the owner for an Asynchronous Message that asks for something (RFC 7143 section 11.9.1).
	Async func(event pdu.AsyncEvent, lun scsi.LUN, sense []byte)
}

// meter is what a Datamover has that receives more than the PDUs it passes up: a long transfer over a slow link is a sign of life, too.
type meter interface {
	Received() uint64 // bytes so far
}

// controlSlots are the tags kept for NOP-Out, task management, text and logout requests, so that they never wait behind commands.
const controlSlots = 8

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

	waiting struct{ head, tail *Task }
	waited  uint64

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
	if s.waiting.head != nil || len(s.free) == 0 || !s.window.Open(s.cmdSN) {
		s.waited++
		if s.waiting.tail == nil {
			s.waiting.head = t
		} else {
			s.waiting.tail.next = t
		}
		s.waiting.tail = t
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
	for s.waiting.head != nil && len(s.free) > 0 && s.window.Open(s.cmdSN) && s.state == StateLoggedIn {
		t := s.waiting.head
		s.waiting.head = t.next
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
	case pdu.OpReject:
		err = s.reject(pdu.AsReject(bhs))
	default:
		err = violation("11.2.1.2", "opcode %v has no place here", op)
	}
	if err != nil {
		s.fail(err)
	}
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
	if t.Response != 0 {
		t.Outcome = TargetFailed
	}
	switch {
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
	s.drain()
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
)

// Tick lets time pass: it pings an idle target and fails a session whose target does not answer. It returns when it wants to be called
// next, at the latest; the zero time for never. Earlier and later calls do no harm.
func (s *Session) Tick(now time.Time) (next time.Time) {
	if s.state >= StateCleanupWait {
		return time.Time{}
	}
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
		return last.Add(s.options.PingTimeout + 1)
	}
	if s.options.PingInterval <= 0 || s.state != StateLoggedIn {
		return time.Time{}
	}
	if now.Sub(s.lastRecv) < s.options.PingInterval {
		return s.lastRecv.Add(s.options.PingInterval)
	}
	s.ping.tag, s.ping.sent = s.controlTag(tagPing), now
	n := pdu.NewNOPOut(&s.bhs)
	n.SetImmediate(true)
	n.SetInitiatorTaskTag(s.ping.tag)
	n.SetTargetTransferTag(noTag)
	n.SetCmdSN(s.cmdSN)
	n.SetExpStatSN(s.expStatSN)
	if err := s.mover.SendControl(&s.bhs, nil, nil); err != nil {
		s.fail(err)
		return time.Time{}
	}
	s.Flush()
	return now.Add(s.options.PingInterval)
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
		// The target was alive when it was asked, which is the time that the next call of Tick goes by.
		s.ping.tag, s.lastRecv = noTag, s.ping.sent
		s.seen = s.activity()
		return s.status(n.StatSN(), n.ExpCmdSN(), n.MaxCmdSN())
	case n.TargetTransferTag() != noTag:
		// The target pings: answer with its tag, LUN and data. StatSN is the next one and does not advance (section 11.19.2).
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
	s.drain()
	return nil
}

func (s *Session) asyncMessage(a pdu.AsyncMessage, data []byte) error {
	if err := s.status(a.StatSN(), a.ExpCmdSN(), a.MaxCmdSN()); err != nil {
		return err
	}
	event := a.Event()
	switch event {
	case pdu.AsyncLogoutRequest:
		return fmt.Errorf("%w: target asks for logout", ErrTargetAsked)
	case pdu.AsyncDropConnection, pdu.AsyncDropAll:
		return fmt.Errorf("%w: target drops the connection", ErrTargetAsked)
	case pdu.AsyncNegotiate:
		return fmt.Errorf("%w: target asks for renegotiation", ErrTargetAsked)
	}
	if s.options.Async != nil {
		s.options.Async(event, scsi.LUN(a.LUN()), data)
	}
	return nil
}

func (s *Session) reject(r pdu.Reject) error {
	if err := s.status(r.StatSN(), r.ExpCmdSN(), r.MaxCmdSN()); err != nil {
		return err
	}
	return &RejectError{Reason: r.Reason()}
}

// Logout asks the target to end the session. done runs on the owner with nil when the target agreed; the target then ends the connection, and
// Down follows. Should it not do so, Terminate does. Outstanding tasks must have ended before: the target ends what is left (RFC 7143
// section 11.14).
//
// The connection is left to the target because LIO is still at work on the logout when its response arrives: isert warns about a command that
// is released twice when the initiator disconnects in that moment (seen on Linux 7.2).
func (s *Session) Logout(done func(error)) {
	if s.state != StateLoggedIn {
		done(fmt.Errorf("session is in state %v", s.state))
		return
	}
	s.state, s.logout, s.logoutTag = StateInLogout, done, s.controlTag(tagLogout)
	l := pdu.NewLogoutRequest(&s.bhs, pdu.CloseSession)
	l.SetImmediate(true)
	l.SetInitiatorTaskTag(s.logoutTag)
	l.SetCmdSN(s.cmdSN)
	l.SetExpStatSN(s.expStatSN)
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
	s.waiting.tail = nil
	if s.logout != nil {
		s.logout(err)
		s.logout = nil
	}
	if s.options.Down != nil {
		if s.loggedOut {
			s.reason = nil
		}
		s.options.Down(s.reason)
	}
}
