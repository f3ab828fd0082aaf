package scenario

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi/pdu"
)

// A target that asks for logouts under load, wants to negotiate anew, and drops its connections: no request fails, the data is right, and where it asks it
// gets a Logout Request. LIO and tgtd do none of this, so the target is the scripted one.
func TestTargetEndsSessions(t *testing.T) {
	guestOnly(t)
	var (
		mu      sync.Mutex
		say     func(c *testtarget.Conn) // to as many sessions as there are, once each, at their next command
		told    map[*testtarget.Conn]bool
		all     int
		logouts int
	)
	tt, err := testtarget.Start(testtarget.Config{
		Addr: "10.0.0.1:3291", Name: newName(t), Units: []*testtarget.Unit{testtarget.NewUnit(16 * mib)},
		Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case p.Opcode() == byte(pdu.OpLogoutRequest) && !c.Discovery():
				logouts++
			case p.Opcode() == byte(pdu.OpSCSICommand) && len(told) < all && !told[c]:
				told[c] = true
				say(c)
			}
			return true
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tt.Close()
		if v := tt.Violations(); len(v) > 0 {
			t.Errorf("the target complains: %q", v)
		}
	})
	g := &target{
		name: tt.Name(), transport: "tcp", kind: kind{name: "scripted-TCP", transport: "tcp"}, portal: tt.Addr(), luns: []uint16{0},
		sessions: func() (int, error) { return tt.Sessions(), nil },
	}
	g.login(t)
	dev := devices(t, g.name)[0]
	for _, c := range []struct {
		event      pdu.AsyncEvent
		wait, time uint16
		logout     bool
	}{
		{pdu.AsyncLogoutRequest, 0, 10, true}, {pdu.AsyncNegotiate, 0, 10, true}, {pdu.AsyncDropConnection, 1, 0, false},
	} {
		before, sessions := tt.Logins(), tt.Sessions()
		mu.Lock()
		say, told, logouts = func(conn *testtarget.Conn) { conn.Async(byte(c.event), 0, c.wait, c.time) }, map[*testtarget.Conn]bool{}, 0
		all = sessions
		mu.Unlock()
		wait := startFio(t, fioVerify("end", dev.Path, dev.Size))
		waitFor(t, "a session is told", 10*time.Second, func() error {
			mu.Lock()
			defer mu.Unlock()
			if len(told) == 0 {
				return fmt.Errorf("none")
			}
			return nil
		})
		wait()
		mu.Lock()
		all = 0
		asked := logouts
		mu.Unlock()
		waitFor(t, fmt.Sprintf("the sessions are back after event %d", c.event), 10*time.Second, func() error {
			if n := tt.Logins() - before; n < 1 {
				return fmt.Errorf("%d logins", n)
			}
			for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
				if s.Target == g.name && s.State != api.SessionUp {
					return fmt.Errorf("session %d is %s", s.ID, s.State)
				}
			}
			return nil
		})
		if c.logout && asked == 0 || !c.logout && asked != 0 {
			t.Errorf("event %d: %d logout requests of %d sessions", c.event, asked, sessions)
		}
	}
	if d := devices(t, g.name)[0]; d.Stats.Errors != 0 {
		t.Errorf("%d errors", d.Stats.Errors)
	}
	g.logout(t)
}
