package testbed

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testbed/targets"
)

// FetchTGT puts tgt's programs and the libraries they need into the cache, so that tests on the host have a second target over TCP.
// Nothing is installed: Debian's package would start a daemon. It does nothing when they are there or tgtd is installed.
//
// Errors are [*Problem].
func FetchTGT(ctx context.Context, w io.Writer) error {
	l := newLog(w)
	if _, err := findTGT(); err == nil {
		return nil
	}
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	// What installing it would bring; apt checks what it downloads against Debian's signature.
	simulate := func() ([]byte, error) {
		return exec.CommandContext(ctx, "apt-get", "install", "--simulate", "--no-install-recommends", "-qq", "--yes", "tgt").Output()
	}
	out, err := simulate()
	if err != nil && os.Geteuid() == 0 {
		l.printf("apt knows no package tgt; refreshing its index")
		if err := aptGet(ctx, l, "update"); err != nil {
			return err
		}
		out, err = simulate()
	}
	if err != nil {
		return &Problem{What: "apt does not know the package tgt", Do: "run apt-get update", Err: err}
	}
	packages := simulated(string(out))
	dir := filepath.Join(cache, "tgt")
	tmp := dir + ".tmp"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return diskFull(err, cache)
	}
	defer os.RemoveAll(tmp)
	l.printf("fetching tgtd into %s for tests on this host (it is not installed, and no service is started)", dir)
	get := exec.CommandContext(ctx, "apt-get", append([]string{"-qq", "-o", "APT::Sandbox::User=root", "download"}, packages...)...)
	get.Dir = tmp
	if out, err := get.CombinedOutput(); err != nil {
		return &Problem{What: "apt cannot download tgt: " + strings.Join(lastLines(out, 2), "; "), Do: "check this host's network, or run apt-get update", Err: err}
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if err := command(ctx, "dpkg-deb", "-x", deb, tmp); err != nil {
			return diskFull(err, tmp)
		}
		os.Remove(deb)
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// simulated returns the packages that apt-get install --simulate would install, from its lines "Inst NAME (VERSION ...)".
func simulated(out string) (names []string) {
	for _, line := range strings.Split(out, "\n") {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "Inst" {
			names = append(names, f[1])
		}
	}
	return names
}

// findTGT returns the installed programs, else those in the cache.
func findTGT() (targets.Programs, error) {
	if d, err := lookPath("tgtd"); err == nil {
		if a, err := lookPath("tgtadm"); err == nil {
			return targets.Programs{Tgtd: d, Tgtadm: a}, nil
		}
	}
	cache, err := cacheDir()
	if err != nil {
		return targets.Programs{}, err
	}
	root := filepath.Join(cache, "tgt")
	libs, _ := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu"))
	p := targets.Programs{
		Tgtd: filepath.Join(root, "usr/sbin/tgtd"), Tgtadm: filepath.Join(root, "usr/sbin/tgtadm"), Env: []string{"LD_LIBRARY_PATH=" + strings.Join(libs, ":")},
	}
	for _, f := range []string{p.Tgtd, p.Tgtadm} {
		if _, err := os.Stat(f); err != nil {
			return targets.Programs{}, &Problem{What: "tgtd is neither installed nor in the cache", Do: "`make test-unit` fetches it", Err: err}
		}
	}
	return p, nil
}

// TGTD returns tgt's programs for targets.StartTGTD on the host; a test that lacks them skips, or fails when REQUIRE names tgtd. tgtd
// needs root.
func TGTD(t testing.TB) targets.Programs {
	t.Helper()
	p, err := findTGT()
	if err == nil && os.Geteuid() != 0 {
		err = &Problem{What: "tgtd needs root", Do: "run the test as root"}
	}
	require.Need(t, "tgtd", err)
	return p
}
