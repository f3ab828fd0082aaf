// Command demo shows the project's whole job on this machine: it boots a guest with a kernel that has ublk and soft RoCE, sets up a real
// iSER target there, and lets iserd discover it, log in, and serve its logical units as block devices, on which a file system and fio
// with verification then live. The part inside the guest is test/demo/guest.
//
// It ends with a table, and with status 0 only when every step succeeded. Run it by `make demo`.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"iserd.org/iserd/internal/testbed"
)

// limit is how long the part in the guest may take.
const limit = 5 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	begin := time.Now()
	if err := run(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintf(os.Stderr, "\ndemo failed after %.0f s: %v\n", time.Since(begin).Seconds(), err)
		os.Exit(1)
	}
	fmt.Printf("\nEverything above was verified; %.0f s in all.\n", time.Since(begin).Seconds())
}

func run(ctx context.Context) (err error) {
	if err := testbed.InstallTools(ctx, os.Stdout); err != nil {
		return err
	}
	bed, err := testbed.Prepare(ctx, os.Stdout)
	if err != nil {
		return err
	}
	guest, err := bed.Boot(ctx, testbed.GuestConfig{SystemBus: true})
	if err != nil {
		return err
	}
	defer func() {
		if cerr := guest.Close(); err == nil {
			err = cerr
		}
	}()
	fmt.Println("         building iserd, iserd-io and iserctl for it")
	if err := guest.InstallPrograms(ctx, append([]string{"./test/demo/guest"}, testbed.Programs...)...); err != nil {
		return err
	}
	code, err := guest.Run(ctx, testbed.Command{Args: []string{testbed.Bin + "/guest", bed.Accel()}, Timeout: limit}, os.Stdout, os.Stdout)
	if left := new(testbed.LeftoverError); errors.As(err, &left) && code == 0 {
		return fmt.Errorf("in the guest, %w", err)
	}
	if err != nil {
		return err
	}
	for _, c := range guest.Complaints() {
		fmt.Printf("the guest's kernel says: %s\n", c.Line)
	}
	if code != 0 {
		return errors.New("a step in the guest failed, see above")
	}
	return nil
}
