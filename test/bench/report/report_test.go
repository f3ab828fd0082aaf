package report

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"iserd.org/iserd/test/bench/plan"
)

func TestFigure(t *testing.T) {
	for _, tc := range []struct {
		f                Figure
		median, min, max float64
		text             string
	}{
		{Figure{5}, 5, 5, 5, "5.00"},
		{Figure{1, 2, 9}, 2, 1, 9, "2.00 (1.00–9.00)"},
		{Figure{100, 200, 300, 1000}, 250, 100, 1000, "250 (100–1000)"},
	} {
		if tc.f.Median() != tc.median || tc.f.Min() != tc.min || tc.f.Max() != tc.max || spread(tc.f) != tc.text {
			t.Errorf("%v: median %v, range %v to %v, %q", tc.f, tc.f.Median(), tc.f.Min(), tc.f.Max(), spread(tc.f))
		}
	}
	var no Figure
	if no.Known() || !math.IsNaN(no.Median()) || !math.IsNaN(no.Min()) || !math.IsNaN(no.Max()) || spread(no) != none || median(no) != none {
		t.Errorf("of nothing: %v, %q", no.Median(), spread(no))
	}
}

func TestRatio(t *testing.T) {
	for _, tc := range []struct {
		ours, peer Figure
		value      float64
		distinct   bool
		text       string
	}{
		{Figure{110, 120, 130}, Figure{99, 100, 101}, 1.2, true, "1.200"},
		{Figure{80, 90, 95}, Figure{99, 100, 101}, 0.9, true, "0.900"},
		{Figure{98, 102, 104}, Figure{99, 100, 101}, 1.02, false, "≈ 1.020"},
		{Figure{100}, Figure{100}, 1, false, "≈ 1.000"},
	} {
		if r := Divide(tc.ours, tc.peer); math.Abs(r.Value-tc.value) > 1e-9 || r.Distinct != tc.distinct || ratio(tc.ours, tc.peer) != tc.text {
			t.Errorf("%v / %v: %+v, %q", tc.ours, tc.peer, r, ratio(tc.ours, tc.peer))
		}
	}
	if s := ratio(nil, Figure{1}); s != none {
		t.Errorf("of nothing: %q", s)
	}
}

func TestFill(t *testing.T) {
	s := Sections{"a": "new a\n", "b": "new b"}
	const before = "# Title\n<!-- bench:a -->\nold\n<!-- bench:end -->\nby hand\n<!-- bench:b --><!-- bench:end -->\n"
	const after = "# Title\n<!-- bench:a -->\nnew a\n<!-- bench:end -->\nby hand\n<!-- bench:b -->\nnew b\n<!-- bench:end -->\n"
	for _, text := range []string{before, after} { // what was filled is filled again alike
		if got, err := s.Fill(text); err != nil || got != after {
			t.Errorf("%v\n%s", err, got)
		}
	}
	for what, text := range map[string]string{
		"a section without marker":  "<!-- bench:a --><!-- bench:end -->",
		"a marker without section":  before + "<!-- bench:c --><!-- bench:end -->",
		"a section without its end": "<!-- bench:a --> <!-- bench:b --><!-- bench:end -->",
		"a marker that is open":     "<!-- bench:a",
		"a section twice":           before + "<!-- bench:a --><!-- bench:end -->",
	} {
		if got, err := s.Fill(text); err == nil {
			t.Errorf("%s is accepted:\n%s", what, got)
		}
	}
}

// sample gives every cell of the plan runs, by a function of the cell.
func sample(values func(c plan.Cell) []map[string]float64) *Results {
	r := &Results{Cells: map[string]*Cell{}}
	for _, c := range plan.All() {
		for i, v := range values(c) {
			r.Add(Environment{Commit: "abc", Kernel: "7"}, 2, plan.Report{Cell: c.Name, Run: i + 1, Values: v})
		}
	}
	return r
}

