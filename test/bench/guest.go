package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/test/bench/plan"
	"iserd.org/iserd/test/bench/profile"
	"iserd.org/iserd/test/bench/report"
)

// countsFile is what the plugin writes.
const countsFile = "counts"

// limit is how long the measurements in one guest may take.
const limit = 4 * time.Hour

// guest measures cells in one boot.
type guest struct {
	options options
	bed     *testbed.Bed
	results *report.Results

	dir         string // temporary: programs, the plugin, its counts
	machine     *testbed.Guest
	environment report.Environment
	failed      int // cells
	left        int // runs that are not reported yet
	begin       time.Time
}

// measure boots a machine and measures cells there. What was measured is in the results, also when it returns an error.
func (g *guest) measure(ctx context.Context, m plan.Machine, cells []plan.Cell) (err error) {
	if g.environment, err = environment(ctx); err != nil {
		return err
	}
	if g.dir, err = os.MkdirTemp("", "iserd-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(g.dir)
	cfg := testbed.GuestConfig{Count: m != plan.Ordinary}
	if m == plan.Profiling {
		if err := profile.Supported(g.environment.QEMU); err != nil {
			fmt.Printf("%d cells are skipped: %v\n", len(cells), err)
			return nil
		}
		plugin, err := profile.Build(ctx, g.dir)
		if err != nil {
			return err
		}
		cfg.Plugin = plugin + ",out=" + filepath.Join(g.dir, countsFile)
	}
	if g.options.console {
		cfg.Console = os.Stderr
	}
	if g.machine, err = g.bed.Boot(ctx, cfg); err != nil {
		return err
	}
	defer func() {
		if cerr := g.machine.Close(); err == nil {
			err = cerr
		}
	}()
	g.environment.Kernel = g.machine.Kernel()
	if err := g.install(ctx); err != nil {
		return err
	}
	order := plan.Order{Cells: cells, Runs: g.options.runs, Seconds: g.options.seconds, Trace: g.options.trace}
	for _, c := range cells {
		g.left++
		if !c.Once {
			g.left += order.Runs - 1
		}
	}
	if err := g.carryOut(ctx, order); err != nil {
		return err
	}
	if g.failed > 0 {
		return fmt.Errorf("%d cells failed, see above", g.failed)
	}
	return nil
}

// install builds the programs and puts them into the guest.
func (g *guest) install(ctx context.Context) error {
	dir := filepath.Join(g.dir, "programs")
	if err := testbed.Build(ctx, dir, append([]string{"./test/bench/guest"}, testbed.Programs...)...); err != nil {
		return err
	}
	programs, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err
	}
	return g.machine.Upload(ctx, testbed.Bin, programs...)
}

// attribute finds out where the instructions of a cell were executed.
func (g *guest) attribute(p plan.Report) error {
	blocks, err := profile.ReadBlocks(filepath.Join(g.dir, countsFile))
	if err != nil {
		return err
	}
	a, err := profile.Attribute(blocks, filepath.Join(g.machine.Share(), plan.SymbolsFile), filepath.Join(g.dir, "programs", "iserd-io"), p.Profile.Maps)
	if err != nil {
		return err
	}
	// Guest time counts the same instructions by other means.
	if r := float64(a.Total()) / float64(p.Profile.Elapsed); r < 0.9 || r > 1.1 {
		return fmt.Errorf("the plugin counts %d instructions in %v of guest time", a.Total(), p.Profile.Elapsed)
	}
	for place, n := range a.Places {
		p.Values[plan.SharePrefix+place] = float64(n) / 1e3 / p.Profile.IOs
	}
	for i, f := range a.Functions {
		if i == g.options.top {
			break
		}
		fmt.Printf("  %9.3f kinsn/IO  %-10s %s\n", float64(f.Instructions)/1e3/p.Profile.IOs, f.Place, f.Name)
	}
	return nil
}

// carryOut gives the guest an order and takes its reports.
func (g *guest) carryOut(ctx context.Context, order plan.Order) error {
	input, err := json.Marshal(order)
	if err != nil {
		return err
	}
	g.begin = time.Now()
	r, w := io.Pipe()
	shown := make(chan error, 1)
	go func() {
		err := g.runReports(r, order)
		r.CloseWithError(err) // the guest's output must not stall
		shown <- err
	}()
	code, err := g.machine.Run(ctx, testbed.Command{
		Args: []string{testbed.Bin + "/guest"}, Stdin: bytes.NewReader(input), Timeout: limit,
	}, w, os.Stderr)
	w.Close()
	failure := <-shown
	for _, c := range g.machine.Complaints() {
		fmt.Printf("the guest's kernel says: %s\n", c.Line)
	}
	if left := new(testbed.LeftoverError); errors.As(err, &left) && (code != 0 || failure != nil) {
		err = nil // there is a better reason
	}
	switch {
	case failure != nil:
		return failure
	case err != nil:
		return err
	case code != 0:
		return fmt.Errorf("its part of the benchmark ended with status %d", code)
	}
	return nil
}

