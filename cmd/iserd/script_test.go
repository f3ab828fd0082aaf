package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/standby"
)

func TestMain(m *testing.M) {
	testscript.Main(leakCheck{m}, map[string]func(){"iserd": main, "iserd-io": fakeDataPlane})
}

// leakCheck looks for goroutines after the tests, not in the programs that the scripts run.
type leakCheck struct{ m *testing.M }

func (l leakCheck) Run() int {
	code := l.m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// fakeDataPlane is a process that speaks like iserd-io and serves nothing.
func fakeDataPlane() {
	dir := flag.String("run-dir", "", "")
	flag.String("log-level", "", "")
	var start ipc.Start
	flag.IntVar(&start.Reactors, "reactors", 0, "")
	flag.IntVar(&start.BufferPool, "pool", 64, "")
	flag.DurationVar(&start.ACKTimeout, "ack-timeout", 0, "")
	wait := flag.Int("standby", 0, "")
	flag.Parse()
	if os.Getenv("BROKEN_DATA_PLANE") != "" {
		fmt.Fprintln(os.Stderr, "cannot start")
		os.Exit(3)
	}
	p := daemontest.NewPlane()
	p.Start = &start
	if *wait != 0 {
		hello, err := p.Handle(context.Background(), ipc.MethodHello, []byte("{}"))
		if _, brokenErr := os.Stat(filepath.Join(*dir, "unready")); err != nil || brokenErr == nil {
			fmt.Fprintln(os.Stderr, "cannot get ready", err)
			os.Exit(4)
		}
		if err := standby.Await(context.Background(), *wait, hello); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if err := p.Serve(*dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for p.Serving() {
		time.Sleep(10 * time.Millisecond)
		if _, err := os.Stat(*dir); err != nil {
			return // the test is over
		}
	}
}

// TestScripts runs the real program with a fake data plane process.
func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata", RequireExplicitExec: true, RequireUniqueNames: true,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "status": status, "alive": alive, "killplane": killPlane, "upgrade": upgrade,
			"notified": notified, "hup": hup, "reload": reloaded, "option": option,
		},
		Setup: func(env *testscript.Env) error {
			env.Setenv("R", "--run-dir="+env.WorkDir+"/run")
			env.Setenv("S", "--state-dir="+env.WorkDir+"/state")
			env.Setenv("ISERD_INITIATOR_NAME", "iqn.2026-11.org.iserd:0123456789ab") // so that /etc is left alone
			path := env.WorkDir + "/notify.sock"
			c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
			if err != nil {
				return err
			}
			words := make(chan string, 1000) // what nobody reads would stop the daemon
			go listen(c, words)
			env.Defer(func() { _ = c.Close() })
			env.Setenv("NOTIFY_SOCKET", path)
			env.Values[notifyKey{}] = words
			return nil
		},
	})
}

