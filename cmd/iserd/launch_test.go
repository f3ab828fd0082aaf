package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"iserd.org/iserd/daemon/config"
)

// The program that is installed now is tried, whatever the process runs that came from there.
func TestTryInstalled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "iserd-io")
	program, err := exec.LookPath("sleep") // it can tell its version
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-L", program, path).CombinedOutput(); err != nil {
		t.Fatal(string(out))
	}
	cmd := exec.Command(path, "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	ctx := context.Background()
	if err := tryInstalled(ctx, cmd.Process.Pid); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(path+".new", []byte("#!/bin/sh\necho no library >&2; exit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	if err := tryInstalled(ctx, cmd.Process.Pid); err == nil || !strings.Contains(err.Error(), path+" --version: exit status 3: no library") {
		t.Errorf("another program: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := tryInstalled(ctx, cmd.Process.Pid); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("no program: %v", err)
	}
}

// A data plane has a thread for each queue of the devices that wait for it, whatever was configured meanwhile.
func TestThreads(t *testing.T) {
	dir := t.TempDir()
	program, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	many := runtime.NumCPU() + 3
	asked := func(reactors int) string {
		t.Helper()
		cmd, err := dataPlane(config.Config{DataPlane: program, Reactors: reactors}, dir)
		if err != nil {
			t.Fatal(err)
		}
		return cmd.Args[slices.Index(cmd.Args, "--reactors")+1]
	}
	for _, r := range []struct {
		record   string // of a device
		reactors int
		want     int
	}{
		{"", 0, 0}, {"", 1, 1},
		{`{"ublk_id":0,"queues":2}`, 1, 2}, {`{"ublk_id":0,"queues":2}`, 2, 2}, {`{"ublk_id":0,"queues":2}`, 3, 3}, {`{"ublk_id":0,"queues":1}`, 0, 0},
		{fmt.Sprintf(`{"queues":%d}`, many), 0, many}, {"damaged", 1, 1},
	} {
		if err := os.RemoveAll(dir + "/devices"); err != nil {
			t.Fatal(err)
		}
		if r.record != "" {
			if err := os.Mkdir(dir+"/devices", 0o755); err != nil {
				t.Fatal(err)
			}
			for name, text := range map[string]string{"0.json": r.record, "0.env": "queues", "1.json": `{"ublk_id":1,"queues":1}`} {
				if err := os.WriteFile(filepath.Join(dir, "devices", name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := asked(r.reactors); got != strconv.Itoa(r.want) {
			t.Errorf("%d threads configured, device %q: started with %s, want %d", r.reactors, r.record, got, r.want)
		}
	}
}
