package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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
