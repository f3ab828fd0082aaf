package iscsiadm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/client"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

const example = "iqn.2003-01.org.example:"

// TestTranscripts replays the calls in testdata and compares what comes of them: standard output, standard error marked with "2> ", and the exit code
// behind "=> ". The daemon is a real control plane between fakes (package daemontest). UPDATE_TRANSCRIPTS=1 rewrites what is expected.
//
// A line "! hold N" makes somebody use the device N, "! state STATE" changes what the daemon says of all sessions, "// " is a comment. $T is
// the beginning of all names of targets.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) { replay(t, file) })
	}
}

func replay(t *testing.T, file string) {
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	l, d := lab(t)
	var got strings.Builder
	for _, line := range strings.Split(string(b), "\n") {
		switch {
		case strings.HasPrefix(line, "// "):
			fmt.Fprintln(&got, line)
		case strings.HasPrefix(line, "! "):
			fmt.Fprintln(&got, line)
			words := strings.Fields(line)
			switch words[1] {
			case "hold":
				id, err := strconv.Atoi(words[2])
				if err != nil {
					t.Fatal(err)
				}
				l.Blocks.Hold(id, words[3:]...)
			case "state":
				d.state = words[2]
			default:
				t.Fatalf("%s: unknown step", line)
			}
		case strings.HasPrefix(line, "$ iscsiadm"):
			fmt.Fprintln(&got, line)
			var out, errs bytes.Buffer
			words := strings.Fields(strings.ReplaceAll(line, "$T", example))[2:]
			code := Run(t.Context(), d, words, &out, &errs)
			got.WriteString(strings.ReplaceAll(out.String(), example, "$T"))
			for _, l := range strings.SplitAfter(strings.ReplaceAll(errs.String(), example, "$T"), "\n") {
				if l != "" {
					got.WriteString("2> " + l)
				}
			}
			fmt.Fprintf(&got, "=> %d\n", code)
		}
	}
	if os.Getenv("UPDATE_TRANSCRIPTS") != "" {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, have := strings.Split(string(b), "\n"), strings.Split(got.String(), "\n")
	for i := range max(len(want), len(have)) {
		w, h := "(end)", "(end)"
		if i < len(want) {
			w = want[i]
		}
		if i < len(have) {
			h = have[i]
		}
		if w != h {
			t.Fatalf("%s:%d:\n got %q\nwant %q", file, i+1, h, w)
		}
	}
}

// changed is a daemon whose sessions are in another state.
type changed struct {
	*client.Client
	state string
}

func (c *changed) Sessions(ctx context.Context) (api.SessionsReply, error) {
	r, err := c.Client.Sessions(ctx)
	for i := range r.Sessions {
		if c.state != "" {
			r.Sessions[i].State = c.state
		}
	}
	return r, err
}

// lab starts a control plane with targets.
func lab(t *testing.T) (*daemontest.Lab, *changed) {
	l := daemontest.NewLab(t.TempDir())
	l.Plane.Prompt = true
	if err := os.MkdirAll(filepath.Join(l.Dir, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.Dir, "etc/initiatorname"), []byte("iqn.2026-11.org.iserd:0123456789ab\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tape := daemontest.Disk(2, 0)
	tape.Usable, tape.DeviceType, tape.Reason = false, 1, "tape: only disks can be served as block devices"
	l.Plane.AddTarget(example+"t1", &daemontest.Target{ISER: true, TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 64<<20), daemontest.Disk(1, 1<<30), tape}})
	l.Plane.AddTarget(example+"t2", &daemontest.Target{TPGT: 1, Units: []ipc.Unit{daemontest.Disk(0, 1<<40)}})
	for name, e := range map[string]*ipc.Error{
		"refuses": {Code: "FatalLogin", Text: "login: status 02/02: not allowed"}, "gone": {Code: "NotFound", Text: "login: status 02/03: not found"},
		"busy": {Code: "LoginFailed", Text: "login: status 03/01: service unavailable"},
		"chap": {Code: "AuthenticationFailed", Text: "login: status 02/01: authentication failed"},
		"dead": {Code: "ConnectionFailed", Text: "connect: connection refused"}, "late": {Code: "Timeout", Text: "connect: no answer"},
	} {
		l.Plane.AddTarget(example+name, &daemontest.Target{Err: e})
	}
	at := func(name, addr string) daemon.Found {
		return daemon.Found{Target: example + name, Address: addr, Port: 3260, TPGT: 1}
	}
	noRDMA := api.Errorf(api.ErrTransportUnavailable, "no RDMA device serves 10.0.0.3")
	l.Portals["10.0.0.1:3260"] = &daemontest.Portal{Lists: map[string][]daemon.Found{
		"iser": {at("t1", "10.0.0.1"), at("t1", "fd00::1")}, "tcp": {at("t2", "10.0.0.1"), at("t1", "10.0.0.1")},
	}}
	l.Portals["10.0.0.3:3260"] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": {at("t2", "10.0.0.3")}}, Errs: map[string]error{"iser": noRDMA}}
	refused := api.Errorf(api.ErrConnectionFailed, "connect to 10.0.0.2:3260: connection refused")
	l.Portals["10.0.0.2:3260"] = &daemontest.Portal{Errs: map[string]error{"tcp": refused, "iser": noRDMA}}
	l.Portals["10.0.0.4:3260"] = &daemontest.Portal{}
	d, err := l.Start()
	if err != nil {
		t.Fatal(err)
	}
	c := client.New(l.Socket())
	t.Cleanup(func() {
		c.Close()
		d.Kill()
		l.Plane.Kill()
		if err := l.Check(); err != nil {
			t.Error(err)
		}
	})
	return l, &changed{Client: c}
}

// silent is a daemon that does not run.
type silent struct{ Daemon }

func (silent) Nodes(context.Context, api.NodeFilter) (api.NodesReply, error) {
	return api.NodesReply{}, api.Errorf(api.ErrDaemonUnreachable, "iserd is not running")
}

func TestUnreachable(t *testing.T) {
	var out, errs bytes.Buffer
	if code := Run(t.Context(), silent{}, []string{"-m", "node"}, &out, &errs); code != 20 || out.Len() > 0 ||
		errs.String() != "iscsiadm: can not connect to iSCSI daemon: iserd is not running\n" {
		t.Errorf("code %d, %q, %q", code, out.String(), errs.String())
	}
}

// late is a daemon that says of its sessions only after a login that there is one: another program has made it meanwhile.
type late struct {
	Daemon
	node  api.Node
	at    string // address of the session's portal
	tried bool
}

func (l *late) Nodes(context.Context, api.NodeFilter) (api.NodesReply, error) {
	return api.NodesReply{Nodes: []api.Node{l.node}}, nil
}

func (l *late) Sessions(context.Context) (r api.SessionsReply, err error) {
	if l.tried {
		r.Sessions = []api.Session{{ID: 1, Target: l.node.Target, Address: l.at, Port: 3260, State: api.SessionUp}}
	}
	return r, nil
}

func (l *late) Login(context.Context, api.LoginRequest) (api.LoginReply, error) {
	l.tried = true
	return api.LoginReply{}, api.Errorf(api.ErrAlreadyLoggedIn, "already logged in")
}

// TestLoginRace: os-brick logs in to all portals of a target at the same time. Only the login to the portal of the session may say that it exists.
func TestLoginRace(t *testing.T) {
	for at, want := range map[string]int{"10.0.0.1": 15, "10.0.0.2": 27} {
		d := &late{node: api.Node{Target: example + "t1", Address: "10.0.0.1", Port: 3260}, at: at}
		var out, errs bytes.Buffer
		if code := Run(t.Context(), d, []string{"-m", "node", "-T", example + "t1", "-p", "10.0.0.1", "--login"}, &out, &errs); code != want {
			t.Errorf("session at %s: code %d, want %d\n%s", at, code, want, errs.String())
		}
	}
}

// TestCodes: every failure of the daemon has a number that iscsiadm has, with its words, and only a failed login turns "not found" into a refusal.
func TestCodes(t *testing.T) {
	for name, want := range map[string]int{
		api.ErrNotFound: 21, api.ErrSessionNotFound: 2, api.ErrAlreadyLoggedIn: 15, api.ErrConnectionFailed: 4, api.ErrTimeout: 8, api.ErrLoginFailed: 5,
		api.ErrFatalLogin: 19, api.ErrAuthenticationFailed: 24, api.ErrLogoutFailed: 10, api.ErrDatabase: 6, api.ErrNotSupported: 27, api.ErrBusy: 28,
		api.ErrAgain: 29, api.ErrTransportUnavailable: 12, api.ErrProtocolError: 9, api.ErrPDUTimeout: 11, api.ErrCommandFailed: 1,
		api.ErrReservationConflict: 1, api.ErrInternal: 9, api.ErrDaemonUnreachable: 20, api.ErrAccessDenied: 13, api.ErrInvalidArgs: 7,
	} {
		got := codeOf(api.Errorf(name, "x"))
		if got != want || message(got) == "" || want != 1 && message(got) == messages[1] {
			t.Errorf("%s: %d %q, want %d", name, got, message(got), want)
		}
	}
	if c := loginCode(api.Errorf(api.ErrNotFound, "x")); c != 19 {
		t.Errorf("login: %d", c)
	}
	if c := codeOf(errors.New("x")); c != 9 {
		t.Errorf("a failure without a name: %d", c)
	}
}
