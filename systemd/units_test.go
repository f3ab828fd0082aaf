// Package systemd holds the units; its only code is the test that checks them.
package systemd

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"iserd.org/iserd/internal/require"
)

// TestVerify has systemd read the units, together and with multi-user.target, so that an ordering cycle shows as well.
func TestVerify(t *testing.T) {
	exe, err := exec.LookPath("systemd-analyze")
	require.Need(t, "systemd", err)
	units, err := filepath.Glob("*.service")
	if err != nil || len(units) == 0 {
		t.Fatal(units, err)
	}
	dir := t.TempDir()
	program := regexp.MustCompile(`(?m)^(Exec\w+)=\S+`)
	args := []string{"verify", "--man=no", "multi-user.target"}
	for _, u := range units {
		b, err := os.ReadFile(u)
		if err != nil {
			t.Fatal(err)
		}
		// The programs need not be installed where the test runs.
		b = program.ReplaceAll(b, []byte("$1=/bin/true"))
		p := filepath.Join(dir, u)
		if err := os.WriteFile(p, b, 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, p)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":")
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
