package targets

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
)

const (
	me     = "iqn.2003-01.org.example:referee"
	lioIQN = "iqn.2003-01.org.example:lio"
	tgtIQN = "iqn.2003-01.org.example:tgt"
)

// needTargets skips where the kernel's target is not at hand: this is a test for the guest.
func needTargets(t *testing.T) {
	t.Helper()
	_, err := os.Stat(configfs)
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("not root")
	}
	require.Need(t, "guest", err)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ls asks a target for its units with libiscsi, an initiator that is not ours, and returns what iscsi-ls prints. Each unit may have news
// to report once (a unit attention), at which iscsi-ls gives up.
func ls(t *testing.T, url string) string {
	t.Helper()
	for {
		out, err := exec.CommandContext(t.Context(), "iscsi-ls", "-i", me, "-s", url).CombinedOutput()
		if err == nil {
			return string(out)
		}
		if !strings.Contains(string(out), "UNIT_ATTENTION") {
			t.Fatalf("iscsi-ls %s: %v: %s", url, err, out)
		}
	}
}

// inquire logs in to a unit and returns what iscsi-inq prints.
func inquire(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "iscsi-inq", append([]string{"-i", me}, args...)...).CombinedOutput()
	return string(out), err
}

// waitNoSessions waits until a target has seen its initiators go.
func waitNoSessions(t *testing.T, target interface{ Sessions() (int, error) }) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		n, err := target.Sessions()
		must(t, err)
		if n == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d sessions are left", n)
		}
	}
}

func TestLIO(t *testing.T) {
	needTargets(t)
	file := filepath.Join(t.TempDir(), "unit")
	l, err := NewLIO(LIOConfig{
		Name:    lioIQN,
		Portals: []Portal{ParsePortal("10.0.0.1:3260", true), ParsePortal("[fd00::1]:3260", false)},
		Units: []Unit{
			{Kind: Ramdisk, Size: 64 << 20, Product: "RAM", Serial: "0123456789abcdef"},
			{Kind: FileIO, Size: 32 << 20, Path: file, BlockSize: 4096, WriteCache: true},
		},
	})
	must(t, err)
	defer l.Close()
	for _, url := range []string{"iscsi://10.0.0.1:3260", "iscsi://[fd00::1]:3260"} {
		if out := ls(t, url); strings.Count(out, lioIQN) != 2 || strings.Count(out, "Lun:") != 4 { // each portal lists both
			t.Errorf("iscsi-ls %s: %s", url, out)
		}
	}
	if out, err := inquire(t, "-e", "1", "-c", "128", "iscsi://10.0.0.1:3260/"+lioIQN+"/0"); err != nil || !strings.Contains(out, "0123456789abcdef") {
		t.Errorf("serial: %v: %s", err, out)
	}
	if out, err := inquire(t, "iser://10.0.0.1:3260/"+lioIQN+"/0"); err != nil || !strings.Contains(out, "Product:RAM") {
		t.Errorf("product over iSER: %v: %s", err, out)
	}
	n, err := l.Logins()
	if err != nil || n == 0 {
		t.Errorf("Logins() = %d, %v", n, err)
	}
	waitNoSessions(t, l)
	must(t, l.AddUnit(5, Unit{Kind: Ramdisk, Size: 1 << 20}))
	if out := ls(t, "iscsi://10.0.0.1:3260"); strings.Count(out, "Lun:") != 6 {
		t.Errorf("after AddUnit: %s", out)
	}
	must(t, l.RemoveUnit(5))
	must(t, l.SetEnabled(false))
	if out, err := inquire(t, "iscsi://10.0.0.1:3260/"+lioIQN+"/0"); err == nil {
		t.Errorf("a shut target took a login: %s", out)
	}
	must(t, l.Close())
	must(t, l.Close())
	for _, d := range []string{"iscsi/" + lioIQN, "core/rd_mcp_0", "core/fileio_0"} {
		if _, err := os.Stat(filepath.Join(configfs, d)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", d, err)
		}
	}
}

