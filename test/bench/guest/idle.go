package main

import (
	"context"
	"fmt"
	"os"
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

// measureMemory reads the memory of the initiator's processes after its buffers have been used.
func (b *bench) measureMemory(ctx context.Context, c plan.Cell) (map[string]float64, string, error) {
	w := wantOf(c)
	if err := b.site.leave(ctx); err != nil {
		return nil, "", err
	}
	// A daemon that has just started: nothing of what was measured before is left in it.
	if err := b.site.iserd.stop(ctx); err != nil {
		return nil, "", err
	}
	if err := b.site.serve(w.devices, w.targets); err != nil {
		return nil, "", err
	}
	free, err := meminfo("MemAvailable")
	if err != nil {
		return nil, "", err
	}
	if err := b.site.need(ctx, w); err != nil {
		return nil, "", err
	}
	for _, j := range []plan.Job{{BlockSize: 4 << 10, Depth: 128, Jobs: 1, Random: true}, {BlockSize: 512 << 10, Depth: 32, Jobs: 1, Random: true, Write: true}} {
		load := c
		load.Job = j
		if _, err := run(ctx, "fio", fioArguments(load, b.site.paths, 0.5)...); err != nil {
			return nil, "", err
		}
	}
	left, err := meminfo("MemAvailable")
	if err != nil {
		return nil, "", err
	}
	processes, err := b.processes(c)
	if err != nil {
		return nil, "", err
	}
	v := map[string]float64{plan.HostMemory: float64(free-left) / 1024}
	var words []string
	for name, pid := range processes {
		text, err := readFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return nil, "", err
		}
		m, err := parseMemory(text)
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", name, err)
		}
		v[plan.Resident] += float64(m["VmRSS"]) / 1024
		v[plan.PinnedOutside] += float64(pinnedOutside(m)) / 1024
		words = append(words, fmt.Sprintf("%s: resident %.1f MiB, pinned %.1f, locked address space %.1f", name,
			float64(m["VmRSS"])/1024, float64(m["VmPin"])/1024, float64(m["VmLck"])/1024))
	}
	return v, strings.Join(words, "; "), nil
}

// parseMemory returns the sizes in /proc/PID/status, KiB.
func parseMemory(status string) (map[string]int64, error) {
	m := map[string]int64{}
	for _, line := range strings.Split(status, "\n") {
		name, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		if len(f) != 2 || f[1] != "kB" {
			continue
		}
		n, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			return nil, err
		}
		m[name] = n
	}
	for _, name := range []string{"VmRSS", "VmPin", "VmLck", "RssAnon", "RssShmem"} {
		if _, ok := m[name]; !ok {
			return nil, fmt.Errorf("status does not tell %s", name)
		}
	}
	return m, nil
}

// pinnedOutside is pinned memory that is not resident memory of the process already, KiB. Pinning makes pages present, and what is pinned
// here is anonymous or shared memory that stays mapped, so it is in VmRSS; only what exceeds all such pages can be outside. VmLck is not
// memory: it is the address space to which mlockall with MCL_ONFAULT applies.
func pinnedOutside(m map[string]int64) int64 { return max(0, m["VmPin"]-m["RssAnon"]-m["RssShmem"]) }

// meminfo returns a line of /proc/meminfo, KiB.
func meminfo(name string) (int64, error) {
	text, err := readFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(text, "\n") {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc/meminfo does not tell %s", name)
}

// measureCreation takes the time of a login to a target with many units, and of the logout.
func (b *bench) measureCreation(ctx context.Context, c plan.Cell) (map[string]float64, error) {
	w := wantOf(c)
	if err := b.site.leave(ctx); err != nil {
		return nil, err
	}
	if err := b.site.serve(w.devices, w.targets); err != nil {
		return nil, err
	}
	var err error
	if c.Initiator.Ours() {
		err = b.site.iserd.start(ctx)
	} else {
		err = b.site.peer.start(ctx)
	}
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := b.site.need(ctx, w); err != nil {
		return nil, err
	}
	paths := b.site.paths
	for _, p := range paths {
		if err := readBlock(p); err != nil {
			return nil, err
		}
	}
	in := time.Since(begin)
	begin = time.Now()
	if err := b.site.leave(ctx); err != nil {
		return nil, err
	}
	for _, p := range paths {
		if err := await("the device is gone", 20*time.Second, func() error {
			if _, err := os.Stat(p); !os.IsNotExist(err) {
				return fmt.Errorf("%s is there (%v)", p, err)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return map[string]float64{plan.LoginSeconds: in.Seconds(), plan.LogoutSeconds: time.Since(begin).Seconds()}, nil
}

// readBlock reads the first 4 KiB of a device through its page cache.
func readBlock(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.ReadAt(make([]byte, 4096), 0)
	return err
}
