package iser

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/rdma"
)

// What a connection is made for.
const (
	// Outstanding is how many PDUs may wait for the target at once. isert posts 128 receives and reposts one only after its answer has
	// left; one more would be answered with RNR.
	Outstanding = 128

	// InitiatorRecvDataSegmentLength is the data that a receive slot takes, bytes; what is advertised is what is posted. Responses carry at
	// most a sense segment; 512 is the least that RFC 7145 section 6.4 allows to declare.
	InitiatorRecvDataSegmentLength = 512

	// TargetRecvDataSegmentLength is what is proposed to the target, bytes: isert accepts more and then cannot take it.
	TargetRecvDataSegmentLength = 8192

	// LoginDataSegmentLength is the text that one PDU carries during login and discovery, bytes.
	LoginDataSegmentLength = 8192

	// Unexpected is how many PDUs a target may send on its own at once (NOP-In, asynchronous messages, rejects): so many receives are posted beyond
	// one per outstanding PDU. It is declared as MaxOutstandingUnexpectedPDUs (RFC 7145 section 6.7).
	Unexpected = 24

	// MaxTransfer is the data of one command, bytes: what isert's default scatter list (128 pages) carries in one go.
	MaxTransfer = 512 << 10
)

// Layout of a connection's buffer, in bytes.
const (
	loginSize   = headersSize + LoginDataSegmentLength + 4
	sendSlot    = 128 // headers of a PDU, rounded to cache lines; room for 52 bytes of data
	sendSlots   = Outstanding + signalEvery
	recvSlot    = 592 // headers and 512 bytes of data
	recvSlots   = Outstanding + Unexpected
	loginSendAt = 0
	loginRecvAt = (loginSize + 63) &^ 63
	sendAt      = 2 * loginRecvAt
	recvAt      = sendAt + sendSlots*sendSlot
	bufferSize  = recvAt + recvSlots*recvSlot
)

// Work request IDs: kind in the upper byte, slot below.
const (
	kindSend      = 1 << 32
	kindRecv      = 2 << 32
	kindLoginSend = 3 << 32
	kindLoginRecv = 4 << 32
	kindMask      = 0xff << 32
)

// signalEvery is how many Sends share one completion: the adapter frees the ones before it at the same time.
const signalEvery = 32

// Owner runs functions on the thread that owns a connection.
type Owner interface {
	// Do runs f there, soon; it does not wait.
	Do(f func())
}

// ErrDisconnected tells that the peer, the network or the adapter ended a connection. It is always wrapped.
var ErrDisconnected = errors.New("RDMA connection lost")

// Config is what a connection needs of its owner.
type Config struct {
	Owner  Owner
	CQ     *rdma.CQ
	Domain *Domain

	// Discovery says that the connection is for a discovery session: its answers are texts, which need the large receive of the login, one for
	// each request. The small receives of the full feature phase would take them first.
	Discovery bool

	// Released runs, on some goroutine, when the connection needs none of this any more. It may be nil.
	Released func()
}

// Conn is one RDMA connection. It implements [iscsi.Datamover]; before the full feature phase a [Port] drives it.
type Conn struct {
	owner  Owner
	cq     *rdma.CQ
	domain *Domain
	link   *rdma.Conn

	memory *memory
	mem    []byte // of memory
	addr   uintptr
	lkey   uint32

	notifier iscsi.Notifier
	answer   func(b []byte, err error) // of the login exchange under way

	next    int  // send slot to use next
	unacked int  // Sends since the last signalled one
	inQueue int  // Sends that the adapter may still hold
	texts   bool // see Config.Discovery
	posted  bool
	large   bool // a Send from the login's buffer is under way
	state   connState
	reason  error

	immediate int    // a SCSI Write of up to so many bytes carries its data; 0 for none
	released  func() // see Config
	gone      func() // of the Port
}

type connState uint8

const (
	stateOpen connState = iota
	stateEnding
	stateEnded
)

// newConn makes the queue pair of a connection whose route is resolved. It must run on the owner. On an error memory stays the caller's.
func newConn(link *rdma.Conn, c Config, memory *memory) (*Conn, error) {
	m := &Conn{
		owner: c.Owner, cq: c.CQ, domain: c.Domain, link: link,
		memory: memory, mem: memory.mem, lkey: memory.mr.LKey(), texts: c.Discovery, released: c.Released,
	}
	m.addr = uintptr(unsafe.Pointer(&m.mem[0]))
	caps := rdma.QPCaps{MaxSend: sendSlots + 2, MaxRecv: recvSlots + 2}
	if err := link.CreateQP(c.CQ, caps, m); err != nil {
		return nil, err
	}
	return m, nil
}

