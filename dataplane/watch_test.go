package dataplane

import (
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/scsi"
)

// fickle is a target with two units of 8 MiB, of which the second one changes on command.
type fickle struct {
	*testtarget.Target
	serial atomic.Value // string, of the second unit
	gone   atomic.Bool
	broken atomic.Bool  // its capacity cannot be read
	attend atomic.Int32 // ASC<<8 | ASCQ of the next unit attention, 0 for none
	plane  *Plane
	group  *group
	device *device // of the second unit, without a kernel
	events chan ipc.Group
}

func newFickle(t *testing.T) *fickle {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	p, err := New(Config{Reactors: 1, PoolSize: 4 << 20, Log: logrus.NewEntry(log), Build: "test", Exit: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	f := &fickle{plane: p, events: make(chan ipc.Group, 256)}
	u := testtarget.NewUnit(8 << 20)
	f.serial.Store("first")
	u.Serial = "first"
	u.Fault = func(cdb []byte) (byte, []byte) {
		if f.broken.Load() && (cdb[0] == scsi.OpReadCapacity10 || cdb[0] == 0x9e) {
			return 2, testtarget.Sense(3, 0x11, 0)
		}
		u.Serial = f.serial.Load().(string)
		if f.gone.Load() {
			return 2, testtarget.Sense(5, 0x25, 0)
		}
		if code := f.attend.Swap(0); code != 0 {
			return 2, testtarget.Sense(6, byte(code>>8), byte(code))
		}
		return 0, nil
	}
	f.Target = newTarget(t, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(8 << 20), u}})
	p.Notify(func(_ string, body any) { f.events <- *body.(*ipc.Group) })
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(f.Target)); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	f.group = p.groups["g1"]
	p.mu.Unlock()
	f.device = serveUnit(t, f.group, scsi.NewLUN(1))
	return f
}

// serveUnit makes a device of a unit, with a queue on each reactor, and without a kernel.
func serveUnit(t *testing.T, g *group, lun scsi.LUN) *device {
	t.Helper()
	p := g.plane
	d := &device{id: 7, group: g, unit: g.unit(uint64(lun)), lun: lun, state: ipc.DeviceServing}
	for i, r := range p.reactors {
		q := &deviceQueue{reactor: r}
		r.Call(func() {
			q.lu = lu.NewQueue(lu.Config{Unit: d.unit, Depth: 4, Path: g.paths[i], Memory: r.memory, Clock: &r.clock, Notice: d.notice})
			g.paths[i].join(q.lu)
		})
		d.queues = append(d.queues, q)
	}
	p.mu.Lock()
	p.devices[d.id] = d
	p.mu.Unlock()
	t.Cleanup(func() {
		p.mu.Lock()
		delete(p.devices, d.id) // it has nothing that could be closed
		p.mu.Unlock()
	})
	return d
}

// unit is the second unit as a rescan shows it.
func (f *fickle) rescan(t *testing.T) ipc.Unit {
	t.Helper()
	g, err := ask[ipc.Group](t, f.plane, ipc.MethodRescan, ipc.RescanRequest{Group: "g1"})
	if err != nil {
		t.Fatal(err)
	}
	return second(g)
}

func second(g ipc.Group) ipc.Unit {
	for _, u := range g.Units {
		if u.Number == 1 {
			return u
		}
	}
	return ipc.Unit{}
}

