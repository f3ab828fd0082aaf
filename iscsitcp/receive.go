package iscsitcp

import (
	"fmt"
	"unsafe"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/pdu"
)

// The receive side, in the order of this file: plan says where the next bytes of the stream go, landed takes note of them, parse cuts them
// into PDUs. It is a state machine without a socket; Conn connects it to the ring, the tests to streams of their own.
//
//	header --Data-In--> data --all there--> trailer --> header
//	   \----other PDUs: complete in the buffer----/
//
// The buffer reads ahead: one RECV may bring many PDUs, and short Data-In is copied out of it. Long Data-In is received where it belongs.

// directSize is the rest of a data segment, in bytes, from which it is received on its own, by one operation that waits for all of it. Below
// it the receive also reads ahead, so that one operation brings the next header too.
const directSize = 32768

// shortAhead is how much is read ahead among long Data-In, where more would only be copied: headers and responses.
const shortAhead = 1024

type stage uint8

const (
	stageHeader  stage = iota // the next PDU starts at buffer[r]
	stageData                 // the rest of a Data-In's data segment goes to data
	stageTrailer              // padding and data digest of a Data-In
)

// receiver is the state of the receive side.
//
//	buffer  |--consumed--|--not parsed--|--free--|
//	        0            r              w
type receiver struct {
	buffer []byte
	r, w   int
	ahead  int // bytes of the buffer in use for reading ahead
	want   int // bytes that the PDU at r needs in one piece

	stage   stage
	bhs     pdu.BHS // of the Data-In under way; also of the response made of it
	task    *task
	segment []byte      // place of its data segment in the task's memory
	pages   iscsi.Pages // or the task's pages, where it begins at byte start
	start   int
	size    int  // bytes of the data segment
	left    int  // of those, what is still to come
	trailer int  // bytes of padding and digest
	small   bool // the target cuts reads into pieces for which pages do not pay
}

// rest is the place in memory of what is still to come of the data segment.
func (in *receiver) rest() []byte { return in.segment[len(in.segment)-in.left:] }

// offset is the same in pages.
func (in *receiver) offset() int { return in.start + in.size - in.left }

func (in *receiver) init(m *memory) {
	*in = receiver{buffer: m.buffer, ahead: len(m.buffer), want: pdu.HeaderLength}
}

// plan returns where the next bytes go: to first, and after it is full to second. waitAll tells that only first counts and is to be
// filled; if it is nil, the pages from offset on.
func (in *receiver) plan() (first, second []byte, waitAll bool) {
	if in.r > 0 { // what is left of a PDU moves to the front; it is less than one PDU
		copy(in.buffer, in.buffer[in.r:in.w])
		in.r, in.w = 0, in.w-in.r
	}
	if in.stage == stageData && in.pages != nil {
		return nil, nil, true
	}
	if in.stage == stageData && in.left >= directSize {
		return in.rest(), nil, true
	}
	second = in.buffer[in.w:max(in.ahead, in.want)]
	if in.stage == stageData {
		first = in.rest()
	}
	return first, second, false
}

// position tells where in a PDU the stream stands, for an error.
func (in *receiver) position() string {
	switch {
	case in.stage == stageData:
		return fmt.Sprintf(" in a Data-In, %d of %d bytes missing", in.left, in.size)
	case in.stage == stageTrailer || in.w > in.r:
		return " in the middle of a PDU"
	}
	return ""
}

// landed takes note of n bytes that arrived where plan said, and handles every PDU that is complete. An error ends the connection.
func (c *Conn) landed(n int) error {
	in := &c.in
	if in.stage == stageData {
		k := min(n, in.left)
		in.left -= k
		n -= k
	}
	in.w += n
	return c.parse()
}

func (c *Conn) parse() error {
	in := &c.in
	for c.state == up {
		var more bool
		var err error
		switch in.stage {
		case stageHeader:
			more, err = c.header()
		case stageData:
			n := min(in.left, in.w-in.r)
			if b := in.buffer[in.r : in.r+n]; in.pages == nil {
				copy(in.rest(), b)
			} else if n > 0 {
				if err = in.pages.CopyOut(b, in.offset()); err != nil {
					return fmt.Errorf("copy %d bytes of a Data-In for command %#08x: %w", n, in.task.itt, err)
				}
			}
			in.r += n
			in.left -= n
			if more = in.left == 0; more {
				in.stage, in.want = stageTrailer, in.trailer
			}
		case stageTrailer:
			more, err = c.trailer()
		}
		if err != nil {
			return err
		}
		if !more {
			return nil
		}
	}
	return nil
}

