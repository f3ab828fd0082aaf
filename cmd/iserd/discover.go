package main

import (
	"context"
	"errors"
	"syscall"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/discovery"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/rdma"
)

// discoverer gives the control plane package discovery, with the names of failures.
type discoverer struct{}

func (discoverer) SendTargets(ctx context.Context, portal, transport, name string, timeout time.Duration) ([]daemon.Found, error) {
	recs, err := discovery.SendTargets(ctx, discovery.Request{
		Portal: portal, Transport: ipc.Transport(transport), InitiatorName: name, Timeout: timeout,
	})
	if err != nil {
		return nil, api.Errorf(nameOf(err), "%w", err)
	}
	out := make([]daemon.Found, 0, len(recs))
	for _, r := range recs {
		out = append(out, daemon.Found{Target: r.Target, Address: r.Address, Port: r.Port, TPGT: int(r.TPGT)})
	}
	return out, nil
}

// nameOf finds the name of a failure of the layers below discovery. The more particular come first.
func nameOf(err error) string {
	var refused *login.LoginError
	var violation *pdu.ProtocolError
	switch {
	case errors.As(err, &refused):
		switch {
		case errors.Is(err, login.ErrAuthFailed):
			return api.ErrAuthenticationFailed
		case refused.Retryable():
			return api.ErrLoginFailed
		}
		return api.ErrFatalLogin
	case errors.As(err, &violation):
		return api.ErrProtocolError
	case errors.Is(err, rdma.ErrNoDevice), errors.Is(err, rdma.ErrNotSupported), errors.Is(err, rdma.ErrRefused):
		return api.ErrTransportUnavailable
	case errors.Is(err, iscsi.ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, rdma.ErrTimeout), errors.Is(err, syscall.ETIMEDOUT):
		return api.ErrTimeout
	case errors.Is(err, context.Canceled):
		return api.ErrCancelled
	case errors.Is(err, rdma.ErrUnreachable), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ECONNRESET):
		return api.ErrConnectionFailed
	}
	return api.ErrConnectionFailed
}
