package testtarget_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iser"
	"iserd.org/iserd/rdma"
)

// iserClient is the product's initiator, logged in over iSER. Its tasks' data lies in pool.
type iserClient struct {
	t       *testing.T
	loop    *iser.Loop
	pool    *mempool.Pool
	port    *iser.Port
	session *iscsi.Session
	down    chan error
	ended   chan *iscsi.Task
}

func startISER(t *testing.T, config testtarget.Config) *testtarget.Target {
	t.Helper()
	config.Addr, config.ISER = "10.0.0.1:0", true
	target, err := testtarget.Start(config)
	require.Need(t, "rdma", err)
	t.Cleanup(target.Close)
	return target
}

func connectISER(t *testing.T, target *testtarget.Target) *iserClient {
	t.Helper()
	c := &iserClient{t: t, down: make(chan error, 1), ended: make(chan *iscsi.Task, 64)}
	var err error
	if c.pool, err = mempool.New(8 << 20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.pool.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c.port, err = iser.Dial(ctx, target.Addr(), func(dev *rdma.Device) (iser.Config, error) {
		var err error
		if c.loop, err = iser.NewLoop(dev); err != nil {
			return iser.Config{}, err
		}
		config := c.loop.Config
		config.Discovery = false
		mr, err := config.Domain.Register(c.pool.Region())
		if err != nil {
			return iser.Config{}, err
		}
		c.do(func() { config.Domain.Keep(c.pool.Region().ID, mr) })
		return config, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.port.Close()
		c.loop.Close()
	})
	cfg := config(target.Name())
	cfg.Transport = login.ISER
	result, err := iscsi.Login(ctx, c.port, cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.do(func() {
		conn := c.port.Conn()
		conn.NoticeKeyValues(&result.Keys)
		c.session, err = iscsi.NewSession(conn, result, iscsi.Options{Down: func(err error) { c.down <- err }}, time.Now())
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// do runs f on the owner of the connection and waits for it.
func (c *iserClient) do(f func()) {
	done := make(chan struct{})
	c.loop.Do(func() { f(); close(done) })
	<-done
}

func (c *iserClient) TaskDone(k *iscsi.Task) { c.ended <- k }

// task makes a READ or WRITE whose data lies at an offset of the pool's memory.
func (c *iserClient) task(op byte, lba uint32, at, n int) *iscsi.Task {
	k := transfer(op, lba, c.pool.Region().Mem[at:at+n])
	k.Region, k.Handler = c.pool.Region().ID, c
	return k
}

func (c *iserClient) submit(tasks ...*iscsi.Task) {
	c.loop.Do(func() {
		for _, k := range tasks {
			c.session.Submit(k)
		}
	})
}

func (c *iserClient) wait(n int) (list []*iscsi.Task) {
	c.t.Helper()
	for range n {
		select {
		case k := <-c.ended:
			list = append(list, k)
		case <-time.After(30 * time.Second):
			c.t.Fatalf("%d of %d tasks came back", len(list), n)
		}
	}
	return list
}

// TestISER moves data both ways and compares it with what the target has: immediate data, RDMA Read and RDMA Write, several at once.
func TestISER(t *testing.T) {
	target := startISER(t, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(16 << 20)}})
	c := connectISER(t, target)
	sizes := []int{512, 4096, 8192, 8704, 65536, 262144, 524288}
	r := rand.New(rand.NewPCG(1, 2))
	var writes, reads []*iscsi.Task
	at := 0
	for _, n := range sizes {
		w := c.task(0x2a, uint32(at/512), at, n)
		for i := range w.Data {
			w.Data[i] = byte(r.Uint32())
		}
		writes = append(writes, w)
		reads = append(reads, c.task(0x28, uint32(at/512), 4<<20+at, n))
		at += n
	}
	for _, list := range [][]*iscsi.Task{writes, reads} {
		c.submit(list...)
		for _, k := range c.wait(len(list)) {
			if k.Outcome != iscsi.Responded || k.Status != 0 || k.Residual != 0 {
				t.Fatalf("%#x of %d bytes: outcome %d, status %#02x, residual %d", k.CDB[0], len(k.Data), k.Outcome, k.Status, k.Residual)
			}
		}
	}
	got := make([]byte, at)
	target.Unit(0).ReadAt(got, 0)
	if !bytes.Equal(got, c.pool.Region().Mem[:at]) {
		t.Error("what was written has not arrived")
	}
	if !bytes.Equal(got, c.pool.Region().Mem[4<<20:][:at]) {
		t.Error("what is read is something else")
	}
	answer := make(chan error, 1)
	c.loop.Do(func() { c.session.Logout(func(err error) { answer <- err }) })
	if err := <-answer; err != nil {
		t.Error("logout:", err)
	}
	if err := <-c.down; err != nil {
		t.Error("end:", err)
	}
	expectClean(t, target)
}

// TestISERViolations lets the target break rules over iSER, in place of its first response. The product ends the connection, and every task comes
// back once.
func TestISERViolations(t *testing.T) {
	response := testtarget.When{Sending: true, Opcode: testtarget.OpSCSIResponse, Nth: 1}
	header := func(b byte) testtarget.Action {
		return func(_ *testtarget.Conn, p *testtarget.PDU) bool { p.ISER[0] = b; return true }
	}
	spoil := func(off int) testtarget.Action { // of the initiator's header, as the target takes it: memory that it may not touch
		return func(_ *testtarget.Conn, p *testtarget.PDU) bool { p.ISER[off] ^= 0xff; return true }
	}
	raw := func(n int) testtarget.Action {
		return func(c *testtarget.Conn, p *testtarget.PDU) bool {
			b := append(c.Encode(p), make([]byte, n)...)
			c.WriteBytes(b[:min(n, len(b))])
			return false
		}
	}
	for name, v := range map[string]struct {
		when testtarget.When
		do   testtarget.Action
	}{
		"unknown ITT":            {response, testtarget.AddITT(0x7000)},
		"response twice":         {response, testtarget.Twice},
		"Hello":                  {response, header(0x20)},
		"HelloReply":             {response, header(0x30)},
		"no iSER opcode":         {response, header(0x01)},
		"message of 10 bytes":    {response, raw(10)},
		"message without BHS":    {response, raw(28)},
		"message cut in the BHS": {response, raw(60)},
		"message beyond receive": {response, testtarget.Oversize(4000)},
		"more data than sent":    {response, testtarget.Promise(100)},
		"less data than sent": {response, func(_ *testtarget.Conn, p *testtarget.PDU) bool {
			p.Data, p.KeepLength = make([]byte, 64), true
			return true
		}},
		"additional header":       {response, withAHS},
		"Data-In":                 {response, testtarget.Stray(testtarget.OpDataIn, nil)},
		"R2T":                     {response, strayR2T},
		"initiator's opcode":      {response, testtarget.Stray(testtarget.OpSCSICommand, nil)},
		"reserved opcode":         {response, testtarget.Stray(0x3d, nil)},
		"login response":          {response, testtarget.Stray(testtarget.OpLoginResp, nil)},
		"logout not asked for":    {response, testtarget.Stray(testtarget.OpLogoutResp, nil)},
		"text for a command":      {response, testtarget.Stray(testtarget.OpTextResp, nil)},
		"garbage":                 {response, testtarget.Garbage(200)},
		"reject":                  {testtarget.When{Opcode: testtarget.OpSCSICommand, Nth: 1}, testtarget.RejectWith(4)},
		"closed":                  {response, testtarget.CloseConn},
		"closed after a command":  {testtarget.When{Opcode: testtarget.OpSCSICommand, Nth: 2}, testtarget.CloseConn},
		"data beyond the buffer":  {testtarget.When{Opcode: testtarget.OpSCSICommand, CDB: 0x28, Nth: 1}, spoil(20)},
		"a Write STag of nothing": {testtarget.When{Opcode: testtarget.OpSCSICommand, CDB: 0x2a, Nth: 1}, spoil(4)},
	} {
		t.Run(name, func(t *testing.T) {
			target := startISER(t, testtarget.Config{})
			c := connectISER(t, target)
			target.Misbehave(v.when, v.do)
			tasks := []*iscsi.Task{
				c.task(0x28, 0, 0, 65536), c.task(0x2a, 500, 65536, 65536), c.task(0x2a, 1000, 131072, 4096), c.task(0x28, 2000, 262144, 512),
			}
			c.submit(tasks...)
			select {
			case err := <-c.down:
				if err == nil {
					t.Error("the session ended without a reason")
				} else {
					t.Log(err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("the session does not end")
			}
			lost := 0
			for _, k := range c.wait(len(tasks)) {
				if k.Outcome == iscsi.Lost {
					lost++
				}
			}
			if lost == 0 {
				t.Error("no task is lost")
			}
			if n := len(c.ended); n > 0 {
				t.Errorf("%d tasks came back twice", n)
			}
		})
	}
}

// TestISERNoise sends messages of random bytes behind a good iSER header.
func TestISERNoise(t *testing.T) {
	target := startISER(t, testtarget.Config{})
	for seed := range uint64(10) {
		c := connectISER(t, target)
		undo := target.Misbehave(testtarget.When{Sending: true, Opcode: testtarget.OpSCSIResponse}, func(tc *testtarget.Conn, p *testtarget.PDU) bool {
			r := rand.New(rand.NewPCG(seed, 1))
			for i := range p.BHS {
				p.BHS[i] = byte(r.Uint32())
			}
			p.KeepLength = true
			tc.Write(p)
			return testtarget.CloseConn(tc, p)
		})
		c.submit(c.task(0x28, 0, 0, 4096))
		select {
		case err := <-c.down:
			t.Log(err)
		case <-time.After(30 * time.Second):
			t.Fatal("the session does not end")
		}
		undo()
		if k := c.wait(1)[0]; k.Outcome != iscsi.Lost && k.Outcome != iscsi.Responded {
			t.Error(errors.New("no outcome"))
		}
	}
}
