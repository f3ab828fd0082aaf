package testbed

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
)

// tool is something the host must have.
type tool struct {
	pkg   string   // Debian package that brings it
	why   string   // what it is for, shown to the user
	files []string // one of these exists when it is there; a name without a slash is looked up in PATH
}

// Host tools. runTools are enough to boot what the cache already holds; makeTools fill the cache; buildTools compile the project; testTools take part
// in tests of the host.
var (
	runTools  = []tool{{"qemu-system-x86", "runs the guest", []string{"qemu-system-x86_64"}}}
	makeTools = []tool{
		{"mmdebstrap", "builds the guest's root file system", []string{"mmdebstrap"}},
		{"e2fsprogs", "puts it on a drive image", []string{"mke2fs", "/sbin/mke2fs", "/usr/sbin/mke2fs"}},
		{"kmod", "indexes the guest's kernel modules", []string{"depmod", "/sbin/depmod", "/usr/sbin/depmod"}},
		{"gpgv", "checks Debian's signatures", []string{"gpgv"}},
		{"debian-archive-keyring", "holds the keys they are checked against", []string{keyring}},
	}
	buildTools = []tool{
		{"gcc", "compiles the binding to the verbs libraries", []string{"gcc"}},
		{"libc6-dev", "C headers for it", []string{"/usr/include/stdio.h"}},
		{"libibverbs-dev", "verbs headers for it", []string{"/usr/include/infiniband/verbs.h"}},
		{"librdmacm-dev", "connection manager headers for it", []string{"/usr/include/rdma/rdma_cma.h"}},
		{"pkg-config", "finds those libraries", []string{"pkg-config"}},
	}
	testTools = []tool{{"libiscsi-bin", "judges the scripted target of the tests", []string{"iscsi-test-cu"}}}
)

// present reports whether one of the tool's files exists.
func (t tool) present() bool {
	for _, f := range t.files {
		if strings.Contains(f, "/") {
			if _, err := os.Stat(f); err == nil {
				return true
			}
		} else if _, err := exec.LookPath(f); err == nil {
			return true
		}
	}
	return false
}

// missing returns those of the tools that the host lacks.
func missing(lists ...[]tool) []tool {
	var m []tool
	for _, l := range lists {
		for _, t := range l {
			if !t.present() {
				m = append(m, t)
			}
		}
	}
	return m
}

// InstallTools makes sure that the host has the programs and headers that building and testing the project and running its guest take. What is
// missing is installed with apt-get, without recommended packages, after saying what and why on w. Only tools are installed: no package
// among them runs a service.
//
// It needs root only when something is missing. Errors are [*Problem].
func InstallTools(ctx context.Context, w io.Writer) error {
	l, want := newLog(w), missing(runTools, makeTools, buildTools, testTools)
	if len(want) == 0 {
		return nil
	}
	var names []string
	l.printf("this host lacks tools; installing them with apt-get (tools only, no service is started):")
	for _, t := range want {
		names = append(names, t.pkg)
		l.printf("  %-24s %s", t.pkg, t.why)
	}
	install := "apt-get install --no-install-recommends " + strings.Join(names, " ")
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return &Problem{What: "the testbed runs on Linux for amd64, not on " + runtime.GOOS + "/" + runtime.GOARCH, Do: "run it there"}
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return &Problem{What: "this host has no apt-get", Do: "install by its own means what the Debian packages " + strings.Join(names, " ") + " hold"}
	}
	if os.Geteuid() != 0 {
		return &Problem{What: "installing tools needs root", Do: "run this as root, or first: " + install}
	}
	args := append([]string{"install", "--yes", "--no-install-recommends"}, names...)
	if err := aptGet(ctx, newLog(nil), args...); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		l.printf("apt's package index is missing or older than the mirror; refreshing it")
		if err := aptGet(ctx, l, "update"); err != nil {
			return err
		}
		if err := aptGet(ctx, l, args...); err != nil {
			return err
		}
	}
	if still := missing(want); len(still) > 0 {
		return &Problem{What: fmt.Sprintf("%s was installed and still is not found", still[0].pkg), Do: "look for " + still[0].files[0] + " in PATH"}
	}
	l.printf("tools installed")
	return nil
}

// aptGet runs apt-get without questions. RUNLEVEL=1 tells maintainer scripts that this is no time to start a service.
func aptGet(ctx context.Context, l *log, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "LC_ALL=C.UTF-8")
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	what := fmt.Sprintf("apt-get %s failed", args[0])
	text := string(out)
	switch {
	case strings.Contains(text, "No space left") || strings.Contains(text, "enough free space"):
		return &Problem{What: what + ": the disk is full", Do: "free some space", Err: err}
	case strings.Contains(text, "Temporary failure resolving") || strings.Contains(text, "Could not connect") || strings.Contains(text, "Unable to connect") || strings.Contains(text, "Connection timed out"):
		return &Problem{What: what + ": the package mirror cannot be reached", Do: "connect this host to the network, or set a proxy for apt", Err: err}
	}
	for _, line := range lastLines(out, 8) {
		l.printf("  apt-get: %s", line)
	}
	return &Problem{What: what, Do: "look at its last lines above", Err: err}
}

// lastLines returns up to n trailing lines of b that are not empty.
func lastLines(b []byte, n int) []string {
	var lines []string
	for _, s := range strings.Split(string(bytes.TrimSpace(b)), "\n") {
		if s = strings.TrimSpace(s); s != "" {
			lines = append(lines, s)
		}
	}
	return lines[max(0, len(lines)-n):]
}
