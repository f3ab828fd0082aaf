package scenario

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testbed/targets"
)

// kind is a target implementation over a transport.
type kind struct {
	name      string
	transport string
	tgtd      bool
}

// kinds is the matrix that every scenario of data runs over.
var kinds = []kind{
	{name: "LIO-iSER", transport: "iser"},
	{name: "LIO-TCP", transport: "tcp"},
	{name: "tgtd-iSER", transport: "iser", tgtd: true},
	{name: "tgtd-TCP", transport: "tcp", tgtd: true},
}

// target is a real target with its units.
type target struct {
	name      string
	portal    string // as given to iserctl
	transport string
	kind      kind
	units     []targets.Unit
	luns      []uint16
	sessions  func() (int, error)
	lio       *targets.LIO
	tgtd      *targets.TGTD
	chap      *targets.CHAP
}

// guestOnly skips outside the guest, where there is neither ublk nor RDMA nor a target to play with.
func guestOnly(t testing.TB) {
	t.Helper()
	_, err := os.Stat("/dev/ublk-control")
	if err == nil && os.Getuid() != 0 {
		err = fmt.Errorf("needs root")
	}
	require.Need(t, "guest", err)
}

// names makes every target's name its own.
var serial int

func newName(t testing.TB) string {
	serial++
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(t.Name()))
	return fmt.Sprintf("iqn.2003-01.org.example:%s-%d", clean, serial)
}

// twoUnits are a ramdisk and a file of different sizes.
func twoUnits(t testing.TB, ramdisk, file int64) []targets.Unit {
	return []targets.Unit{
		{Kind: targets.Ramdisk, Size: ramdisk},
		{Kind: targets.FileIO, Size: file, Path: filepath.Join(t.TempDir(), "unit")},
	}
}

// newTarget sets a target up for the length of the test. tgtd has no ramdisk worth the name, so its units are files.
func newTarget(t testing.TB, k kind, units []targets.Unit) *target {
	t.Helper()
	guestOnly(t)
	g := &target{name: newName(t), transport: k.transport, kind: k, units: units}
	if k.tgtd {
		g.portal = "10.0.0.1:3260"
		if k.transport == "tcp" {
			g.portal = "10.0.0.1:3270"
		}
		for i := range units {
			if units[i].Kind == targets.Ramdisk {
				units[i].Kind, units[i].Path = targets.FileIO, filepath.Join(t.TempDir(), "ramdisk")
			}
		}
		g.startTGTD(t)
		t.Cleanup(func() {
			if err := g.tgtd.Close(); err != nil {
				t.Error(err)
			}
		})
		g.sessions = func() (int, error) { return g.tgtd.Sessions() }
		for i := range units {
			g.luns = append(g.luns, uint16(i+1))
		}
		return g
	}
	g.portal = "10.0.0.1:3261"
	return g.lioAt(t, g.portal, k.transport == "iser")
}

// startTGTD starts the tgtd that serves g, the first time or after it was killed.
func (g *target) startTGTD(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	d, err := targets.StartTGTD(ctx, targets.TGTDConfig{
		Name: g.name, Portal: targets.ParsePortal(g.portal, false).Addr, ISER: g.transport == "iser", Units: g.units,
		Initiators: []string{initiatorName(t)},
	})
	if err != nil {
		t.Fatal(err)
	}
	g.tgtd = d
}

// lioAt sets g up as a LIO target at a portal.
func (g *target) lioAt(t testing.TB, portal string, iser bool) *target {
	t.Helper()
	lio, err := targets.NewLIO(targets.LIOConfig{Name: g.name, Portals: []targets.Portal{targets.ParsePortal(portal, iser)}, Units: g.units, CHAP: g.chap})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lio.Close(); err != nil {
			t.Error(err)
		}
	})
	g.lio, g.sessions, g.portal = lio, lio.Sessions, portal
	for i := range g.units {
		g.luns = append(g.luns, uint16(i))
	}
	return g
}

// login discovers the target and logs in, as a user does, with settings of the form name=value. The test ends with a logout, if it has not
// logged out itself.
func (g *target) login(t testing.TB, settings ...string) {
	t.Helper()
	control.need(t)
	iserctl(t, "discover", g.portal, "--transport", g.transport, "--save")
	if len(settings) > 0 {
		iserctl(t, append([]string{"node", "set", g.name}, settings...)...)
	}
	iserctl(t, "login", g.name)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", tail(control.log.Name(), 40))
		}
		if len(devices(t, g.name)) > 0 {
			iserctl(t, "logout", g.name)
		}
	})
	if n := len(devices(t, g.name)); n != len(g.luns) {
		t.Fatalf("%d devices for %d units\n%s", n, len(g.luns), iserctl(t, "session", "list", "--json"))
	}
}

// logout logs out and sees to it that nothing is left at the target.
func (g *target) logout(t testing.TB) {
	t.Helper()
	iserctl(t, "logout", g.name)
	if d := devices(t, g.name); len(d) != 0 {
		t.Fatalf("devices after logout: %v", d)
	}
	waitFor(t, "no session at the target", 10*time.Second, func() error {
		n, err := g.sessions()
		if err == nil && n != 0 {
			err = fmt.Errorf("%d sessions", n)
		}
		return err
	})
}

// initiatorName is the daemon's name.
func initiatorName(t testing.TB) string {
	t.Helper()
	control.need(t)
	return status(t).InitiatorName
}

// eachTarget runs f against every kind of target.
func eachTarget(t *testing.T, f func(t *testing.T, k kind)) {
	guestOnly(t)
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) { f(t, k) })
	}
}
