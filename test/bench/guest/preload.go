package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"strings"
)

// programs are those that run while something is measured, or whose time is.
var programs = []string{"fio", "iserd", "iserd-io", "iserctl", "iscsid", "iscsiadm", "iscsi-perf"}

// preload reads programs and their libraries into the page cache. A page that is missing later would be read from the host's disk, and guest
// time would jump meanwhile.
func preload(ctx context.Context) error {
	files := map[string]bool{}
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		files[path] = true
		out, err := run(ctx, "ldd", path)
		if err != nil {
			return err
		}
		// "	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", "	/lib64/ld-linux-x86-64.so.2 (0x...)"
		for _, f := range strings.Fields(out) {
			if strings.HasPrefix(f, "/") {
				files[f] = true
			}
		}
	}
	for path := range files {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, f)
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
