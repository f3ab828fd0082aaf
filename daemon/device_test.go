package daemon

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/ublk"
)

func TestLimits(t *testing.T) {
	base := ipc.Unit{Blocks: 2048, LogicalBlockSize: 512}
	with := func(f func(*ipc.Unit)) ipc.Unit { u := base; f(&u); return u }
	for name, r := range map[string]struct {
		unit  ipc.Unit
		want  ublk.Params
		maxIO int
	}{
		"plain": {base, ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048}, 512 << 10},
		"4Kn": {
			with(func(u *ipc.Unit) { u.LogicalBlockSize = 4096 }), ublk.Params{LogicalBlock: 4096, PhysicalBlock: 4096, MaxSectors: 1024, Sectors: 16384}, 512 << 10,
		},
		"512e":                   {with(func(u *ipc.Unit) { u.PhysicalBlockSize = 4096 }), ublk.Params{LogicalBlock: 512, PhysicalBlock: 4096, MaxSectors: 1024, Sectors: 2048}, 512 << 10},
		"odd hints are left out": {with(func(u *ipc.Unit) { u.PhysicalBlockSize, u.OptimalIOSize = 3000, 3<<20 }), ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048}, 512 << 10},
		"optimal":                {with(func(u *ipc.Unit) { u.OptimalIOSize = 1 << 20 }), ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, OptimalIO: 1 << 20, MaxSectors: 1024, Sectors: 2048}, 512 << 10},
		"small transfers":        {with(func(u *ipc.Unit) { u.MaxTransfer = 70000 }), ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 136, Sectors: 2048}, 69632},
		"attributes": {
			with(func(u *ipc.Unit) { u.ReadOnly, u.Rotational, u.WriteCache, u.FUA = true, true, true, true }),
			ublk.Params{Attrs: ublk.AttrReadOnly | ublk.AttrRotational | ublk.AttrVolatileCache | ublk.AttrFUA, LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048},
			512 << 10,
		},
		"FUA without a cache means nothing": {with(func(u *ipc.Unit) { u.FUA = true }), ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048}, 512 << 10},
		"thin": {
			with(func(u *ipc.Unit) {
				u.MaxDiscard, u.DiscardGranularity, u.DiscardAlignment, u.MaxZeroes = 4<<20, 64<<10, 4096, 1<<20
			}), ublk.Params{
				LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048,
				Discard: ublk.Discard{MaxSectors: 8192, Granularity: 64 << 10, Alignment: 4096, MaxWriteZeroesSectors: 2048},
			}, 512 << 10,
		},
		"zeroes only, without end": {
			with(func(u *ipc.Unit) { u.MaxZeroes = 1 << 60 }),
			ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048, Discard: ublk.Discard{MaxWriteZeroesSectors: 1 << 31}}, 512 << 10,
		},
		"thin and write protected": {
			with(func(u *ipc.Unit) { u.MaxDiscard, u.MaxZeroes, u.ReadOnly = 4<<20, 4<<20, true }),
			ublk.Params{Attrs: ublk.AttrReadOnly, LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048}, 512 << 10,
		},
		"granularity of requests": {
			with(func(u *ipc.Unit) { u.PhysicalBlockSize, u.MinIOSize = 4096, 32<<10 }),
			ublk.Params{LogicalBlock: 512, PhysicalBlock: 4096, MinIO: 32 << 10, MaxSectors: 1024, Sectors: 2048}, 512 << 10,
		},
		"begins within a physical block": {
			with(func(u *ipc.Unit) { u.PhysicalBlockSize, u.AlignmentOffset = 4096, 3584 }),
			ublk.Params{LogicalBlock: 512, PhysicalBlock: 512, MaxSectors: 1024, Sectors: 2048}, 512 << 10,
		},
	} {
		p, n, err := limits(&r.unit, 512<<10)
		if err != nil || n != r.maxIO {
			t.Errorf("%s: %d, %v", name, n, err)
		}
		if d := cmp.Diff(r.want, p); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		if err := p.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, u := range map[string]ipc.Unit{
		"no size":        with(func(u *ipc.Unit) { u.Blocks = 0 }),
		"huge":           with(func(u *ipc.Unit) { u.Blocks = 1 << 60 }),
		"no block size":  with(func(u *ipc.Unit) { u.LogicalBlockSize = 0 }),
		"520":            with(func(u *ipc.Unit) { u.LogicalBlockSize = 520 }),
		"64 KiB blocks":  with(func(u *ipc.Unit) { u.LogicalBlockSize = 64 << 10 }),
		"tiny transfers": with(func(u *ipc.Unit) { u.MaxTransfer = 4095 }),
	} {
		if _, _, err := limits(&u, 512<<10); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// FuzzProperties: whatever a target says about itself, the file stays KEY=VALUE lines without characters that mean something to a reader.
func FuzzProperties(f *testing.F) {
	f.Add("LIO-ORG ", "disk\n1", "a'b", "naa.6001405000000001", uint16(300))
	f.Add("$(reboot)", "`x`", "\"", "eui.x", uint16(0))
	f.Fuzz(func(t *testing.T, vendor, product, serial, wwid string, number uint16) {
		r := deviceRecord{Target: "iqn.2003-01.org.example:t", Portal: "[fd00::1]:3260", Unit: ipc.Unit{Vendor: vendor, Product: product, Serial: serial, WWID: wwid, Number: number}}
		for line := range strings.Lines(r.properties()) {
			key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			if !ok || key == "" || strings.Trim(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") != "" || strings.ContainsAny(value, " \t\r\n'\"\\$`;|&<>(){}*?!/") {
				t.Fatalf("line %q", line)
			}
		}
	})
}

func TestProperties(t *testing.T) {
	r := deviceRecord{
		Target: "iqn.2003-01.org.example:t", Portal: "[fd00::1]:3260", Transport: "iser",
		Unit: ipc.Unit{Vendor: "LIO-ORG ", Product: "disk 1", Revision: "4.0", Serial: "s1", WWID: "naa.60014051234567890123456789012345", Number: 300},
	}
	want := `ISER_DEVICE=1
ISER_TARGET=iqn.2003-01.org.example:t
ISER_ADDRESS=fd00::1
ISER_PORT=3260
ISER_TRANSPORT=iser
ISER_LUN=300
ID_BUS=scsi
ID_TYPE=disk
ID_VENDOR=LIO-ORG
ID_MODEL=disk_1
ID_REVISION=4.0
ID_SCSI_SERIAL=s1
ID_SERIAL=360014051234567890123456789012345
ID_SERIAL_SHORT=60014051234567890123456789012345
ID_WWN=0x6001405123456789
ID_WWN_WITH_EXTENSION=0x60014051234567890123456789012345
ID_PATH=ip-fd00::1:3260-iscsi-iqn.2003-01.org.example:t-lun-0x412c000000000000
`
	if d := cmp.Diff(want, r.properties()); d != "" {
		t.Error(d)
	}
}

func TestKeyLock(t *testing.T) {
	var k keyLock
	var inside [3]atomic.Int32
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*time.Millisecond)
			defer cancel()
			key := i % len(inside)
			unlock, err := k.lock(ctx, string(rune('a'+key)), "a test")
			if err != nil {
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				return
			}
			if inside[key].Add(1) != 1 {
				t.Error("two holders")
			}
			time.Sleep(time.Millisecond)
			inside[key].Add(-1)
			unlock()
		}()
	}
	wg.Wait()
	if len(k.locks) != 0 {
		t.Errorf("%d locks left", len(k.locks))
	}
}

