package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/test/bench/plan"
)

// Idle time passes at once where guest time counts instructions: minutes cost nothing.
const (
	settle   = 30 * time.Second // after the login, until nothing is left to do
	idleTime = 10 * time.Minute
)

// measureIdle logs in and does nothing for a long time.
func (b *bench) measureIdle(ctx context.Context, c plan.Cell) (map[string]float64, string, error) {
	if err := b.site.need(ctx, wantOf(c)); err != nil {
		return nil, "", err
	}
	processes, err := b.processes(c)
	if err != nil {
		return nil, "", err
	}
	time.Sleep(settle)
	before, err := readIdle(processes)
	if err != nil {
		return nil, "", err
	}
	time.Sleep(idleTime)
	after, err := readIdle(processes)
	if err != nil {
		return nil, "", err
	}
	elapsed := after.at.Sub(before.at).Seconds()
	v := map[string]float64{
		plan.IdleSeconds:     elapsed,
		plan.CPUShare:        (after.cpu - before.cpu).Seconds() / elapsed,
		plan.Wakeups:         float64(after.wakeups-before.wakeups) / elapsed,
		plan.MachineShare:    max(0, 1-(after.idle-before.idle).Seconds()/elapsed),
		plan.MachineSwitches: float64(after.switches-before.switches) / elapsed,
		// A ping is a Send there and one back.
		plan.Pings: float64(after.sends-before.sends) / 2 / elapsed / float64(max(c.Targets, 1)),
	}
	var words []string
	for name, n := range after.byThread {
		if d := n - before.byThread[name]; d > 0 {
			words = append(words, fmt.Sprintf("%s %.2f/s", name, float64(d)/elapsed))
		}
	}
	return v, strings.Join(words, ", "), nil
}

// processes are those of the initiator, by name.
func (b *bench) processes(c plan.Cell) (map[string]int, error) {
	if c.Initiator.Ours() {
		return map[string]int{"iserd": b.site.iserd.cmd.Process.Pid, "iserd-io": b.site.iserd.plane}, nil
	}
	if b.site.peer.cmd == nil {
		return nil, fmt.Errorf("%s has no process", c.Initiator)
	}
	return map[string]int{"iscsid": b.site.peer.cmd.Process.Pid}, nil
}

// idleReading is what an idle machine counts.
type idleReading struct {
	at       time.Time
	idle     time.Duration
	switches uint64
	cpu      time.Duration     // of the processes
	wakeups  uint64            // of the processes
	byThread map[string]uint64 // the same, by "process/thread"
	sends    uint64            // of the RDMA device, both ends
}

func readIdle(processes map[string]int) (r idleReading, err error) {
	r.at, r.byThread = time.Now(), map[string]uint64{}
	if r.idle, err = readIdleTime(); err != nil {
		return r, err
	}
	if r.switches, err = contextSwitches(); err != nil {
		return r, err
	}
	for name, pid := range processes {
		t, err := taskStats(pid)
		if err != nil {
			return r, err
		}
		r.cpu += t.cpu
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil {
			return r, err
		}
		for _, t := range tasks {
			text, err := readFile(t + "/status")
			if err != nil {
				return r, err
			}
			n, err := parseSwitches(text)
			if err != nil {
				return r, fmt.Errorf("%s: %w", t, err)
			}
			r.wakeups += n
			r.byThread[name+"/"+filepath.Base(t)] += n
		}
	}
	r.sends, err = rdmaSends()
	return r, err
}

// parseSwitches adds up the context switches of a thread: each began with a wake-up or ended a time slice.
func parseSwitches(status string) (uint64, error) {
	var sum uint64
	found := 0
	for _, line := range strings.Split(status, "\n") {
		name, value, _ := strings.Cut(line, ":")
		if name == "voluntary_ctxt_switches" || name == "nonvoluntary_ctxt_switches" {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			if err != nil {
				return 0, err
			}
			sum += n
			found++
		}
	}
	if found != 2 {
		return 0, fmt.Errorf("status names %d kinds of context switches, want 2", found)
	}
	return sum, nil
}

// rdmaSends counts the Send operations of the soft RoCE device, which is initiator's and target's at once.
func rdmaSends() (uint64, error) {
	text, err := readFile("/sys/class/infiniband/rxe0/ports/1/hw_counters/rdma_sends")
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(text, 10, 64)
}
