package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"iserd.org/iserd/test/bench/plan"
)

// measureCreation takes the time of a login to a target with many units, and of the logout.
func (b *bench) measureCreation(ctx context.Context, c plan.Cell) (map[string]float64, error) {
	w := wantOf(c)
	if err := b.site.leave(ctx); err != nil {
		return nil, err
	}
	if err := b.site.serve(w); err != nil {
		return nil, err
	}
	var err error
	if c.Initiator.Ours() {
		err = b.site.iserd.start(ctx)
	} else {
		err = b.site.peer.start(ctx)
	}
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := b.site.enter(ctx, w); err != nil {
		return nil, b.site.orLeave(ctx, err)
	}
	command := time.Since(begin)
	paths := b.site.paths
	for _, p := range paths {
		if err := readBlock(p); err != nil {
			return nil, err
		}
	}
	in := time.Since(begin)
	begin = time.Now()
	if err := b.site.leave(ctx); err != nil {
		return nil, err
	}
	for _, p := range paths {
		if err := await("the device is gone", func() error {
			if _, err := os.Stat(p); !os.IsNotExist(err) {
				return fmt.Errorf("%s is there (%v)", p, err)
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return map[string]float64{plan.LoginSeconds: in.Seconds(), plan.CommandSeconds: command.Seconds(), plan.LogoutSeconds: time.Since(begin).Seconds()}, nil
}

// readBlock reads the first 4 KiB of a device through its page cache.
func readBlock(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.ReadAt(make([]byte, 4096), 0)
	return err
}
