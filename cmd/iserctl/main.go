// Command iserctl tells iserd what to do and shows what there is. It holds no logic of its own: it checks its arguments, speaks the API of
// package client, and prints. Only "config check" does without a daemon: it reads files with the daemon's package.
//
// Exit codes are those of iscsiadm(8) where the meaning is the same: 0 done, 2 no such session, 4 connection failed, 5 login failed, 7 invalid
// argument, 8 time-out, 12 transport missing, 13 no permission, 15 logged in already, 19 login refused for good, 20 iserd does
// not run, 21 not found, 24 authentication failed, 27 not supported, 28 in use. Two are our own: 33 the logical unit refused a command, 34 reservation
// conflict. An empty list is no error.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/cmd/iserctl/iscsiadm"
	"iserd.org/iserd/internal/version"
)

// requestLimit bounds a request as a whole; the daemon's own bounds are much shorter.
const requestLimit = 20 * time.Minute

func main() {
	args := os.Args[1:]
	if filepath.Base(os.Args[0]) == iscsiadm.Name { // a link, for programs that call iscsiadm
		args = append([]string{iscsiadm.Name}, args...)
	}
	os.Exit(run(args, os.Stdout, os.Stderr))
}

// run executes a command line and returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	a := &app{out: stdout, err: stderr}
	if len(args) > 0 && args[0] == iscsiadm.Name { // an own command line, none of cobra's flags
		a.socket = defaultSocket()
		defer a.daemon().Close()
		return iscsiadm.Run(ctx, a.daemon(), args[1:], stdout, stderr)
	}
	cmd := a.command()
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	if a.client != nil {
		a.client.Close()
	}
	if err == nil {
		return 0
	}
	name, text := api.NameOf(err), strings.Join(strings.Fields(err.Error()), " ")
	if strings.HasPrefix(text, "unknown command") { // cobra's own, the only one that passes no hook
		name = api.ErrInvalidArgs
	}
	if a.json && !a.printed {
		_ = a.print(api.ErrorReply{Version: api.Version, Error: &api.Error{Name: name, Text: text}})
	}
	fmt.Fprintln(stderr, "iserctl: "+text)
	return api.ExitCode(&api.Error{Name: name})
}

// app is one run of the program.
type app struct {
	out, err io.Writer
	socket   string
	json     bool
	timeout  time.Duration
	client   *client.Client
	printed  bool // something went to out
}

// daemon returns the client.
func (a *app) daemon() *client.Client {
	if a.client == nil {
		a.client = client.New(a.socket)
	}
	return a.client
}

// print writes v as JSON.
func (a *app) print(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	a.printed = true
	if err := e.Encode(v); err != nil {
		return api.Errorf(api.ErrInternal, "print: %w", err)
	}
	return nil
}

func (a *app) warn(format string, args ...any) {
	fmt.Fprintln(a.err, "iserctl: "+strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " "))
}

// exactly wants n arguments.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < n:
			return api.Errorf(api.ErrInvalidArgs, "%s is missing", what)
		case len(args) > n:
			return api.Errorf(api.ErrInvalidArgs, "unexpected argument %q", args[n])
		}
		return nil
	}
}

// defaultSocket is where the daemon is when no flag says otherwise.
func defaultSocket() string {
	if s := os.Getenv("ISERD_SOCKET"); s != "" {
		return s
	}
	return client.DefaultSocket
}

// iscsiadmCommand is there for the list of commands: run takes the arguments before cobra sees them.
func (a *app) iscsiadmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "iscsiadm ARGUMENTS", Short: "Do what open-iscsi's iscsiadm does with these arguments (docs/iscsiadm.md)", DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return api.Errorf(api.ErrInvalidArgs, "iscsiadm has to be the first argument of iserctl")
		},
	}
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use: "iserctl", Short: "Discover iSCSI targets, log in over iSER or TCP, and show the block devices", Version: version.String(),
		SilenceUsage: true, SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return api.Errorf(api.ErrInvalidArgs, "%w", err) })
	pf := root.PersistentFlags()
	pf.StringVar(&a.socket, "socket", defaultSocket(), "socket of the daemon (environment: ISERD_SOCKET)")
	pf.BoolVar(&a.json, "json", false, "print JSON instead of tables")
	pf.DurationVar(&a.timeout, "timeout", 0, "time for a discovery, a login or a SCSI command (default: the daemon's)")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if a.timeout < 0 || a.timeout >= requestLimit {
			return api.Errorf(api.ErrInvalidArgs, "--timeout: expected more than 0 and less than %v", requestLimit)
		}
		return nil
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	group := func(use, short string, subs ...*cobra.Command) *cobra.Command {
		c := &cobra.Command{Use: use, Short: short, Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return api.Errorf(api.ErrInvalidArgs, "%s: unknown command %q", use, args[0])
			}
			return nil
		}, RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
		c.AddCommand(subs...)
		return c
	}
	root.AddCommand(
		a.discoverCommand(), a.loginCommand(), a.logoutCommand(), a.rescanCommand(), a.statusCommand(), a.iscsiadmCommand(),
		group("node", "Stored records: a target at a portal", a.nodeListCommand(), a.nodeShowCommand(), a.nodeAddCommand(), a.nodeDeleteCommand(),
			a.nodeSetCommand(), a.nodeUnsetCommand(), a.nodeSecretCommand()),
		group("discovery", "How portals are asked for their targets", a.discoveryShowCommand(), a.discoverySetCommand(), a.discoveryUnsetCommand(),
			a.discoverySecretCommand(), a.discoveryDeleteCommand()),
		group("session", "Sessions with targets", a.sessionListCommand(), a.sessionShowCommand()),
		group("daemon", "The daemon itself", a.upgradeCommand(), a.reloadCommand()),
		group("config", "The configuration of the daemon", a.configCheckCommand(), a.configShowCommand()),
		group("device", "Block devices", a.deviceListCommand(), a.deviceShowCommand(), a.deviceStatsCommand(), a.deviceAbortCommand()),
		group("buffer", "Memory that programs share with the daemon: O_DIRECT I/O from it needs no copy", a.bufferListCommand(), a.bufferAddCommand(),
			a.bufferRemoveCommand(), a.bufferAdoptCommand(), a.bufferArenaCommand()),
		group("scsi", "SCSI commands to logical units, and persistent reservations", a.scsiInquiryCommand(), a.scsiCapacityCommand(), a.scsiModesCommand(),
			a.scsiLunsCommand(), a.scsiSenseCommand(), a.scsiRawCommand(),
			group("reserve", "Persistent reservations", a.reserveCommands()...)),
	)
	return root
}

func (a *app) seconds() api.Seconds { return api.Seconds(a.timeout.Seconds()) }
