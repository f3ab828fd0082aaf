// Command guest is the benchmark's part inside the test guest: see test/bench. It reads an order as JSON and writes a line of JSON for every
// measurement.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

func main() {
	var order plan.Order
	if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
		fmt.Fprintln(os.Stderr, "bench: the order:", err)
		os.Exit(2)
	}
	b := &bench{order: order, out: json.NewEncoder(os.Stdout)}
	err := b.run(context.Background())
	if cerr := b.close(context.Background()); err == nil {
		err = cerr
	}
	if err != nil {
		b.report(plan.Report{Error: err.Error()})
		os.Exit(1)
	}
}

// bench is what the measurements share.
type bench struct {
	order  plan.Order
	out    *json.Encoder
	site   site
	tracer tracer
}

func (b *bench) report(r plan.Report) {
	if err := b.out.Encode(r); err != nil {
		fmt.Fprintln(os.Stderr, "bench: report:", err)
		os.Exit(2)
	}
}

// skipError says that a cell cannot be measured here, which is no failure.
type skipError string

func (e skipError) Error() string { return string(e) }

// run measures all cells. A cell that fails is given up and the others go on.
func (b *bench) run(ctx context.Context) error {
	b.report(plan.Report{Versions: versions(ctx)})
	if err := preload(ctx); err != nil {
		return err
	}
	dropped := map[string]bool{}
	for _, group := range plan.Groups(b.order.Cells) {
		for run := 1; run <= b.order.Runs; run++ {
			// A B C, C B A, A B C, ...: whatever changes with time changes for all alike, and half the logins are saved.
			turn := slices.Clone(group)
			if run%2 == 0 {
				slices.Reverse(turn)
			}
			for _, c := range turn {
				if dropped[c.Name] || c.Once && run > 1 {
					continue
				}
				r := plan.Report{Cell: c.Name, Run: run}
				var err error
				r.Values, r.Detail, r.Profile, err = b.measure(ctx, c, run)
				var skip skipError
				if errors.As(err, &skip) {
					r.Skip = string(skip)
				} else if err != nil {
					r.Error = err.Error()
				}
				if err != nil {
					dropped[c.Name] = true
				}
				b.report(r)
				if r.Error != "" {
					// Whatever state it left: the next cell starts afresh.
					if err := b.close(ctx); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// close gives back all that was set up.
func (b *bench) close(ctx context.Context) error {
	return errors.Join(b.tracer.close(), b.site.close(ctx))
}

func (b *bench) measure(ctx context.Context, c plan.Cell, run int) (v map[string]float64, detail string, p *plan.Profile, err error) {
	switch c.Kind {
	case plan.KindFio:
		if c.Initiator == plan.Libiscsi {
			v, err = b.measureLibiscsi(ctx, c)
		} else {
			v, detail, err = b.measureFio(ctx, c, run)
		}
	case plan.KindShare:
		v, p, err = b.measureShare(ctx, c)
	case plan.KindIdle:
		v, detail, err = b.measureIdle(ctx, c)
	case plan.KindMemory:
		v, detail, err = b.measureMemory(ctx, c)
	case plan.KindCreation:
		v, err = b.measureCreation(ctx, c)
	case plan.KindOutage:
		v, err = b.measureOutage(ctx, c)
	default:
		err = fmt.Errorf("cells of kind %q are unknown here", c.Kind)
	}
	return v, detail, p, err
}

// run executes a program and returns what it prints.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		said := strings.TrimSpace(errs.String())
		if said == "" {
			said = strings.TrimSpace(string(out))
		}
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(append([]string{name}, args...), " "), err, said)
	}
	return string(out), nil
}

// versions are those of the programs that take part and that the host does not know.
func versions(ctx context.Context) map[string]string {
	v := map[string]string{}
	for name, args := range map[string][]string{
		"fio": {"fio", "--version"}, "open-iscsi": {"iscsiadm", "--version"}, "libiscsi": {"dpkg-query", "-W", "-f=${Version}", "libiscsi-bin"},
	} {
		if out, err := run(ctx, args[0], args[1:]...); err == nil {
			v[name] = strings.TrimSpace(strings.TrimPrefix(strings.TrimPrefix(out, "fio-"), "iscsiadm version "))
		}
	}
	return v
}
