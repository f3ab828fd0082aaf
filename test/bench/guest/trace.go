package main

import (
	"bufio"
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

// traceSeconds is the length of the pass that traces, which is slow to watch.
const traceSeconds = 0.5

// tracefs is where the kernel's tracing is set up.
const tracefs = "/sys/kernel/tracing"

// tracer counts what the data plane does with the kernel's tracing: system calls at their tracepoint, and calls of functions of the Go runtime
// by uprobes. It costs instructions, so it runs in a pass of its own.
type tracer struct {
	probes []uprobe // that are set
	on     bool
}

// uprobe is a probe at the entry of a function of iserd-io.
type uprobe struct {
	name  string // in tracefs, below events/bench
	value string // what its hits count for
}

// functions are those whose calls are counted, by the value they belong to. Every allocation on Go's heap passes one of runtime.mallocgc*;
// when one calls another it counts twice, which does not matter where none is wanted.
var functions = []struct {
	value string
	match *regexp.Regexp
}{
	{plan.Crossings, regexp.MustCompile(`^runtime\.cgocall$`)},
	{plan.Allocations, regexp.MustCompile(`^runtime\.(mallocgc\w*|growslice)$`)},
	{plan.Turns, regexp.MustCompile(`^iserd\.org/iserd/internal/uring\.\(\*Ring\)\.Dispatch$`)},
}

// open sets the probes.
func (t *tracer) open(ctx context.Context, pid int) error {
	if t.on {
		return nil
	}
	if _, err := os.Stat(filepath.Join(tracefs, "uprobe_events")); err != nil {
		if _, err := run(ctx, "mount", "-t", "tracefs", "tracefs", tracefs); err != nil {
			return err
		}
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return err
	}
	f, err := elf.Open(exe)
	if err != nil {
		return err
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		return fmt.Errorf("%s: %w", exe, err)
	}
	for _, s := range symbols {
		for _, fn := range functions {
			if elf.ST_TYPE(s.Info) != elf.STT_FUNC || !fn.match.MatchString(s.Name) {
				continue
			}
			offset, err := fileOffset(f, s.Value)
			if err != nil {
				return err
			}
			p := uprobe{name: fmt.Sprintf("p%d", len(t.probes)), value: fn.value}
			if err := writeTrace("uprobe_events", fmt.Sprintf("p:bench/%s %s:%#x", p.name, exe, offset), true); err != nil {
				return err
			}
			t.probes = append(t.probes, p)
		}
	}
	t.on = true
	return nil
}

// fileOffset converts an address of the program to a place in its file.
func fileOffset(f *elf.File, address uint64) (uint64, error) {
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && address >= p.Vaddr && address < p.Vaddr+p.Filesz {
			return address - p.Vaddr + p.Off, nil
		}
	}
	return 0, fmt.Errorf("no segment holds address %#x", address)
}

// writeTrace writes a line to a file of tracefs.
func writeTrace(name, line string, add bool) error {
	flags := os.O_WRONLY
	if add {
		flags |= os.O_APPEND
	} else {
		flags |= os.O_TRUNC
	}
	w, err := os.OpenFile(filepath.Join(tracefs, name), flags, 0)
	if err != nil {
		return err
	}
	defer w.Close()
	if _, err := w.WriteString(line + "\n"); err != nil {
		return fmt.Errorf("%s: %w (%q)", name, err, line)
	}
	return nil
}

// events are the folders of the events that are counted, with the keys of their histograms.
func (t *tracer) events() map[string]string {
	m := map[string]string{"events/raw_syscalls/sys_enter": "common_pid,id.syscall"}
	for _, p := range t.probes {
		m["events/bench/"+p.name] = "common_pid"
	}
	return m
}

func (t *tracer) start() error {
	for dir, keys := range t.events() {
		if err := writeTrace(dir+"/trigger", "hist:keys="+keys+":size=4096", true); err != nil {
			return err
		}
	}
	return nil
}

func (t *tracer) stop() error {
	var errs []error
	for dir, keys := range t.events() {
		errs = append(errs, writeTrace(dir+"/trigger", "!hist:keys="+keys+":size=4096", true))
	}
	return errors.Join(errs...)
}

// close removes the probes.
func (t *tracer) close() error {
	var errs []error
	for _, p := range t.probes {
		errs = append(errs, writeTrace("uprobe_events", "-:bench/"+p.name, true))
	}
	*t = tracer{}
	return errors.Join(errs...)
}

