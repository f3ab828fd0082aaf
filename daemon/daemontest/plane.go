package daemontest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/daemon"
	"iserd.org/iserd/internal/ipc"
)

// Target is one that the Plane can log in to.
type Target struct {
	Units []ipc.Unit
	ISER  bool // answers over RDMA
	TPGT  uint16
	Err   *ipc.Error // login fails with it
	// MovedTo is the portal to which it has moved for good. At Gone, if not "", it is not to be reached.
	MovedTo, Gone string
	Hang          bool          // login never ends by itself
	Enter         chan struct{} // if not nil, gets a value when a login has begun
	Leave         chan struct{} // if not nil, a login goes on when it gives a value
}

// Disk makes a unit of a size in bytes.
func Disk(number uint16, size uint64) ipc.Unit {
	return ipc.Unit{
		LUN: uint64(number) << 48, Number: number, Usable: true, Vendor: "LIO-ORG", Product: fmt.Sprintf("disk%d", number), Revision: "4.0",
		Serial: fmt.Sprintf("serial-%d", number), WWID: fmt.Sprintf("naa.6001405%025x", number), Blocks: size / 512, LogicalBlockSize: 512,
		PhysicalBlockSize: 4096, MaxTransfer: 4 << 20, WriteCache: true, FUA: true,
	}
}

// Plane plays a data plane. It serves at a socket once Start has run and answers as long as it is not killed.
type Plane struct {
	Reactors int
	RDMA     []string
	Old      bool       // knows nothing of settings
	Prompt   bool       // sessions that are restored are up at once
	Start    *ipc.Start // what it says it was started with

	killing sync.Mutex // while a process ends: the next one waits for its end

	mu       sync.Mutex
	server   *ipc.Server
	targets  map[string]*Target
	groups   map[string]*ipc.Group
	devices  map[int]*ipc.Device
	stopped  map[int]bool // by the driver
	logins   int
	asked    []ipc.LoginRequest
	restored []ipc.RestoreRequest
	faults   []string
	attach   error // next Attach fails with it
	starts   int
	isids    map[string][6]byte  // of every group so far, over all lives
	fail     map[string]*failing // requests of a method
	buffers  map[uint32]*planeBuffer
	busy     int              // requests that are said to be in flight in all memory
	silent   bool             // does not count them by buffer
	served   map[int]ipc.Unit // by ublk id
	rescans  int
	broken   error        // it cannot be launched
	unready  error        // it cannot get ready while another life serves
	build    string       // of the next life
	runs     string       // of this one
	waiting  int          // successors that were neither dropped nor told to serve
	mute     bool         // answers nothing
	aborted  map[int]bool // devices whose requests fail
	draining map[int]int  // quiesced devices, with the questions for the state that are answered before their last request is

	commands commands
}

// planeBuffer is memory that a Plane was given.
type planeBuffer struct {
	ipc.Buffer
	file *os.File
}

// NewPlane makes a data plane with two threads and one RDMA device.
func NewPlane() *Plane {
	return &Plane{
		Reactors: 2, RDMA: []string{"rxe0"}, targets: make(map[string]*Target), groups: make(map[string]*ipc.Group), devices: make(map[int]*ipc.Device),
		stopped: make(map[int]bool), isids: make(map[string][6]byte), fail: make(map[string]*failing), buffers: make(map[uint32]*planeBuffer),
		served: make(map[int]ipc.Unit), build: "test", draining: make(map[int]int),
	}
}

// failing is a request that is going to fail.
type failing struct {
	before int // requests that succeed
	err    error
}

// Fail makes a request of a method fail, after some that do not.
func (p *Plane) Fail(method string, before int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail[method] = &failing{before, err}
}

// Busy says that n requests are in flight in all memory; a negative number says nothing about it, while each device has some in flight.
func (p *Plane) Busy(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy, p.silent = n, n < 0
}

// Count adds to the requests of a device's first queue, by tier.
func (p *Plane) Count(id int, shared, registered uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := &p.devices[id].Queues[0]
	q.Requests.Shared += shared
	q.Requests.Registered += registered
}

// Buffers lists the memory that is there, by id.
func (p *Plane) Buffers() []ipc.Buffer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.buffersLocked()
}

func (p *Plane) buffersLocked() []ipc.Buffer {
	var out []ipc.Buffer
	for _, id := range slices.Sorted(maps.Keys(p.buffers)) {
		b := p.buffers[id].Buffer
		b.Bindings = slices.Clone(b.Bindings)
		if n := p.busy; !p.silent {
			b.InFlight = &n
		}
		out = append(out, b)
	}
	return out
}

