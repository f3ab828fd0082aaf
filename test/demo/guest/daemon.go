package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"iserd.org/iserd/api"
)

// startDaemon starts iserd with nothing configured and waits until it answers.
func (d *demo) startDaemon(ctx context.Context) (string, error) {
	log, err := os.Create(logFile)
	if err != nil {
		return "", err
	}
	defer log.Close()
	cmd := exec.Command("iserd")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return "", err
	}
	d.daemon = cmd
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for end := time.After(20 * time.Second); ; {
		status, err := d.status(ctx)
		if err == nil && status.DataPlane.State == api.DataPlaneUp && status.Ublk.Available {
			return fmt.Sprintf("control plane %d, data plane %d with %d reactors, RDMA device %s", status.PID, status.DataPlane.PID,
				status.DataPlane.Reactors, strings.Join(status.DataPlane.RDMADevices, ", ")), nil
		}
		select {
		case err := <-ended:
			return "", fmt.Errorf("iserd ended: %v", err)
		case <-end:
			return "", fmt.Errorf("it is not ready after 20 s: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// stopDaemon ends both processes: the data plane outlives the control plane, so it is told apart.
func (d *demo) stopDaemon(ctx context.Context) {
	plane := 0
	if status, err := d.status(ctx); err == nil {
		plane = status.DataPlane.PID
	}
	for _, pid := range []int{d.daemon.Process.Pid, plane} {
		if pid == 0 {
			continue
		}
		syscall.Kill(pid, syscall.SIGTERM)
		for end := time.Now().Add(5 * time.Second); alive(pid); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				syscall.Kill(pid, syscall.SIGKILL)
				break
			}
		}
	}
}

// alive tells whether a process runs; one that nobody has collected yet does not.
func alive(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func (d *demo) status(ctx context.Context) (api.Status, error) {
	var r api.StatusReply
	err := ask(ctx, &r, "status")
	return r.Status, err
}

// ask runs iserctl with --json and decodes what it prints.
func ask(ctx context.Context, reply any, args ...string) error {
	out, err := run(ctx, "iserctl", append(args, "--json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), reply)
}

func (d *demo) discover(ctx context.Context) (string, error) {
	if err := show(ctx, "iserctl", "discover", address, "--transport", "iser", "--save"); err != nil {
		return "", err
	}
	var r api.NodesReply
	if err := ask(ctx, &r, "node", "list"); err != nil {
		return "", err
	}
	if !slices.ContainsFunc(r.Nodes, func(n api.Node) bool { return n.Target == target }) {
		return "", fmt.Errorf("%s was not found", target)
	}
	return "", nil
}

func (d *demo) login(ctx context.Context) (string, error) {
	if err := show(ctx, "iserctl", "login", target); err != nil {
		return "", err
	}
	var r api.SessionsReply
	if err := ask(ctx, &r, "session", "list"); err != nil {
		return "", err
	}
	if len(r.Sessions) != 1 || r.Sessions[0].Transport != api.TransportISER {
		return "", fmt.Errorf("want one session over iSER, have %+v", r.Sessions)
	}
	n, err := d.lio.Sessions()
	return fmt.Sprintf("the target counts %d sessions, one per reactor", n), err
}

// readDevices asks the daemon for its devices with their counters.
func (d *demo) readDevices(ctx context.Context) error {
	var r api.DevicesReply
	if err := ask(ctx, &r, "device", "stats"); err != nil {
		return err
	}
	d.devices = r.Devices
	slices.SortFunc(d.devices, func(a, b api.Device) int { return int(a.LUN) - int(b.LUN) })
	if len(d.devices) != d.lio.LUNs() {
		return fmt.Errorf("want %d devices, have %d", d.lio.LUNs(), len(d.devices))
	}
	return nil
}

// checkDevices compares the devices with the target, in the kernel's eyes and not only in the daemon's.
func (d *demo) checkDevices(ctx context.Context) (string, error) {
	if err := show(ctx, "iserctl", "device", "list"); err != nil {
		return "", err
	}
	if err := d.readDevices(ctx); err != nil {
		return "", err
	}
	for i, want := range []int64{ramSize, fileSize} {
		path := d.devices[i].Path
		st, err := os.Stat(path)
		if err != nil {
			return "", err
		}
		if st.Mode()&os.ModeDevice == 0 || st.Mode()&os.ModeCharDevice != 0 {
			return "", fmt.Errorf("%s is not a block device", path)
		}
		b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(path), "size"))
		if err != nil {
			return "", err
		}
		sectors, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return "", err
		}
		if sectors*512 != want {
			return "", fmt.Errorf("%s has %d bytes, the target's unit %d", path, sectors*512, want)
		}
	}
	return "", nil
}

// counters reads the daemon's counters while the devices still exist, and shows them.
func (d *demo) counters(ctx context.Context) (string, error) {
	if err := show(ctx, "iserctl", "device", "stats"); err != nil {
		return "", err
	}
	if err := d.readDevices(ctx); err != nil {
		return "", err
	}
	for _, x := range d.devices {
		if x.Stats.Errors > 0 {
			return "", fmt.Errorf("%s counts %d errors", x.Path, x.Stats.Errors)
		}
		if x.Stats.ReadBytes == 0 || x.Stats.WriteBytes == 0 {
			return "", fmt.Errorf("%s counts no bytes", x.Path)
		}
	}
	return "no errors", nil
}

// logout ends the session and looks for remains: devices here, sessions at the target.
func (d *demo) logout(ctx context.Context) (string, error) {
	if err := show(ctx, "iserctl", "logout", target); err != nil {
		return "", err
	}
	if left, _ := filepath.Glob("/dev/ublkb*"); len(left) > 0 {
		return "", fmt.Errorf("devices are left: %s", strings.Join(left, " "))
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		n, err := d.lio.Sessions()
		if err != nil {
			return "", err
		}
		if n == 0 {
			break
		}
		if time.Now().After(end) {
			return "", fmt.Errorf("the target still counts %d sessions", n)
		}
	}
	d.stopDaemon(ctx)
	d.daemon = nil
	lio := d.lio
	d.lio = nil
	if err := lio.Close(); err != nil {
		return "", err
	}
	if b, err := os.ReadFile(logFile); err == nil && strings.Contains(string(b), "level=error") {
		return "", errors.New("the daemon logged an error")
	}
	return "no device is left here, and no session at the target", nil
}
