package dataplane

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// Opcodes and functions that the scripts below look at.
const (
	opTaskManagement = 0x02
	opDataOut        = 0x05
)

// hang makes a target swallow the data of writes, so that they are never answered, and the task management functions that mute lists. It counts
// the functions that come.
type hang struct {
	mu      sync.Mutex
	data    bool
	mute    map[pdu.TaskFunction]bool
	came    map[pdu.TaskFunction]int
	changed chan struct{}
}

func newHang(target *testtarget.Target, mute ...pdu.TaskFunction) *hang {
	h := &hang{data: true, mute: map[pdu.TaskFunction]bool{}, came: map[pdu.TaskFunction]int{}, changed: make(chan struct{}, 64)}
	for _, f := range mute {
		h.mute[f] = true
	}
	target.SetHooks(testtarget.Hooks{Received: h.received})
	return h
}

func (h *hang) received(_ *testtarget.Conn, q *testtarget.PDU) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch q.Opcode() {
	case opDataOut:
		return !h.data
	case opTaskManagement:
		f := pdu.TaskFunction(q.BHS[1] & 0x7f)
		h.came[f]++
		h.changed <- struct{}{}
		return !h.mute[f]
	}
	return true
}

func (h *hang) count(f pdu.TaskFunction) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.came[f]
}

func (h *hang) heal() {
	h.mu.Lock()
	h.data = false
	h.mu.Unlock()
}

// hungPlane logs in to a target that answers writes only as far as it is let.
func hungPlane(t *testing.T, timeout time.Duration, mute ...pdu.TaskFunction) (*Plane, *testtarget.Target, *hang) {
	t.Helper()
	p := newPlane(t)
	p.patience = patience{abort: time.Minute, reset: time.Minute, back: firstReturn} // for what is answered
	for _, f := range mute {
		if f == pdu.AbortTask {
			p.patience.abort = 100 * time.Millisecond
		} else {
			p.patience.reset = 100 * time.Millisecond
		}
	}
	target := newTarget(t, testtarget.Config{Keys: map[string]string{"ImmediateData": "No", "InitialR2T": "Yes"}})
	r := loginTo(target)
	r.RequestTimeout = timeout
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	return p, target, newHang(target, mute...)
}

// writer is a task that writes one block, again and again until the target says something.
type writer struct {
	iscsi.Task
	path     *path
	outcomes []iscsi.Outcome
	done     chan []iscsi.Outcome
	again    func() // before it is sent again
}

func newWriter(p *path, lun scsi.LUN, again func()) *writer {
	w := &writer{path: p, done: make(chan []iscsi.Outcome, 1), again: again}
	p.reactor.Call(func() {
		b, _ := p.reactor.commands.Get(512)
		scsi.Write10(&w.CDB, 3, 1, false)
		w.LUN, w.Direction, w.Data, w.Region, w.Handler = lun, iscsi.Write, b.Bytes(), b.Region().ID, w
		p.Submit(&w.Task)
	})
	return w
}

func (w *writer) TaskDone(t *iscsi.Task) {
	if sense, err := scsi.ParseSense(t.Sense[:t.SenseLen]); t.Outcome == iscsi.Responded && err == nil && sense.Key == scsi.KeyUnitAttention {
		w.path.Submit(t)
		return
	}
	w.outcomes = append(w.outcomes, t.Outcome)
	switch t.Outcome {
	case iscsi.Responded:
		w.done <- w.outcomes
		return
	case iscsi.Lost, iscsi.NotSent:
		if w.again != nil {
			w.again()
		}
		if w.path.Hold(t) {
			return
		}
	case iscsi.Aborted:
		if w.again != nil {
			w.again()
		}
		w.path.Submit(t)
		return
	}
	w.done <- w.outcomes
}

