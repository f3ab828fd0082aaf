package iscsitcp

import (
	"bytes"
	"testing"

	"iserd.org/iserd/iscsi"
)

// FuzzReceive lets any bytes arrive, in any pieces, while reads and writes are outstanding. Nothing outside the memory of a read may be
// touched, nothing of a finished task be referenced, and the state machine must end in an error or have consumed everything.
func FuzzReceive(f *testing.F) {
	for _, digest := range []int{0, 4} {
		keys := defaultSettings
		keys.headerDigest, keys.dataDigest = digest, digest
		w := &wire{keys: keys}
		w.dataIn(0, 0, 0, make([]byte, 100), false)
		w.nopIn([]byte("ping"))
		w.dataIn(0, 1, 100, make([]byte, 412), true)
		w.r2t(1, 7, 0, 8192, 4000)
		w.r2t(1, 8, 1, 12192, 3808)
		w.response(1, 0, 0, nil)
		w.dataIn(2, 0, 0, make([]byte, 40000), false)
		w.response(2, 2, 0, []byte("sense"))
		f.Add(w.b, uint16(11), digest > 0)
		f.Add(w.b, uint16(47), digest > 0)
		f.Add(w.b, uint16(65535), digest > 0)
		f.Add(w.b[:len(w.b)/2], uint16(1000), digest > 0)
	}
	const canary, margin = 0xa5, 64
	f.Fuzz(func(t *testing.T, stream []byte, piece uint16, digest bool) {
		if len(stream) > 5000*(int(piece)+1) {
			t.Skip("too many pieces to be quick")
		}
		keys := defaultSettings
		keys.maxOutstandingR2T = 2
		if digest {
			keys.headerDigest, keys.dataDigest = 4, 4
		}
		c, rec := newStream(t, keys)
		defer c.mem.close()
		sizes := []int{512, 16000, 40000}
		var memory [][]byte
		for i, n := range sizes {
			m := bytes.Repeat([]byte{canary}, n+2*margin)
			memory = append(memory, m)
			dir := iscsi.Read
			if i == 1 {
				dir = iscsi.Write
			}
			start(t, c, uint32(i), dir, m[margin:margin+n:margin+n])
		}
		drain(c, 1<<20)
		err := feed(c, stream, func(most int) int {
			drain(c, 10000)
			return min(most, int(piece)+1)
		})
		if err == nil && c.in.w-c.in.r > headerStride+controlMax+digestLength {
			t.Errorf("%d bytes were not looked at", c.in.w-c.in.r)
		}
		untouched := func(b []byte) bool { return bytes.Count(b, []byte{canary}) == len(b) }
		for i, m := range memory {
			if !untouched(m[:margin]) || !untouched(m[margin+sizes[i]:]) {
				t.Fatalf("memory beside task %d was written", i)
			}
		}
		if !untouched(memory[1]) {
			t.Fatal("memory of a write was written")
		}
		ended := 0
		for _, n := range rec.notes {
			if n.bhs.Opcode() == 0x21 {
				ended++
			}
		}
		live := 0
		for i := range c.tasks {
			if c.tasks[i].t != nil {
				live++
			}
		}
		if live+ended != len(sizes) {
			t.Errorf("%d tasks live and %d ended of %d", live, ended, len(sizes))
		}
		if err == nil {
			drain(c, 1<<20)
			for i := range c.tasks {
				if k := &c.tasks[i]; k.pending != 0 || k.r2ts != 0 {
					t.Errorf("task %d: %d pending, %d R2Ts after everything left", i, k.pending, k.r2ts)
				}
			}
		}
	})
}
