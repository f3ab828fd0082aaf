package testtarget_test

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testtarget"
)

// An initiator that is not ours judges the target: our two halves could share a misreading.

// libiscsi skips where its programs are not installed.
func libiscsi(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"iscsi-ls", "iscsi-inq", "iscsi-readcapacity16", "iscsi-test-cu"} {
		_, err := exec.LookPath(tool)
		require.Need(t, "libiscsi", err)
	}
}

// libiscsi's own account of StatSN does not survive its wrapping, so it starts low.
const lowStatSN = 1000

// TestTools asks for what there is by libiscsi's small programs.
func TestTools(t *testing.T) {
	libiscsi(t)
	a, b := testtarget.NewUnit(4<<20), testtarget.NewUnit(4<<20)
	target := start(t, testtarget.Config{Units: []*testtarget.Unit{a, nil, b}, StatSN: lowStatSN})
	run := func(name string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s %q: %v: %s", name, args, err, out)
		}
		return string(out)
	}
	url := "iscsi://" + target.Addr()
	if out := run("iscsi-ls", "-s", url); !strings.Contains(out, target.Name()) || !strings.Contains(out, "Lun:0") || !strings.Contains(out, "Lun:2") {
		t.Errorf("iscsi-ls prints %s", out)
	}
	lun0 := url + "/" + target.Name() + "/0"
	if out := run("iscsi-inq", lun0); !strings.Contains(out, "ISERD") {
		t.Errorf("iscsi-inq prints %s", out)
	}
	for _, page := range []string{"0x00", "0x80", "0x83", "0xb0", "0xb1"} {
		run("iscsi-inq", "-e", "1", "-c", page, lun0)
	}
	if out := run("iscsi-readcapacity16", lun0); !strings.Contains(out, fmt.Sprint(4<<20)) {
		t.Errorf("iscsi-readcapacity16 prints %s", out)
	}
	expectClean(t, target)
}

// knownFailures are the tests of iscsi-test-cu that fail, by unit, and why. The package comment tells users.
var knownFailures = map[string]map[string]string{
	"thin, 512e, two paths": {
		"GetLBAStatus.UnmapSingle": "asks at LBA i+1 and wants a descriptor that begins at i+8: it takes for granted that the answer begins with " +
			"a physical block",
		"WriteSame10.UnmapUntilEnd":      unmapOnes,
		"iSCSIdatasn.iSCSIDataSnInvalid": immediateAgain,
	},
}

const (
	unmapOnes = "unmaps with a block of 0xff, and wants to read zero: only a block of zeros may be unmapped where LBPRZ is set (SBC-3, WRITE SAME)"

	immediateAgain = "one of its four cases: after it has logged in again, libiscsi sends the block as immediate data, and there is no Data-Out that " +
		"could have the wrong DataSN"
)

// blockTests are the tests that see the size of a block.
const blockTests = "SCSI.Inquiry,SCSI.ReadCapacity1*,SCSI.Read1[06],SCSI.Write1[06],SCSI.WriteSame10,SCSI.Verify10,SCSI.CompareAndWrite,iSCSI.iSCSIResiduals"

// TestSuite runs iscsi-test-cu, all of it on one unit.
func TestSuite(t *testing.T) {
	libiscsi(t)
	thin512e, thin, large, readOnly := testtarget.NewUnit(64<<20), testtarget.NewUnit(64<<20), testtarget.NewUnit(64<<20), testtarget.NewUnit(8<<20)
	thin512e.Thin, thin512e.PhysicalBlocks = true, 3
	thin.Thin = true
	large.BlockSize = 4096
	readOnly.ReadOnly = true
	long := map[string]string{"MaxRecvDataSegmentLength": "262144"}
	for name, c := range map[string]struct {
		unit  *testtarget.Unit
		paths int
		keys  map[string]string
		tests string
		least int // tests
	}{
		"thin, 512e, two paths": {thin512e, 2, nil, "ALL", 200},
		"4096":                  {large, 1, long, blockTests, 50},
		"thin":                  {thin, 1, nil, "SCSI.GetLBAStatus", 3}, // what fails with 512e
		"read-only":             {readOnly, 1, nil, "SCSI.ReadOnly", 1},
		"no immediate data":     {thin, 1, map[string]string{"ImmediateData": "No"}, "iSCSI.iSCSIdatasn", 1}, // what fails with it
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			target := start(t, testtarget.Config{Units: []*testtarget.Unit{c.unit}, Keys: c.keys, StatSN: lowStatSN})
			url := "iscsi://" + target.Addr() + "/" + target.Name() + "/0"
			args := []string{"--dataloss", "--normal", "-t", c.tests, url}
			if c.paths == 2 {
				args = append(args, url)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute) // a minute, but for the race detector on a busy machine
			defer cancel()
			out, err := exec.CommandContext(ctx, "iscsi-test-cu", args...).CombinedOutput()
			if err != nil && ctx.Err() != nil {
				t.Fatalf("iscsi-test-cu %q: %v; it ends with %s", args, err, out[max(0, len(out)-2000):])
			}
			judge(t, string(out), knownFailures[name], c.least)
		})
	}
}

var (
	failure = regexp.MustCompile(`Suite (\S+), Test (\S+) had failures:((?:\s+\d+\. .*)*)`)
	summary = regexp.MustCompile(`tests\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)`)
)

// judge reads what iscsi-test-cu prints.
func judge(t *testing.T, out string, known map[string]string, least int) {
	t.Helper()
	s := summary.FindStringSubmatch(out)
	if s == nil {
		t.Fatalf("there is no summary in %s", out[max(0, len(out)-2000):])
	}
	ran, _ := strconv.Atoi(s[2])
	failed, _ := strconv.Atoi(s[4])
	if ran < least {
		t.Errorf("%d tests ran, at least %d should", ran, least)
	}
	list := failure.FindAllStringSubmatch(out, -1)
	if len(list) != failed {
		t.Errorf("%d failures are named, %d are counted", len(list), failed)
	}
	for _, f := range list {
		name := f[1] + "." + f[2]
		if reason, ok := known[name]; ok {
			t.Logf("%s fails, as it is known to: %s", name, reason)
			continue
		}
		t.Errorf("%s fails:%s", name, f[3])
	}
	t.Logf("%d tests, %d skips within them", ran, strings.Count(out, "[SKIPPED]"))
}
