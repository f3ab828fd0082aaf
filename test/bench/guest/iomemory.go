package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/test/bench/plan"
)

// ioMemory is the size of the files from which fio takes its I/O memory; the largest job needs 8 MiB.
const ioMemory = 64 << 20

// hugePage is the size of a huge page.
const hugePage = 2 << 20

// memoryFiles are those files. Each is on a file system that has its kind of pages.
var memoryFiles = map[plan.Memory]string{
	plan.MemoryTmpfs: "/dev/shm/iserd-bench",
	plan.MemoryHuge:  "/run/iserd-bench/memory",
}

// memoryOption is fio's option for it; empty for what it does by itself.
func memoryOption(m plan.Memory) []string {
	switch m {
	case plan.MemoryTmpfs:
		return []string{"--mem=mmapshared:" + memoryFiles[m]}
	case plan.MemoryHuge:
		return []string{"--mem=mmaphuge:" + memoryFiles[m], fmt.Sprintf("--hugepage-size=%d", hugePage)}
	}
	return nil
}

// makeMemory makes the file unless it is there.
func makeMemory(ctx context.Context, m plan.Memory) error {
	file := memoryFiles[m]
	if _, err := os.Stat(file); err == nil || m == plan.MemoryPrivate {
		return nil
	}
	if m == plan.MemoryHuge {
		const pages = "/proc/sys/vm/nr_hugepages"
		if err := os.WriteFile(pages, []byte(strconv.Itoa(ioMemory/hugePage)), 0); err != nil {
			return err
		}
		if text, err := readFile(pages); err != nil || text != strconv.Itoa(ioMemory/hugePage) {
			return fmt.Errorf("the kernel has %s huge pages, want %d (%v)", text, ioMemory/hugePage, err)
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := unix.Mount("hugetlbfs", filepath.Dir(file), "hugetlbfs", 0, "pagesize=2M"); err != nil {
			return fmt.Errorf("mount hugetlbfs on %s: %w", filepath.Dir(file), err)
		}
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Truncate(ioMemory)
}
