package testtarget

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// When says which PDUs an [Action] gets. The zero value fits every PDU that the target receives in the full feature phase.
type When struct {
	Sending bool  // PDUs of the target; otherwise those of the initiator
	Login   bool  // the login phase; otherwise the full feature phase
	Opcode  int   // 0: any; otherwise an opcode, or NOPOut
	CDB     int   // 0: any; otherwise the operation code of a SCSI Command
	Nth     int   // 0: each one; otherwise the nth that fits, from 1
	From    int   // 0: from the first on; otherwise from the nth that fits on
	Conn    *Conn // nil: any
}

// NOPOut is the opcode of NOP-Out in [When], where 0 means any.
const NOPOut = 0x100

// Action does something to a PDU on its way; a hook is one. The PDU goes on its way when it returns true. p.BHS has its numbers.
type Action func(c *Conn, p *PDU) (pass bool)

type rule struct {
	when When
	do   Action
	seen int
}

// Misbehave applies an action to PDUs from the next one on, before the hooks of [Target.SetHooks]. Of several that fit, the earlier comes
// first. undo ends it.
func (t *Target) Misbehave(when When, do Action) (undo func()) {
	r := &rule{when: when, do: do}
	t.mu.Lock()
	t.rules = append(t.rules, r)
	t.mu.Unlock()
	return func() {
		t.mu.Lock()
		t.rules = slices.DeleteFunc(t.rules, func(o *rule) bool { return o == r })
		t.mu.Unlock()
	}
}

// fits counts PDUs. t.mu is held.
func (r *rule) fits(c *Conn, p *PDU, sending, login bool) bool {
	w := &r.when
	if w.Sending != sending || w.Login != login || w.Conn != nil && w.Conn != c {
		return false
	}
	if w.Opcode != 0 && byte(w.Opcode)&0x3f != p.Opcode() || w.CDB != 0 && (p.Opcode() != OpSCSICommand || p.BHS[32] != byte(w.CDB)) {
		return false
	}
	r.seen++
	return (w.Nth == 0 || r.seen == w.Nth) && r.seen >= w.From
}

// pass takes a PDU through the rules and the hook. It tells whether it goes on.
func (t *Target) pass(c *Conn, p *PDU, sending bool) bool {
	full := c.FullFeature()
	t.mu.Lock()
	var do []Action
	for _, r := range t.rules {
		if r.fits(c, p, sending, !full) {
			do = append(do, r.do)
		}
	}
	hook := t.hooks.Received
	if sending {
		hook = t.hooks.Sending
	}
	t.mu.Unlock()
	if hook != nil {
		do = append(do, hook)
	}
	for _, f := range do {
		if !f(c, p) {
			return false
		}
	}
	return true
}

// Actions for PDUs in either direction.

// Drop lets a PDU of the target vanish. For PDUs of the initiator use Ignore.
func Drop(*Conn, *PDU) bool { return false }

// Ignore takes a PDU of the initiator and never answers; its CmdSN counts as received.
func Ignore(c *Conn, p *PDU) bool {
	if c.FullFeature() && p.Opcode() != OpDataOut {
		c.number(p)
	}
	return false
}

// CloseConn ends the connection in place of the PDU, in order.
func CloseConn(c *Conn, _ *PDU) bool {
	if c.CloseWrite() != nil {
		c.Close()
	}
	return false
}

// ResetConn ends the connection in place of the PDU, by a TCP reset.
func ResetConn(c *Conn, _ *PDU) bool {
	c.Reset()
	return false
}

// Actions for PDUs of the initiator: other answers.

// RejectWith answers with a Reject, by its reason (section 11.17.1).
func RejectWith(reason byte) Action {
	return func(c *Conn, p *PDU) bool {
		Ignore(c, p)
		c.Reject(p, reason)
		return false
	}
}

// AnswerTask answers a Task Management Function Request with a response (section 11.6.1), and does nothing else.
func AnswerTask(response byte) Action {
	return func(c *Conn, p *PDU) bool {
		if p.Opcode() != OpTaskMgmt {
			return true
		}
		Ignore(c, p)
		r := &PDU{}
		r.BHS[0], r.BHS[offFlags], r.BHS[2] = OpTaskMgmtResp, final, response
		r.SetU32(offITT, p.ITT())
		defer c.lock()()
		c.Numbers(r, true)
		c.Write(r)
		return false
	}
}

