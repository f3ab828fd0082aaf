package testtarget_test

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/scsi"
)

// command makes a task of a CDB that reads n bytes.
func command(n int, cdb ...byte) *iscsi.Task {
	k := &iscsi.Task{Data: make([]byte, n)}
	if n > 0 {
		k.Direction = iscsi.Read
	}
	copy(k.CDB[:], cdb)
	return k
}

func reportLUNs() *iscsi.Task { return command(256, 0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0) }

func toLUN(lun byte, k *iscsi.Task) *iscsi.Task {
	k.LUN = scsi.LUN(lun) << 48 // peripheral device addressing
	return k
}

// answer carries a command out and returns sense key, ASC and ASCQ, or the status if it has no sense data.
func (c *client) answer(k *iscsi.Task) (status byte, sense [3]byte) {
	c.t.Helper()
	c.submit(k)
	c.wait(1)
	if k.Outcome != iscsi.Responded {
		c.t.Fatalf("command %#x: outcome %d", k.CDB[0], k.Outcome)
	}
	if k.SenseLen >= 14 {
		sense = [3]byte{k.Sense[2] & 0x0f, k.Sense[12], k.Sense[13]}
	}
	return byte(k.Status), sense
}

// expect carries a command out and compares its sense key, ASC and ASCQ; none means GOOD.
func (c *client) expect(k *iscsi.Task, want ...byte) {
	c.t.Helper()
	status, sense := c.answer(k)
	if len(want) == 0 && status != 0 || len(want) == 3 && (status != testtarget.CheckCondition || sense != [3]byte(want)) {
		c.t.Errorf("command %#x: status %#02x, sense %x; want %x", k.CDB[0], status, sense, want)
	}
}

// TestChanges changes what a target has under a session, which hears of it once and then sees it.
func TestChanges(t *testing.T) {
	l := loop.New(t)
	target := start(t, testtarget.Config{Units: []*testtarget.Unit{testtarget.NewUnit(1 << 20), testtarget.NewUnit(1 << 20)}})
	c := connect(t, l, target, nil)
	u := target.Unit(0)
	tur := func() *iscsi.Task { return command(0, 0) }
	c.expect(tur())

	if err := u.Grow(4 << 20); err != nil {
		t.Fatal(err)
	}
	c.expect(tur(), 6, 0x2a, 0x09)
	c.expect(tur())
	capacity := command(8, 0x25)
	c.expect(capacity)
	if n := binary.BigEndian.Uint32(capacity.Data); n != 4<<20/512-1 {
		t.Errorf("last block %d", n)
	}

	target.Map(5, testtarget.NewUnit(1<<20))
	c.expect(tur(), 6, 0x3f, 0x0e)
	c.expect(toLUN(1, tur()), 6, 0x3f, 0x0e)
	c.expect(toLUN(5, tur()))
	list := reportLUNs()
	c.expect(list)
	if n := binary.BigEndian.Uint32(list.Data); n != 3*8 || list.Data[8+16+1] != 5 {
		t.Errorf("units: %x", list.Data[:40])
	}
	target.Unmap(5)
	c.expect(toLUN(5, tur()), 5, 0x25, 0x00)
	c.expect(reportLUNs()) // which clears the conditions
	c.expect(tur())

	serial := func() string {
		k := command(64, 0x12, 1, 0x80, 0, 64)
		c.expect(k)
		return string(k.Data[4 : 4+int(k.Data[3])])
	}
	before := serial()
	u.SetSerial("another")
	u.Attention(0x3f, 0x03)
	if after := serial(); after != "another" || after == before { // INQUIRY reports no conditions
		t.Errorf("serial number %q, before %q", after, before)
	}
	c.expect(tur(), 6, 0x3f, 0x03)

	u.SetALUA(1, testtarget.ActiveOptimized)
	c.expect(tur())
	for state, want := range map[byte][3]byte{
		testtarget.Standby: {2, 0x04, 0x0b}, testtarget.Unavailable: {2, 0x04, 0x0c}, testtarget.Transitioning: {2, 0x04, 0x0a}, testtarget.Offline: {2, 0x04, 0x12},
	} {
		u.SetALUA(1, state)
		c.expect(tur(), 6, 0x2a, 0x06)
		c.expect(readTask(0, 512), want[:]...)
		groups := command(64, 0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 0, 64)
		c.expect(groups)
		if groups.Data[4] != state || groups.Data[7] != 1 {
			t.Errorf("state %#x: groups %x", state, groups.Data[:16])
		}
		u.SetALUA(1, testtarget.ActiveNonOptimized)
		c.expect(tur(), 6, 0x2a, 0x06)
		c.expect(readTask(0, 512))
	}
	expectClean(t, target)
}

