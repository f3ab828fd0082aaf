package ublk

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// roleVariable makes the test binary play a part of its own in another process: a server must not do I/O on its device, nor stop it.
const roleVariable = "ISERD_UBLK_TEST_ROLE"

func TestMain(m *testing.M) {
	strict = true
	var err error
	switch role := os.Getenv(roleVariable); role {
	case "":
		goleak.VerifyTestMain(m)
		return
	case "server":
		err = runServer(os.Stdin, os.Stdout)
	case "io":
		err = runClient(os.Args[1:])
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
