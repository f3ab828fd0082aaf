package iscsitcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// client is a session with a target, on a loop of its own or of a test.
type client struct {
	t       testing.TB
	l       *loop.Loop
	conn    *Conn
	session *iscsi.Session
	result  *login.Result
	down    chan error
	ended   chan *iscsi.Task
}

// loginConfig is what the tests propose.
func loginConfig(target string) login.Config {
	keys := login.DefaultKeys(login.TCP, login.Normal)
	keys.MaxRecvDataSegmentLength = MaxRecvDataSegmentLength
	return login.Config{
		InitiatorName: "iqn.2003-01.org.example:me", TargetName: target, SessionType: login.Normal, Transport: login.TCP,
		ISID: [6]byte{0x80}, CmdSN: 0xfffffff0, // CmdSN wraps in every test
		Keys: &keys,
	}
}

// connect logs in to target and starts a session on l. edit changes what is proposed; it may be nil.
func connect(t testing.TB, l *loop.Loop, target *testtarget.Target, edit func(*login.Config)) *client {
	t.Helper()
	config := loginConfig(target.Name())
	if edit != nil {
		edit(&config)
	}
	return connectTo(t, l, target.Addr(), config)
}

// connectTo logs in to any target.
func connectTo(t testing.TB, l *loop.Loop, addr string, config login.Config) *client {
	t.Helper()
	p, err := Dial(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	result, err := iscsi.Login(t.Context(), p, config)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, l: l, result: result, down: make(chan error, 1), ended: make(chan *iscsi.Task, 1024)}
	l.Call(func() {
		if c.conn, err = p.Attach(l.Ring, Config{Outstanding: 64}); err != nil {
			return
		}
		c.conn.NoticeKeyValues(&result.Keys)
		c.session, err = iscsi.NewSession(c.conn, result, iscsi.Options{Down: func(err error) {
			l.Remove(c.session)
			c.down <- err
		}}, time.Now())
		if err == nil {
			l.Add(c.session)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.l.Call(func() { c.session.Terminate(fmt.Errorf("test is over")) }); c.waitGone() })
	return c
}

// waitGone returns when the connection has given everything back.
func (c *client) waitGone() {
	c.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for gone := false; !gone; {
		c.l.Call(func() { gone = c.conn.state == closed })
		if !gone && time.Now().After(deadline) {
			c.t.Fatal("connection does not end")
		}
	}
}

func (c *client) TaskDone(t *iscsi.Task) { c.ended <- t }

// submit hands tasks to the session.
func (c *client) submit(tasks ...*iscsi.Task) {
	c.l.Do(func() {
		for _, t := range tasks {
			t.Handler = c
			c.session.Submit(t)
		}
	})
}

// wait returns when n tasks have ended.
func (c *client) wait(n int) []*iscsi.Task {
	c.t.Helper()
	var list []*iscsi.Task
	for range n {
		select {
		case t := <-c.ended:
			list = append(list, t)
		case <-time.After(20 * time.Second):
			c.t.Fatalf("%d of %d tasks ended", len(list), n)
		}
	}
	return list
}

// end expects the session to go down and returns why.
func (c *client) end() error {
	c.t.Helper()
	select {
	case err := <-c.down:
		return err
	case <-time.After(20 * time.Second):
		c.t.Fatal("session does not end")
		return nil
	}
}

func (c *client) logout() {
	c.t.Helper()
	answer := make(chan error, 1)
	c.l.Do(func() { c.session.Logout(func(err error) { answer <- err }) })
	if err := <-answer; err != nil {
		c.t.Error("logout:", err)
	}
	if err := c.end(); err != nil {
		c.t.Error("end after logout:", err)
	}
}

const blockSize = 512

func read10(lba uint32, data []byte) *iscsi.Task {
	t := &iscsi.Task{Direction: iscsi.Read, Data: data}
	t.CDB[0] = 0x28
	binary.BigEndian.PutUint32(t.CDB[2:], lba)
	binary.BigEndian.PutUint16(t.CDB[7:], uint16(len(data)/blockSize))
	return t
}

func write10(lba uint32, data []byte) *iscsi.Task {
	t := read10(lba, data)
	t.CDB[0], t.Direction = 0x2a, iscsi.Write
	return t
}

// good checks that a task ended well and moved everything.
func good(t testing.TB, k *iscsi.Task) {
	t.Helper()
	if k.Outcome != iscsi.Responded || k.Status != 0 || k.Residual != 0 {
		t.Fatalf("task %#08x (%#02x, %d bytes): outcome %d, status %#02x, residual %d, sense %x", k.ITT(), k.CDB[0], len(k.Data), k.Outcome,
			k.Status, k.Residual, k.Sense[:k.SenseLen])
	}
}

func startTarget(t testing.TB, config testtarget.Config) *testtarget.Target {
	t.Helper()
	target, err := testtarget.Start(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(target.Close)
	return target
}

func expectClean(t testing.TB, target *testtarget.Target) {
	t.Helper()
	for _, v := range target.Violations() {
		t.Error("target saw:", v)
	}
}

// TestTransfers writes and reads lengths from one block to 1 MiB, several at once, under each combination of what may be negotiated, and
// compares every byte with the target's memory.
func TestTransfers(t *testing.T) {
	l := loop.New(t)
	type lengths struct{ maxBurst, firstBurst, sendMax, dataIn, r2ts int }
	forms := []lengths{
		{262144, 65536, 8192, 262144, 1}, // LIO
		{262144, 262144, 262144, 8192, 8},
		{4096, 512, 512, 512, 2},
		{16384, 16384, 1024, 1000, 4}, // Data-In that is not a multiple of 4 needs padding
		{1 << 20, 65536, 65536, 65536, 1},
	}
	for _, r2t := range []string{"Yes", "No"} {
		for _, immediate := range []string{"Yes", "No"} {
			for _, digest := range []login.Digest{login.DigestNone, login.DigestCRC32C} {
				for i, f := range forms {
					t.Run(fmt.Sprintf("R2T=%s,Immediate=%s,%v,%d", r2t, immediate, digest, i), func(t *testing.T) {
						s := func(n int) string { return fmt.Sprint(n) }
						target := startTarget(t, testtarget.Config{
							Keys: map[string]string{
								"InitialR2T": r2t, "ImmediateData": immediate, "MaxBurstLength": s(f.maxBurst),
								"FirstBurstLength": s(f.firstBurst), "MaxRecvDataSegmentLength": s(f.sendMax), "MaxOutstandingR2T": s(f.r2ts),
							},
							DataInSize: f.dataIn, SeparateStatus: i&1 == 1, Window: 16,
						})
						c := connect(t, l, target, func(config *login.Config) {
							k := config.Keys
							k.InitialR2T, k.ImmediateData, k.MaxBurstLength, k.FirstBurstLength, k.MaxOutstandingR2T = false, true, 1<<20, 1<<20, 8
							config.HeaderDigest = []login.Digest{digest, login.DigestNone}
							config.DataDigest = []login.Digest{digest, login.DigestNone}
						})
						testTransfers(t, c, target.Unit(0))
						c.logout()
						expectClean(t, target)
					})
				}
			}
		}
	}
}

// testTransfers moves data both ways; unit gives what is behind LUN 0.
func testTransfers(t *testing.T, c *client, unit io.ReaderAt) {
	r := rand.New(rand.NewPCG(5, 6))
	sizes := []int{512, 1024, 4096, 8192, 8704, 65536, 66048, 131072, 262144, 300032, 1 << 20}
	var writes, reads []*iscsi.Task
	lba := uint32(1)
	for _, n := range sizes {
		writes = append(writes, write10(lba, random(r, n)))
		reads = append(reads, read10(lba, make([]byte, n)))
		lba += uint32(n/blockSize) + 1
	}
	c.submit(writes...)
	for _, k := range c.wait(len(writes)) {
		good(t, k)
	}
	for i, w := range writes {
		got := make([]byte, len(w.Data))
		unit.ReadAt(got, int64(binary.BigEndian.Uint32(w.CDB[2:]))*blockSize)
		if !bytes.Equal(got, w.Data) {
			t.Fatalf("write of %d bytes arrived wrong", sizes[i])
		}
	}
	// Reads and new writes of other places at once.
	var other []*iscsi.Task
	for _, n := range sizes {
		other = append(other, write10(lba, random(r, n)))
		lba += uint32(n / blockSize)
	}
	c.submit(append(reads, other...)...)
	for _, k := range c.wait(len(reads) + len(other)) {
		good(t, k)
	}
	for i := range reads {
		if !bytes.Equal(reads[i].Data, writes[i].Data) {
			t.Fatalf("read of %d bytes differs", sizes[i])
		}
	}
}

// TestStatus brings status, sense and residual through.
func TestStatus(t *testing.T) {
	l := loop.New(t)
	target := startTarget(t, testtarget.Config{})
	c := connect(t, l, target, nil)
	inquiry := &iscsi.Task{Direction: iscsi.Read, Data: make([]byte, 255)}
	inquiry.CDB[0], inquiry.CDB[4] = 0x12, 255
	beyond := read10(1<<30, make([]byte, 512))
	beyondWrite := write10(1<<30, make([]byte, 100000/512*512))
	short := read10(0, make([]byte, 4096))
	short.CDB[8] = 16 // 8 KiB into 4 KiB
	c.submit(inquiry, beyond, beyondWrite, short)
	c.wait(4)
	if inquiry.Status != 0 || inquiry.Residual != 255-74 || inquiry.Overflow || string(inquiry.Data[8:13]) != "ISERD" {
		t.Errorf("inquiry: status %#02x, residual %d, %q", inquiry.Status, inquiry.Residual, inquiry.Data[:36])
	}
	for _, k := range []*iscsi.Task{beyond, beyondWrite} {
		if k.Outcome != iscsi.Responded || k.Status != 2 || k.SenseLen != 18 || k.Sense[2] != 5 || k.Sense[12] != 0x21 {
			t.Errorf("read beyond the end: outcome %d, status %#02x, sense %x", k.Outcome, k.Status, k.Sense[:k.SenseLen])
		}
	}
	if short.Status != 0 || !short.Overflow || short.Residual != 4096 {
		t.Errorf("overflow: status %#02x, %v, residual %d", short.Status, short.Overflow, short.Residual)
	}
	c.logout()
	expectClean(t, target)
}

// TestSessions runs several sessions of one target on one ring, over IPv4 and IPv6.
func TestSessions(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l := loop.New(t)
		target, err := testtarget.Start(testtarget.Config{Addr: addr})
		if err != nil {
			t.Skipf("needs %s: %v", addr, err)
		}
		defer target.Close()
		var clients []*client
		for i := range 4 {
			clients = append(clients, connect(t, l, target, func(c *login.Config) { c.ISID[5] = byte(i) }))
		}
		if n := target.Sessions(); n != 4 {
			t.Errorf("target has %d sessions", n)
		}
		for i, c := range clients {
			c.submit(write10(uint32(i*256), bytes.Repeat([]byte{byte(i + 1)}, 131072)))
		}
		for _, c := range clients {
			good(t, c.wait(1)[0])
		}
		for i, c := range clients {
			k := read10(uint32((i+1)%4*256), make([]byte, 131072))
			c.submit(k)
			good(t, c.wait(1)[0])
			if !bytes.Equal(k.Data, bytes.Repeat([]byte{byte((i+1)%4 + 1)}, 131072)) {
				t.Errorf("session %d reads something else", i)
			}
		}
		for _, c := range clients {
			c.logout()
		}
		expectClean(t, target)
	}
}

// TestTargetPing answers a NOP-In with its data.
func TestTargetPing(t *testing.T) {
	l := loop.New(t)
	answered := make(chan *testtarget.PDU, 1)
	target := startTarget(t, testtarget.Config{Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
		if p.Opcode() == 0 {
			answered <- p.Clone()
		}
		return true
	}}})
	c := connect(t, l, target, nil)
	for _, n := range []int{0, 1, 100, 4096, controlMax} {
		data := bytes.Repeat([]byte{7}, n)
		if err := target.Conns()[0].Ping(uint32(1000+n), data); err != nil {
			t.Fatal(err)
		}
		select {
		case p := <-answered:
			if p.U32(20) != uint32(1000+n) || p.ITT() != pdu.ReservedTag || !p.Immediate() || !bytes.Equal(p.Data, data) {
				t.Errorf("answer to a ping with %d bytes: %v", n, p)
			}
		case err := <-c.down:
			t.Fatal(err)
		}
	}
	c.logout()
	for _, v := range target.Violations() {
		if !strings.Contains(v, "MaxRecvDataSegmentLength") {
			t.Error(v)
		}
	}
}
