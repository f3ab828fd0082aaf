package iscsi

import (
	"context"
	"errors"
	"fmt"

	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// Login brings a connection into the full feature phase. It runs on an ordinary goroutine and takes as long as ctx lets it.
//
// Errors: *[login.LoginError] when the target refused, *[pdu.ProtocolError] when it broke the protocol, [ErrTimeout] when it did not answer
// in time; else what the transport says.
func Login(ctx context.Context, port Port, config login.Config) (*login.Result, error) {
	machine, err := login.New(config)
	if err != nil {
		return nil, err
	}
	for request := machine.Start(); ; {
		bhs, text, err := port.Exchange(ctx, &request.BHS, request.Text, request.Final)
		if err != nil {
			if err = exchangeError("login request", err); errors.Is(err, ErrTimeout) {
				return nil, err
			}
			return nil, machine.Lost(err)
		}
		next, result, err := machine.Step(bhs, text)
		if err != nil {
			return nil, err
		}
		if result != nil {
			return result, nil
		}
		request = next
	}
}

// exchangeError says what a broken exchange was waiting for.
func exchangeError(what string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: no answer to %s in time", ErrTimeout, what)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Exchange is the full feature phase of a discovery session: text and logout, one request at a time.
type Exchange struct {
	port      Port
	itt       uint32
	cmdSN     uint32
	expStatSN uint32
}

// NewExchange goes on where Login has ended.
func NewExchange(port Port, result *login.Result) *Exchange {
	return &Exchange{port: port, itt: 1, cmdSN: result.CmdSN, expStatSN: result.ExpStatSN}
}

// maxText bounds a text answer of several PDUs, bytes.
const maxText = 1 << 20

// Text asks one question, as in SendTargets=All, and returns the answer, put together from as many PDUs as it takes (RFC 7143 section 11.10).
func (x *Exchange) Text(ctx context.Context, key, value string) (pdu.Keys, error) {
	question := pdu.Keys{{Name: key, Value: value}}
	data := question.Append(nil)
	var text []byte
	ttt := uint32(pdu.ReservedTag)
	for {
		var bhs pdu.BHS
		request := pdu.NewTextRequest(&bhs)
		request.SetFinal(true)
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
		text = append(text, part...)
		response := pdu.AsTextResponse(answer)
		if response.Final() && !response.Continue() {
			break
		}
		if len(text) > maxText {
			return nil, violation("11.11", "text answer of more than %d bytes", maxText)
		}
		if ttt = response.TargetTransferTag(); ttt == pdu.ReservedTag {
			return nil, violation("11.11.3", "text answer that goes on, but without a Target Transfer Tag")
		}
		data = nil
	}
	x.itt++
	return pdu.DecodeKeys(text)
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

// exchange sends a request and checks that the answer is one.
func (x *Exchange) exchange(ctx context.Context, what string, bhs *pdu.BHS, data []byte, want pdu.Opcode) (*pdu.BHS, []byte, error) {
	answer, part, err := x.port.Exchange(ctx, bhs, data, false)
	if err != nil {
		return nil, nil, exchangeError(what, err)
	}
	if err := answer.Valid(pdu.FromTarget, len(part)); err != nil {
		return nil, nil, fmt.Errorf("answer to %s: %w", what, err)
	}
	switch {
	case answer.Opcode() == pdu.OpReject:
		return nil, nil, &RejectError{Reason: pdu.AsReject(answer).Reason()}
	case answer.Opcode() != want || answer.InitiatorTaskTag() != bhs.InitiatorTaskTag():
		return nil, nil, violation("11.2.1", "%v with tag %#08x answers %s with tag %#08x", answer.Opcode(), answer.InitiatorTaskTag(), what, bhs.InitiatorTaskTag())
	}
	x.expStatSN = answer.StatSN() + 1
	return answer, part, nil
}
