package iscsitcp

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
)

// TestLIO moves data to and from the kernel's target, under each combination of what may be negotiated, over IPv4 and IPv6.
func TestLIO(t *testing.T) {
	_, err := os.Stat("/sys/kernel/config/target")
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("not root")
	}
	require.Need(t, "guest", err)
	file := filepath.Join(t.TempDir(), "unit")
	const name = "iqn.2003-01.org.example:iscsitcp"
	addrs := []string{"10.0.0.1:3270", "[fd00::1]:3270"}
	yesNo := map[bool]string{true: "Yes", false: "No"}
	for _, initialR2T := range []bool{true, false} {
		for _, immediate := range []bool{true, false} {
			lio, err := targets.NewLIO(targets.LIOConfig{
				Name: name, Portals: []targets.Portal{targets.ParsePortal(addrs[0], false), targets.ParsePortal(addrs[1], false)},
				Units: []targets.Unit{{Kind: targets.FileIO, Path: file, Size: 32 << 20}},
				Parameters: map[string]string{
					"InitialR2T": yesNo[initialR2T], "ImmediateData": yesNo[immediate], "MaxOutstandingR2T": "4", "FirstBurstLength": "100000",
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, digest := range []login.Digest{login.DigestNone, login.DigestCRC32C} {
				for _, addr := range addrs {
					t.Run(fmt.Sprintf("InitialR2T=%v,ImmediateData=%v,%v,%s", initialR2T, immediate, digest, addr), func(t *testing.T) {
						testLIO(t, addr, file, initialR2T, immediate, digest)
					})
				}
			}
			if err := lio.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func testLIO(t *testing.T, addr, file string, initialR2T, immediate bool, digest login.Digest) {
	config := loginConfig("iqn.2003-01.org.example:iscsitcp")
	k := config.Keys
	k.InitialR2T, k.ImmediateData, k.FirstBurstLength, k.MaxOutstandingR2T = initialR2T, immediate, 100000, 4
	config.HeaderDigest, config.DataDigest = []login.Digest{digest}, []login.Digest{digest}
	c := connectTo(t, loop.New(t), addr, config)
	k = &c.result.Keys
	if k.InitialR2T != initialR2T || k.ImmediateData != immediate || k.HeaderDigest != digest || k.DataDigest != digest {
		t.Errorf("negotiated %v", c.result.Negotiated)
	}
	for range 3 { // a new nexus begins with a unit attention
		ready := &iscsi.Task{}
		c.submit(ready)
		c.wait(1)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	testTransfers(t, c, f)
	// Sense data and residuals of another kind of target.
	beyond := read10(32<<20/blockSize, make([]byte, 4096))
	inquiry := &iscsi.Task{Direction: iscsi.Read, Data: make([]byte, 255), CDB: [16]byte{0x12, 0, 0, 0, 255}}
	c.submit(beyond, inquiry)
	c.wait(2)
	if beyond.Status != 2 || beyond.SenseLen < 14 || beyond.Sense[2]&0xf != 5 {
		t.Errorf("read beyond the end: status %v, sense %x", beyond.Status, beyond.Sense[:beyond.SenseLen])
	}
	if inquiry.Status != 0 || inquiry.Residual == 0 || inquiry.Overflow {
		t.Errorf("inquiry: status %v, residual %d", inquiry.Status, inquiry.Residual)
	}
	c.logout()
}
