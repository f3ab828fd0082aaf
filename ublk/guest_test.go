package ublk

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
)

// The tests of this file need a kernel with ublk and root. The test process is the control process; servers and users of the block
// device run in processes of their own, as in production.

func openControl(t *testing.T) *Control {
	t.Helper()
	c, err := OpenControl()
	if errors.Is(err, ErrNotSupported) || errors.Is(err, fs.ErrPermission) {
		require.Need(t, "ublk", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// within gives a context for one command.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// process is a server in another process.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan string
	events  chan string
	ended   chan struct{}
}

func startServer(t *testing.T) *process {
	t.Helper()
	p := &process{t: t, answers: make(chan string, 1), events: make(chan string, 64), ended: make(chan struct{})}
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), roleVariable+"=server")
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	check(t, err)
	out, err := p.cmd.StdoutPipe()
	check(t, err)
	check(t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if e, ok := strings.CutPrefix(lines.Text(), "event "); ok {
				p.events <- e
			} else {
				p.answers <- lines.Text()
			}
		}
		close(p.answers)
		_ = p.cmd.Wait()
	}()
	t.Cleanup(p.kill)
	return p
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the server at once, as a crash does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		p.t.Errorf("server %d does not end", p.pid())
	}
}

// do sends a command and waits for its answer.
func (p *process) do(format string, args ...any) string {
	p.t.Helper()
	answer, err := p.try(format, args...)
	if err != nil {
		p.t.Fatalf("server: %s: %v", fmt.Sprintf(format, args...), err)
	}
	return answer
}

func (p *process) try(format string, args ...any) (string, error) {
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		return "", err
	}
	select {
	case line, ok := <-p.answers:
		if !ok {
			return "", errors.New("the server has ended")
		}
		if rest, ok := strings.CutPrefix(line, "ok "); ok {
			return rest, nil
		}
		return "", errors.New(line)
	case <-time.After(40 * time.Second):
		return "", errors.New("no answer")
	}
}

// event waits for one event.
func (p *process) event(want string) {
	p.t.Helper()
	select {
	case got := <-p.events:
		if !strings.HasPrefix(got, want) {
			p.t.Fatalf("event %q, want %q", got, want)
		}
	case <-time.After(20 * time.Second):
		p.t.Fatalf("event %q did not come", want)
	}
}

// client runs a user of a block device in another process.
func client(args ...any) *exec.Cmd {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = fmt.Sprint(a)
	}
	cmd := exec.Command(os.Args[0], words...)
	cmd.Env = append(os.Environ(), roleVariable+"=io")
	return cmd
}

// use runs a user to its end.
func use(t *testing.T, args ...any) {
	t.Helper()
	if out, err := client(args...).CombinedOutput(); err != nil {
		t.Fatalf("client %v: %v: %s", args, err, out)
	}
}

const (
	testSize   = 64 << 20
	testDepth  = 32
	testQueues = 2
)

var testSpec = DeviceSpec{ID: -1, Queues: testQueues, Depth: testDepth, MaxIOBytes: 1 << 20, Features: FeatureUserCopy, ServerTag: 0x69736572}

func testParams() Params {
	return Params{
		Attrs: AttrVolatileCache | AttrFUA, LogicalBlock: 512, PhysicalBlock: 4096, OptimalIO: 1 << 20, MaxSectors: 2048,
		Sectors: testSize / SectorSize, Discard: Discard{MaxSectors: 1 << 16, Granularity: 4096, MaxWriteZeroesSectors: 1 << 16},
	}
}

// backing makes the file that a device's data lives in.
func backing(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	check(t, err)
	check(t, f.Truncate(testSize))
	check(t, f.Close())
	return path
}

// partitioned makes a backing file with an MBR that splits it into two halves.
func partitioned(t *testing.T) string {
	t.Helper()
	path := backing(t)
	var mbr [512]byte
	for i, part := range [][2]uint32{{2048, testSize/SectorSize/2 - 2048}, {testSize / SectorSize / 2, testSize / SectorSize / 2}} {
		e := mbr[446+16*i:]
		e[4] = 0x83 // Linux
		binary.LittleEndian.PutUint32(e[8:], part[0])
		binary.LittleEndian.PutUint32(e[12:], part[1])
	}
	mbr[510], mbr[511] = 0x55, 0xaa
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	check(t, err)
	_, err = f.WriteAt(mbr[:], 0)
	check(t, err)
	check(t, f.Close())
	return path
}

