package iscsitcp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
)

// sentPDU is a PDU taken out of what the send side produced.
type sentPDU struct {
	bhs  pdu.BHS
	data []byte
}

// split cuts sent bytes into PDUs and checks padding and digests.
func split(t *testing.T, b []byte, keys settings) []sentPDU {
	t.Helper()
	var list []sentPDU
	for len(b) > 0 {
		if len(b) < pdu.HeaderLength+keys.headerDigest {
			t.Fatalf("%d bytes left over", len(b))
		}
		var p sentPDU
		copy(p.bhs[:], b)
		b = b[pdu.HeaderLength:]
		if keys.headerDigest > 0 {
			if getDigest(b) != checksum(0, p.bhs[:]) {
				t.Fatalf("header digest of %v", p.bhs.Opcode())
			}
			b = b[4:]
		}
		if n := p.bhs.DataSegmentLength(); n > 0 {
			padded := b[:pdu.Padded(n)]
			p.data = padded[:n:n]
			if !bytes.Equal(padded[n:], make([]byte, len(padded)-n)) {
				t.Fatalf("padding of %v is %x", p.bhs.Opcode(), padded[n:])
			}
			b = b[len(padded):]
			if keys.dataDigest > 0 {
				if getDigest(b) != checksum(0, padded) {
					t.Fatalf("data digest of %v", p.bhs.Opcode())
				}
				b = b[4:]
			}
		}
		list = append(list, p)
	}
	return list
}

// TestWriteForms sends a write under each combination of keys and lengths and puts the data together as a target does.
func TestWriteForms(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, initialR2T := range []bool{true, false} {
		for _, immediate := range []bool{true, false} {
			for _, digest := range []int{0, 4} {
				for _, length := range []int{1, 511, 512, 4096, 8192, 8193, 65536, 65537, 200001, 600000} {
					for _, sendMax := range []int{512, 8192, 262144} {
						keys := settings{
							initialR2T: initialR2T, immediateData: immediate, maxBurst: 100000, firstBurst: 65536, maxOutstandingR2T: 2,
							sendMax: sendMax, recvMax: 8192, headerDigest: digest, dataDigest: digest,
						}
						t.Run(fmt.Sprint(initialR2T, immediate, digest, length, sendMax), func(t *testing.T) { testWriteForm(t, keys, length, r) })
					}
				}
			}
		}
	}
}

func testWriteForm(t *testing.T, keys settings, length int, r *rand.Rand) {
	c, rec := newStream(t, keys)
	content := random(r, length)
	k := &iscsi.Task{Direction: iscsi.Write, Data: content}
	if keys.dataDigest == 0 && r.IntN(2) == 0 {
		k.Data, k.Pages = nil, &pages{mem: content}
	}
	if err := startTask(c, 2, k); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, length)
	first := min(keys.firstBurst, length)
	immediate := 0
	if keys.immediateData {
		immediate = min(first, keys.sendMax)
	}
	promised := immediate
	if !keys.initialR2T {
		promised = first
	}
	list := split(t, drain(c, 1+r.IntN(50000)), keys)
	command := list[0]
	if command.bhs.Opcode() != pdu.OpSCSICommand || len(command.data) != immediate || command.bhs.Final() != (promised == immediate) {
		t.Fatalf("command %v with %d bytes, F %v", command.bhs.Opcode(), len(command.data), command.bhs.Final())
	}
	copy(got, command.data)
	check := func(list []sentPDU, ttt uint32, lun uint64, at, end int) []sentPDU {
		for sn := uint32(0); at < end; sn++ {
			if len(list) == 0 {
				t.Fatalf("no Data-Out at %d of %d", at, end)
			}
			p := pdu.AsDataOut(&list[0].bhs)
			data := list[0].data
			if p.Opcode() != pdu.OpDataOut || p.InitiatorTaskTag() != 2 || p.TargetTransferTag() != ttt || p.DataSN() != sn || p.LUN() != lun ||
				int(p.BufferOffset()) != at || len(data) > keys.sendMax || p.Final() != (at+len(data) == end) || p.ExpStatSN() != 77 {
				t.Fatalf("Data-Out %x with %d bytes; expected TTT %d, DataSN %d, offset %d of %d", list[0].bhs, len(data), ttt, sn, at, end)
			}
			at += copy(got[at:end], data)
			list = list[1:]
		}
		return list
	}
	if rest := check(list[1:], pdu.ReservedTag, 0, immediate, promised); len(rest) > 0 {
		t.Fatalf("%d PDUs too many", len(rest))
	}
	for sn := uint32(0); promised < length; { // two R2Ts at a time
		w := &wire{keys: keys}
		type asked struct{ ttt, at, end int }
		var bursts []asked
		for range 2 {
			if n := min(keys.maxBurst, length-promised); n > 0 {
				w.r2t(2, 100+sn, sn, uint32(promised), uint32(n))
				bursts = append(bursts, asked{100 + int(sn), promised, promised + n})
				promised += n
				sn++
			}
		}
		if err := feed(c, w.b, whole); err != nil {
			t.Fatal(err)
		}
		list := split(t, drain(c, 1+r.IntN(50000)), keys)
		for _, b := range bursts {
			list = check(list, uint32(b.ttt), 0x0001000000000000, b.at, b.end)
		}
		if len(list) > 0 {
			t.Fatalf("%d PDUs too many", len(list))
		}
	}
	if !bytes.Equal(got, content) {
		t.Fatal("data differs")
	}
	w := &wire{keys: keys}
	w.response(2, 0, 0, nil)
	if err := feed(c, w.b, whole); err != nil {
		t.Fatal(err)
	}
	if rec.count != 1 {
		t.Fatalf("session was told %d PDUs", rec.count)
	}
}