// runReports takes reports as they come, shows them, and saves results after each.
func (g *guest) runReports(r io.Reader, order plan.Order) error {
	cells := map[string]plan.Cell{}
	for _, c := range order.Cells {
		cells[c.Name] = c
	}
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	last := time.Now()
	for s.Scan() {
		var p plan.Report
		if err := json.Unmarshal(s.Bytes(), &p); err != nil {
			return fmt.Errorf("it reports %q: %w", s.Text(), err)
		}
		took := time.Since(last)
		last = time.Now()
		c := cells[p.Cell]
		switch {
		case p.Versions != nil:
			g.environment.Programs = p.Versions
		case p.Error != "" && p.Cell == "":
			return errors.New(p.Error)
		case p.Error != "":
			g.failed++
			g.left -= g.runsLeft(c, p.Run)
			fmt.Printf("%-34s FAILED: %s\n", p.Cell, p.Error)
		case p.Skip != "":
			g.left -= g.runsLeft(c, p.Run)
			fmt.Printf("%-34s skipped: %s\n", p.Cell, p.Skip)
		default:
			g.left--
			if p.Profile != nil {
				if err := g.attribute(p); err != nil {
					return fmt.Errorf("%s: %w", p.Cell, err)
				}
			}
			g.results.Add(g.environment, order.SecondsOf(c), p)
			if err := g.results.Save(g.options.out); err != nil {
				return err
			}
			fmt.Printf("%-34s %s  %.0f s, %d to go\n", p.Cell, line(p), took.Seconds(), g.left)
		}
	}
	return s.Err()
}

// runsLeft is how many runs of a cell will not come, the present one included.
func (g *guest) runsLeft(c plan.Cell, run int) int {
	if c.Once {
		return 1
	}
	return g.options.runs - run + 1
}

// line shows the values of a report.
func line(p plan.Report) string {
	var b strings.Builder
	for _, f := range []struct{ value, text string }{
		{plan.IOPS, "%8.0f IOPS"}, {plan.Kinsn, "%7.1f kinsn"}, {plan.Switches, "%5.2f ctx"}, {plan.DaemonKinsn, " daemon %6.2f kinsn"},
		{plan.DaemonSwitches, "%5.2f in"}, {plan.Syscalls, "%5.2f sys"}, {plan.Crossings, "%5.2f C"}, {plan.Turns, "%5.2f turns"},
		{plan.Allocations, "%6.3f mallocs"}, {plan.LatP99, " p99 %6.0f us"},
		{plan.CPUShare, "%9.6f of a CPU"}, {plan.Wakeups, "%7.2f wake-ups/s"}, {plan.Pings, "%6.3f pings/s per session"},
		{plan.MachineShare, "; machine %9.6f of a CPU"}, {plan.MachineSwitches, "%7.1f switches/s"},
		{plan.Resident, "%7.1f MiB resident"}, {plan.PinnedOutside, "%7.1f MiB pinned beside"}, {plan.HostMemory, "; host %7.1f MiB"},
		{plan.LoginSeconds, "login %6.2f s"}, {plan.CommandSeconds, "(command %6.2f s)"}, {plan.LogoutSeconds, "logout %6.2f s"},
	} {
		if v, ok := p.Values[f.value]; ok {
			fmt.Fprintf(&b, " "+f.text, v)
		}
	}
	if v, ok := p.Values[plan.Busy]; ok && v < 0.99 {
		fmt.Fprintf(&b, "  busy %.0f %%", 100*v)
	}
	if p.Detail != "" {
		fmt.Fprintf(&b, "  [%s]", p.Detail)
	}
	return b.String()
}

// environment tells what takes part, as far as the host knows.
func environment(ctx context.Context) (report.Environment, error) {
	e := report.Environment{Go: runtime.Version()}
	root, err := testbed.ModuleRoot()
	if err != nil {
		return e, err
	}
	// A checkout without git is no reason to fail.
	e.Commit = "unknown"
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	if commit, err := git("rev-parse", "--short=12", "HEAD"); err == nil {
		e.Commit = commit
		// The results themselves do not count as a change.
		if changed, err := git("status", "--porcelain", "--", ".", ":!docs/performance"); err != nil || changed != "" {
			e.Commit += "-dirty"
		}
	}
	out, err := exec.CommandContext(ctx, "qemu-system-x86_64", "--version").Output()
	if err != nil {
		return e, fmt.Errorf("qemu-system-x86_64 --version: %w", err)
	}
	e.QEMU = qemuVersion(string(out))
	return e, nil
}

// qemuVersion is the version in the first line of --version: "QEMU emulator version 7.2.22 (Debian ...)".
func qemuVersion(out string) string {
	f := strings.Fields(out)
	for i := range f {
		if f[i] == "version" && i+1 < len(f) {
			return f[i+1]
		}
	}
	return "unknown"
}
