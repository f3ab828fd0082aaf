// Command bench compares iserd with its peers in a guest that counts instructions: the kernel's own initiators with open-iscsi, and libiscsi,
// against the same target in the same boot. The part inside the guest is test/bench/guest, the cells are named in test/bench/plan.
//
//	go run ./test/bench -list                                          names of all cells
//	go run ./test/bench -only iser/4k-qd32/read -runs 1 -out /tmp/x    some of them, into another folder
//	make bench BENCHFLAGS='-only tcp -runs 3'                          the same by make
//	go run ./test/bench -report                                        only make tables and plots anew
//
// Programs are built from the checkout it is run in. Results are merged by cell into results.json of the folder; plots and, where there is
// one, the README of the folder are made of all results in it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/test/bench/plan"
	"iserd.org/iserd/test/bench/report"
)

// options are those of the command line.
type options struct {
	only    string
	list    bool
	report  bool
	runs    int
	seconds float64
	trace   bool
	top     int
	out     string
	console bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var o options
	flag.StringVar(&o.only, "only", "", "measure these cells: names separated by commas, each element a regular expression, elements left out at the end match all")
	flag.BoolVar(&o.list, "list", false, "list the cells instead of measuring them")
	flag.BoolVar(&o.report, "report", false, "make tables and plots of the results that are there, without measuring")
	flag.IntVar(&o.runs, "runs", 3, "how often each cell is measured; points of the plots are measured once")
	flag.Float64Var(&o.seconds, "seconds", 2, "guest time of one run, seconds; half of it for points of the plots")
	flag.BoolVar(&o.trace, "trace", true, "count system calls, C calls and allocations of iserd-io in a pass of their own")
	flag.IntVar(&o.top, "top", 0, "show so many functions of each cell of \"share\", those with the most instructions")
	flag.StringVar(&o.out, "out", "docs/performance", "folder for results.json and what is made of it")
	flag.BoolVar(&o.console, "console", false, "show the guest's console")
	flag.Parse()
	begin := time.Now()
	err := run(ctx, o)
	if err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintf(os.Stderr, "bench failed after %.0f s: %v\n", time.Since(begin).Seconds(), err)
		os.Exit(1)
	}
	if !o.list {
		fmt.Printf("%.0f s in all; results are in %s\n", time.Since(begin).Seconds(), o.out)
	}
}

func run(ctx context.Context, o options) error {
	cells, err := plan.Select(plan.All(), o.only)
	if err != nil {
		return err
	}
	switch {
	case o.list:
		for _, c := range cells {
			fmt.Println(c.Name)
		}
		return nil
	case o.runs < 1 || o.seconds < 0.2:
		return errors.New("-runs must be at least 1 and -seconds at least 0.2")
	}
	results, err := report.Load(o.out)
	if err != nil {
		return err
	}
	if !o.report {
		err = measureAll(ctx, o, cells, results)
	}
	// What was measured before an error is worth its table.
	return errors.Join(err, results.Write(o.out))
}

// measureAll measures cells in as many guests as they take.
func measureAll(ctx context.Context, o options, cells []plan.Cell, results *report.Results) error {
	if err := testbed.InstallTools(ctx, os.Stdout); err != nil {
		return err
	}
	bed, err := testbed.Prepare(ctx, os.Stdout)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range []plan.Machine{plan.Counting, plan.Profiling, plan.Ordinary} {
		var here []plan.Cell
		for _, c := range cells {
			if c.Machine() == m {
				here = append(here, c)
			}
		}
		if len(here) == 0 {
			continue
		}
		g := &guest{options: o, bed: bed, results: results}
		if err := g.measure(ctx, m, here); err != nil {
			errs = append(errs, fmt.Errorf("%s guest: %w", m, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}
