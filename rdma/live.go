package rdma

import "sync/atomic"

// Counts are numbers of objects.
type Counts struct {
	Conns, Listeners, QPs, CQs, MRs, PDs int
}

// live counts the objects that exist, so that a test, or a diagnostic, sees a leak.
var live struct {
	conns, listeners, qps, cqs, mrs, pds atomic.Int64
}

// Live returns how many objects of this package are open in this process. After everything was closed it is the zero Counts.
func Live() Counts {
	return Counts{
		Conns:     int(live.conns.Load()),
		Listeners: int(live.listeners.Load()),
		QPs:       int(live.qps.Load()),
		CQs:       int(live.cqs.Load()),
		MRs:       int(live.mrs.Load()),
		PDs:       int(live.pds.Load()),
	}
}
