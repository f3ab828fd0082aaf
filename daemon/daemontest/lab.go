package daemontest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/config"
)

// Portal plays SendTargets: by transport, what is listed or what goes wrong.
type Portal struct {
	Lists map[string][]daemon.Found
	Errs  map[string]error
}

// Lab is a control plane between fakes.
type Lab struct {
	Plane   *Plane
	Blocks  *Blocks
	Portals map[string]*Portal // by ADDR:PORT
	Config  config.Config
	Log     io.Writer
	Dir     string
	// NoBlocks is what opening the driver fails with, if not nil.
	NoBlocks error
	// OpenBlocks replaces the driver, if not nil.
	OpenBlocks func() (daemon.Blocks, error)
	// External leaves starting the data plane to the test, as a service manager does.
	External bool
	// KillFails is what ending the data plane fails with, if not nil.
	KillFails error
	// Dies has it end by itself right before it is ended.
	Dies bool

	mu        sync.Mutex
	running   *Daemon
	questions []daemon.Question
}

// Questions are what portals were asked so far.
func (l *Lab) Questions() []daemon.Question {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.questions)
}

// NewLab makes the fakes. dir holds run and state.
func NewLab(dir string) *Lab {
	l := &Lab{Plane: NewPlane(), Portals: make(map[string]*Portal), Config: config.Default(), Log: io.Discard, Dir: dir}
	l.Blocks = NewBlocks(l.Plane)
	return l
}

// RunDir is the directory of the sockets.
func (l *Lab) RunDir() string { return filepath.Join(l.Dir, "run") }

// Socket is the control socket.
func (l *Lab) Socket() string { return filepath.Join(l.RunDir(), "control.sock") }

// ConfigFile is what Load reads, if it is there.
func (l *Lab) ConfigFile() string { return filepath.Join(l.Dir, "etc", "iserd.toml") }

// Load reads the configuration over the defaults; Config is not asked.
func (l *Lab) Load() (config.Loaded, error) {
	return config.Load(config.Sources{Files: []string{l.ConfigFile()}})
}

// SendTargets implements daemon.Discoverer.
func (l *Lab) SendTargets(ctx context.Context, q daemon.Question) ([]daemon.Found, error) {
	portal, transport := q.Portal, q.Transport
	l.mu.Lock()
	p := l.Portals[portal]
	l.questions = append(l.questions, q)
	l.mu.Unlock()
	if p == nil {
		<-ctx.Done()
		return nil, api.Errorf(api.ErrTimeout, "connect to %s: %w", portal, ctx.Err())
	}
	if err := p.Errs[transport]; err != nil {
		return nil, err
	}
	return p.Lists[transport], nil
}

// Daemon is one life of a control plane.
type Daemon struct {
	*daemon.Service
	cancel context.CancelFunc
	done   chan struct{}
}

// Start makes a control plane and waits until it serves its socket and is in step with the data plane.
func (l *Lab) Start() (*Daemon, error) {
	log := logrus.New()
	log.SetOutput(l.Log)
	log.SetLevel(logrus.DebugLevel)
	if err := os.MkdirAll(l.RunDir(), 0o755); err != nil {
		return nil, err
	}
	launch, prepare := daemon.Launcher(l.Plane.Launch(l.RunDir())), l.Plane.Prepare(l.RunDir())
	if l.External {
		launch, prepare = nil, nil
	}
	s, err := daemon.New(daemon.Options{
		Config: config.Loaded{Config: l.Config}, Load: l.Load, RunDir: l.RunDir(), StateDir: filepath.Join(l.Dir, "state"), EtcName: filepath.Join(l.Dir, "etc", "initiatorname"), Version: "test",
		FirmwareDir: filepath.Join(l.Dir, "ibft"),
		Log:         logrus.NewEntry(log), Discoverer: l, Launch: launch, Prepare: prepare,
		OpenBlocks: func() (daemon.Blocks, error) {
			if l.NoBlocks != nil {
				return nil, l.NoBlocks
			}
			if l.OpenBlocks != nil {
				return l.OpenBlocks()
			}
			return l.Blocks, nil
		},
		Devices: func() ([]int, error) { return l.Blocks.Left(), nil },
		Kill: func(int) error {
			if l.KillFails == nil || l.Dies {
				l.Plane.Kill()
				l.Blocks.ServerDied()
			}
			return l.KillFails
		},
		Holders: l.Blocks.Holders, QueueAttribute: l.Blocks.QueueAttribute,
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	d := &Daemon{Service: s, cancel: cancel, done: make(chan struct{})}
	ready, listening := make(chan struct{}), make(chan error, 1)
	var wg sync.WaitGroup
	wg.Add(2)
	go func() { defer wg.Done(); s.Run(ctx, func() { close(ready) }) }()
	go func() {
		defer wg.Done()
		if err := s.ServeSocket(ctx, l.Socket(), func() { listening <- nil }); err != nil {
			listening <- err
		}
	}()
	go func() { wg.Wait(); close(d.done) }()
	if err := <-listening; err != nil {
		cancel()
		<-d.done
		return nil, err
	}
	<-ready
	l.mu.Lock()
	l.running = d
	l.mu.Unlock()
	return d, nil
}

// Kill ends a control plane as SIGKILL would, as far as others can see: no word to the data plane or the driver.
func (d *Daemon) Kill() {
	d.cancel()
	<-d.done
	d.Close()
}

// Stop ends it as SIGTERM does.
func (d *Daemon) Stop() (left bool) {
	d.cancel()
	<-d.done
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return d.Service.Stop(ctx)
}

// Check tells what the fakes have against what was done.
func (l *Lab) Check() error {
	if f := append(l.Plane.Faults(), l.Blocks.Faults()...); len(f) > 0 {
		return fmt.Errorf("calls that would hurt: %q", f)
	}
	return nil
}

// Clean tells whether nothing is left behind: no session, device, or file of one; of shared memory the arena, with nobody in it.
func (l *Lab) Clean() error {
	g, d := l.Plane.Left()
	b := l.Blocks.Left()
	f, _ := filepath.Glob(filepath.Join(l.RunDir(), "devices", "*"))
	m, _ := filepath.Glob(filepath.Join(l.RunDir(), "buffers", "*"))
	f = append(f, m...)
	if len(g)+len(d)+len(b)+len(f) > 0 {
		return fmt.Errorf("left behind: groups %v, attached %v, block devices %v, files %v", g, d, b, f)
	}
	return nil
}
