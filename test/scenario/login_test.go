package scenario

import (
	"context"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// The secrets of the scenarios of this file. Nothing that the programs write may hold one.
const (
	ourSecret      = "hush-initiator-1"
	targetSecret   = "hush-target-22"
	discoverSecret = "hush-discovery3"
)

// secret stores a secret for a target's records, or a portal's discoveries, from a file.
func secret(t testing.TB, value string, args ...string) {
	t.Helper()
	f := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(f, []byte(value+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	iserctl(t, append(args, "--file", f)...)
}

// refused runs a command that has to end with an exit status and one line.
func refused(t testing.TB, code int, says string, args ...string) {
	t.Helper()
	r := run(t, "iserctl", args...)
	if r.code != code || !strings.Contains(r.stderr, says) {
		t.Errorf("iserctl %s: exit status %d, want %d and %q: %s", strings.Join(args, " "), r.code, code, says, r.stderr)
	}
	oneLine(t, r)
}

// once logs in, gives the session to f, and logs out.
func (g *target) once(t testing.TB, f func(s api.Session), args ...string) {
	t.Helper()
	iserctl(t, append([]string{"login", g.name}, args...)...)
	list := query[api.SessionsReply](t, "session", "show", g.name).Sessions
	if len(list) != 1 || len(list[0].Connections) == 0 {
		t.Fatalf("sessions %+v", list)
	}
	f(list[0])
	g.logout(t)
}

// proven wants every connection to have been made with a method.
func proven(t testing.TB, s api.Session, method, transport string) {
	t.Helper()
	for _, c := range s.Connections {
		if c.AuthMethod != method || s.Transport != transport {
			t.Errorf("connection %d by %q over %s, want %q over %s", c.Reactor, c.AuthMethod, s.Transport, method, transport)
		}
	}
}

func TestLoginCHAP(t *testing.T) {
	guestOnly(t)
	control.need(t)
	one := &targets.CHAP{User: "host", Secret: ourSecret}
	both := &targets.CHAP{User: "host", Secret: ourSecret, TargetUser: "storage", TargetSecret: targetSecret}

	t.Run("LIO", func(t *testing.T) {
		g := &target{name: newName(t), transport: "tcp", units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}, chap: both}
		g.lioAt(t, "10.0.0.1:3261", true) // and TCP on the same port
		iserctl(t, "discover", g.portal, "--save")
		refused(t, 5, "CHAP", "login", g.name, "--transport", "tcp") // LIO closes without a status
		iserctl(t, "node", "set", g.name, "chap_user=host")
		secret(t, ourSecret, "node", "secret", g.name)
		for _, a := range [][2]string{{"MD5", "MD5"}, {"SHA1", "SHA1"}, {"SHA256", "SHA-256"}, {"SHA3-256", "SHA3-256"}} {
			iserctl(t, "node", "set", g.name, "chap_algorithms="+a[0])
			g.once(t, func(s api.Session) { proven(t, s, "CHAP "+a[1], "tcp") }, "--transport", "tcp")
		}
		iserctl(t, "node", "unset", g.name, "chap_algorithms")
		secret(t, targetSecret, "node", "secret", g.name, "--mutual")
		iserctl(t, "node", "set", g.name, "chap_target_user=storage")
		for _, transport := range []string{"tcp", "iser"} {
			g.once(t, func(s api.Session) { proven(t, s, "CHAP SHA3-256 mutual", transport) }, "--transport", transport)
		}
		secret(t, "hush-something-else", "node", "secret", g.name, "--mutual")
		refused(t, 24, "does not know its secret", "login", g.name, "--transport", "tcp")
		secret(t, "hush-another-one", "node", "secret", g.name)
		refused(t, 24, "iserctl node secret", "login", g.name, "--transport", "tcp")
		// Over iSER LIO disconnects behind its refusal, and the end of the connection was seen to come first.
		if r := run(t, "iserctl", "login", g.name, "--transport", "iser"); r.code != 24 && !(r.code == 5 && strings.Contains(r.stderr, "connection lost in SecurityNegotiation")) {
			t.Errorf("wrong secret over iSER: exit status %d: %s", r.code, r.stderr)
		}
		secret(t, ourSecret, "node", "secret", g.name)
		if err := g.lio.SetCHAP(one); err != nil { // it cannot prove itself any more
			t.Fatal(err)
		}
		refused(t, 24, "did not prove itself", "login", g.name, "--transport", "tcp")
		waitFor(t, "no session at the target", 10*time.Second, func() error {
			n, err := g.sessions()
			if err == nil && n != 0 {
				err = fmt.Errorf("%d sessions", n)
			}
			return err
		})
		noSecrets(t)
	})
	t.Run("tgtd", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		unit := func(name string) []targets.Unit {
			return []targets.Unit{{Kind: targets.FileIO, Size: 16 * mib, Path: filepath.Join(t.TempDir(), name)}}
		}
		portal := netip.MustParseAddrPort("10.0.0.1:3270")
		d, err := targets.StartTGTD(ctx, targets.TGTDConfig{Name: newName(t), Portal: portal, Units: unit("open")})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		g := &target{name: newName(t), portal: portal.String(), sessions: func() (int, error) { return 0, nil }}
		if err := d.Add(ctx, targets.TGTTarget{Name: g.name, Units: unit("mutual"), CHAP: both}); err != nil {
			t.Fatal(err)
		}
		iserctl(t, "discover", g.portal, "--transport", "tcp", "--save")
		iserctl(t, "node", "set", g.name, "chap_user=host", "transport=tcp")
		refused(t, 24, "", "login", g.name)
		secret(t, ourSecret, "node", "secret", g.name)
		g.once(t, func(s api.Session) { proven(t, s, "CHAP MD5", "tcp") })
		secret(t, targetSecret, "node", "secret", g.name, "--mutual")
		g.once(t, func(s api.Session) { proven(t, s, "CHAP MD5 mutual", "tcp") })
		iserctl(t, "node", "set", g.name, "chap_policy=strong")
		refused(t, 19, "02/00", "login", g.name) // it knows MD5 only, and what it says to other algorithms is "initiator error"
		iserctl(t, "node", "unset", g.name, "chap_policy")
		secret(t, "hush-something-else", "node", "secret", g.name, "--mutual")
		refused(t, 24, "does not know its secret", "login", g.name)
		secret(t, "hush-another-one", "node", "secret", g.name)
		refused(t, 24, "iserctl node secret", "login", g.name)
		noSecrets(t)
	})
	t.Run("discovery", func(t *testing.T) {
		g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
		if err := targets.SetDiscoveryCHAP(&targets.CHAP{User: "finder", Secret: discoverSecret, TargetUser: "storage", TargetSecret: targetSecret}); err != nil {
			t.Fatal(err)
		}
		defer targets.SetDiscoveryCHAP(nil)
		if r := run(t, "iserctl", "discover", g.portal, "--transport", "tcp"); r.code == 0 {
			t.Errorf("discovered without a secret: %s", r.stdout)
		}
		iserctl(t, "discovery", "set", g.portal, "chap_user=finder")
		secret(t, discoverSecret, "discovery", "secret", g.portal)
		for _, transport := range []string{"tcp", "iser"} {
			if out := iserctl(t, "discover", g.portal, "--transport", transport); !strings.Contains(out, g.name) {
				t.Errorf("over %s: %s", transport, out)
			}
		}
		secret(t, targetSecret, "discovery", "secret", g.portal, "--mutual")
		iserctl(t, "discover", g.portal, "--transport", "tcp", "--set", "chap_target_user=storage")
		secret(t, "hush-something-else", "discovery", "secret", g.portal, "--mutual")
		refused(t, 24, "does not know its secret", "discover", g.portal, "--transport", "tcp")
		secret(t, "hush-another-one", "discovery", "secret", g.portal)
		refused(t, 24, "", "discover", g.portal, "--transport", "tcp")
		iserctl(t, "discovery", "delete", g.portal)
		noSecrets(t)
	})
}

// noSecrets looks through everything that the daemon has written: no secret but in its own files, and these for root alone.
func noSecrets(t testing.TB) {
	t.Helper()
	stored := 0
	look := func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil // of this moment
		}
		b, _ := os.ReadFile(path)
		if strings.HasPrefix(path, "/var/lib/iserd/secrets/") {
			stored++
			if fi, err := e.Info(); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v", path, fi.Mode())
			}
		} else if strings.Contains(string(b), "hush-") {
			t.Errorf("%s holds a secret", path)
		}
		return nil
	}
	for _, dir := range []string{"/run/iserd", "/var/lib/iserd", control.log.Name()} {
		_ = filepath.WalkDir(dir, look)
	}
	if stored == 0 {
		t.Error("no file of secrets was found")
	}
	if fi, err := os.Stat("/var/lib/iserd/secrets"); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("folder of the secrets: %v, %v", fi.Mode(), err)
	}
	for _, args := range [][]string{{"node", "list", "--json"}, {"session", "list", "--json"}, {"status", "--json"}, {"discovery", "show", "--json"}} {
		if out := iserctl(t, args...); strings.Contains(out, "hush-") {
			t.Errorf("iserctl %s shows a secret", strings.Join(args, " "))
		}
	}
}

