package iscsitcp

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
)

// The send side, in the order of this file: command and burst queue what is to leave, build makes one message of it, advance takes note of
// what the kernel has taken. It is a state machine without a socket.
//
//	commands: SCSI Commands with immediate data, control PDUs    --+
//	bursts:   answers to R2T, unsolicited data, cut into Data-Out --+--> message --> SENDMSG
//
// Commands go first, so that a long write does not delay the reads behind it; they leave in the order of CmdSN, and so does their
// unsolicited data.

// messageBytes bounds the task data of one message, so that commands wait for one message at most and not for a whole burst.
const messageBytes = 512 << 10

// element is a queued PDU.
type element struct {
	bhs     pdu.BHS
	slot    int32 // of the task of a SCSI Command; -1 for other PDUs
	length  int32 // bytes of data
	control int32 // index of a control buffer that holds the data; -1: it is the task's
}

// burst is a sequence of Data-Out PDUs: the answer to an R2T, or the unsolicited data of a command.
type burst struct {
	slot        int32
	itt, ttt    uint32
	lun         uint64
	dataSN      uint32
	offset, end int // bytes [offset, end) of the task's data are not in a message yet
}

// part is what has to be noted when a PDU of the message is completely with the kernel.
type part struct {
	end     int // of the PDU in the message, bytes
	slot    int32
	control int32
	command bool // a SCSI Command
	last    bool // last PDU of a burst
	r2t     bool // of a burst that answers an R2T
}

// queue is a ring of fixed size.
type queue[T any] struct {
	items      []T
	head, used int
}

func (q *queue[T]) full() bool { return q.used == len(q.items) }

// push returns the place of a new last item. Preconditions: not full.
func (q *queue[T]) push() *T {
	i := q.head + q.used
	if i >= len(q.items) {
		i -= len(q.items)
	}
	q.used++
	return &q.items[i]
}

// first returns the oldest item, nil if there is none.
func (q *queue[T]) first() *T {
	if q.used == 0 {
		return nil
	}
	return &q.items[q.head]
}

func (q *queue[T]) pop() {
	if q.head++; q.head == len(q.items) {
		q.head = 0
	}
	q.used--
}

// sender is the state of the send side.
type sender struct {
	mem        *memory
	commands   queue[element]
	bursts     queue[burst]
	free       []int32 // control buffers
	expStatSN  uint32  // of the last PDU of the session
	parts      [messagePDUs]part
	partCount  int                        // parts of the message
	partNext   int                        // the first part that has not left completely
	iovecs     int                        // entries of mem.out in the message
	iovecNext  int                        // the first that has not left completely
	lent       [messageIovecs]iscsi.Pages // by iovec: what its base is an offset into; nil for memory
	hasPages   bool                       // any of them
	length     int                        // bytes of the message
	gone       int                        // bytes that have left
	header     pdu.BHS
	freeBuffer [controlBuffers]int32
}

// init makes room for n commands with maxR2T bursts each, besides the unsolicited one.
func (o *sender) init(m *memory, n, maxR2T int) {
	*o = sender{mem: m}
	o.commands.items = make([]element, n+controlBuffers)
	o.bursts.items = make([]burst, min(n*(1+maxR2T), 1<<16))
	for i := range o.freeBuffer {
		o.freeBuffer[i] = int32(i)
	}
	o.free = o.freeBuffer[:]
}

// command returns the place of a new PDU.
func (o *sender) command() (*element, error) {
	if o.commands.full() {
		return nil, fmt.Errorf("%d PDUs wait to be sent, and there is no room for more", o.commands.used)
	}
	return o.commands.push(), nil
}

// burst queues a sequence of Data-Out.
func (o *sender) burst(b burst) error {
	if o.bursts.full() {
		return fmt.Errorf("%d answers to R2T wait to be sent, and there is no room for more", o.bursts.used)
	}
	*o.bursts.push() = b
	return nil
}