// connect asks the peer for the connection. It runs on a control goroutine.
func (m *Conn) connect(ctx context.Context) error {
	// The four bytes are a convention of the field: the first says that zero-based virtual addresses (0x80) and Send with Invalidate
	// (0x40) are not to be used.
	_, err := m.link.Connect(ctx, rdma.ConnectParams{
		PrivateData:        []byte{0xc0, 0, 0, 0},
		ResponderResources: rdma.MaxResources, // the target reads write data
		RetryCount:         7,
		RNRRetryCount:      7, // wait for the target's receives for ever; a dead target is noticed by its silence
	})
	if err != nil {
		return err
	}
	m.link.OnEvent(func(e rdma.Event) {
		switch e.Kind {
		case rdma.EventDisconnected, rdma.EventDeviceRemoved, rdma.EventQPError, rdma.EventCQError:
			m.owner.Do(func() { m.fail(fmt.Errorf("%w: %v", ErrDisconnected, e.Kind)) })
		}
	})
	return nil
}

// Limits implements [iscsi.Datamover].
func (m *Conn) Limits() iscsi.Limits {
	return iscsi.Limits{Outstanding: Outstanding, MaxTransfer: MaxTransfer, Unordered: true}
}

// NoticeKeyValues implements [iscsi.Datamover].
func (m *Conn) NoticeKeyValues(keys *login.Keys) {
	m.immediate = 0
	if keys.ImmediateData {
		m.immediate = int(min(keys.TargetRecvDataSegmentLength, keys.FirstBurstLength, TargetRecvDataSegmentLength))
	}
}

// AllocateConnectionResources posts the receives of the full feature phase.
func (m *Conn) AllocateConnectionResources() error {
	if m.posted {
		return nil
	}
	m.posted = true
	for i := range recvSlots {
		if err := m.postRecv(i); err != nil {
			return err
		}
	}
	return nil
}

// EnableDatamover implements [iscsi.Datamover].
func (m *Conn) EnableDatamover(n iscsi.Notifier) error {
	if m.state != stateOpen {
		return fmt.Errorf("connection has ended: %w", m.reason)
	}
	m.notifier = n
	return m.AllocateConnectionResources()
}

// DeallocateTaskResources implements [iscsi.Datamover]. There is nothing to let go of: memory is registered with the region.
func (m *Conn) DeallocateTaskResources(*iscsi.Task) error { return nil }

// SendControl implements [iscsi.Datamover].
func (m *Conn) SendControl(bhs *pdu.BHS, data []byte, t *iscsi.Task) error {
	if m.state != stateOpen {
		return m.reason
	}
	if m.inQueue >= sendSlots {
		return errors.New("send queue is full although the session keeps to its limit")
	}
	if len(data) > sendSlot-headersSize {
		return m.sendLarge(bhs, data)
	}
	slot := m.next
	m.next++
	if m.next == sendSlots {
		m.next = 0
	}
	b := m.mem[sendAt+slot*sendSlot:][:sendSlot]
	h := Header(b)
	h.EncodeControl()
	copy(b[HeaderSize:], bhs[:])
	wr := rdma.SendWR{NumSGE: 1}
	if t != nil && len(t.Data) > 0 {
		mr := m.domain.mr(t.Region)
		if mr == nil {
			return fmt.Errorf("data of task %#08x lies in region %d, which is not registered", t.ITT(), t.Region)
		}
		at := uintptr(unsafe.Pointer(&t.Data[0]))
		switch {
		case t.Direction == iscsi.Read:
			h.SetRead(mr.RKey(), uint64(at))
		case len(t.Data) <= m.immediate && len(t.Data)%4 == 0:
			(*pdu.BHS)(b[HeaderSize:headersSize]).SetDataSegmentLength(len(t.Data))
			wr.NumSGE = 2
			wr.SGE[1] = rdma.SGE{Addr: at, Len: uint32(len(t.Data)), LKey: mr.LKey()}
		default:
			h.SetWrite(mr.RKey(), uint64(at))
		}
	}
	n := headersSize
	if len(data) > 0 {
		n += copy(b[headersSize:], data)
	}
	m.unacked++
	m.inQueue++
	wr.WRID = kindSend | uint64(m.unacked)
	wr.SGE[0] = rdma.SGE{Addr: m.addr + uintptr(sendAt+slot*sendSlot), Len: uint32(n), LKey: m.lkey}
	if m.unacked == signalEvery {
		wr.Signaled = true
		m.unacked = 0
	}
	return m.link.PostSend(wr)
}

// sendLarge sends a PDU whose data does not fit into a send slot, from the buffer of the login, which is free by then: the answer to a ping of
// the target that carries much data. One may be under way.
func (m *Conn) sendLarge(bhs *pdu.BHS, data []byte) error {
	if m.large {
		return errors.New("the target sends large pings faster than their answers leave")
	}
	m.large = true
	return m.postLarge(bhs, data)
}

