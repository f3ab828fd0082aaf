// Command bench compares iserd with its peers in a guest that counts instructions: the kernel's own initiators with open-iscsi, and libiscsi,
// against the same target in the same boot. The part inside the guest is test/bench/guest, the cells are named in test/bench/plan.
//
//	go run ./test/bench -list                                          names of all cells
//	go run ./test/bench -only iser/4k-qd32/read -runs 1 -out /tmp/x    some of them, into another folder
//	make bench BENCHFLAGS='-only tcp -runs 3'
//
// Programs are built from the checkout it is run in. Results are merged by cell into results.json of the folder.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/test/bench/plan"
)

// limit is how long the measurements in one guest may take.
const limit = 4 * time.Hour

// options are those of the command line.
type options struct {
	only    string
	list    bool
	runs    int
	seconds float64
	trace   bool
	out     string
	console bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var o options
	flag.StringVar(&o.only, "only", "", "measure these cells: names separated by commas, each element a regular expression, elements left out at the end match all")
	flag.BoolVar(&o.list, "list", false, "list the cells instead of measuring them")
	flag.IntVar(&o.runs, "runs", 5, "how often each cell is measured")
	flag.Float64Var(&o.seconds, "seconds", 2, "guest time of one run, seconds")
	flag.BoolVar(&o.trace, "trace", true, "count system calls, C calls and allocations of iserd-io in a pass of their own")
	flag.StringVar(&o.out, "out", "docs/performance", "folder for results.json and what is made of it")
	flag.BoolVar(&o.console, "console", false, "show the guest's console")
	flag.Parse()
	begin := time.Now()
	failed, err := run(ctx, o)
	if err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintf(os.Stderr, "bench failed after %.0f s: %v\n", time.Since(begin).Seconds(), err)
		os.Exit(1)
	}
	if failed > 0 {
		fmt.Fprintf(os.Stderr, "bench: %d cells failed, see above\n", failed)
		os.Exit(1)
	}
}

// run measures what is asked for. It returns how many cells failed.
func run(ctx context.Context, o options) (failed int, err error) {
	cells, err := plan.Select(plan.All(), o.only)
	if err != nil {
		return 0, err
	}
	if o.list {
		for _, c := range cells {
			fmt.Println(c.Name)
		}
		return 0, nil
	}
	if o.runs < 1 || o.seconds < 0.2 {
		return 0, errors.New("-runs must be at least 1 and -seconds at least 0.2")
	}
	if err := testbed.InstallTools(ctx, os.Stdout); err != nil {
		return 0, err
	}
	bed, err := testbed.Prepare(ctx, os.Stdout)
	if err != nil {
		return 0, err
	}
	cfg := testbed.GuestConfig{Count: true}
	if o.console {
		cfg.Console = os.Stderr
	}
	guest, err := bed.Boot(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer func() {
		if cerr := guest.Close(); err == nil {
			err = cerr
		}
	}()
	if err := guest.InstallPrograms(ctx, append([]string{"./test/bench/guest"}, testbed.Programs...)...); err != nil {
		return 0, err
	}
	return measure(ctx, guest, plan.Order{Cells: cells, Runs: o.runs, Seconds: o.seconds, Trace: o.trace})
}

// measure has the guest carry out an order, and shows what it reports.
func measure(ctx context.Context, guest *testbed.Guest, order plan.Order) (failed int, err error) {
	input, err := json.Marshal(order)
	if err != nil {
		return 0, err
	}
	r, w := io.Pipe()
	type outcome struct {
		failed int
		err    error
	}
	shown := make(chan outcome, 1)
	go func() {
		failed, err := show(r, order)
		r.CloseWithError(err) // the guest's output must not stall
		shown <- outcome{failed, err}
	}()
	code, err := guest.Run(ctx, testbed.Command{
		Args: []string{testbed.Bin + "/guest"}, Stdin: bytes.NewReader(input), Timeout: limit,
	}, w, os.Stderr)
	w.Close()
	s := <-shown
	for _, c := range guest.Complaints() {
		fmt.Printf("the guest's kernel says: %s\n", c.Line)
	}
	switch left := new(testbed.LeftoverError); {
	case errors.As(err, &left) && code == 0:
		return s.failed, fmt.Errorf("in the guest, %w", err)
	case err != nil:
		return s.failed, err
	case s.err != nil:
		return s.failed, s.err
	case code != 0:
		return s.failed, fmt.Errorf("the guest's part ended with status %d", code)
	}
	return s.failed, nil
}

// show prints a line for each report as it comes.
func show(r io.Reader, order plan.Order) (failed int, err error) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	last := time.Now()
	for s.Scan() {
		var p plan.Report
		if err := json.Unmarshal(s.Bytes(), &p); err != nil {
			return failed, fmt.Errorf("the guest reports %q: %w", s.Text(), err)
		}
		took := time.Since(last)
		last = time.Now()
		switch {
		case p.Error != "" && p.Cell == "":
			return failed, errors.New("in the guest: " + p.Error)
		case p.Error != "":
			failed++
			fmt.Printf("%-34s FAILED: %s\n", p.Cell, p.Error)
		case p.Skip != "":
			fmt.Printf("%-34s skipped: %s\n", p.Cell, p.Skip)
		case p.Values != nil:
			fmt.Printf("%-34s %d/%d %s  %.0f s\n", p.Cell, p.Run, order.Runs, line(p), took.Seconds())
		}
	}
	return failed, s.Err()
}

// line shows the values of a report.
func line(p plan.Report) string {
	var b bytes.Buffer
	for _, f := range []struct{ value, text string }{
		{plan.IOPS, "%8.0f IOPS"}, {plan.Kinsn, "%7.1f kinsn"}, {plan.Switches, "%5.2f ctx"}, {plan.DaemonKinsn, " daemon %6.2f kinsn"},
		{plan.DaemonSwitches, "%5.2f in"}, {plan.Syscalls, "%5.2f sys"}, {plan.Crossings, "%5.2f C"}, {plan.Turns, "%5.2f turns"},
		{plan.Allocations, "%6.3f mallocs"}, {plan.LatP99, " p99 %6.0f us"},
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
