package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"iserd.org/iserd/api"
)

// Discover asks a portal for its targets. With transport auto it asks over RDMA and over TCP at the same time and merges: a Linux target lists
// only the portals of the transport that the question came over. One answer is enough; what became of the other question is a note.
//
// How the portal is asked is stored in a record of its own, see [Service.SetPortal].
func (s *Service) Discover(ctx context.Context, r api.DiscoverRequest) (api.TargetsReply, error) {
	return s.discover(ctx, r, api.Settings{})
}

// discover is Discover with settings for a portal that has no record.
func (s *Service) discover(ctx context.Context, r api.DiscoverRequest, fallback api.Settings) (api.TargetsReply, error) {
	reply := api.TargetsReply{Version: api.Version, Targets: []api.Target{}, Notes: []string{}}
	portal, err := api.ParsePortal(r.Portal)
	if err != nil {
		return reply, err
	}
	transport, err := api.CheckTransport(r.Transport)
	if err != nil {
		return reply, err
	}
	how, secrets, err := s.portalSettings(portal, r.Set, fallback)
	if err != nil {
		return reply, err
	}
	timeout := r.Timeout.Duration()
	if timeout == 0 {
		timeout = api.SecondsOr(how.LoginTimeout, s.Config().DiscoveryTimeout)
	}
	asked := []string{transport}
	if transport == api.TransportAuto {
		asked = []string{api.TransportISER, api.TransportTCP}
	}
	addr, err := resolve(ctx, portal, timeout)
	if err != nil {
		return reply, err
	}
	found := make([][]Found, len(asked))
	errs := make([]error, len(asked))
	var wg sync.WaitGroup
	for i, t := range asked {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			found[i], errs[i] = s.opt.Discoverer.SendTargets(ctx, Question{addr.String(), t, s.name, timeout, how, secrets})
		}()
	}
	wg.Wait()
	var answered []string
	for i, t := range asked {
		if errs[i] != nil {
			reply.Notes = append(reply.Notes, fmt.Sprintf("no answer over %s: %s", t, oneLine(errs[i])))
			continue
		}
		answered = append(answered, t)
		notes, err := merge(&reply.Targets, found[i], t)
		if err != nil {
			return reply, err
		}
		reply.Notes = append(reply.Notes, notes...)
	}
	if len(answered) == 0 {
		// The failure over TCP says more about a portal, unless the other question got as far as an answer.
		err := errs[len(errs)-1]
		if n := api.NameOf(errs[0]); n != api.ErrTransportUnavailable && n != api.ErrConnectionFailed && n != api.ErrTimeout {
			err = errs[0]
		}
		if len(asked) == 1 {
			return reply, api.Wrap(err, api.ErrConnectionFailed, "discover %s", portal)
		}
		return reply, api.Errorf(api.NameOf(err), "discover %s: over tcp: %s; over iser: %s", portal, oneLine(errs[1]), oneLine(errs[0]))
	}
	slices.SortFunc(reply.Targets, func(a, b api.Target) int {
		if c := strings.Compare(a.Target, b.Target); c != 0 {
			return c
		}
		if c := strings.Compare(a.Address, b.Address); c != 0 {
			return c
		}
		return int(a.Port) - int(b.Port)
	})
	if r.Save {
		if err := s.nodes.Merge(portal.String(), answered, reply.Targets, binding(how), time.Now()); err != nil {
			return reply, api.Wrap(err, api.ErrDatabase, "store records")
		}
		for i := range reply.Targets {
			reply.Targets[i].Saved = true
		}
		s.changed()
	}
	return reply, nil
}

// maxTargets bounds what one discovery can bring.
const maxTargets = 10000

// merge adds what was listed over one transport. Entries that break the rules for names are left out and noted.
func merge(targets *[]api.Target, found []Found, transport string) (notes []string, err error) {
	at := make(map[string]int, len(*targets))
	for i, t := range *targets {
		at[t.Target+" "+api.Portal{Address: t.Address, Port: t.Port}.String()] = i
	}
	for _, f := range found {
		if err := api.CheckName(f.Target); err != nil {
			notes = append(notes, "left out: "+oneLine(err))
			continue
		}
		p, err := api.ParsePortal(api.Portal{Address: f.Address, Port: f.Port}.String())
		if err != nil {
			notes = append(notes, "left out: "+oneLine(err))
			continue
		}
		key := f.Target + " " + p.String()
		if i, ok := at[key]; ok {
			if ts := &(*targets)[i].Transports; !slices.Contains(*ts, transport) {
				*ts = append(*ts, transport)
			}
			continue
		}
		if len(*targets) >= maxTargets {
			return notes, api.Errorf(api.ErrLimitsExceeded, "the portal lists more than %d targets", maxTargets)
		}
		at[key] = len(*targets)
		*targets = append(*targets, api.Target{Target: f.Target, Address: p.Address, Port: p.Port, TPGT: f.TPGT, Transports: []string{transport}})
	}
	return notes, nil
}