// postLarge sends a PDU from the login's send buffer.
func (m *Conn) postLarge(bhs *pdu.BHS, data []byte) error {
	if len(data) > LoginDataSegmentLength {
		return fmt.Errorf("%d bytes of data do not fit into one PDU", len(data))
	}
	b := m.mem[loginSendAt:][:loginSize]
	Header(b).EncodeControl()
	copy(b[HeaderSize:], bhs[:])
	n := headersSize + copy(b[headersSize:], data)
	wr := rdma.SendWR{WRID: kindLoginSend, NumSGE: 1, Signaled: true}
	wr.SGE[0] = rdma.SGE{Addr: m.addr + loginSendAt, Len: uint32(n), LKey: m.lkey}
	return m.link.PostSend(wr)
}

// Flush implements [iscsi.Datamover]. The owner flushes the completion queue, which posts what every connection has queued in one go.
func (m *Conn) Flush() error { return nil }

func (m *Conn) postRecv(slot int) error {
	wr := rdma.RecvWR{WRID: kindRecv | uint64(slot), NumSGE: 1}
	wr.SGE[0] = rdma.SGE{Addr: m.addr + uintptr(recvAt+slot*recvSlot), Len: recvSlot, LKey: m.lkey}
	return m.link.PostRecv(wr)
}

// HandleWC implements [rdma.WCHandler].
func (m *Conn) HandleWC(wc *rdma.WC) {
	if m.state != stateOpen {
		return
	}
	if wc.Status != rdma.StatusSuccess {
		m.fail(wc.Err())
		return
	}
	index := int(wc.WRID & 0xffffffff)
	switch wc.WRID & kindMask {
	case kindRecv:
		b := m.mem[recvAt+index*recvSlot:][:wc.Bytes]
		n, err := CheckMessage(b)
		if err != nil {
			m.fail(fmt.Errorf("iSER message: %w (RFC 7145 section 9.2)", err))
			return
		}
		bhs := (*pdu.BHS)(b[HeaderSize:headersSize])
		if err := bhs.Valid(pdu.FromTarget, n); err != nil {
			m.fail(err)
			return
		}
		if m.notifier == nil {
			// The target speaks before the login exchange has been taken note of: only the exchange may be answered now.
			m.deliver(b)
		} else {
			m.notifier.ControlNotify(bhs, b[headersSize:headersSize+n])
		}
		if m.state == stateOpen {
			if err := m.postRecv(index); err != nil {
				m.fail(err)
			}
		}
	case kindSend:
		m.inQueue -= index
	case kindLoginSend:
		m.large = false
	case kindLoginRecv:
		b := m.mem[loginRecvAt:][:wc.Bytes]
		if _, err := CheckMessage(b); err != nil {
			m.fail(fmt.Errorf("iSER message: %w (RFC 7145 section 9.2)", err))
			return
		}
		m.deliver(b)
	}
}

// deliver hands a message to the login exchange.
func (m *Conn) deliver(b []byte) {
	if m.answer == nil {
		m.fail(errors.New("protocol error: PDU that answers no request during login"))
		return
	}
	answer := m.answer
	m.answer = nil
	answer(b, nil)
}

// exchange sends one PDU of the login phase; answer runs on the owner with the message that comes back.
func (m *Conn) exchange(bhs *pdu.BHS, data []byte, final bool, answer func([]byte, error)) {
	if m.state != stateOpen {
		answer(nil, m.reason)
		return
	}
	m.answer = answer
	recv := rdma.RecvWR{WRID: kindLoginRecv, NumSGE: 1}
	recv.SGE[0] = rdma.SGE{Addr: m.addr + loginRecvAt, Len: loginSize, LKey: m.lkey}
	err := m.link.PostRecv(recv)
	if err == nil && final && !m.texts {
		err = m.AllocateConnectionResources()
	}
	if err == nil {
		err = m.postLarge(bhs, data)
	}
	if err == nil {
		err = m.cq.Flush()
	}
	if err != nil {
		m.fail(err)
	}
}

// ConnectionTerminate implements [iscsi.Datamover].
func (m *Conn) ConnectionTerminate(reason error) {
	if reason == nil {
		reason = errors.New("connection closed")
	}
	m.fail(reason)
}

// fail ends the connection. The queue pair is destroyed on another goroutine, because that may wait for the adapter; only then can no task's
// memory be reached any more, and only then the session is told.
func (m *Conn) fail(err error) {
	if m.state != stateOpen {
		return
	}
	m.state, m.reason = stateEnding, err
	link := m.link
	go func() {
		link.Disconnect() // stops the adapter and tells the target
		link.Close()
		m.owner.Do(m.ended)
	}()
}

// ended runs on the owner when the queue pair is gone.
func (m *Conn) ended() {
	if m.state == stateEnded {
		return
	}
	m.state = stateEnded
	m.mem = nil
	if m.answer != nil {
		m.answer(nil, m.reason)
		m.answer = nil
	}
	if m.notifier != nil {
		m.notifier.ConnectionTerminateNotify(m.reason)
	}
	memory, released, gone := m.memory, m.released, m.gone
	go func() {
		memory.free()
		if released != nil {
			released()
		}
		if gone != nil {
			gone()
		}
	}()
}