// sessionCounters are what the data plane says of a session.
func sessionCounters(t *testing.T, p *Plane, i int) ipc.Session {
	t.Helper()
	s, err := ask[ipc.State](t, p, ipc.MethodState, ipc.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return s.Groups[0].Sessions[i]
}

// Each step of the way, by how much the target does not answer: the write goes through in the end, exactly once.
func TestDeadline(t *testing.T) {
	for _, c := range []struct {
		name   string
		mute   []pdu.TaskFunction
		want   iscsi.Outcome // of the first attempt
		counts escalations
		logins int
	}{
		{"ABORT TASK", nil, iscsi.Aborted, escalations{aborts: 1}, 2},
		{"LOGICAL UNIT RESET", []pdu.TaskFunction{pdu.AbortTask}, iscsi.Aborted, escalations{aborts: 1, resets: 1}, 2},
		{"the session ends", []pdu.TaskFunction{pdu.AbortTask, pdu.LogicalUnitReset}, iscsi.Lost, escalations{aborts: 1, resets: 1, drops: 1}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, target, h := hungPlane(t, 300*time.Millisecond, c.mute...)
			before := time.Now()
			w := newWriter(p.groups["g1"].paths[1], 0, h.heal)
			got := <-w.done
			if len(got) != 2 || got[0] != c.want || got[1] != iscsi.Responded {
				t.Errorf("outcomes %v, want %v and then an answer", got, c.want)
			}
			if took := time.Since(before); took < 300*time.Millisecond {
				t.Errorf("given up after %v", took)
			}
			s := sessionCounters(t, p, 1)
			if now := (escalations{s.Aborts, s.Resets, s.Drops}); now != c.counts {
				t.Errorf("counted %+v, want %+v", now, c.counts)
			}
			if other := sessionCounters(t, p, 0); other.Aborts+other.Resets+other.Drops != 0 {
				t.Errorf("the other session %+v", other)
			}
			if n := target.Logins(); n != c.logins {
				t.Errorf("%d logins, want %d", n, c.logins)
			}
			w.path.reactor.Call(func() {
				if n := w.path.session.InFlight(); n != 0 {
					t.Errorf("%d commands are left", n)
				}
			})
		})
	}
}

// A reset ends tasks of other sessions with the unit as well; they learn it by ABORT TASK SET.
func TestResetReachesOtherSessions(t *testing.T) {
	p, _, h := hungPlane(t, 300*time.Millisecond, pdu.AbortTask)
	first := newWriter(p.groups["g1"].paths[0], 0, h.heal)
	for deadline := time.Now().Add(10 * time.Second); h.count(pdu.AbortTask) == 0 && time.Now().Before(deadline); {
		<-h.changed
	}
	second := newWriter(p.groups["g1"].paths[1], 0, h.heal) // its own deadline is far when the reset comes
	for _, w := range []*writer{first, second} {
		if got := <-w.done; len(got) != 2 || got[0] != iscsi.Aborted || got[1] != iscsi.Responded {
			t.Errorf("outcomes %v", got)
		}
	}
	if n := h.count(pdu.AbortTaskSet); n != 1 {
		t.Errorf("%d ABORT TASK SET, want 1", n)
	}
}

// Without a time-out a command may take for ever; a target that is merely slow is left alone.
func TestNoDeadline(t *testing.T) {
	for _, timeout := range []time.Duration{0, 10 * time.Second} {
		p, _, h := hungPlane(t, timeout)
		w := newWriter(p.groups["g1"].paths[0], 0, nil)
		select {
		case got := <-w.done:
			t.Errorf("outcomes %v", got)
		case <-h.changed:
			t.Error("task management")
		case <-time.After(700 * time.Millisecond):
		}
		if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
			t.Error(err)
		}
		if got := <-w.done; got[len(got)-1] != iscsi.NotSent {
			t.Errorf("outcomes after the logout %v", got)
		}
	}
}