func TestResults(t *testing.T) {
	dir := t.TempDir()
	r, err := Load(dir)
	if err != nil || len(r.Cells) != 0 {
		t.Fatalf("of an empty folder: %v, %v", r, err)
	}
	const a, b = "iser/4k-qd1/read/iserd", "iser/4k-qd1/read/ib_iser"
	old := Environment{Commit: "old", Programs: map[string]string{"fio": "3"}}
	now := Environment{Commit: "new", Programs: map[string]string{"fio": "3"}}
	add := func(e Environment, cell string, run int, v float64) {
		r.Add(e, 2, plan.Report{Cell: cell, Run: run, Values: map[string]float64{plan.IOPS: v}})
	}
	add(old, a, 1, 10)
	add(old, a, 2, 12)
	add(old, b, 1, 5)
	add(old, "no/such/cell", 1, 5)
	if err := r.Save(dir); err != nil {
		t.Fatal(err)
	}
	if r, err = Load(dir); err != nil {
		t.Fatal(err)
	}
	if f := r.Get(a, plan.IOPS); len(f) != 2 || f.Median() != 11 {
		t.Errorf("after loading: %v", f)
	}
	if r.Cells["no/such/cell"] != nil {
		t.Error("a cell that is not in the plan was kept")
	}
	// A new measurement replaces the cell and leaves the others.
	add(now, a, 1, 20)
	add(now, a, 2, 22)
	add(now, a, 3, 24)
	if f := r.Get(a, plan.IOPS); f.Median() != 22 || f.Min() != 20 {
		t.Errorf("measured again: %v", f)
	}
	if f := r.Get(b, plan.IOPS); f.Median() != 5 {
		t.Errorf("the other cell: %v", f)
	}
	if c := r.Cells[a]; r.Environments[c.Environment].Commit != "new" || r.Environments[r.Cells[b].Environment].Commit != "old" {
		t.Errorf("environments %+v", r.Environments)
	}
	// An environment that no cell is left of goes, and the others keep their cells.
	add(now, b, 1, 6)
	if err := r.Save(dir); err != nil {
		t.Fatal(err)
	}
	if r, err = Load(dir); err != nil {
		t.Fatal(err)
	}
	if len(r.Environments) != 1 || r.Environments[r.Cells[a].Environment].Commit != "new" || r.Environments[r.Cells[b].Environment].Commit != "new" {
		t.Errorf("environments %+v", r.Environments)
	}
	for _, bad := range []string{"{", `{"cells":{"x":{"environment":3}}}`, `{"cells":{"x":null}}`} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}

// verdicts returns measured text and verdict of the bars by the beginning of their text.
func verdicts(t *testing.T, r *Results) func(begin string) (string, string) {
	return func(begin string) (string, string) {
		t.Helper()
		for _, b := range bars {
			if strings.HasPrefix(b.text, begin) {
				m, v := b.verdict(r)
				return m, v
			}
		}
		t.Fatalf("no bar begins with %q", begin)
		return "", ""
	}
}

func TestBarsOpen(t *testing.T) {
	r := &Results{Cells: map[string]*Cell{}}
	for _, b := range bars {
		if m, v := b.verdict(r); v != "open" || m != none {
			t.Errorf("%s: without results it is %q, %q", b.text, v, m)
		}
	}
}

