//go:build cgo

package rdma

/*
#include "shim.h"
*/
import "C"

import "context"

// OnEvent has f called with each event after establishment, one at a time, from a goroutine of this package; CM events that came before
// are kept for the first f. f may call Close. A call that has begun when Close is called may end after it; no other follows.
func (c *Conn) OnEvent(f func(Event)) {
	if c.onEvent.Swap(&f) == nil {
		close(c.hasEvent)
	}
}

// runEvents delivers the CM's events until the channel is shut.
func (c *Conn) runEvents() {
	for {
		ev, err := c.ch.next(context.Background())
		if err != nil {
			return
		}
		e := Event{Kind: EventOther, Code: C.GoString(C.rdma_event_str(C.enum_rdma_cm_event_type(ev.event)))}
		switch C.enum_rdma_cm_event_type(ev.event) {
		case C.RDMA_CM_EVENT_DISCONNECTED:
			e.Kind = EventDisconnected
			// The QP is still in RTS on this side, and the peer waits for the answer to its disconnect request.
			c.Disconnect()
		case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
			e.Kind = EventDeviceRemoved
			c.markRemoved()
		case C.RDMA_CM_EVENT_ADDR_CHANGE:
			e.Kind = EventAddrChange
		case C.RDMA_CM_EVENT_TIMEWAIT_EXIT:
			e.Kind = EventTimewaitExit
		}
		c.deliver(e, true)
	}
}

// markRemoved remembers that the CM reported the removal of the adapter.
func (c *Conn) markRemoved() {
	removals.Store(true)
	if c.dev != nil {
		c.dev.removed.Store(true)
	}
}

// deliver calls the handler. Without one it waits for one, or drops e.
func (c *Conn) deliver(e Event, wait bool) {
	if wait {
		select {
		case <-c.hasEvent:
		case <-c.done:
		}
	}
	f := c.onEvent.Load()
	if f == nil {
		return
	}
	c.cb.Lock()
	defer c.cb.Unlock()
	if e.Kind == EventDeviceRemoved {
		if c.lost { // there are several sources of this news
			return
		}
		c.lost = true
	}
	select {
	case <-c.done:
	default:
		(*f)(e)
	}
}
