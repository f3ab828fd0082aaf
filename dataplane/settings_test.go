package dataplane

import (
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
)

const (
	ours   = "the initiator's secret"
	theirs = "the target's own secret"
)

// set makes settings from NAME=VALUE.
func set(t *testing.T, assignments ...string) (s api.Settings) {
	t.Helper()
	for _, a := range assignments {
		name, value, _ := strings.Cut(a, "=")
		if err := s.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestCHAP(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{CHAP: &testtarget.CHAP{Algorithms: []int{5, 6, 7}, User: "host", Secret: ours, TargetUser: "storage", TargetSecret: theirs}})
	oneWay := newTarget(t, testtarget.Config{CHAP: &testtarget.CHAP{Algorithms: []int{5, 6, 7}, User: "iqn.2026-11.org.iserd:test", Secret: ours}})
	open := newTarget(t, testtarget.Config{})
	before := p.objects()
	for _, c := range []struct {
		name     string
		target   *testtarget.Target
		settings []string
		secrets  [2]string
		want     string // authentication, or an error name
	}{
		{"MD5", target, []string{"chap_user=host", "chap_algorithms=MD5"}, [2]string{ours}, "CHAP MD5"},
		{"SHA1", target, []string{"chap_user=host", "chap_algorithms=SHA1"}, [2]string{ours}, "CHAP SHA1"},
		{"SHA-256", target, []string{"chap_user=host", "chap_algorithms=SHA256", "auth=chap"}, [2]string{ours}, "CHAP SHA-256"},
		{"mutual", target, []string{"chap_user=host", "chap_target_user=storage", "chap_algorithms=SHA1,MD5"}, [2]string{ours, theirs}, "CHAP SHA1 mutual"},
		{"our name is the user", oneWay, []string{"chap_algorithms=SHA1"}, [2]string{ours}, "CHAP SHA1"},
		{"wrong secret", target, []string{"chap_user=host"}, [2]string{"another secret"}, api.ErrAuthenticationFailed},
		{"wrong user", target, []string{"chap_user=guest"}, [2]string{ours}, api.ErrAuthenticationFailed},
		{"no secret", target, nil, [2]string{}, api.ErrAuthenticationFailed},
		{"not to be used", target, []string{"chap_user=host", "auth=none"}, [2]string{ours}, api.ErrAuthenticationFailed},
		{"the target's secret is another", target, []string{"chap_user=host"}, [2]string{ours, "another secret"}, api.ErrAuthenticationFailed},
		{"the target's name is another", target, []string{"chap_user=host", "chap_target_user=me"}, [2]string{ours, theirs}, api.ErrAuthenticationFailed},
		{"the target cannot prove itself", oneWay, nil, [2]string{ours, theirs}, api.ErrAuthenticationFailed},
		{"only strong ones", target, []string{"chap_user=host", "chap_policy=strong", "chap_algorithms=SHA256"}, [2]string{ours, theirs}, "CHAP SHA-256 mutual"},
		{"the target does not ask", open, nil, [2]string{ours}, "None"},
		{"the target does not ask and has to", open, []string{"auth=chap"}, [2]string{ours}, api.ErrAuthenticationFailed},
		{"the target does not ask, under the strong policy", open, []string{"chap_policy=strong"}, [2]string{ours}, api.ErrAuthenticationFailed},
		{"the target does not ask and has to prove itself", open, nil, [2]string{ours, theirs}, api.ErrAuthenticationFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := loginTo(c.target)
			r.Settings = set(t, c.settings...)
			r.Secret, r.TargetSecret = api.NewSecret([]byte(c.secrets[0])), api.NewSecret([]byte(c.secrets[1]))
			g, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
			if strings.Contains(c.want, ".") {
				wantCode(t, err, c.want)
				if err != nil && !strings.Contains(err.Error(), "iserctl node secret") {
					t.Errorf("the text does not help: %v", err)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				if g.Sessions[0].AuthMethod != c.want || g.Sessions[1].AuthMethod != c.want {
					t.Errorf("authentication %q", g.Sessions[0].AuthMethod)
				}
				if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
					t.Fatal(err)
				}
			}
			settled(t, p, before)
		})
	}
}