// waitPath waits for a device node, which a scan in the background makes.
func waitPath(t *testing.T, path string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not appear", path)
		}
	}
}

// add makes a device that is ready for a server, and removes it at the end of the test if it is still there.
func add(t *testing.T, c *Control, spec DeviceSpec) DeviceInfo {
	t.Helper()
	info, err := c.Add(within(t, 10*time.Second), spec)
	check(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := c.Delete(ctx, info.ID); err != nil && !errors.Is(err, ErrNotFound) {
			t.Errorf("clean up: %v", err)
		}
	})
	check(t, c.SetParams(within(t, 10*time.Second), info.ID, testParams()))
	return info
}

// live makes a device and a server that serves it.
func live(t *testing.T, c *Control, spec DeviceSpec) (DeviceInfo, *process) {
	t.Helper()
	return liveOn(t, c, spec, backing(t))
}

func liveOn(t *testing.T, c *Control, spec DeviceSpec, path string) (DeviceInfo, *process) {
	t.Helper()
	info := add(t, c, spec)
	p := startServer(t)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
	check(t, c.Start(within(t, 20*time.Second), info.ID, p.pid()))
	settleUdev()
	return info, p
}

// settleUdev waits for those who look at new block devices.
func settleUdev() { _ = exec.Command("udevadm", "settle", "--timeout=10").Run() }

// takeDown stops and deletes a device whose server runs.
func takeDown(t *testing.T, c *Control, info DeviceInfo, p *process) {
	t.Helper()
	check(t, c.Stop(within(t, 20*time.Second), info.ID))
	for range info.Queues {
		p.event(fmt.Sprintf("gone %d", info.ID))
	}
	p.do("detach %d", info.ID)
	check(t, c.Delete(within(t, 20*time.Second), info.ID))
}

func TestGuestControl(t *testing.T) {
	c := openControl(t)
	set, err := c.Features(within(t, time.Second))
	check(t, err)
	t.Logf("driver: %v", set)
	if !set.Has(FeatureUserCopy) {
		t.Fatal("driver without user copy")
	}
	spec := testSpec
	spec.Queues = 4096 // the driver lowers it to the number of CPUs
	info := add(t, c, spec)
	if info.Queues != runtime.NumCPU() || info.Depth != testDepth || info.MaxIOBytes != 1<<20 || info.State != StateDead ||
		info.ServerTag != 0x69736572 || !info.Features.Has(FeatureUserCopy) {
		t.Errorf("added %+v", info)
	}
	again, err := c.Info(within(t, time.Second), info.ID)
	check(t, err)
	if again != info {
		t.Errorf("Info gives %+v, Add gave %+v", again, info)
	}
	want := testParams()
	want.DMAAlign = 512
	want.MinIO = 4096
	check(t, c.SetParams(within(t, time.Second), info.ID, want))
	got, err := c.GetParams(within(t, time.Second), info.ID)
	check(t, err)
	if got != want {
		t.Errorf("GetParams gives %+v, want %+v", got, want)
	}
	ids, err := List()
	check(t, err)
	if len(ids) != 1 || ids[0] != info.ID {
		t.Errorf("List gives %v", ids)
	}
	spec.ID = info.ID
	if _, err := c.Add(within(t, time.Second), spec); !errors.Is(err, ErrExist) {
		t.Errorf("second Add of one id: %v", err)
	}
	if _, err := Holders(info.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("Holders of a device without a disk: %v", err)
	}
	check(t, c.Delete(within(t, 10*time.Second), info.ID))
	for name, err := range map[string]error{
		"Delete": c.Delete(within(t, time.Second), info.ID), "Stop": c.Stop(within(t, time.Second), info.ID),
		"TryStop": c.TryStop(within(t, time.Second), info.ID), "Start": c.Start(within(t, time.Second), info.ID, os.Getpid()),
	} {
		var ctrl *CtrlError
		if !errors.Is(err, ErrNotFound) || !errors.Is(err, unix.ENODEV) || !errors.As(err, &ctrl) {
			t.Errorf("%s of a deleted device: %v", name, err)
		}
	}
	if _, err := Open(info.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("Open of a deleted device: %v", err)
	}
	spec = testSpec
	spec.Features |= 1 << 40
	var ctrl *CtrlError
	if _, err := c.Add(within(t, time.Second), spec); !errors.Is(err, ErrNotSupported) || !errors.As(err, &ctrl) || ctrl.Feature != 1<<40 {
		t.Errorf("Add with an unknown feature: %v", err)
	}
	c.features |= 1 << 40 // as if the driver had promised it: the flags that come back tell otherwise
	if _, err := c.Add(within(t, time.Second), spec); !errors.Is(err, ErrNotSupported) {
		t.Errorf("Add with a feature that the driver drops: %v", err)
	}
	if ids, _ := List(); len(ids) != 0 {
		t.Errorf("devices %v are left", ids)
	}
}

