// Command reference makes targets in the test guest for tests that log in to one that the environment names (iscsi/login), and keeps them
// until its input ends. It prints the environment, one NAME=value a line, and an empty line when the targets take logins.
package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"

	"iserd.org/iserd/internal/testbed/targets"
)

// Where the targets are. tgtd is the one that can redirect a login.
const (
	portal = "10.0.0.1:3260"
	prefix = "iqn.2003-01.org.example:reference-"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	units := []targets.Unit{{Kind: targets.Ramdisk, Size: 8 << 20}}
	d, err := targets.StartTGTD(ctx, targets.TGTDConfig{Name: prefix + "open", Portal: netip.MustParseAddrPort(portal), Units: units})
	if err != nil {
		return err
	}
	defer d.Close()
	for _, t := range []targets.TGTTarget{
		{
			Name: prefix + "chap", Units: units,
			CHAP: &targets.CHAP{User: "me", Secret: "initiatorsecret", TargetUser: "them", TargetSecret: "targetsecret12"},
		},
		{Name: prefix + "moved", Units: units, Redirect: netip.MustParseAddrPort("10.0.0.2:3260")},
	} {
		if err := d.Add(ctx, t); err != nil {
			return err
		}
	}
	fmt.Printf("LOGIN_PORTAL=%s\nLOGIN_TARGET=%[2]sopen\nLOGIN_CHAP=%[2]schap\nLOGIN_MOVED=%[2]smoved\n\n", portal, prefix)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
