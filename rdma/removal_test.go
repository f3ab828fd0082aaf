//go:build cgo

package rdma

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
)

// run executes a command of the host and skips the test when it fails.
func run(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		require.Need(t, "rdma", errors.Join(err, errors.New(string(out))))
	}
}

// ownDevice makes a veth pair with an address and a soft RoCE device for this test alone.
func ownDevice(t *testing.T) netip.Addr {
	t.Helper()
	if os.Getuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	listenOn(t, addr4).Close()
	run(t, "ip", "link", "add", "rdmat0", "mtu", "4200", "type", "veth", "peer", "name", "rdmat1")
	t.Cleanup(func() { exec.Command("ip", "link", "del", "rdmat0").Run() })
	run(t, "ip", "addr", "add", "10.9.9.1/24", "dev", "rdmat0")
	run(t, "ip", "link", "set", "rdmat0", "up")
	run(t, "ip", "link", "set", "rdmat1", "up")
	addDevice(t)
	ip := netip.MustParseAddr("10.9.9.1")
	t.Cleanup(func() {
		// librdmacm keeps its context of a device that is not in use, and rxe's removal waits for it: use it, so that we hear of it.
		c, err := Resolve(context.Background(), ResolveConfig{Target: netip.AddrPortFrom(ip, 9)})
		if err != nil {
			t.Error(err)
			return
		}
		del := exec.Command("rdma", "link", "del", "rxetest")
		if err := del.Start(); err != nil {
			t.Error(err)
		}
		for !c.Device().removed.Load() {
			time.Sleep(time.Millisecond)
		}
		c.Close()
		del.Wait()
	})
	return ip
}

func addDevice(t *testing.T) {
	t.Helper()
	run(t, "rdma", "link", "add", "rxetest", "type", "rxe", "netdev", "rdmat0")
}

// TestDeviceRemoval takes the adapter away under a connection: both ends are told, everything closes, the removal completes, and the
// adapter can be used again when it comes back.
func TestDeviceRemoval(t *testing.T) {
	ip := ownDevice(t)
	defer noLeak(t)
	for round := range 2 {
		l := listenOn(t, ip)
		a, p := connect(t, l, options{recvs: func(e *end) { e.recv(1, 0, 64) }})
		events := make(chan Event, 16)
		a.conn.OnEvent(func(e Event) { events <- e })
		p.conn.OnEvent(func(e Event) { events <- e })
		removed := make(chan error, 1)
		go func() { removed <- exec.Command("rdma", "link", "del", "rxetest").Run() }()
		for told := 0; told < 2; {
			select {
			case e := <-events:
				t.Logf("round %d: %+v", round, e)
				if e.Kind == EventDeviceRemoved {
					told++
				}
			case <-time.After(10 * time.Second):
				t.Fatal("no removal event")
			}
		}
		a.close()
		p.close()
		l.Close()
		select {
		case err := <-removed:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the removal waits for something of ours")
		}
		if _, err := Listen(netip.AddrPortFrom(ip, 0)); round == 1 && err == nil {
			t.Log("listening works without an adapter")
		}
		addDevice(t)
	}
}

// TestPortEvents takes the link away and brings it back.
func TestPortEvents(t *testing.T) {
	ip := ownDevice(t)
	defer noLeak(t)
	l := listenOn(t, ip)
	defer l.Close()
	a, p := connect(t, l, options{})
	defer a.close()
	defer p.close()
	events := make(chan Event, 16)
	a.conn.OnEvent(func(e Event) { events <- e })
	await := func(k EventKind) {
		t.Helper()
		for {
			select {
			case e := <-events:
				t.Logf("%+v", e)
				if e.Kind == k {
					return
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("no %v", k)
			}
		}
	}
	run(t, "ip", "link", "set", "rdmat0", "down")
	await(EventPortDown)
	run(t, "ip", "link", "set", "rdmat0", "up")
	await(EventPortUp)
}
