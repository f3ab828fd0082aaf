package scenario

import (
	"fmt"
	"runtime"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// Every CPU has its own queue and its own session: four jobs spread over the CPUs load all queues alike, and two units share the sessions.
func TestEveryCPU(t *testing.T) {
	for _, k := range []kind{kinds[0], kinds[1]} {
		t.Run(k.name, func(t *testing.T) {
			g := newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 32 * mib}, {Kind: targets.Ramdisk, Size: 32 * mib}})
			g.login(t)
			cpus := runtime.NumCPU()
			if n, err := g.sessions(); err != nil || n != cpus {
				t.Errorf("%d sessions (%v) for two units on %d CPUs", n, err, cpus)
			}
			var jobs []fioJob
			for i := range 4 {
				jobs = append(jobs, fioJob{name: fmt.Sprint("job", i), file: devices(t, g.name)[uint16(i%2)].Path, options: []string{
					"rw=randrw", "bs=4k", "iodepth=16", "ioengine=io_uring", "direct=1", "number_ios=2000", "size=32m",
					fmt.Sprintf("cpus_allowed=%d", (i/2)%cpus),
				}})
			}
			fio(t, jobs)
			per := make([]uint64, cpus)
			for _, d := range query[api.DevicesReply](t, "device", "stats", "--queues").Devices {
				if d.Target != g.name {
					continue
				}
				if len(d.QueueStats) != cpus {
					t.Fatalf("%s has %d queues on %d CPUs", d.Path, len(d.QueueStats), cpus)
				}
				var sum uint64
				for i, q := range d.QueueStats {
					per[i] += q.Reads + q.Writes
					sum += q.Reads + q.Writes
				}
				if sum != d.Stats.Reads+d.Stats.Writes {
					t.Errorf("%s: queues have %d requests, the device %d", d.Path, sum, d.Stats.Reads+d.Stats.Writes)
				}
			}
			least, most := per[0], per[0]
			for _, n := range per {
				least, most = min(least, n), max(most, n)
			}
			if least == 0 || (most-least)*5 > most {
				t.Errorf("requests by queue: %v; they differ by more than 20 %%", per)
			}
			g.logout(t)
		})
	}
}
