package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

func TestMain(m *testing.M) {
	testscript.Main(leakCheck{m}, map[string]func(){"iserctl": main, "iscsiadm": main})
}

// leakCheck looks for goroutines after the tests, not in the commands that the scripts run.
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

var update = os.Getenv("UPDATE_SCRIPTS") != ""

// TestScripts runs the command against a real control plane between fakes (package daemontest). UPDATE_SCRIPTS=1 rewrites the expected output.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata", UpdateScripts: update, RequireExplicitExec: true, RequireUniqueNames: true,
		Setup: setup,
		Cmds:  map[string]func(*testscript.TestScript, bool, []string){"exits": exits, "lab": labCommand},
	})
}

type labKey struct{}

// firmware is a boot table in files, for a test whose working directory is another.
var firmware, _ = filepath.Abs("../../discovery/ibft/testdata")

const example = "iqn.2003-01.org.example:"

func setup(env *testscript.Env) error {
	l := daemontest.NewLab(env.WorkDir)
	l.Plane.Prompt = true
	l.Plane.Start = &ipc.Start{BufferPool: l.Config.BufferPool}
	// The words that tests compare must not be random.
	for path, text := range map[string]string{
		"state/isid.json":   `{"schema":1,"randoms":["0a0b0c"],"groups":{},"next":0}`,
		"etc/initiatorname": "iqn.2026-11.org.iserd:0123456789ab\n",
	} {
		p := filepath.Join(env.WorkDir, path)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			return err
		}
	}
	tape := daemontest.Disk(2, 0)
	tape.Usable, tape.DeviceType, tape.Reason = false, 1, "tape: only disks can be served as block devices"
	ro := daemontest.Disk(1, 3<<30/2)
	ro.ReadOnly, ro.LogicalBlockSize, ro.Blocks = true, 4096, 3<<30/2/4096
	l.Plane.AddTarget(example+"t1", &daemontest.Target{ISER: true, TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 64<<20), ro, tape}})
	l.Plane.AddTarget(example+"t2", &daemontest.Target{TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 1<<40)}})
	l.Plane.AddTarget(example+"refuses", &daemontest.Target{Err: &ipc.Error{Code: "FatalLogin", Text: "login: status 02/02: not allowed"}})
	l.Plane.AddTarget(example+"busy", &daemontest.Target{Err: &ipc.Error{Code: "LoginFailed", Text: "login: status 03/01: service unavailable"}})
	l.Plane.AddTarget(example+"chap", &daemontest.Target{Err: &ipc.Error{Code: "AuthenticationFailed", Text: "login: status 02/01: authentication failed"}})
	l.Plane.AddTarget(example+"dead", &daemontest.Target{Err: &ipc.Error{Code: "ConnectionFailed", Text: "connect: connection refused"}})
	l.Plane.AddTarget(example+"silent", &daemontest.Target{Hang: true})
	noRDMA := api.Errorf(api.ErrTransportUnavailable, "no RDMA device serves 10.0.0.1")
	refused := api.Errorf(api.ErrConnectionFailed, "connect to 10.0.0.2:3260: connection refused")
	t := func(name, addr string) daemon.Found {
		return daemon.Found{Target: example + name, Address: addr, Port: 3260, TPGT: 1}
	}
	l.Portals["10.0.0.1:3260"] = &daemontest.Portal{Lists: map[string][]daemon.Found{
		"iser": {t("t1", "10.0.0.1"), t("t1", "fd00::1")}, "tcp": {t("t2", "10.0.0.1"), t("t1", "10.0.0.1")},
	}}
	l.Portals["10.0.0.2:3260"] = &daemontest.Portal{Errs: map[string]error{"tcp": refused, "iser": noRDMA}}
	l.Portals["10.0.0.3:3260"] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {t("t2", "10.0.0.3"), t("dead", "10.0.0.3")}}, Errs: map[string]error{"iser": noRDMA}}
	l.Portals["10.0.0.5:3260"] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {t("busy", "10.0.0.5")}}}
	l.Portals["10.0.0.4:3260"] = &daemontest.Portal{}
	d, err := l.Start()
	if err != nil {
		return err
	}
	s := &state{lab: l, d: d}
	env.Values[labKey{}] = s
	env.Setenv("ISERD_SOCKET", l.Socket())
	env.Setenv("TZ", "UTC")
	shm, err := os.MkdirTemp("/dev/shm", "iserctl") // memory to share is on tmpfs
	if err != nil {
		return err
	}
	env.Defer(func() { os.RemoveAll(shm) })
	env.Setenv("SHM", shm)
	env.Setenv("Q", example)
	env.Defer(func() {
		s.d.Kill()
		l.Plane.Kill()
		if err := l.Check(); err != nil {
			panic(err)
		}
	})
	return nil
}

