package scenario

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// connections waits until the sessions with g are at the portals that are wanted, by number of sessions, and the whole has a state.
func connections(t testing.TB, g *target, want map[string]int, state string) {
	t.Helper()
	waitFor(t, fmt.Sprintf("sessions at %v", want), 60*time.Second, func() error {
		got := map[string]int{}
		for _, s := range query[api.SessionsReply](t, "session", "list").Sessions {
			if s.Target != g.name {
				continue
			}
			for _, c := range s.Connections {
				portal := c.Portal
				if portal == "" {
					portal = api.Portal{Address: s.Address, Port: s.Port}.String()
				}
				if c.State == "LOGGED_IN" {
					got[portal]++
				}
			}
			if s.State != state {
				return fmt.Errorf("the session is %s, %v", s.State, s.LastError)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("they are at %v", got)
		}
		return nil
	})
}

// One of two portals goes away and comes back while fio writes and verifies, in each policy and over each transport: nobody sees more than a pause.
func TestPathLost(t *testing.T) {
	const first, second = "10.0.0.1:3261", "10.0.0.1:3262"
	for _, k := range kinds[:2] {
		for _, c := range []struct {
			policy           string
			both, left, lost map[string]int // where the sessions are: with both portals, without the second, without the first
			state            string         // while a portal is missing
		}{
			{api.PathFailover, map[string]int{first: 2}, map[string]int{first: 2}, map[string]int{second: 2}, api.SessionUp},
			{api.PathSpread, map[string]int{first: 1, second: 1}, map[string]int{first: 2}, map[string]int{second: 2}, api.SessionUp},
			{api.PathRoundRobin, map[string]int{first: 2, second: 2}, map[string]int{first: 2}, map[string]int{second: 2}, api.SessionRecovering},
			{api.PathLeastQueued, map[string]int{first: 2, second: 2}, map[string]int{first: 2}, map[string]int{second: 2}, api.SessionRecovering},
		} {
			if once := c.policy == api.PathSpread || c.policy == api.PathLeastQueued; once && k.transport == "tcp" {
				continue // how a session is chosen has nothing to do with the transport
			}
			t.Run(k.name+"/"+c.policy, func(t *testing.T) {
				guestOnly(t)
				iser := k.transport == "iser"
				g := &target{name: newName(t), transport: k.transport, kind: k, portal: first, units: twoUnits(t, 32*mib, 32*mib)}
				g.lioAt(t, first, iser)
				if err := g.lio.AddPortal(targets.ParsePortal(second, iser)); err != nil {
					t.Fatal(err)
				}
				control.need(t)
				iserctl(t, "discover", first, "--transport", k.transport, "--save")
				iserctl(t, "node", "set", g.name, "path_policy="+c.policy, "noop_out_interval=1", "noop_out_timeout=2")
				g.login(t)
				connections(t, g, c.both, api.SessionUp)
				devs := devices(t, g.name)
				for _, x := range []struct {
					portal string
					at     map[string]int
				}{{first, c.lost}, {second, c.left}} {
					var jobs []fioJob
					for lun, d := range devs {
						jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
					}
					wait := startFio(t, jobs)
					progress(t, devs)
					// A portal that is taken away leaves its sessions alone; the portal group ends them.
					if err := errors.Join(g.lio.RemovePortal(targets.ParsePortal(x.portal, iser)), g.lio.SetEnabled(false), g.lio.SetEnabled(true)); err != nil {
						t.Fatal(err)
					}
					connections(t, g, x.at, c.state)
					if err := g.lio.AddPortal(targets.ParsePortal(x.portal, iser)); err != nil {
						t.Fatal(err)
					}
					connections(t, g, c.both, api.SessionUp)
					wait()
				}
				for lun, d := range devices(t, g.name) {
					if d.Stats.Errors != 0 {
						t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
					}
				}
				g.logout(t)
			})
		}
	}
}

// Two controllers change their roles while fio writes and verifies: requests go where the unit says, and nobody sees more than a pause.
func TestAccessStates(t *testing.T) {
	const first, second = "10.0.0.1:3261", "10.0.0.1:3262"
	for i, k := range kinds[:2] {
		for _, policy := range [][]string{{api.PathLeastQueued}, {api.PathFailover, api.PathRoundRobin}}[i] {
			t.Run(k.name+"/"+policy, func(t *testing.T) {
				guestOnly(t)
				iser := k.transport == "iser"
				g := &target{name: newName(t), transport: k.transport, kind: k, portal: first, units: twoUnits(t, 32*mib, 32*mib)}
				g.lioAt(t, first, iser)
				if err := g.lio.AddGroup(targets.ParsePortal(second, iser)); err != nil {
					t.Fatal(err)
				}
				access := func(one, two int) {
					t.Helper()
					for lun := range g.units {
						if err := errors.Join(g.lio.SetAccess(lun, 1, one), g.lio.SetAccess(lun, 2, two)); err != nil {
							t.Fatal(err)
						}
					}
				}
				access(targets.AccessOptimized, targets.AccessStandby)
				control.need(t)
				iserctl(t, "discover", first, "--transport", k.transport, "--save")
				iserctl(t, "node", "set", g.name, "path_policy="+policy)
				g.login(t)
				devs := devices(t, g.name)
				var jobs []fioJob
				for lun, d := range devs {
					jobs = append(jobs, fioVerify(fmt.Sprintf("lun%d", lun), d.Path, d.Size)...)
				}
				for _, x := range [][3]int{
					{targets.AccessStandby, targets.AccessOptimized, 2},
					{targets.AccessNonOptimized, targets.AccessUnavailable, 1},
					{targets.AccessUnavailable, targets.AccessNonOptimized, 2},
				} {
					wait := startFio(t, jobs)
					progress(t, devs)
					access(x[0], x[1])
					wait()
					waitFor(t, fmt.Sprintf("requests go by group %d", x[2]), 30*time.Second, func() error { return g.usedGroup(t, policy, x[2]) })
				}
				for lun, d := range devices(t, g.name) {
					if d.Stats.Errors != 0 {
						t.Errorf("unit %d: %d errors", lun, d.Stats.Errors)
					}
				}
				g.logout(t)
			})
		}
	}
}

// usedGroup tells whether the sessions know that the units are used through a target port group: with failover all are there, otherwise some.
func (g *target) usedGroup(t testing.TB, policy string, group int) error {
	t.Helper()
	there := 0
	for _, c := range g.session(t).Connections {
		for lun, text := range c.Access {
			in := strings.Contains(text, fmt.Sprintf("(target port group %d)", group))
			active := strings.HasPrefix(text, "active/")
			switch {
			case in && active:
				there++
			case in || active || policy == api.PathFailover:
				return fmt.Errorf("unit %d: %s", lun, text)
			}
		}
	}
	if want := 2 * len(g.units); there != want {
		return fmt.Errorf("%d of %d ways are in group %d", there, want, group)
	}
	return nil
}
