package dataplane

import (
	"sync"
	"testing"

	"iserd.org/iserd/internal/ipc"
)

// What the control plane is told last about a group is what is true, however many tell it at once.
func TestNotifyOrder(t *testing.T) {
	p := newPlane(t)
	g := p.emptyGroup(ipc.LoginRequest{Group: "g", Target: "iqn.2003-01.org.example:t"})
	defer g.cancel()
	for round := range 200 {
		var all sync.WaitGroup
		for range 4 {
			all.Add(1)
			go func() {
				defer all.Done()
				g.mu.Lock()
				g.failed++
				g.tpgt = uint16(g.failed)
				g.mu.Unlock()
				p.notifyGroup(g)
			}()
		}
		all.Wait()
		var last uint16
		for len(p.events) > 0 {
			last = (<-p.events).body.(*ipc.Group).TPGT
		}
		if want := uint16(4 * (round + 1)); last != want {
			t.Fatalf("round %d: the last word is %d, the truth is %d", round, last, want)
		}
	}
}
