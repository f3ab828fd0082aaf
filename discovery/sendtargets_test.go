package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/rdma"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func discover(portal string, transport ipc.Transport) ([]Record, error) {
	return SendTargets(context.Background(), Request{
		Portal: portal, Transport: transport, InitiatorName: "iqn.2026-11.org.iserd:test", Timeout: 2 * time.Second,
	})
}

func TestSendTargets(t *testing.T) {
	target, err := testtarget.Start(testtarget.Config{
		TextSize: 64, // the answer comes in many pieces
		Portals:  []string{"10.1.2.3:3260,1", "[fd00::5]:3261,2"},
		More: []string{
			"TargetName=iqn.2003-01.org.example:second", "TargetAddress=storage.example.org:860,7",
			"TargetName=iqn.2003-01.org.example:no-address",
			"TargetName=../../etc/passwd", "TargetAddress=10.0.0.9:3260,1",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	got, err := discover(target.Addr(), ipc.TransportTCP)
	if err != nil {
		t.Fatal(err)
	}
	host, port, _ := net.SplitHostPort(target.Addr())
	var own uint16
	fmt.Sscan(port, &own)
	want := []Record{
		{testtarget.DefaultName, "10.1.2.3", 3260, 1, ipc.TransportTCP},
		{testtarget.DefaultName, "fd00::5", 3261, 2, ipc.TransportTCP},
		{"iqn.2003-01.org.example:second", "storage.example.org", 860, 7, ipc.TransportTCP},
		{"iqn.2003-01.org.example:no-address", host, own, 0, ipc.TransportTCP},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if n := target.Sessions(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
	if v := target.Violations(); len(v) != 0 {
		t.Errorf("the target complains: %q", v)
	}
}

func TestSendTargetsFails(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if _, err := discover(closed.Addr().String(), ipc.TransportTCP); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := discover(silent.Addr().String(), ipc.TransportTCP); !errors.Is(err, iscsi.ErrTimeout) {
		t.Errorf("no answer: %v", err)
	}
	if _, err := discover("127.0.0.1:3260", ipc.TransportISER); !errors.Is(err, rdma.ErrNoDevice) && !errors.Is(err, rdma.ErrNotSupported) {
		t.Errorf("no RDMA device: %v", err)
	}
}

// A target that never comes to an end with its text is given up.
func TestEndlessAnswer(t *testing.T) {
	target, err := testtarget.Start(testtarget.Config{Hooks: testtarget.Hooks{Sending: func(_ *testtarget.Conn, p *testtarget.PDU) bool {
		if p.Opcode() == 0x24 { // Text Response
			p.BHS[1] = 0x40 // not final, to be continued
			p.SetU32(20, 1)
			p.Data = make([]byte, 8000)
		}
		return true
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	if records, err := discover(target.Addr(), ipc.TransportTCP); err == nil {
		t.Errorf("records %v from an answer without an end", records)
	}
}

// A connection that the target drops is tried again, a few times.
func TestDroppedConnection(t *testing.T) {
	target, err := testtarget.Start(testtarget.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	drops := 2
	target.SetHooks(testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
		if p.Opcode() == 0x04 && drops > 0 { // Text Request
			drops--
			c.Close()
			return false
		}
		return true
	}})
	if records, err := discover(target.Addr(), ipc.TransportTCP); err != nil || len(records) != 1 {
		t.Errorf("records %v, %v", records, err)
	}
	drops = maxTries
	if records, err := discover(target.Addr(), ipc.TransportTCP); err == nil {
		t.Errorf("records %v from a target that always drops the connection", records)
	}
}
