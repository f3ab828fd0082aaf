package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

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
	if err := b.site.serve(w); err != nil {
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
