package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/test/bench/plan"
)

// probe reads the kernel's counters of the whole machine, of some block devices, and of the data plane.
type probe struct {
	paths  []string
	daemon int // process number of iserd-io; 0 for none
}

// counters are readings at one moment.
type counters struct {
	at       time.Time
	idle     time.Duration // of all CPUs
	switches uint64        // context switches of the machine
	sectors  uint64        // moved by the devices, 512 bytes each
	requests uint64        // completed by the devices
	daemon   taskCounters
}

// taskCounters are the sums over all threads of a process.
type taskCounters struct {
	cpu   time.Duration // schedstat: on a CPU, in user and kernel mode, softirqs that ran on its back included
	turns uint64        // schedstat: times it was put on a CPU
}

// read takes a reading. Meanwhile I/O goes on: what the devices have done is read before and after the rest, and the mean is taken.
func (p probe) read() (c counters, err error) {
	c.at = time.Now()
	sectors, requests, err := p.disks()
	if err != nil {
		return c, err
	}
	if c.switches, err = contextSwitches(); err != nil {
		return c, err
	}
	if c.idle, err = readIdleTime(); err != nil {
		return c, err
	}
	if p.daemon != 0 {
		if c.daemon, err = taskStats(p.daemon); err != nil {
			return c, err
		}
	}
	c.sectors, c.requests, err = p.disks()
	c.sectors, c.requests = (c.sectors+sectors)/2, (c.requests+requests)/2
	return c, err
}

// sectors returns what the devices have moved.
func (p probe) sectors() (uint64, error) {
	n, _, err := p.disks()
	return n, err
}

func (p probe) disks() (sectors, requests uint64, err error) {
	for _, d := range p.paths {
		text, err := readFile(filepath.Join("/sys/block", filepath.Base(d), "stat"))
		if err != nil {
			return 0, 0, err
		}
		s, r, err := parseDiskStat(text)
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", d, err)
		}
		sectors, requests = sectors+s, requests+r
	}
	return sectors, requests, nil
}

// parseDiskStat adds up reads and writes of /sys/block/NAME/stat (Documentation/block/stat.rst).
func parseDiskStat(text string) (sectors, requests uint64, err error) {
	f := strings.Fields(text)
	if len(f) < 8 {
		return 0, 0, fmt.Errorf("stat has %d fields", len(f))
	}
	var n [8]uint64
	for i := range n {
		if n[i], err = strconv.ParseUint(f[i], 10, 64); err != nil {
			return 0, 0, err
		}
	}
	return n[2] + n[6], n[0] + n[4], nil
}

func contextSwitches() (uint64, error) {
	text, err := readFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(text, "\nctxt ")
	if !ok {
		return 0, fmt.Errorf("/proc/stat has no line ctxt")
	}
	line, _, _ := strings.Cut(rest, "\n")
	return strconv.ParseUint(line, 10, 64)
}

// readIdleTime returns the idle time of all CPUs (/proc/uptime), in steps of 10 ms.
func readIdleTime() (time.Duration, error) {
	text, err := readFile("/proc/uptime")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(text)
	if len(f) != 2 {
		return 0, fmt.Errorf("/proc/uptime: %q", text)
	}
	s, err := strconv.ParseFloat(f[1], 64)
	return time.Duration(s * float64(time.Second)), err
}

// taskStats adds up /proc/PID/task/*/schedstat (Documentation/scheduler/sched-stats.rst). Threads that have ended meanwhile are missing; the
// data plane's live as long as it does.
func taskStats(pid int) (taskCounters, error) {
	var sum taskCounters
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return sum, err
	}
	for _, t := range tasks {
		text, err := readFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, t.Name()))
		if err != nil {
			return sum, err
		}
		one, err := parseSchedstat(text)
		if err != nil {
			return sum, err
		}
		sum.cpu += one.cpu
		sum.turns += one.turns
	}
	return sum, nil
}

func parseSchedstat(text string) (taskCounters, error) {
	f := strings.Fields(text)
	if len(f) != 3 {
		return taskCounters{}, fmt.Errorf("schedstat: %q", text)
	}
	cpu, err := strconv.ParseInt(f[0], 10, 64)
	if err != nil {
		return taskCounters{}, err
	}
	turns, err := strconv.ParseUint(f[2], 10, 64)
	return taskCounters{time.Duration(cpu), turns}, err
}

// since puts what happened between two readings into v, per I/O of the given size in bytes.
func (c counters) since(before counters, blockSize int, daemon bool, v map[string]float64) error {
	ios := float64(c.sectors-before.sectors) * 512 / float64(blockSize)
	if ios < 1 {
		return fmt.Errorf("no I/O between the readings")
	}
	elapsed := c.at.Sub(before.at)
	v[plan.Busy] = max(0, 1-float64(c.idle-before.idle)/float64(elapsed))
	v[plan.Switches] = float64(c.switches-before.switches) / ios
	v[plan.Requests] = float64(c.requests-before.requests) / ios
	if daemon {
		v[plan.DaemonKinsn] = float64(c.daemon.cpu-before.daemon.cpu) / 1e3 / ios
		v[plan.DaemonSwitches] = float64(c.daemon.turns-before.daemon.turns) / ios
	}
	return nil
}
