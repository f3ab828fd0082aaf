// Package tgtd tests the TCP transport against tgtd, an independent target, on the host and without a guest: login and discovery, transfers
// under each way to negotiate them, reinstatement, and the target's death. The programs come from the testbed's cache; nothing is installed.
package tgtd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/iscsitcp"
	"iserd.org/iserd/scsi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	initiator = "iqn.2003-01.org.example:initiator"
	target    = "iqn.2003-01.org.example:tgtd"
	unitSize  = 32 << 20
	lun       = scsi.LUN(1 << 48) // tgtd's own controller is LUN 0
)

// start runs a tgtd on a free port; file is what its unit is made of.
func start(t testing.TB) (d *targets.TGTD, portal, file string) {
	t.Helper()
	programs := testbed.TGTD(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	portal = l.Addr().String()
	l.Close()
	file = filepath.Join(t.TempDir(), "unit")
	d, err = targets.StartTGTD(t.Context(), targets.TGTDConfig{
		Programs: programs, Name: target, Portal: netip.MustParseAddrPort(portal),
		Units: []targets.Unit{{Kind: targets.FileIO, Path: file, Size: unitSize}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, portal, file
}

// update changes a parameter of the target: what tgtadm does with the socket that the daemon was started with.
func update(t testing.TB, d *targets.TGTD, name, value string) {
	t.Helper()
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", d.PID()))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), testbed.TGTD(t).Tgtadm, "--lld", "iscsi", "--mode", "target", "--op", "update", "--tid", "1", "--name", name, "--value", value)
	cmd.Env = strings.Split(strings.TrimRight(string(env), "\x00"), "\x00")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func config(isid byte) login.Config {
	keys := login.DefaultKeys(login.TCP, login.Normal)
	keys.MaxRecvDataSegmentLength = iscsitcp.MaxRecvDataSegmentLength
	return login.Config{
		InitiatorName: initiator, TargetName: target, SessionType: login.Normal, Transport: login.TCP,
		ISID: [6]byte{0x80, 0, 0, 0, 0, isid}, CmdSN: 1, Keys: &keys,
	}
}

// client is a session with tgtd on a loop.
type client struct {
	t       testing.TB
	l       *loop.Loop
	conn    *iscsitcp.Conn
	session *iscsi.Session
	result  *login.Result
	down    chan error
	ended   chan *iscsi.Task
}

func connect(t testing.TB, l *loop.Loop, portal string, c login.Config) *client {
	t.Helper()
	p, err := iscsitcp.Dial(t.Context(), portal)
	if err != nil {
		t.Fatal(err)
	}
	result, err := iscsi.Login(t.Context(), p, c)
	if err != nil {
		p.Close()
		t.Fatal(err)
	}
	k := &client{t: t, l: l, result: result, down: make(chan error, 1), ended: make(chan *iscsi.Task, 1024)}
	gone := make(chan struct{})
	l.Call(func() {
		if k.conn, err = p.Attach(l.Ring, iscsitcp.Config{}); err != nil {
			return
		}
		k.conn.NoticeKeyValues(&result.Keys)
		if k.session, err = iscsi.NewSession(k.conn, result, iscsi.Options{Down: func(err error) {
			l.Remove(k.session)
			k.down <- err
			close(gone)
		}}, time.Now()); err != nil {
			k.conn.ConnectionTerminate(err)
			return
		}
		l.Add(k.session)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Call(func() { k.session.Terminate(errors.New("test is over")) })
		<-gone
	})
	return k
}

// TaskDone implements iscsi.TaskHandler.
func (c *client) TaskDone(t *iscsi.Task) { c.ended <- t }

func (c *client) submit(tasks ...*iscsi.Task) {
	c.l.Do(func() {
		for _, t := range tasks {
			t.Handler, t.LUN = c, lun
			c.session.Submit(t)
		}
	})
}

func (c *client) wait(n int) (list []*iscsi.Task) {
	c.t.Helper()
	for range n {
		select {
		case t := <-c.ended:
			list = append(list, t)
		case <-time.After(30 * time.Second):
			c.t.Fatalf("%d of %d tasks ended", len(list), n)
		}
	}
	return list
}

// run submits tasks and expects GOOD status and every byte moved.
func (c *client) run(tasks ...*iscsi.Task) {
	c.t.Helper()
	c.submit(tasks...)
	for _, t := range c.wait(len(tasks)) {
		if t.Outcome != iscsi.Responded || t.Status != scsi.StatusGood || t.Residual != 0 {
			c.t.Fatalf("command %x with %d bytes: outcome %d, status %v, residual %d, sense %x", t.CDB, len(t.Data), t.Outcome, t.Status,
				t.Residual, t.Sense[:t.SenseLen])
		}
	}
}

func (c *client) end() error {
	c.t.Helper()
	select {
	case err := <-c.down:
		return err
	case <-time.After(30 * time.Second):
		c.t.Fatal("session does not end")
		return nil
	}
}

func (c *client) logout() {
	c.t.Helper()
	answer := make(chan error, 1)
	c.l.Do(func() { c.session.Logout(func(err error) { answer <- err }) })
	if err := errors.Join(<-answer, c.end()); err != nil {
		c.t.Error("logout:", err)
	}
}

// ready takes the unit attention that tgtd has for a new nexus.
func (c *client) ready() {
	c.t.Helper()
	for range 3 {
		k := &iscsi.Task{}
		c.submit(k)
		c.wait(1)
		if k.Outcome == iscsi.Responded && k.Status == scsi.StatusGood {
			return
		}
	}
	c.t.Fatal("unit does not get ready")
}

func transfer(op byte, lba int, data []byte) *iscsi.Task {
	t := &iscsi.Task{Direction: iscsi.Read, Data: data}
	if op == 0x8a {
		t.Direction = iscsi.Write
	}
	t.CDB[0] = op
	binary.BigEndian.PutUint64(t.CDB[2:], uint64(lba))
	binary.BigEndian.PutUint32(t.CDB[10:], uint32(len(data)/512))
	return t
}

func read(lba int, data []byte) *iscsi.Task  { return transfer(0x88, lba, data) }
func write(lba int, data []byte) *iscsi.Task { return transfer(0x8a, lba, data) }

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

// TestDiscovery asks for the targets over a discovery session.
func TestDiscovery(t *testing.T) {
	_, portal, _ := start(t)
	p, err := iscsitcp.Dial(t.Context(), portal)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	result, err := iscsi.Login(t.Context(), p, login.Config{
		InitiatorName: initiator, SessionType: login.Discovery, Transport: login.TCP, ISID: [6]byte{0x80, 1}, CmdSN: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	x := iscsi.NewExchange(p, result)
	keys, err := x.Text(t.Context(), "SendTargets", "All")
	if err != nil {
		t.Fatal(err)
	}
	list, err := pdu.ParseSendTargets(keys)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || list[0].Name != target || len(list[0].Addresses) != 1 || fmt.Sprintf("%s:%d", list[0].Addresses[0].Host, list[0].Addresses[0].Port) != portal {
		t.Errorf("targets %+v, want %s at %s", list, target, portal)
	}
	if err := x.Logout(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestTransfers writes and reads under each combination of what may be negotiated, and compares with the file behind the unit.
func TestTransfers(t *testing.T) {
	d, portal, file := start(t)
	l := loop.New(t)
	r := rand.New(rand.NewPCG(1, 2))
	for _, initialR2T := range []bool{true, false} {
		update(t, d, "InitialR2T", map[bool]string{true: "Yes", false: "No"}[initialR2T])
		for _, immediate := range []bool{true, false} {
			for _, digest := range []login.Digest{login.DigestNone, login.DigestCRC32C} {
				update(t, d, "HeaderDigest", digest.String())
				update(t, d, "DataDigest", digest.String())
				t.Run(fmt.Sprintf("InitialR2T=%v,ImmediateData=%v,%v", initialR2T, immediate, digest), func(t *testing.T) {
					cfg := config(1)
					cfg.Keys.InitialR2T, cfg.Keys.ImmediateData = initialR2T, immediate
					cfg.HeaderDigest, cfg.DataDigest = []login.Digest{digest}, []login.Digest{digest}
					c := connect(t, l, portal, cfg)
					if c.result.Keys.HeaderDigest != digest || c.result.Keys.DataDigest != digest || c.result.Keys.InitialR2T != initialR2T || c.result.Keys.ImmediateData != immediate {
						t.Errorf("negotiated %v", c.result.Negotiated)
					}
					c.ready()
					if n, err := d.Sessions(); n != 1 || err != nil {
						t.Errorf("tgtd has %d sessions, %v", n, err)
					}
					verify(t, c, file, r)
					c.logout()
				})
			}
		}
	}
}

func verify(t *testing.T, c *client, file string, r *rand.Rand) {
	sizes := []int{512, 4096, 8192, 8704, 65536, 66048, 131072, 262144, 262656, 524288, 1 << 20}
	var writes, reads []*iscsi.Task
	lba := 3
	for range 2 {
		for _, n := range sizes {
			writes = append(writes, write(lba, random(r, n)))
			reads = append(reads, read(lba, make([]byte, n)))
			lba += n/512 + 1
		}
	}
	c.run(writes...)
	c.run(&iscsi.Task{CDB: [16]byte{0x35}}) // SYNCHRONIZE CACHE
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, w := range writes {
		got := make([]byte, len(w.Data))
		if _, err := f.ReadAt(got, int64(binary.BigEndian.Uint64(w.CDB[2:]))*512); err != nil || !bytes.Equal(got, w.Data) {
			t.Fatalf("write of %d bytes is not in the file: %v", len(got), err)
		}
	}
	c.run(reads...)
	for i, k := range reads {
		if !bytes.Equal(k.Data, writes[i].Data) {
			t.Fatalf("read of %d bytes differs", len(k.Data))
		}
	}
	// Reads among writes, in random order.
	var other []*iscsi.Task
	for _, n := range sizes {
		if lba+n/512 < unitSize/512 {
			other = append(other, write(lba, random(r, n)))
			lba += n / 512
		}
	}
	for _, k := range reads {
		clear(k.Data)
	}
	mixed := slices.Concat(reads, other)
	r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
	c.run(mixed...)
	for i, k := range reads {
		if !bytes.Equal(k.Data, writes[i].Data) {
			t.Fatalf("read of %d bytes among writes differs", len(k.Data))
		}
	}
}

// TestSCSI brings underflow, sense data and a missing unit through.
func TestSCSI(t *testing.T) {
	_, portal, _ := start(t)
	c := connect(t, loop.New(t), portal, config(1))
	c.ready()
	inquiry := &iscsi.Task{Direction: iscsi.Read, Data: make([]byte, 255), CDB: [16]byte{0x12, 0, 0, 0, 255}}
	c.submit(inquiry)
	c.wait(1)
	if inquiry.Outcome != iscsi.Responded || inquiry.Status != scsi.StatusGood || inquiry.Residual == 0 || inquiry.Residual > 255-36 || inquiry.Overflow {
		t.Errorf("inquiry: outcome %d, status %v, residual %d", inquiry.Outcome, inquiry.Status, inquiry.Residual)
	}
	if !strings.HasPrefix(string(inquiry.Data[8:16]), "IET") {
		t.Errorf("vendor %q", inquiry.Data[8:16])
	}
	capacity := &iscsi.Task{Direction: iscsi.Read, Data: make([]byte, 8), CDB: [16]byte{0x25}}
	c.run(capacity)
	if blocks, size := binary.BigEndian.Uint32(capacity.Data), binary.BigEndian.Uint32(capacity.Data[4:]); blocks != unitSize/512-1 || size != 512 {
		t.Errorf("capacity: last block %d of %d bytes", blocks, size)
	}
	beyond := read(unitSize/512, make([]byte, 512))
	beyondWrite := write(unitSize/512, make([]byte, 65536))
	c.submit(beyond, beyondWrite)
	for _, k := range c.wait(2) {
		if k.Outcome != iscsi.Responded || k.Status != scsi.StatusCheckCondition || k.SenseLen < 14 || k.Sense[12] != 0x21 {
			t.Errorf("command %x beyond the end: outcome %d, status %v, sense %x", k.CDB[0], k.Outcome, k.Status, k.Sense[:k.SenseLen])
		}
	}
	c.logout()
}

// TestReinstatement logs in twice with one ISID: the first session ends, and what it had outstanding is lost.
func TestReinstatement(t *testing.T) {
	d, portal, _ := start(t)
	l := loop.New(t)
	first := connect(t, l, portal, config(1))
	first.ready()
	second := connect(t, l, portal, config(1))
	if err := first.end(); err == nil {
		t.Error("the first session ended as if it had been asked to")
	}
	k := read(0, make([]byte, 512))
	first.submit(k)
	if first.wait(1); k.Outcome != iscsi.NotSent {
		t.Errorf("command on a session that has ended: outcome %d", k.Outcome)
	}
	second.ready()
	second.run(read(0, make([]byte, 65536)))
	if n, err := d.Sessions(); n != 1 || err != nil {
		t.Errorf("tgtd has %d sessions, %v", n, err)
	}
	second.logout()
}

// TestSeveralSessions runs four sessions on one ring.
func TestSeveralSessions(t *testing.T) {
	d, portal, _ := start(t)
	l := loop.New(t)
	var clients []*client
	for i := range 4 {
		c := connect(t, l, portal, config(byte(i+1)))
		c.ready()
		clients = append(clients, c)
	}
	if n, err := d.Sessions(); n != 4 || err != nil {
		t.Errorf("tgtd has %d sessions, %v", n, err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	var writes []*iscsi.Task
	for i, c := range clients {
		w := write(i*2048, random(r, 1<<20))
		writes = append(writes, w)
		c.submit(w)
	}
	for _, c := range clients {
		c.wait(1)
	}
	for i, c := range clients {
		k := read((i+1)%4*2048, make([]byte, 1<<20))
		c.run(k)
		if !bytes.Equal(k.Data, writes[(i+1)%4].Data) {
			t.Errorf("session %d reads something else", i)
		}
	}
	for _, c := range clients {
		c.logout()
	}
}

// TestDeath kills tgtd under load: the session ends and every task comes back once.
func TestDeath(t *testing.T) {
	d, portal, _ := start(t)
	c := connect(t, loop.New(t), portal, config(1))
	c.ready()
	const n = 200
	var tasks []*iscsi.Task
	for i := range n {
		if i%2 == 0 {
			tasks = append(tasks, write(i*100, make([]byte, 131072)))
		} else {
			tasks = append(tasks, read(i*100, make([]byte, 131072)))
		}
	}
	c.submit(tasks...)
	c.wait(5)
	d.Close()
	if err := c.end(); err == nil {
		t.Error("the session ended as if it had been asked to")
	} else {
		t.Log(err)
	}
	lost := 0
	for _, k := range c.wait(n - 5) {
		if k.Outcome == iscsi.Lost || k.Outcome == iscsi.NotSent {
			lost++
		}
	}
	if lost == 0 || len(c.ended) > 0 {
		t.Errorf("%d tasks lost, %d came back twice", lost, len(c.ended))
	}
}
