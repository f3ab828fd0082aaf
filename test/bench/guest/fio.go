package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/test/bench/plan"
)

// fioReport is the part of fio's JSON that is of interest.
type fioReport struct {
	Jobs []struct {
		Error int
		Read  fioHalf
		Write fioHalf
	}
}

type fioHalf struct {
	Total uint64  `json:"total_ios"`
	IOPS  float64 `json:"iops"`
	Clat  struct {
		Mean       float64            `json:"mean"`
		Percentile map[string]float64 `json:"percentile"`
	} `json:"clat_ns"`
}

// parseFio returns the half of fio's only job that did something.
func parseFio(out string, write bool) (fioHalf, error) {
	// fio may print a note before its JSON.
	if i := strings.IndexByte(out, '{'); i > 0 {
		out = out[i:]
	}
	var r fioReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return fioHalf{}, fmt.Errorf("fio's report: %w", err)
	}
	if len(r.Jobs) != 1 {
		return fioHalf{}, fmt.Errorf("fio reports %d jobs, want 1", len(r.Jobs))
	}
	if r.Jobs[0].Error != 0 {
		return fioHalf{}, fmt.Errorf("fio reports error %d", r.Jobs[0].Error)
	}
	h := r.Jobs[0].Read
	if write {
		h = r.Jobs[0].Write
	}
	if h.Total == 0 || h.IOPS <= 0 {
		return fioHalf{}, errors.New("fio reports no I/O")
	}
	return h, nil
}

// fioArguments are the options of a job, the same for every initiator but for file names and memory. Several jobs are spelled out, since fio
// frees the memory of each of those that numjobs makes, though they have it in common, and aborts (3.39).
func fioArguments(c plan.Cell, paths []string, seconds float64) []string {
	size := int64(span)
	if len(paths) > 1 {
		size = otherUnit * int64(len(paths))
	}
	args := []string{
		"--output-format=json", "--allow_file_create=0", "--direct=1", "--ioengine=io_uring", "--norandommap=1", "--randrepeat=0",
		"--thread=1", "--group_reporting=1", "--disk_util=0", "--time_based=1", "--runtime=" + strconv.FormatFloat(seconds*1000, 'f', 0, 64) + "ms",
		"--filename=" + strings.Join(paths, ":"), fmt.Sprintf("--size=%d", size), "--rw=" + c.Job.RW(), fmt.Sprintf("--bs=%d", c.Job.BlockSize),
		fmt.Sprintf("--iodepth=%d", c.Job.Depth), "--percentile_list=50:90:99:99.9",
	}
	for i := range c.Job.Jobs {
		args = append(args, fmt.Sprintf("--name=job%d", i))
		args = append(args, memoryOption(c.Initiator.Memory())...)
	}
	return args
}

// measureFio runs fio once, and in the first run once more with the tracer when asked for.
func (b *bench) measureFio(ctx context.Context, c plan.Cell, run int) (map[string]float64, string, error) {
	if err := b.site.need(ctx, wantOf(c)); err != nil {
		return nil, "", err
	}
	if err := makeMemory(ctx, c.Initiator.Memory()); err != nil {
		return nil, "", err
	}
	paths := b.site.paths
	if !c.Spread {
		paths = paths[:1]
	}
	for _, p := range paths {
		if err := blockDevice(p); err != nil {
			return nil, "", err
		}
	}
	values, err := b.timed(ctx, c, paths)
	if err != nil || !b.order.Trace || c.Once || run > 1 || !c.Initiator.Ours() {
		return values, "", err
	}
	detail, err := b.traced(ctx, c, paths, values)
	return values, detail, err
}

// timed runs fio and takes the counters over a window in its middle.
func (b *bench) timed(ctx context.Context, c plan.Cell, paths []string) (map[string]float64, error) {
	ours := c.Initiator.Ours()
	var bytes, shared uint64
	var err error
	if ours {
		if bytes, shared, err = b.site.iserd.traffic(ctx); err != nil {
			return nil, err
		}
	}
	p := probe{paths: paths}
	if ours {
		p.daemon = b.site.iserd.plane
	}
	var before, after counters
	out, err := whileRunning(ctx, c, paths, b.order.SecondsOf(c), func(int) (err error) { before, err = p.read(); return err },
		func(int) (err error) { after, err = p.read(); return err })
	if err != nil {
		return nil, err
	}
	h, err := parseFio(out, c.Job.Write)
	if err != nil {
		return nil, err
	}
	v := map[string]float64{
		plan.IOPS: h.IOPS, plan.Kinsn: 1e6 / h.IOPS,
		plan.LatMean: h.Clat.Mean / 1e3, plan.LatP50: h.Clat.Percentile["50.000000"] / 1e3, plan.LatP90: h.Clat.Percentile["90.000000"] / 1e3,
		plan.LatP99: h.Clat.Percentile["99.000000"] / 1e3, plan.LatP999: h.Clat.Percentile["99.900000"] / 1e3,
	}
	if err := after.since(before, c.Job.BlockSize, ours, v); err != nil {
		return nil, err
	}
	if ours {
		b2, s2, err := b.site.iserd.traffic(ctx)
		if err != nil {
			return nil, err
		}
		v[plan.SharedShare] = float64(s2-shared) / float64(b2-bytes)
		if c.Initiator.Registered() && v[plan.SharedShare] < 0.99 {
			return nil, fmt.Errorf("only %.1f %% of the bytes went without a copy: this would not be a figure of shared memory", 100*v[plan.SharedShare])
		}
	}
	return v, nil
}

// whileRunning runs fio and calls begin shortly after its first I/O, and end when four fifths of its time have passed since. It returns what
// fio prints.
func whileRunning(ctx context.Context, c plan.Cell, paths []string, seconds float64, begin, end func(fio int) error) (string, error) {
	idle := probe{paths: paths}
	start, err := idle.sectors()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "fio", fioArguments(c, paths, seconds)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	fail := func(err error) (string, error) {
		cmd.Process.Kill()
		<-ended
		return "", err
	}
	// fio takes a while to start, and reads nothing before.
	for limit := time.Now().Add(patience); ; {
		now, err := idle.sectors()
		if err != nil {
			return fail(err)
		}
		if now != start {
			break
		}
		select {
		case err := <-ended:
			return "", fmt.Errorf("fio ended without any I/O: %v: %s", err, strings.TrimSpace(stderr.String()))
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(limit) {
			return fail(fmt.Errorf("fio has done no I/O for %v", patience))
		}
	}
	whole := time.Duration(seconds * float64(time.Second))
	time.Sleep(whole / 20)
	if err := begin(cmd.Process.Pid); err != nil {
		return fail(err)
	}
	time.Sleep(whole * 4 / 5)
	if err := end(cmd.Process.Pid); err != nil {
		return fail(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			return "", fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(stderr.String()))
		}
	case <-time.After(whole + patience):
		return fail(errors.New("fio does not end"))
	}
	return stdout.String(), nil
}
