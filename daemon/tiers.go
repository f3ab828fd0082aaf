package daemon

import (
	"fmt"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

const (
	enoughRequests = 100 // before a share of hits says something
	fewHits        = 50  // per cent
)

// tiers tells which ways the requests of a device can go, best first, and how many buffers are registered with it. Preconditions: Service.mu is held.
func tiers(d *device, ss *session) (list []api.Tier, buffers int) {
	shared := api.Tier{Name: api.TierShared, Reason: "the data plane is away"}
	switch dm := d.memory; {
	case dm == nil:
	case dm.why != "":
		shared.Reason = dm.why
	default:
		buffers = len(dm.index)
		shared.Possible, shared.Reason = true, "O_DIRECT requests from memory that is registered; see: iserctl buffer list"
		if buffers == 0 {
			shared.Reason = "once memory is registered; see: iserctl buffer add"
		}
	}
	registered := api.Tier{Name: api.TierRegistered, Possible: true, Reason: "every other request over RDMA"}
	tcp := api.Tier{Name: api.TierTCP, Reason: "the session is over RDMA"}
	if ss.group.Transport == ipc.TransportTCP {
		registered.Possible, registered.Reason = false, "the session is over TCP: "+ss.group.TransportReason
		tcp.Possible, tcp.Reason = true, ss.group.TransportReason
		if shared.Possible {
			shared.Possible, shared.Reason = false, "the session is over TCP; requests from memory that is registered go from there through the socket"
		}
	}
	return []api.Tier{shared, registered, tcp}, buffers
}

// tierRequests adds up the requests of queues by tier.
func tierRequests(qs []ipc.QueueStats) ipc.TierCount {
	var t ipc.TierCount
	for _, q := range qs {
		t.Shared += q.Requests.Shared
		t.Registered += q.Requests.Registered
		t.TCP += q.Requests.TCP
	}
	return t
}

// warningsLocked tells what a person should look into. Preconditions: s.mu is held.
func (s *Service) warningsLocked(d *device, qs []ipc.QueueStats) []string {
	dm := d.memory
	if dm == nil || !dm.used || d.Transport == ipc.TransportTCP { // what comes through a socket is not told apart
		return nil
	}
	now := tierRequests(qs)
	if now.Shared < dm.since.Shared || now.Registered < dm.since.Registered || now.TCP < dm.since.TCP {
		return nil // no answer from the data plane
	}
	hits, all := now.Shared-dm.since.Shared, now.Shared-dm.since.Shared+now.Registered-dm.since.Registered+now.TCP-dm.since.TCP
	if all < enoughRequests || hits*100 >= all*fewHits {
		return nil
	}
	return []string{fmt.Sprintf("memory is registered, and only %d of %d requests since then came from it; usual reasons: "+
		"the program uses the page cache (no O_DIRECT) or other memory; requests are merged (queue/nomerges is not 2) or a scheduler is set (queue/scheduler is not none); "+
		"requests are split at odd places (longer than queue/max_sectors_kb); the parts of a vectored request do not follow each other in one buffer", hits, all)}
}
