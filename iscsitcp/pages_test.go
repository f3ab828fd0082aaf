package iscsitcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testtarget"
	"iserd.org/iserd/internal/testtarget/loop"
	"iserd.org/iserd/internal/uring"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
)

// pages are memory of the test at a place of the ring's table. What the ring does to them is the same for those of a driver, except that their
// addresses do not begin with 0.
type pages struct {
	mem   []byte
	place int
	copys int
}

func (p *pages) Len() int { return len(p.mem) }

func (p *pages) Fixed() (uint16, uintptr) {
	return uint16(p.place), uintptr(unsafe.Pointer(unsafe.SliceData(p.mem)))
}

func (p *pages) CopyOut(src []byte, off int) error {
	p.copys++
	if copy(p.mem[off:], src) != len(src) {
		return unix.EINVAL
	}
	return nil
}

// book are registered pages of a loop, handed out one after the other.
type book struct {
	l     *loop.Loop
	first int
	next  int
}

const bookSize = 48

// openBook skips the test where the kernel cannot use them.
func openBook(t *testing.T, l *loop.Loop) *book {
	t.Helper()
	b := &book{l: l}
	err := error(nil)
	l.Call(func() {
		if !l.Ring.HasBuffers() {
			err = uring.ErrNotSupported
			return
		}
		b.first, _ = l.Ring.TakeBuffers(bookSize)
	})
	require.Need(t, "fixed-buffers", err)
	return b
}

// pages gives n bytes with the content of src.
func (b *book) pages(t *testing.T, n int, src []byte) *pages {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	copy(mem, src)
	p := &pages{mem: mem, place: b.first + b.next%bookSize}
	b.next++
	b.l.Call(func() { err = b.l.Ring.RegisterBuffer(p.place, mem) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.l.Call(func() { b.l.Ring.RegisterBuffer(p.place, nil) })
		unix.Munmap(mem)
	})
	return p
}

func readPages(lba uint32, p *pages) *iscsi.Task {
	t := &iscsi.Task{Direction: iscsi.Read, Pages: p}
	t.CDB[0] = 0x28
	binary.BigEndian.PutUint32(t.CDB[2:], lba)
	binary.BigEndian.PutUint16(t.CDB[7:], uint16(p.Len()/blockSize))
	return t
}

func writePages(lba uint32, p *pages) *iscsi.Task {
	t := readPages(lba, p)
	t.CDB[0], t.Direction = 0x2a, iscsi.Write
	return t
}

// TestPages moves data between registered pages and a target over a socket, between tasks with ordinary memory.
func TestPages(t *testing.T) {
	sizes := []int{512, 8192, 32768, 33280, 131072, 300032, 1 << 20}
	for _, dataIn := range []int{8192, 65536, 262144} {
		for _, immediate := range []string{"Yes", "No"} {
			for _, digest := range []login.Digest{login.DigestNone, login.DigestCRC32C} {
				t.Run(fmt.Sprintf("%d,%s,%v", dataIn, immediate, digest), func(t *testing.T) {
					l := loop.New(t)
					b := openBook(t, l)
					target := startTarget(t, testtarget.Config{
						Keys: map[string]string{
							"InitialR2T": "No", "ImmediateData": immediate, "MaxBurstLength": "262144", "FirstBurstLength": "131072",
							"MaxRecvDataSegmentLength": "65536", "MaxOutstandingR2T": "2",
						},
						DataInSize: dataIn,
					})
					c := connect(t, l, target, func(config *login.Config) {
						k := config.Keys
						k.InitialR2T, k.MaxBurstLength, k.FirstBurstLength, k.MaxOutstandingR2T = false, 1<<20, 1<<20, 2
						config.HeaderDigest = []login.Digest{digest}
					})
					if limits := c.conn.Limits(); !limits.PagesIn || !limits.PagesOut {
						t.Fatalf("limits %+v", limits)
					}
					r := rand.New(rand.NewPCG(3, 4))
					var writes, reads []*iscsi.Task
					lba := uint32(0)
					for i, n := range sizes {
						data := random(r, n)
						writes = append(writes, writePages(lba, b.pages(t, n, data)), write10(lba+4096, data))
						reads = append(reads, readPages(lba+4096, b.pages(t, n, nil)), read10(lba, make([]byte, n)))
						lba += uint32(n/blockSize) + uint32(i)
					}
					c.submit(writes...)
					for _, k := range c.wait(len(writes)) {
						good(t, k)
					}
					c.submit(reads...)
					for _, k := range c.wait(len(reads)) {
						good(t, k)
					}
					for i, n := range sizes {
						want := writes[2*i+1].Data
						if got := reads[2*i].Pages.(*pages); !bytes.Equal(got.mem, want) {
							t.Errorf("%d bytes read into pages are wrong", n)
						}
						if !bytes.Equal(reads[2*i+1].Data, want) {
							t.Errorf("%d bytes written from pages are wrong", n)
						}
					}
					var small bool
					l.Call(func() { small = !c.conn.Limits().PagesIn })
					if small != (dataIn < directSize) {
						t.Errorf("Data-In of %d bytes: reads into pages are off: %v", dataIn, small)
					}
					c.logout()
					expectClean(t, target)
				})
			}
		}
	}
}