// dropBuffersLocked forgets all memory, as the end of a process does.
func (p *Plane) dropBuffersLocked() {
	for id, b := range p.buffers {
		_ = b.file.Close()
		delete(p.buffers, id)
	}
}

// AddTarget makes a target reachable, at every portal.
func (p *Plane) AddTarget(name string, t *Target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.targets[name] = t
}

// Launch starts serving in dir, as a new process would: nothing of an earlier life is left. It fits daemon.Launcher.
func (p *Plane) Launch(dir string) func() (<-chan error, error) {
	return func() (<-chan error, error) {
		p.killing.Lock()
		defer p.killing.Unlock()
		p.mu.Lock()
		if p.broken != nil {
			defer p.mu.Unlock()
			return nil, p.broken
		}
		p.groups, p.devices = make(map[string]*ipc.Group), make(map[int]*ipc.Device)
		clear(p.draining)
		p.mute, p.aborted, p.runs = false, nil, p.build
		p.dropBuffersLocked()
		p.starts++
		p.mu.Unlock()
		return make(chan error), p.Serve(dir)
	}
}

// Serve starts serving in dir with what is there.
func (p *Plane) Serve(dir string) error {
	s, err := ipc.Serve(context.Background(), filepath.Join(dir, "io.sock"), p)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.server = s
	p.mu.Unlock()
	return nil
}

// Kill ends it as SIGKILL would.
func (p *Plane) Kill() {
	p.killing.Lock()
	defer p.killing.Unlock()
	p.mu.Lock()
	s := p.server
	p.server = nil
	p.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropBuffersLocked()
}

// Broken makes every launch fail.
func (p *Plane) Broken(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = err
}

// Unready makes every attempt fail to get ready while another life serves.
func (p *Plane) Unready(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unready = err
}

// Install changes the program that the next life is.
func (p *Plane) Install(build string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.build = build
}

// Prepare makes a successor that serves in dir. It fits daemon.Options.
func (p *Plane) Prepare(dir string) func(context.Context, int) (*daemon.Successor, error) {
	return func(context.Context, int) (*daemon.Successor, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.unready != nil {
			return nil, p.unready
		}
		p.waiting++
		once := func(f func() error) func() error {
			return sync.OnceValue(func() error {
				p.mu.Lock()
				p.waiting--
				p.mu.Unlock()
				return f()
			})
		}
		exited := make(chan error)
		return &daemon.Successor{
			Hello: ipc.HelloReply{Version: ipc.Version, Build: p.build, PID: os.Getpid(), Reactors: p.Reactors, RDMA: p.RDMA, Settings: true, Start: p.Start},
			Serve: once(func() error {
				_, err := p.Launch(dir)()
				return err
			}),
			Drop:   func() { _ = once(func() error { return nil })() },
			Exited: exited,
		}, nil
	}
}

// Waiting counts the successors that were neither dropped nor told to serve.
func (p *Plane) Waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waiting
}

func (p *Plane) running() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cmp.Or(p.runs, p.build)
}

// Mute makes it answer nothing any more, as SIGSTOP would.
func (p *Plane) Mute() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = true
}

// Serving tells whether it answers.
func (p *Plane) Serving() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.server != nil
}

// Starts tells how often it was launched.
func (p *Plane) Starts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.starts
}

// Logins tells how many logins were asked for.
func (p *Plane) Logins() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.logins
}

// Asked returns the requests for logins, with their secrets.
func (p *Plane) Asked() []ipc.LoginRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// Restored returns the requests for sessions of an earlier data plane.
func (p *Plane) Restored() []ipc.RestoreRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.restored)
}

// Move makes the target say that it has moved to a portal for good, from now on and in its group.
func (p *Plane) Move(target, portal string) {
	p.mu.Lock()
	p.targets[target].MovedTo = portal
	s := p.server
	var now []ipc.Group
	for _, g := range p.groups {
		if g.Target == target {
			g.MovedTo = portal
			now = append(now, *g)
		}
	}
	p.mu.Unlock()
	for _, g := range now {
		_ = s.Notify(ipc.EventGroup, g)
	}
}

// FailAttach makes the next Attach fail.
func (p *Plane) FailAttach(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attach = err
}

// Left lists what is there: groups and devices.
func (p *Plane) Left() (groups []string, devices []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.groups)), slices.Sorted(maps.Keys(p.devices))
}

// Faults lists calls in an order that would hurt.
func (p *Plane) Faults() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.faults)
}

