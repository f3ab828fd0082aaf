package dataplane

import (
	"errors"
	"fmt"

	"iserd.org/iserd/internal/mempool"
	"iserd.org/iserd/iser"
	"iserd.org/iserd/lu"
	"iserd.org/iserd/rdma"
)

// Memory of a reactor, bytes. Data of requests grows by poolStep, which holds eight requests of the largest size, up to what the configuration
// allows, and stays. Control commands have memory of their own, so that they find some while requests hold all of theirs; each of them
// reads a few KiB.
const (
	poolStep    = 4 << 20
	commandPool = 1 << 20
)

// openPools maps the first of the memory.
func (r *Reactor) openPools() error {
	pool, err := mempool.New(poolStep)
	if err != nil {
		return fmt.Errorf("%d MiB of buffers: %w", poolStep>>20, err)
	}
	if r.commands, err = mempool.New(commandPool); err != nil {
		pool.Close()
		return fmt.Errorf("%d MiB of buffers: %w", commandPool>>20, err)
	}
	r.pools = []*mempool.Pool{pool}
	r.memory = lu.NewMemory(pool, r.grow)
	return nil
}

// closePools unmaps all of it. No connection and no request is left.
func (r *Reactor) closePools() {
	for _, p := range r.pools {
		p.Close()
	}
	if r.commands != nil {
		r.commands.Close()
	}
	r.pools, r.commands = nil, nil
}

// grow has another pool made, on a goroutine: registering it with the adapters takes a while. It runs on the reactor.
func (r *Reactor) grow() bool {
	if (len(r.memory.Pools())+1)*poolStep > r.plane.config.PoolSize {
		return false
	}
	go func() {
		pool, err := r.addPool()
		if err != nil {
			r.plane.log.WithError(err).WithField("reactor", r.index).Warn("no more memory for requests: they wait for what there is")
			r.Do(func() { r.memory.Add(nil) })
			return
		}
		r.plane.log.WithField("reactor", r.index).Debugf("%d MiB more for requests", pool.Size()>>20)
	}()
	return true
}

// errEnding refuses what would hold on to a data plane that goes.
var errEnding = errors.New("the data plane is ending")

// addPool maps a pool, registers it with every adapter of the reactor, and hands it to the requests.
func (r *Reactor) addPool() (*mempool.Pool, error) {
	pool, err := mempool.New(poolStep)
	if err != nil {
		return nil, err
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	if r.ending {
		pool.Close()
		return nil, errEnding
	}
	mrs := make(map[*iser.Domain]*rdma.MR)
	for _, a := range r.devices {
		mr, err := a.domain.Register(pool.Region())
		if err != nil {
			for _, mr := range mrs {
				mr.Close()
			}
			pool.Close()
			return nil, err
		}
		mrs[a.domain] = mr
	}
	r.pools = append(r.pools, pool)
	r.Call(func() {
		for d, mr := range mrs {
			d.Keep(pool.Region().ID, mr)
		}
		r.memory.Add(pool)
	})
	return pool, nil
}

// regions are those of all pools. The caller holds r.lock.
func (r *Reactor) regions() []*mempool.Region {
	list := []*mempool.Region{r.commands.Region()}
	for _, p := range r.pools {
		list = append(list, p.Region())
	}
	return list
}
