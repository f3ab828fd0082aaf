package iscsi

import (
	"context"
	"fmt"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// Exchange is the full feature phase of a discovery session: text and logout, one request at a time.
type Exchange struct {
	port      Port
	segment   int // bytes of text that the target takes in one PDU
	itt       uint32
	cmdSN     uint32
	expStatSN uint32
}

// NewExchange goes on where Login has ended.
func NewExchange(port Port, result *login.Result) *Exchange {
	segment := int(min(result.Keys.TargetMaxRecvDataSegmentLength, maxTextSegment))
	return &Exchange{port: port, segment: max(segment, 1), itt: 1, cmdSN: result.CmdSN, expStatSN: result.ExpStatSN}
}

// Bounds of an exchange of texts, in bytes and PDUs, and of the pings that may come in between.
const (
	maxTextSegment = 8192 // of ours in one PDU: what every transport carries
	maxText        = 1 << 20
	maxParts       = 4096
	maxPings       = 16
)

// Text asks one question, as in SendTargets=All, and returns the answer: see [Exchange.Ask]. A target that does not want to answer is an error.
func (x *Exchange) Text(ctx context.Context, key, value string) (pdu.Keys, error) {
	answer, err := x.Ask(ctx, pdu.Keys{{Name: key, Value: value}})
	if err != nil {
		return nil, err
	}
	if v, ok := answer.Get(key); ok && (v == "Reject" || v == "NotUnderstood" || v == "Irrelevant") {
		return nil, fmt.Errorf("target answers %s=%s", key, v)
	}
	return answer, nil
}

// Ask sends keys and returns the answer. Both may be longer than one PDU (RFC 7143 sections 6.2, 11.10 and 11.11): what does not fit goes in
// parts, each of which the target answers by an empty response, and a target that has more to say is asked for it by empty requests.
//
// Errors: *[pdu.ProtocolError], *[RejectError], [ErrTimeout], [ErrTargetAsked] when the target ends the session meanwhile; else what the
// transport says.
func (x *Exchange) Ask(ctx context.Context, question pdu.Keys) (pdu.Keys, error) {
	pending := question.Append(nil)
	var text []byte
	ttt, lun := pdu.ReservedTag, uint64(0)
	for range maxParts {
		data := pending[:min(len(pending), x.segment)]
		pending = pending[len(data):]
		more := len(pending) > 0
		var bhs pdu.BHS
		request := pdu.NewTextRequest(&bhs)
		request.SetFinal(!more)
		request.SetContinue(more)
		request.SetLUN(lun)
		request.SetInitiatorTaskTag(x.itt)
		request.SetTargetTransferTag(ttt)
		request.SetCmdSN(x.cmdSN)
		request.SetExpStatSN(x.expStatSN)
		request.SetDataSegmentLength(len(data))
		x.cmdSN++
		answer, part, err := x.exchange(ctx, "text request", &bhs, data, pdu.OpTextResponse)
		if err != nil {
			return nil, err
		}
		response := pdu.AsTextResponse(answer)
		if more && (len(part) > 0 || response.Final() || response.Continue()) {
			return nil, violation("6.2", "target answers before our text is complete")
		}
		text = append(text, part...)
		if response.Final() {
			x.itt++
			return pdu.DecodeKeys(text)
		}
		if len(text) > maxText {
			return nil, violation("11.11", "text answer of more than %d bytes", maxText)
		}
		if ttt, lun = response.TargetTransferTag(), response.LUN(); ttt == pdu.ReservedTag {
			return nil, violation("11.11.4", "text answer that goes on, but without a Target Transfer Tag")
		}
	}
	return nil, violation("6.2", "no end of the text after %d requests", maxParts)
}

// Logout ends the session.
func (x *Exchange) Logout(ctx context.Context) error {
	var bhs pdu.BHS
	request := pdu.NewLogoutRequest(&bhs, pdu.CloseSession)
	request.SetImmediate(true)
	request.SetInitiatorTaskTag(x.itt)
	request.SetCmdSN(x.cmdSN)
	request.SetExpStatSN(x.expStatSN)
	answer, _, err := x.exchange(ctx, "logout request", &bhs, nil, pdu.OpLogoutResponse)
	if err != nil {
		return err
	}
	if r := pdu.AsLogoutResponse(answer).Response(); r != pdu.LogoutSuccess {
		return fmt.Errorf("target refuses logout: %v", r)
	}
	return nil
}

// exchange sends a request and waits for what answers it. Pings of the target in between are answered: nothing else may come in a discovery
// session (RFC 7143 section 7.4.3), and even they should not.
func (x *Exchange) exchange(ctx context.Context, what string, bhs *pdu.BHS, data []byte, want pdu.Opcode) (*pdu.BHS, []byte, error) {
	request, text := bhs, data
	for range maxPings {
		answer, part, err := x.port.Exchange(ctx, request, text, false)
		if err != nil {
			return nil, nil, exchangeError(what, err)
		}
		if err := answer.Valid(pdu.FromTarget, len(part)); err != nil {
			return nil, nil, fmt.Errorf("answer to %s: %w", what, err)
		}
		switch answer.Opcode() {
		case pdu.OpNOPIn:
			if n := pdu.AsNOPIn(answer); n.InitiatorTaskTag() == noTag && n.TargetTransferTag() != noTag {
				request, text = x.pong(n), nil
				continue
			}
		case pdu.OpReject:
			rejected := &RejectError{Reason: pdu.AsReject(answer).Reason()}
			if h := pdu.RejectedHeader(part); h != nil {
				rejected.What, rejected.Header = h.Opcode(), true
			}
			return nil, nil, rejected
		case pdu.OpAsyncMessage:
			a := pdu.AsAsyncMessage(answer)
			return nil, nil, fmt.Errorf("%s: %w", what, &TargetEndError{Event: a.Event(), Time2Wait: a.Time2Wait()})
		}
		if answer.Opcode() != want || answer.InitiatorTaskTag() != bhs.InitiatorTaskTag() {
			return nil, nil, violation("11.2.1.8", "%v with tag %#08x answers %s with tag %#08x", answer.Opcode(), answer.InitiatorTaskTag(), what, bhs.InitiatorTaskTag())
		}
		x.expStatSN = answer.StatSN() + 1
		return answer, part, nil
	}
	return nil, nil, violation("7.4.3", "%d pings instead of an answer to %s", maxPings, what)
}

// pong answers a ping of the target.
func (x *Exchange) pong(n pdu.NOPIn) *pdu.BHS {
	bhs := new(pdu.BHS)
	o := pdu.NewNOPOut(bhs)
	o.SetImmediate(true)
	o.SetLUN(n.LUN())
	o.SetInitiatorTaskTag(noTag)
	o.SetTargetTransferTag(n.TargetTransferTag())
	o.SetCmdSN(x.cmdSN)
	o.SetExpStatSN(x.expStatSN)
	return bhs
}