// LoginStatus answers a Login Request with a status, class and detail in one number (section 11.13.5), and text as "key=value".
func LoginStatus(status int, text ...string) Action {
	return func(c *Conn, p *PDU) bool {
		r := c.newLoginResponse(p, 0)
		copy(r.BHS[8:14], p.BHS[8:14])
		r.BHS[36], r.BHS[37] = byte(status>>8), byte(status)
		if len(text) > 0 {
			r.Data = []byte(strings.Join(text, "\x00") + "\x00")
		}
		c.Write(r)
		return CloseConn(c, p)
	}
}

// Actions for PDUs of the target.

// AddStatSN, AddDataSN and AddOffset move a number away from what it should be; AddDataSN is R2TSN of an R2T, and AddOffset is the buffer
// offset of Data-In and R2T.
func AddStatSN(n int32) Action { return add(offCmdSN, n) }

// AddDataSN is described at [AddStatSN].
func AddDataSN(n int32) Action { return add(offDataSN, n) }

// AddOffset is described at [AddStatSN].
func AddOffset(n int32) Action { return add(offOffset, n) }

// AddLength changes the Desired Data Transfer Length of an R2T, or the residual count of a response.
func AddLength(n int32) Action { return add(offResidual, n) }

// AddITT changes the Initiator Task Tag.
func AddITT(n int32) Action { return add(offITT, n) }

func add(off int, n int32) Action {
	return func(_ *Conn, p *PDU) bool {
		p.SetU32(off, p.U32(off)+uint32(n))
		return true
	}
}

// SetField writes four bytes of the header, big endian.
func SetField(off int, v uint32) Action {
	return func(_ *Conn, p *PDU) bool {
		p.SetU32(off, v)
		return true
	}
}

// SetByte writes one byte of the header: 0 is the opcode, 1 the flags, 3 the SCSI status.
func SetByte(off int, v byte) Action {
	return func(_ *Conn, p *PDU) bool {
		p.BHS[off] = v
		return true
	}
}

// Residual gives a response, or a Data-In with status, a residual count that was not asked for.
func Residual(overflow bool, n uint32) Action {
	return func(_ *Conn, p *PDU) bool {
		p.BHS[offFlags] &^= 0x06
		if p.BHS[offFlags] |= 0x02; overflow {
			p.BHS[offFlags] ^= 0x06
		}
		p.SetU32(offResidual, n)
		return true
	}
}

// Oversize makes the header promise n bytes of data, and sends as many.
func Oversize(n int) Action {
	return func(_ *Conn, p *PDU) bool {
		p.Data = append(append([]byte(nil), p.Data...), make([]byte, max(0, n-len(p.Data)))...)
		return true
	}
}

// Promise makes the header promise n bytes of data and sends what there is, so that the next PDU is taken for data.
func Promise(n int) Action {
	return func(_ *Conn, p *PDU) bool {
		p.KeepLength = true
		p.BHS[5], p.BHS[6], p.BHS[7] = byte(n>>16), byte(n>>8), byte(n)
		return true
	}
}

// CutData takes the last n bytes of the data away.
func CutData(n int) Action {
	return func(_ *Conn, p *PDU) bool {
		p.Data = p.Data[:max(0, len(p.Data)-n)]
		return true
	}
}

// CutPDU sends the first n bytes of the PDU and ends the connection.
func CutPDU(n int) Action {
	return func(c *Conn, p *PDU) bool {
		b := c.Encode(p)
		c.WriteBytes(b[:min(n, len(b))])
		return CloseConn(c, p)
	}
}

// Twice sends a PDU twice.
func Twice(c *Conn, p *PDU) bool {
	c.Write(p.Clone())
	return true
}

// Before sends another PDU first, made by f.
func Before(f func(c *Conn, p *PDU) *PDU) Action {
	return func(c *Conn, p *PDU) bool {
		c.Write(f(c, p))
		return true
	}
}