func TestGuestIO(t *testing.T) {
	c := openControl(t)
	info, p := live(t, c, testSpec)
	if now, err := c.Info(within(t, time.Second), info.ID); err != nil || now.State != StateLive || now.PID != p.pid() {
		t.Errorf("live device: %+v, %v", now, err)
	}
	dev := info.BlockPath()
	use(t, "verify", dev, 0, testSize, 1, 400)
	use(t, "write", dev, 1<<20, 7)
	use(t, "read", dev, 1<<20, 7)
	use(t, "zero", dev, 1<<20, 1<<20)
	use(t, "read", dev, 1<<20, 0)
	var reads, writes, flushes, discards, zeroes, errs, odd int
	fmt.Sscan(p.do("stats %d", info.ID), &reads, &writes, &flushes, &discards, &zeroes, &errs, &odd)
	t.Logf("reads %d, writes %d, flushes %d, discards %d, zeroes %d, errors %d", reads, writes, flushes, discards, zeroes, errs)
	if reads == 0 || writes == 0 || flushes == 0 || discards == 0 || zeroes == 0 || errs != 0 || odd != 0 {
		t.Errorf("operations missing, or errors: %s", p.do("stats %d", info.ID))
	}
	if r := p.do("refused %d", info.ID); r != "" {
		t.Errorf("refused: %s", r)
	}
	// A crowd of readers and writers, for both queues at the same time, and the size of the server's heap meanwhile.
	p.do("mallocs")
	use(t, "verify", dev, 0, testSize, 2, 600)
	var mallocs, reads2, writes2 int
	fmt.Sscan(p.do("mallocs"), &mallocs)
	fmt.Sscan(p.do("stats %d", info.ID), &reads2, &writes2)
	n := reads2 + writes2 - reads - writes
	t.Logf("%d requests, %d allocations in the server", n, mallocs)
	if mallocs > n/4 {
		t.Errorf("%d allocations for %d requests", mallocs, n)
	}
	check(t, c.UpdateSize(within(t, 10*time.Second), info.ID, testSize/2/SectorSize))
	if got, err := c.GetParams(within(t, time.Second), info.ID); err != nil || got.Sectors != testSize/2/SectorSize {
		t.Errorf("after UpdateSize: %+v, %v", got, err)
	}
	takeDown(t, c, info, p)
}

func TestGuestFio(t *testing.T) {
	c := openControl(t)
	if _, err := exec.LookPath("fio"); err != nil {
		require.Need(t, "guest", err)
	}
	info, p := live(t, c, testSpec)
	out, err := exec.Command("fio", "--name=v", "--filename="+info.BlockPath(), "--direct=1", "--ioengine=libaio", "--rw=randrw", "--bsrange=512-1m",
		"--iodepth=16", "--numjobs=2", "--size=24m", "--offset_increment=24m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fsync=64").CombinedOutput()
	if err != nil {
		t.Fatalf("fio: %v\n%s", err, out)
	}
	takeDown(t, c, info, p)
}

