package iscsitcp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// These tests drive both state machines without a socket: bytes of a made-up target go in where plan says, messages come out of build.

// note is what a stream told its session.
type note struct {
	bhs  pdu.BHS
	data string
}

// recorder is the session of a stream.
type recorder struct {
	notes []note
	keep  bool
	count int
}

func (r *recorder) ControlNotify(bhs *pdu.BHS, data []byte) {
	r.count++
	if r.keep {
		r.notes = append(r.notes, note{*bhs, string(data)})
	}
}

func (r *recorder) ConnectionTerminateNotify(error) {}

// newStream is a connection without a socket, in the full feature phase.
func newStream(t testing.TB, keys settings) (*Conn, *recorder) {
	t.Helper()
	m, err := newMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.close() })
	r := &recorder{keep: true}
	c := &Conn{fd: -1, mem: m, keys: keys, tasks: make([]task, 8), state: up, notifier: r}
	c.in.init(m)
	c.out.init(m, len(c.tasks), keys.maxOutstandingR2T)
	return c, r
}

// start queues a command as the session does.
func start(t testing.TB, c *Conn, itt uint32, dir iscsi.Direction, data []byte) *iscsi.Task {
	t.Helper()
	task := &iscsi.Task{Direction: dir, Data: data}
	if err := startTask(c, itt, task); err != nil {
		t.Fatal(err)
	}
	return task
}

func startTask(c *Conn, itt uint32, t *iscsi.Task) error {
	var h pdu.BHS
	p := pdu.NewSCSICommand(&h)
	p.SetFinal(true)
	p.SetRead(t.Direction == iscsi.Read)
	p.SetWrite(t.Direction == iscsi.Write)
	p.SetInitiatorTaskTag(itt)
	p.SetLUN(0x0001000000000000)
	p.SetExpectedDataTransferLength(uint32(t.Length()))
	p.SetExpStatSN(77)
	return c.SendControl(&h, nil, t)
}

// feed lets stream arrive in pieces that next chooses.
func feed(c *Conn, stream []byte, next func(most int) int) error {
	for len(stream) > 0 {
		first, second, waitAll := c.in.plan()
		if waitAll {
			second = nil
			if p, ok := c.in.pages.(*pages); ok {
				first = p.mem[c.in.offset():][:c.in.left]
			}
		}
		if len(first)+len(second) == 0 {
			return fmt.Errorf("plan has no room with %d bytes to come", len(stream))
		}
		n := min(next(min(len(first)+len(second), len(stream))), len(first)+len(second), len(stream))
		k := copy(first, stream[:n])
		copy(second, stream[k:n])
		stream = stream[n:]
		if err := c.landed(n); err != nil {
			return err
		}
	}
	return nil
}

func whole(most int) int { return most }

// drain takes everything that waits to be sent, in pieces of at most piece bytes, and returns it as the target sees it.
func drain(c *Conn, piece int) []byte {
	var out []byte
	for c.build() {
		for {
			var took int
			if p, off, n := c.out.pages(); p != nil {
				took = min(n, piece)
				out = append(out, p.(*pages).mem[off:off+took]...)
			}
			for _, v := range c.out.rest() {
				n := min(int(v.Len), piece-took)
				out = append(out, unsafe.Slice(v.Base, n)...)
				if took += n; took == piece {
					break
				}
			}
			if c.advance(took) {
				break
			}
		}
	}
	return out
}

// wire makes target PDUs.
type wire struct {
	keys settings
	b    []byte
}

func (w *wire) pdu(h *pdu.BHS, data []byte) {
	h.SetDataSegmentLength(len(data))
	w.b = append(w.b, h[:]...)
	if w.keys.headerDigest > 0 {
		w.b = append(w.b, 0, 0, 0, 0)
		putDigest(w.b[len(w.b)-4:], checksum(0, h[:]))
	}
	if len(data) == 0 {
		return
	}
	at := len(w.b)
	w.b = append(w.b, data...)
	for range pdu.Padding(len(data)) {
		w.b = append(w.b, 0)
	}
	if w.keys.dataDigest > 0 {
		sum := checksum(0, w.b[at:])
		w.b = append(w.b, 0, 0, 0, 0)
		putDigest(w.b[len(w.b)-4:], sum)
	}
}