// A lost session proves itself again.
func TestCHAPInRecovery(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{CHAP: &testtarget.CHAP{Algorithms: []int{5, 6, 7}, User: "host", Secret: ours, TargetUser: "storage", TargetSecret: theirs}})
	r := loginTo(target)
	r.Settings = set(t, "chap_user=host", "chap_algorithms=SHA1")
	r.Secret, r.TargetSecret = api.NewSecret([]byte(ours)), api.NewSecret([]byte(theirs))
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	events := watchGroup(p)
	loseAll(target)
	until(t, events, ipc.GroupUp)
	if n := target.Logins(); n != 4 {
		t.Errorf("%d logins", n)
	}
	s, err := ask[ipc.State](t, p, ipc.MethodState, ipc.Empty{})
	if err != nil || s.Groups[0].Sessions[0].AuthMethod != "CHAP SHA1 mutual" {
		t.Errorf("%+v, %v", s, err)
	}
}

// watchGroup collects what the control plane would be told.
func watchGroup(p *Plane) <-chan ipc.Group {
	events := make(chan ipc.Group, 64)
	p.Notify(func(_ string, body any) { events <- *body.(*ipc.Group) })
	return events
}

// loseAll closes every connection at the target's end.
func loseAll(target *testtarget.Target) {
	for _, c := range target.Conns() {
		c.Close()
	}
}

// until waits for a state of the group, and returns those on the way.
func until(t *testing.T, events <-chan ipc.Group, state string) (g ipc.Group, states []string) {
	t.Helper()
	limit := time.After(10 * time.Second)
	for {
		select {
		case g = <-events:
			states = append(states, g.State)
			if g.State == state {
				return g, states
			}
		case <-limit:
			t.Fatalf("the group does not become %s: %v", state, states)
		}
	}
}

func TestDigests(t *testing.T) {
	p := newPlane(t)
	both := newTarget(t, testtarget.Config{})
	none := newTarget(t, testtarget.Config{Keys: map[string]string{"HeaderDigest": "None", "DataDigest": "None"}})
	for _, c := range []struct {
		target       *testtarget.Target
		header, data string
		want         [2]string // empty: refused
	}{
		{both, "CRC32C", "CRC32C", [2]string{"CRC32C", "CRC32C"}},
		{both, "None,CRC32C", "CRC32C,None", [2]string{"None", "CRC32C"}},
		{both, "None", "None", [2]string{"None", "None"}},
		{none, "CRC32C,None", "None,CRC32C", [2]string{"None", "None"}},
		{none, "CRC32C", "None", [2]string{}},
	} {
		r := loginTo(c.target)
		r.Settings = set(t, "header_digest="+c.header, "data_digest="+c.data)
		g, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
		if c.want[0] == "" {
			wantCode(t, err, api.ErrFatalLogin)
			if err != nil && !strings.Contains(err.Error(), "header_digest=CRC32C,None") {
				t.Errorf("the text does not help: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		n := g.Sessions[1].Negotiated
		if got := [2]string{n["HeaderDigest"], n["DataDigest"]}; got != c.want || len(g.Units) != 1 || !g.Units[0].Usable {
			t.Errorf("%s, %s: %v; units %+v", c.header, c.data, got, g.Units)
		}
		if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
			t.Fatal(err)
		}
	}
}

// What is set is what is proposed, and the defaults are those that the table for users has.
func TestKeys(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{Keys: map[string]string{"InitialR2T": "No", "MaxBurstLength": "16777215", "MaxOutstandingR2T": "64", "FirstBurstLength": "16777215"}})
	r := loginTo(target)
	r.Settings = set(t, "max_burst_length=131072", "first_burst_length=32768", "immediate_data=No", "initial_r2t=No", "max_outstanding_r2t=4",
		"default_time2wait=5", "default_time2retain=0", "max_recv_data_segment_length=16384")
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"MaxBurstLength": "131072", "FirstBurstLength": "32768", "ImmediateData": "No", "InitialR2T": "No", "MaxOutstandingR2T": "4",
		"DefaultTime2Wait": "5", "DefaultTime2Retain": "0",
	} {
		if got := g.Sessions[0].Negotiated[key]; got != want {
			t.Errorf("%s=%s, want %s", key, got, want)
		}
	}
	if !reflect.DeepEqual(g.Settings, r.Settings) {
		t.Errorf("settings of the group: %+v", g.Settings)
	}
	said := ""
	for _, e := range target.Events() {
		if !e.Sent && e.PDU.Opcode() == 3 {
			said += string(e.PDU.Data)
		}
	}
	if !strings.Contains(said, "MaxRecvDataSegmentLength=16384\x00") {
		t.Errorf("the target was told %q", said)
	}

	for _, c := range []struct {
		port    port
		row     func(*api.Setting) string
		propose login.Config
	}{{tcpPort{}, func(s *api.Setting) string { return s.TCP }, login.Config{}}, {rdmaPort{}, func(s *api.Setting) string { return s.ISER }, login.Config{}}} {
		c.port.configure(&c.propose)
		applySettings(&c.propose, &ipc.LoginRequest{})
		k := c.propose.Keys
		for name, v := range map[string]any{
			"max_burst_length": k.MaxBurstLength, "first_burst_length": k.FirstBurstLength, "max_outstanding_r2t": k.MaxOutstandingR2T,
			"default_time2wait": int(k.DefaultTime2Wait / time.Second), "default_time2retain": int(k.DefaultTime2Retain / time.Second),
			"immediate_data": map[bool]string{true: "Yes", false: "No"}[k.ImmediateData], "initial_r2t": map[bool]string{true: "Yes", false: "No"}[k.InitialR2T],
			"max_recv_data_segment_length": k.MaxRecvDataSegmentLength,
		} {
			s, err := api.FindSetting(name)
			if err != nil {
				t.Fatal(err)
			}
			if want := c.row(s); want != "" && want != fmt.Sprint(v) {
				t.Errorf("%s proposes %v, the table says %s", name, v, want)
			}
		}
		if k.InitialR2T != true {
			t.Error("InitialR2T is not Yes")
		}
	}
	for name, d := range map[string]time.Duration{
		"logout_timeout": logoutTimeout, "noop_out_interval": pingInterval, "noop_out_timeout": pingTimeout, "replacement_timeout": replacementTimeout,
	} {
		s, _ := api.FindSetting(name)
		if want := fmt.Sprint(int(d / time.Second)); s.TCP != want || s.ISER != want {
			t.Errorf("%s is %s, the table says %s and %s", name, want, s.TCP, s.ISER)
		}
	}
}

