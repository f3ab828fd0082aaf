package testtarget_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsitcp"
)

// client is the product's initiator, logged in over TCP.
type client struct {
	t       *testing.T
	l       *loop.Loop
	session *iscsi.Session
	down    chan error
	ended   chan *iscsi.Task
}

func connect(t *testing.T, l *loop.Loop, target *testtarget.Target, edit func(*login.Config)) *client {
	t.Helper()
	cfg := config(target.Name())
	keys := login.DefaultKeys(login.TCP, login.Normal)
	keys.MaxRecvDataSegmentLength = iscsitcp.MaxRecvDataSegmentLength
	cfg.Keys = &keys
	if edit != nil {
		edit(&cfg)
	}
	p := dial(t, target)
	result, err := iscsi.Login(t.Context(), p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, l: l, down: make(chan error, 1), ended: make(chan *iscsi.Task, 64)}
	l.Call(func() {
		var conn *iscsitcp.Conn
		if conn, err = p.Attach(l.Ring, iscsitcp.Config{Outstanding: 64}); err != nil {
			return
		}
		conn.NoticeKeyValues(&result.Keys)
		c.session, err = iscsi.NewSession(conn, result, iscsi.Options{Down: func(err error) {
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
	t.Cleanup(func() { l.Call(func() { c.session.Terminate(errors.New("test is over")) }) })
	return c
}

func (c *client) TaskDone(t *iscsi.Task) { c.ended <- t }

func (c *client) submit(tasks ...*iscsi.Task) {
	c.l.Do(func() {
		for _, t := range tasks {
			t.Handler = c
			c.session.Submit(t)
		}
	})
}

// wait returns when n tasks have come back.
func (c *client) wait(n int) (list []*iscsi.Task) {
	c.t.Helper()
	for range n {
		select {
		case k := <-c.ended:
			list = append(list, k)
		case <-time.After(20 * time.Second):
			c.t.Fatalf("%d of %d tasks came back", len(list), n)
		}
	}
	return list
}

// ping has the target ask for a sign of life, which the initiator sends behind whatever it had to send before.
func (c *client) ping(target *testtarget.Target) {
	c.t.Helper()
	answered := make(chan struct{}, 1)
	undo := target.Misbehave(testtarget.When{Opcode: testtarget.NOPOut}, func(*testtarget.Conn, *testtarget.PDU) bool {
		answered <- struct{}{}
		return true
	})
	defer undo()
	if err := target.Conns()[0].Ping(7, []byte("are you there")); err != nil {
		c.t.Fatal(err)
	}
	select {
	case <-answered:
	case err := <-c.down:
		c.t.Fatal(err)
	case <-time.After(20 * time.Second):
		c.t.Fatal("a ping is not answered")
	}
}

// end expects the session to end and returns why.
func (c *client) end() error {
	c.t.Helper()
	select {
	case err := <-c.down:
		return err
	case <-time.After(20 * time.Second):
		c.t.Fatal("the session does not end")
		return nil
	}
}

func transfer(op byte, lba uint32, data []byte) *iscsi.Task {
	k := &iscsi.Task{Direction: iscsi.Read, Data: data}
	if op == 0x2a {
		k.Direction = iscsi.Write
	}
	k.CDB[0] = op
	binary.BigEndian.PutUint32(k.CDB[2:], lba)
	binary.BigEndian.PutUint16(k.CDB[7:], uint16(len(data)/512))
	return k
}

func readTask(lba uint32, n int) *iscsi.Task  { return transfer(0x28, lba, make([]byte, n)) }
func writeTask(lba uint32, n int) *iscsi.Task { return transfer(0x2a, lba, make([]byte, n)) }

var (
	strayData = testtarget.Stray(testtarget.OpDataIn, func(p *testtarget.PDU) { p.Data = make([]byte, 512) })
	strayR2T  = testtarget.Stray(testtarget.OpR2T, func(p *testtarget.PDU) { p.SetU32(44, 512) })
	strayNOP  = testtarget.Stray(testtarget.OpNOPIn, func(p *testtarget.PDU) { p.SetU32(20, 0xffffffff) })
)

func withAHS(_ *testtarget.Conn, p *testtarget.PDU) bool {
	p.AHS = make([]byte, 8)
	return true
}

// violations are what a target may do wrong in the full feature phase, in its PDUs of one kind. Each has to end the connection.
var violations = map[string]struct {
	when   testtarget.When
	do     testtarget.Action
	digest bool
}{
	"StatSN ahead":            {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.AddStatSN(1), false},
	"StatSN far ahead":        {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.AddStatSN(1 << 30), false},
	"StatSN behind":           {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.AddStatSN(-1), false},
	"unknown ITT of response": {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.AddITT(0x7000), false},
	"reserved ITT":            {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.SetField(16, 0xffffffff), false},
	"unknown ITT of Data-In":  {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.AddITT(0x7000), false},
	"response twice":          {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Twice, false},

	"DataSN ahead":           {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 2}, testtarget.AddDataSN(1), false},
	"Data-In left out":       {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 2}, testtarget.Drop, false},
	"Data-In twice":          {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 2}, testtarget.Twice, false},
	"Data-In offset":         {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 2}, testtarget.AddOffset(512), false},
	"Data-In beyond buffer":  {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 2}, testtarget.SetField(40, 1<<31), false},
	"Data-In too long":       {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.Oversize(200000), false},
	"Data-In too short":      {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.CutData(4), false},
	"Data-In of a write":     {testtarget.When{Opcode: testtarget.OpR2T}, strayData, false},
	"segment beyond maximum": {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.Oversize(1 << 20), false},
	"length beyond maximum":  {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.Promise(1<<24 - 1), false},
	"additional header":      {testtarget.When{Opcode: testtarget.OpSCSIResponse}, withAHS, false},
	"header digest":          {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.BadHeaderDigest, true},
	"data digest":            {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.BadDataDigest, true},
	"header digest, R2T":     {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.BadHeaderDigest, true},
	"header flipped":         {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.FlipBit(3), true},

	"R2T too long":       {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.AddLength(1 << 30), false},
	"R2T of nothing":     {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.SetField(44, 0), false},
	"R2T outside":        {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.AddOffset(1 << 20), false},
	"R2T twice":          {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.Twice, false},
	"R2TSN ahead":        {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.AddDataSN(1), false},
	"R2T of unknown ITT": {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.AddITT(0x7000), false},
	"R2T without TTT":    {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.SetField(20, 0xffffffff), false},
	"R2T of a read":      {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 1}, strayR2T, false},

	"initiator's opcode":          {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpSCSICommand, nil), false},
	"Data-Out":                    {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpDataOut, nil), false},
	"reserved opcode":             {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(0x3d, nil), false},
	"vendor's opcode":             {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(0x3c, nil), false},
	"login response":              {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpLoginResp, nil), false},
	"text response for a command": {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpTextResp, nil), false},
	"logout not asked for":        {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpLogoutResp, nil), false},
	"task management response":    {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.Stray(testtarget.OpTaskMgmtResp, nil), false},
	"NOP-In for a command":        {testtarget.When{Opcode: testtarget.OpSCSIResponse}, strayNOP, false},

	"garbage":                 {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.Garbage(1000), false},
	"header cut":              {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.CutPDU(20), false},
	"data cut":                {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.CutPDU(100), false},
	"closed before data":      {testtarget.When{Opcode: testtarget.OpDataIn}, testtarget.CloseConn, false},
	"closed between data":     {testtarget.When{Opcode: testtarget.OpDataIn, Nth: 3}, testtarget.CloseConn, false},
	"closed before R2T":       {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.CloseConn, false},
	"closed before response":  {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.CloseConn, false},
	"reset in place of R2T":   {testtarget.When{Opcode: testtarget.OpR2T}, testtarget.ResetConn, false},
	"reset before a response": {testtarget.When{Opcode: testtarget.OpSCSIResponse}, testtarget.ResetConn, false},
}