// header handles the PDU at r: the start of a Data-In, or the whole of any other. It returns false when more bytes are needed.
func (c *Conn) header() (more bool, err error) {
	in := &c.in
	length := pdu.HeaderLength + c.keys.headerDigest
	if in.w-in.r < length {
		in.want = length
		return false, nil
	}
	h := pdu.HeaderOf(in.buffer[in.r:])
	if c.keys.headerDigest > 0 && checksum(0, h[:]) != getDigest(in.buffer[in.r+pdu.HeaderLength:]) {
		return false, protocolError("13.1", "header digest is wrong")
	}
	if err := h.Valid(pdu.FromTarget, c.keys.recvMax); err != nil {
		return false, err
	}
	n := h.DataSegmentLength()
	if h.Opcode() == pdu.OpDataIn {
		in.bhs = *h
		in.r += length
		return true, c.dataIn(pdu.AsDataIn(&in.bhs))
	}
	if n > controlMax {
		return false, protocolError("13.12", "%v with %d bytes of data, at most %d make sense", h.Opcode(), n, controlMax)
	}
	end := length + pdu.Padded(n)
	if n > 0 {
		end += c.keys.dataDigest
	}
	if in.w-in.r < end {
		in.want = end
		return false, nil
	}
	segment := in.buffer[in.r+length : in.r+length+pdu.Padded(n)]
	if n > 0 && c.keys.dataDigest > 0 && checksum(0, segment) != getDigest(in.buffer[in.r+end-digestLength:]) {
		return false, protocolError("13.1", "data digest of a %v is wrong", h.Opcode())
	}
	in.r += end
	in.want = pdu.HeaderLength
	switch h.Opcode() {
	case pdu.OpR2T:
		return true, c.readyToTransfer(pdu.AsR2T(h))
	case pdu.OpSCSIResponse:
		return true, c.respond(h, segment[:n])
	}
	c.notifier.ControlNotify(h, segment[:n])
	return true, nil
}

// dataIn checks a Data-In and finds the place of its data (RFC 7143 section 11.7).
//
// Below ErrorRecoveryLevel 1 the A bit asks for nothing and is ignored.
func (c *Conn) dataIn(p pdu.DataIn) error {
	in := &c.in
	k := c.find(p.InitiatorTaskTag())
	if k == nil {
		return protocolError("11.7", "Data-In for Initiator Task Tag %#08x, which is not outstanding", p.InitiatorTaskTag())
	}
	offset, n := int64(p.BufferOffset()), p.DataSegmentLength()
	switch {
	case k.t.Direction != iscsi.Read:
		return protocolError("11.7", "Data-In for command %#08x, which does not read", k.itt)
	case p.DataSN() != k.sn:
		return protocolError("11.7", "DataSN %d of command %#08x, expected %d", p.DataSN(), k.itt, k.sn)
	case offset != int64(k.done):
		return protocolError("11.7", "Data-In of command %#08x at offset %d, expected %d", k.itt, offset, k.done)
	case offset+int64(n) > int64(k.t.Length()):
		return protocolError("11.7", "Data-In of command %#08x brings %d bytes at offset %d, there is room for %d",
			k.itt, n, offset, k.t.Length())
	}
	in.ahead = len(in.buffer)
	if n >= directSize {
		in.ahead = shortAhead
	}
	in.stage, in.task, in.size, in.left = stageData, k, n, n
	if in.pages, in.start = k.t.Pages, k.done; in.pages == nil {
		in.segment = k.t.Data[k.done : k.done+n]
	} else if n >= directSize {
		in.ahead = pdu.HeaderLength + c.keys.headerDigest // what is read beyond takes a copy and a system call
	} else if k.done+n < in.pages.Len() {
		in.small = true
	}
	in.trailer = 0
	if n > 0 {
		in.trailer = pdu.Padding(n) + c.keys.dataDigest
	}
	return nil
}

// trailer ends a Data-In: the padding is skipped, the digest checked, the bytes are counted, and a status goes up as a SCSI Response.
func (c *Conn) trailer() (more bool, err error) {
	in := &c.in
	if in.w-in.r < in.trailer {
		return false, nil
	}
	tail := in.buffer[in.r : in.r+in.trailer]
	if c.keys.dataDigest > 0 && len(tail) > 0 {
		pad := len(tail) - digestLength
		if checksum(checksum(0, in.segment), tail[:pad]) != getDigest(tail[pad:]) {
			return false, protocolError("13.1", "data digest of a Data-In for command %#08x is wrong", in.task.itt)
		}
	}
	in.r += in.trailer
	k := in.task
	k.sn++
	k.done += in.size
	in.stage, in.want, in.task, in.segment, in.pages = stageHeader, pdu.HeaderLength, nil, nil, nil
	if p := pdu.AsDataIn(&in.bhs); p.HasStatus() {
		return true, c.respond(responseOf(p), nil)
	}
	return true, nil
}

// responseOf makes of a Data-In with status the SCSI Response that it stands for, in place (RFC 7143 sections 11.7 and 11.4): O and U bits,
// Status, StatSN, ExpCmdSN, MaxCmdSN and ResidualCount are at the same offsets in both.
func responseOf(p pdu.DataIn) *pdu.BHS {
	h := p.BHS
	h[0] = byte(pdu.OpSCSIResponse)
	h[1] = 0x80 | h[1]&0x06
	h[2] = byte(pdu.ResponseCompleted)
	clear(h[4:16])  // lengths and LUN
	clear(h[20:24]) // SNACK tag
	pdu.AsSCSIResponse(h).SetExpDataSN(p.DataSN() + 1)
	clear(h[40:44]) // Buffer Offset stands where the bidirectional residual is
	return h
}

// addr is the address of the first byte of b.
func addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