// Over iSER no setting gets in the way of what the transport needs.
func TestKeysOverISER(t *testing.T) {
	r := ipc.LoginRequest{Settings: set(t, "header_digest=CRC32C", "data_digest=CRC32C", "initial_r2t=No", "max_recv_data_segment_length=65536", "max_burst_length=4096", "immediate_data=No")}
	var c login.Config
	rdmaPort{}.configure(&c)
	want := *c.Keys
	applySettings(&c, &r)
	want.MaxBurstLength, want.FirstBurstLength, want.ImmediateData = 4096, 4096, false
	if !reflect.DeepEqual(*c.Keys, want) || c.HeaderDigest != nil || c.DataDigest != nil || !c.Keys.RDMAExtensions || !c.Keys.InitialR2T {
		t.Errorf("%+v, want %+v", *c.Keys, want)
	}
}

func TestSourceAddress(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	r := loginTo(target)
	r.Settings = set(t, "source_address=127.0.0.2")
	g, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range g.Sessions {
		if host, _, _ := net.SplitHostPort(s.LocalAddress); host != "127.0.0.2" {
			t.Errorf("a session from %s", s.LocalAddress)
		}
	}
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Fatal(err)
	}
	r.Settings = set(t, "source_address=192.0.2.1") // not an address of this host
	if _, err = ask[ipc.Group](t, p, ipc.MethodLogin, r); err == nil {
		t.Error("a session from an address of somebody else")
	}
	r.Settings = set(t, "network_interface=nonsense0")
	if _, err = ask[ipc.Group](t, p, ipc.MethodLogin, r); err == nil || !strings.Contains(err.Error(), "nonsense0") {
		t.Errorf("through an interface that is not there: %v", err)
	}
	r.Settings = set(t, "rdma_device=nonsense0")
	r.Transport = ipc.TransportISER
	_, err = ask[ipc.Group](t, p, ipc.MethodLogin, r)
	wantCode(t, err, api.ErrTransportUnavailable)
}

// redirector answers logins with a redirection to where, temporary or for good, as long as where is not "".
type redirector struct {
	*testtarget.Target
	mu    sync.Mutex
	asked int
	where string
}