// An idle session sleeps until its next ping, which finds what has become overdue; without pings it has to look by itself.
func TestDeadlineLooks(t *testing.T) {
	p, _, _ := hungPlane(t, time.Minute)
	w := p.groups["g1"].paths[0]
	number := func(n int) *int { return &n }
	for _, c := range []struct {
		name    string
		timeout time.Duration
		ping    *int
		looks   bool
	}{
		{"pings come soon enough", 30 * time.Second, nil, false},
		{"pings are too rare", 15 * time.Second, nil, true},
		{"pings as rare as one wants", 30 * time.Second, number(8), true},
		{"no pings", 30 * time.Second, number(0), true},
		{"no time-out", 0, nil, false},
		{"neither", 0, number(0), false},
	} {
		g := &group{plane: p}
		g.request.Settings.NoopOutInterval = c.ping
		w.reactor.Call(func() {
			now := time.Now()
			if next := newDeadline(&path{group: g, reactor: w.reactor}, w.session, c.timeout).tick(now); !next.IsZero() != c.looks || c.looks && next.Sub(now) > longestLook {
				t.Errorf("%s: next look %v", c.name, next)
			}
		})
	}
}

// A command of a control goroutine that is not waited for any more is ended at the target, and its memory comes back.
func TestGiveUp(t *testing.T) {
	p, _, h := hungPlane(t, 0)
	g := p.groups["g1"]
	_, err := ask[ipc.ScsiReply](t, p, ipc.MethodScsi, ipc.ScsiRequest{
		Group: "g1", CDB: []byte{0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0}, Out: make([]byte, 512), Timeout: 100 * time.Millisecond,
	})
	wantCode(t, err, api.ErrPDUTimeout)
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if o := p.objects(); o.PoolBytesUsed == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the memory of the command does not come back")
		}
	}
	if n := h.count(pdu.AbortTask); n != 1 {
		t.Errorf("%d ABORT TASK, want 1", n)
	}
	// One that waits for a session is not sent later.
	g.paths[0].reactor.Call(func() {
		p := g.paths[0]
		session := p.session
		p.session = nil
		defer func() { p.session = session }()
		x := &execution{pool: p.reactor.commands, done: make(chan *execution, 1)}
		x.buffer, _ = x.pool.Get(1)
		x.task.Handler = x
		p.Submit(&x.task)
		p.giveUp(&x.task)
		if !x.ended || p.held.head != nil || p.held.tail != nil {
			t.Error("still held")
		}
	})
}

// What the data plane says to commands that make no sense.
func TestScsiRefuses(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	tur := make([]byte, 6)
	for _, c := range []struct {
		request ipc.ScsiRequest
		code    string
	}{
		{ipc.ScsiRequest{Group: "nobody", CDB: tur}, api.ErrSessionNotFound},
		{ipc.ScsiRequest{Group: "g1"}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: make([]byte, 5)}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: make([]byte, 17)}, api.ErrNotSupported},
		{ipc.ScsiRequest{Group: "g1", CDB: make([]byte, 261)}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: tur, In: ipc.MaxScsiData + 1}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: tur, In: -1}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: tur, In: 1, Out: []byte{1}}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: tur, Session: 2}, api.ErrInvalidArgs},
		{ipc.ScsiRequest{Group: "g1", CDB: tur, Session: -1}, api.ErrInvalidArgs},
	} {
		_, err := ask[ipc.ScsiReply](t, p, ipc.MethodScsi, c.request)
		wantCode(t, err, c.code)
	}
}

