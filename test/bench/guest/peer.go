package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

// peerName is the initiator name of open-iscsi and libiscsi.
const peerName = "iqn.2003-01.org.example:peer"

// openISCSI is open-iscsi with the kernel's initiators, as Debian configures it. The zero value is one that does not run.
type openISCSI struct {
	cmd *exec.Cmd
}

func (o *openISCSI) start(ctx context.Context) error {
	if o.cmd != nil {
		return nil
	}
	if _, err := run(ctx, "modprobe", "-a", "ib_iser", "iscsi_tcp", "sd_mod"); err != nil {
		return err
	}
	for _, d := range []string{"/run/lock/iscsi", "/etc/iscsi"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile("/etc/iscsi/initiatorname.iscsi", []byte("InitiatorName="+peerName+"\n"), 0o600); err != nil {
		return err
	}
	o.cmd = exec.Command("iscsid", "-f")
	if err := o.cmd.Start(); err != nil {
		o.cmd = nil
		return err
	}
	return await("iscsid answers", func() error {
		// Status 21 is "no sessions": it has answered.
		err := exec.CommandContext(ctx, "iscsiadm", "-m", "session").Run()
		if x, ok := err.(*exec.ExitError); ok && x.ExitCode() == 21 {
			return nil
		}
		return err
	})
}

func (o *openISCSI) stop(context.Context) error {
	if o.cmd == nil {
		return nil
	}
	err := o.cmd.Process.Kill()
	o.cmd.Wait()
	o.cmd = nil
	return err
}

// login logs in to all targets and returns the disks, first units first.
func (o *openISCSI) login(ctx context.Context, w want) ([]string, error) {
	if err := o.start(ctx); err != nil {
		return nil, err
	}
	portal, iface := iserPortal, "iser"
	if w.transport == "tcp" {
		portal, iface = tcpPortal, "default"
	}
	for i := range max(w.targets, 1) {
		if _, err := run(ctx, "iscsiadm", "-m", "node", "-o", "new", "-T", targetName(i), "-p", portal+",1", "-I", iface); err != nil {
			return nil, err
		}
		if _, err := run(ctx, "iscsiadm", "-m", "node", "-T", targetName(i), "-p", portal, "-I", iface, "--login"); err != nil {
			return nil, err
		}
	}
	var paths []string
	err := await("the disks are there", func() (err error) {
		if paths, err = disks(); err == nil && len(paths) < w.devices {
			err = fmt.Errorf("%d of %d", len(paths), w.devices)
		}
		return err
	})
	return paths, err
}

// disks lists the disks of all sessions by unit number. Only those whose device node is a block device count.
func disks() ([]string, error) {
	found, err := filepath.Glob("/sys/class/iscsi_session/session*/device/target*/*/block/*")
	if err != nil {
		return nil, err
	}
	byLUN := map[int][]string{}
	last := -1
	for _, f := range found {
		// .../target2:0:0/2:0:0:7/block/sdh
		address := strings.Split(filepath.Base(filepath.Dir(filepath.Dir(f))), ":")
		lun, err := strconv.Atoi(address[len(address)-1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		path := "/dev/" + filepath.Base(f)
		if blockDevice(path) == nil {
			byLUN[lun] = append(byLUN[lun], path)
			last = max(last, lun)
		}
	}
	var paths []string
	for lun := 0; lun <= last; lun++ {
		paths = append(paths, byLUN[lun]...)
	}
	return paths, nil
}

func (o *openISCSI) logout(ctx context.Context, w want) error {
	if o.cmd == nil {
		return nil
	}
	if _, err := run(ctx, "iscsiadm", "-m", "node", "-U", "all"); err != nil {
		return err
	}
	_, err := run(ctx, "iscsiadm", "-m", "node", "-o", "delete")
	return err
}

// averageIOPS is iscsi-perf's last word about the rate.
var averageIOPS = regexp.MustCompile(`iops average (\d+) `)

// parseIscsiPerf returns the average rate of the whole run.
func parseIscsiPerf(out string) (float64, error) {
	all := averageIOPS.FindAllStringSubmatch(out, -1)
	if len(all) == 0 || !strings.Contains(out, "finished") {
		return 0, fmt.Errorf("iscsi-perf reports no rate: %.300q", out)
	}
	return strconv.ParseFloat(all[len(all)-1][1], 64)
}

// measureLibiscsi runs iscsi-perf, which is initiator and load in one process.
func (b *bench) measureLibiscsi(ctx context.Context, c plan.Cell) (map[string]float64, error) {
	if err := b.site.need(ctx, wantOf(c)); err != nil {
		return nil, err
	}
	url := "iscsi://" + tcpPortal
	if c.Transport == "iser" {
		url = "iser://" + iserPortal
	}
	// Its time is in whole seconds.
	seconds := max(1, int(b.order.Seconds+0.5))
	args := []string{"-i", peerName, "-m", strconv.Itoa(c.Job.Depth), "-b", strconv.Itoa(c.Job.BlockSize / 512), "-t", strconv.Itoa(seconds)}
	if c.Job.Random {
		args = append(args, "-r")
	}
	out, err := run(ctx, "iscsi-perf", append(args, url+"/"+targetName(0)+"/0")...)
	if err != nil {
		return nil, err
	}
	iops, err := parseIscsiPerf(out)
	if err != nil {
		return nil, err
	}
	return map[string]float64{plan.IOPS: iops, plan.Kinsn: 1e6 / iops}, nil
}