func TestBars(t *testing.T) {
	// Everything is at its bound, or just within.
	good := func(c plan.Cell) []map[string]float64 {
		v := map[string]float64{plan.IOPS: 1000, plan.Kinsn: 1000}
		if c.Initiator.Ours() {
			v[plan.DaemonKinsn], v[plan.Syscalls], v[plan.Crossings], v[plan.Turns], v[plan.Allocations], v[plan.Switches] = 10, 0.25, 1, 0.5, 0, 0.4
		} else {
			v[plan.Switches] = 0.41
		}
		switch c.Initiator {
		case plan.Shared:
			v[plan.IOPS] = 1100
			if c.Job.BlockSize == 512<<10 {
				v[plan.DaemonKinsn] = 12
			}
		case plan.Libiscsi:
			v[plan.IOPS] = 500
		}
		if c.Kind == plan.KindShare {
			v = map[string]float64{plan.Kinsn: 60, plan.SharePrefix + plan.PlaceIOUring: 1, plan.SharePrefix + plan.PlaceCopy: 50}
			if c.Initiator.Ours() {
				v[plan.SharePrefix+plan.PlaceDaemon], v[plan.SharePrefix+plan.PlaceIOUring] = 6.5, 1.5
			}
		}
		switch c.Kind {
		case plan.KindIdle:
			v = map[string]float64{plan.CPUShare: 0.001, plan.Wakeups: 4, plan.Pings: 0.2}
		case plan.KindMemory:
			v = map[string]float64{plan.Resident: 60, plan.PinnedOutside: 4}
		case plan.KindCreation:
			v = map[string]float64{plan.LoginSeconds: 20, plan.LogoutSeconds: 1}
		case plan.KindOutage:
			v = map[string]float64{plan.StillMedian: 0.1, plan.StillMost: 0.25}
		}
		return []map[string]float64{v}
	}
	for _, b := range bars {
		if m, v := b.verdict(sample(good)); v != "met" {
			t.Errorf("%s: %s, %s", b.text, v, m)
		}
	}
	// One cell misses: the bar is missed, and the text names the cell.
	for _, tc := range []struct {
		bar, cell, value string
		to               float64
		says             string
	}{
		{"over iSER, ordinary", "iser/4k-qd1/write/iserd", plan.IOPS, 990, "0.990 in 4k, depth 1, write"},
		{"over iSER, ordinary", "iser/512k-qd8/read/iserd", plan.IOPS, 940, "512k"},
		{"over iSER, shared", "iser/128k-qd16/read/shared", plan.IOPS, 1090, "1.090 in 128k"},
		{"over iSER, shared", "iser/512k-qd8/write/ib_iser_huge", plan.IOPS, 1010, "1.089 in 512k"},
		{"over iSER, shared", "iser/4k-qd1/write/ib_iser", plan.IOPS, 1101, "0.999 in 4k"},
		{"over TCP", "tcp/4k-qd32x4/read/iserd", plan.IOPS, 999, "4 jobs"},
		{"at 4k, depth 32: at least 2", "tcp/4k-qd32/read/libiscsi", plan.IOPS, 501, "1.99"},
		{"shared memory: the daemon", "size/iser/512k/write/shared", plan.DaemonKinsn, 13, "write 1.30"},
		{"at 4k, depth 32: at most 0.25", "iser/4k-qd32/read/shared", plan.Syscalls, 0.3, "shared memory read 0.30"},
		{"at 4k, depth 32: at most two C", "iser/4k-qd32/write/iserd", plan.Turns, 0.4, "write 2.50"},
		{"at 4k, depth 32: no heap", "tcp/4k-qd32/write/iserd", plan.Allocations, 1, "TCP write 1.0"},
		{"at 4k, depth 32: fewer", "iser/4k-qd32/read/ib_iser", plan.Switches, 0.4, "iSER read 0.40"},
		{"idle, 100", "idle/100/iserd", plan.CPUShare, 0.002, "0.2000 %"},
		{"idle: no more", "idle/100/iserd", plan.Wakeups, 4.1, "4.10 per second, 2.00 pings"},
		{"at 4k, depth 32: the initiator's own", "share/4k-qd32/read/iser/iserd", plan.SharePrefix + plan.PlaceDaemon, 7, "read 7.5"},
		{"memory", "memory/1/iserd", plan.Resident, 61, "1: 65.0 MiB; 100: 64.0 MiB"},
		{"100 devices", "devices/100/spread/iserd", plan.IOPS, 960, "spread: 0.960"},
		{"100 units", "creation/wall/100/tcp/iserd", plan.LogoutSeconds, 21, "tcp logout 21.0 s"},
		{"requests stand still", "outage/away/tcp/iserd", plan.StillMost, 0.26, "away tcp 0.26 s"},
	} {
		r := sample(good)
		r.Cells[tc.cell].Runs[0][tc.value] = tc.to
		if m, v := verdicts(t, r)(tc.bar); v != "**not met**" || !strings.Contains(m, tc.says) {
			t.Errorf("%s with %s of %s at %v: %s, %q", tc.bar, tc.value, tc.cell, tc.to, v, m)
		}
	}
	// One that is missing leaves it open.
	r := sample(good)
	delete(r.Cells, "iser/4k-qd1/write/shared")
	if m, v := verdicts(t, r)("over iSER, shared"); v != "open" {
		t.Errorf("with a cell missing: %s, %q", v, m)
	}
}