// until waits for an event about the group that fits.
func (f *fickle) until(t *testing.T, what string, fits func(g ipc.Group) bool) ipc.Group {
	t.Helper()
	for {
		select {
		case g := <-f.events:
			if fits(g) {
				return g
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no event: %s", what)
		}
	}
}

// A rescan finds what has become of a unit, and the device goes on with it or is condemned.
func TestRescan(t *testing.T) {
	f := newFickle(t)
	if u := f.rescan(t); u.Blocks != 16384 || u.Changed != "" || !u.Usable {
		t.Fatalf("unit %+v", u)
	}
	select {
	case g := <-f.events:
		t.Errorf("an event although nothing has changed: %+v", g)
	default:
	}

	f.Unit(1).Resize(16 << 20)
	if u := f.rescan(t); u.Blocks != 32768 || u.Changed != "" || f.device.unit.Blocks != 32768 {
		t.Errorf("grown unit %+v, device %+v", u, f.device.unit)
	}
	f.until(t, "the unit has grown", func(g ipc.Group) bool { return second(g).Blocks == 32768 })

	wwid := f.device.unit.WWID
	f.serial.Store("second")
	if u := f.rescan(t); !strings.Contains(u.Changed, wwid) || !u.Usable || u.Serial != "second" || f.device.unit.WWID != wwid {
		t.Errorf("another unit %+v, device %+v", u, f.device.unit)
	}
	f.until(t, "the unit is another one", func(g ipc.Group) bool { return second(g).Changed != "" })
	f.serial.Store("first")
	if u := f.rescan(t); u.Changed != "" || u.WWID != wwid {
		t.Errorf("the first unit again: %+v", u)
	}

	f.gone.Store(true)
	if u := f.rescan(t); !strings.Contains(u.Changed, "no unit") || u.Usable {
		t.Errorf("no unit: %+v", u)
	}
	// It comes back by itself: a device without its unit is looked at now and then.
	f.gone.Store(false)
	f.until(t, "the unit is gone", func(g ipc.Group) bool { return second(g).Changed != "" })
	f.group.notices.look()
	f.until(t, "the unit is back", func(g ipc.Group) bool { return second(g).Changed == "" && second(g).Usable })

	_, err := ask[ipc.Group](t, f.plane, ipc.MethodRescan, ipc.RescanRequest{Group: "other"})
	wantCode(t, err, api.ErrSessionNotFound)
}

// What the units say on the data path, and out of turn, makes the target be asked.
func TestAttention(t *testing.T) {
	f := newFickle(t)
	f.Unit(1).Resize(16 << 20)
	f.device.notice(lu.Notice{Unit: f.device.unit, Attention: scsi.AttentionCapacityChanged, Text: "grown"})
	f.until(t, "capacity", func(g ipc.Group) bool { return second(g).Blocks == 32768 })

	f.serial.Store("second")
	f.device.notice(lu.Notice{Unit: f.device.unit, Attention: scsi.AttentionInquiryChanged, Text: "changed", Parked: true})
	f.until(t, "identity", func(g ipc.Group) bool { return second(g).Changed != "" })
	f.serial.Store("first")
	f.device.notice(lu.Notice{Unit: f.device.unit, Attention: scsi.AttentionLunsChanged, Text: "changed"})
	f.until(t, "identity is back", func(g ipc.Group) bool { return second(g).Changed == "" })

	f.Unit(1).Resize(8 << 20)
	p := f.group.paths[0]
	sense := testtarget.Sense(6, 0x2a, 9)
	p.reactor.Call(func() { p.event(pdu.AsyncSCSI, scsi.NewLUN(1), sense) })
	f.until(t, "asynchronous message", func(g ipc.Group) bool { return second(g).Blocks == 16384 })

	// Nothing to look at, and more than anybody can take.
	for range 3 * maxNotices {
		f.device.notice(lu.Notice{Unit: f.device.unit, Attention: scsi.AttentionReset, Text: "reset"})
	}
}

// A look that requests wait for is not held back because there was one a moment ago.
func TestUrgentLook(t *testing.T) {
	f := newFickle(t)
	f.plane.patience.look = time.Hour
	f.Unit(1).Resize(16 << 20)
	f.group.notices.look()
	f.until(t, "an ordinary look", func(g ipc.Group) bool { return second(g).Blocks == 32768 })
	f.Unit(1).Resize(24 << 20)
	f.group.notices.hurry()
	f.until(t, "an urgent one", func(g ipc.Group) bool { return second(g).Blocks == 49152 })
}

// A single command that meets a unit attention takes it away from the requests of the device: they hear of it nevertheless.
func TestAttentionOfSingleCommand(t *testing.T) {
	f := newFickle(t)
	f.serial.Store("second")
	f.attend.Store(0x3f<<8 | 0x03)                                                                          // INQUIRY DATA HAS CHANGED
	r := ipc.ScsiRequest{Group: "g1", LUN: uint64(f.device.lun), CDB: make([]byte, 6), SkipAttention: true} // TEST UNIT READY
	if a, err := ask[ipc.ScsiReply](t, f.plane, ipc.MethodScsi, r); err != nil || a.Status != 0 {
		t.Fatalf("%+v, %v", a, err)
	}
	f.until(t, "the unit is another one", func(g ipc.Group) bool { return second(g).Changed != "" })
}

// A unit that answers only half of what it is asked has not said who it is: requests that wait for that go on waiting.
func TestDoubtAboutBrokenUnit(t *testing.T) {
	f := newFickle(t)
	f.serial.Store("second")
	f.broken.Store(true)
	f.device.notice(lu.Notice{Unit: f.device.unit, Parked: true})
	state := func() (doubted bool, changed string) {
		f.device.mu.Lock()
		defer f.device.mu.Unlock()
		return !f.device.doubted.IsZero(), f.device.changed
	}
	f.group.doubt(f.device.lun)
	if err := f.group.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if doubted, changed := state(); !doubted || changed != "" {
		t.Errorf("doubted %v, changed %q although nobody knows", doubted, changed)
	}
	f.broken.Store(false)
	if err := f.group.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if doubted, changed := state(); doubted || changed == "" {
		t.Errorf("doubted %v, changed %q; it is another unit", doubted, changed)
	}
}

// A session that comes back gets requests only after the units have told who they are.
func TestSessionBackToAnotherUnit(t *testing.T) {
	for _, same := range []bool{true, false} {
		f := newFickle(t)
		p := f.group.paths[0]
		if !same {
			f.serial.Store("second")
		}
		for _, c := range f.Conns() {
			c.Close()
		}
		f.until(t, "the session is lost", func(g ipc.Group) bool { return g.State == ipc.GroupRecovering })
		done := make(chan iscsi.Outcome, 1)
		task := &iscsi.Task{LUN: scsi.NewLUN(1), Direction: iscsi.Read}
		scsi.Read10(&task.CDB, 0, 0, false)
		task.Handler = taskFunc(func(t *iscsi.Task) { done <- t.Outcome })
		// As a request of the device's queue would do.
		p.reactor.Call(func() { p.Submit(task) })
		f.until(t, "the session is back", func(g ipc.Group) bool { return g.State == ipc.GroupUp })
		<-done
		f.device.mu.Lock()
		changed := f.device.changed
		f.device.mu.Unlock()
		if (changed == "") != same {
			t.Errorf("same %v: changed %q", same, changed)
		}
		identified := false
		for _, e := range f.Events() {
			if e.Conn != 2 || e.Sent || e.PDU.Opcode() != 1 || e.PDU.BHS[9] != 1 {
				continue
			}
			switch cdb := e.PDU.BHS[32:]; cdb[0] {
			case scsi.OpInquiry:
				identified = identified || cdb[2] == scsi.PageIdentification
			case scsi.OpRead10:
				if !identified {
					t.Error("a request was sent before the unit had told who it is")
				}
			}
		}
		if !identified {
			t.Error("nobody asked who the unit is")
		}
	}
}

// A unit that cannot say who it is does not keep the others of its target from being served.
func TestSessionBackToSilentUnit(t *testing.T) {
	f := newFickle(t)
	f.gone.Store(true)
	for _, c := range f.Conns() {
		c.Close()
	}
	f.until(t, "the session is back", func(g ipc.Group) bool { return g.State == ipc.GroupUp })
	f.device.mu.Lock()
	changed := f.device.changed
	f.device.mu.Unlock()
	if !strings.Contains(changed, "no unit") {
		t.Errorf("changed %q", changed)
	}
}

// Requests that wait because nobody can tell whether the unit is the right one do not wait for ever.
func TestDoubtEnds(t *testing.T) {
	f := newFickle(t)
	refused := errors.New("it does not say")
	f.device.mu.Lock()
	f.device.doubted = time.Now().Add(-2 * doubtTimeout)
	f.device.mu.Unlock()
	// Without a session nobody is asked, and the time for the answer has not begun.
	p := f.group.paths[0]
	var session *iscsi.Session
	p.reactor.Call(func() { session, p.session = p.session, nil })
	if err := f.group.look(t.Context()); !errors.Is(err, errNoSession) {
		t.Errorf("look without a session: %v", err)
	}
	p.reactor.Call(func() { p.session = session })
	f.group.expire(refused)
	f.device.mu.Lock()
	changed := f.device.changed
	f.device.doubted = time.Now().Add(-2 * doubtTimeout)
	f.device.mu.Unlock()
	if changed != "" {
		t.Errorf("given up while there was nobody to ask: %q", changed)
	}
	f.group.expire(refused)
	f.device.mu.Lock()
	changed = f.device.changed
	f.device.mu.Unlock()
	if !strings.Contains(changed, refused.Error()) {
		t.Errorf("changed %q", changed)
	}
}
