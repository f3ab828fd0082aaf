package testbed

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"iserd.org/iserd/internal/testbed/targets"
)

// TestTGTDOnHost starts the tgtd of the cache on this host and looks at its portal.
func TestTGTDOnHost(t *testing.T) {
	programs := TGTD(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	portal := netip.MustParseAddrPort(l.Addr().String())
	l.Close()
	d, err := targets.StartTGTD(t.Context(), targets.TGTDConfig{
		Programs: programs, Name: "iqn.2003-01.org.example:host", Portal: portal, Units: []targets.Unit{{Kind: targets.Ramdisk, Size: 8 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := net.Dial("tcp", portal.String())
	if err != nil {
		t.Fatal(err, d.Log())
	}
	c.Close()
	if n, err := d.Sessions(); n != 0 || err != nil {
		t.Errorf("Sessions() = %d, %v", n, err)
	}
}

func TestSimulated(t *testing.T) {
	const out = "Inst libsgutils2 (1.46-3 Debian:12 [amd64])\nInst tgt (1:1.0.85 Debian:12 [amd64])\nConf libsgutils2 (1.46-3)\n"
	if got := simulated(out); !slices.Equal(got, []string{"libsgutils2", "tgt"}) {
		t.Errorf("got %q", got)
	}
}