// exits runs a command and wants an exit code and one line on standard error.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var e interface{ ExitCode() int }
		if !errors.As(err, &e) {
			ts.Fatalf("%v", err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
	if n := strings.Count(ts.ReadFile("stderr"), "\n"); want != 0 && n != 1 {
		ts.Fatalf("%d lines on standard error, want one", n)
	}
}

// current reads the status of the script's daemon.
func current(ts *testscript.TestScript) (api.Status, error) {
	c := client.New(ts.MkAbs("run/control.sock"))
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := c.Status(ctx)
	return r.Status, err
}

// status waits until the daemon's data plane is in a state ("up", "down"), or with "none" until no daemon answers. With a variable name it
// stores the data plane's pid there; with a pid behind it waits for another data plane than that.
func status(ts *testscript.TestScript, _ bool, args []string) {
	limit := time.Now().Add(20 * time.Second)
	for {
		st, err := current(ts)
		switch {
		case args[0] == "none" && api.Is(err, api.ErrDaemonUnreachable):
			return
		case err == nil && st.DataPlane.State == args[0] && (len(args) < 3 || strconv.Itoa(st.DataPlane.PID) != args[2]):
			if len(args) > 1 {
				ts.Setenv(args[1], strconv.Itoa(st.DataPlane.PID))
			}
			return
		}
		if time.Now().After(limit) {
			ts.Fatalf("status %+v, %v; want %s", st, err, args[0])
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// alive tells whether a process is there; "! alive" waits until it is gone.
func alive(ts *testscript.TestScript, neg bool, args []string) {
	pid, err := strconv.Atoi(args[0])
	ts.Check(err)
	limit := time.Now().Add(20 * time.Second)
	for {
		there := syscall.Kill(pid, 0) == nil
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && strings.Contains(string(b), ") Z ") {
			there = false // nobody has collected it yet
		}
		if there != neg {
			return
		}
		if !neg || time.Now().After(limit) {
			ts.Fatalf("process %d: there is %v", pid, there)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// upgrade has the daemon replace its data plane; "! upgrade" wants a failure whose text has the words.
func upgrade(ts *testscript.TestScript, neg bool, args []string) {
	c := client.New(ts.MkAbs("run/control.sock"))
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r, err := c.Upgrade(ctx, api.UpgradeRequest{})
	switch {
	case neg && (err == nil || !strings.Contains(err.Error(), args[0])):
		ts.Fatalf("upgrade: %+v, %v; want %q", r, err, args[0])
	case !neg:
		ts.Check(err)
	}
}

type notifyKey struct{}

// listen hears what the service manager is told, until the socket is closed.
func listen(c *net.UnixConn, words chan<- string) {
	b := make([]byte, 4096)
	for {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		words <- strings.ReplaceAll(string(b[:n]), "\n", " ")
	}
}

// notified waits until the service manager is told the words, one after the other, each at the beginning of a message.
func notified(ts *testscript.TestScript, _ bool, args []string) {
	limit := time.After(20 * time.Second)
	for _, want := range args {
		for text := ""; !strings.HasPrefix(text, want); {
			select {
			case text = <-ts.Value(notifyKey{}).(chan string):
			case <-limit:
				ts.Fatalf("the service manager is not told %q", want)
			}
		}
	}
}

// hup sends the daemon SIGHUP.
func hup(ts *testscript.TestScript, _ bool, _ []string) {
	st, err := current(ts)
	ts.Check(err)
	ts.Check(syscall.Kill(st.PID, syscall.SIGHUP))
}

// reloaded has the daemon read its configuration again, and wants the names of the options that change; "! reload" wants a failure whose text has the words.
func reloaded(ts *testscript.TestScript, neg bool, args []string) {
	c := client.New(ts.MkAbs("run/control.sock"))
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r, err := c.Reload(ctx, api.ReloadRequest{})
	if neg {
		if err == nil || !strings.Contains(err.Error(), args[0]) || !api.Is(err, api.ErrInvalidArgs) {
			ts.Fatalf("reload: %+v, %v; want %q", r, err, args[0])
		}
		return
	}
	ts.Check(err)
	var names []string
	for _, x := range r.Changes {
		names = append(names, x.Name)
	}
	if !slices.Equal(names, args) {
		ts.Fatalf("reload: %+v, want changes of %q", r, args)
	}
}

// option wants an option of the daemon: NAME VALUE ORIGIN, and what holds until then if it waits.
func option(ts *testscript.TestScript, _ bool, args []string) {
	c := client.New(ts.MkAbs("run/control.sock"))
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r, err := c.Config(ctx)
	ts.Check(err)
	for _, o := range r.Options {
		if o.Name != args[0] {
			continue
		}
		got := []string{o.Name, o.Value.Text, o.Origin.String()}
		if o.InForce != nil {
			got = append(got, o.InForce.Text)
		}
		if !slices.Equal(got, args) {
			ts.Fatalf("option %q, want %q", got, args)
		}
		return
	}
	ts.Fatalf("no option %s in %+v", args[0], r)
}

func killPlane(ts *testscript.TestScript, _ bool, args []string) {
	pid, err := strconv.Atoi(args[0])
	ts.Check(err)
	ts.Check(syscall.Kill(pid, syscall.SIGKILL))
}