func (p *Plane) faultLocked(format string, args ...any) {
	p.faults = append(p.faults, fmt.Sprintf(format, args...))
}

// Cut drops the connection to the control plane without ending, and takes new ones in dir.
func (p *Plane) Cut(dir string) error {
	p.mu.Lock()
	s := p.server
	p.mu.Unlock()
	_ = s.Close()
	return p.Serve(dir)
}

// SetGroup changes a group's state and tells the control plane.
func (p *Plane) SetGroup(target, state string, cause *ipc.Error) {
	p.mu.Lock()
	s := p.server
	var g ipc.Group
	for _, x := range p.groups {
		if x.Target == target {
			x.State, x.Error = state, cause
			g = *x
		}
	}
	p.mu.Unlock()
	_ = s.Notify(ipc.EventGroup, g)
}

// LoseDevice plays a device that somebody else has stopped.
func (p *Plane) LoseDevice(id int) {
	p.mu.Lock()
	s := p.server
	p.devices[id].State = ipc.DeviceGone
	p.stopped[id] = true
	d := *p.devices[id]
	p.mu.Unlock()
	_ = s.Notify(ipc.EventDevice, d)
}

// Handle answers the control plane.
func (p *Plane) Handle(ctx context.Context, method string, body json.RawMessage) (any, error) {
	p.mu.Lock()
	f := p.fail[method]
	if f != nil {
		if f.before--; f.before < 0 {
			delete(p.fail, method)
			p.mu.Unlock()
			return nil, f.err
		}
	}
	mute := p.mute
	p.mu.Unlock()
	if mute {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	switch method {
	case ipc.MethodBufferAdd, ipc.MethodBufferRemove:
		return p.buffer(ctx, method, body)
	case ipc.MethodBufferBind, ipc.MethodBufferUnbind:
		return p.binding(method, body)
	case ipc.MethodScsi, ipc.MethodReserve:
		return p.command(method, body)
	case ipc.MethodHello:
		return ipc.HelloReply{Version: ipc.Version, Build: p.running(), PID: os.Getpid(), Reactors: p.Reactors, RDMA: p.RDMA, Settings: !p.Old, Start: p.Start}, nil
	case ipc.MethodLogin:
		var r ipc.LoginRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		return p.login(ctx, r)
	case ipc.MethodRestore:
		var r ipc.RestoreRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		return p.restore(r)
	case ipc.MethodLogout:
		var r ipc.LogoutRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.groups[r.Group] == nil {
			return nil, &ipc.Error{Code: "SessionNotFound", Text: "no such group"}
		}
		for _, d := range p.devices {
			if d.Group == r.Group {
				p.faultLocked("logout of %s before device %d was detached", r.Group, d.UblkID)
				return nil, &ipc.Error{Code: "Busy", Text: "devices are attached"}
			}
		}
		delete(p.groups, r.Group)
		return ipc.Empty{}, nil
	case ipc.MethodAttach:
		var r ipc.AttachRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if err := p.attach; err != nil {
			p.attach = nil
			return nil, err
		}
		if p.groups[r.Group] == nil {
			return nil, &ipc.Error{Code: "NotFound", Text: "no such group"}
		}
		if p.devices[r.UblkID] != nil {
			p.faultLocked("device %d attached twice", r.UblkID)
		}
		delete(p.stopped, r.UblkID)
		delete(p.aborted, r.UblkID)
		p.served[r.UblkID] = p.unitOf(r.Group, r.LUN)
		p.devices[r.UblkID] = &ipc.Device{
			UblkID: r.UblkID, Group: r.Group, LUN: r.LUN, State: ipc.DeviceServing,
			Queues: []ipc.QueueStats{
				{Reads: 10, ReadBytes: 40960, Writes: 1, WriteBytes: 4096, Tiers: ipc.TierCount{Registered: 45056}, Requests: ipc.TierCount{Registered: 11}},
				{Reads: 1, ReadBytes: 1 << 30, Flushes: 2, InFlight: 3, Tiers: ipc.TierCount{Registered: 1 << 30}, Requests: ipc.TierCount{Registered: 1}},
			},
		}
		return ipc.Empty{}, nil
	case ipc.MethodDetach:
		var r ipc.DetachRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.devices[r.UblkID] == nil {
			return nil, &ipc.Error{Code: "NotFound", Text: "no such device"}
		}
		if !p.stopped[r.UblkID] {
			p.faultLocked("device %d detached before it was stopped", r.UblkID)
		}
		delete(p.devices, r.UblkID)
		for _, b := range p.buffers {
			b.Bindings = slices.DeleteFunc(b.Bindings, func(x ipc.BufferBinding) bool { return x.UblkID == r.UblkID })
		}
		return ipc.Empty{}, nil
	case ipc.MethodAbort:
		var r ipc.AbortRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.devices[r.UblkID] == nil {
			return nil, &ipc.Error{Code: "NotFound", Text: "no such device"}
		}
		if p.aborted == nil {
			p.aborted = make(map[int]bool)
		}
		p.aborted[r.UblkID] = true
		return ipc.Empty{}, nil
	case ipc.MethodRescan:
		var r ipc.RescanRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		return p.rescan(r.Group)
	case ipc.MethodState:
		p.mu.Lock()
		defer p.mu.Unlock()
		st := ipc.State{Objects: ipc.Objects{Connections: 2 * len(p.groups), Descriptors: 12, PoolBytes: 64 << 20}}
		for _, k := range slices.Sorted(maps.Keys(p.groups)) {
			st.Groups = append(st.Groups, p.showLocked(p.groups[k]))
		}
		for _, k := range slices.Sorted(maps.Keys(p.devices)) {
			d := *p.devices[k]
			d.Queues = slices.Clone(d.Queues)
			if n, quiet := p.draining[k]; quiet {
				if n > 0 {
					p.draining[k]--
				} else {
					p.devices[k].State, d.State = ipc.DeviceGone, ipc.DeviceGone
				}
				for i := range d.Queues {
					d.Queues[i].InFlight = min(d.Queues[i].InFlight, n)
				}
			}
			st.Devices = append(st.Devices, d)
		}
		st.Buffers = p.buffersLocked()
		return st, nil
	case ipc.MethodShutdown:
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.groups)+len(p.devices) > 0 { // memory keeps nothing alive
			return nil, &ipc.Error{Code: "Busy", Text: "in use"}
		}
		go p.Kill()
		return ipc.Empty{}, nil
	}
	return nil, &ipc.Error{Code: "Internal", Text: "unknown method " + method}
}