// Answers come back as the unit gave them.
func TestScsi(t *testing.T) {
	p := newPlane(t)
	unit := testtarget.NewUnit(8 << 20)
	var attentions atomic.Int32
	unit.Fault = func(cdb []byte) (byte, []byte) {
		// Only where nobody else asks: the data plane looks at the units, too.
		if cdb[0] == scsi.OpSynchronizeCache10 && attentions.Add(-1) >= 0 {
			return 2, testtarget.Sense(6, 0x29, 0)
		}
		return 0, nil
	}
	target := newTarget(t, testtarget.Config{Units: []*testtarget.Unit{unit}})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	run := func(r ipc.ScsiRequest) ipc.ScsiReply {
		t.Helper()
		r.Group = "g1"
		a, err := ask[ipc.ScsiReply](t, p, ipc.MethodScsi, r)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for session := range 2 {
		a := run(ipc.ScsiRequest{Session: session, CDB: []byte{0x12, 0, 0, 0, 255, 0}, In: 255})
		if a.Status != 0 || len(a.Data) < 36 || a.Residual != int64(255-len(a.Data)) || string(a.Data[8:13]) != "ISERD" {
			t.Errorf("INQUIRY by session %d: %+v", session, a)
		}
	}
	block := make([]byte, ipc.MaxScsiData)
	for i := range block {
		block[i] = byte(i * 7)
	}
	n := byte(len(block) / 512 >> 8)
	if a := run(ipc.ScsiRequest{CDB: []byte{0x2a, 0, 0, 0, 0, 5, 0, n, 0, 0}, Out: block}); a.Status != 0 || a.Residual != 0 || len(a.Data) != 0 {
		t.Errorf("WRITE: %+v", a)
	}
	if a := run(ipc.ScsiRequest{CDB: []byte{0x28, 0, 0, 0, 0, 5, 0, n, 0, 0}, In: len(block)}); a.Status != 0 || string(a.Data) != string(block) {
		t.Errorf("READ: status %d, %d bytes", a.Status, len(a.Data))
	}
	if a := run(ipc.ScsiRequest{CDB: []byte{0xff, 0, 0, 0, 0, 0}}); a.Status != 2 || len(a.Sense) < 14 || a.Sense[2]&0xf != 5 {
		t.Errorf("unknown command: %+v", a)
	}
	if a := run(ipc.ScsiRequest{LUN: uint64(scsi.NewLUN(9)), CDB: make([]byte, 6)}); a.Status != 2 {
		t.Errorf("a unit that is not there: %+v", a)
	}
	// A unit attention is an answer, unless it is not wanted.
	flush := []byte{scsi.OpSynchronizeCache10, 9: 0}
	attentions.Store(1)
	if a := run(ipc.ScsiRequest{CDB: flush}); a.Status != 2 {
		t.Errorf("unit attention: %+v", a)
	}
	attentions.Store(3)
	if a := run(ipc.ScsiRequest{CDB: flush, SkipAttention: true}); a.Status != 0 {
		t.Errorf("unit attentions that are skipped: %+v", a)
	}
	// The attentions have the units looked at, which takes memory for a moment.
	for deadline := time.Now().Add(10 * time.Second); p.objects().PoolBytesUsed != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are left in use", p.objects().PoolBytesUsed)
		}
	}
	// Too much at once is said so.
	x := executor{p: p.groups["g1"].paths[0]}
	if _, err := x.run(context.Background(), command{in: 8 << 20}); !errors.Is(err, errNoRoom) {
		t.Errorf("more memory than there is: %v", err)
	}
}

// Looking at the slots costs no memory, however many commands are outstanding.
func TestNoAllocation(t *testing.T) {
	p, _, _ := hungPlane(t, time.Minute)
	path := p.groups["g1"].paths[0]
	var writers []*writer
	for range 20 {
		writers = append(writers, newWriter(path, 0, nil))
	}
	path.reactor.Call(func() {
		d := path.keeper
		if n := d.InFlight(); n != len(writers) {
			t.Errorf("%d commands are outstanding", n)
		}
		now := time.Now()
		if n := testing.AllocsPerRun(100, func() {
			now = now.Add(d.interval())
			if time.Until(now) > d.timeout/2 { // all of it would be overdue
				now = time.Now()
			}
			d.look = time.Time{}
			d.tick(now)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Error(err)
	}
	for _, w := range writers {
		<-w.done
	}
}
