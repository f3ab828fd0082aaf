package iscsitcp

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// onSending makes a hook for PDUs of one kind; f gets the number of the PDU, from 0.
func onSending(op pdu.Opcode, f func(c *testtarget.Conn, p *testtarget.PDU, n int) bool) testtarget.Hooks {
	n := -1
	return testtarget.Hooks{Sending: func(c *testtarget.Conn, p *testtarget.PDU) bool {
		if !c.FullFeature() || p.Opcode() != byte(op) {
			return true
		}
		n++
		return f(c, p, n)
	}}
}

const (
	offITT, offTTT, offStatSN, offSN, offOffset, offLength = 16, 20, 24, 36, 40, 44
)

// TestMisbehaviour lets a target break one rule each while reads and writes are outstanding. The session must end with the error that
// names the rule, every task must come back exactly once, as lost if it has not ended before, and nothing may be left behind.
func TestMisbehaviour(t *testing.T) {
	reset := func(c *testtarget.Conn) { c.Close() }
	for name, m := range map[string]struct {
		want  string
		is    error
		hooks testtarget.Hooks
	}{
		"wrong DataSN": {want: "DataSN 7", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			if n == 3 {
				p.SetU32(offSN, 7)
			}
			return true
		})},
		"Data-In left out": {want: "DataSN", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, _ *testtarget.PDU, n int) bool { return n != 3 })},
		"Data-In twice": {want: "DataSN", hooks: onSending(pdu.OpDataIn, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			if n == 3 {
				c.Write(p.Clone())
			}
			return true
		})},
		"offset beyond": {want: "at offset 2147483648", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offOffset, 1<<31)
			return true
		})},
		"too much data": {want: "there is room for", hooks: onSending(pdu.OpDataIn, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.Data = make([]byte, 70000)
			return true
		})},
		"unknown tag": {want: "which is not outstanding", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offITT, 0x7fff0000)
			return true
		})},
		"short data with GOOD": {want: "are due", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			if p.BHS[1]&1 != 0 {
				p.Data = p.Data[:len(p.Data)-4]
			}
			return true
		})},
		"no data with GOOD": {want: "are due", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			r := &testtarget.PDU{BHS: p.BHS}
			if p.BHS[1]&1 != 0 {
				r.BHS[0], r.BHS[1] = byte(pdu.OpSCSIResponse), 0x80
				*p = *r
				return true
			}
			return false
		})},
		"oversized PDU": {want: "262145 bytes", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.Data, p.KeepLength = make([]byte, 100), true
			p.BHS[5], p.BHS[6], p.BHS[7] = 4, 0, 1
			return true
		})},
		"close in the middle": {want: "target closed the connection in a Data-In", is: io.EOF,
			hooks: onSending(pdu.OpDataIn, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
				if n == 2 {
					p.BHS[6] = 8
					c.WriteBytes(append(p.BHS[:], make([]byte, 1000)...))
					shut(c)
					return false
				}
				return true
			})},
		"reset": {want: "", is: syscall.ECONNRESET, hooks: onSending(pdu.OpR2T, func(c *testtarget.Conn, _ *testtarget.PDU, n int) bool {
			reset(c) // unread data makes it a reset; a close without is an end of file
			return false
		})},
		"R2T beyond the end": {want: "the command has", hooks: onSending(pdu.OpR2T, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offLength, 100001)
			return true
		})},
		"R2T too long": {want: "MaxBurstLength", hooks: onSending(pdu.OpR2T, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offLength, 1<<31)
			return true
		})},
		"R2T of a read": {want: "not outstanding", hooks: onSending(pdu.OpR2T, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offITT, p.ITT()+40)
			return true
		})},
		"R2T twice": {want: "R2TSN", hooks: onSending(pdu.OpR2T, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			c.Write(p.Clone())
			return true
		})},
		"GOOD before the data": {want: "were asked for", hooks: onSending(pdu.OpR2T, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			r := &testtarget.PDU{}
			r.BHS[0], r.BHS[1] = byte(pdu.OpSCSIResponse), 0x80
			r.SetU32(offITT, p.ITT())
			c.Numbers(r, true)
			c.Write(r)
			return false
		})},
		"response twice": {want: "not outstanding", hooks: onSending(pdu.OpSCSIResponse, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			c.Write(p.Clone())
			return true
		})},
		"wrong StatSN": {want: "StatSN", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.SetU32(offStatSN, p.U32(offStatSN)+5)
			return true
		})},
		"reject": {want: "target rejects", hooks: onSending(pdu.OpR2T, func(c *testtarget.Conn, p *testtarget.PDU, n int) bool {
			r := &testtarget.PDU{Data: make([]byte, 48)}
			r.BHS[0], r.BHS[1], r.BHS[2] = byte(pdu.OpReject), 0x80, 4
			r.SetU32(offITT, pdu.ReservedTag)
			c.Numbers(r, true)
			c.Write(r)
			return false
		})},
		"login PDU": {want: "has no place here", hooks: onSending(pdu.OpDataIn, func(_ *testtarget.Conn, p *testtarget.PDU, n int) bool {
			p.BHS, p.Data = [48]byte{0x23, 0x87}, nil
			return true
		})},
		"garbage": {want: "protocol error", hooks: onSending(pdu.OpDataIn, func(c *testtarget.Conn, _ *testtarget.PDU, n int) bool {
			c.WriteBytes(bytes.Repeat([]byte{0xff}, 1000))
			return true
		})},
	} {
		t.Run(name, func(t *testing.T) {
			l := loop.New(t)
			target := startTarget(t, testtarget.Config{DataInSize: 8192, Keys: map[string]string{"ImmediateData": "No"}})
			c := connect(t, l, target, nil)
			target.SetHooks(m.hooks)
			tasks := []*iscsi.Task{
				read10(0, make([]byte, 65536)), write10(500, make([]byte, 65536)), read10(1000, make([]byte, 65536)),
				write10(1500, make([]byte, 65536)), read10(2000, make([]byte, 512)),
			}
			c.submit(tasks...)
			err := c.end()
			if err == nil || !strings.Contains(err.Error(), m.want) || m.is != nil && !errors.Is(err, m.is) && !errors.Is(err, io.EOF) {
				t.Errorf("session ended with %v, want %q", err, m.want)
			}
			lost := 0
			for _, k := range c.wait(len(tasks)) {
				if k.Outcome == iscsi.Lost {
					lost++
				} else if k.Outcome == iscsi.Responded {
					good(t, k)
				} else {
					t.Errorf("outcome %d", k.Outcome)
				}
			}
			if lost == 0 {
				t.Error("no task is lost")
			}
			c.waitGone()
			if len(c.ended) != 0 {
				t.Errorf("%d tasks came back twice", len(c.ended))
			}
		})
	}
}

