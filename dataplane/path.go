package dataplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// path is the way of one reactor's requests to a target: a session as long as there is one, and the requests that wait for the next one
// while there is none. It implements [iserd.org/iserd/lu.Path].
//
//	        login                session lost                login, same ISID
//	(new) ---------> connected ----------------> recovering ------------------> connected
//	                     |                           |  replacement timeout
//	                     | logout                    v
//	                     +------> ended <----- failing: requests fail at once, login goes on being tried
//
// Tasks that a lost session hands back are sent again by the session that replaced it: its login with the same ISID and TSIH 0 is a session
// reinstatement, which ends every task of the old session at the target first (RFC 7143 section 6.3.5). Where it is none, because the portal group is
// another one, or where another path takes the tasks over (fan.go), the units are reset first (fence.go). So no write that was sent before the loss can
// take effect after its repetition.
type path struct {
	group   *group
	reactor *Reactor
	index   int   // among the group's, and of its ISID
	choices []int // routes, beginning with the preferred one

	// Owned by the reactor.
	session  *iscsi.Session
	draining *iscsi.Session // answers what it has, and is to end then: see leaveRoute
	unproven *iscsi.Session // logged in, and being asked whether its units are the right ones: see prove
	keeper   *deadline      // of either
	held     struct{ head, tail *heldTask }
	refuse   bool        // do not hold: fail at once
	queues   []*lu.Queue // of the devices, on this reactor
	fans     []*fan      // of those that several sessions serve
	access   map[scsi.LUN]access

	unsettled bool // an earlier data plane's session of it may have commands at work
	losses    int  // of sessions
	clean     bool // the last one had nothing under way

	escalations escalations

	// Guarded by group.mu.
	info   ipc.Session
	at     int           // route of the session, or of the last one
	by     int           // of the login under way, or the last one
	home   int           // that is preferred
	down   chan struct{} // closed when the session that Logout ended is gone
	since  time.Time     // the present session's begin
	lostAt uint64        // when the last session was lost, by the count of debts
	last   struct {      // the session before the next one
		there   bool   // there was one, of this data plane or, if old,
		old     bool   // of one that has ended, so that nobody knows what it had sent
		tpgt    uint16 // of the target's portal group that it was with, unless that is
		unknown bool
	}

	shun time.Duration // the pause before the first attempt after the next loss; only the recovery goroutine uses it
}

// heldTask is a link of the list of held tasks. Losing a session is rare, so it may allocate.
type heldTask struct {
	task *iscsi.Task
	next *heldTask
}

// Submit sends a task by the session, or holds it.
func (p *path) Submit(t *iscsi.Task) {
	if p.session != nil {
		p.session.Submit(t)
		return
	}
	if lu.FailsFast(t) || !p.Hold(t) {
		t.Outcome = iscsi.NotSent
		t.Handler.TaskDone(t)
	}
}

// Reaches tells whether the session moves data that is not mapped in this process.
func (p *path) Reaches(d iscsi.Direction) bool { return p.session != nil && p.session.Reaches(d) }

// join and leave keep the queues that the path's sessions serve. They run on the reactor.
func (p *path) join(q *lu.Queue) { p.queues = append(p.queues, q) }

func (p *path) leave(q *lu.Queue) {
	p.queues = slices.DeleteFunc(p.queues, func(x *lu.Queue) bool { return x == q })
}

// Refuses tells whether tasks fail at once: there is no session, and none came in time.
func (p *path) Refuses() bool { return p.session == nil && p.refuse }

// Hold keeps a task for the next session. It returns false when the task is to fail instead: none came in time, or one is there.
func (p *path) Hold(t *iscsi.Task) bool {
	if p.refuse || p.session != nil && p.session.State() == iscsi.StateLoggedIn {
		return false
	}
	h := &heldTask{task: t}
	if p.held.tail == nil {
		p.held.head = h
	} else {
		p.held.tail.next = h
	}
	p.held.tail = h
	return true
}

// release hands every held task to submit. It runs on the reactor.
func (p *path) release(submit func(*iscsi.Task)) {
	h := p.held.head
	p.held.head, p.held.tail = nil, nil
	for ; h != nil; h = h.next {
		submit(h.task)
	}
}

// fail lets held tasks and those that come fail at once. It runs on the reactor.
func (p *path) fail() {
	p.refuse, p.unsettled = true, false
	for _, q := range p.queues {
		q.Drop()
	}
	p.release(func(t *iscsi.Task) {
		t.Outcome = iscsi.NotSent
		t.Handler.TaskDone(t)
	})
	p.chosen()
}