// Work that can go on later makes way; other work is named.
func TestKeyLockSoon(t *testing.T) {
	var k keyLock
	ctx, cancel := context.WithCancel(context.Background())
	unlock, err := k.lockFor(ctx, "a", "a take-over", cancel)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-ctx.Done()
		unlock()
	}()
	if unlock, err = k.lockSoon(context.Background(), "a", "an abort"); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if _, err := k.lockSoon(short, "a", "an abort"); !errors.Is(err, context.DeadlineExceeded) || !strings.HasPrefix(err.Error(), "an abort is at work") {
		t.Errorf("a second one: %v", err)
	}
	unlock()
	if len(k.locks) != 0 {
		t.Errorf("%d locks left", len(k.locks))
	}
}

// TestIsGone: a zombie counts as gone, a live process does not.
func TestIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Skip(err)
	}
	pid := cmd.Process.Pid
	if isGone(pid) {
		t.Error("a live process is gone")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := waitQuiet(ctx, time.Millisecond, func() bool { return isGone(pid) }); err != nil {
		t.Error("a zombie is not gone")
	}
	_ = cmd.Wait()
	if !isGone(pid) {
		t.Error("a collected process is not gone")
	}
	if !isGone(os.Getpid()) {
		t.Error("the fake data plane of the tests is waited for")
	}
}
