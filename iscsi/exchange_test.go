package iscsi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// talk is a Port whose target says what the test has written down: one answer for each request.
type talk struct {
	t       *testing.T
	answers []func(b *pdu.BHS) string // makes the header, returns the data; each starts as the right answer to the request
	asked   []pdu.BHS
	text    string
}

func (p *talk) Exchange(_ context.Context, bhs *pdu.BHS, data []byte, _ bool) (*pdu.BHS, []byte, error) {
	if err := bhs.Valid(pdu.FromInitiator, len(data)); err != nil || bhs.DataSegmentLength() != len(data) {
		p.t.Errorf("request %v: %v", bhs, err)
	}
	p.asked, p.text = append(p.asked, *bhs), p.text+string(data)
	if len(p.answers) == 0 {
		return nil, nil, context.DeadlineExceeded
	}
	b := new(pdu.BHS)
	if bhs.Opcode() == pdu.OpLogoutRequest {
		pdu.NewLogoutResponse(b, pdu.LogoutSuccess)
	} else {
		pdu.NewTextResponse(b).SetFinal(true)
	}
	b.SetInitiatorTaskTag(bhs.InitiatorTaskTag())
	if bhs.Opcode() == pdu.OpNOPOut {
		b.SetInitiatorTaskTag(p.asked[0].InitiatorTaskTag()) // what was asked before
	}
	b.SetStatSN(uint32(100 + len(p.asked)))
	answer := p.answers[0](b)
	p.answers = p.answers[1:]
	b.SetDataSegmentLength(len(answer))
	return b, []byte(answer), nil
}
func (p *talk) LocalAddr() string { return "" }
func (p *talk) Close() error      { return nil }

func newTalk(t *testing.T, segment uint32, answers ...func(*pdu.BHS) string) (*talk, *Exchange) {
	p := &talk{t: t, answers: answers}
	r := &login.Result{CmdSN: 5, ExpStatSN: 100}
	r.Keys.TargetMaxRecvDataSegmentLength = segment
	return p, NewExchange(p, r)
}

func says(text string) func(*pdu.BHS) string { return func(*pdu.BHS) string { return text } }

// goesOn is a response with more to come.
func goesOn(ttt uint32, lun uint64, cont bool, text string) func(*pdu.BHS) string {
	return func(b *pdu.BHS) string {
		r := pdu.AsTextResponse(b)
		r.SetFinal(false)
		r.SetContinue(cont)
		r.SetTargetTransferTag(ttt)
		r.SetLUN(lun)
		return text
	}
}

func TestAsk(t *testing.T) {
	p, x := newTalk(t, 8192, says("A=1\x00B=2\x00"), says(""))
	keys, err := x.Text(t.Context(), "SendTargets", "All")
	if err != nil || keys.String() != "A=1 B=2" || p.text != "SendTargets=All\x00" {
		t.Fatalf("%v, %v; asked %q", keys, err, p.text)
	}
	r := pdu.AsTextRequest(&p.asked[0])
	if !r.Final() || r.Continue() || r.TargetTransferTag() != noTag || r.CmdSN() != 5 || r.ExpStatSN() != 100 || r.InitiatorTaskTag() == noTag {
		t.Errorf("request %v", &p.asked[0])
	}
	if err := x.Logout(t.Context()); err != nil {
		t.Error(err)
	}
	if l := pdu.AsLogoutRequest(&p.asked[1]); l.InitiatorTaskTag() == r.InitiatorTaskTag() || l.CmdSN() != 6 || l.ExpStatSN() != 102 || !l.Immediate() {
		t.Errorf("request %v", &p.asked[1])
	}
}

// A question longer than one PDU goes in parts, and an answer longer than one is asked for: tag and LUN are copied, the task tag stays.
func TestLongText(t *testing.T) {
	long := strings.Repeat("x", 1000)
	p, x := newTalk(t, 512,
		goesOn(7, 11, false, ""), goesOn(8, 12, false, ""), goesOn(9, 13, true, "A=1\x00B"), goesOn(10, 14, false, "=2\x00"), says("C=3\x00"))
	keys, err := x.Text(t.Context(), "K", long)
	if err != nil || keys.String() != "A=1 B=2 C=3" || p.text != "K="+long+"\x00" {
		t.Fatalf("%v, %v; asked %d bytes", keys, err, len(p.text))
	}
	for i, want := range []struct {
		final, cont bool
		ttt         uint32
		lun         uint64
		n           int
	}{{false, true, noTag, 0, 512}, {true, false, 7, 11, 491}, {true, false, 8, 12, 0}, {true, false, 9, 13, 0}, {true, false, 10, 14, 0}} {
		r := pdu.AsTextRequest(&p.asked[i])
		if r.Final() != want.final || r.Continue() != want.cont || r.TargetTransferTag() != want.ttt || r.LUN() != want.lun ||
			r.DataSegmentLength() != want.n || r.InitiatorTaskTag() != p.asked[0].InitiatorTaskTag() || r.CmdSN() != 5+uint32(i) || r.Immediate() {
			t.Errorf("request %d: %v", i, &p.asked[i])
		}
	}
}