func TestGuestHolders(t *testing.T) {
	c := openControl(t)
	info, p := liveOn(t, c, testSpec, partitioned(t))
	user := client("open", info.BlockPath())
	in, err := user.StdinPipe()
	check(t, err)
	out, err := user.StdoutPipe()
	check(t, err)
	check(t, user.Start())
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := c.TryStop(within(t, 10*time.Second), info.ID); !errors.Is(err, ErrBusy) {
		t.Errorf("TryStop with an opener: %v", err)
	} else {
		t.Log(err)
	}
	held, err := Holders(info.ID)
	check(t, err)
	if len(held) != 1 || held[0].Kind != HolderProcess || held[0].PID != user.Process.Pid {
		t.Errorf("holders %v, want process %d", held, user.Process.Pid)
	}
	in.Close()
	check(t, user.Wait())
	if held, err := Holders(info.ID); err != nil || len(held) != 0 {
		t.Errorf("holders %v, %v after the user has gone", held, err)
	}
	// A partition with a file system, and swap.
	dev := info.BlockPath()
	run := func(name string, args ...string) {
		t.Helper()
		if b, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, b)
		}
	}
	waitPath(t, dev+"p1")
	waitPath(t, dev+"p2")
	settleUdev()
	run("mkfs.ext4", "-q", dev+"p1")
	dir := filepath.Join(t.TempDir(), "a b")
	check(t, os.Mkdir(dir, 0o755))
	run("mount", dev+"p1", dir)
	run("mkswap", dev+"p2")
	run("swapon", dev+"p2")
	held, err = Holders(info.ID)
	check(t, err)
	var text []string
	for _, h := range held {
		text = append(text, h.String())
	}
	all := strings.Join(text, "; ")
	t.Log(all)
	name := filepath.Base(dev)
	for _, want := range []string{name + "p1 is mounted on " + dir, name + "p2 is swap space"} {
		if !strings.Contains(all, want) {
			t.Errorf("holders %q, want %q", all, want)
		}
	}
	if err := c.TryStop(within(t, 10*time.Second), info.ID); !errors.Is(err, ErrBusy) {
		t.Errorf("TryStop with a mounted file system: %v", err)
	}
	run("swapoff", dev+"p2")
	run("umount", dir)
	cmd := exec.Command("dmsetup", "create", "testmap", "--table", "0 1024 linear "+dev+"p1 0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("dmsetup: %v: %s", err, b)
	} else {
		held, err = Holders(info.ID)
		if err != nil || len(held) != 1 || held[0].Kind != HolderDevice || !strings.Contains(held[0].Name, "testmap") {
			t.Errorf("holders %v, %v with a device mapping", held, err)
		}
		settleUdev()
		run("dmsetup", "remove", "testmap")
	}
	settleUdev()
	check(t, c.TryStop(within(t, 20*time.Second), info.ID))
	check(t, c.TryStop(within(t, 20*time.Second), info.ID)) // nothing left to stop
	p.event("gone")
	p.event("gone")
	p.do("detach %d", info.ID)
	check(t, c.Delete(within(t, 20*time.Second), info.ID))
}

// TestGuestStopUnderLoad stops a device while others write to it: the requests in flight are answered, the server lets go, the user sees
// errors.
func TestGuestStopUnderLoad(t *testing.T) {
	c := openControl(t)
	info, p := live(t, c, testSpec)
	user := client("verify", info.BlockPath(), 0, testSize, 3, 1000000)
	check(t, user.Start())
	for reads := 0; reads < 50; {
		fmt.Sscan(p.do("stats %d", info.ID), &reads)
	}
	takeDown(t, c, info, p)
	if err := user.Wait(); err == nil {
		t.Error("the user saw no error")
	}
	if n := p.do("maps"); n != "0" {
		t.Errorf("%s mappings of character devices are left", n)
	}
}