// hits are counts of the threads of a process: system calls by name, and functions by value.
type hits struct {
	syscalls map[string]uint64
	values   map[string]uint64
	sectors  uint64
}

// read takes a reading. It takes a while, in which I/O goes on: what the devices have moved is the mean of before and after.
func (t *tracer) read(pid int, p probe) (hits, error) {
	h := hits{syscalls: map[string]uint64{}, values: map[string]uint64{}}
	before, err := p.sectors()
	if err != nil {
		return h, err
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return h, err
	}
	mine := map[string]bool{}
	for _, x := range tasks {
		mine[x.Name()] = true
	}
	for dir := range t.events() {
		text, err := readFile(filepath.Join(tracefs, dir, "hist"))
		if err != nil {
			return h, err
		}
		rows, err := parseHist(text)
		if err != nil {
			return h, fmt.Errorf("%s: %w", dir, err)
		}
		for _, r := range rows {
			if !mine[r.pid] {
				continue
			}
			if r.syscall != "" {
				h.syscalls[r.syscall] += r.count
			}
			for _, u := range t.probes {
				if dir == "events/bench/"+u.name {
					h.values[u.value] += r.count
				}
			}
		}
	}
	after, err := p.sectors()
	h.sectors = (before + after) / 2
	return h, err
}

// histRow is one entry of a histogram.
type histRow struct {
	pid     string
	syscall string // name, as sys_read
	count   uint64
}

// Entries look like "{ common_pid:        197, id: sys_io_uring_enter            [426] } hitcount:       1234".
var histEntry = regexp.MustCompile(`^\{ common_pid: +(\d+)(?:, id: (\S+) +\[ *\d+\])? *\} hitcount: +(\d+)`)

// parseHist reads a histogram of the kernel (Documentation/trace/histogram.rst).
func parseHist(text string) ([]histRow, error) {
	var rows []histRow
	s := bufio.NewScanner(strings.NewReader(text))
	for s.Scan() {
		line := strings.TrimSpace(s.Text())
		if strings.HasPrefix(line, "Dropped:") && strings.TrimSpace(strings.TrimPrefix(line, "Dropped:")) != "0" {
			return nil, errors.New("the histogram was too small")
		}
		if !strings.HasPrefix(line, "{") {
			continue
		}
		m := histEntry.FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("entry %q is not understood", line)
		}
		n, err := strconv.ParseUint(m[3], 10, 64)
		if err != nil {
			return nil, err
		}
		rows = append(rows, histRow{m[1], strings.TrimPrefix(m[2], "sys_"), n})
	}
	return rows, s.Err()
}

// traced runs fio with the tracer for a short time and puts its counts per I/O into v. The detail names the system calls.
func (b *bench) traced(ctx context.Context, c plan.Cell, paths []string, v map[string]float64) (string, error) {
	pid := b.site.iserd.plane
	if err := b.tracer.open(ctx, pid); err != nil {
		return "", fmt.Errorf("tracing: %w", err)
	}
	if err := b.tracer.start(); err != nil {
		return "", fmt.Errorf("tracing: %w", err)
	}
	p := probe{paths: paths}
	var before, after hits
	_, err := whileRunning(ctx, c, paths, min(b.order.Seconds, traceSeconds), func(int) (err error) { before, err = b.tracer.read(pid, p); return err },
		func(int) (err error) { after, err = b.tracer.read(pid, p); return err })
	if err = errors.Join(err, b.tracer.stop()); err != nil {
		return "", fmt.Errorf("tracing: %w", err)
	}
	ios := float64(after.sectors-before.sectors) * 512 / float64(c.Job.BlockSize)
	if ios < 1 {
		return "", errors.New("tracing: no I/O between the readings")
	}
	type call struct {
		name  string
		count float64
	}
	var calls []call
	v[plan.Syscalls] = 0
	for name, n := range after.syscalls {
		x := call{name, float64(n-before.syscalls[name]) / ios}
		v[plan.Syscalls] += x.count
		if x.count >= 0.005 {
			calls = append(calls, x)
		}
	}
	slices.SortFunc(calls, func(x, y call) int { return cmp.Compare(y.count, x.count) })
	for _, f := range functions {
		if slices.ContainsFunc(b.tracer.probes, func(u uprobe) bool { return u.value == f.value }) {
			v[f.value] = float64(after.values[f.value]-before.values[f.value]) / ios
		}
	}
	var words []string
	for _, x := range calls {
		words = append(words, fmt.Sprintf("%s %.2f", x.name, x.count))
	}
	return strings.Join(words, ", "), nil
}