func (w *wire) dataIn(itt, sn, offset uint32, data []byte, status bool) {
	var h pdu.BHS
	p := pdu.NewDataIn(&h)
	p.SetInitiatorTaskTag(itt)
	p.SetTargetTransferTag(pdu.ReservedTag)
	p.SetDataSN(sn)
	p.SetBufferOffset(offset)
	if status {
		p.SetStatus(0)
		p.SetStatSN(5)
		p.SetExpCmdSN(6)
		p.SetMaxCmdSN(7)
	}
	w.pdu(&h, data)
}

func (w *wire) r2t(itt, ttt, sn, offset, n uint32) {
	var h pdu.BHS
	p := pdu.NewR2T(&h)
	p.SetLUN(uint64(scsi.NewLUN(1)))
	p.SetInitiatorTaskTag(itt)
	p.SetTargetTransferTag(ttt)
	p.SetR2TSN(sn)
	p.SetBufferOffset(offset)
	p.SetDesiredDataTransferLength(n)
	w.pdu(&h, nil)
}

func (w *wire) response(itt uint32, status byte, residual uint32, sense []byte) {
	var h pdu.BHS
	p := pdu.NewSCSIResponse(&h)
	p.SetInitiatorTaskTag(itt)
	p.SetStatus(status)
	p.SetResidual(residual, false)
	p.SetStatSN(5)
	var data []byte
	if sense != nil {
		data = pdu.AppendSense(nil, sense)
	}
	w.pdu(&h, data)
}

func (w *wire) nopIn(data []byte) {
	var h pdu.BHS
	pdu.NewNOPIn(&h).SetTargetTransferTag(9)
	w.pdu(&h, data)
}

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n+7)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b[:n:n]
}

// TestReceivePieces lets one stream arrive in random pieces, with and without digests, and expects the same each time: the bytes of every
// read in place, and the same PDUs for the session.
func TestReceivePieces(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		keys := defaultSettings
		if round&1 != 0 {
			keys.headerDigest = 4
		}
		if round&2 != 0 {
			keys.dataDigest = 4
		}
		c, rec := newStream(t, keys)
		w := &wire{keys: keys}
		type read struct {
			itt     uint32
			content []byte
			memory  []byte
			at, sn  int
		}
		var reads []*read
		for i := range 6 {
			n := 1 + r.IntN(200000)
			if r.IntN(2) == 0 {
				n = 1 + r.IntN(9000)
			}
			d := &read{itt: uint32(round%3)<<16 | uint32(i), content: random(r, n), memory: make([]byte, n)}
			k := &iscsi.Task{Direction: iscsi.Read, Data: d.memory}
			if keys.dataDigest == 0 && r.IntN(2) == 0 {
				k.Data, k.Pages = nil, &pages{mem: d.memory}
			}
			if err := startTask(c, d.itt, k); err != nil {
				t.Fatal(err)
			}
			reads = append(reads, d)
		}
		drain(c, 1<<20)
		var want []note
		all := append([]*read(nil), reads...)
		for len(reads) > 0 { // the reads make progress in any order, other PDUs come between
			switch r.IntN(8) {
			case 0:
				ping := random(r, r.IntN(3000))
				w.nopIn(ping)
				var h pdu.BHS
				pdu.NewNOPIn(&h).SetTargetTransferTag(9)
				h.SetDataSegmentLength(len(ping))
				want = append(want, note{h, string(ping)})
				continue
			}
			i := r.IntN(len(reads))
			d := reads[i]
			n := min(len(d.content)-d.at, 1+r.IntN(80000))
			last := d.at+n == len(d.content)
			status := last && r.IntN(2) == 0
			w.dataIn(d.itt, uint32(d.sn), uint32(d.at), d.content[d.at:d.at+n], status)
			d.at += n
			d.sn++
			if !last {
				continue
			}
			reads = append(reads[:i], reads[i+1:]...)
			var h pdu.BHS
			p := pdu.NewSCSIResponse(&h)
			p.SetInitiatorTaskTag(d.itt)
			p.SetStatSN(5)
			if status {
				p.SetExpCmdSN(6)
				p.SetMaxCmdSN(7)
				p.SetExpDataSN(uint32(d.sn))
			} else {
				w.response(d.itt, 0, 0, nil)
			}
			want = append(want, note{h, ""})
		}
		most := 1 + r.IntN(1<<r.IntN(18))
		if err := feed(c, w.b, func(n int) int { return 1 + r.IntN(min(n, most)) }); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for i, d := range all {
			if !bytes.Equal(d.content, d.memory) {
				t.Fatalf("round %d: read %d differs", round, i)
			}
		}
		if len(want) != len(rec.notes) {
			t.Fatalf("round %d: %d PDUs for the session, want %d", round, len(rec.notes), len(want))
		}
		for i := range want {
			if want[i] != rec.notes[i] {
				t.Fatalf("round %d: PDU %d is\n%x %q, want\n%x %q", round, i, rec.notes[i].bhs, rec.notes[i].data, want[i].bhs, want[i].data)
			}
		}
	}
}

