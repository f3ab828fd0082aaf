// Command iserd-io is the data plane of iserd: it holds the sessions to the targets and serves the ublk devices. The control plane, iserd,
// starts it and talks to it through a socket in the run directory; it outlives its control plane.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sync"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/dataplane"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/standby"
	"iserd.org/iserd/internal/version"
)

func main() {
	var runDir, level string
	var config dataplane.Config
	var pool, wait int
	cmd := &cobra.Command{
		Use:           "iserd-io",
		Short:         "Data plane of iserd: sessions and block devices",
		Long:          "iserd-io holds the sessions to the targets and serves the block devices. iserd starts it; running it by hand is only useful for tests.",
		Version:       version.String(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error {
			return run(runDir, level, pool, wait, config)
		},
	}
	cmd.Flags().StringVar(&runDir, "run-dir", "/run/iserd", "directory of the control socket")
	cmd.Flags().StringVar(&level, "log-level", "info", "what to log: error, warn, info or debug")
	cmd.Flags().IntVar(&config.Reactors, "reactors", 0, "data-path threads; 0 means one per CPU")
	cmd.Flags().IntVar(&pool, "pool", dataplane.DefaultPoolSize>>20, "I/O buffers that each reactor may come to hold, MiB")
	cmd.Flags().DurationVar(&config.ACKTimeout, "ack-timeout", 0, "when an RDMA adapter sends again what is not acknowledged; 0 leaves it to the kind of adapter")
	cmd.Flags().IntVar(&wait, "standby", 0, "get ready, and serve when told to through this descriptor; 0 serves at once")
	_ = cmd.Flags().MarkHidden("standby") // between iserd and this program
	if err := cmd.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "iserd-io: "+err.Error())
		os.Exit(1)
	}
}

func run(runDir, level string, pool, wait int, config dataplane.Config) error {
	log := logrus.New()
	parsed, err := logrus.ParseLevel(level)
	if err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	log.SetLevel(parsed)
	if pool < 4 || pool > 16<<10 {
		return fmt.Errorf("--pool: %d MiB is not between 4 and 16384", pool)
	}
	protect(log)

	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	signal.Ignore(unix.SIGPIPE, unix.SIGHUP)
	var once sync.Once
	exit := make(chan struct{})
	config.PoolSize, config.Build, config.Log = pool<<20, version.String(), log.WithField("plane", "io")
	config.Exit = func() { once.Do(func() { close(exit) }) }
	plane, err := dataplane.New(config)
	if err != nil {
		return err
	}
	if wait > 0 {
		if err := await(ctx, plane, wait); err != nil {
			plane.Close()
			if errors.Is(err, standby.ErrDropped) {
				log.Info("this data plane is not needed")
				return nil
			}
			return err
		}
	}
	server, err := ipc.Serve(context.Background(), filepath.Join(runDir, "io.sock"), plane)
	if err != nil {
		plane.Close()
		return err
	}
	plane.Notify(func(event string, body any) {
		if err := server.Notify(event, body); err != nil {
			log.WithError(err).Debug("event not delivered")
		}
	})
	log.Info("data plane is ready")
	for {
		select {
		case <-exit:
		case <-ctx.Done():
			// A data plane that serves devices does not go because somebody said so: the file systems on them would lose their disks.
			if !plane.Idle() {
				log.Warn("still in use: log out first (iserctl logout), or use SIGKILL and lose the devices")
				stop()
				ctx, stop = signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
				continue
			}
		}
		break
	}
	server.Close()
	plane.Close()
	log.Info("data plane has ended")
	return nil
}

// await says what this data plane is, through a descriptor, and returns when it is its turn to serve.
func await(ctx context.Context, plane *dataplane.Plane, fd int) error {
	hello, err := plane.Handle(ctx, ipc.MethodHello, []byte("{}"))
	if err != nil {
		return err
	}
	return standby.Await(ctx, fd, hello)
}

// protect keeps the process able to write while the system is short of memory: its pages stay resident, and allocations of its threads do
// not wait for writes that it would have to serve itself. Threads started later inherit the flag.
func protect(log *logrus.Logger) {
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		log.WithError(err).Warn("memory is not locked: serving swap or writes under memory pressure is not safe")
	}
	if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
		log.WithError(err).Debug("PR_SET_IO_FLUSHER")
	}
}