// shut ends the connection of a hook in order, after what was written.
func shut(c *testtarget.Conn) { c.CloseWrite() }

// TestDigestErrors flips bits behind the digest's back.
func TestDigestErrors(t *testing.T) {
	for name, spoil := range map[string]func(b []byte){
		"header": func(b []byte) { b[44] ^= 1 },
		"data":   func(b []byte) { b[100] ^= 1 },
	} {
		t.Run(name, func(t *testing.T) {
			l := loop.New(t)
			target := startTarget(t, testtarget.Config{})
			c := connect(t, l, target, func(config *login.Config) {
				config.HeaderDigest = []login.Digest{login.DigestCRC32C}
				config.DataDigest = []login.Digest{login.DigestCRC32C}
			})
			target.SetHooks(onSending(pdu.OpDataIn, func(tc *testtarget.Conn, p *testtarget.PDU, _ int) bool {
				b := tc.Encode(p)
				spoil(b)
				tc.WriteBytes(b)
				return false
			}))
			c.submit(read10(0, make([]byte, 4096)))
			if err := c.end(); err == nil || !strings.Contains(err.Error(), "digest") {
				t.Errorf("session ended with %v", err)
			}
			if k := c.wait(1)[0]; k.Outcome != iscsi.Lost {
				t.Errorf("outcome %d", k.Outcome)
			}
		})
	}
}

// TestTerminateWhileSending ends a connection whose target takes nothing: a SENDMSG waits for room in the socket and a RECV for data. Both
// must have ended before the tasks come back.
func TestTerminateWhileSending(t *testing.T) {
	l := loop.New(t)
	held := make(chan struct{})
	var reads atomic.Int32
	target := startTarget(t, testtarget.Config{
		Keys: map[string]string{"InitialR2T": "No", "FirstBurstLength": "1048576", "MaxBurstLength": "1048576"},
		Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
			if c.FullFeature() && reads.Add(1) == 1 {
				<-held // nothing is read from here on
			}
			return true
		}},
	})
	defer close(held)
	c := connect(t, l, target, func(config *login.Config) {
		config.Keys.InitialR2T, config.Keys.FirstBurstLength = false, 1<<20
	})
	var tasks []*iscsi.Task
	for i := range 16 {
		tasks = append(tasks, write10(uint32(i), bytes.Repeat([]byte{byte(i)}, 1<<20)))
	}
	c.submit(tasks...)
	for stuck := 0; stuck < 3; { // the socket is full when turns pass without progress
		var before, after int
		l.Call(func() { before = c.conn.out.gone })
		l.Call(func() { after = c.conn.out.gone })
		var sending bool
		l.Call(func() { sending = c.conn.outstanding[opSend] && c.conn.pollFirst[opSend] })
		if sending && before == after {
			stuck++
		} else {
			stuck = 0
		}
	}
	cause := errors.New("somebody said so")
	l.Call(func() { c.session.Terminate(cause) })
	if err := c.end(); !errors.Is(err, cause) {
		t.Errorf("session ended with %v", err)
	}
	for _, k := range c.wait(len(tasks)) {
		if k.Outcome != iscsi.Lost {
			t.Errorf("outcome %d", k.Outcome)
		}
	}
}

