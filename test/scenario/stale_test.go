package scenario

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// staleWrite watches a target that has held a write back since the data plane that sent it was killed.
type staleWrite struct {
	park *testtarget.Park

	mu     sync.Mutex // guards what follows
	hold   bool       // writes are held back
	refuse bool       // the session of the first write may not come back
	isid   [6]byte    // of the first write
	killed bool
	left   int // writes that were at work when the next data plane logged in for the first time; negative: it has not
}

// received is the target's hook.
func (z *staleWrite) received(c *testtarget.Conn, p *testtarget.PDU) bool {
	isLogin := p.Opcode() == byte(pdu.OpLoginRequest)
	left := 0
	if isLogin {
		left = z.park.Waiting()
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	switch {
	case p.Opcode() == byte(pdu.OpSCSICommand) && isWrite(p.BHS[32:]) && z.hold:
		z.isid = c.ISID()
	case isLogin && z.killed:
		if z.left < 0 {
			z.left = left
		}
		if z.refuse && [6]byte(p.BHS[8:14]) == z.isid {
			c.Close()
			return false
		}
	}
	return true
}

func isWrite(cdb []byte) bool { return cdb[0] == scsi.OpWrite10 || cdb[0] == scsi.OpWrite16 }

// onCPU runs f on a thread of one CPU, whose queue and session its requests take. The thread ends with it.
func onCPU(cpu int, f func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var set unix.CPUSet
		set.Set(cpu)
		err := unix.SchedSetaffinity(0, &set)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return done
}

// set changes what the hook does.
func (z *staleWrite) set(f func()) {
	z.mu.Lock()
	defer z.mu.Unlock()
	f()
}

// A target holds a write back while the data plane that sent it is killed. The next one repeats it, and a newer write to the same block follows. When the
// target then lets go of the first, it does not take effect: it was ended when its session came back, or, where that is refused, by a reset of the unit.
func TestStaleWrite(t *testing.T) {
	for _, transport := range []string{"iser", "tcp"} {
		for _, c := range []struct {
			name         string
			both, refuse bool
		}{
			{name: "data plane killed"},
			{name: "both processes killed", both: true},
			{name: "its session does not come back", refuse: true},
		} {
			t.Run(transport+" "+c.name, func(t *testing.T) {
				unit := testtarget.NewUnit(4 * mib)
				g, s := newScripted(t, transport, testtarget.Config{Units: []*testtarget.Unit{unit}})
				z := &staleWrite{}
				z.park = s.Park(func(_ int, cdb []byte) bool {
					z.mu.Lock()
					defer z.mu.Unlock()
					return z.hold && isWrite(cdb)
				})
				defer z.park.Close()
				s.SetHooks(testtarget.Hooks{Received: z.received})
				g.login(t, "replacement_timeout=2")
				device := openDirect(t, devices(t, g.name)[0].Path)
				for range rounds(t, 1) {
					z.once(t, g, unit, device, c.both, c.refuse)
				}
				device.Close()
				g.logout(t)
			})
		}
	}
}

// once is one round, at the first block.
func (z *staleWrite) once(t *testing.T, g *target, unit *testtarget.Unit, device *os.File, both, refuse bool) {
	t.Helper()
	stale, newer, got := newBlock(), newBlock(), newBlock()
	copy(stale, bytes.Repeat([]byte("stale"), blockSize/5))
	copy(newer, bytes.Repeat([]byte("newer"), blockSize/5))
	z.set(func() { z.hold, z.refuse, z.killed, z.left = true, refuse, false, -1 })
	resets := unit.Resets()
	repeated := onCPU(0, func() error { _, err := device.WriteAt(stale, 0); return err })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := z.park.Wait(ctx, 1); err != nil {
		t.Fatal(err)
	}
	old := status(t).DataPlane.PID
	z.set(func() { z.hold, z.killed = false, true })
	if both {
		control.kill(t)
	}
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	control.need(t)
	select {
	case err := <-repeated:
		if err != nil && !(refuse && errors.Is(err, unix.ENOLINK)) {
			t.Errorf("the write that was under way: %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the write that was under way does not return")
	}
	// By another session, for that of the first may not be there any more.
	if err := <-onCPU(1, func() error { _, err := device.WriteAt(newer, 0); return err }); err != nil {
		t.Errorf("the newer write: %v", err)
	}
	z.set(func() {
		if z.left != 1 {
			t.Errorf("%d writes were at work when the next data plane came", z.left)
		}
		z.refuse = false
	})
	if n := z.park.Waiting(); n != 0 {
		t.Errorf("%d writes are at work although a newer one is done", n)
	}
	z.park.Release(-1)
	if _, err := unit.ReadAt(got, 0); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("the medium begins with %q (%v)", got[:10], err)
	}
	if err := <-onCPU(1, func() error { _, err := device.ReadAt(got, 0); return err }); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("the device begins with %q (%v)", got[:10], err)
	}
	if n := unit.Resets() - resets; refuse != (n > 0) {
		t.Errorf("%d resets", n)
	}
	g.nextDataPlane(t, old)
}