// restore brings a group back that an earlier life had, with the sessions still to come.
func (p *Plane) restore(r ipc.RestoreRequest) (any, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.groups[r.Group] != nil {
		p.faultLocked("%s restored although it is there", r.Target)
		return nil, &ipc.Error{Code: "AlreadyLoggedIn", Text: "it is there"}
	}
	if want := p.isids[r.Group]; want != r.ISID {
		p.faultLocked("%s restored with ISID %x instead of %x", r.Target, r.ISID, want)
	}
	g := &ipc.Group{
		ID: r.Group, Target: r.Target, Portal: r.Portal, TPGT: r.TPGT, Transport: r.Transport, TransportReason: "restored", State: ipc.GroupRecovering,
		InitiatorName: r.InitiatorName, Units: r.Units, Settings: r.Settings, Others: r.Others,
	}
	if p.Prompt {
		g.State = ipc.GroupUp
	}
	p.restored = append(p.restored, r)
	p.groups[r.Group] = g
	return *g, nil
}

// buffer takes and gives back memory.
func (p *Plane) buffer(ctx context.Context, method string, body json.RawMessage) (any, error) {
	var r ipc.BufferAddRequest // the other is a part of it
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.buffers[r.ID]
	if method == ipc.MethodBufferRemove {
		if b == nil {
			return nil, &ipc.Error{Code: "NotFound", Text: "no such buffer"}
		}
		if len(b.Bindings) > 0 {
			p.faultLocked("buffer %d removed while devices know it: %v", r.ID, b.Bindings)
		}
		_ = b.file.Close()
		delete(p.buffers, r.ID)
		return ipc.Empty{}, nil
	}
	files := ipc.Files(ctx)
	if b != nil || len(files) != 1 || r.Length <= 0 || r.Length%4096 != 0 || r.Offset%4096 != 0 {
		p.faultLocked("buffer %d added with %d descriptors, %d bytes from %d on, while %v is there", r.ID, len(files), r.Length, r.Offset, b)
		return nil, &ipc.Error{Code: "InvalidArgs", Text: "no"}
	}
	fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	p.buffers[r.ID] = &planeBuffer{
		ipc.Buffer{ID: r.ID, Offset: r.Offset, Length: r.Length, Label: r.Label, Descriptor: fd, Requests: 7, Bytes: 28672}, os.NewFile(uintptr(fd), "buffer"),
	}
	return ipc.Empty{}, nil
}

