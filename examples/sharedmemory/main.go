// Command sharedmemory shows how a program does I/O without copies: it gets memory that is registered with iserd's block devices, over D-Bus, and reads and
// writes a device from there with O_DIRECT. The adapter then moves the data straight between this memory and the target.
//
//	sharedmemory -overwrite /dev/ublkb0           borrows a slice of the daemon's arena: nothing is registered while the device runs
//	sharedmemory -overwrite -memfd /dev/ublkb0    registers memory of its own
//
// It overwrites the start of the device, reads it back, compares, and prints which way the data went. See docs/shared-memory.md.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

const (
	service = "org.iserd.Iser1"
	manager = "org.iserd.Iser1.Manager"
	device  = "org.iserd.Iser1.Device"
	path    = "/org/iserd/Iser1/Manager"
)

func main() {
	own := flag.Bool("memfd", false, "register memory of its own instead of borrowing")
	size := flag.Int64("size", 4<<20, "bytes of memory, with -memfd")
	rounds := flag.Int("rounds", 100, "writes, each of which is read back")
	overwrite := flag.Bool("overwrite", false, "yes, overwrite the start of the device")
	hold := flag.Bool("hold", false, "keep the memory until standard input ends")
	flag.Parse()
	if flag.NArg() != 1 || !*overwrite {
		fmt.Fprintln(os.Stderr, "usage: sharedmemory -overwrite [flags] /dev/ublkbN   (its data is lost)")
		flag.PrintDefaults()
		os.Exit(2)
	}
	if err := run(flag.Arg(0), *own, *size, *rounds, *hold); err != nil {
		fmt.Fprintln(os.Stderr, "sharedmemory:", err)
		os.Exit(1)
	}
}

func run(dev string, own bool, size int64, rounds int, hold bool) error {
	// The memory is ours as long as this connection is there.
	conn, err := dbus.ConnectSystemBus()
	if err != nil {
		return err
	}
	defer conn.Close()
	m := conn.Object(service, path)
	var object dbus.ObjectPath
	if err := m.Call(manager+".LookupDevice", 0, dev).Store(&object); err != nil {
		return err
	}
	id, mem, err := memory(m, own, size)
	if err != nil {
		return err
	}
	// Let go of the mapping first: a slice that is still mapped is lent to nobody else.
	defer m.Call(manager+".ReleaseBuffer", 0, id, map[string]dbus.Variant{})
	defer unix.Munmap(mem)

	before, err := statistics(conn, object)
	if err != nil {
		return err
	}
	moved, err := verify(dev, mem, rounds)
	if err != nil {
		return err
	}
	after, err := statistics(conn, object)
	if err != nil {
		return err
	}
	fmt.Printf("buffer %d: wrote and read back %d KiB\n", id, moved>>10)
	for _, tier := range []string{"shared", "registered", "tcp"} {
		fmt.Printf("%-10s %6d requests %8d KiB\n", tier, after["requests_"+tier]-before["requests_"+tier], (after["bytes_"+tier]-before["bytes_"+tier])>>10)
	}
	if hold {
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
	return nil
}

// memory gets memory that the devices know, and maps it.
func memory(m dbus.BusObject, own bool, size int64) (id uint32, mem []byte, err error) {
	var fd int
	var length uint64
	if own {
		// The seal is what the daemon insists on: memory that could be cut off under it would be taken away from the adapter, too.
		if fd, err = unix.MemfdCreate("sharedmemory", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
			return 0, nil, fmt.Errorf("memfd: %w", err)
		}
		defer unix.Close(fd)
		if err = unix.Ftruncate(fd, size); err != nil {
			return 0, nil, fmt.Errorf("memfd of %d bytes: %w", size, err)
		}
		if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
			return 0, nil, fmt.Errorf("seal: %w", err)
		}
		err = m.Call(manager+".RegisterBuffer", 0, dbus.UnixFD(fd), map[string]dbus.Variant{}).Store(&id, &length)
	} else {
		var got dbus.UnixFD
		if err = m.Call(manager+".BorrowBuffer", 0, map[string]dbus.Variant{}).Store(&id, &got, &length); err == nil {
			fd = int(got)
			defer unix.Close(fd)
		}
	}
	if err != nil {
		return 0, nil, err
	}
	if mem, err = unix.Mmap(fd, 0, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return 0, nil, fmt.Errorf("map: %w", err)
	}
	if !own && !bytes.Equal(mem, make([]byte, len(mem))) {
		return 0, nil, errors.New("the borrowed memory is not empty")
	}
	return id, mem, nil
}

// verify writes blocks of random sizes from the first half of mem and reads them back into the second, at any offset that O_DIRECT allows.
func verify(dev string, mem []byte, rounds int) (moved int, err error) {
	fd, err := unix.Open(dev, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", dev, err)
	}
	defer unix.Close(fd)
	block, err := unix.IoctlGetInt(fd, unix.BLKSSZGET)
	if err != nil {
		return 0, fmt.Errorf("block size of %s: %w", dev, err)
	}
	half := len(mem) / 2
	most := min(half, 1<<20) / block
	noise := rand.NewChaCha8([32]byte{byte(os.Getpid())})
	for i := range rounds {
		n := (1 + rand.N(most)) * block
		if i%3 == 0 {
			n = (1 + rand.N(min(most, 8))) * block // small ones, too
		}
		src := mem[rand.N((half-n)/block+1)*block:][:n]
		dst := mem[half+rand.N((half-n)/block+1)*block:][:n]
		_, _ = noise.Read(src) // never fails
		at := rand.Int64N(8<<20/int64(block)) * int64(block)
		if got, err := unix.Pwrite(fd, src, at); err != nil || got != n {
			return moved, fmt.Errorf("write %d bytes at %d: %d, %w", n, at, got, err)
		}
		if got, err := unix.Pread(fd, dst, at); err != nil || got != n {
			return moved, fmt.Errorf("read %d bytes at %d: %d, %w", n, at, got, err)
		}
		if !bytes.Equal(src, dst) {
			return moved, fmt.Errorf("%d bytes at %d read back differently", n, at)
		}
		moved += 2 * n
	}
	return moved, nil
}

// statistics reads the device's counters.
func statistics(conn *dbus.Conn, object dbus.ObjectPath) (s map[string]uint64, err error) {
	err = conn.Object(service, object).Call(device+".GetStatistics", 0, map[string]dbus.Variant{}).Store(&s)
	return s, err
}
