package ibft

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"iserd.org/iserd/api"
)

// testdata is laid out as the kernel shows a table, file by file; what it holds was written by hand after drivers/firmware/iscsi_ibft.c.
func TestRead(t *testing.T) {
	got, err := Read("testdata")
	if err != nil {
		t.Fatal(err)
	}
	if got.Initiator != "iqn.2010-04.org.ipxe:0f1e2d3c" || len(got.NICs) != 2 || len(got.Targets) != 2 {
		t.Fatalf("%+v", got)
	}
	a := netip.MustParseAddr
	first := got.NICs[0]
	if first.MAC.String() != "02:00:5e:10:00:06" || !first.Boot || first.Address != a("192.168.1.10") || first.PrefixLength != 24 ||
		first.Gateway != a("192.168.1.1") || len(first.DNS) != 1 || first.DHCP != a("192.168.1.1") || first.Hostname != "client1" {
		t.Errorf("%+v", first)
	}
	if second := got.NICs[1]; second.Boot || second.Address != a("fd00::10") || second.PrefixLength != 25 || second.VLAN != 7 || second.Gateway.IsValid() {
		t.Errorf("%+v", second)
	}
	boot := got.Targets[0]
	if string(boot.Secret.Reveal()) != "firmware-secret-1" || string(boot.TargetSecret.Reveal()) != "firmware-secret-2" {
		t.Error("other secrets")
	}
	boot.Secret, boot.TargetSecret = api.Secret{}, api.Secret{}
	want := Target{Boot: true, Name: "iqn.2003-01.org.example:boot", Address: a("192.168.1.1"), Port: 3260, User: "client1", TargetUser: "storage"}
	if !reflect.DeepEqual(boot, want) {
		t.Errorf("%+v, want %+v", boot, want)
	}
	if x := got.Targets[1]; x.Name != "iqn.2003-01.org.example:second" || x.LUN != 3 || x.Port != 3261 || x.NIC != 1 || x.User != "" || !x.Secret.IsZero() {
		t.Errorf("%+v", x)
	}
	if len(got.Notes) != 1 || !strings.Contains(got.Notes[0], "target 2") {
		t.Errorf("notes %q", got.Notes)
	}
}

func TestNoTable(t *testing.T) {
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}

func TestLUN(t *testing.T) {
	for text, want := range map[string]int{
		"00000000": 0, "01000000": 1, "0f000000": 15, "": -1, "010000000": -1, "0x000000": -1, "10000000": -1, "00000001": -1, "0000000": -1,
	} {
		if got := lun(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

// Whatever the files hold, what comes out is a table of valid names, without a panic.
func FuzzRead(f *testing.F) {
	f.Add("iqn.2003-01.org.example:boot", "10.0.0.1", "3260", "00000000", "2", "user", "secret")
	f.Add("", "fd00::1", "-1", "x", "99999999999999999999", "\x00\xff", "\n")
	f.Fuzz(func(t *testing.T, name, addr, port, lun, kind, user, secret string) {
		dir := t.TempDir()
		d := filepath.Join(dir, "target0")
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
		for file, text := range map[string]string{
			"flags": "3", "target-name": name, "ip-addr": addr, "port": port, "lun": lun, "chap-type": kind, "chap-name": user, "chap-secret": secret,
		} {
			if err := os.WriteFile(filepath.Join(d, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range got.Targets {
			if api.CheckName(x.Name) != nil || !x.Address.IsValid() || x.Port == 0 || x.LUN < -1 || x.LUN > 15 || strings.ContainsAny(x.User, "\x00\n") {
				t.Errorf("%+v", x)
			}
		}
	})
}