// newRedirector starts a target that sends everybody on. detail is that of status class 1.
func newRedirector(t *testing.T, where string, detail byte) *redirector {
	r := &redirector{}
	r.Target = newTarget(t, testtarget.Config{Redirect: where, Hooks: testtarget.Hooks{Sending: func(_ *testtarget.Conn, q *testtarget.PDU) bool {
		if q.Opcode() == 0x23 && q.BHS[36] == 1 {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.asked++
			q.BHS[37] = detail
			if r.where != "" {
				q.Data = []byte("TargetAddress=" + r.where + "\x00")
			}
		}
		return true
	}}})
	return r
}

func (r *redirector) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

func TestRedirection(t *testing.T) {
	for _, c := range []struct {
		name   string
		detail byte
		moved  bool
		asked  int // logins that the first portal has seen after one recovery of both sessions
	}{
		{"temporary", 1, false, 4},
		{"permanent", 2, true, 1}, // the second session knows from the first
		{"to several places", 2, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlane(t)
			home := newTarget(t, testtarget.Config{})
			where := home.Addr()
			if c.name == "to several places" {
				where = "127.0.0.1:1\x00TargetAddress=" + where // nobody listens at the first
			}
			first := newRedirector(t, where, c.detail)
			g, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(first.Target))
			if err != nil {
				t.Fatal(err)
			}
			moved := ""
			if c.moved {
				moved = home.Addr()
			}
			if g.Portal != first.Addr() || g.MovedTo != moved || g.Sessions[0].Portal != home.Addr() || home.Sessions() != 2 {
				t.Errorf("%+v; %d sessions", g, home.Sessions())
			}
			events := watchGroup(p)
			loseAll(home)
			for range 2 { // one session may be back before the loss of the other is noticed
				if until(t, events, ipc.GroupUp); home.Sessions() == 2 {
					break
				}
			}
			if home.Sessions() != 2 || first.count() != c.asked {
				t.Errorf("%d sessions, the first portal was asked %d times, want %d", home.Sessions(), first.count(), c.asked)
			}
		})
	}
}

// A permanent move that turns out wrong: the first portal is asked again, and its word counts.
func TestMovedBack(t *testing.T) {
	p := newPlane(t)
	away := newTarget(t, testtarget.Config{})
	other := newTarget(t, testtarget.Config{})
	first := newRedirector(t, away.Addr(), 2)
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(first.Target)); err != nil {
		t.Fatal(err)
	}
	first.mu.Lock()
	first.where = other.Addr()
	first.mu.Unlock()
	events := watchGroup(p)
	away.Close()
	g, _ := until(t, events, ipc.GroupUp)
	if g.MovedTo != other.Addr() || other.Sessions() != 2 {
		t.Errorf("%+v; %d sessions", g, other.Sessions())
	}
}

func TestRedirectionFails(t *testing.T) {
	p := newPlane(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	one := newRedirector(t, "127.0.0.1:1", 1)
	two := newRedirector(t, one.Addr(), 2)
	one.where = two.Addr()
	var chain []*redirector
	where := closed.Addr().String()
	for range maxRedirects + 1 {
		chain = append(chain, newRedirector(t, where, 1))
		where = chain[len(chain)-1].Addr()
	}
	cases := []struct {
		name, at, says, code string
	}{
		{"in a circle", one.Addr(), "in a circle", api.ErrFatalLogin},
		{"to itself", newRedirectorToItself(t).Addr(), "in a circle", api.ErrFatalLogin},
		{"to nobody", newRedirector(t, closed.Addr().String(), 1).Addr(), "redirected to " + closed.Addr().String(), api.ErrConnectionFailed},
		{"too often", where, "more than 8 times", api.ErrFatalLogin},
		{"to nonsense", newRedirector(t, "0.0.0.0:3260", 1).Addr(), "unicast", api.ErrFatalLogin},
		{"without an address", newRedirector(t, "-", 1).Addr(), "no usable TargetAddress", api.ErrFatalLogin},
	}
	before := p.objects()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := loginTo(one.Target)
			r.Portal = c.at
			_, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
			wantCode(t, err, c.code)
			if err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v does not say %q", err, c.says)
			}
			settled(t, p, before)
		})
	}
}