// firstLogin is login, tried again when the target drops the connection in its course, or says that it is out of resources: isert does the former
// when it finds no contiguous memory for a session, which passes.
func (p *path) firstLogin(ctx context.Context, once func(context.Context) error) error {
	for try := 1; ; try++ {
		err := once(ctx)
		if err == nil || try == 3 || login.RetryOf(err) != login.RetryNow && !errors.Is(err, login.ErrOutOfResources) {
			return err
		}
		select {
		case <-time.After(250 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// loginAt makes a session on the path's reactor. It runs on a control goroutine.
func (p *path) loginAt(ctx context.Context, route ipc.Route) error {
	g := p.group
	g.mu.Lock()
	connect := time.Duration(0)
	if p.last.there {
		connect = connectAgain
	}
	g.mu.Unlock()
	port, err := g.plane.open(ctx, p.reactor, route.Transport, route.Portal, settings.BindingOf(&g.request.Settings), connect)
	if err != nil {
		return err
	}
	isid := g.request.ISID
	qualifier := uint16(isid[4])<<8 | uint16(isid[5])
	qualifier += uint16(p.index)
	isid[4], isid[5] = byte(qualifier>>8), byte(qualifier)
	config := login.Config{
		InitiatorName: g.request.InitiatorName,
		TargetName:    g.request.Target,
		SessionType:   login.Normal,
		ISID:          isid,
		Transport:     login.TCP,
	}
	port.configure(&config)
	applySettings(&config, &g.request)
	result, err := iscsi.Login(ctx, port, config)
	if err != nil {
		port.Close()
		return err
	}
	lost := make(chan struct{})
	options := iscsi.Options{
		PingInterval: api.SecondsOr(g.request.Settings.NoopOutInterval, pingInterval),
		PingEpoch:    g.plane.begun,
		PingTimeout:  api.SecondsOr(g.request.Settings.NoopOutTimeout, pingTimeout),
		Down:         func(err error) { p.lost(err, lost) },
		Async:        p.event,
		Rejected:     func(err *iscsi.RejectError) { g.log(p).WithError(err).Warn("PDU rejected") },
		Soon:         p.reactor.clock.soon,
	}
	var session *iscsi.Session
	p.reactor.Call(func() {
		var mover iscsi.Datamover
		if mover, err = port.attach(p.reactor); err != nil {
			return
		}
		mover.NoticeKeyValues(&result.Keys)
		if session, err = iscsi.NewSession(mover, result, options, time.Now()); err != nil {
			mover.ConnectionTerminate(err)
			return
		}
		p.unproven, p.keeper = session, newDeadline(p, session, g.request.RequestTimeout)
		p.reactor.addFlusher(p.keeper)
	})
	if err != nil {
		port.Close()
		return err
	}
	return p.adopt(ctx, session, result.TargetPortalGroupTag, lost, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		p.down, p.since = lost, time.Now()
		p.last.there, p.last.old, p.last.unknown, p.last.tpgt = true, false, false, result.TargetPortalGroupTag
		p.info = ipc.Session{
			Reactor:      p.reactor.index,
			ISID:         isid,
			TSIH:         result.TSIH,
			State:        iscsi.StateLoggedIn.String(),
			LocalAddress: port.LocalAddr(),
			RDMADevice:   port.device(),
			Transport:    route.Transport,
			TPGT:         result.TargetPortalGroupTag,
			Negotiated:   result.Negotiated,
			AuthMethod:   result.AuthMethod,
		}
		if route.Portal != g.request.Portal {
			p.info.Portal = route.Portal
		}
		g.tpgt = result.TargetPortalGroupTag
	})
}

// lost runs on the reactor when the session has ended; err is nil after a logout.
func (p *path) lost(err error, done chan struct{}) {
	p.reactor.removeFlusher(p.keeper)
	p.keeper = nil
	if p.unproven != nil { // the login sees it
		p.unproven = nil
		close(done)
		return
	}
	p.session = nil
	p.losses++
	p.clean = errors.Is(err, errReturn)
	g := p.group
	g.mu.Lock()
	g.debts.last++
	p.lostAt = g.debts.last
	g.mu.Unlock()
	p.chosen()
	close(done)
	if err == nil {
		p.fail()
	}
	go p.group.sessionEnded(p, err)
}

// event runs on the reactor for an Asynchronous Message that does not end the session.
func (p *path) event(event pdu.AsyncEvent, lun scsi.LUN, data []byte) {
	log := p.group.log(p).WithField("lun", lun)
	if event != pdu.AsyncSCSI {
		log.WithField("event", event).Info("target sends a message of its vendor's")
		return
	}
	p.attention(lun, data)
}

// logout ends the session politely. It runs on a control goroutine, after recovery has been stopped.
func (p *path) logout(ctx context.Context) error {
	p.group.mu.Lock()
	down := p.down
	p.group.mu.Unlock()
	if down == nil { // there never was one
		p.reactor.Call(p.fail)
		return nil
	}
	answer := make(chan error, 1)
	p.reactor.Call(func() {
		if p.session == nil {
			answer <- nil
			return
		}
		p.session.Logout(func(err error) { answer <- err })
	})
	var err error
	select {
	case err = <-answer:
	case <-ctx.Done():
		err = fmt.Errorf("%w: no answer to Logout Request in time", iscsi.ErrTimeout)
	}
	if err == nil {
		// The target closes the connection; one that does not is not waited for.
		select {
		case <-down:
		case <-time.After(closeTimeout):
		case <-ctx.Done():
		}
	}
	// Whatever the target said, the session is over.
	p.reactor.Call(func() {
		if p.session != nil {
			p.session.Terminate(errLoggedOut)
		}
	})
	<-down
	p.reactor.Call(p.fail)
	return err
}

// closeTimeout is how long a target may take to close the connection of a session that was logged out.
const closeTimeout = time.Second

// errLoggedOut ends a session that did not answer to Logout.
var errLoggedOut = errors.New("logged out")

// Keep-alive: a target that says nothing for pingInterval is asked; one that then says nothing for pingTimeout is given up. The time-out
// is far above the seconds for which an RDMA transport may retry on its own.
const (
	pingInterval = 5 * time.Second
	pingTimeout  = 15 * time.Second
)
