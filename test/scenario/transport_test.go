package scenario

import (
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// With the transport left open, RDMA is taken where the portal answers over it and TCP where it does not, and the reason is shown.
func TestTransportAuto(t *testing.T) {
	for _, c := range []struct {
		k    kind
		says string
	}{
		{kinds[0], "RDMA"},
		{kinds[1], "fell back to TCP"},
	} {
		t.Run(c.k.name, func(t *testing.T) {
			g := newTarget(t, c.k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
			control.need(t)
			found := query[api.TargetsReply](t, "discover", g.portal, "--save")
			var over string
			for _, f := range found.Targets {
				if f.Target == g.name {
					over = strings.Join(f.Transports, "+")
				}
			}
			// A Linux target lists a portal over the transport that was asked; this one serves TCP as well as iSER.
			if !strings.Contains(over, c.k.transport) {
				t.Errorf("found over %q: %+v", over, found)
			}
			reply := query[api.LoginReply](t, "login", g.name)
			s := reply.Session
			if s.Transport != c.k.transport || !strings.Contains(s.TransportReason, c.says) {
				t.Errorf("transport %s because %q; want %s because of %q", s.Transport, s.TransportReason, c.k.transport, c.says)
			}
			g.logout(t)
		})
	}
}

// Portals have IPv4 and IPv6 addresses.
func TestIPv6(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			g := &target{name: newName(t), transport: k.transport, kind: k, units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}}
			g.lioAt(t, "[fd00::1]:3262", k.transport == "iser")
			g.login(t)
			d := devices(t, g.name)[0]
			if d.Address != "fd00::1" || d.Port != 3262 {
				t.Errorf("portal %s %d", d.Address, d.Port)
			}
			fio(t, fioVerify("ipv6", d.Path, d.Size))
			g.logout(t)
		})
	}
}

// The device tells what the unit is: block sizes, protection, model and serial number.
func TestUnitProperties(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			units := twoUnits(t, 16*mib, 32*mib)
			units[1].BlockSize, units[1].Serial, units[1].Product = 4096, "a1b2c3d4", "large blocks"
			g := newTarget(t, k, units)
			g.login(t)
			devs := devices(t, g.name)
			if d := devs[0]; d.LogicalBlockSize != 512 || d.ReadOnly || d.Vendor == "" || d.Product == "" || d.Serial == "" || !strings.HasPrefix(d.WWID, "naa.") {
				t.Errorf("unit 0: %+v", d)
			}
			if d := devs[1]; d.LogicalBlockSize != 4096 || d.Product != "large blocks" || !strings.Contains(d.Serial, "a1b2c3d4") {
				t.Errorf("unit 1: %+v", d)
			}
			if a, b := devs[0].WWID, devs[1].WWID; a == b {
				t.Errorf("both units have the identity %s", a)
			}
			g.logout(t)
		})
	}
}

// A unit that refuses writes is a read-only device.
func TestReadOnly(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			name := newName(t)
			lio, err := targets.NewLIO(targets.LIOConfig{
				Name: name, Portals: []targets.Portal{targets.ParsePortal("10.0.0.1:3261", k.transport == "iser")},
				Units: []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}, ReadOnly: true,
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { lio.Close() })
			g := &target{name: name, portal: "10.0.0.1:3261", transport: k.transport, sessions: lio.Sessions, luns: []uint16{0}}
			g.login(t)
			d := devices(t, name)[0]
			if !d.ReadOnly || strings.TrimSpace(must(t, "blockdev", "--getro", d.Path)) != "1" {
				t.Errorf("not read-only: %+v", d)
			}
			if r := run(t, "dd", "if=/dev/zero", "of="+d.Path, "bs=4096", "count=1", "oflag=direct", "status=none"); r.code == 0 {
				t.Error("a write to the device succeeds")
			}
			must(t, "dd", "if="+d.Path, "of=/dev/null", "bs=1M", "iflag=direct", "status=none")
			g.logout(t)
		})
	}
}

// A portal with many targets answers with more text than fits into the message of a command's response.
func TestManyTargets(t *testing.T) {
	guestOnly(t)
	control.need(t)
	const n = 40
	names := map[string]bool{}
	for range n {
		name := newName(t)
		names[name] = true
		lio, err := targets.NewLIO(targets.LIOConfig{
			Name: name, Portals: []targets.Portal{targets.ParsePortal("10.0.0.1:3261", true)},
			Units: []targets.Unit{{Kind: targets.Ramdisk, Size: mib}},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { lio.Close() })
	}
	found := 0
	for _, f := range query[api.TargetsReply](t, "discover", "10.0.0.1:3261", "--transport", "iser").Targets {
		if names[f.Target] {
			found++
		}
	}
	if found != n {
		t.Errorf("%d of %d targets found", found, n)
	}
}
