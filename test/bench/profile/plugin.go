package profile

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

//go:embed plugin/plugin.c
var source string

// Build compiles the plugin into a folder and returns its file. It takes gcc.
func Build(ctx context.Context, dir string) (string, error) {
	c, so := filepath.Join(dir, "plugin.c"), filepath.Join(dir, "plugin.so")
	if err := os.WriteFile(c, []byte(source), 0o644); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-o", so, c).CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile QEMU's plugin: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return so, nil
}

// Supported tells whether a version of QEMU, as in "7.2.22", takes the plugin: it has version 1 of the interface.
func Supported(version string) error {
	major, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if err1 != nil || err2 != nil || a*100+b < 402 || a > 8 {
		return fmt.Errorf("the plugin is for QEMU 4.2 to 8.2, and this is %s", version)
	}
	return nil
}

// Block is straight code that was executed.
type Block struct {
	Address      uint64
	Instructions uint64 // all executions together
}

// ReadBlocks reads what the plugin has written.
func ReadBlocks(file string) ([]Block, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var blocks []Block
	s := bufio.NewScanner(f)
	for s.Scan() {
		if s.Text() == "end" {
			return blocks, nil
		}
		var address, n, executions uint64
		if _, err := fmt.Sscanf(s.Text(), "%x %d %d", &address, &n, &executions); err != nil {
			return nil, fmt.Errorf("%s: line %q: %w", file, s.Text(), err)
		}
		blocks = append(blocks, Block{address, n * executions})
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("%s: it ends early", file)
}
