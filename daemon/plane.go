package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

const (
	helloTimeout  = 5 * time.Second
	launchTimeout = 30 * time.Second
	stateTimeout  = 5 * time.Second
	deathTimeout  = 30 * time.Second // for a data plane that has let go of its socket to be gone as a process
	minPause      = 200 * time.Millisecond
	maxPause      = 5 * time.Second
)

// planeConn is a data plane that answered.
type planeConn struct {
	client *ipc.Client
	hello  ipc.HelloReply
}

// call sends a request. A failure carries a name of package api.
func (c planeConn) call(ctx context.Context, method string, in, out any) error {
	return c.callFiles(ctx, method, in, out, nil)
}

// callFiles is call with descriptors, which stay the caller's.
func (c planeConn) callFiles(ctx context.Context, method string, in, out any, files []*os.File) error {
	err := c.client.CallFiles(ctx, method, in, out, files)
	var coded *ipc.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &coded):
		return &api.Error{Name: api.FullName(coded.Code), Text: coded.Text}
	case errors.Is(err, ipc.ErrClosed):
		return api.Errorf(api.ErrAgain, "the data plane went away: %w", err)
	}
	return api.Wrap(err, api.ErrInternal, "data plane")
}

// plane keeps a data plane running and connected.
//
//	             dial ok                      connection lost
//	starting ---------------> up (adopted) ---------------------> starting
//	   | nobody answers                                              | nobody answers: the process is dead
//	   +--> launch, dial, hand over what the dead one had   <--------+
type plane struct {
	s    *Service
	path string

	mu      sync.Mutex
	st      string // api.DataPlaneUp, ...
	conn    planeConn
	why     string        // why it is not up
	changed chan struct{} // closed and replaced at each change of the fields above

	failures int           // attempts to get one that were begun, and have failed, since somebody asked for one
	asked    time.Time     // when that was
	ending   int           // pid of one that is being replaced, and must not be talked to again; 0 for none
	next     *Successor    // serves when that one is gone; nil starts another one
	soon     time.Time     // until when the next one is waited for, and looked for all the time
	hurry    chan struct{} // ends a pause between attempts
}

func newPlane(s *Service) *plane {
	return &plane{s: s, path: filepath.Join(s.opt.RunDir, "io.sock"), st: api.DataPlaneStarting, changed: make(chan struct{}), hurry: make(chan struct{}, 1)}
}

func (p *plane) set(st string, c planeConn, why string) {
	p.mu.Lock()
	p.st, p.conn, p.why = st, c, why
	if st == api.DataPlaneUp {
		p.failures, p.soon = 0, time.Time{}
	}
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	p.s.changed()
}

// get returns the data plane, waiting while it starts.
func (p *plane) get(ctx context.Context) (planeConn, error) {
	timer := time.NewTimer(launchTimeout)
	defer timer.Stop()
	for {
		p.mu.Lock()
		st, c, why, changed := p.st, p.conn, p.why, p.changed
		p.mu.Unlock()
		switch {
		case st == api.DataPlaneUp && c.client.Err() == nil:
			return c, nil
		case st == api.DataPlaneDown:
			return planeConn{}, api.Errorf(api.ErrAgain, "the data plane is not running: %s", why)
		}
		select {
		case <-changed:
		case <-timer.C:
			return planeConn{}, api.Errorf(api.ErrAgain, "the data plane is still starting")
		case <-ctx.Done():
			return planeConn{}, api.Wrap(ctx.Err(), api.ErrCancelled, "waiting for the data plane")
		}
	}
}

// now returns the data plane; it does not wait for one that is not up.
func (p *plane) now() (planeConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.st != api.DataPlaneUp || p.conn.client.Err() != nil {
		return planeConn{}, api.Errorf(api.ErrAgain, "the data plane is not running: %s", p.why)
	}
	return p.conn, nil
}

// state asks for the state; it does not wait for a data plane that is not up.
func (p *plane) state(ctx context.Context) (ipc.State, error) {
	c, err := p.now()
	if err != nil {
		return ipc.State{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	var out ipc.State
	err = c.call(ctx, ipc.MethodState, ipc.Empty{}, &out)
	return out, err
}

func (p *plane) status() api.DataPlaneStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.conn.hello
	if h.RDMA == nil {
		h.RDMA = []string{}
	}
	return api.DataPlaneStatus{State: p.st, PID: h.PID, Version: h.Build, Reactors: h.Reactors, RDMADevices: h.RDMA}
}

func (p *plane) problem() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why
}

