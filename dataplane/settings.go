package dataplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/settings"
	"iserd.org/iserd/iscsi/login"
)

// applySettings puts what the user has set into the proposal that the transport has made.
func applySettings(c *login.Config, r *ipc.LoginRequest) {
	s := &r.Settings
	c.Auth = settings.Auth(s, r.Secret, r.TargetSecret, r.InitiatorName)
	k := c.Keys
	number := func(to *uint32, v *int) {
		if v != nil {
			*to = uint32(*v)
		}
	}
	number(&k.MaxBurstLength, s.MaxBurstLength)
	number(&k.FirstBurstLength, s.FirstBurstLength)
	k.FirstBurstLength = min(k.FirstBurstLength, k.MaxBurstLength)
	number(&k.MaxOutstandingR2T, s.MaxOutstandingR2T)
	k.DefaultTime2Wait = api.SecondsOr(s.DefaultTime2Wait, k.DefaultTime2Wait)
	k.DefaultTime2Retain = api.SecondsOr(s.DefaultTime2Retain, k.DefaultTime2Retain)
	if s.ImmediateData != nil {
		k.ImmediateData = *s.ImmediateData
	}
	if c.Transport != login.TCP {
		return
	}
	// Over iSER: digests are RDMA's affair, segments are as large as the buffers, and nothing goes out unsolicited but immediate data.
	number(&k.MaxRecvDataSegmentLength, s.MaxRecvDataSegmentLength)
	if s.InitialR2T != nil {
		k.InitialR2T = *s.InitialR2T
	}
	c.HeaderDigest, c.DataDigest = digests(s.HeaderDigest), digests(s.DataDigest)
}

// digests reads a list such as "CRC32C,None". Empty means the default.
func digests(list string) (out []login.Digest) {
	for name := range strings.SplitSeq(list, ",") {
		switch name {
		case "CRC32C":
			out = append(out, login.DigestCRC32C)
		case "None":
			out = append(out, login.DigestNone)
		}
	}
	return out
}

// afterSetting runs f after a time that the user may have set to be without end. The returned function stops that.
func afterSetting(v *int, fallback time.Duration, f func()) (stop func()) {
	if v != nil && *v == api.Forever {
		return func() {}
	}
	t := time.AfterFunc(api.SecondsOr(v, fallback), f)
	return func() { t.Stop() }
}

// maxRedirects is how many times one login is sent on. Nobody has more than one level of it; a circle is found before.
const maxRedirects = 8

// login makes a session by a route, at its portal or where the target says it is instead (RFC 7143 section 11.13.5, status class 1). A
// temporary move counts for this login only: after the loss of the session the first portal is asked again. A permanent one is remembered, if the
// login there succeeds. When the place to which the target has moved cannot be reached, the first portal is asked as well: it may know better.
func (p *path) login(ctx context.Context, r ipc.Route) error {
	g := p.group
	g.mu.Lock()
	moved := g.movedTo
	g.mu.Unlock()
	if moved == "" || r.Portal != g.request.Portal {
		return p.loginFrom(ctx, r)
	}
	err := p.loginFrom(ctx, ipc.Route{Portal: moved, Transport: r.Transport})
	var refused *login.LoginError
	if err == nil || errors.As(err, &refused) && refused.Class != 0 || ctx.Err() != nil {
		return err
	}
	if second := p.loginFrom(ctx, r); second != nil {
		return fmt.Errorf("%w (and at %s, to where the target had moved: %v)", second, moved, err)
	}
	return nil
}

// loginFrom follows redirections that begin at a portal. Of several addresses the first that can be reached counts.
func (p *path) loginFrom(ctx context.Context, r ipc.Route) error {
	g := p.group
	begin, portal, transport := r.Portal, r.Portal, r.Transport
	seen := []string{portal}
	home := portal // as far as every move was for good
	forGood := true
	var others []string // further addresses of the last redirection
	for {
		err := p.loginAt(ctx, ipc.Route{Portal: portal, Transport: transport})
		if err == nil {
			break
		}
		if len(seen) > 1 {
			err = fmt.Errorf("redirected to %s: %w", portal, err)
		}
		var refused *login.LoginError
		if !errors.As(err, &refused) || refused.Class != 1 {
			if len(others) == 0 || refused != nil && refused.Class != 0 || ctx.Err() != nil {
				return err
			}
			portal, others = others[0], others[1:]
			continue
		}
		r, ok := refused.Redirection()
		if !ok {
			return err
		}
		var next []string
		for _, a := range r.Addresses {
			q, perr := api.ParsePortal(a.HostPort())
			switch {
			case perr != nil:
				err = fmt.Errorf("%w: %w", err, perr)
			case slices.Contains(seen, q.String()):
				err = fmt.Errorf("%w: redirected in a circle: %s", err, strings.Join(append(seen, q.String()), ", "))
			case len(seen) > maxRedirects:
				return fmt.Errorf("%w: redirected more than %d times", err, maxRedirects)
			default:
				next = append(next, q.String())
			}
		}
		if len(next) == 0 {
			return err
		}
		portal, others = next[0], next[1:]
		seen = append(seen, next...)
		if forGood = forGood && r.Permanent; forGood {
			home = portal
		}
		g.log(p).Infof("the target sends us to %s: %v", portal, err)
	}
	if home != portal && forGood {
		home = portal // another of the addresses to which it has moved
	}
	if home == g.request.Portal {
		home = ""
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if begin == g.request.Portal || begin == g.movedTo { // what another portal says is not about the first
		g.movedTo = home
	}
	return nil
}