func TestLIOInitiators(t *testing.T) {
	needTargets(t)
	l, err := NewLIO(LIOConfig{
		Name: lioIQN, Portals: []Portal{ParsePortal("10.0.0.1:3260", false)}, Units: []Unit{{Kind: Ramdisk, Size: 8 << 20}}, Initiators: []string{me},
	})
	must(t, err)
	defer l.Close()
	if out, err := inquire(t, "iscsi://10.0.0.1:3260/"+lioIQN+"/0"); err != nil {
		t.Errorf("the named initiator: %v: %s", err, out)
	}
	out, err := exec.Command("iscsi-inq", "-i", me+"-not", "iscsi://10.0.0.1:3260/"+lioIQN+"/0").CombinedOutput()
	if err == nil {
		t.Errorf("another initiator was admitted: %s", out)
	}
	must(t, l.Close())
}

func TestLIOFailure(t *testing.T) {
	needTargets(t)
	_, err := NewLIO(LIOConfig{
		Name: lioIQN, Portals: []Portal{ParsePortal("10.0.0.1:3260", false)},
		Units: []Unit{{Kind: Ramdisk, Size: 8 << 20}, {Kind: Ramdisk, Size: 8 << 20, BlockSize: 513}},
	})
	if err == nil || !strings.Contains(err.Error(), "block_size") || !strings.Contains(err.Error(), "lun 1") {
		t.Errorf("a block size of 513: %v", err)
	}
	if _, err := os.Stat(filepath.Join(configfs, "iscsi", lioIQN)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is left: %v", err)
	}
}

func TestTGTD(t *testing.T) {
	needTargets(t)
	for _, iser := range []bool{false, true} {
		name, scheme := "TCP", "iscsi"
		if iser {
			name, scheme = "iSER", "iser"
		}
		t.Run(name, func(t *testing.T) {
			d, err := StartTGTD(t.Context(), TGTDConfig{
				Name: tgtIQN, Portal: netip.MustParseAddrPort("10.0.0.1:3260"), ISER: iser, Initiators: []string{me},
				Units: []Unit{{Kind: Ramdisk, Size: 64 << 20, Product: "RAM"}, {Kind: FileIO, Size: 32 << 20, Path: filepath.Join(t.TempDir(), "unit")}},
			})
			must(t, err)
			defer d.Close()
			if out, err := inquire(t, scheme+"://10.0.0.1:3260/"+tgtIQN+"/1"); err != nil || !strings.Contains(out, "Product:RAM") {
				t.Fatalf("inquiry: %v: %s\n%s", err, out, d.Log())
			}
			waitNoSessions(t, d)
			must(t, d.Close())
		})
	}
}

func TestCountSessions(t *testing.T) {
	const out = `Target 1: iqn.2003-01.org.example:a
    I_T nexus information:
        I_T nexus: 1
            Initiator: iqn.2003-01.org.example:me alias: guest
        I_T nexus: 3
Target 2: iqn.2003-01.org.example:b
    I_T nexus information:
        I_T nexus: 2
`
	for name, want := range map[string]int{"iqn.2003-01.org.example:a": 2, "iqn.2003-01.org.example:b": 1, "iqn.2003-01.org.example:c": 0} {
		if n := countSessions(out, name); n != want {
			t.Errorf("%s: %d sessions, want %d", name, n, want)
		}
	}
}

func TestTGTDConfig(t *testing.T) {
	for _, tc := range []struct {
		cfg  TGTDConfig
		want string
	}{
		{TGTDConfig{ISER: true, Portal: netip.MustParseAddrPort("10.0.0.1:3261")}, "port 3260 only"},
		{TGTDConfig{ISER: true, Portal: netip.MustParseAddrPort("10.0.0.1:3260")}, "none is named"},
		{TGTDConfig{Portal: netip.MustParseAddrPort("127.0.0.1:1"), Programs: Programs{Tgtd: "/nonexistent", Tgtadm: "/nonexistent"}}, "no such file"},
	} {
		if _, err := StartTGTD(t.Context(), tc.cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v, want %q", err, tc.want)
		}
	}
}