// TestStatusOnDataIn compares the SCSI Response that is made of a Data-In, byte for byte.
func TestStatusOnDataIn(t *testing.T) {
	c, rec := newStream(t, defaultSettings)
	memory := make([]byte, 512)
	start(t, c, 0x10002, iscsi.Read, memory)
	drain(c, 1<<20)
	var h pdu.BHS
	for i := range h {
		h[i] = 0xff // reserved fields of a careless target
	}
	h[0], h[1], h[3], h[4] = byte(pdu.OpDataIn), 0x83|0x38, 0, 0 // F, U, S and reserved bits
	p := pdu.AsDataIn(&h)
	p.SetInitiatorTaskTag(0x10002)
	p.SetDataSN(0)
	p.SetBufferOffset(0)
	p.SetStatSN(0x01020304)
	p.SetExpCmdSN(0x05060708)
	p.SetMaxCmdSN(0x090a0b0c)
	p.SetResidual(500, false)
	w := &wire{keys: c.keys}
	w.pdu(&h, []byte("hello, world"))
	if err := feed(c, w.b, whole); err != nil {
		t.Fatal(err)
	}
	want := "21820000" + "00000000" + "0000000000000000" + "00010002" + "00000000" + "01020304" + "05060708" + "090a0b0c" +
		"00000001" + "00000000" + "000001f4"
	if got := hex.EncodeToString(rec.notes[0].bhs[:]); got != want {
		t.Errorf("response\n%s, want\n%s", got, want)
	}
	if string(memory[:12]) != "hello, world" || c.find(0x10002) != nil {
		t.Error("data or task is not in order")
	}
}