func newRedirectorToItself(t *testing.T) *redirector {
	r := newRedirector(t, "127.0.0.1:1", 2)
	r.mu.Lock()
	r.where = r.Addr()
	r.mu.Unlock()
	return r
}

// How long requests wait for a lost session: not at all, or as long as it takes.
func TestReplacementTimeout(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	r := loginTo(target)
	r.Settings = set(t, "replacement_timeout=0")
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, r); err != nil {
		t.Fatal(err)
	}
	path := p.groups["g1"].paths[0]
	events := watchGroup(p)
	target.Close()
	until(t, events, ipc.GroupFailed)
	done := make(chan iscsi.Outcome, 1)
	path.reactor.Call(func() { path.Submit(&iscsi.Task{Handler: taskFunc(func(t *iscsi.Task) { done <- t.Outcome })}) })
	select {
	case o := <-done:
		if o != iscsi.NotSent {
			t.Errorf("outcome %v", o)
		}
	case <-time.After(10 * time.Second):
		t.Error("a request is held although it was to fail at once")
	}

	ran := make(chan struct{})
	forever, none := api.Forever, 0
	afterSetting(&forever, time.Nanosecond, func() { t.Error("forever has an end") })()
	afterSetting(&none, time.Hour, func() { close(ran) })
	<-ran
	afterSetting(nil, time.Hour, func() { t.Error("stopped, and runs") })()
}

// A target that is out of resources for the moment is asked again.
func TestOutOfResources(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	refuse := 2
	var mu sync.Mutex
	target.SetHooks(testtarget.Hooks{Sending: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		mu.Lock()
		defer mu.Unlock()
		if q.Opcode() == 0x23 && refuse > 0 {
			refuse--
			q.BHS[1], q.BHS[36], q.BHS[37], q.Data = 0, 3, 2, nil
		}
		return true
	}})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask[ipc.Empty](t, p, ipc.MethodLogout, ipc.LogoutRequest{Group: "g1"}); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	refuse = 3
	mu.Unlock()
	_, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target))
	wantCode(t, err, api.ErrLoginFailed)
}

// While a target refuses to take a lost session back, the control plane is told why, also when the reason becomes another, and the login is tried again.
func TestRefusalInRecovery(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	var mu sync.Mutex
	var class, detail byte
	answer := func(c, d byte) { mu.Lock(); defer mu.Unlock(); class, detail = c, d }
	target.SetHooks(testtarget.Hooks{Sending: func(c *testtarget.Conn, q *testtarget.PDU) bool {
		mu.Lock()
		defer mu.Unlock()
		if q.Opcode() == 0x23 && class != 0 {
			q.BHS[1], q.BHS[36], q.BHS[37], q.Data = 0, class, detail, nil
		}
		return true
	}})
	if _, err := ask[ipc.Group](t, p, ipc.MethodLogin, loginTo(target)); err != nil {
		t.Fatal(err)
	}
	events := watchGroup(p)
	for i, c := range []struct {
		class, detail byte
		code          string
	}{{2, 2, api.ErrAuthenticationFailed}, {3, 1, api.ErrLoginFailed}, {2, 3, api.ErrNotFound}} {
		answer(c.class, c.detail)
		if i == 0 {
			loseAll(target)
		}
		for limit := time.After(10 * time.Second); ; {
			var g ipc.Group
			select {
			case g = <-events:
			case <-limit:
				t.Fatalf("nobody is told of status %d/%d", c.class, c.detail)
			}
			if g.State != ipc.GroupRecovering {
				t.Fatalf("the group is %s: %v", g.State, g.Error)
			}
			if g.Error != nil && g.Error.Code == c.code {
				break
			}
		}
	}
	answer(0, 0)
	if g, _ := until(t, events, ipc.GroupUp); g.Error != nil {
		t.Errorf("back, with %v", g.Error)
	}
}

// A request with settings that no check would have let pass does not reach the target.
func TestBadSettings(t *testing.T) {
	p := newPlane(t)
	target := newTarget(t, testtarget.Config{})
	r := loginTo(target)
	r.Settings.HeaderDigest = "MD5"
	_, err := ask[ipc.Group](t, p, ipc.MethodLogin, r)
	wantCode(t, err, api.ErrInvalidArgs)
	var refused *login.LoginError
	if errors.As(err, &refused) || len(target.Events()) != 0 {
		t.Error("the target was asked")
	}
}