// TestGuestStopHeld has a request that the server does not answer: Stop does not return, other devices and Info are served, and the answer
// lets it go on.
func TestGuestStopHeld(t *testing.T) {
	c := openControl(t)
	info, p := live(t, c, testSpec)
	p.do("hold %d", info.ID)
	user := client("write", info.BlockPath(), 0, 9)
	check(t, user.Start())
	for p.do("held %d", info.ID) == "0" {
		runtime.Gosched()
	}
	start := time.Now()
	err := c.Stop(within(t, time.Second), info.ID)
	var ctrl *CtrlError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &ctrl) || !ctrl.Pending {
		t.Fatalf("Stop with a request in flight: %v", err)
	}
	t.Logf("after %v: %v", time.Since(start), err)
	if err := c.Delete(within(t, 100*time.Millisecond), info.ID); !errors.Is(err, ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Delete behind Stop: %v", err)
	} else {
		t.Log(err)
	}
	if _, err := c.Info(within(t, time.Second), info.ID); err != nil {
		t.Errorf("Info of a stuck device: %v", err)
	}
	other := add(t, c, testSpec)
	check(t, c.Delete(within(t, 5*time.Second), other.ID))
	p.do("release %d", info.ID)
	p.event("gone")
	p.event("gone")
	_ = user.Wait()
	p.do("detach %d", info.ID)
	check(t, c.Delete(within(t, 20*time.Second), info.ID))
}

// TestGuestStopHeldKilled is the last resort: Stop hangs on a request, the data plane is killed, Stop returns and the device goes.
func TestGuestStopHeldKilled(t *testing.T) {
	c := openControl(t)
	info, p := live(t, c, testSpec)
	p.do("hold %d", info.ID)
	user := client("write", info.BlockPath(), 0, 9)
	check(t, user.Start())
	for p.do("held %d", info.ID) == "0" {
		runtime.Gosched()
	}
	stopped := make(chan error, 1)
	ctx := within(t, 30*time.Second)
	go func() { stopped <- c.Stop(ctx, info.ID) }()
	waitTask(t, c, info.ID)
	p.kill()
	check(t, <-stopped)
	if err := user.Wait(); err == nil {
		t.Error("the write whose server was killed succeeded")
	}
	check(t, c.Delete(within(t, 20*time.Second), info.ID))
}

// waitTask waits until a command is at work on the device.
func waitTask(t *testing.T, c *Control, id int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		c.mu.Lock()
		d := c.devices[id]
		busy := d != nil && d.holder != ""
		c.mu.Unlock()
		if busy {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no command at work")
		}
	}
}

// TestGuestRounds adds, serves and deletes devices in one server process, and looks for what is left behind.
func TestGuestRounds(t *testing.T) {
	c := openControl(t)
	p := startServer(t)
	path := backing(t)
	var fds, mine int
	for round := range 20 {
		info, err := c.Add(within(t, 10*time.Second), testSpec)
		check(t, err)
		check(t, c.SetParams(within(t, 10*time.Second), info.ID, testParams()))
		p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
		check(t, c.Start(within(t, 20*time.Second), info.ID, p.pid()))
		use(t, "write", info.BlockPath(), 4096*round, round)
		use(t, "read", info.BlockPath(), 4096*round, round)
		takeDown(t, c, info, p)
		var n int
		fmt.Sscan(p.do("fds"), &n)
		if round == 0 {
			fds, mine = n, countFDs()
		} else if n != fds || countFDs() != mine {
			t.Fatalf("round %d: server has %d descriptors, had %d; control has %d, had %d", round, n, fds, countFDs(), mine)
		}
		if m := p.do("maps"); m != "0" {
			t.Fatalf("round %d: %s mappings left", round, m)
		}
	}
}