func TestAskPinged(t *testing.T) {
	ping := func(b *pdu.BHS) string {
		n := pdu.NewNOPIn(b)
		n.SetTargetTransferTag(77)
		n.SetLUN(4)
		n.SetStatSN(100)
		return ""
	}
	p, x := newTalk(t, 8192, ping, ping, says("A=1\x00"))
	if keys, err := x.Text(t.Context(), "SendTargets", "All"); err != nil || keys.String() != "A=1" {
		t.Fatalf("%v, %v", keys, err)
	}
	for _, b := range p.asked[1:] {
		if o := pdu.AsNOPOut(&b); o.TargetTransferTag() != 77 || o.LUN() != 4 || o.InitiatorTaskTag() != noTag || !o.Immediate() || o.ExpStatSN() != 100 {
			t.Errorf("answer to the ping: %v", &b)
		}
	}
}

func TestAskErrors(t *testing.T) {
	forever := make([]func(*pdu.BHS) string, maxParts)
	pings := make([]func(*pdu.BHS) string, maxPings)
	for i := range forever {
		forever[i] = goesOn(1, 0, false, "")
	}
	for i := range pings {
		pings[i] = func(b *pdu.BHS) string { pdu.NewNOPIn(b).SetTargetTransferTag(1); return "" }
	}
	for _, c := range []struct {
		name    string
		answers []func(*pdu.BHS) string
		want    any
	}{
		{"no answer", nil, ErrTimeout},
		{"reject", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.NewReject(b, 5); return "" }}, new(*RejectError)},
		{"end", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.NewAsyncMessage(b, pdu.AsyncDropAll); return "" }}, ErrTargetAsked},
		{"another PDU", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.NewSCSIResponse(b); return "" }}, new(*pdu.ProtocolError)},
		{"another tag", []func(*pdu.BHS) string{func(b *pdu.BHS) string { b.SetInitiatorTaskTag(0); return "" }}, new(*pdu.ProtocolError)},
		{"ping without a tag", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.NewNOPIn(b); return "" }}, new(*pdu.ProtocolError)},
		{"PDU of ours", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.NewTextRequest(b); return "" }}, new(*pdu.ProtocolError)},
		{"F and C", []func(*pdu.BHS) string{func(b *pdu.BHS) string { pdu.AsTextResponse(b).SetContinue(true); return "" }}, new(*pdu.ProtocolError)},
		{"no tag to go on", []func(*pdu.BHS) string{goesOn(noTag, 0, true, "A")}, new(*pdu.ProtocolError)},
		{"no end", forever, new(*pdu.ProtocolError)},
		{"too long", []func(*pdu.BHS) string{goesOn(1, 0, true, strings.Repeat("x", maxText+1))}, new(*pdu.ProtocolError)},
		{"cut off", []func(*pdu.BHS) string{says("A=1")}, new(*pdu.ProtocolError)},
		{"pings only", pings, new(*pdu.ProtocolError)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, x := newTalk(t, 8192, c.answers...)
			keys, err := x.Text(t.Context(), "SendTargets", "All")
			if sentinel, ok := c.want.(error); ok && !errors.Is(err, sentinel) {
				t.Errorf("%v, %v", keys, err)
			} else if !ok && !errors.As(err, c.want) {
				t.Errorf("%v, %v", keys, err)
			}
		})
	}
	for name, answer := range map[string]func(*pdu.BHS) string{"text": goesOn(1, 0, false, "A=1\x00"), "end": says(""), "more": goesOn(1, 0, true, "")} {
		_, x := newTalk(t, 512, answer)
		var broken *pdu.ProtocolError
		if _, err := x.Text(t.Context(), "K", strings.Repeat("x", 1000)); !errors.As(err, &broken) {
			t.Errorf("%s in the middle of our text: %v", name, err)
		}
	}
	_, x := newTalk(t, 512, func(b *pdu.BHS) string {
		pdu.NewLogoutResponse(b, pdu.LogoutCleanupFailed).SetInitiatorTaskTag(1)
		return ""
	})
	if err := x.Logout(t.Context()); err == nil || !strings.Contains(fmt.Sprint(err), "refuses") {
		t.Errorf("logout: %v", err)
	}
}
