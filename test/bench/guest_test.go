package main

import (
	"encoding/json"
	"strings"
	"testing"

	"iserd.org/iserd/test/bench/plan"
	"iserd.org/iserd/test/bench/report"
)

func TestQEMUVersion(t *testing.T) {
	for out, want := range map[string]string{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b2)\nCopyright (c)": "7.2.22",
		"QEMU emulator version 10.0.3": "10.0.3",
		"something else":               "unknown",
	} {
		if got := qemuVersion(out); got != want {
			t.Errorf("%q: %q, want %q", out, got, want)
		}
	}
}

// Reports of the guest end up in the results, with the versions it told; cells that failed or were skipped leave what was there.
func TestReports(t *testing.T) {
	cells, err := plan.Select(plan.All(), "iser/4k-qd1/read,depth/tcp/1/read/iserd")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	results, err := report.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	const mine, shared, peer, once = "iser/4k-qd1/read/iserd", "iser/4k-qd1/read/shared", "iser/4k-qd1/read/ib_iser", "depth/tcp/1/read/iserd"
	results.Add(report.Environment{Commit: "old"}, 2, plan.Report{Cell: peer, Run: 1, Values: map[string]float64{plan.IOPS: 1}})
	var b strings.Builder
	out := json.NewEncoder(&b)
	for _, p := range []plan.Report{
		{Versions: map[string]string{"fio": "3.39"}},
		{Cell: mine, Run: 1, Values: map[string]float64{plan.IOPS: 100}},
		{Cell: shared, Run: 1, Skip: "no such command"},
		{Cell: peer, Run: 1, Error: "it broke"},
		{Cell: mine, Run: 2, Values: map[string]float64{plan.IOPS: 102}, Detail: "more"},
		{Cell: once, Run: 1, Values: map[string]float64{plan.IOPS: 50}},
	} {
		if err := out.Encode(p); err != nil {
			t.Fatal(err)
		}
	}
	g := &guest{options: options{runs: 2, out: dir}, results: results, environment: report.Environment{Commit: "new"}, left: 7}
	if err := g.runReports(strings.NewReader(b.String()), plan.Order{Cells: cells, Runs: 2, Seconds: 2}); err != nil {
		t.Fatal(err)
	}
	if g.failed != 1 || g.left != 0 {
		t.Errorf("%d failed, %d are left", g.failed, g.left)
	}
	saved, err := report.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	for cell, want := range map[string]float64{mine: 101, peer: 1, once: 50} {
		if f := saved.Get(cell, plan.IOPS); f.Median() != want {
			t.Errorf("%s: %v, want %v", cell, f, want)
		}
	}
	c := saved.Cells[mine]
	if e := saved.Environments[c.Environment]; e.Commit != "new" || e.Programs["fio"] != "3.39" || c.Detail != "more" || c.Seconds != 2 || saved.Cells[once].Seconds != 1 {
		t.Errorf("%+v in %+v; %+v", c, e, saved.Cells[once])
	}
	if saved.Cells[shared] != nil {
		t.Error("a cell that was skipped has results")
	}
	for _, bad := range []string{"no JSON\n", `{"error":"all is lost"}` + "\n"} {
		if err := g.runReports(strings.NewReader(bad), plan.Order{}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestLine(t *testing.T) {
	s := line(plan.Report{Values: map[string]float64{plan.IOPS: 14983.5, plan.Kinsn: 66.74, plan.Syscalls: 1.61, plan.Busy: 0.5}, Detail: "read 1.00"})
	for _, want := range []string{"14984 IOPS", "66.7 kinsn", "1.61 sys", "busy 50 %", "[read 1.00]"} {
		if !strings.Contains(s, want) {
			t.Errorf("%q lacks %q", s, want)
		}
	}
}
