package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"iserd.org/iserd/api"
	"iserd.org/iserd/test/bench/plan"
)

// daemonLog is where iserd and iserd-io write: not on the share, since guest time jumps to the next timer while an idle guest waits for its host, and
// with it to the end of whatever time-out is running.
const daemonLog = "/run/iserd-bench.log"

// iserd is this project's initiator with nothing configured. The zero value is one that does not run.
type iserd struct {
	cmd    *exec.Cmd
	ended  chan error
	plane  int         // process number of iserd-io
	memory plan.Memory // that is registered
	buffer string      // its number; "" for none
}

// start starts the daemon unless it runs, and waits until it can serve.
func (d *iserd) start(ctx context.Context) error {
	if d.cmd != nil {
		select {
		case err := <-d.ended:
			d.cmd = nil
			return fmt.Errorf("iserd ended: %v; %s", err, lastWords())
		default:
			return nil
		}
	}
	log, err := os.OpenFile(daemonLog, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command("iserd")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	d.cmd, d.ended = cmd, make(chan error, 1)
	go func() { d.ended <- cmd.Wait() }()
	return await("iserd is ready", func() error {
		var r api.StatusReply
		if err := ask(ctx, &r, "status"); err != nil {
			return err
		}
		if r.Status.DataPlane.State != api.DataPlaneUp || !r.Status.Ublk.Available {
			return fmt.Errorf("data plane %s, ublk %v %s", r.Status.DataPlane.State, r.Status.Ublk.Available, r.Status.Ublk.Reason)
		}
		d.plane = r.Status.DataPlane.PID
		return nil
	})
}

// stop ends both processes; the data plane outlives the control plane, so it is told apart.
func (d *iserd) stop(context.Context) error {
	if d.cmd == nil {
		return nil
	}
	var errs []error
	for _, pid := range []int{d.cmd.Process.Pid, d.plane} {
		if pid == 0 {
			continue
		}
		syscall.Kill(pid, syscall.SIGTERM)
		if err := await("process has ended", func() error {
			if alive(pid) {
				return fmt.Errorf("%d runs", pid)
			}
			return nil
		}); err != nil {
			syscall.Kill(pid, syscall.SIGKILL)
			errs = append(errs, fmt.Errorf("iserd: %w", err))
		}
	}
	d.cmd, d.plane, d.memory, d.buffer = nil, 0, plan.MemoryPrivate, ""
	return errors.Join(errs...)
}

// alive tells whether a process runs; one that nobody has collected yet does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// login logs in to all targets and returns the devices, first units first.
func (d *iserd) login(ctx context.Context, w want) ([]string, error) {
	if err := d.start(ctx); err != nil {
		return nil, err
	}
	if err := d.register(ctx, w.memory); err != nil {
		return nil, err
	}
	portal := iserPortal
	if w.transport == "tcp" {
		portal = tcpPortal
	}
	var devices []api.Device
	for i := range max(w.targets, 1) {
		var r api.LoginReply
		if err := ask(ctx, &r, "login", targetName(i), "--portal", portal, "--transport", w.transport); err != nil {
			return nil, fmt.Errorf("%w; %s", err, lastWords())
		}
		devices = append(devices, r.Devices...)
	}
	slices.SortStableFunc(devices, func(a, b api.Device) int { return cmp.Compare(a.LUN, b.LUN) })
	var paths []string
	for _, x := range devices {
		if x.Transport != w.transport {
			return nil, fmt.Errorf("%s is served over %s", x.Path, x.Transport)
		}
		paths = append(paths, x.Path)
	}
	return paths, nil
}

func (d *iserd) logout(ctx context.Context, w want) error {
	if d.cmd == nil {
		return nil
	}
	var errs []error
	for i := range max(w.targets, 1) {
		if _, err := run(ctx, "iserctl", "logout", targetName(i)); err != nil {
			errs = append(errs, fmt.Errorf("%w; %s", err, lastWords()))
		}
	}
	return errors.Join(errs...)
}

// register hands the file of fio's memory to the daemon, and takes back what it has had before.
func (d *iserd) register(ctx context.Context, m plan.Memory) error {
	if m == d.memory {
		return nil
	}
	if d.buffer != "" {
		if _, err := run(ctx, "iserctl", "buffer", "remove", d.buffer); err != nil {
			return err
		}
		d.memory, d.buffer = plan.MemoryPrivate, ""
	}
	if m == plan.MemoryPrivate {
		return nil
	}
	if _, err := run(ctx, "iserctl", "buffer", "--help"); err != nil {
		return skipError("this iserctl has no command \"buffer\"")
	}
	if err := makeMemory(ctx, m); err != nil {
		return err
	}
	var reply struct {
		Buffers []struct {
			ID uint32 `json:"id"`
		} `json:"buffers"`
	}
	if err := ask(ctx, &reply, "buffer", "add", memoryFiles[m]); err != nil {
		return err
	}
	if len(reply.Buffers) != 1 {
		return fmt.Errorf("iserctl buffer add made %d buffers, want 1", len(reply.Buffers))
	}
	d.memory, d.buffer = m, strconv.FormatUint(uint64(reply.Buffers[0].ID), 10)
	return nil
}

// traffic returns the bytes that all devices of the daemon have moved, and those of them that went without a copy.
func (d *iserd) traffic(ctx context.Context) (all, shared uint64, err error) {
	var r api.DevicesReply
	if err := ask(ctx, &r, "device", "stats"); err != nil {
		return 0, 0, err
	}
	for _, x := range r.Devices {
		if x.Stats.Errors > 0 {
			return 0, 0, fmt.Errorf("%s counts %d errors", x.Path, x.Stats.Errors)
		}
		all += x.Stats.ReadBytes + x.Stats.WriteBytes
		shared += x.Stats.BytesShared
	}
	return all, shared, nil
}

// ask runs iserctl with --json and decodes what it prints.
func ask(ctx context.Context, reply any, args ...string) error {
	out, err := run(ctx, "iserctl", append(args, "--json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), reply)
}

// lastWords returns the end of the daemon's log on one line.
func lastWords() string {
	b, _ := os.ReadFile(daemonLog)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "its log ends with: " + strings.Join(lines[max(0, len(lines)-4):], " | ")
}
