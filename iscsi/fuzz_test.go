package iscsi

import (
	"errors"
	"testing"
	"time"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// act is one step of FuzzSession: what the owner does, or a PDU of the target.
//
//	0x00..0x0f  submit a command        0x10..0x1f  task management        0x20..0x27  let time pass     0x28..0x2f  log out
//	0x30..0x3f  flush                   0x40..0xff  a PDU: bits 0 to 2 put StatSN, the tag and the window right; a length, data, a header
func (s *fuzzed) act(b []byte) (rest []byte) {
	op := b[0]
	b = b[1:]
	switch {
	case op < 0x10:
		t := s.task(Direction(op%3), int(op)*64)
		t.LUN = scsi.NewLUN(uint16(op % 2))
		s.submitted = append(s.submitted, t)
		s.Submit(t)
	case op < 0x20:
		r := TaskManagement{Function: pdu.TaskFunction(op % 10), LUN: scsi.NewLUN(uint16(op % 2))}
		if n := len(s.submitted); n > 0 {
			r.Task = s.submitted[int(op)%n]
		}
		s.asked++
		s.Manage(r, func(error) { s.answered++ })
	case op < 0x28:
		s.now = s.now.Add(time.Duration(op%8) * time.Second)
		s.Tick(s.now)
	case op < 0x30:
		s.asked++
		s.Logout(func(error) { s.answered++ })
	case op < 0x40:
		s.Flush()
	default:
		if len(b) < 1+pdu.HeaderLength {
			return nil
		}
		n := min(int(b[0]), len(b)-1-pdu.HeaderLength)
		var h pdu.BHS
		copy(h[:], b[1:])
		data := b[1+pdu.HeaderLength:][:n]
		if op&1 != 0 {
			h.SetStatSN(s.expStatSN)
		}
		if last := len(s.w.sent); op&2 != 0 && last > 0 {
			h.SetInitiatorTaskTag(s.w.sent[int(h[16])%last].InitiatorTaskTag())
		}
		if op&4 != 0 {
			h.SetExpCmdSN(s.cmdSN)
			h.SetMaxCmdSN(s.cmdSN + uint32(h[35]&7))
		}
		h.SetDataSegmentLength(n)
		if h.Valid(pdu.FromTarget, n) == nil { // a Datamover passes nothing else on
			s.w.up.ControlNotify(&h, data)
		}
		b = b[1+pdu.HeaderLength+n:]
	}
	return b
}

type fuzzed struct {
	script
	now             time.Time
	submitted       []*Task
	asked, answered int
}

// FuzzSession lets a session meet any PDUs, in any order with what its owner does. Whatever comes, each task and each question is answered
// exactly once, nothing is counted wrong, and the end of the connection is told once.
func FuzzSession(f *testing.F) {
	respond := func(op pdu.Opcode, flags byte) []byte {
		b := make([]byte, 2+pdu.HeaderLength)
		b[0] = 0x40 | flags
		b[2], b[3] = byte(op), 0x80
		return b
	}
	cat := func(parts ...[]byte) (b []byte) {
		for _, p := range parts {
			b = append(b, p...)
		}
		return b
	}
	f.Add(cat([]byte{1, 2, 3}, respond(pdu.OpSCSIResponse, 7), respond(pdu.OpSCSIResponse, 7)))
	f.Add(cat([]byte{1, 2, 3, 0x15, 0x11}, respond(pdu.OpTaskResponse, 7), respond(pdu.OpSCSIResponse, 7)))
	f.Add(cat([]byte{0x27}, respond(pdu.OpNOPIn, 7), []byte{0x27, 0x27, 0x27}))
	f.Add(cat([]byte{1, 0x28}, respond(pdu.OpLogoutResponse, 7)))
	logout := respond(pdu.OpAsyncMessage, 5)
	logout[2+36], logout[2+43] = byte(pdu.AsyncLogoutRequest), 4
	f.Add(cat([]byte{1}, logout, []byte{0x22, 0x22}, respond(pdu.OpLogoutResponse, 7), []byte{0x22}))
	reject := append(respond(pdu.OpReject, 5), make([]byte, pdu.HeaderLength)...)
	reject[1], reject[4] = pdu.HeaderLength, byte(pdu.RejectTooManyImmediate)
	f.Add(cat([]byte{0x27}, reject, []byte{0x27}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 4096 {
			return // what waits is searched from its head: that takes time and shows nothing
		}
		s := &fuzzed{now: start}
		s.script = script{t: t, w: &wire{limits: Limits{Outstanding: 16, Unordered: len(b)%2 == 0}}}
		result := &login.Result{ExpStatSN: 7, CmdSN: 1, ExpCmdSN: 1, MaxCmdSN: 4}
		result.Keys.TargetMaxOutstandingUnexpected = uint32(len(b) % 3)
		var err error
		if s.Session, err = NewSession(s.w, result, Options{
			PingInterval: 5 * time.Second, PingTimeout: 15 * time.Second, Down: func(err error) { s.downed = append(s.downed, err) },
		}, start); err != nil {
			t.Fatal(err)
		}
		for len(b) > 0 {
			b = s.act(b)
			flying := 0
			for _, k := range s.slots {
				if k != nil {
					flying++
				}
			}
			if flying != s.InFlight() || flying+len(s.free) != len(s.slots) {
				t.Fatalf("%d slots in use, %d in flight, %d free of %d", flying, s.InFlight(), len(s.free), len(s.slots))
			}
			if s.State() == StateCleanupWait {
				s.w.up.ConnectionTerminateNotify(s.w.ended)
			}
		}
		s.Terminate(errors.New("end of the input"))
		s.w.up.ConnectionTerminateNotify(s.w.ended)
		if len(s.done) != len(s.submitted) || s.answered != s.asked || len(s.downed) != 1 || s.State() != StateFree {
			t.Fatalf("%d of %d tasks ended, %d of %d questions answered, down %v", len(s.done), len(s.submitted), s.answered, s.asked, s.downed)
		}
		seen := map[*Task]bool{}
		for _, k := range s.done {
			if seen[k] {
				t.Fatal("a task ended twice")
			}
			seen[k] = true
		}
	})
}