// Digests, text keys, and the way that connections take are as they were set.
func TestLoginSettings(t *testing.T) {
	guestOnly(t)
	control.need(t)
	must(t, "ip", "addr", "add", "10.0.0.3/24", "dev", "veth0")
	defer run(t, "ip", "addr", "del", "10.0.0.3/24", "dev", "veth0")

	for _, c := range []struct {
		k    kind
		want string // tgtd has no digests unless it is told to
	}{{kinds[1], "CRC32C"}, {kinds[3], "None"}} {
		t.Run("digests "+c.k.name, func(t *testing.T) {
			g := newTarget(t, c.k, []targets.Unit{{Kind: targets.FileIO, Size: 16 * mib, Path: filepath.Join(t.TempDir(), "unit")}})
			iserctl(t, "discover", g.portal, "--transport", "tcp", "--save")
			iserctl(t, "node", "set", g.name, "transport=tcp", "header_digest=CRC32C", "data_digest=CRC32C")
			if c.want == "None" {
				refused(t, 19, "header_digest=CRC32C,None", "login", g.name)
				iserctl(t, "node", "set", g.name, "header_digest=CRC32C,None", "data_digest=CRC32C,None")
			}
			g.once(t, func(s api.Session) {
				for _, x := range s.Connections {
					if x.Negotiated["HeaderDigest"] != c.want || x.Negotiated["DataDigest"] != c.want {
						t.Errorf("negotiated %v", x.Negotiated)
					}
				}
				for _, d := range devices(t, g.name) {
					fio(t, fioVerify("digests", d.Path, d.Size))
				}
			})
			iserctl(t, "discover", g.portal, "--transport", "tcp", "--save")
			n := query[api.NodesReply](t, "node", "list", g.name).Nodes
			if len(n) != 1 || !strings.HasPrefix(n[0].Settings.DataDigest, "CRC32C") || n[0].Transport != "tcp" {
				t.Errorf("after another discovery %+v", n)
			}
		})
	}
	t.Run("keys", func(t *testing.T) {
		g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
		iserctl(t, "discover", g.portal, "--transport", "tcp", "--save")
		iserctl(t, "node", "set", g.name, "transport=tcp", "max_burst_length=65536", "first_burst_length=16384", "immediate_data=No", "initial_r2t=No",
			"max_recv_data_segment_length=8192", "default_time2wait=4")
		g.once(t, func(s api.Session) {
			for key, want := range map[string]string{"MaxBurstLength": "65536", "FirstBurstLength": "16384", "ImmediateData": "No", "DefaultTime2Wait": "4"} {
				if got := s.Connections[0].Negotiated[key]; got != want {
					t.Errorf("%s=%s, want %s", key, got, want)
				}
			}
			for _, d := range devices(t, g.name) {
				fio(t, fioVerify("keys", d.Path, d.Size))
			}
		})
	})
	t.Run("way", func(t *testing.T) {
		g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
		iserctl(t, "discover", g.portal, "--save", "--set", "source_address=10.0.0.3")
		if n := query[api.NodesReply](t, "node", "list", g.name).Nodes; len(n) != 1 || n[0].Settings.SourceAddress != "10.0.0.3" {
			t.Errorf("a record of a bound discovery: %+v", n)
		}
		for _, transport := range []string{"tcp", "iser"} {
			g.once(t, func(s api.Session) {
				for _, c := range s.Connections {
					if !strings.HasPrefix(c.LocalAddress, "10.0.0.3:") || s.Transport != transport {
						t.Errorf("from %s over %s", c.LocalAddress, s.Transport)
					}
				}
			}, "--transport", transport)
		}
		iserctl(t, "node", "unset", g.name, "source_address")
		iserctl(t, "node", "set", g.name, "rdma_device=rxe0", "transport=iser")
		g.once(t, func(s api.Session) {
			if s.Connections[0].RDMADevice != "rxe0" {
				t.Errorf("by %s", s.Connections[0].RDMADevice)
			}
		})
		iserctl(t, "node", "set", g.name, "rdma_device=mlx5_9")
		refused(t, 12, "mlx5_9", "login", g.name)
		iserctl(t, "node", "unset", g.name, "rdma_device", "transport")
		iserctl(t, "node", "set", g.name, "network_interface=nonsense0")
		for _, transport := range []string{"tcp", "iser"} {
			r := run(t, "iserctl", "login", g.name, "--transport", transport)
			if r.code == 0 || !strings.Contains(r.stderr, "nonsense0") {
				t.Errorf("through an interface that is not there, over %s: %d, %s", transport, r.code, r.stderr)
			}
		}
	})
	t.Run("interface", func(t *testing.T) {
		// The target is on this host: only at the address of the loopback interface does it answer through the interface that was asked.
		g := &target{name: newName(t), transport: "tcp", units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}}
		g.lioAt(t, "127.0.0.1:3262", false)
		iserctl(t, "discover", g.portal, "--transport", "tcp", "--save", "--set", "network_interface=lo")
		g.once(t, func(s api.Session) {
			if n := query[api.NodesReply](t, "node", "list", g.name).Nodes; len(n) != 1 || n[0].Settings.NetworkInterface != "lo" || len(n[0].Pending) != 0 {
				t.Errorf("%+v", n)
			}
		}, "--transport", "tcp")
	})
}