type state struct {
	lab *daemontest.Lab
	d   *daemontest.Daemon
}

// exits runs a command and wants an exit code and at most one line on standard error: exits 21 iserctl ... The output is left for stdout and stderr.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if err != nil {
		var e interface{ ExitCode() int }
		if !errors.As(err, &e) {
			ts.Fatalf("%v", err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
	lines := 0
	for _, c := range ts.ReadFile("stderr") {
		if c == '\n' {
			lines++
		}
	}
	if want != 0 && lines != 1 {
		ts.Fatalf("%d lines on standard error, want one", lines)
	}
}

// labCommand changes the surroundings.
func labCommand(ts *testscript.TestScript, neg bool, args []string) {
	s := ts.Value(labKey{}).(*state)
	switch args[0] {
	case "hold":
		id, err := strconv.Atoi(args[1])
		ts.Check(err)
		s.lab.Blocks.Hold(id, args[2:]...)
	case "units": // TARGET NUMBER=MIB...: what the target offers now, without a word to anybody
		var units []ipc.Unit
		for _, a := range args[2:] {
			var n uint16
			var mib uint64
			_, err := fmt.Sscanf(a, "%d=%d", &n, &mib)
			ts.Check(err)
			units = append(units, daemontest.Disk(n, mib<<20))
		}
		s.lab.Plane.SetUnits(args[1], false, units...)
	case "fail":
		s.lab.Blocks.Fail(args[1], errors.New(args[2]))
	case "memory": // FILE SIZE: a file of zeroes
		n, err := strconv.ParseInt(args[2], 10, 64)
		ts.Check(err)
		ts.Check(os.WriteFile(args[1], nil, 0o600))
		ts.Check(os.Truncate(args[1], n))
	case "answer": // CDB DATA: hexadecimal digits
		data, err := api.ParseHex(args[2])
		ts.Check(err)
		s.lab.Plane.Answer(args[1], ipc.ScsiReply{Data: data})
	case "conflict": // CDB
		s.lab.Plane.Answer(args[1], ipc.ScsiReply{Status: 0x18})
	case "old-kernel":
		s.lab.Blocks.Old()
		s.restart(ts)
	case "count": // DEVICE SHARED REGISTERED: requests
		var n [3]int
		for i := range n {
			var err error
			n[i], err = strconv.Atoi(args[1+i])
			ts.Check(err)
		}
		s.lab.Plane.Count(n[0], uint64(n[1]), uint64(n[2]))
	case "no-driver":
		s.lab.NoBlocks = fmt.Errorf("open /dev/ublk-control: %w: load the module with `modprobe ublk_drv`", ublk.ErrNotSupported)
		s.restart(ts)
	case "install": // BUILD: the program of the next data plane; "unready" and "broken" are ones that do not start
		s.lab.Plane.Unready(nil)
		s.lab.Plane.Broken(nil)
		switch args[1] {
		case "unready":
			s.lab.Plane.Unready(errors.New("exit status 1"))
		case "broken":
			s.lab.Plane.Broken(errors.New("exit status 1"))
		default:
			s.lab.Plane.Install(args[1])
		}
	case "hang":
		id, err := strconv.Atoi(args[1])
		ts.Check(err)
		s.lab.Blocks.Hang(id)
	case "restart":
		s.restart(ts)
	case "stop":
		s.d.Kill()
	case "asked": // TARGET SECRET MUTUAL: log in, and compare what the data plane was given
		_, err := s.d.Login(context.Background(), api.LoginRequest{Target: args[1], Portal: "10.0.0.1"})
		ts.Check(err)
		asked := s.lab.Plane.Asked()
		if last := asked[len(asked)-1]; string(last.Secret.Reveal()) != args[2] || string(last.TargetSecret.Reveal()) != args[3] {
			ts.Fatalf("other secrets than %q and %q", args[2], args[3])
		}
	case "firmware":
		ts.Check(os.CopyFS(filepath.Join(s.lab.Dir, "ibft"), os.DirFS(firmware)))
	case "clean":
		ts.Check(s.lab.Clean())
	default:
		ts.Fatalf("lab: unknown command %q", args[0])
	}
}

func (s *state) restart(ts *testscript.TestScript) {
	s.d.Kill()
	d, err := s.lab.Start()
	ts.Check(err)
	s.d = d
}