// binding notes what a device's driver calls memory.
func (p *Plane) binding(method string, body json.RawMessage) (any, error) {
	var r ipc.BufferBindRequest
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	b, d := p.buffers[r.ID], p.devices[r.UblkID]
	if b == nil || d == nil {
		return nil, &ipc.Error{Code: "NotFound", Text: "no such buffer or device"}
	}
	x := ipc.BufferBinding{UblkID: r.UblkID, Index: r.Index}
	if method == ipc.MethodBufferUnbind {
		n := len(b.Bindings)
		b.Bindings = slices.DeleteFunc(b.Bindings, func(y ipc.BufferBinding) bool { return x == y })
		if len(b.Bindings) == n {
			return nil, &ipc.Error{Code: "NotFound", Text: "no such binding"}
		}
		return ipc.Empty{}, nil
	}
	for id, o := range p.buffers {
		if slices.Contains(o.Bindings, x) {
			p.faultLocked("index %d of device %d bound to buffer %d while it is that of %d", r.Index, r.UblkID, r.ID, id)
		}
	}
	b.Bindings = append(b.Bindings, x)
	return ipc.Empty{}, nil
}

func (p *Plane) login(ctx context.Context, r ipc.LoginRequest) (any, error) {
	p.mu.Lock()
	p.logins++
	p.asked = append(p.asked, r)
	t := p.targets[r.Target]
	if t != nil && t.Enter != nil {
		enter := t.Enter
		p.mu.Unlock()
		enter <- struct{}{}
		if t.Leave != nil {
			<-t.Leave
		}
		p.mu.Lock()
	}
	defer p.mu.Unlock()
	switch {
	case t == nil:
		return nil, &ipc.Error{Code: "NotFound", Text: fmt.Sprintf("login %s at %s: status 02/03: target not found", r.Target, r.Portal)}
	case t.Hang:
		p.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(r.Timeout):
		}
		p.mu.Lock()
		return nil, &ipc.Error{Code: "Timeout", Text: fmt.Sprintf("login %s at %s: no answer", r.Target, r.Portal)}
	case t.Gone != "" && t.Gone == r.Portal:
		return nil, &ipc.Error{Code: "ConnectionFailed", Text: fmt.Sprintf("login %s at %s: connection refused", r.Target, r.Portal)}
	case t.Err != nil:
		return nil, t.Err
	case p.groups[r.Group] != nil:
		p.faultLocked("second login of group %s", r.Group)
		return nil, &ipc.Error{Code: "AlreadyLoggedIn", Text: "again"}
	}
	p.isids[r.Group] = r.ISID
	g := &ipc.Group{
		ID: r.Group, Target: r.Target, Portal: r.Portal, TPGT: t.TPGT, State: ipc.GroupUp, Since: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC),
		InitiatorName: r.InitiatorName, Units: t.Units, Settings: r.Settings, Others: r.Others,
	}
	if r.Portal != t.MovedTo {
		g.MovedTo = t.MovedTo
	}
	switch {
	case r.Transport == ipc.TransportISER && !t.ISER:
		return nil, &ipc.Error{Code: "TransportUnavailable", Text: fmt.Sprintf("login %s at %s: the portal refuses RDMA connections", r.Target, r.Portal)}
	case r.Transport == ipc.TransportAuto && t.ISER:
		g.Transport, g.TransportReason = ipc.TransportISER, "the portal answers over RDMA"
	case r.Transport == ipc.TransportAuto:
		g.Transport, g.TransportReason = ipc.TransportTCP, "fell back to TCP: connection refused"
	default:
		g.Transport, g.TransportReason = r.Transport, fmt.Sprintf("%s was asked for", r.Transport)
	}
	for i := range p.Reactors {
		isid := r.ISID
		isid[5] += byte(i)
		g.Sessions = append(g.Sessions, ipc.Session{
			Transport: g.Transport, TPGT: g.TPGT, Reactor: i, ISID: isid, TSIH: uint16(i + 1), State: "LOGGED_IN", LocalAddress: "10.0.0.2:4000", RDMADevice: "rxe0",
			Negotiated: map[string]string{"MaxBurstLength": "262144"}, AuthMethod: authMethod(&r),
		})
	}
	p.groups[r.Group] = g
	return g, nil
}

// authMethod is what a target with the same secrets would agree to.
func authMethod(r *ipc.LoginRequest) string {
	switch {
	case r.Secret.IsZero():
		return "None"
	case r.TargetSecret.IsZero():
		return "CHAP SHA3-256"
	}
	return "CHAP SHA3-256 mutual"
}