func TestTables(t *testing.T) {
	r := sample(func(c plan.Cell) []map[string]float64 {
		if !strings.HasPrefix(c.Name, "iser/4k-qd1/read/") {
			return nil
		}
		base := map[plan.Initiator]float64{plan.Iserd: 1200, plan.IbIser: 1000}[c.Initiator]
		if base == 0 {
			return nil
		}
		return []map[string]float64{{plan.IOPS: base}, {plan.IOPS: base + 20, plan.Switches: 1.5}, {plan.IOPS: base + 10}}
	})
	const want = `| job | ib_iser | iserd | ratio | switches per I/O: ib_iser | iserd |
| --- | ---: | ---: | ---: | ---: | ---: |
| 4k, depth 1, read | 1010 (1000–1020) | 1210 (1200–1220) | 1.198 | 1.50 | 1.50 |
`
	if got := r.peerTable("iser"); got != want {
		t.Errorf("table\n%s\nwant\n%s", got, want)
	}
	shared := sample(func(c plan.Cell) []map[string]float64 {
		v := map[plan.Initiator]float64{plan.IbIser: 1000, plan.IbIserHuge: 1020, plan.Shared: 1300, plan.Shared4k: 900}[c.Initiator]
		if v == 0 || c.Group() != "iser/128k-qd16/write" && c.Group() != "iser/4k-qd1/read" {
			return nil
		}
		return []map[string]float64{{plan.IOPS: v}}
	})
	const wantShared = `| 4k, depth 1, read | 1000 | 1300 | 1.300 | – | – | – | – |
| 128k, depth 16, write | 1000 | 900 | 0.900 | 1020 | 1300 | 1.275 | – |
`
	if got := shared.sharedTable(); !strings.HasSuffix(got, wantShared) {
		t.Errorf("table\n%s\nwant\n%s", got, wantShared)
	}
	if got := r.peerTable("tcp"); got != "Not measured yet.\n" {
		t.Errorf("an empty table: %q", got)
	}
	for name, text := range r.sections() {
		for _, line := range strings.Split(text, "\n") {
			if strings.Contains(line, "NaN") || strings.HasPrefix(line, "|") != strings.HasSuffix(line, "|") {
				t.Errorf("section %s has the line %q", name, line)
			}
		}
	}
}

// The README that is written by hand has all the markers.
func TestReadme(t *testing.T) {
	b, err := os.ReadFile("../../../docs/performance/README.md")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Load("../../../docs/performance")
	if err != nil {
		t.Fatal(err)
	}
	text, err := r.sections().Fill(string(b))
	if err != nil {
		t.Fatal(err)
	}
	if text != string(b) {
		t.Error("docs/performance/README.md does not show what results.json holds: run go run ./test/bench -report")
	}
}

func TestPlots(t *testing.T) {
	dir := t.TempDir()
	r := sample(func(c plan.Cell) []map[string]float64 {
		return []map[string]float64{{plan.IOPS: 1000, plan.Kinsn: 60, plan.DaemonKinsn: 9, plan.LatP50: 100, plan.LatP99: 300}}
	})
	if err := r.plots(dir); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"throughput.svg", "latency.svg", "cpu.svg", "devices.svg"} {
		b, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil || !strings.Contains(string(b), "</svg>") || !strings.Contains(string(b), "ib_iser") && f != "cpu.svg" {
			t.Errorf("%s: %v, %d bytes", f, err, len(b))
		}
	}
	// Nothing measured: nothing drawn.
	empty := t.TempDir()
	if err := (&Results{Cells: map[string]*Cell{}}).plots(empty); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(empty, "*")); len(left) != 0 {
		t.Errorf("files %q", left)
	}
}