// Stray sends a PDU that there is no reason for, with an opcode of the caller's choice, before the one that fits: final, with the same Initiator
// Task Tag, the StatSN that comes next, and what edit makes of it. edit may be nil.
func Stray(opcode byte, edit func(p *PDU)) Action {
	return Before(func(c *Conn, p *PDU) *PDU {
		q := &PDU{}
		q.BHS[0], q.BHS[offFlags] = opcode, final
		q.SetU32(offITT, p.ITT())
		c.Numbers(q, false)
		if edit != nil {
			edit(q)
		}
		return q
	})
}

// Garbage sends n bytes of 0xff in place of the PDU.
func Garbage(n int) Action {
	return func(c *Conn, _ *PDU) bool {
		c.WriteBytes([]byte(strings.Repeat("\xff", n)))
		return false
	}
}

// Noise sends n random bytes in place of the PDU, the same for the same seed.
func Noise(seed uint64, n int) Action {
	return func(c *Conn, _ *PDU) bool {
		r := rand.New(rand.NewPCG(seed, 0))
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		c.WriteBytes(b)
		return false
	}
}

// FlipBit flips a bit of the PDU behind the back of the digests: byte off from the start of the PDU.
func FlipBit(off int) Action {
	return func(c *Conn, p *PDU) bool {
		c.target.record(c, true, p)
		b := c.Encode(p)
		if off < len(b) {
			b[off] ^= 1
		}
		c.WriteBytes(b)
		return false
	}
}

// BadHeaderDigest and BadDataDigest spoil a digest; the session must have agreed on it.
func BadHeaderDigest(c *Conn, p *PDU) bool { return FlipBit(bhsSize)(c, p) }

// BadDataDigest is described at [BadHeaderDigest].
func BadDataDigest(c *Conn, p *PDU) bool {
	if len(p.Data) == 0 {
		return true
	}
	return FlipBit(len(c.Encode(p))-1)(c, p)
}

// Answer replaces the value of a key in the text of a PDU, if the key is there; "" takes it out.
func Answer(key, value string) Action {
	return editText(func(pairs []pair) []pair {
		for i := range pairs {
			if pairs[i].key == key {
				pairs[i].value = value
			}
		}
		return slices.DeleteFunc(pairs, func(kv pair) bool { return kv.key == key && value == "" })
	})
}

// AddAnswer adds a key to the text of a PDU, whether it is there or not.
func AddAnswer(key, value string) Action {
	return editText(func(pairs []pair) []pair { return append(pairs, pair{key, value}) })
}

func editText(edit func([]pair) []pair) Action {
	return func(_ *Conn, p *PDU) bool {
		if pairs, err := parseText(p.Data); err == nil {
			p.Data = formatText(edit(pairs))
		}
		return true
	}
}

// Text replaces the text of a PDU by any bytes.
func Text(text string) Action {
	return func(_ *Conn, p *PDU) bool {
		p.Data = []byte(text)
		return true
	}
}

// Held are PDUs of the target that are kept back.
type Held struct {
	t    *Target
	pdus []heldPDU // under t.mu
	undo func()
}

type heldPDU struct {
	c *Conn
	p *PDU
}

// Hold keeps back PDUs of the target that fit. Release sends them.
func (t *Target) Hold(when When) *Held {
	h := &Held{t: t}
	when.Sending = true
	h.undo = t.Misbehave(when, func(c *Conn, p *PDU) bool {
		t.mu.Lock()
		h.pdus = append(h.pdus, heldPDU{c, p})
		t.mu.Unlock()
		return false
	})
	return h
}

// Len is how many are held.
func (h *Held) Len() int {
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	return len(h.pdus)
}

// Release sends what is held and holds no more, in the order of the indices or, without any, as it came. The numbers stay as they were: StatSN tells that
// the order is another one.
func (h *Held) Release(order ...int) error {
	h.undo()
	h.t.mu.Lock()
	list := h.pdus
	h.pdus = nil
	h.t.mu.Unlock()
	if len(order) == 0 {
		for i := range list {
			order = append(order, i)
		}
	}
	for _, i := range order {
		if i >= len(list) {
			return fmt.Errorf("there are %d PDUs", len(list))
		}
		if err := list[i].c.Write(list[i].p); err != nil {
			return err
		}
	}
	return nil
}