// TestViolations lets the target break one rule each while reads and writes are under way. The product ends the connection, and every task
// comes back once.
func TestViolations(t *testing.T) {
	for name, v := range violations {
		t.Run(name, func(t *testing.T) {
			l := loop.New(t)
			target := start(t, testtarget.Config{DataInSize: 8192, SeparateStatus: true, Keys: map[string]string{"ImmediateData": "No"}})
			c := connect(t, l, target, func(cfg *login.Config) {
				if v.digest {
					cfg.HeaderDigest = []login.Digest{login.DigestCRC32C}
					cfg.DataDigest = []login.Digest{login.DigestCRC32C}
				}
			})
			v.when.Sending = true
			target.Misbehave(v.when, v.do)
			c.expectLost(readTask(0, 65536), writeTask(500, 65536), readTask(1000, 65536), writeTask(1500, 65536), readTask(2000, 512))
		})
	}
}

// expectLost submits tasks and expects the session to end on their account: each comes back once, at least one of them lost.
func (c *client) expectLost(tasks ...*iscsi.Task) {
	c.t.Helper()
	c.submit(tasks...)
	if err := c.end(); err == nil {
		c.t.Error("the session ended without a reason")
	} else {
		c.t.Log(err)
	}
	lost := 0
	for _, k := range c.wait(len(tasks)) {
		if k.Outcome == iscsi.Lost {
			lost++
		}
	}
	if lost == 0 {
		c.t.Error("no task is lost")
	}
	if n := len(c.ended); n > 0 {
		c.t.Errorf("%d tasks came back twice", n)
	}
}

