package testtarget_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

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

// TestCHAPAlgorithms authenticates both ways with each algorithm, the initiator having all of them to offer or that one alone.
func TestCHAPAlgorithms(t *testing.T) {
	for _, algorithm := range []login.CHAPAlgorithm{login.CHAPMD5, login.CHAPSHA1, login.CHAPSHA256, login.CHAPSHA3256} {
		for _, offer := range [][]login.CHAPAlgorithm{nil, {algorithm}} {
			t.Run(fmt.Sprintf("%d of %v", algorithm, offer), func(t *testing.T) {
				chap := testtarget.CHAP{User: "me", Secret: "0123456789ab", TargetUser: "it", TargetSecret: "ba9876543210", Algorithms: []int{int(algorithm)}}
				target := start(t, testtarget.Config{CHAP: &chap})
				cfg := config(target.Name())
				cfg.Auth = login.Auth{
					User: "me", Secret: login.NewSecret([]byte("0123456789ab")),
					TargetUser: "it", TargetSecret: login.NewSecret([]byte("ba9876543210")), Algorithms: offer,
				}
				if _, err := iscsi.Login(t.Context(), dial(t, target), cfg); err != nil {
					t.Error(err)
				}
				expectClean(t, target)
			})
		}
	}
}

// TestLongLogin answers a login with more text than fits one PDU.
func TestLongLogin(t *testing.T) {
	var more []string
	for i := range 20 {
		more = append(more, fmt.Sprintf("X-org.example.%d=%s", i, strings.Repeat("x", 200)))
	}
	target := start(t, testtarget.Config{LoginKeys: more, TextSize: 500})
	if _, err := iscsi.Login(t.Context(), dial(t, target), config(target.Name())); err != nil {
		t.Error(err)
	}
	responses := 0
	for _, e := range target.Events() {
		if e.Sent && e.PDU.Opcode() == testtarget.OpLoginResp {
			responses++
		}
	}
	if responses < 8 {
		t.Errorf("%d Login Responses", responses)
	}
	expectClean(t, target)
}

// TestLoginAnswers gives each key an answer that is none, or leaves it out: the login ends either way, and soon.
func TestLoginAnswers(t *testing.T) {
	for _, key := range []string{
		"HeaderDigest", "DataDigest", "MaxConnections", "InitialR2T", "ImmediateData", "MaxRecvDataSegmentLength", "MaxBurstLength", "FirstBurstLength",
		"DefaultTime2Wait", "DefaultTime2Retain", "MaxOutstandingR2T", "DataPDUInOrder", "DataSequenceInOrder", "ErrorRecoveryLevel",
		"TargetPortalGroupTag", "AuthMethod", "X-org.example.unknown",
	} {
		for _, value := range []string{"Reject", "Irrelevant", "NotUnderstood", ""} {
			t.Run(key+"="+value, func(t *testing.T) {
				target := start(t, testtarget.Config{})
				target.Misbehave(testtarget.When{Sending: true, Login: true}, testtarget.Answer(key, value))
				ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
				defer cancel()
				result, err := iscsi.Login(ctx, dial(t, target), config(target.Name()))
				switch {
				case ctx.Err() != nil:
					t.Errorf("the login hangs: %v", err)
				case err != nil:
					t.Log(err)
				case result.Keys.MaxBurstLength < 512 || result.Keys.FirstBurstLength < 512 || result.Keys.MaxOutstandingR2T < 1:
					t.Errorf("the login has agreed on %+v", result.Keys)
				}
			})
		}
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

// TestTaskManagement answers task management by what there is to end, and as it is told to.
func TestTaskManagement(t *testing.T) {
	target := start(t, testtarget.Config{})
	p := dial(t, target)
	result, err := iscsi.Login(t.Context(), p, config(target.Name()))
	if err != nil {
		t.Fatal(err)
	}
	manage := func(function byte, lun, referenced, refCmdSN uint32) byte {
		t.Helper()
		answer, _ := raw(t, p, func(h *pdu.BHS) {
			h[0], h[1] = 0x42, 0x80|function
			h.SetInitiatorTaskTag(9)
			h[9] = byte(lun)
			binary.BigEndian.PutUint32(h[20:], referenced)
			h.SetCmdSN(1)
			h.SetExpStatSN(result.ExpStatSN)
			binary.BigEndian.PutUint32(h[32:], refCmdSN)
		}, nil)
		result.ExpStatSN++
		if answer[0] != testtarget.OpTaskMgmtResp {
			t.Fatalf("answer is %#02x", answer[0])
		}
		return answer[2]
	}
	for _, c := range []struct {
		function           byte
		lun, tag, refCmdSN uint32
		want               byte
	}{
		{testtarget.AbortTask, 0, 77, 0, testtarget.TaskDoesNotExist}, // long ended
		{testtarget.AbortTask, 0, 77, 1, testtarget.TaskComplete},     // has not come yet
		{testtarget.AbortTaskSet, 0, pdu.ReservedTag, 0, testtarget.TaskComplete},
		{testtarget.LogicalUnitReset, 0, pdu.ReservedTag, 0, testtarget.TaskComplete},
		{testtarget.LogicalUnitReset, 7, pdu.ReservedTag, 0, testtarget.TaskNoUnit},
		{testtarget.TargetWarmReset, 0, pdu.ReservedTag, 0, testtarget.TaskComplete},
		{testtarget.TaskReassign, 0, pdu.ReservedTag, 0, testtarget.TaskNotSupported},
	} {
		if got := manage(c.function, c.lun, c.tag, c.refCmdSN); got != c.want {
			t.Errorf("function %d: response %d, want %d", c.function, got, c.want)
		}
	}
	if n := target.Unit(0).Resets(); n != 2 {
		t.Errorf("%d resets of the unit", n)
	}
	for _, response := range []byte{
		testtarget.TaskComplete, testtarget.TaskDoesNotExist, testtarget.TaskNoUnit, testtarget.TaskStillAlleged, testtarget.TaskNotReassigned,
		testtarget.TaskNotSupported, testtarget.TaskUnauthorized, testtarget.TaskRejected,
	} {
		undo := target.Misbehave(testtarget.When{Opcode: testtarget.OpTaskMgmt}, testtarget.AnswerTask(response))
		if got := manage(testtarget.LogicalUnitReset, 0, pdu.ReservedTag, 0); got != response {
			t.Errorf("response %d, want %d", got, response)
		}
		undo()
	}
	if n := target.Unit(0).Resets(); n != 2 {
		t.Errorf("%d resets of the unit, though the target was told to do nothing", n)
	}
	expectClean(t, target)
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