// TestGuestStartFails has a server that fetched one queue of two: Start does not return, is cancelled, and the device goes away by each
// of the ways that a control process may take.
func TestGuestStartFails(t *testing.T) {
	for _, way := range []string{"stop", "trystop", "close", "kill"} {
		t.Run(way, func(t *testing.T) {
			c := openControl(t)
			p := startServer(t)
			info := add(t, c, testSpec)
			if info.Queues < 2 {
				t.Skip("one CPU")
			}
			p.do("attach %d %d %d 1 %s", info.ID, info.Queues, info.Depth, backing(t))
			var ctrl *CtrlError
			err := c.Start(within(t, 300*time.Millisecond), info.ID, p.pid())
			if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &ctrl) || ctrl.Pending {
				t.Fatalf("Start of a half-fetched device: %v", err)
			}
			t.Log(err)
			if res := p.do("cancel %d", info.ID); res != fmt.Sprint(-int(unix.ENOENT)) {
				t.Errorf("IORING_OP_ASYNC_CANCEL of a fetch answers %s", res)
			}
			switch way {
			case "stop", "trystop":
				f := c.Stop
				if way == "trystop" {
					f = c.TryStop
				}
				check(t, f(within(t, 10*time.Second), info.ID))
				p.event("gone")
				p.do("detach %d", info.ID)
				check(t, c.Delete(within(t, 10*time.Second), info.ID))
			case "close": // the queues are closed first; Delete brings the tags back
				p.do("close %d", info.ID)
				check(t, c.Delete(within(t, 10*time.Second), info.ID))
				p.event("gone")
				p.do("detach %d", info.ID)
			case "kill":
				p.kill()
				check(t, c.Delete(within(t, 10*time.Second), info.ID))
			}
			if ids, _ := List(); len(ids) != 0 {
				t.Errorf("devices %v are left", ids)
			}
		})
	}
}

// TestGuestStartWrongProcess starts a device in the name of a process that does not serve it.
func TestGuestStartWrongProcess(t *testing.T) {
	c := openControl(t)
	p := startServer(t)
	info := add(t, c, testSpec)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, backing(t))
	if err := c.Start(within(t, 5*time.Second), info.ID, os.Getpid()); !errors.Is(err, unix.EINVAL) {
		t.Errorf("Start with the wrong pid: %v", err)
	} else {
		t.Log(err)
	}
	if _, err := Open(info.ID); !errors.Is(err, ErrBusy) {
		t.Errorf("second Open: %v", err)
	}
	check(t, c.Start(within(t, 10*time.Second), info.ID, p.pid()))
	if err := c.SetParams(within(t, time.Second), info.ID, testParams()); !errors.Is(err, unix.EACCES) {
		t.Errorf("SetParams of a live device: %v", err)
	}
	settleUdev()
	takeDown(t, c, info, p)
}

// TestGuestCloseLive closes the queues of a live device: what users send is answered with an error, and the device can be deleted.
func TestGuestCloseLive(t *testing.T) {
	c := openControl(t)
	info, p := live(t, c, testSpec)
	p.do("close %d", info.ID)
	if out, err := client("write", info.BlockPath(), 0, 1).CombinedOutput(); err == nil {
		t.Errorf("write to a device whose queues are closed: %s", out)
	}
	check(t, c.Stop(within(t, 20*time.Second), info.ID))
	p.event("gone")
	p.event("gone")
	p.do("detach %d", info.ID)
	check(t, c.Delete(within(t, 20*time.Second), info.ID))
}

// TestGuestSecondControl works on one device from two control rings.
func TestGuestSecondControl(t *testing.T) {
	a, b := openControl(t), openControl(t)
	info, p := live(t, b, testSpec)
	check(t, a.UpdateSize(within(t, time.Second), info.ID, testSize/SectorSize))
	if now, err := a.Info(within(t, time.Second), info.ID); err != nil || now.State != StateLive {
		t.Fatalf("seen from the other: %+v, %v", now, err)
	}
	check(t, a.Close())
	if _, err := a.Info(within(t, time.Second), info.ID); !errors.Is(err, ErrClosed) {
		t.Errorf("Info of a closed Control: %v", err)
	}
	use(t, "verify", info.BlockPath(), 0, testSize, 4, 50)
	takeDown(t, b, info, p)
}

// TestGuestCloseControlPending closes a Control whose STOP_DEV waits for a request: Close does not wait, the caller is told, and another
// Control sees the device through.
func TestGuestCloseControlPending(t *testing.T) {
	a, b := openControl(t), openControl(t)
	info, p := live(t, b, testSpec)
	p.do("hold %d", info.ID)
	user := client("write", info.BlockPath(), 0, 9)
	check(t, user.Start())
	for p.do("held %d", info.ID) == "0" {
		runtime.Gosched()
	}
	stopped := make(chan error, 1)
	ctx := within(t, 30*time.Second)
	go func() { stopped <- a.Stop(ctx, info.ID) }()
	waitTask(t, a, info.ID)
	start := time.Now()
	check(t, a.Close())
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("Close took %v", d)
	}
	var ctrl *CtrlError
	if err := <-stopped; !errors.Is(err, ErrClosed) || !errors.As(err, &ctrl) || !ctrl.Pending {
		t.Errorf("Stop of a closed Control: %v", err)
	}
	p.do("release %d", info.ID)
	_ = user.Wait()
	takeDown(t, b, info, p)
}