// run connects, adopts and watches until ctx ends.
func (p *plane) run(ctx context.Context, ready func()) {
	var once sync.Once
	say := func() { once.Do(ready) }
	pause := minPause
	var last int // pid of the data plane before
	for ctx.Err() == nil {
		begun := time.Now()
		c, err := p.connect(ctx, last)
		if err != nil {
			if ctx.Err() == nil {
				p.missing(err, begun)
				say()
			}
			if !p.rest(ctx, pause) {
				break
			}
			pause = min(2*pause, maxPause)
			continue
		}
		last = c.hello.PID
		if p.s.finishUpgrade(c) {
			_ = c.client.Close()
			if !p.rest(ctx, pause) {
				break
			}
			continue
		}
		if err := p.s.adopt(ctx, c); err != nil {
			p.s.log.WithError(err).Error("the data plane's state cannot be read")
			_ = c.client.Close()
			p.down(err, begun)
			if !p.rest(ctx, pause) {
				break
			}
			pause = min(2*pause, maxPause)
			continue
		}
		p.s.clean(ctx, c)
		p.set(api.DataPlaneUp, c, "")
		p.s.settle(ctx, c)
		say()
		up := time.Now()
		p.watch(ctx, c)
		if ctx.Err() != nil {
			break // shutdown still needs the connection
		}
		_ = c.client.Close()
		p.set(api.DataPlaneStarting, planeConn{}, "the data plane has gone away")
		if !p.replacing() {
			p.s.log.WithError(c.client.Err()).Warn("connection to the data plane lost")
		}
		if time.Since(up) > maxPause || p.replacing() {
			pause = minPause
		} else if !p.rest(ctx, pause) {
			break
		} else {
			pause = min(2*pause, maxPause)
		}
	}
	say()
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// missing notes that there is no data plane. One that somebody else starts is waited for while it is being replaced.
func (p *plane) missing(err error, begun time.Time) {
	p.mu.Lock()
	waiting := p.s.opt.Launch == nil && time.Now().Before(p.soon)
	p.mu.Unlock()
	if waiting {
		p.set(api.DataPlaneStarting, planeConn{}, oneLine(err))
		return
	}
	p.s.log.WithError(err).Error("no data plane")
	p.down(err, begun)
}

// down notes that an attempt has failed.
func (p *plane) down(err error, begun time.Time) {
	p.mu.Lock()
	if begun.After(p.asked) {
		p.failures++
	}
	p.mu.Unlock()
	p.set(api.DataPlaneDown, planeConn{}, oneLine(err))
}

// rest waits between two attempts, not long if one that somebody else starts is waited for. It tells whether to go on.
func (p *plane) rest(ctx context.Context, pause time.Duration) bool {
	p.mu.Lock()
	if p.s.opt.Launch == nil && time.Now().Before(p.soon) {
		pause = min(pause, lookEvery)
	}
	p.mu.Unlock()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-p.hurry:
	case <-timer.C:
	}
	return true
}

// replacing tells whether the data plane is being replaced.
func (p *plane) replacing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ending != 0
}

// lookEvery is the time between two looks at what no event tells, while somebody waits: whether a process is gone, whether the next one answers.
const lookEvery = 5 * time.Millisecond

// connect finds a data plane that answers, or starts one. last is the pid of the one before, 0 for none.
func (p *plane) connect(ctx context.Context, last int) (planeConn, error) {
	p.mu.Lock()
	ending := p.ending
	p.mu.Unlock()
	var c planeConn
	var err error
	if ending != 0 {
		last = ending
	} else {
		c, err = p.dial(ctx)
		if err == nil || ctx.Err() != nil {
			return c, err
		}
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT) {
			return c, err // it is there and does not answer: a second one would not get its lock
		}
	}
	if last != 0 {
		wctx, cancel := context.WithTimeout(ctx, deathTimeout)
		err := waitQuiet(wctx, lookEvery, func() bool { return isGone(last) })
		cancel()
		if err != nil {
			return c, fmt.Errorf("data plane %d was lost or ended and does not exit", last)
		}
	}
	p.s.orphanAll()
	p.s.forgetUpgrade()
	p.mu.Lock()
	next := p.next
	p.ending, p.next = 0, nil
	p.mu.Unlock()
	if p.s.opt.Launch == nil {
		if ending != 0 { // whoever starts it may have done so
			if c, err := p.dial(ctx); err == nil {
				return c, nil
			}
		}
		return c, fmt.Errorf("nobody answers at %s; start iserd-io", p.path)
	}
	p.set(api.DataPlaneStarting, planeConn{}, "being started")
	var exited <-chan error
	if next != nil {
		exited, err = next.Exited, next.Serve()
	} else {
		exited, err = p.s.opt.Launch()
	}
	if err != nil {
		return c, fmt.Errorf("start data plane: %w", err)
	}
	lctx, cancel := context.WithTimeout(ctx, launchTimeout)
	defer cancel()
	var gone error
	err = waitQuiet(lctx, lookEvery, func() bool {
		if c, err = p.dial(lctx); err == nil {
			return true
		}
		select {
		case e := <-exited:
			gone = fmt.Errorf("the data plane ended at once: %w", e)
			return true
		default:
			return false
		}
	})
	switch {
	case gone != nil:
		return planeConn{}, gone
	case err != nil:
		return planeConn{}, fmt.Errorf("the data plane was started and does not answer at %s: %w", p.path, err)
	}
	p.s.log.WithField("pid", c.hello.PID).Info("data plane started")
	return c, nil
}

