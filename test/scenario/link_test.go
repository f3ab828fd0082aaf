package scenario

import (
	"encoding/json"
	"os"
	"strings"
	"sync"
	"testing"
)

// Addresses at the ends of the link.
const (
	nearAddress = "10.0.2.1" // the daemon's
	farAddress  = "10.0.2.2" // the target's
)

// link is a network of its own between daemon and target, to be cut and disturbed. Two addresses of one host talk over lo, and soft RoCE with
// itself, and neither notices what is done to an interface. So here rules of the routing send what goes to the other address out of the one
// interface and in by the other, through a switch:
//
//	daemon  10.0.2.1  near0, rxe2 --- near1  switch0  far1 --- far0, rxe3  10.0.2.2  target
//
// It stays for the rest of the guest's life: soft RoCE cannot be taken away from a process that has used it.
var link struct {
	once sync.Once
	ok   bool
}

// needLink makes the link, and sees to it that it is whole again at the end of the test.
func needLink(t *testing.T) {
	t.Helper()
	guestOnly(t)
	link.once.Do(func() {
		must(t, "ip", "link", "add", "switch0", "type", "bridge")
		must(t, "ip", "link", "set", "switch0", "up")
		ends := []struct{ end, port, rdma, from, to, table, pref, pref2 string }{
			{"near0", "near1", "rxe2", nearAddress, farAddress, "100", "90", "100"},
			{"far0", "far1", "rxe3", farAddress, nearAddress, "101", "91", "101"},
		}
		// The table of local addresses comes after the link's. The RDMA connection manager looks up by interface, everybody else by address.
		must(t, "ip", "rule", "add", "pref", "200", "lookup", "local")
		must(t, "ip", "rule", "del", "pref", "0")
		for _, e := range ends {
			must(t, "ip", "link", "add", e.end, "mtu", "4200", "type", "veth", "peer", "name", e.port, "mtu", "4200")
			must(t, "ip", "link", "set", e.port, "master", "switch0", "up")
			must(t, "ip", "addr", "add", e.from+"/32", "dev", e.end)
			for _, dev := range []string{"all", e.end} {
				for name, value := range map[string]string{"accept_local": "1", "rp_filter": "0"} {
					if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+dev+"/"+name, []byte(value), 0); err != nil {
						t.Fatal(err)
					}
				}
			}
			must(t, "ip", "link", "set", e.end, "up")
			must(t, "ip", "route", "add", e.to+"/32", "dev", e.end, "src", e.from, "table", e.table)
			must(t, "ip", "rule", "add", "pref", e.pref, "oif", e.end, "to", e.to, "lookup", e.table)
			must(t, "ip", "rule", "add", "pref", e.pref2, "iif", "lo", "to", e.to, "lookup", e.table)
			must(t, "rdma", "link", "add", e.rdma, "type", "rxe", "netdev", e.end)
		}
		for i, e := range ends {
			peer := ends[1-i]
			hardware, err := os.ReadFile("/sys/class/net/" + peer.end + "/address")
			if err != nil {
				t.Fatal(err)
			}
			must(t, "ip", "neigh", "replace", e.to, "lladdr", strings.TrimSpace(string(hardware)), "dev", e.end, "nud", "permanent")
		}
		link.ok = true
	})
	if !link.ok {
		t.Fatal("the link could not be made, see the test that tried")
	}
	t.Cleanup(func() {
		plug(t)
		undisturb(t)
	})
}

// unplug pulls the target's cable out of the switch: the target sees the carrier go, the daemon sees nothing but silence. The interface itself
// stays up. When that is taken down its routes go too, and soft RoCE, which then cannot send to anybody, breaks its queue pair for connection
// management for good (seen with Linux 7.3.4).
func unplug(t testing.TB) {
	t.Helper()
	must(t, "ip", "link", "set", "far1", "down")
}

// plug puts the cable back.
func plug(t testing.TB) {
	t.Helper()
	must(t, "ip", "link", "set", "far1", "up")
}

// disturb makes the link lose, delay or mix up what either end sends, as tc-netem(8) has it. Its queue is long: what does not fit is refused to the sender,
// and soft RoCE ends the queue pair then, that of connection management for good.
func disturb(t testing.TB, netem ...string) {
	t.Helper()
	for _, dev := range []string{"near0", "far0"} {
		must(t, "tc", append([]string{"qdisc", "replace", "dev", dev, "root", "netem", "limit", "100000"}, netem...)...)
	}
}

// dropped counts the packets that were lost since disturb.
func dropped(t testing.TB) (n int) {
	t.Helper()
	for _, dev := range []string{"near0", "far0"} {
		var qdiscs []struct{ Drops int }
		if err := json.Unmarshal([]byte(must(t, "tc", "-s", "-j", "qdisc", "show", "dev", dev)), &qdiscs); err != nil {
			t.Fatal(err)
		}
		for _, q := range qdiscs {
			n += q.Drops
		}
	}
	return n
}

// undisturb ends what disturb has begun, if anything.
func undisturb(t testing.TB) {
	t.Helper()
	for _, dev := range []string{"near0", "far0"} {
		run(t, "tc", "qdisc", "del", "dev", dev, "root") // fails when there is nothing
	}
}
