// Command iserd is the control plane: it discovers iSCSI targets, logs in over iSER or TCP, and has each logical unit served as /dev/ublkbN by
// its data plane, iserd-io. It runs in the foreground and logs to standard error; iserctl talks to it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/bus"
	"iserd.org/iserd/daemon/config"
	"iserd.org/iserd/internal/version"
	"iserd.org/iserd/ublk"
)

// flags are what the command line can say besides the options.
type flags struct {
	runDir, stateDir, configFile, bus string

	options *pflag.FlagSet
}

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "iserd: "+strings.Join(strings.Fields(err.Error()), " "))
		os.Exit(api.ExitCode(err))
	}
}

func command() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:           "iserd",
		Short:         "iSER and iSCSI initiator that serves logical units as ublk block devices",
		Long:          "iserd discovers iSCSI targets, logs in over iSER (RDMA) or TCP, and serves each logical unit as /dev/ublkbN.\nIt stays in the foreground; use iserctl to tell it what to do.",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return api.Errorf(api.ErrInvalidArgs, "unexpected argument %q", args[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error { return run(f) },
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return api.Errorf(api.ErrInvalidArgs, "%w", err) })
	fl := cmd.Flags()
	fl.StringVar(&f.runDir, "run-dir", "/run/iserd", "sockets and the state of this boot")
	fl.StringVar(&f.stateDir, "state-dir", "/var/lib/iserd", "records that outlive a reboot")
	fl.StringVar(&f.configFile, "config", "", "read this file instead of /etc/iserd/iserd.toml and its drop-ins")
	fl.StringVar(&f.bus, "bus", "system", "D-Bus to join: system, none, or an address")
	config.AddFlags(fl)
	f.options = fl
	cmd.AddCommand(dataPlaneCommand())
	cmd.CompletionOptions.HiddenDefaultCmd = true
	cmd.SetHelpCommand(&cobra.Command{Hidden: true})
	return cmd
}

// load reads the configuration: files, environment and flags.
func (f *flags) load() (config.Loaded, error) {
	src := config.Sources{Files: config.Places, Environment: true, Flags: f.options}
	if f.configFile != "" {
		src.Files, src.Named = nil, []string{f.configFile}
	}
	return config.Load(src)
}

func run(f flags) error {
	conf, err := f.load()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return api.Errorf(api.ErrAccessDenied, "must run as root: block devices are made with CAP_SYS_ADMIN")
	}
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{f.runDir, 0o755}, {f.stateDir, 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return api.Errorf(api.ErrDatabase, "%w", err)
		}
		lock, err := lockDir(d.path)
		if err != nil {
			return err
		}
		defer func() { _ = lock.Close() }()
	}
	log := newLogger(conf.Config.LogLevel)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, unix.SIGHUP)
	defer signal.Stop(hup)

	var s *daemon.Service
	current := func() config.Config { return s.Config() }
	external := conf.Config.DataPlane == "none"
	s, err = daemon.New(daemon.Options{
		Config: conf, Load: f.load, Reloading: tellReload, RunDir: f.runDir, StateDir: f.stateDir, Version: version.String(), Log: logrus.NewEntry(log),
		Discoverer: discoverer{},
		Launch:     launcher(current, external, f.runDir),
		Prepare:    preparer(current, external, f.runDir),
		OpenBlocks: func() (daemon.Blocks, error) { return ublk.OpenControl() },
		Devices:    ublk.List,
		Holders:    holders,
		Kill:       func(pid int) error { return unix.Kill(pid, unix.SIGKILL) },

		QueueAttribute: ublk.QueueAttribute,
	})
	if err != nil {
		return err
	}

	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	signal.Ignore(unix.SIGPIPE)
	log.Infof("iserd %s", version.String())

	var wg sync.WaitGroup
	begin := func(f func()) {
		wg.Add(1)
		go func() { defer wg.Done(); f() }()
	}
	ready, listening := make(chan struct{}), make(chan struct{})
	failed := make(chan error, 1)
	begin(func() { s.Run(ctx, func() { close(ready) }) })
	begin(func() {
		if err := s.ServeSocket(ctx, filepath.Join(f.runDir, "control.sock"), func() { close(listening) }); err != nil {
			failed <- err
			stop()
		}
	})
	if f.bus != "none" {
		begin(func() {
			select {
			case <-ready: // the bus shows what a former daemon has left from the start
				bus.Run(ctx, s, bus.Options{Address: f.bus, Log: logrus.NewEntry(log)})
			case <-ctx.Done():
			}
		})
	}
	begin(func() { reload(ctx, s, hup) })
	begin(func() {
		for _, c := range []chan struct{}{ready, listening} {
			select {
			case <-c:
			case <-ctx.Done():
				return
			}
		}
		log.Info("ready")
		tellStatus(ctx, s)
	})

	<-ctx.Done()
	_, _ = sd.SdNotify(false, sd.SdNotifyStopping)
	wg.Wait()
	end, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s.Stop(end)
	log.Info("ended")
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// lockDir makes this process the only daemon of a directory, until it ends.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "iserd.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, api.Errorf(api.ErrDatabase, "%w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, api.Errorf(api.ErrAlreadyRunning, "another iserd is running (it holds %s)", path)
		}
		return nil, api.Errorf(api.ErrDatabase, "lock %s: %w", path, err)
	}
	return f, nil
}

// reload reads the configuration again at each SIGHUP. What comes of it is in the log.
func reload(ctx context.Context, s *daemon.Service, hup <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			_, _ = s.Reload(ctx, api.ReloadRequest{})
		}
	}
}

// tellReload tells the service manager that the configuration is being read again, and later that this is done.
func tellReload() (done func()) {
	_, _ = sd.SdNotify(false, sd.SdNotifyReloading+"\n"+sd.SdNotifyMonotonicUsec())
	return func() { _, _ = sd.SdNotify(false, sd.SdNotifyReady) }
}

// tellStatus keeps the service manager's status line up to date.
func tellStatus(ctx context.Context, s *daemon.Service) {
	changes, done := s.Watch()
	defer done()
	text := sd.SdNotifyReady + "\n"
	for {
		up, other, devices := 0, 0, 0
		for _, x := range s.Sessions().Sessions {
			if x.State == api.SessionUp {
				up++
			} else {
				other++
			}
			for _, u := range x.Units {
				if u.Device != "" {
					devices++
				}
			}
		}
		_, _ = sd.SdNotify(false, fmt.Sprintf("%sSTATUS=%d sessions up, %d not, %d devices", text, up, other, devices))
		text = ""
		select {
		case <-ctx.Done():
			return
		case <-changes:
		}
	}
}

// holders names who uses block devices. One that does not exist is used by nobody.
func holders(ids []int) (map[int][]string, error) {
	all, err := ublk.HoldersOf(ids)
	out := make(map[int][]string, len(all))
	for id, list := range all {
		for _, h := range list {
			out[id] = append(out[id], h.String())
		}
	}
	return out, err
}