// A target that sends its initiators elsewhere for the time being: the session is there, and a lost one asks at the first portal again.
func TestLoginRedirected(t *testing.T) {
	guestOnly(t)
	control.need(t)
	// tgtd does not redirect an initiator whose own address is the one it would be sent to.
	must(t, "ip", "addr", "add", "10.0.0.3/24", "dev", "veth0")
	defer run(t, "ip", "addr", "del", "10.0.0.3/24", "dev", "veth0")
	g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	home := g.portal
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	first := netip.MustParseAddrPort("10.0.0.1:3270")
	d, err := targets.StartTGTD(ctx, targets.TGTDConfig{
		Name: newName(t), Portal: first, Units: []targets.Unit{{Kind: targets.FileIO, Size: 16 * mib, Path: filepath.Join(t.TempDir(), "unit")}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Add(ctx, targets.TGTTarget{Name: g.name, Redirect: netip.MustParseAddrPort(home)}); err != nil {
		t.Fatal(err)
	}
	iserctl(t, "node", "add", g.name, "--portal", first.String())
	iserctl(t, "node", "set", g.name, "transport=tcp", "source_address=10.0.0.3")
	there := func(s api.Session) {
		t.Helper()
		for _, c := range s.Connections {
			if c.Portal != home || s.Port != first.Port() || s.State != api.SessionUp {
				t.Errorf("connection %d at %q, session at port %d, %s", c.Reactor, c.Portal, s.Port, s.State)
			}
		}
	}
	g.once(t, func(s api.Session) {
		there(s)
		before, err := g.lio.Logins()
		if err != nil {
			t.Fatal(err)
		}
		if err := g.lio.SetEnabled(false); err != nil { // ends the sessions
			t.Fatal(err)
		}
		if err := g.lio.SetEnabled(true); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the session is back", 30*time.Second, func() error {
			now, err := g.lio.Logins()
			if err != nil {
				return fatalError{err}
			}
			s = query[api.SessionsReply](t, "session", "show", g.name).Sessions[0]
			if s.State != api.SessionUp || now < before+len(s.Connections) {
				return fmt.Errorf("%s, %d logins", s.State, now-before)
			}
			return nil
		})
		there(s)
	})
	if n := query[api.NodesReply](t, "node", "list", g.name).Nodes; len(n) != 1 || n[0].MovedTo != "" {
		t.Errorf("a temporary move is stored: %+v", n)
	}
}
