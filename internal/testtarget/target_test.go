package testtarget_test

import (
	"bytes"
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/iscsitcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, config testtarget.Config) *testtarget.Target {
	t.Helper()
	target, err := testtarget.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(target.Close)
	return target
}

func dial(t *testing.T, target *testtarget.Target) *iscsitcp.Port {
	t.Helper()
	p, err := iscsitcp.Dial(t.Context(), target.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func config(name string) login.Config {
	return login.Config{
		InitiatorName: "iqn.2003-01.org.example:me", TargetName: name, SessionType: login.Normal, Transport: login.TCP,
		ISID: [6]byte{0x80}, CmdSN: 1,
	}
}

func expectClean(t *testing.T, target *testtarget.Target) {
	t.Helper()
	for _, v := range target.Violations() {
		t.Error("target saw:", v)
	}
}

// TestLoginStatus brings each refusal to the initiator.
func TestLoginStatus(t *testing.T) {
	for name, c := range map[string]struct {
		target testtarget.Config
		edit   func(*login.Config)
		want   error
	}{
		"good":          {testtarget.Config{}, func(*login.Config) {}, nil},
		"not found":     {testtarget.Config{}, func(c *login.Config) { c.TargetName += "x" }, login.ErrNotFound},
		"redirect":      {testtarget.Config{Redirect: "10.0.0.9:3260,1"}, func(*login.Config) {}, login.ErrMovedTemporarily},
		"CHAP missing":  {testtarget.Config{CHAP: &testtarget.CHAP{User: "u", Secret: "secretsecret"}}, func(*login.Config) {}, login.ErrAuthFailed},
		"unknown TSIH":  {testtarget.Config{}, func(c *login.Config) { c.TSIH = 77 }, login.ErrNoSession},
		"any script":    {testtarget.Config{Hooks: status(0x0302)}, func(*login.Config) {}, login.ErrOutOfResources},
		"vendor status": {testtarget.Config{Hooks: status(0x0399)}, func(*login.Config) {}, login.ErrTargetError},
	} {
		t.Run(name, func(t *testing.T) {
			target := start(t, c.target)
			cfg := config(target.Name())
			c.edit(&cfg)
			_, err := iscsi.Login(t.Context(), dial(t, target), cfg)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if n := target.Logins(); (n == 1) != (c.want == nil) {
				t.Errorf("%d logins", n)
			}
			expectClean(t, target)
		})
	}
}

// status answers every login with a status.
func status(code int) testtarget.Hooks {
	return testtarget.Hooks{Sending: func(_ *testtarget.Conn, p *testtarget.PDU) bool {
		p.BHS[1] &^= 0x80
		p.BHS[36], p.BHS[37] = byte(code>>8), byte(code)
		return true
	}}
}

func TestCHAP(t *testing.T) {
	good := testtarget.CHAP{User: "me", Secret: "0123456789ab", TargetUser: "it", TargetSecret: "ba9876543210"}
	for name, c := range map[string]struct {
		auth login.Auth
		want error
	}{
		"one way": {login.Auth{User: "me", Secret: login.NewSecret([]byte("0123456789ab"))}, nil},
		"mutual": {login.Auth{User: "me", Secret: login.NewSecret([]byte("0123456789ab")),
			TargetUser: "it", TargetSecret: login.NewSecret([]byte("ba9876543210"))}, nil},
		"wrong secret": {login.Auth{User: "me", Secret: login.NewSecret([]byte("0123456789ac"))}, login.ErrAuthFailed},
		"wrong user":   {login.Auth{User: "you", Secret: login.NewSecret([]byte("0123456789ab"))}, login.ErrAuthFailed},
		"wrong target": {login.Auth{User: "me", Secret: login.NewSecret([]byte("0123456789ab")),
			TargetUser: "it", TargetSecret: login.NewSecret([]byte("xx9876543210"))}, login.ErrAuthFailed},
	} {
		t.Run(name, func(t *testing.T) {
			target := start(t, testtarget.Config{CHAP: &good})
			cfg := config(target.Name())
			cfg.Auth = c.auth
			_, err := iscsi.Login(t.Context(), dial(t, target), cfg)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			expectClean(t, target)
		})
	}
}

// TestSendTargets asks for more than fits one PDU.
func TestSendTargets(t *testing.T) {
	var more []string
	for i := range 200 {
		more = append(more, fmt.Sprintf("TargetName=iqn.2003-01.org.example:more%d", i), "TargetAddress=[fd00::1]:3260,2")
	}
	target := start(t, testtarget.Config{More: more, TextSize: 1000})
	port := dial(t, target)
	cfg := config("")
	cfg.SessionType = login.Discovery
	result, err := iscsi.Login(t.Context(), port, cfg)
	if err != nil {
		t.Fatal(err)
	}
	x := iscsi.NewExchange(port, result)
	keys, err := x.Text(t.Context(), "SendTargets", "All")
	if err != nil {
		t.Fatal(err)
	}
	list, err := pdu.ParseSendTargets(keys)
	if err != nil || len(list) != 201 || list[0].Name != target.Name() || list[200].Name != "iqn.2003-01.org.example:more199" {
		t.Errorf("%d targets, %v", len(list), err)
	}
	if err := x.Logout(t.Context()); err != nil {
		t.Error(err)
	}
	if target.Sessions() != 0 {
		t.Error("a discovery session counts as a session")
	}
	expectClean(t, target)
}

// TestReinstatement logs in twice with one ISID: the first connection ends.
func TestReinstatement(t *testing.T) {
	target := start(t, testtarget.Config{})
	first, second := dial(t, target), dial(t, target)
	for _, p := range []*iscsitcp.Port{first, second} {
		if _, err := iscsi.Login(t.Context(), p, config(target.Name())); err != nil {
			t.Fatal(err)
		}
	}
	if n := target.Sessions(); n != 1 {
		t.Errorf("%d sessions", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var ping pdu.BHS
	pdu.NewNOPOut(&ping).SetInitiatorTaskTag(5)
	ping.SetImmediate(true)
	if _, _, err := first.Exchange(ctx, &ping, nil, false); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the first connection lives: %v", err)
	}
}

// raw writes a PDU by hand and returns the answer.
func raw(t *testing.T, p *iscsitcp.Port, edit func(*pdu.BHS), data []byte) (*pdu.BHS, []byte) {
	t.Helper()
	var h pdu.BHS
	edit(&h)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	answer, b, err := p.Exchange(ctx, &h, data, false)
	if err != nil {
		t.Fatal(err)
	}
	return answer, b
}

// TestJudge breaks rules and expects the target to say so.
func TestJudge(t *testing.T) {
	read := func(itt, cmdSN uint32) func(*pdu.BHS) {
		return func(h *pdu.BHS) {
			p := pdu.NewSCSICommand(h)
			p.SetFinal(true)
			p.SetRead(true)
			p.SetInitiatorTaskTag(itt)
			p.SetCmdSN(cmdSN)
			p.SetExpectedDataTransferLength(512)
			p.CDB()[0], p.CDB()[8] = 0x28, 1
		}
	}
	good := func(h *pdu.BHS) {
		pdu.NewNOPOut(h).SetInitiatorTaskTag(5)
		h.SetImmediate(true)
		h.SetCmdSN(1)
	}
	for name, c := range map[string]struct {
		want string
		edit func(*pdu.BHS)
		data []byte
	}{
		"nothing wrong":          {"", good, nil},
		"immediate data in read": {"is no write and has immediate data", read(1, 1), make([]byte, 10)},
		"bidirectional":          {"bidirectional", func(h *pdu.BHS) { read(1, 1)(h); h[1] |= 0x20 }, nil},
		"no F":                   {"no F bit", func(h *pdu.BHS) { read(1, 1)(h); h.SetFinal(false) }, nil},
		"reserved tag":           {"reserved tag", read(pdu.ReservedTag, 1), nil},
		"ExpStatSN":              {"ExpStatSN", func(h *pdu.BHS) { good(h); h.SetExpStatSN(0x1000) }, nil},
		"immediate CmdSN":        {"CmdSN 200", func(h *pdu.BHS) { good(h); h.SetCmdSN(200) }, nil},
		"opcode":                 {"opcode 0x1c", func(h *pdu.BHS) { h[0] = 0x1c; h.SetCmdSN(1) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			target := start(t, testtarget.Config{})
			p := dial(t, target)
			result, err := iscsi.Login(t.Context(), p, config(target.Name()))
			if err != nil {
				t.Fatal(err)
			}
			raw(t, p, func(h *pdu.BHS) {
				c.edit(h)
				if h.ExpStatSN() == 0 {
					h.SetExpStatSN(result.ExpStatSN)
				}
			}, c.data)
			v := strings.Join(target.Violations(), "\n")
			if (c.want == "") != (v == "") || !strings.Contains(v, c.want) {
				t.Errorf("target saw %q, want %q", v, c.want)
			}
		})
	}
}

// TestLibiscsi lets initiators that are not ours judge the target: our two halves could share a misreading.
func TestLibiscsi(t *testing.T) {
	for _, tool := range []string{"iscsi-ls", "iscsi-inq", "iscsi-readcapacity16", "iscsi-md5sum", "iscsi-test-cu"} {
		_, err := exec.LookPath(tool)
		require.Need(t, "guest", err)
	}
	a, b := testtarget.NewUnit(4<<20), testtarget.NewUnit(4<<20)
	content := bytes.Repeat([]byte("0123456789abcdef"), 4<<20/16)
	a.WriteAt(content, 0)
	target := start(t, testtarget.Config{Units: []*testtarget.Unit{a, nil, b}, StatSN: 1000})
	run := func(name string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s %q: %v: %s", name, args, err, out)
		}
		return string(out)
	}
	url := "iscsi://" + target.Addr()
	if out := run("iscsi-ls", "-s", url); !strings.Contains(out, target.Name()) || !strings.Contains(out, "Lun:0") || !strings.Contains(out, "Lun:2") {
		t.Errorf("iscsi-ls prints %s", out)
	}
	lun0, lun2 := url+"/"+target.Name()+"/0", url+"/"+target.Name()+"/2"
	if out := run("iscsi-inq", lun0); !strings.Contains(out, "ISERD") {
		t.Errorf("iscsi-inq prints %s", out)
	}
	for _, page := range []string{"0x00", "0x80", "0x83", "0xb0", "0xb1"} {
		run("iscsi-inq", "-e", "1", "-c", page, lun0)
	}
	if out := run("iscsi-readcapacity16", lun0); !strings.Contains(out, fmt.Sprint(4<<20)) {
		t.Errorf("iscsi-readcapacity16 prints %s", out)
	}
	if out := run("iscsi-md5sum", lun0); !strings.Contains(out, fmt.Sprintf("%x", md5.Sum(content))) {
		t.Errorf("iscsi-md5sum prints %s", out)
	}
	expectClean(t, target)
	for _, suite := range []string{
		"iSCSI.iSCSIcmdsn", "iSCSI.iSCSIdatasn", "iSCSI.iSCSIResiduals", "iSCSI.iSCSINop",
		"SCSI.Inquiry", "SCSI.Mandatory", "SCSI.TestUnitReady", "SCSI.ModeSense6.AllPages", "SCSI.ModeSense6.Control", "SCSI.ModeSense6.Residuals",
		"SCSI.Read10", "SCSI.ReadCapacity10", "SCSI.ReadCapacity16", "SCSI.Write16",
	} {
		if out := run("iscsi-test-cu", "--dataloss", "--normal", "-t", suite, lun2); strings.Contains(out, "had failures") {
			t.Errorf("iscsi-test-cu %s: %s", suite, out)
		}
	}
}

// TestHooks drops, delays and repeats answers.
func TestHooks(t *testing.T) {
	hold := make(chan struct{})
	var order []byte
	target := start(t, testtarget.Config{Hooks: testtarget.Hooks{
		Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
			if c.FullFeature() && p.ITT() == 2 {
				<-hold
			}
			return p.ITT() != 3
		},
		Sending: func(c *testtarget.Conn, p *testtarget.PDU) bool {
			if c.FullFeature() {
				order = append(order, byte(p.ITT()))
				if p.ITT() == 4 {
					c.Write(p.Clone())
				}
			}
			return true
		},
	}})
	p := dial(t, target)
	if _, err := iscsi.Login(t.Context(), p, config(target.Name())); err != nil {
		t.Fatal(err)
	}
	ping := func(itt uint32, wait time.Duration) (answered uint32, err error) {
		var h pdu.BHS
		pdu.NewNOPOut(&h).SetInitiatorTaskTag(itt)
		h.SetImmediate(true)
		h.SetCmdSN(1)
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		answer, _, err := p.Exchange(ctx, &h, nil, false)
		if err != nil {
			return 0, err
		}
		return answer.InitiatorTaskTag(), nil
	}
	time.AfterFunc(time.Millisecond, func() { close(hold) })
	for _, c := range []struct{ itt, want uint32 }{{2, 2}, {4, 4}, {3, 4}} { // the second answer to 4 is what 3 gets
		if got, err := ping(c.itt, 10*time.Second); got != c.want || err != nil {
			t.Errorf("ping %d: answer to %d, %v", c.itt, got, err)
		}
	}
	if _, err := ping(3, 20*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dropped request was answered: %v", err)
	}
	target.Close()
	if !slices.Equal(order, []byte{2, 4}) {
		t.Errorf("answers to %v", order)
	}
	sent := 0
	for _, e := range target.Events() {
		if e.Sent && e.PDU.Opcode() == 0x20 {
			sent++
		}
	}
	if sent != 3 {
		t.Errorf("%d NOP-In recorded", sent)
	}
	if _, err := net.Dial("tcp", target.Addr()); err == nil {
		t.Error("a closed target listens")
	}
}