// sendControl queues a PDU that is no SCSI Command.
func (c *Conn) sendControl(bhs *pdu.BHS, data []byte) error {
	buffer := int32(-1)
	if len(data) > 0 {
		n := len(c.out.free)
		switch {
		case len(data) > controlMax:
			return fmt.Errorf("%w: %v with %d bytes of data, at most %d are possible", errBroken, bhs.Opcode(), len(data), controlMax)
		case n == 0:
			return fmt.Errorf("%d PDUs with data wait to be sent, and there is no room for more", controlBuffers)
		}
		buffer = c.out.free[n-1]
		c.out.free = c.out.free[:n-1]
		copy(c.mem.control[int(buffer)*controlMax:], data)
	}
	e, err := c.out.command()
	if err != nil {
		return err
	}
	e.bhs = *bhs
	e.bhs.SetDataSegmentLength(len(data))
	e.slot, e.control, e.length = -1, buffer, int32(len(data))
	c.out.expStatSN = bhs.ExpStatSN()
	return nil
}

// build makes a message of what is queued. It returns false when there is nothing. Preconditions: the last message has left.
func (c *Conn) build() bool {
	o := &c.out
	o.partCount, o.partNext, o.iovecs, o.iovecNext, o.length, o.gone = 0, 0, 0, 0, 0, 0
	if o.hasPages {
		clear(o.lent[:])
		o.hasPages = false
	}
	bytes := 0
	for o.partCount < messagePDUs && bytes < messageBytes {
		e := o.commands.first()
		if e == nil {
			break
		}
		p := part{slot: e.slot, control: e.control, command: e.slot >= 0}
		switch {
		case e.control >= 0:
			c.add(&e.bhs, c.mem.control[int(e.control)*controlMax:][:e.length], p)
		case e.length > 0:
			c.addTask(&e.bhs, 0, int(e.length), p)
		default:
			c.add(&e.bhs, nil, p)
		}
		bytes += int(e.length)
		o.commands.pop()
	}
	for o.partCount < messagePDUs && bytes < messageBytes {
		b := o.bursts.first()
		if b == nil {
			break
		}
		bytes += c.dataOut(b)
		if b.offset == b.end {
			o.bursts.pop()
		}
	}
	return o.partCount > 0
}

// dataOut adds the next Data-Out of a burst (RFC 7143 section 11.7) and returns its length in bytes.
func (c *Conn) dataOut(b *burst) int {
	n := min(c.keys.sendMax, b.end-b.offset)
	last := b.offset+n == b.end
	p := pdu.NewDataOut(&c.out.header)
	p.SetFinal(last)
	p.SetDataSegmentLength(n)
	p.SetInitiatorTaskTag(b.itt)
	p.SetTargetTransferTag(b.ttt)
	p.SetExpStatSN(c.out.expStatSN)
	p.SetDataSN(b.dataSN)
	p.SetBufferOffset(uint32(b.offset))
	r2t := b.ttt != pdu.ReservedTag
	if r2t {
		p.SetLUN(b.lun)
	}
	c.addTask(p.BHS, b.offset, n, part{slot: b.slot, control: -1, last: last, r2t: r2t})
	b.offset += n
	b.dataSN++
	return n
}

// addTask appends a PDU with n bytes of its task's data, from byte off on.
func (c *Conn) addTask(h *pdu.BHS, off, n int, p part) {
	t := c.tasks[p.slot].t
	if t.Pages == nil {
		c.add(h, t.Data[off:off+n], p)
		return
	}
	c.addHeader(h)
	c.out.iovecPages(t.Pages, off, n)
	if pad := pdu.Padding(n); pad > 0 {
		c.out.iovec(zeros[:pad])
	}
	c.added(pdu.HeaderLength+c.keys.headerDigest+pdu.Padded(n), p)
}

// add appends a PDU with data that lies in memory.
func (c *Conn) add(h *pdu.BHS, data []byte, p part) {
	o := &c.out
	i := o.partCount
	c.addHeader(h)
	length := pdu.HeaderLength + c.keys.headerDigest
	if len(data) > 0 {
		o.iovec(data)
		tail := c.mem.tails[i*tailStride:][:0]
		for range pdu.Padding(len(data)) {
			tail = append(tail, 0)
		}
		if c.keys.dataDigest > 0 {
			sum := checksum(checksum(0, data), tail)
			tail = tail[:len(tail)+digestLength]
			putDigest(tail[len(tail)-digestLength:], sum)
		}
		if len(tail) > 0 {
			o.iovec(tail)
		}
		length += len(data) + len(tail)
	}
	c.added(length, p)
}

