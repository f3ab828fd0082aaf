package main

import (
	"context"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/discovery"
	"iserd.org/iserd/internal/failure"
	"iserd.org/iserd/internal/ipc"
)

// discoverer gives the control plane package discovery, with the names of failures.
type discoverer struct{}

func (discoverer) SendTargets(ctx context.Context, portal, transport, name string, timeout time.Duration) ([]daemon.Found, error) {
	recs, err := discovery.SendTargets(ctx, discovery.Request{
		Portal: portal, Transport: ipc.Transport(transport), InitiatorName: name, Timeout: timeout,
	})
	if err != nil {
		return nil, api.Errorf(failure.Name(err, api.ErrConnectionFailed), "%w", err)
	}
	out := make([]daemon.Found, 0, len(recs))
	for _, r := range recs {
		out = append(out, daemon.Found{Target: r.Target, Address: r.Address, Port: r.Port, TPGT: int(r.TPGT)})
	}
	return out, nil
}