// TestReceiveViolations sends one wrong stream each and expects the error that names it.
func TestReceiveViolations(t *testing.T) {
	header := func(op byte, edit func(*pdu.BHS)) func(*wire) {
		return func(w *wire) {
			h := pdu.BHS{op, 0x80}
			h.SetInitiatorTaskTag(1)
			edit(&h)
			w.b = append(w.b, h[:]...)
		}
	}
	for name, c := range map[string]struct {
		want string
		send func(*wire)
	}{
		"undefined opcode":    {"opcode 0x3e is not defined", header(0x3e, func(*pdu.BHS) {})},
		"opcode of ours":      {"wrong side", header(0x01, func(*pdu.BHS) {})},
		"additional header":   {"additional header", header(0x25, func(h *pdu.BHS) { h[4] = 1 })},
		"oversized Data-In":   {"262148 bytes", header(0x25, func(h *pdu.BHS) { h.SetDataSegmentLength(262148) })},
		"oversized NOP-In":    {"8196 bytes of data", header(0x20, func(h *pdu.BHS) { h.SetDataSegmentLength(8196) })},
		"S without F":         {"without F", func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 10), true); w.b[1] = 0x01 }},
		"unknown tag":         {"Tag 0x00000003, which is not outstanding", func(w *wire) { w.dataIn(3, 0, 0, make([]byte, 10), false) }},
		"old generation":      {"0x00010001, which is not outstanding", func(w *wire) { w.dataIn(0x10001, 0, 0, make([]byte, 10), false) }},
		"tag beyond table":    {"0x0000ffff, which is not outstanding", func(w *wire) { w.dataIn(0xffff, 0, 0, make([]byte, 10), false) }},
		"reserved tag":        {"0xffffffff, which is not outstanding", func(w *wire) { w.response(0xffffffff, 0, 0, nil) }},
		"Data-In for write":   {"does not read", func(w *wire) { w.dataIn(2, 0, 0, make([]byte, 10), false) }},
		"DataSN":              {"DataSN 1 of command 0x00000001, expected 0", func(w *wire) { w.dataIn(1, 1, 0, make([]byte, 10), false) }},
		"gap":                 {"at offset 12, expected 10", func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 10), false); w.dataIn(1, 1, 12, make([]byte, 10), false) }},
		"overlap":             {"at offset 9, expected 10", func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 10), false); w.dataIn(1, 1, 9, make([]byte, 10), false) }},
		"offset wraps":        {"at offset 4294967295", func(w *wire) { w.dataIn(1, 0, 0xffffffff, make([]byte, 10), false) }},
		"beyond the end":      {"brings 101 bytes at offset 0, there is room for 100", func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 101), false) }},
		"short with status":   {"after 10 bytes of Data-In, 100 are due", func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 10), true) }},
		"short with response": {"after 0 bytes of Data-In, 100 are due", func(w *wire) { w.response(1, 0, 0, nil) }},
		"wrong residual":      {"after 0 bytes of Data-In, 60 are due", func(w *wire) { w.response(1, 0, 40, nil) }},
		"write without R2T":   {"only 0 of 100 bytes were asked for", func(w *wire) { w.response(2, 0, 0, nil) }},
		"write half asked":    {"before the command and its data were sent", func(w *wire) { w.r2t(2, 5, 0, 0, 50); w.response(2, 0, 0, nil) }},
		"R2T for read":        {"does not write", func(w *wire) { w.r2t(1, 5, 0, 0, 10) }},
		"R2T unknown":         {"not outstanding", func(w *wire) { w.r2t(7, 5, 0, 0, 10) }},
		"R2TSN":               {"R2TSN 1 of command 0x00000002, expected 0", func(w *wire) { w.r2t(2, 5, 1, 0, 10) }},
		"R2T of nothing":      {"R2T for 0 bytes", func(w *wire) { w.r2t(2, 5, 0, 0, 0) }},
		"R2T beyond the end":  {"asks for 10 bytes at 91, the command has 100", func(w *wire) { w.r2t(2, 5, 0, 91, 10) }},
		"R2T wraps":           {"asks for 10 bytes at 4294967295", func(w *wire) { w.r2t(2, 5, 0, 0xffffffff, 10) }},
		"R2T too long":        {"MaxBurstLength is 262144", func(w *wire) { w.r2t(2, 5, 0, 0, 262145) }},
		"R2T of another unit": {"for LUN 0x0002000000000000, the command has 0x0001000000000000", func(w *wire) { w.r2t(2, 5, 0, 0, 10); w.b[9] = 2 }},
		"R2T gap":             {"offset 10, the next in order is 0", func(w *wire) { w.r2t(2, 5, 0, 10, 10) }},
		"R2T too many":        {"more than 1 R2Ts", func(w *wire) { w.r2t(2, 5, 0, 0, 10); w.r2t(2, 6, 1, 10, 10) }},
		"R2T without tag":     {"without TargetTransferTag", func(w *wire) { w.r2t(2, 0xffffffff, 0, 0, 10) }},
		"O and U":             {"both overflow and underflow", func(w *wire) { w.response(1, 0, 100, nil); w.b[1] |= 0x06 }},
	} {
		t.Run(name, func(t *testing.T) {
			keys := defaultSettings
			keys.immediateData = false
			s, rec := newStream(t, keys)
			start(t, s, 1, iscsi.Read, make([]byte, 100))
			start(t, s, 2, iscsi.Write, make([]byte, 100))
			drain(s, 1<<20)
			w := &wire{keys: keys}
			c.send(w)
			err := feed(s, w.b, whole)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if rec.count != 0 {
				t.Errorf("session was told %v", rec.notes)
			}
		})
	}
}