// TestThin fills a thin unit to its bound, and empties it.
func TestThin(t *testing.T) {
	l := loop.New(t)
	unit := testtarget.NewUnit(1 << 30)
	unit.Thin, unit.Space = true, 8192
	target := start(t, testtarget.Config{Units: []*testtarget.Unit{unit}})
	c := connect(t, l, target, nil)
	w := writeTask(100000, 8192)
	w.Data[0] = 1
	c.expect(w)
	c.expect(writeTask(100000, 8192)) // takes no more
	c.expect(writeTask(0, 512), 7, 0x27, 0x07)
	if n := unit.Held(); n != 8192 {
		t.Errorf("holds %d bytes", n)
	}
	unmap := &iscsi.Task{Direction: iscsi.Write, Data: make([]byte, 24)}
	copy(unmap.CDB[:], []byte{0x42, 0, 0, 0, 0, 0, 0, 0, 24})
	copy(unmap.Data, []byte{0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0x86, 0xa0, 0, 0, 0, 8})
	c.expect(unmap)
	if n := unit.Held(); n != 4096 {
		t.Errorf("holds %d bytes after UNMAP of 8 blocks", n)
	}
	c.expect(writeTask(0, 4096))
	r := readTask(100000, 512)
	r.Data[0] = 7
	c.expect(r)
	if r.Data[0] != 0 {
		t.Error("an unmapped block does not read as zero")
	}
	expectClean(t, target)
}

// TestFileUnit keeps what is written in a file, and its size.
func TestFileUnit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "unit")
	if _, err := testtarget.NewFileUnit(path, 0); err == nil {
		t.Error("a file of no size serves")
	}
	unit, err := testtarget.NewFileUnit(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	l := loop.New(t)
	target := start(t, testtarget.Config{Units: []*testtarget.Unit{unit}})
	c := connect(t, l, target, nil)
	w := writeTask(8, 4096)
	copy(w.Data, "kept")
	c.expect(w)
	c.expect(command(0, 0x35)) // SYNCHRONIZE CACHE
	if err := unit.Close(); err != nil {
		t.Error(err)
	}
	c.expect(readTask(8, 4096), testtarget.KeyMediumError, 0x11, 0x00) // the file is closed
	b, err := os.ReadFile(path)
	if err != nil || len(b) != 1<<20 || string(b[4096:4100]) != "kept" {
		t.Errorf("%d bytes in the file, %v", len(b), err)
	}
	if again, err := testtarget.NewFileUnit(path, 0); err != nil || again.Size() != 1<<20 {
		t.Errorf("the size that is there: %v", err)
	} else {
		again.Close()
	}
}

// TestPaths reserves a unit through one target and sees it through another.
func TestPaths(t *testing.T) {
	l := loop.New(t)
	unit := testtarget.NewUnit(1 << 20)
	a := start(t, testtarget.Config{Units: []*testtarget.Unit{unit}})
	b := start(t, testtarget.Config{Units: []*testtarget.Unit{unit}, PortGroup: 2})
	ca, cb := connect(t, l, a, nil), connect(t, l, b, nil)
	reserve := func(action, kind byte, key, next uint64) *iscsi.Task {
		k := &iscsi.Task{Direction: iscsi.Write, Data: make([]byte, 24)}
		copy(k.CDB[:], []byte{0x5f, action, kind, 0, 0, 0, 0, 0, 24})
		binary.BigEndian.PutUint64(k.Data, key)
		binary.BigEndian.PutUint64(k.Data[8:], next)
		return k
	}
	ca.expect(reserve(0, 0, 0, 0xabc))
	ca.expect(reserve(1, 1, 0xabc, 0)) // write exclusive
	cb.expect(readTask(0, 512))
	if status, _ := cb.answer(writeTask(0, 512)); status != testtarget.ReservationConflict {
		t.Errorf("a write through the other path: status %#02x", status)
	}
	ca.expect(writeTask(0, 512))
	cb.expect(reserve(0, 0, 0, 0xdef))
	cb.expect(reserve(4, 1, 0xdef, 0xabc)) // preempt
	ca.expect(readTask(0, 512), 6, 0x2a, 0x05)
	if status, _ := ca.answer(writeTask(0, 512)); status != testtarget.ReservationConflict {
		t.Errorf("a write of the preempted one: status %#02x", status)
	}
	unit.SetALUA(1, testtarget.ActiveOptimized)
	unit.SetALUA(2, testtarget.Standby)
	ca.expect(readTask(0, 512))
	cb.expect(readTask(0, 512), 2, 0x04, 0x0b)
}

// TestParkedAborted ends parked commands by task management: the response to the function is the last that is heard of them.
func TestParkedAborted(t *testing.T) {
	for _, function := range []pdu.TaskFunction{pdu.AbortTask, pdu.LogicalUnitReset} {
		t.Run(function.String(), func(t *testing.T) {
			l := loop.New(t)
			target := start(t, testtarget.Config{})
			c := connect(t, l, target, nil)
			park := target.Park(func(_ int, cdb []byte) bool { return cdb[0] == 0x2a })
			w := writeTask(0, 4096)
			copy(w.Data, "never")
			c.submit(w)
			if err := park.Wait(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			l.Do(func() {
				c.session.Manage(iscsi.TaskManagement{Function: function, Task: w}, func(err error) { done <- err })
			})
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if k := c.wait(1)[0]; k.Outcome != iscsi.Aborted {
				t.Errorf("outcome %d", k.Outcome)
			}
			if n := park.Waiting(); n != 0 {
				t.Errorf("%d commands are still parked", n)
			}
			park.Close()
			if function == pdu.LogicalUnitReset {
				c.expect(command(0, 0), 6, 0x29, 0x03)
			}
			r := readTask(0, 512)
			c.expect(r)
			if string(r.Data[:5]) == "never" {
				t.Error("an aborted write has been carried out")
			}
			expectClean(t, target)
		})
	}
}
