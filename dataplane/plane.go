package dataplane

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/rdma"
)

// Config describes a data plane.
type Config struct {
	Reactors int // data-path threads; 0 means one per CPU
	PoolSize int // bytes of I/O buffers that a reactor may come to hold; 0 means DefaultPoolSize
	Build    string
	Log      *logrus.Entry

	ACKTimeout time.Duration // of the RDMA connections; 0 leaves it to the kind of adapter: see iser.Way
	Exit       func()        // asked for by the control plane
}

// logoutTimeout is how long the sessions of a group may take to end politely.
const logoutTimeout = 5 * time.Second

// DefaultPoolSize is how much memory for I/O buffers one reactor may come to hold, bytes: 128 requests of the largest size.
const DefaultPoolSize = 64 << 20

// Plane is the data plane: reactors, the sessions and the devices on them. It answers the control plane as an ipc handler.
type Plane struct {
	log      *logrus.Entry
	config   Config
	start    ipc.Start // what Config was before the defaults
	reactors []*Reactor
	ctx      context.Context
	cancel   context.CancelFunc
	begun    time.Time

	mu      sync.Mutex
	groups  map[string]*group
	pending map[string]bool // groups that log in or out right now
	devices map[int]*device

	attaching map[int]chan struct{} // devices on their way into devices; each is closed when its attach has ended

	buffers buffers

	patience patience // with answers to task management

	telling sync.Mutex // held from a snapshot to its event
	events  chan event // for the control plane; see runNotify
	done    chan struct{}
}

// event is something that the control plane is told without having asked.
type event struct {
	name string
	body any
}

// eventQueue bounds the events that wait for a control plane that is slow or stopped. It can ask for the state at any time, so what is too much
// is dropped.
const eventQueue = 256

// New starts the reactors.
func New(c Config) (*Plane, error) {
	start := ipc.Start{Reactors: c.Reactors, ACKTimeout: c.ACKTimeout}
	if c.Reactors <= 0 {
		c.Reactors = runtime.NumCPU()
	}
	if c.PoolSize <= 0 {
		c.PoolSize = DefaultPoolSize
	}
	start.BufferPool = c.PoolSize >> 20
	p := &Plane{
		log: c.Log, config: c, start: start, begun: time.Now(),
		groups:  make(map[string]*group),
		pending: make(map[string]bool),
		devices: make(map[int]*device),

		attaching: make(map[int]chan struct{}),

		buffers:  buffers{list: make(map[uint32]*buffer), adapters: make(map[*adapter]bool)},
		patience: defaultPatience,
		events:   make(chan event, eventQueue),
		done:     make(chan struct{}),
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	// The reactors sleep in system calls and must find a processor when they wake; the control goroutines need some beside them.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), c.Reactors+2))
	for i := range c.Reactors {
		r, err := newReactor(p, i)
		if err != nil {
			p.Close()
			return nil, err
		}
		p.reactors = append(p.reactors, r)
	}
	return p, nil
}

// Notify starts to hand events to f, in order, on a goroutine of its own: f may block. Call it once.
func (p *Plane) Notify(f func(event string, body any)) {
	go func() {
		for {
			select {
			case e := <-p.events:
				f(e.name, e.body)
			case <-p.done:
				return
			}
		}
	}()
}

// Close ends everything: devices are let go of, sessions are logged out, reactors stop.
func (p *Plane) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), logoutTimeout)
	defer cancel()
	p.mu.Lock()
	devices, groups := p.devices, p.groups
	p.devices, p.groups = map[int]*device{}, map[string]*group{}
	p.mu.Unlock()
	for _, d := range devices {
		d.close()
	}
	for _, g := range groups {
		g.end(ctx)
	}
	p.cancel()
	if err := p.closeBuffers(); err != nil {
		p.log.WithError(err).Warn("shared memory is left to the end of the process")
	}
	for _, r := range p.reactors {
		r.Stop()
	}
	close(p.done)
}

// Idle reports whether nothing is served and nobody is logged in.
func (p *Plane) Idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.groups) == 0 && len(p.devices) == 0 && len(p.attaching) == 0 && len(p.pending) == 0
}

