// Command testbed is the test guest for a person at a keyboard.
//
//	go run ./internal/testbed/cmd/testbed deps             install the tools that building and testing take
//	go run ./internal/testbed/cmd/testbed tgt              put tgtd into the cache, a target for tests on the host
//	go run ./internal/testbed/cmd/testbed prepare          that, and fill the cache with kernel and image
//	go run ./internal/testbed/cmd/testbed shell            a shell in a fresh guest, with the project's programs in PATH
//	go run ./internal/testbed/cmd/testbed run CMD [ARG]... one command there; its exit status is this program's
//
// It imports nothing that needs cgo, so that deps can bring what cgo needs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"

	"iserd.org/iserd/internal/testbed"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbed:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func run(ctx context.Context) (int, error) {
	count := flag.Bool("count", false, "guest time counts instructions; one CPU")
	console := flag.Bool("console", false, "show the guest's console")
	bus := flag.Bool("bus", false, "start the D-Bus system bus in the guest")
	share := flag.String("share", "", "folder of the host that becomes /host")
	bare := flag.Bool("bare", false, "do not build the project's programs into the guest")
	limit := flag.Duration("timeout", 10*time.Minute, "end the command of run after this time")
	flag.Usage = func() {
		fmt.Fprintf(os.Stderr, "usage: testbed [flags] deps | tgt | prepare | shell | run CMD [ARG]...\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	switch flag.Arg(0) {
	case "deps":
		return 0, testbed.InstallTools(ctx, os.Stderr)
	case "tgt":
		return 0, testbed.FetchTGT(ctx, os.Stderr)
	case "prepare", "shell", "run":
	default:
		flag.Usage()
		return 2, nil
	}
	if err := testbed.InstallTools(ctx, os.Stderr); err != nil {
		return 1, err
	}
	if flag.Arg(0) == "prepare" {
		_, err := testbed.Prepare(ctx, os.Stderr)
		return 0, err
	}
	bed, err := testbed.Prepare(ctx, os.Stderr)
	if err != nil {
		return 1, err
	}
	cfg := testbed.GuestConfig{Count: *count, SystemBus: *bus, Share: *share}
	if *console {
		cfg.Console = os.Stderr
	}
	guest, err := bed.Boot(ctx, cfg)
	if err != nil {
		return 1, err
	}
	code, err := inGuest(ctx, guest, *bare, *limit)
	if cerr := guest.Close(); cerr != nil && err == nil && ctx.Err() == nil {
		err = cerr
	}
	return code, err
}

func inGuest(ctx context.Context, guest *testbed.Guest, bare bool, limit time.Duration) (int, error) {
	if !bare {
		if err := guest.InstallPrograms(ctx, testbed.Programs...); err != nil {
			return 1, err
		}
	}
	if flag.Arg(0) == "run" {
		return guest.Run(ctx, testbed.Command{Args: flag.Args()[1:], Stdin: os.Stdin, Timeout: limit}, os.Stdout, os.Stderr)
	}
	// script(1) gives the shell a terminal in the guest; ours becomes raw.
	fmt.Fprintf(os.Stderr, "a shell in the guest; %s is /host there; exit ends it\n", guest.Share())
	if old, err := term.MakeRaw(int(os.Stdin.Fd())); err == nil {
		defer term.Restore(int(os.Stdin.Fd()), old)
	}
	code, err := guest.Run(ctx, testbed.Command{
		Args: []string{"script", "-q", "-c", "bash", "/dev/null"}, Dir: "/root", Env: []string{"TERM=" + os.Getenv("TERM")},
		Stdin: io.Reader(os.Stdin), Timeout: 24 * time.Hour,
	}, os.Stdout, os.Stdout)
	if left := new(testbed.LeftoverError); errors.As(err, &left) {
		err = nil // what a person leaves running is no fault
	}
	return code, err
}