// TestRejected answers a command with a Reject of each reason (RFC 7143 section 11.17.1): error recovery level 0 ends the connection.
func TestRejected(t *testing.T) {
	for reason := byte(0x01); reason <= 0x0d; reason++ {
		t.Run(fmt.Sprintf("%#02x", reason), func(t *testing.T) {
			l := loop.New(t)
			target := start(t, testtarget.Config{})
			c := connect(t, l, target, nil)
			target.Misbehave(testtarget.When{Opcode: testtarget.OpSCSICommand}, testtarget.RejectWith(reason))
			c.expectLost(readTask(0, 512))
		})
	}
}

// TestNoise sends random bytes in place of a PDU. Whatever they look like, the connection ends.
func TestNoise(t *testing.T) {
	l := loop.New(t)
	for seed := range uint64(40) {
		target := start(t, testtarget.Config{})
		c := connect(t, l, target, nil)
		target.Misbehave(testtarget.When{Sending: true}, func(tc *testtarget.Conn, p *testtarget.PDU) bool {
			testtarget.Noise(seed, 4096)(tc, p)
			return testtarget.CloseConn(tc, p)
		})
		c.expectLost(readTask(0, 4096), writeTask(100, 65536))
		target.Close()
	}
}

// TestTolerated is what a target may do, or what tells nothing wrong: the session goes on.
func TestTolerated(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, target *testtarget.Target, c *client){
		"answers in another order": func(t *testing.T, target *testtarget.Target, c *client) {
			park := target.Park(nil)
			c.submit(readTask(0, 512), readTask(8, 512), writeTask(16, 512))
			if err := park.Wait(t.Context(), 3); err != nil {
				t.Fatal(err)
			}
			park.ReleaseReversed()
			park.Close()
			if list := c.wait(3); list[0].CDB[0] != 0x2a || list[2].CDB[5] != 0 {
				t.Errorf("order of the answers: %#x, %#x, %#x", list[0].CDB[:6], list[1].CDB[:6], list[2].CDB[:6])
			}
		},
		"a write held back": func(t *testing.T, target *testtarget.Target, c *client) {
			park := target.Park(func(_ int, cdb []byte) bool { return cdb[0] == 0x2a })
			w := writeTask(0, 512)
			copy(w.Data, "late")
			c.submit(w)
			if err := park.Wait(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			c.submit(readTask(0, 512))
			if k := c.wait(1)[0]; k.CDB[0] != 0x28 || string(k.Data[:4]) == "late" {
				t.Errorf("%#x came first, with %q", k.CDB[0], k.Data[:4])
			}
			park.Close()
			c.wait(1)
		},
		"slow": func(t *testing.T, target *testtarget.Target, c *client) {
			defer target.Slow(nil, 10*time.Millisecond).Close()
			c.submit(readTask(0, 512), writeTask(0, 512))
			c.wait(2)
		},
		"a window that closes": func(t *testing.T, target *testtarget.Target, c *client) {
			tc := target.Conns()[0]
			tc.CloseWindow()
			var tasks []*iscsi.Task
			for range 8 {
				tasks = append(tasks, readTask(0, 512))
			}
			c.submit(tasks...)
			c.wait(4) // the window of this target
			c.ping(target)
			if len(c.ended) > 0 {
				t.Error("a command passed the closed window")
			}
			if err := tc.OpenWindow(); err != nil {
				t.Error(err)
			}
			c.wait(4)
		},
		"MaxCmdSN that goes back": func(t *testing.T, target *testtarget.Target, c *client) {
			undo := target.Misbehave(testtarget.When{Sending: true, Nth: 1}, func(_ *testtarget.Conn, p *testtarget.PDU) bool {
				p.SetU32(32, p.U32(28)-10)
				return true
			})
			defer undo()
			c.submit(readTask(0, 512))
			c.wait(1)
		},
		"pings": func(t *testing.T, target *testtarget.Target, c *client) {
			for range 4 {
				c.ping(target)
			}
			target.Conns()[0].Ping(0xffffffff, nil)
		},
		"status": func(t *testing.T, target *testtarget.Target, c *client) {
			u := target.Unit(0)
			for _, s := range []byte{testtarget.Busy, testtarget.TaskSetFull, testtarget.ReservationConflict, testtarget.TaskAborted, testtarget.ACAActive} {
				u.FaultNext(1, 0x28, s, nil)
				c.submit(readTask(0, 512))
				if k := c.wait(1)[0]; k.Outcome != iscsi.Responded || byte(k.Status) != s {
					t.Errorf("outcome %d, status %#02x, want %#02x", k.Outcome, k.Status, s)
				}
			}
			u.Attention(0x29, 0x00)
			u.FaultNext(1, 0x2a, testtarget.CheckCondition, testtarget.Sense(testtarget.KeyMediumError, 0x0c, 0x02))
			for _, c2 := range []struct {
				k        *iscsi.Task
				key, asc byte
			}{{readTask(0, 512), 6, 0x29}, {writeTask(0, 512), 3, 0x0c}} {
				c.submit(c2.k)
				c.wait(1)
				if c2.k.Status != 2 || c2.k.Sense[2] != c2.key || c2.k.Sense[12] != c2.asc {
					t.Errorf("status %#02x, sense %x", c2.k.Status, c2.k.Sense[:c2.k.SenseLen])
				}
			}
		},
		"residuals": func(t *testing.T, target *testtarget.Target, c *client) {
			for _, over := range []bool{false, true} {
				undo := target.Misbehave(testtarget.When{Sending: true, Opcode: testtarget.OpSCSIResponse}, testtarget.Residual(over, 512))
				k := writeTask(0, 1024)
				c.submit(k)
				c.wait(1)
				undo()
				if k.Residual != 512 || k.Overflow != over {
					t.Errorf("residual %d, overflow %v", k.Residual, k.Overflow)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := loop.New(t)
			target := start(t, testtarget.Config{Window: 4})
			c := connect(t, l, target, nil)
			do(t, target, c)
			c.submit(readTask(0, 512))
			if k := c.wait(1)[0]; k.Outcome != iscsi.Responded || k.Status != 0 {
				t.Errorf("a read afterwards: outcome %d, status %#02x", k.Outcome, k.Status)
			}
			select {
			case err := <-c.down:
				t.Errorf("the session ended: %v", err)
			default:
			}
			expectClean(t, target)
		})
	}
}

// TestLoginViolations lets the target answer a login wrongly. The product says what is wrong, soon.
func TestLoginViolations(t *testing.T) {
	sending := testtarget.When{Sending: true, Login: true}
	nth := func(n int) testtarget.When { w := sending; w.Nth = n; return w }
	big := "X-org.example.big=" + strings.Repeat("x", 100000)
	for name, c := range map[string]struct {
		when testtarget.When
		do   testtarget.Action
	}{
		"opcode":               {sending, testtarget.SetByte(0, testtarget.OpTextResp)},
		"command's opcode":     {sending, testtarget.SetByte(0, testtarget.OpSCSICommand)},
		"reject":               {sending, testtarget.SetByte(0, testtarget.OpReject)},
		"ITT":                  {sending, testtarget.AddITT(1)},
		"version":              {sending, testtarget.SetByte(3, 7)},
		"ISID":                 {sending, testtarget.SetByte(8, 0x40)},
		"stage 2":              {sending, testtarget.SetByte(1, 0x82)},
		"back to security":     {nth(2), testtarget.SetByte(1, 0x84)},
		"T and C":              {sending, testtarget.SetByte(1, 0xc5)},
		"no session handle":    {sending, func(_ *testtarget.Conn, p *testtarget.PDU) bool { p.BHS[14], p.BHS[15] = 0, 0; return true }},
		"no equals sign":       {sending, testtarget.Text("HeaderDigest\x00")},
		"no zero byte":         {sending, testtarget.Text("HeaderDigest=None")},
		"no key":               {sending, testtarget.Text("=None\x00")},
		"key of 64":            {sending, testtarget.Text(strings.Repeat("k", 64) + "=1\x00")},
		"key twice":            {nth(2), testtarget.Text("MaxBurstLength=8192\x00MaxBurstLength=8192\x00")},
		"too much text":        {sending, testtarget.Text(big + "\x00")},
		"answer not asked for": {sending, testtarget.AddAnswer("MaxBurstLength", "8192")},
		"digest not offered":   {nth(2), testtarget.Answer("HeaderDigest", "CRC64")},
		"number is text":       {nth(2), testtarget.Answer("MaxBurstLength", "many")},
		"number is huge":       {nth(2), testtarget.Answer("MaxBurstLength", "99999999999999999999")},
		"number is raised":     {nth(2), testtarget.Answer("MaxBurstLength", "16777215")},
		"number is 0":          {nth(2), testtarget.Answer("MaxBurstLength", "0")},
		"neither Yes nor No":   {nth(2), testtarget.Answer("InitialR2T", "Perhaps")},
		"cut":                  {sending, testtarget.CutPDU(30)},
		"text cut":             {sending, testtarget.CutPDU(60)},
		"closed at once":       {sending, testtarget.CloseConn},
		"closed later":         {nth(2), testtarget.CloseConn},
		"reset":                {sending, testtarget.ResetConn},
		"garbage":              {sending, testtarget.Garbage(500)},
		"length":               {sending, testtarget.Promise(1<<24 - 1)},
		"C without end": {sending, func(_ *testtarget.Conn, p *testtarget.PDU) bool {
			p.BHS[1] = p.BHS[1]&0x0c | 0x40
			p.Data = make([]byte, 8000)
			for i := range p.Data {
				p.Data[i] = 'x'
			}
			return true
		}},
	} {
		t.Run(name, func(t *testing.T) {
			target := start(t, testtarget.Config{CHAP: nil})
			target.Misbehave(c.when, c.do)
			cfg := config(target.Name())
			cfg.HeaderDigest = []login.Digest{login.DigestCRC32C, login.DigestNone}
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			_, err := iscsi.Login(ctx, dial(t, target), cfg)
			if err == nil {
				t.Error("the login succeeds")
			} else if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the login hangs: %v", err)
			} else {
				t.Log(err)
			}
		})
	}
}