// Handle answers one request of the control plane.
func (p *Plane) Handle(ctx context.Context, method string, body json.RawMessage) (any, error) {
	switch method {
	case ipc.MethodHello:
		return p.hello(), nil
	case ipc.MethodLogin:
		return handle(body, func(r ipc.LoginRequest) (any, error) { return p.login(ctx, r) })
	case ipc.MethodRestore:
		return handle(body, func(r ipc.RestoreRequest) (any, error) { return p.restore(ctx, r) })
	case ipc.MethodLogout:
		return handle(body, func(r ipc.LogoutRequest) (any, error) { return ipc.Empty{}, p.logout(ctx, r.Group) })
	case ipc.MethodAttach:
		return handle(body, func(r ipc.AttachRequest) (any, error) { return ipc.Empty{}, coded(p.attach(ctx, r)) })
	case ipc.MethodDetach:
		return handle(body, func(r ipc.DetachRequest) (any, error) { return ipc.Empty{}, coded(p.detach(ctx, r.UblkID)) })
	case ipc.MethodAbort:
		return handle(body, func(r ipc.AbortRequest) (any, error) { return ipc.Empty{}, coded(p.abort(ctx, r.UblkID)) })
	case ipc.MethodBufferAdd:
		return handle(body, func(r ipc.BufferAddRequest) (any, error) { return ipc.Empty{}, coded(p.addBuffer(ctx, r)) })
	case ipc.MethodBufferRemove:
		return handle(body, func(r ipc.BufferRemoveRequest) (any, error) { return ipc.Empty{}, coded(p.removeBuffer(ctx, r.ID)) })
	case ipc.MethodBufferBind:
		return handle(body, func(r ipc.BufferBindRequest) (any, error) { return ipc.Empty{}, coded(p.bindBuffer(r, true)) })
	case ipc.MethodBufferUnbind:
		return handle(body, func(r ipc.BufferBindRequest) (any, error) { return ipc.Empty{}, coded(p.bindBuffer(r, false)) })
	case ipc.MethodScsi:
		return handle(body, func(r ipc.ScsiRequest) (any, error) { return codedReply(p.scsi(ctx, r)) })
	case ipc.MethodReserve:
		return handle(body, func(r ipc.ReserveRequest) (any, error) { return codedReply(p.reserve(ctx, r)) })
	case ipc.MethodRescan:
		return handle(body, func(r ipc.RescanRequest) (any, error) { return p.rescan(ctx, r.Group) })
	case ipc.MethodState:
		return p.state(), nil
	case ipc.MethodShutdown:
		return handle(body, func(r ipc.ShutdownRequest) (any, error) {
			if r.OnlyIfIdle && !p.Idle() {
				return nil, &ipc.Error{Code: api.ErrBusy, Text: "sessions or devices are in use"}
			}
			p.config.Exit()
			return ipc.Empty{}, nil
		})
	}
	return nil, &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf("method %q is unknown to this data plane (version %d)", method, ipc.Version)}
}

func handle[T any](body json.RawMessage, f func(T) (any, error)) (any, error) {
	var request T
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, &ipc.Error{Code: api.ErrInvalidArgs, Text: "request: " + err.Error()}
	}
	return f(request)
}

func (p *Plane) hello() ipc.HelloReply {
	h := ipc.HelloReply{Version: ipc.Version, Build: p.config.Build, PID: os.Getpid(), Reactors: len(p.reactors), Settings: true, Start: &p.start}
	if devices, err := rdma.Devices(); err == nil {
		for _, d := range devices {
			h.RDMA = append(h.RDMA, d.Name)
		}
	}
	return h
}

// login makes a session group. Of two requests for the same group at once, the second is refused.
func (p *Plane) login(ctx context.Context, r ipc.LoginRequest) (*ipc.Group, error) {
	p.mu.Lock()
	if p.groups[r.Group] != nil || p.pending[r.Group] {
		p.mu.Unlock()
		return nil, &ipc.Error{Code: api.ErrAlreadyLoggedIn, Text: fmt.Sprintf("target %s at %s is already logged in", r.Target, r.Portal)}
	}
	p.pending[r.Group] = true
	p.mu.Unlock()
	if r.Timeout <= 0 {
		r.Timeout = 30 * time.Second
	}
	if err := r.Settings.Check(); err != nil {
		return nil, &ipc.Error{Code: api.ErrInvalidArgs, Text: err.Error()}
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	defer func() {
		p.mu.Lock()
		delete(p.pending, r.Group)
		p.mu.Unlock()
	}()
	g, err := p.newGroup(ctx, r)
	p.mu.Lock()
	if err == nil && ctx.Err() != nil {
		// Whoever asked has gone, or the time is over: nobody would know of the group.
		p.mu.Unlock()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), logoutTimeout)
		g.end(end)
		cancel()
		err = context.Cause(ctx)
		p.mu.Lock()
	}
	if err == nil {
		p.groups[r.Group] = g
	}
	p.mu.Unlock()
	if err != nil {
		return nil, classify(fmt.Errorf("login %s at %s: %w", r.Target, r.Portal, err))
	}
	p.log.WithField("target", r.Target).WithField("portal", r.Portal).WithField("transport", g.transport).
		Infof("logged in, %d sessions, %d logical units", len(g.paths), len(g.units))
	return g.snapshot(), nil
}

// logout ends a session group.
func (p *Plane) logout(ctx context.Context, id string) error {
	p.mu.Lock()
	g := p.groups[id]
	if g == nil {
		p.mu.Unlock()
		return &ipc.Error{Code: api.ErrSessionNotFound, Text: fmt.Sprintf("session group %q does not exist", id)}
	}
	g.mu.Lock()
	devices := g.devices
	g.mu.Unlock()
	if devices > 0 {
		p.mu.Unlock()
		return &ipc.Error{Code: api.ErrBusy, Text: fmt.Sprintf("%d devices of %s are still attached", devices, g.request.Target)}
	}
	delete(p.groups, id)
	p.pending[id] = true
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, api.SecondsOr(g.request.Settings.LogoutTimeout, logoutTimeout))
	defer cancel()
	err := g.end(ctx)
	p.mu.Lock()
	delete(p.pending, id)
	p.mu.Unlock()
	if err != nil {
		// The sessions are gone on this side. A target that did not agree frees its own when it notices.
		p.log.WithField("target", g.request.Target).WithError(err).Warn("logged out, but the target did not confirm it")
	}
	return nil
}
