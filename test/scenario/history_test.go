package scenario

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/test/scenario/history"
)

// blockSize is the size of the blocks that these tests read and write, bytes.
const blockSize = 4096

// openDirect opens a device past the page cache, for the length of the test.
func openDirect(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// newBlock is memory for one block as O_DIRECT wants it.
func newBlock() []byte {
	b := make([]byte, 2*blockSize)
	skip := -uintptr(unsafe.Pointer(&b[0])) % blockSize
	return b[skip:][:blockSize:blockSize]
}

// Clients read and write historyBlocks blocks, several at a time at each of them.
const (
	historyBlocks  = 4
	historyClients = 8
)

// traffic is clients that read and write a few blocks of a device at random, all the time, and record what they do.
type traffic struct {
	log    *history.Log
	device *os.File
	blocks [][]byte // memory, by client

	ctx   context.Context
	stop  func()
	ended chan struct{} // all clients have

	mu     sync.Mutex // guards what follows
	count  int        // operations that have returned
	errs   []error
	resume chan struct{} // closed when those whose operation has failed go on
}

// startTraffic fills the blocks and starts the clients.
func startTraffic(t *testing.T, log *history.Log, device *os.File) *traffic {
	t.Helper()
	tr := &traffic{log: log, device: device, ended: make(chan struct{}), resume: make(chan struct{})}
	tr.ctx, tr.stop = context.WithCancel(context.Background())
	t.Cleanup(tr.stop)
	for range historyClients {
		tr.blocks = append(tr.blocks, newBlock())
	}
	for block := range historyBlocks {
		if err := tr.write(0, block); err != nil {
			t.Fatal(err)
		}
	}
	var clients sync.WaitGroup
	for client := range historyClients {
		clients.Go(func() { tr.run(client) })
	}
	go func() {
		clients.Wait()
		close(tr.ended)
	}()
	return tr
}

func (tr *traffic) write(client, block int) error {
	b := tr.blocks[client]
	return tr.log.Write(client, block, b, func() error {
		_, err := tr.device.WriteAt(b, int64(block)*blockSize)
		return err
	})
}

func (tr *traffic) read(client, block int) error {
	b := tr.blocks[client]
	return tr.log.Read(client, block, b, func() error {
		_, err := tr.device.ReadAt(b, int64(block)*blockSize)
		return err
	})
}

// run is one client. After an error it waits for the end of the fault: requests that fail at once would make a history of nothing else.
func (tr *traffic) run(client int) {
	for tr.ctx.Err() == nil {
		do := tr.read
		if rand.IntN(2) == 0 {
			do = tr.write
		}
		err := do(client, rand.IntN(historyBlocks))
		tr.mu.Lock()
		tr.count++
		resume := tr.resume
		if err != nil {
			tr.errs = append(tr.errs, err)
		}
		tr.mu.Unlock()
		if err != nil {
			select {
			case <-resume:
			case <-tr.ctx.Done():
			}
		}
	}
}

// goOn waits for operations that have begun after its call.
func (tr *traffic) goOn(t *testing.T) {
	t.Helper()
	count := func() int {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return tr.count
	}
	start := count()
	waitFor(t, "operations return", 60*time.Second, func() error {
		if n := count() - start; n < 10*historyClients {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// failed waits until every client has had an error, and takes the errors.
func (tr *traffic) failed(t *testing.T) (errs []error) {
	t.Helper()
	waitFor(t, "every client has had an error", 60*time.Second, func() error {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		if len(tr.errs) < historyClients {
			return fmt.Errorf("%d of %d", len(tr.errs), historyClients)
		}
		errs, tr.errs = tr.errs, nil
		return nil
	})
	return errs
}

// release lets clients that wait after an error go on.
func (tr *traffic) release() {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	close(tr.resume)
	tr.resume = make(chan struct{})
}

// end stops the clients, reads the blocks a last time, through the device and where the target keeps them, and checks the history.
func (tr *traffic) end(t *testing.T, medium string) {
	t.Helper()
	tr.stop()
	select {
	case <-tr.ended:
	case <-time.After(60 * time.Second):
		t.Fatal("an operation does not return")
	}
	for _, err := range tr.errs {
		t.Error(err)
	}
	file, err := os.Open(medium)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for block := range historyBlocks {
		if err := tr.read(0, block); err != nil {
			t.Error(err)
		}
		b := tr.blocks[0]
		if err := tr.log.Read(0, block, b, func() error { _, err := file.ReadAt(b, int64(block)*blockSize); return err }); err != nil {
			t.Error(err)
		}
	}
	ops, failures, torn := tr.log.Take(), 0, 0
	for _, op := range ops {
		if op.Failed && op.Write {
			failures++
		}
		if op.Words != nil {
			torn++
		}
	}
	began := time.Now()
	for _, s := range []history.Strength{history.Late, history.Fenced} {
		err := history.Check(ops, s)
		if v := new(history.Violation); errors.As(err, &v) {
			page := filepath.Join(logDir(), "history.html")
			t.Errorf("%v; %s shows it (%v)\n%s", v, page, v.Draw(page), v.Tell())
		} else if err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d operations, %d writes failed, %d reads were torn; checked in %v", len(ops), failures, torn, time.Since(began).Round(time.Millisecond))
}

// killDataPlane ends the data plane as a crash would, with both also the control plane, and waits until the next one serves.
func (g *target) killDataPlane(t testing.TB, both bool) {
	t.Helper()
	old := status(t).DataPlane.PID
	if both {
		control.kill(t)
	}
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	g.nextDataPlane(t, old)
}

// nextDataPlane waits until another data plane than the one that was serves.
func (g *target) nextDataPlane(t testing.TB, old int) {
	t.Helper()
	control.need(t)
	waitFor(t, "the next data plane serves", 60*time.Second, func() error {
		if pid := status(t).DataPlane.PID; pid == old || pid == 0 {
			return fmt.Errorf("it is %d", pid)
		}
		return nil
	})
	g.whole(t)
}

// historyFault is something that happens while the traffic goes on.
type historyFault struct {
	name  string
	kinds string // of targets that can do it: "LIO", "tgtd", or both
	soak  bool   // in a soak only, for the sake of the time it takes
	fails bool   // requests wait for one second only, and fail
	do    func(t *testing.T, g *target, tr *traffic)
}

var historyFaults = []historyFault{
	{name: "the target ends the sessions", kinds: "LIO", do: func(t *testing.T, g *target, _ *traffic) {
		g.enable(t, false)
		g.lost(t)
		g.waiting(t)
		g.enable(t, true)
	}},
	{name: "the cable is pulled", kinds: "LIO", do: func(t *testing.T, g *target, _ *traffic) {
		unplug(t)
		g.lost(t)
		g.waiting(t)
		plug(t)
	}},
	{name: "the target hangs", kinds: "tgtd", soak: true, do: func(t *testing.T, g *target, _ *traffic) {
		g.pause(t, true)
		g.lost(t)
		g.waiting(t)
		g.pause(t, false)
	}},
	{name: "the data plane is killed", kinds: "LIO tgtd", do: func(t *testing.T, g *target, _ *traffic) { g.killDataPlane(t, false) }},
	{name: "the data plane is killed while the target hangs", kinds: "tgtd", do: func(t *testing.T, g *target, _ *traffic) {
		g.pause(t, true)
		old := status(t).DataPlane.PID
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		g.pause(t, false)
		g.nextDataPlane(t, old)
	}},
	{name: "both processes are killed", kinds: "LIO tgtd", soak: true, do: func(t *testing.T, g *target, _ *traffic) { g.killDataPlane(t, true) }},
	{name: "the cable is pulled for longer than requests wait", kinds: "LIO", fails: true, do: func(t *testing.T, g *target, tr *traffic) {
		unplug(t)
		tr.onlySevered(t)
		plug(t)
	}},
	{name: "the target is away for longer than requests wait", kinds: "LIO", fails: true, soak: true, do: func(t *testing.T, g *target, tr *traffic) {
		g.enable(t, false)
		tr.onlySevered(t)
		g.enable(t, true)
	}},
	{name: "the target hangs for longer than requests wait", kinds: "tgtd", fails: true, soak: true, do: func(t *testing.T, g *target, tr *traffic) {
		g.pause(t, true)
		tr.onlySevered(t)
		g.pause(t, false)
	}},
}

// historyOf is the faults that a target can have and that requests survive, or fail by.
func historyOf(t *testing.T, k kind, fails bool) (list []historyFault) {
	for _, f := range historyFaults {
		name, _, _ := strings.Cut(k.name, "-")
		if f.fails == fails && strings.Contains(f.kinds, name) && (!f.soak || rounds(t, 0) > 0) {
			list = append(list, f)
		}
	}
	return list
}

// pause stops tgtd with its connections open, or lets it go on with what it was sent meanwhile.
func (g *target) pause(t testing.TB, on bool) {
	t.Helper()
	signal := syscall.SIGCONT
	if on {
		signal = syscall.SIGSTOP
	}
	if err := syscall.Kill(g.tgtd.PID(), signal); err != nil {
		t.Fatal(err)
	}
}

// onlySevered waits until every client has had an error, which has to be ENOLINK.
func (tr *traffic) onlySevered(t *testing.T) {
	t.Helper()
	for _, err := range tr.failed(t) {
		if !errors.Is(err, unix.ENOLINK) {
			t.Error(err)
		}
	}
}

// Readers and writers of a few blocks, several at a time, live through faults one after the other: there is an order of all that they have done that
// explains what every one of them has read, so nothing acknowledged was lost, nothing came late, nothing came back. Requests wait; where the target stays
// away for longer than they do, they fail, and may then have been carried out or not, but not later.
func TestHistory(t *testing.T) {
	guestOnly(t)
	list := kinds[:2]
	if rounds(t, 0) > 0 {
		list = kinds
	}
	for _, k := range list {
		t.Run(k.name, func(t *testing.T) {
			medium := filepath.Join(t.TempDir(), "unit")
			units := []targets.Unit{{Kind: targets.FileIO, Size: 4 * mib, Path: medium}}
			var g *target
			if k.tgtd {
				g = newTarget(t, k, units)
			} else {
				g = linked(t, k, units)
			}
			log := history.New()
			for range rounds(t, 1) {
				g.history(t, log, medium, "replacement_timeout=30", historyOf(t, k, false))
				g.history(t, log, medium, "replacement_timeout=1", historyOf(t, k, true))
			}
		})
	}
}

// history logs in, has faults happen while the traffic goes on, and logs out.
func (g *target) history(t *testing.T, log *history.Log, medium, patience string, faults []historyFault) {
	t.Helper()
	if len(faults) == 0 {
		return
	}
	g.login(t, append([]string{patience}, quick...)...)
	device := openDirect(t, devices(t, g.name)[g.luns[0]].Path)
	tr := startTraffic(t, log, device)
	for _, f := range faults {
		tr.goOn(t)
		began := time.Now()
		f.do(t, g, tr)
		g.whole(t)
		tr.release()
		t.Logf("%s: %v", f.name, time.Since(began).Round(10*time.Millisecond))
	}
	tr.goOn(t)
	tr.end(t, medium)
	device.Close()
	g.logout(t)
}
