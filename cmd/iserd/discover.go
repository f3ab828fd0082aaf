package main

import (
	"context"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/discovery"
	"iserd.org/iserd/internal/failure"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
)

// discoverer gives the control plane package discovery, with the names of failures.
type discoverer struct{}

func (discoverer) SendTargets(ctx context.Context, q daemon.Question) ([]daemon.Found, error) {
	recs, err := discovery.SendTargets(ctx, discovery.Request{
		Portal: q.Portal, Transport: ipc.Transport(q.Transport), InitiatorName: q.InitiatorName, Timeout: q.Timeout,
		Auth: settings.Auth(&q.Settings, q.Secrets.Secret, q.Secrets.TargetSecret, q.InitiatorName), Way: settings.BindingOf(&q.Settings),
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
