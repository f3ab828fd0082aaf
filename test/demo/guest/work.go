package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"iserd.org/iserd/api"
)

// makeFileSystem puts ext4 on the file-backed unit and mounts it.
func (d *demo) makeFileSystem(ctx context.Context) (string, error) {
	path := d.devices[1].Path
	if _, err := run(ctx, "mkfs.ext4", "-q", "-E", "nodiscard", path); err != nil {
		return "", err
	}
	if _, err := run(ctx, "mount", path, mount); err != nil {
		return "", err
	}
	d.mounted = true
	return "made on " + path + " and mounted", nil
}

func (d *demo) copyTrees(ctx context.Context) (string, error) {
	if _, err := run(ctx, "cp", append([]string{"-a", "--parents", "-t", mount}, trees...)...); err != nil {
		return "", err
	}
	if _, err := run(ctx, "sync", "-f", mount); err != nil {
		return "", err
	}
	err := walkFiles(func(_ string, size int64) error {
		d.files++
		d.bytes += size
		return nil
	})
	return fmt.Sprintf("%d files, %s, from %s", d.files, bytesText(uint64(d.bytes)), strings.Join(trees, " and ")), err
}

// walkFiles calls f for each regular file of the trees.
func walkFiles(f func(name string, size int64) error) error {
	for _, tree := range trees {
		err := filepath.WalkDir(tree, func(name string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			return f(name, info.Size())
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// compareTrees mounts the file system anew, so that everything is read through the device, and compares.
func (d *demo) compareTrees(ctx context.Context) (string, error) {
	path := d.devices[1].Path
	if _, err := run(ctx, "umount", mount); err != nil {
		return "", err
	}
	d.mounted = false
	if _, err := run(ctx, "e2fsck", "-fn", path); err != nil {
		return "", err
	}
	if _, err := run(ctx, "mount", "-o", "ro", path, mount); err != nil {
		return "", err
	}
	d.mounted = true
	n := 0
	err := walkFiles(func(name string, _ int64) error {
		want, err := checksum(name)
		if err != nil {
			return err
		}
		got, err := checksum(mount + name)
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("%s differs", name)
		}
		n++
		return ctx.Err()
	})
	if err != nil {
		return "", err
	}
	if n != d.files {
		return "", fmt.Errorf("%d files compared of %d", n, d.files)
	}
	if _, err := run(ctx, "umount", mount); err != nil {
		return "", err
	}
	d.mounted = false
	return fmt.Sprintf("%d files by SHA-256, e2fsck clean", n), nil
}

func checksum(name string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	h.Sum(sum[:0])
	return sum, err
}

// fioResult is what fio reports about one job.
type fioResult struct {
	name, device string
	read, write  fioHalf
	verified     uint64 // bytes read back and compared
}

type fioHalf struct {
	Bytes uint64  `json:"io_bytes"`
	IOPS  float64 `json:"iops"`
	BW    float64 `json:"bw"` // KiB per second
	Clat  struct {
		Percentile map[string]float64 `json:"percentile"` // nanoseconds
	} `json:"clat_ns"`
}

// runFio runs one job on a device.
func (d *demo) runFio(ctx context.Context, name string, x api.Device, options ...string) (fioResult, error) {
	args := append([]string{
		"--output-format=json", "--name=" + name, "--filename=" + x.Path, "--allow_file_create=0", "--direct=1", "--ioengine=io_uring",
		"--randrepeat=1", "--group_reporting=1",
	}, options...)
	out, err := run(ctx, "fio", args...)
	if err != nil {
		return fioResult{}, err
	}
	// fio may print a note before its JSON.
	if i := strings.IndexByte(out, '{'); i > 0 {
		out = out[i:]
	}
	var report struct {
		Jobs []struct {
			Error int
			Read  fioHalf
			Write fioHalf
		}
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		return fioResult{}, fmt.Errorf("fio's report: %w", err)
	}
	if len(report.Jobs) != 1 || report.Jobs[0].Error != 0 {
		return fioResult{}, fmt.Errorf("fio reports an error in job %s", name)
	}
	return fioResult{name: name, device: x.Path, read: report.Jobs[0].Read, write: report.Jobs[0].Write}, nil
}

// fioVerify writes with checksums in every block, and reads all of it back.
func (d *demo) fioVerify(ctx context.Context) (string, error) {
	r, err := d.runFio(ctx, "verify", d.devices[0], "--rw=randwrite", "--bsrange=512-1m", "--blockalign=512", "--size=64m", "--iodepth=32",
		"--serialize_overlap=1", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
	if err != nil {
		return "", err
	}
	r.verified = r.read.Bytes
	d.fio = append(d.fio, r)
	if r.verified == 0 || r.verified < r.write.Bytes*9/10 {
		return "", fmt.Errorf("%d bytes were written and only %d verified", r.write.Bytes, r.verified)
	}
	return fmt.Sprintf("%s written, %s read back and compared, no error", bytesText(r.write.Bytes), bytesText(r.verified)), nil
}

// fioSpeed measures, for what a figure from an emulated machine is worth.
func (d *demo) fioSpeed(ctx context.Context) (string, error) {
	for _, job := range []struct {
		name    string
		options []string
	}{
		{"4 KiB random read, depth 32", []string{"--rw=randread", "--bs=4k", "--iodepth=32"}},
		{"4 KiB random write, depth 32", []string{"--rw=randwrite", "--bs=4k", "--iodepth=32"}},
		{"128 KiB read, depth 8", []string{"--rw=read", "--bs=128k", "--iodepth=8"}},
		{"128 KiB write, depth 8", []string{"--rw=write", "--bs=128k", "--iodepth=8"}},
	} {
		r, err := d.runFio(ctx, job.name, d.devices[0], append(job.options, "--size=128m", "--time_based=1", "--runtime=2")...)
		if err != nil {
			return "", err
		}
		d.fio = append(d.fio, r)
	}
	return "four jobs of 2 s", nil
}

// table prints what the demonstration has shown.
func (d *demo) table() {
	fmt.Printf("\n%s\n\n", strings.Repeat("─", 100))
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TARGET\tLUN\tDEVICE\tSIZE\tTRANSPORT\tREAD\tWRITTEN\tNO COPY\tONE COPY\tTCP")
	for _, x := range d.devices {
		s := x.Stats
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.Target, x.LUN, x.Path, bytesText(x.Size), x.Transport,
			bytesText(s.ReadBytes), bytesText(s.WriteBytes), bytesText(s.BytesShared), bytesText(s.BytesRegistered), bytesText(s.BytesTCP))
	}
	w.Flush()
	fmt.Printf("\nNO COPY, ONE COPY, TCP: payload by how it went between the application's memory and the adapter or socket.\n\n")
	w = tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "FIO JOB\tDEVICE\tIOPS\tMiB/s\tP99\tVERIFIED\n")
	for _, r := range d.fio {
		h := r.read
		if r.write.Bytes > 0 {
			h = r.write
		}
		verified := "-"
		if r.verified > 0 {
			verified = bytesText(r.verified)
		}
		fmt.Fprintf(w, "%s\t%s\t%.0f\t%.1f\t%.1f ms\t%s\n", r.name, r.device, h.IOPS, h.BW/1024, h.Clat.Percentile["99.000000"]/1e6, verified)
	}
	w.Flush()
	where := "The CPUs are emulated, and so is the adapter (soft RoCE)"
	if d.accel == "KVM" {
		where = "The adapter is emulated (soft RoCE), on virtual CPUs"
	}
	fmt.Printf("\n%s: these figures show that it works, not how fast it is.\n", where)
}

// bytesText writes a size for a reader.
func bytesText(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 10<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
