package scenario

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// mediumHolds is how long the medium below a target's unit holds a write back after the next data plane has come: longer than that one takes to log in, and
// shorter than the 15 s after which LIO gives up a login that waits for the write.
const mediumHolds = 3 * time.Second

// The medium of a real target holds a write back for seconds while the data plane that sent it is killed. The next one repeats it, and a newer write to the
// same block follows: it is not done before the first is, and so the medium keeps it.
func TestFaultLateWrite(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			m := newMedium(t, 4*mib)
			g := newTarget(t, k, []targets.Unit{{Kind: targets.IBlock, Path: m.path}})
			g.login(t)
			device := openDirect(t, devices(t, g.name)[0].Path)
			defer m.release() // or nobody can log out
			for range rounds(t, 1) {
				g.lateWrite(t, m, device)
			}
			device.Close()
			g.logout(t)
		})
	}
}

// lateWrite is one round, at the first block.
func (g *target) lateWrite(t *testing.T, m *medium, device *os.File) {
	t.Helper()
	late, newer, got := newBlock(), newBlock(), newBlock()
	copy(late, bytes.Repeat([]byte("late "), blockSize/5))
	copy(newer, bytes.Repeat([]byte("newer"), blockSize/5))
	m.holdBack(true)
	first := onCPU(0, func() error { _, err := device.WriteAt(late, 0); return err })
	select {
	case <-m.arrived:
	case err := <-first:
		t.Fatalf("the write that is to be held back returns: %v", err)
	case <-time.After(20 * time.Second):
		t.Fatal("the medium gets no write")
	}
	m.holdBack(false)
	old := status(t).DataPlane.PID
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the next data plane is there", 20*time.Second, func() error {
		out, _ := exec.Command("pidof", "iserd-io").Output()
		for _, pid := range strings.Fields(string(out)) {
			if pid != strconv.Itoa(old) {
				return nil
			}
		}
		return fmt.Errorf("there is %q", out)
	})
	release := time.AfterFunc(mediumHolds, m.release)
	defer release.Stop()
	select {
	case err := <-first:
		if err != nil {
			t.Errorf("the write that was held back: %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the write that was held back does not return")
	}
	// By another session than the first one's.
	if err := <-onCPU(1, func() error { _, err := device.WriteAt(newer, 0); return err }); err != nil {
		t.Errorf("the newer write: %v", err)
	}
	if n := m.waiting(); n != 0 {
		t.Errorf("%d writes are still to come although a newer one is done", n)
	}
	m.release()
	if on := m.read(0, blockSize); !bytes.Equal(on, newer) {
		t.Errorf("the medium begins with %q", on[:10])
	}
	if err := <-onCPU(1, func() error { _, err := device.ReadAt(got, 0); return err }); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("the device begins with %q (%v)", got[:10], err)
	}
	g.nextDataPlane(t, old)
}
