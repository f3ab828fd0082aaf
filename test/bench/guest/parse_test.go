package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/test/bench/plan"
)

func TestParseFio(t *testing.T) {
	const report = `fio: note
{"fio version":"fio-3.39","jobs":[{"jobname":"bench","error":0,
 "read":{"io_bytes":4096,"iops":14983.5,"total_ios":29967,"clat_ns":{"mean":2131070.5,"percentile":{"50.000000":2113536,"99.000000":3719168}}},
 "write":{"iops":0,"total_ios":0,"clat_ns":{"mean":0}}}]}`
	h, err := parseFio(report, false)
	if err != nil {
		t.Fatal(err)
	}
	if h.Total != 29967 || h.IOPS != 14983.5 || h.Clat.Mean != 2131070.5 || h.Clat.Percentile["99.000000"] != 3719168 {
		t.Errorf("read: %+v", h)
	}
	for what, tc := range map[string]struct {
		text  string
		write bool
		want  string
	}{
		"the other direction": {report, true, "no I/O"},
		"an error":            {strings.Replace(report, `"error":0`, `"error":5`, 1), false, "error 5"},
		"no job":              {`{"jobs":[]}`, false, "0 jobs"},
		"no JSON":             {"fio: cannot open", false, "report"},
	} {
		if _, err := parseFio(tc.text, tc.write); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", what, err, tc.want)
		}
	}
}

func TestParseDiskStat(t *testing.T) {
	s, r, err := parseDiskStat("   29967        3   239736    60000     10     1     80    5    0     1996    60005  0 0 0 0 0 0")
	if err != nil || s != 239736+80 || r != 29967+10 {
		t.Errorf("%d sectors, %d requests, %v", s, r, err)
	}
	for _, bad := range []string{"", "1 2 3", "1 2 3 4 5 6 x 8"} {
		if _, _, err := parseDiskStat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestParseSchedstat(t *testing.T) {
	c, err := parseSchedstat("374201292 1147138000 4178")
	if err != nil || c.cpu != 374201292*time.Nanosecond || c.turns != 4178 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range []string{"", "1 2", "x 2 3", "1 2 y"} {
		if _, err := parseSchedstat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestSince(t *testing.T) {
	begin := time.Now()
	before := counters{at: begin, idle: 5 * time.Second, switches: 100, sectors: 800, requests: 90, daemon: taskCounters{time.Second, 7}}
	after := counters{at: begin.Add(2 * time.Second), idle: 5500 * time.Millisecond, switches: 1100, sectors: 800 + 8*2000, requests: 1090,
		daemon: taskCounters{time.Second + 20*time.Millisecond, 507}}
	v := map[string]float64{}
	if err := after.since(before, 4096, true, v); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{plan.Busy: 0.75, plan.Switches: 0.5, plan.Requests: 0.5, plan.DaemonKinsn: 10, plan.DaemonSwitches: 0.25}
	if !maps.Equal(v, want) {
		t.Errorf("%v, want %v", v, want)
	}
	if err := before.since(before, 4096, false, v); err == nil {
		t.Error("readings without I/O in between are accepted")
	}
}

// As printed by Linux 7.3.
const hist = `# event histogram
#
# trigger info: hist:keys=common_pid,id.syscall:vals=hitcount:sort=hitcount:size=4096 [active]
#

{ common_pid:        550, id: sys_pwrite64                  [ 18] } hitcount:        976
{ common_pid:        550, id: sys_io_uring_enter            [426] } hitcount:        181
{ common_pid:          1, id: sys_read                      [  0] } hitcount:          2

Totals:
    Hits: 1159
    Entries: 3
    Dropped: 0
`

func TestParseHist(t *testing.T) {
	rows, err := parseHist(hist)
	want := []histRow{{"550", "pwrite64", 976}, {"550", "io_uring_enter", 181}, {"1", "read", 2}}
	if err != nil || !slices.Equal(rows, want) {
		t.Errorf("%v, %v; want %v", rows, err, want)
	}
	rows, err = parseHist("{ common_pid:        550 } hitcount:          5\n")
	if err != nil || !slices.Equal(rows, []histRow{{"550", "", 5}}) {
		t.Errorf("without a second key: %v, %v", rows, err)
	}
	for _, bad := range []string{strings.Replace(hist, "Dropped: 0", "Dropped: 3", 1), "{ id: sys_read [0] } hitcount: 2\n"} {
		if rows, err := parseHist(bad); err == nil {
			t.Errorf("%q gives %v", bad, rows)
		}
	}
}

func TestParseSwitches(t *testing.T) {
	n, err := parseSwitches("Name:\tiserd-io\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n")
	if err != nil || n != 42 {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := parseSwitches("voluntary_ctxt_switches:\t40\n"); err == nil {
		t.Error("half of it is accepted")
	}
}

func TestParseMemory(t *testing.T) {
	const status = "Name:\tiserd-io\nVmLck:\t 1889280 kB\nVmPin:\t   25600 kB\nVmRSS:\t   43724 kB\nRssAnon:\t   20000 kB\nRssFile:\t 20000 kB\nRssShmem:\t    3724 kB\nThreads:\t9\n"
	m, err := parseMemory(status)
	if err != nil || m["VmRSS"] != 43724 || m["VmPin"] != 25600 {
		t.Errorf("%v, %v", m, err)
	}
	// 25600 KiB are pinned, and at most 23724 KiB of them can be in VmRSS.
	if n := pinnedOutside(m); n != 1876 {
		t.Errorf("%d KiB are pinned beside, want 1876", n)
	}
	m["VmPin"] = 20000
	if n := pinnedOutside(m); n != 0 {
		t.Errorf("%d KiB are pinned beside, want 0", n)
	}
	if _, err := parseMemory("VmRSS:\t 4 kB\n"); err == nil {
		t.Error("a status without VmPin is accepted")
	}
}

func TestParseIscsiPerf(t *testing.T) {
	const out = "will run for 2 seconds.\r\niops average 19322 (75 MB/s), in_flight 32\r\niops average 19348 (75 MB/s)   \n\nfinished.\n"
	if v, err := parseIscsiPerf(out); err != nil || v != 19348 {
		t.Errorf("%v, %v", v, err)
	}
	for _, bad := range []string{"", "finished.", strings.TrimSuffix(out, "finished.\n")} {
		if v, err := parseIscsiPerf(bad); err == nil {
			t.Errorf("%q gives %v", bad, v)
		}
	}
}

func TestFioArguments(t *testing.T) {
	c := plan.Cell{Initiator: plan.Shared, Job: plan.Job{BlockSize: 4096, Depth: 32, Jobs: 4, Random: true, Write: true}}
	args := strings.Join(fioArguments(c, []string{"/dev/a"}, 1.5), " ")
	for _, want := range []string{"--rw=randwrite", "--bs=4096", "--iodepth=32", "--name=job3", "--runtime=1500ms", "--size=134217728", "--filename=/dev/a",
		"--mem=mmaphuge:" + memoryFiles[plan.MemoryHuge], "--direct=1", "--allow_file_create=0"} {
		if !strings.Contains(args, want) {
			t.Errorf("%s is missing in %s", want, args)
		}
	}
	c.Initiator = plan.IbIser
	if args := strings.Join(fioArguments(c, []string{"/dev/a", "/dev/b"}, 1), " "); strings.Contains(args, "--mem") || !strings.Contains(args, "--filename=/dev/a:/dev/b") {
		t.Errorf("of a peer on two devices: %s", args)
	}
}