// TestCommandsFirst proves that a command that comes after a long write does not wait for all of it.
func TestCommandsFirst(t *testing.T) {
	keys := defaultSettings
	keys.immediateData, keys.maxBurst = false, 4<<20
	c, _ := newStream(t, keys)
	start(t, c, 2, iscsi.Write, make([]byte, 4<<20))
	drain(c, 1<<30)
	w := &wire{keys: keys}
	w.r2t(2, 5, 0, 0, 4<<20)
	if err := feed(c, w.b, whole); err != nil {
		t.Fatal(err)
	}
	if !c.build() || c.out.partCount != messageBytes/keys.sendMax {
		t.Fatalf("message of %d PDUs", c.out.partCount)
	}
	start(t, c, 1, iscsi.Read, make([]byte, 512))
	for !c.advance(c.out.length - c.out.gone) {
	}
	if !c.build() || c.out.parts[0].slot != 1 || !c.out.parts[0].command {
		t.Errorf("next message starts with %+v", c.out.parts[0])
	}
}

// TestHeadersShareIovec proves that a batch of reads is one iovec.
func TestHeadersShareIovec(t *testing.T) {
	c, _ := newStream(t, defaultSettings)
	for i := range 5 {
		start(t, c, uint32(i), iscsi.Read, make([]byte, 512))
	}
	start(t, c, 5, iscsi.Write, make([]byte, 512))
	start(t, c, 6, iscsi.Read, make([]byte, 512))
	if !c.build() || c.out.iovecs != 3 {
		t.Errorf("%d iovecs, want 3: five reads with the header of the write, its data, the read after it", c.out.iovecs)
	}
}

func TestResponseBeforeCommandLeft(t *testing.T) {
	c, rec := newStream(t, defaultSettings)
	start(t, c, 1, iscsi.Write, make([]byte, 512))
	w := &wire{keys: c.keys}
	w.response(1, 2, 0, nil)
	if err := feed(c, w.b, whole); err == nil || !strings.Contains(err.Error(), "before the command and its data were sent") {
		t.Errorf("got %v", err)
	}
	if rec.count != 0 || c.find(1) == nil {
		t.Error("the task was handed back with its data in the queue")
	}
}

func TestControlBuffers(t *testing.T) {
	c, _ := newStream(t, defaultSettings)
	var h pdu.BHS
	for round := range 3 {
		for i := range controlBuffers {
			data := bytes.Repeat([]byte{byte(i)}, 1+i*500)
			pdu.NewNOPOut(&h)
			if err := c.SendControl(&h, data, nil); err != nil {
				t.Fatal(err)
			}
			clear(data) // copied before it returned
		}
		if err := c.SendControl(&h, []byte{1}, nil); err == nil || !strings.Contains(err.Error(), "no room for more") {
			t.Fatalf("one too many: %v", err)
		}
		list := split(t, drain(c, 100), c.keys)
		if len(list) != controlBuffers {
			t.Fatalf("round %d: %d PDUs", round, len(list))
		}
		for i, p := range list {
			if !bytes.Equal(p.data, bytes.Repeat([]byte{byte(i)}, 1+i*500)) {
				t.Errorf("round %d: PDU %d has %d bytes", round, i, len(p.data))
			}
		}
	}
	if err := c.SendControl(&h, make([]byte, controlMax+1), nil); err == nil {
		t.Error("data segment of 8193 bytes is taken")
	}
	for i := 0; ; i++ {
		if err := c.SendControl(&h, nil, nil); err != nil {
			if i < len(c.tasks) {
				t.Errorf("queue is full after %d", i)
			}
			break
		}
	}
}

// TestNoAllocation runs whole commands through both state machines.
func TestNoAllocation(t *testing.T) {
	for _, digest := range []int{0, 4} {
		keys := defaultSettings
		keys.initialR2T, keys.headerDigest, keys.dataDigest = false, digest, digest
		c, rec := newStream(t, keys)
		rec.keep = false
		r := &iscsi.Task{Direction: iscsi.Read, Data: make([]byte, 100000)}
		wr := &iscsi.Task{Direction: iscsi.Write, Data: make([]byte, 100000)}
		w := &wire{keys: keys}
		w.dataIn(1, 0, 0, make([]byte, 50001), false)
		w.dataIn(1, 1, 50001, make([]byte, 49999), true)
		w.r2t(2, 5, 0, 65536, 100000-65536)
		ask := w.b
		w = &wire{keys: keys}
		w.response(2, 0, 0, nil)
		w.response(1<<16|3, 2, 0, []byte("some sense"))
		end := w.b
		leave := func() {
			for c.build() {
				for !c.advance(min(c.out.length-c.out.gone, 3000)) {
					c.out.rest()
				}
			}
		}
		n := 0
		run := func() {
			if err := startTask(c, 1, r); err != nil {
				t.Fatal(err)
			}
			if err := startTask(c, 2, wr); err != nil {
				t.Fatal(err)
			}
			if err := startTask(c, 1<<16|3, wr); err != nil {
				t.Fatal(err)
			}
			leave()
			if err := feed(c, ask, whole); err != nil {
				t.Fatal(err)
			}
			leave()
			if err := feed(c, end, whole); err != nil {
				t.Fatal(err)
			}
			n++
		}
		if a := testing.AllocsPerRun(100, run); a != 0 {
			t.Errorf("digest %d: %v allocations for three commands", digest, a)
		}
		if rec.count != 3*n {
			t.Errorf("%d responses for %d commands", rec.count, 3*n)
		}
	}
}