// TestPagesDigest: where a digest has to be computed no task has pages, and one that has is handed back.
func TestPagesDigest(t *testing.T) {
	l := loop.New(t)
	b := openBook(t, l)
	target := startTarget(t, testtarget.Config{})
	c := connect(t, l, target, func(config *login.Config) { config.DataDigest = []login.Digest{login.DigestCRC32C} })
	k := readPages(0, b.pages(t, 65536, nil))
	c.submit(k)
	if c.wait(1); k.Outcome != iscsi.NotSent {
		t.Errorf("outcome %d", k.Outcome)
	}
	c.logout()
}

// afterSocket sees to it that a task which is lost with its connection does not end before the operations of the socket.
type afterSocket struct{ c *client }

func (a afterSocket) TaskDone(k *iscsi.Task) {
	if o := &a.c.conn.outstanding; k.Outcome == iscsi.Lost && (o[opReceive] || o[opSend]) {
		a.c.t.Error("a task has ended while the socket may reach its pages")
	}
	a.c.ended <- k
}

// TestPagesConnectionLost ends the connection while pages are being sent and received. Nothing may reach them when the tasks have ended.
func TestPagesConnectionLost(t *testing.T) {
	l := loop.New(t)
	b := openBook(t, l)
	for round := range 6 {
		target := startTarget(t, testtarget.Config{DataInSize: 65536, Keys: map[string]string{"MaxRecvDataSegmentLength": "65536"}})
		var seen int
		target.SetHooks(testtarget.Hooks{
			Sending: func(c *testtarget.Conn, p *testtarget.PDU) bool {
				if p.Opcode() == 0x25 || p.Opcode() == 0x31 { // Data-In, R2T
					if seen++; seen > 2+round*3 {
						c.Close()
						return false
					}
				}
				return true
			},
		})
		c := connect(t, l, target, nil)
		var tasks []*iscsi.Task
		for i := range 8 {
			p := b.pages(t, 1<<20, bytes.Repeat([]byte{byte(i)}, 1<<20))
			if i%2 == 0 {
				tasks = append(tasks, readPages(uint32(i*2048), p))
			} else {
				tasks = append(tasks, writePages(uint32(i*2048), p))
			}
		}
		l.Do(func() {
			for _, k := range tasks {
				k.Handler = afterSocket{c}
				c.session.Submit(k)
			}
		})
		lost := 0
		for _, k := range c.wait(len(tasks)) {
			if k.Outcome == iscsi.Lost {
				lost++
			}
		}
		if lost == 0 {
			t.Error("no task was lost")
		}
		if err := c.end(); err == nil {
			t.Error("the session ends without a reason")
		}
	}
}

// TestPagesNoPlace: an operation on an empty place fails, and the connection with it.
func TestPagesNoPlace(t *testing.T) {
	l := loop.New(t)
	b := openBook(t, l)
	target := startTarget(t, testtarget.Config{})
	c := connect(t, l, target, nil)
	p := b.pages(t, 65536, nil)
	l.Call(func() { l.Ring.RegisterBuffer(p.place, nil) })
	k := readPages(0, p)
	c.submit(k)
	if c.wait(1); k.Outcome != iscsi.Lost {
		t.Errorf("outcome %d", k.Outcome)
	}
	if err := c.end(); !errors.Is(err, unix.EFAULT) {
		t.Errorf("session ends with %v", err)
	}
}
