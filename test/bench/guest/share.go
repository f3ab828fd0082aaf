package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"iserd.org/iserd/test/bench/plan"
)

// symbolsFile is where the host finds the addresses of the kernel's functions. They stay the same while no module is loaded or removed.
const symbolsFile = "/host/" + plan.SymbolsFile

// measureShare runs fio while QEMU's plugin counts, and tells the host what it needs to know to make sense of the counts.
func (b *bench) measureShare(ctx context.Context, c plan.Cell) (map[string]float64, *plan.Profile, error) {
	if err := b.site.need(ctx, wantOf(c)); err != nil {
		return nil, nil, err
	}
	if err := makeMemory(ctx, c.Initiator.Memory()); err != nil {
		return nil, nil, err
	}
	if err := copyFile(symbolsFile, "/proc/kallsyms"); err != nil {
		return nil, nil, err
	}
	paths := b.site.paths[:1]
	p := probe{paths: paths}
	var before, after counters
	prof := &plan.Profile{Maps: map[string]string{}}
	out, err := whileRunning(ctx, c, paths, b.order.SecondsOf(c), func(fio int) (err error) {
		processes := map[string]int{plan.PlaceFio: fio}
		if c.Initiator.Ours() {
			processes[plan.PlaceDaemon] = b.site.iserd.plane
		}
		for name, pid := range processes {
			if prof.Maps[name], err = readFile(fmt.Sprintf("/proc/%d/maps", pid)); err != nil {
				return err
			}
		}
		if before, err = p.read(); err != nil {
			return err
		}
		markBegin()
		return nil
	}, func(int) (err error) {
		markEnd()
		after, err = p.read()
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	h, err := parseFio(out, c.Job.Write)
	if err != nil {
		return nil, nil, err
	}
	prof.IOs = float64(after.sectors-before.sectors) * 512 / float64(c.Job.BlockSize)
	prof.Elapsed = after.at.Sub(before.at)
	if prof.IOs < 1 {
		return nil, nil, errors.New("no I/O between the readings")
	}
	return map[string]float64{plan.IOPS: h.IOPS, plan.Kinsn: 1e6 / h.IOPS}, prof, nil
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