// TestCHAPViolations lets the target answer mutual CHAP wrongly.
func TestCHAPViolations(t *testing.T) {
	for name, do := range map[string]testtarget.Action{
		"method not offered":    testtarget.Answer("AuthMethod", "SRP"),
		"no authentication":     testtarget.Answer("AuthMethod", "None"),
		"algorithm not offered": testtarget.Answer("CHAP_A", "9"),
		"no algorithm":          testtarget.Answer("CHAP_A", ""),
		"identifier of 300":     testtarget.Answer("CHAP_I", "300"),
		"no identifier":         testtarget.Answer("CHAP_I", ""),
		"no challenge":          testtarget.Answer("CHAP_C", ""),
		"empty challenge":       testtarget.Answer("CHAP_C", "0x"),
		"challenge is text":     testtarget.Answer("CHAP_C", "hello"),
		"challenge too long":    testtarget.Answer("CHAP_C", "0x"+strings.Repeat("ab", 2000)),
		"response is wrong":     testtarget.Answer("CHAP_R", "0x"+strings.Repeat("00", 16)),
		"response is short":     testtarget.Answer("CHAP_R", "0x00"),
		"no response":           testtarget.Answer("CHAP_R", ""),
		"another name":          testtarget.Answer("CHAP_N", "somebody"),
		"no name":               testtarget.Answer("CHAP_N", ""),
	} {
		t.Run(name, func(t *testing.T) {
			target := start(t, testtarget.Config{CHAP: &testtarget.CHAP{User: "me", Secret: "0123456789ab", TargetUser: "it", TargetSecret: "ba9876543210"}})
			target.Misbehave(testtarget.When{Sending: true, Login: true}, do)
			cfg := config(target.Name())
			cfg.Auth = login.Auth{
				User: "me", Secret: login.NewSecret([]byte("0123456789ab")), TargetUser: "it", TargetSecret: login.NewSecret([]byte("ba9876543210")),
			}
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			_, err := iscsi.Login(ctx, dial(t, target), cfg)
			switch {
			case err == nil:
				t.Error("the login succeeds")
			case ctx.Err() != nil:
				t.Errorf("the login hangs: %v", err)
			case strings.Contains(err.Error(), "0123456789ab") || strings.Contains(err.Error(), "ba9876543210"):
				t.Errorf("the error tells a secret: %v", err)
			default:
				t.Log(err)
			}
		})
	}
}

