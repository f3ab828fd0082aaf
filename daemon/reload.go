package daemon

import (
	"cmp"
	"context"
	"slices"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/config"
	"iserd.org/iserd/internal/ipc"
)

// This file changes the configuration of a running daemon. All layers are read again, and what they give takes the place of what there was as a whole, or, if
// anything is wrong with it, not at all. A value that waits for the next start of the daemon is noted and not used.

// configuration is what the daemon goes by. It is replaced, never changed.
type configuration struct {
	loaded config.Loaded
	force  config.Config // so, but what waits for the next start of the daemon is as it was at this one
}

// Config are the settings that are in force. A data plane that is started goes by them.
func (s *Service) Config() config.Config { return s.conf.Load().force }

// Reload reads the configuration again. An error changes nothing.
func (s *Service) Reload(_ context.Context, _ api.ReloadRequest) (api.ReloadReply, error) {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	if s.opt.Load == nil {
		return api.ReloadReply{}, api.Errorf(api.ErrNotSupported, "this daemon has no configuration that could be read again")
	}
	if s.opt.Reloading != nil {
		defer s.opt.Reloading()()
	}
	next, err := s.opt.Load()
	if err != nil {
		for _, p := range config.ProblemsOf(err) {
			s.log.Error(p)
		}
		s.log.Error("the configuration is not changed: mend what is wrong, and reload")
		return api.ReloadReply{}, api.Wrap(err, api.ErrInvalidArgs, "nothing was changed")
	}
	old := s.conf.Load()
	force := next.Config
	for i := range config.Options {
		if o := &config.Options[i]; o.Effect == api.EffectDaemon {
			o.Copy(&force, &old.force)
		}
	}
	changes := s.changes(old, next)
	s.conf.Store(&configuration{next, force})
	s.setLogLevel(force.LogLevel)
	for _, c := range changes {
		s.log.WithField("from", c.Origin.String()).Infof("%s is %s, was %s; counts: %s", c.Name, cmp.Or(c.New.Text, "empty"), cmp.Or(c.Old.Text, "empty"), c.Effect)
	}
	s.log.Infof("the configuration was read again; %d options have changed", len(changes))
	return api.ReloadReply{Version: api.Version, Files: next.Files, Changes: changes}, nil
}

func (s *Service) setLogLevel(level string) {
	if l, err := logrus.ParseLevel(level); err == nil {
		s.log.Logger.SetLevel(l)
	}
}

// changes compares what is in force with what was read.
func (s *Service) changes(old *configuration, next config.Loaded) []api.ConfigChange {
	out := []api.ConfigChange{}
	for i := range config.Options {
		o := &config.Options[i]
		was, is := o.Value(&old.loaded.Config), o.Value(&next.Config)
		if was == is {
			continue
		}
		out = append(out, api.ConfigChange{Name: o.Name, Old: was, New: is, Origin: originOf(&next, o), Effect: o.Effect, KeptBy: s.keepers(o)})
	}
	return out
}

func originOf(l *config.Loaded, o *config.Option) api.ConfigOrigin {
	if at, ok := l.Origins[o.Name]; ok {
		return at
	}
	return api.ConfigOrigin{Kind: api.OriginDefault}
}

// keepers are the targets or the devices that go on with the old value of an option.
func (s *Service) keepers(o *config.Option) []string {
	out := []string{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ss := range s.sessions {
		switch {
		case o.Effect == api.EffectDevice:
			for _, d := range ss.devices {
				out = append(out, d.path())
			}
		case o.Name == "request_timeout" && ss.group.Settings.RequestTimeout == nil: // the one that a session keeps, unless its record has its own
			out = append(out, ss.group.Target)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Configuration tells what the daemon goes by, and what a reload would change.
func (s *Service) Configuration() api.ConfigReply {
	now := s.conf.Load()
	r := api.ConfigReply{Version: api.Version, Files: now.loaded.Files, Options: []api.ConfigOption{}, Changes: []api.ConfigChange{}, Problems: []api.ConfigProblem{}}
	if r.Files == nil {
		r.Files = []string{}
	}
	var runs *ipc.Start
	if pc, err := s.plane.now(); err == nil {
		runs = pc.hello.Start
	}
	for i := range config.Options {
		o := &config.Options[i]
		x := api.ConfigOption{Name: o.Name, Value: o.Value(&now.loaded.Config), Origin: originOf(&now.loaded, o), Effect: o.Effect}
		holds := x.Value
		switch {
		case o.Effect == api.EffectDaemon:
			holds = o.Value(&now.force)
		case o.Effect == api.EffectDataPlane && runs == nil:
			x.Unknown = true
		case o.Effect == api.EffectDataPlane:
			c := config.Config{Reactors: runs.Reactors, BufferPool: runs.BufferPool, ACKTimeout: runs.ACKTimeout}
			holds = o.Value(&c)
		}
		if holds != x.Value && o.Name == "initiator_name" {
			holds.Text = s.name // where none is configured there is one in a file of its own
		}
		if holds != x.Value {
			x.InForce = &holds
		}
		r.Options = append(r.Options, x)
	}
	if s.opt.Load == nil {
		return r
	}
	next, err := s.opt.Load()
	if r.Problems = append(r.Problems, config.ProblemsOf(err)...); err == nil {
		r.Changes = s.changes(now, next)
	}
	return r
}
