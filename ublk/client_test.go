package ublk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// This file is the user of the block device in the guest tests, in a process of its own.

// runClient does what args say with the block device args[1].
func runClient(args []string) error {
	path := args[1]
	switch args[0] {
	case "verify": // PATH OFFSET LENGTH SEED ROUNDS: random writes and reads that are checked, four at a time
		var off, length int64
		var seed uint64
		var rounds int
		if _, err := fmt.Sscan(args[2]+" "+args[3]+" "+args[4]+" "+args[5], &off, &length, &seed, &rounds); err != nil {
			return err
		}
		return verify(path, off, length, seed, rounds)
	case "shared": // PATH MEMORY OFFSET LENGTH SEED ROUNDS: the same from memory that is shared with others
		var off, length int64
		var seed uint64
		var rounds int
		if _, err := fmt.Sscan(args[3]+" "+args[4]+" "+args[5]+" "+args[6], &off, &length, &seed, &rounds); err != nil {
			return err
		}
		m, err := os.OpenFile(args[2], os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer m.Close()
		buf, err := unix.Mmap(int(m.Fd()), 0, 2*largest, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		return verifyPart(path, buf, off, length, seed, rounds)
	case "open": // holds the device open until its standard input ends
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		fmt.Println("open")
		_, _ = os.Stdin.Read(make([]byte, 1))
		return nil
	case "write", "read": // PATH OFFSET BYTE: one block of 4096 bytes of BYTE
		var off int64
		var b byte
		if _, err := fmt.Sscan(args[2]+" "+args[3], &off, &b); err != nil {
			return err
		}
		return oneBlock(args[0], path, off, b)
	case "zero": // PATH OFFSET LENGTH: BLKZEROOUT, then BLKDISCARD
		var rng [2]uint64
		if _, err := fmt.Sscan(args[2]+" "+args[3], &rng[0], &rng[1]); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR|unix.O_EXCL, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		for _, c := range []uint{unix.BLKZEROOUT, unix.BLKDISCARD} {
			if err := ioctlRange(int(f.Fd()), c, &rng); err != nil {
				return fmt.Errorf("ioctl %#x: %w", c, err)
			}
		}
		return nil
	}
	return fmt.Errorf("unknown job %q", args[0])
}

// direct opens a device for direct I/O, with an aligned buffer of n bytes.
func direct(path string, n int) (int, []byte, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, nil, fmt.Errorf("open %s: %w", path, err)
	}
	buf, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	return fd, buf, err
}

func oneBlock(what, path string, off int64, b byte) error {
	fd, buf, err := direct(path, 4096)
	if err != nil {
		return err
	}
	if what == "write" {
		for i := range buf {
			buf[i] = b
		}
		n, err := unix.Pwrite(fd, buf, off)
		if err != nil || n != len(buf) {
			return fmt.Errorf("pwrite: %d, %w", n, err)
		}
		return unix.Fsync(fd)
	}
	n, err := unix.Pread(fd, buf, off)
	if err != nil || n != len(buf) {
		return fmt.Errorf("pread: %d, %w", n, err)
	}
	for i, v := range buf {
		if v != b {
			return fmt.Errorf("byte %d at %d is %d, want %d", i, off, v, b)
		}
	}
	return nil
}

// verify runs four workers, each in a quarter of the range, that write random runs of sectors and read others back. Each sector holds its
// number, its generation and a pattern.
func verify(path string, off, length int64, seed uint64, rounds int) error {
	const workers = 4
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			part := length / workers &^ (SectorSize - 1)
			buf, err := unix.Mmap(-1, 0, 2*largest, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			if err == nil {
				err = verifyPart(path, buf, off+int64(w)*part, part, seed+uint64(w), rounds)
			}
			errs[w] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func fill(sector []byte, number, generation uint64) {
	for i := 0; i < len(sector); i += 8 {
		binary.LittleEndian.PutUint64(sector[i:], number*0x9e3779b97f4a7c15+generation*0xff51afd7ed558ccd+uint64(i))
	}
}

// largest is the size of the largest request that verifyPart makes.
const largest = 1 << 20

// verifyPart is one worker. It writes from the first half of buf, of 2 x largest bytes, and reads into the second.
func verifyPart(path string, buf []byte, off, length int64, seed uint64, rounds int) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	rng := rand.New(rand.NewPCG(seed, 1))
	generation := make(map[uint64]uint64)
	sizes := []int{512, 1024, 4096, 8192, 12288, 65536, 131072, 524288, largest}
	want := make([]byte, SectorSize)
	for round := range rounds {
		n := min(sizes[rng.IntN(len(sizes))], int(length))
		at := off + rng.Int64N((length-int64(n))/SectorSize+1)*SectorSize
		first := uint64(at / SectorSize)
		if rng.IntN(2) == 0 {
			for s := range n / SectorSize {
				generation[first+uint64(s)] = uint64(round + 1)
				fill(buf[s*SectorSize:(s+1)*SectorSize], first+uint64(s), uint64(round+1))
			}
			if got, err := unix.Pwrite(fd, buf[:n], at); err != nil || got != n {
				return fmt.Errorf("pwrite %d at %d: %d, %w", n, at, got, err)
			}
			if rng.IntN(16) == 0 {
				if err := unix.Fsync(fd); err != nil {
					return fmt.Errorf("fsync: %w", err)
				}
			}
			continue
		}
		b := buf[largest : largest+n]
		clear(b)
		if got, err := unix.Pread(fd, b, at); err != nil || got != n {
			return fmt.Errorf("pread %d at %d: %d, %w", n, at, got, err)
		}
		for s := range n / SectorSize {
			g, written := generation[first+uint64(s)]
			if !written {
				continue
			}
			fill(want, first+uint64(s), g)
			if string(want) != string(b[s*SectorSize:(s+1)*SectorSize]) {
				return fmt.Errorf("sector %d is not as generation %d wrote it (%s)", first+uint64(s), g, time.Now().Format(time.TimeOnly))
			}
		}
	}
	return nil
}