// addHeader appends the header of a PDU. Headers that follow each other without data share an iovec: a batch of reads is one.
func (c *Conn) addHeader(h *pdu.BHS) {
	o := &c.out
	i := o.partCount
	start := i * (pdu.HeaderLength + c.keys.headerDigest)
	header := c.mem.headers[start:][:pdu.HeaderLength+c.keys.headerDigest]
	copy(header, h[:])
	if c.keys.headerDigest > 0 {
		putDigest(header[pdu.HeaderLength:], checksum(0, h[:]))
	}
	if i > 0 && c.headerOnly(i-1) {
		v := &c.mem.out[o.iovecs-1]
		v.SetLen(int(v.Len) + len(header))
	} else {
		o.iovec(header)
	}
}

// added notes a PDU of length bytes that was appended.
func (c *Conn) added(length int, p part) {
	o := &c.out
	o.length += length
	p.end = o.length
	o.parts[o.partCount] = p
	o.partCount++
}

// headerOnly reports whether PDU i of the message, its last so far, has no data.
func (c *Conn) headerOnly(i int) bool {
	start := 0
	if i > 0 {
		start = c.out.parts[i-1].end
	}
	return c.out.parts[i].end-start == pdu.HeaderLength+c.keys.headerDigest
}

func (o *sender) iovec(b []byte) {
	setIovec(&o.mem.out[o.iovecs], b)
	o.lent[o.iovecs] = nil
	o.iovecs++
}

// iovecPages appends pages. The base of such an iovec is an offset.
func (o *sender) iovecPages(p iscsi.Pages, off, n int) {
	v := &o.mem.out[o.iovecs]
	*base(v) = uintptr(off)
	v.SetLen(n)
	o.lent[o.iovecs] = p
	o.iovecs++
	o.hasPages = true
}

// base is the base of an iovec as a number.
func base(v *unix.Iovec) *uintptr { return (*uintptr)(unsafe.Pointer(&v.Base)) }

// pages returns what is to leave next if that is pages: n bytes from byte off on; else nil.
func (o *sender) pages() (p iscsi.Pages, off, n int) {
	if !o.hasPages || o.lent[o.iovecNext] == nil {
		return nil, 0, 0
	}
	v := &o.mem.out[o.iovecNext]
	return o.lent[o.iovecNext], int(*base(v)), int(v.Len)
}

// rest returns what has not left of the message, up to the next pages.
func (o *sender) rest() []unix.Iovec {
	end := o.iovecs
	if o.hasPages {
		for end = o.iovecNext; end < o.iovecs && o.lent[end] == nil; end++ {
		}
	}
	return o.mem.out[o.iovecNext:end]
}

// advance takes note of n bytes that the kernel has taken, and returns whether the message is gone.
func (c *Conn) advance(n int) bool {
	o := &c.out
	o.gone += n
	for o.partNext < o.partCount && o.parts[o.partNext].end <= o.gone {
		c.left(&o.parts[o.partNext])
		o.partNext++
	}
	for o.iovecNext < o.iovecs {
		v := &o.mem.out[o.iovecNext]
		if uint64(n) < uint64(v.Len) {
			*base(v) += uintptr(n)
			v.SetLen(int(v.Len) - n)
			return false
		}
		n -= int(v.Len)
		o.iovecNext++
	}
	return true
}

// left notes that a PDU is completely with the kernel.
func (c *Conn) left(p *part) {
	if p.control >= 0 {
		n := len(c.out.free)
		c.out.free = c.out.free[:n+1]
		c.out.free[n] = p.control
		return
	}
	if !p.command && !p.last {
		return
	}
	k := &c.tasks[p.slot]
	k.pending--
	if p.r2t {
		k.r2ts--
	}
}