// TestGuestAddAbandoned gives up on ADD_DEV at once: a device that appears afterwards is removed again.
func TestGuestAddAbandoned(t *testing.T) {
	c := openControl(t)
	c.grace = 0
	late := 0
	for i := range 40 {
		info, err := c.Add(within(t, time.Duration(i)*20*time.Microsecond), testSpec)
		if err == nil {
			check(t, c.Delete(within(t, 10*time.Second), info.ID))
			continue
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		var ctrl *CtrlError
		if errors.As(err, &ctrl) && ctrl.Pending {
			late++
		}
	}
	t.Logf("%d commands were left to the kernel", late)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		ids, err := List()
		check(t, err)
		if len(ids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("devices %v are left", ids)
		}
	}
}

// TestGuestRecovery kills a server under load and recovers the device in a new one: the user sees no error and no lost write.
func TestGuestRecovery(t *testing.T) {
	c := openControl(t)
	spec := testSpec
	spec.Features |= FeatureRecovery | FeatureRecoveryReissue
	info := add(t, c, spec)
	path := backing(t)
	p := startServer(t)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
	check(t, c.Start(within(t, 20*time.Second), info.ID, p.pid()))
	settleUdev()
	if err := c.StartRecovery(within(t, time.Second), info.ID); !errors.Is(err, ErrBusy) {
		t.Errorf("StartRecovery of a live device: %v", err)
	}
	user := client("verify", info.BlockPath(), 0, testSize, 5, 500)
	check(t, user.Start())
	for round := range 2 {
		for reads := 0; reads < 30; {
			fmt.Sscan(p.do("stats %d", info.ID), &reads)
		}
		p.kill()
		recoverStart(t, c, info.ID)
		if now, err := c.Info(within(t, time.Second), info.ID); err != nil || now.State != StateQuiesced {
			t.Fatalf("round %d: %+v, %v", round, now, err)
		}
		p = startServer(t)
		p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
		check(t, c.EndRecovery(within(t, 20*time.Second), info.ID, p.pid()))
	}
	if err := user.Wait(); err != nil {
		t.Errorf("the user: %v", err)
	}
	takeDown(t, c, info, p)
}

// recoverStart repeats StartRecovery while the old server's descriptor is still open.
func recoverStart(t *testing.T, c *Control, id int) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := c.StartRecovery(within(t, 10*time.Second), id)
		if err == nil {
			return
		}
		if !errors.Is(err, ErrBusy) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// TestGuestQuiesce hands a device over from one server to the next without losing or repeating a request.
func TestGuestQuiesce(t *testing.T) {
	c := openControl(t)
	spec := testSpec
	spec.Features |= FeatureRecovery | FeatureRecoveryReissue | FeatureQuiesce
	if !c.features.Has(FeatureQuiesce) {
		t.Skip("kernel without QUIESCE")
	}
	info := add(t, c, spec)
	path := backing(t)
	p := startServer(t)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
	check(t, c.Start(within(t, 20*time.Second), info.ID, p.pid()))
	settleUdev()
	use(t, "write", info.BlockPath(), 0, 5)
	check(t, c.Quiesce(within(t, 10*time.Second), info.ID, 5*time.Second))
	p.event("gone")
	p.event("gone")
	p.do("detach %d", info.ID)
	recoverStart(t, c, info.ID)
	p = startServer(t)
	p.do("attach %d %d %d %d %s", info.ID, info.Queues, info.Depth, info.Queues, path)
	check(t, c.EndRecovery(within(t, 20*time.Second), info.ID, p.pid()))
	use(t, "read", info.BlockPath(), 0, 5)
	takeDown(t, c, info, p)
}