// TestLoginStatuses sends every status class, and details that no standard knows.
func TestLoginStatuses(t *testing.T) {
	for _, status := range []int{
		0x0101, 0x0102, 0x01ff, 0x0200, 0x0201, 0x0202, 0x0203, 0x0204, 0x0205, 0x0206, 0x0207, 0x0208, 0x0209, 0x020a, 0x020b, 0x02ff,
		0x0300, 0x0301, 0x0302, 0x03ff, 0x0400, 0xffff,
	} {
		t.Run(fmt.Sprintf("%04x", status), func(t *testing.T) {
			target := start(t, testtarget.Config{})
			target.Misbehave(testtarget.When{Login: true}, testtarget.LoginStatus(status, "TargetAddress=10.0.0.9:3260,1"))
			_, err := iscsi.Login(t.Context(), dial(t, target), config(target.Name()))
			if err == nil {
				t.Error("the login succeeds")
			}
			t.Log(err)
		})
	}
}

// TestNoAnswer never answers: a login, a ping, a command. Only time-outs end that, and they do.
func TestNoAnswer(t *testing.T) {
	target := start(t, testtarget.Config{})
	target.Misbehave(testtarget.When{Login: true}, testtarget.Ignore)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := iscsi.Login(ctx, dial(t, target), config(target.Name())); err == nil || ctx.Err() == nil {
		t.Errorf("login ends with %v", err)
	}

	l := loop.New(t)
	target = start(t, testtarget.Config{})
	c := connect(t, l, target, nil)
	undo := target.Misbehave(testtarget.When{Opcode: testtarget.OpSCSICommand}, testtarget.Ignore)
	c.submit(readTask(0, 512))
	c.ping(target)
	if len(c.ended) > 0 {
		t.Error("a command that nobody answers came back")
	}
	undo()
	c.submit(readTask(8, 512))
	if k := c.wait(1)[0]; k.Outcome != iscsi.Responded {
		t.Error("the next command does not pass it")
	}
	expectClean(t, target)
}