// TestTerminateEarly ends connections at once: before they were enabled, right after, twice.
func TestTerminateEarly(t *testing.T) {
	l := loop.New(t)
	target := startTarget(t, testtarget.Config{})
	for _, enable := range []bool{false, true} {
		p, err := Dial(t.Context(), target.Addr())
		if err != nil {
			t.Fatal(err)
		}
		result, err := iscsi.Login(t.Context(), p, loginConfig(target.Name()))
		if err != nil {
			t.Fatal(err)
		}
		notes := make(chan error, 4)
		var c *Conn
		l.Call(func() {
			if c, err = p.Attach(l.Ring, Config{}); err != nil {
				return
			}
			c.NoticeKeyValues(&result.Keys)
			if enable {
				c.EnableDatamover(endRecorder{notes})
			}
			c.ConnectionTerminate(nil)
			c.ConnectionTerminate(io.ErrNoProgress)
			if len(notes) > 0 {
				err = errors.New("told from within ConnectionTerminate")
			}
			var h pdu.BHS
			if e := c.SendControl(&h, nil, nil); !errors.Is(e, ErrClosed) {
				err = e
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		for done := false; !done; {
			l.Call(func() { done = c.state == closed })
		}
		if enable {
			if err := <-notes; !errors.Is(err, ErrClosed) {
				t.Errorf("told %v", err)
			}
		}
		l.Call(func() { c.ConnectionTerminate(io.ErrNoProgress) })
		if len(notes) > 0 {
			t.Errorf("told again: %v", <-notes)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		l.Call(func() { _, err = p.Attach(l.Ring, Config{}) })
		if !errors.Is(err, ErrClosed) {
			t.Errorf("second Attach: %v", err)
		}
	}
}

type endRecorder struct{ notes chan error }

func (endRecorder) ControlNotify(*pdu.BHS, []byte)        {}
func (r endRecorder) ConnectionTerminateNotify(err error) { r.notes <- err }

// TestDeallocate forgets a task that was aborted, and ends the connection when the task's data is moving.
func TestDeallocate(t *testing.T) {
	l := loop.New(t)
	target := startTarget(t, testtarget.Config{Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
		return !c.FullFeature()
	}}})
	c := connect(t, l, target, nil)
	aborted, moving := read10(0, make([]byte, 4096)), write10(0, make([]byte, 4096))
	c.submit(aborted)
	for sent := false; !sent; {
		l.Call(func() { k := c.conn.find(aborted.ITT()); sent = k != nil && k.pending == 0 })
	}
	l.Call(func() {
		c.conn.DeallocateTaskResources(aborted)
		c.conn.DeallocateTaskResources(aborted)
		if c.conn.find(aborted.ITT()) != nil || c.conn.state != up {
			t.Error("task is still there, or the connection is not")
		}
		moving.Handler = c
		c.session.Submit(moving)
		c.conn.DeallocateTaskResources(moving)
	})
	if err := c.end(); err == nil || !strings.Contains(err.Error(), "aborted while its data was moving") {
		t.Errorf("session ended with %v", err)
	}
	c.wait(2)
}

// TestFlood sends more pings than can be answered, and a request for an answer that is too long.
func TestFlood(t *testing.T) {
	for name, flood := range map[string]struct {
		want string
		send func(c *testtarget.Conn)
	}{
		"many": {"no room for more", func(c *testtarget.Conn) {
			p := &testtarget.PDU{}
			p.BHS[0], p.BHS[1] = byte(pdu.OpNOPIn), 0x80
			p.SetU32(offITT, pdu.ReservedTag)
			p.SetU32(offTTT, 1)
			c.WriteBytes(bytes.Repeat(c.Encode(p), 100000))
		}},
		"long": {"bytes of data, at most 8192", func(c *testtarget.Conn) { c.Ping(1, make([]byte, controlMax+1)) }},
	} {
		t.Run(name, func(t *testing.T) {
			l := loop.New(t)
			target := startTarget(t, testtarget.Config{})
			c := connect(t, l, target, nil)
			go flood.send(target.Conns()[0])
			if err := c.end(); err == nil || !strings.Contains(err.Error(), flood.want) {
				t.Errorf("session ended with %v", err)
			}
		})
	}
}

// TestSlowTarget lets the target handle PDUs in small steps while much is under way in both directions, so that sends are cut at any place.
func TestSlowTarget(t *testing.T) {
	l := loop.New(t)
	target := startTarget(t, testtarget.Config{
		Keys: map[string]string{"InitialR2T": "No", "FirstBurstLength": "262144", "MaxOutstandingR2T": "4", "MaxBurstLength": "65536"},
		Hooks: testtarget.Hooks{Received: func(c *testtarget.Conn, p *testtarget.PDU) bool {
			if !c.FullFeature() {
				c.SetReadBuffer(16384)
			}
			return true
		}},
	})
	c := connect(t, l, target, func(config *login.Config) {
		k := config.Keys
		k.InitialR2T, k.FirstBurstLength, k.MaxOutstandingR2T = false, 262144, 4
	})
	testTransfers(t, c, target.Unit(0))
	c.logout()
	expectClean(t, target)
}