// TestReceiveTolerates lists what looks odd and is right.
func TestReceiveTolerates(t *testing.T) {
	for name, send := range map[string]func(*wire){
		"error without data":          func(w *wire) { w.response(1, 2, 100, []byte("sense")) },
		"error without residual":      func(w *wire) { w.response(1, 2, 0, []byte("sense")) },
		"underflow":                   func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 60), false); w.response(1, 0, 40, nil) },
		"more data than residual":     func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 64), false); w.response(1, 0, 40, nil) },
		"nothing at all":              func(w *wire) { w.response(1, 0, 100, nil) },
		"empty Data-In with status":   func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 100), false); w.dataIn(1, 1, 100, nil, true) },
		"A bit":                       func(w *wire) { w.dataIn(1, 0, 0, make([]byte, 100), false); w.b[1] |= 0x40; w.response(1, 0, 0, nil) },
		"target failure without data": func(w *wire) { w.response(1, 0, 0, nil); w.b[2] = 1 },
		"write not taken":             func(w *wire) { w.response(2, 0, 100, nil) },
		"write refused":               func(w *wire) { w.response(2, 2, 0, []byte("sense")) },
	} {
		t.Run(name, func(t *testing.T) {
			keys := defaultSettings
			keys.immediateData = false
			c, rec := newStream(t, keys)
			start(t, c, 1, iscsi.Read, make([]byte, 100))
			start(t, c, 2, iscsi.Write, make([]byte, 100))
			drain(c, 1<<20)
			w := &wire{keys: keys}
			send(w)
			if err := feed(c, w.b, whole); err != nil {
				t.Fatal(err)
			}
			if len(rec.notes) != 1 || rec.notes[0].bhs.Opcode() != pdu.OpSCSIResponse {
				t.Errorf("session was told %v", rec.notes)
			}
		})
	}
}

// TestDigests flips each byte of a stream with digests: every one must be noticed.
func TestDigests(t *testing.T) {
	zeros := make([]byte, 32)
	d := make([]byte, 4)
	if putDigest(d, checksum(0, zeros)); hex.EncodeToString(d) != "aa36918a" { // RFC 3720 appendix B.4
		t.Errorf("digest of 32 zero bytes is %x", d)
	}
	keys := defaultSettings
	keys.headerDigest, keys.dataDigest = 4, 4
	make1 := func() *wire {
		w := &wire{keys: keys}
		w.dataIn(1, 0, 0, []byte("123456789"), false)
		w.response(1, 2, 0, []byte("sense"))
		return w
	}
	for i := range make1().b {
		c, rec := newStream(t, keys)
		start(t, c, 1, iscsi.Read, make([]byte, 100))
		drain(c, 1<<20)
		w := make1()
		w.b[i] ^= 0x10
		err := feed(c, w.b, whole)
		if err == nil && len(rec.notes) > 0 {
			t.Errorf("byte %d: not noticed", i)
		}
		if err != nil && !strings.Contains(err.Error(), "digest") {
			t.Errorf("byte %d: %v", i, err)
		}
	}
}
