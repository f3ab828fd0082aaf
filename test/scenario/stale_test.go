package scenario

import (
	"bytes"
	"context"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// staleWrite watches a target that has held a write back since the data plane that sent it was killed.
type staleWrite struct {
	park *testtarget.Park

	mu     sync.Mutex // guards what follows
	hold   bool       // writes are held back
	killed bool
	left   int // writes that were at work when the next data plane logged in for the first time; negative: it has not
}

// received is the target's hook.
func (z *staleWrite) received(_ *testtarget.Conn, p *testtarget.PDU) bool {
	isLogin := p.Opcode() == byte(pdu.OpLoginRequest)
	left := 0
	if isLogin {
		left = z.park.Waiting()
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if isLogin && z.killed && z.left < 0 {
		z.left = left
	}
	return true
}

func isWrite(cdb []byte) bool { return cdb[0] == scsi.OpWrite10 || cdb[0] == scsi.OpWrite16 }

// set changes what the hook does.
func (z *staleWrite) set(f func()) {
	z.mu.Lock()
	defer z.mu.Unlock()
	f()
}

// A target holds a write back while the data plane that sent it is killed. The next one repeats it, and a newer write to the same block follows. When the
// target then lets go of the first, it does not take effect: it was ended when its session came back.
func TestStaleWrite(t *testing.T) {
	for _, transport := range []string{"iser", "tcp"} {
		for _, c := range []struct {
			name string
			both bool
		}{
			{"data plane killed", false},
			{"both processes killed", true},
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
				g.login(t)
				device := openDirect(t, devices(t, g.name)[0].Path)
				for range rounds(t, 1) {
					z.once(t, g, unit, device, c.both)
				}
				device.Close()
				g.logout(t)
			})
		}
	}
}

// once is one round, at the first block.
func (z *staleWrite) once(t *testing.T, g *target, unit *testtarget.Unit, device *os.File, both bool) {
	t.Helper()
	stale, newer, got := newBlock(), newBlock(), newBlock()
	copy(stale, bytes.Repeat([]byte("stale"), blockSize/5))
	copy(newer, bytes.Repeat([]byte("newer"), blockSize/5))
	z.set(func() { z.hold, z.killed, z.left = true, false, -1 })
	repeated := make(chan error, 1)
	go func() {
		_, err := device.WriteAt(stale, 0)
		repeated <- err
	}()
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
		if err != nil {
			t.Errorf("the write that was under way: %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("the write that was under way does not return")
	}
	if _, err := device.WriteAt(newer, 0); err != nil {
		t.Errorf("the newer write: %v", err)
	}
	z.set(func() {
		if z.left != 1 {
			t.Errorf("%d writes were at work when the next data plane came", z.left)
		}
	})
	if n := z.park.Waiting(); n != 0 {
		t.Errorf("%d writes are at work although a newer one is done", n)
	}
	z.park.Release(-1)
	if _, err := unit.ReadAt(got, 0); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("the medium begins with %q (%v)", got[:10], err)
	}
	if _, err := device.ReadAt(got, 0); err != nil || !bytes.Equal(got, newer) {
		t.Errorf("the device begins with %q (%v)", got[:10], err)
	}
	g.nextDataPlane(t, old)
}
