package iscsi

import (
	"context"
	"errors"
	"fmt"

	"iserd.org/iserd/iscsi/login"
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
