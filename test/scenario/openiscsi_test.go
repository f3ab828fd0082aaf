package scenario

import (
	"errors"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

// openISCSI starts open-iscsi with the kernel's initiators under a name, as Debian configures it. It ends with the test, or when kill is called.
func openISCSI(t testing.TB, name string) (kill func()) {
	t.Helper()
	must(t, "modprobe", "-a", "ib_iser", "iscsi_tcp", "sd_mod", "sg")
	for _, d := range []string{"/run/lock/iscsi", "/etc/iscsi"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile("/etc/iscsi/initiatorname.iscsi", []byte("InitiatorName="+name+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("iscsid", "-f")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	t.Cleanup(kill)
	waitFor(t, "iscsid answers", 30*time.Second, func() error {
		if r := run(t, "iscsiadm", "-m", "session"); r.code != 21 && r.code != 0 { // 21: it has no session
			return errors.New(r.stderr)
		}
		return nil
	})
	return kill
}