// isGone tells whether a process has released what it held. A zombie has, once its leader is the only thread left; one that nobody
// collects would otherwise be waited for in vain. This process itself plays the data plane in tests.
func isGone(pid int) bool {
	if pid == os.Getpid() || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	// "PID (name) STATE ...", and the name may hold anything.
	rest := stat[bytes.LastIndexByte(stat, ')')+1:]
	tasks, err := os.ReadDir(filepath.Join(dir, "task"))
	return len(rest) > 1 && rest[1] == 'Z' && err == nil && len(tasks) <= 1
}

// dial connects and exchanges Hello.
func (p *plane) dial(ctx context.Context) (planeConn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	client, err := ipc.Dial(ctx, p.path)
	if err != nil {
		return planeConn{}, err
	}
	c := planeConn{client: client}
	if err := c.call(ctx, ipc.MethodHello, ipc.HelloRequest{Version: ipc.Version, Build: p.s.opt.Version}, &c.hello); err != nil {
		_ = client.Close()
		return planeConn{}, err
	}
	if c.hello.Reactors < 1 {
		_ = client.Close()
		return planeConn{}, fmt.Errorf("the data plane %d has no threads", c.hello.PID)
	}
	return c, nil
}

// watch hands events to the service until the connection or ctx ends.
func (p *plane) watch(ctx context.Context, c planeConn) {
	for {
		select {
		case <-ctx.Done():
			return
		case e, ok := <-c.client.Events():
			if !ok {
				return
			}
			p.event(ctx, c, e)
		}
	}
}

func (p *plane) event(ctx context.Context, c planeConn, e ipc.Event) {
	var err error
	switch e.Name {
	case ipc.EventGroup:
		var g ipc.Group
		if err = json.Unmarshal(e.Body, &g); err == nil {
			p.s.groupEvent(g)
		}
	case ipc.EventDevice:
		var d ipc.Device
		if err = json.Unmarshal(e.Body, &d); err == nil {
			p.s.deviceEvent(ctx, c, d)
		}
	} // other names are those of a newer data plane
	if err != nil {
		p.s.log.WithError(err).Errorf("event %s from the data plane cannot be read", e.Name)
	}
}

// shutdown ends an idle data plane, waits for it, and closes the connection. It tells whether the data plane goes on.
func (p *plane) shutdown(ctx context.Context) (left bool) {
	p.mu.Lock()
	c, st := p.conn, p.st
	p.mu.Unlock()
	if p.s.opt.Launch != nil && st != api.DataPlaneUp {
		c, _ = p.dial(ctx) // one that was just started, perhaps
	}
	if c.client == nil {
		return false
	}
	defer func() { _ = c.client.Close() }() // it may be a new one
	ctx, cancel := context.WithTimeout(ctx, 2*stateTimeout)
	defer cancel()
	log := p.s.log.WithField("pid", c.hello.PID)
	if p.s.opt.Launch == nil {
		return true // it is somebody else's
	}
	switch err := c.call(ctx, ipc.MethodShutdown, ipc.ShutdownRequest{OnlyIfIdle: true}, nil); {
	case api.Is(err, api.ErrBusy):
		log.Warn("the data plane goes on serving its devices; the next iserd takes over")
		return true
	case err != nil && c.client.Err() == nil:
		log.WithError(err).Error("the data plane does not end")
		return true
	}
	select {
	case <-c.client.Done():
		log.Info("data plane ended")
		return false
	case <-ctx.Done():
		log.Error("the data plane was asked to end and is still there")
		return true
	}
}

// close drops the connection.
func (p *plane) close() {
	p.mu.Lock()
	c := p.conn
	p.mu.Unlock()
	if c.client != nil {
		_ = c.client.Close()
	}
}
