package iscsitcp

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
	"iserd.org/iserd/internal/uring"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// Config sizes a connection.
type Config struct {
	Outstanding int // SCSI commands and control PDUs that may wait for an answer at once; 0 means 256, at most 32768
}

const (
	defaultOutstanding = 256
	maxOutstanding     = 1 << 15 // the upper half of an Initiator Task Tag is a generation
	maxTransfer        = 1 << 24 // bytes of one command's data
)

// state of a Conn:
//
//	attached --EnableDatamover--> up --ConnectionTerminate, error--> closing --last completion--> closed
//	    \________________ConnectionTerminate________________________/
type state uint8

const (
	attached state = iota
	up
	closing // the socket is shut down; operations may still be outstanding
	closed  // nothing is left
)

var (
	_ iscsi.Port      = (*Port)(nil)
	_ iscsi.Datamover = (*Conn)(nil)
)

// The operations of a connection by token. At most one of each is outstanding.
const (
	opReceive uint32 = iota
	opSend
	opCancelReceive
	opCancelSend
	opCount
)

// Conn is a connection in the full feature phase, on a reactor. It implements [iscsi.Datamover]; see there for the contract of the methods.
//
// Flush has to be called once per turn of the reactor, also when nothing was submitted: answers to R2T leave with it.
type Conn struct {
	ring *uring.Ring
	slot uring.Slot
	fd   int

	state       state
	notifier    iscsi.Notifier
	reason      error
	outstanding [opCount]bool
	sendLength  int           // bytes of the last opSend
	pollFirst   [opCount]bool // the last operation emptied or filled the socket: wait before trying
	bytesIn     uint64

	mem   *memory
	keys  settings
	tasks []task // by the slot of the Initiator Task Tag

	in  receiver
	out sender
}

// Attach makes p, after its login, a Conn of the ring. It runs on the ring's thread. On success the Conn owns the socket and p is of no
// further use; on error p is as it was.
func (p *Port) Attach(ring *uring.Ring, config Config) (*Conn, error) {
	n := config.Outstanding
	if n == 0 {
		n = defaultOutstanding
	}
	if n < 0 || n > maxOutstanding {
		return nil, fmt.Errorf("attach: %d PDUs outstanding, at most %d are possible", n, maxOutstanding)
	}
	conn, err := p.take(true)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	if err := ring.Reserve(int(opCount)); err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	mem, err := newMemory()
	if err != nil {
		ring.Release(int(opCount))
		return nil, fmt.Errorf("attach: %w", err)
	}
	fd, err := dup(conn)
	if err != nil {
		mem.close()
		ring.Release(int(opCount))
		return nil, fmt.Errorf("attach: %w", err)
	}
	p.Close() // only the descriptor: the duplicate keeps the connection
	c := &Conn{ring: ring, fd: fd, mem: mem, tasks: make([]task, n), keys: defaultSettings}
	c.in.init(mem)
	c.out.init(mem, n, 1)
	c.slot = ring.Attach(c)
	return c, nil
}

// dup makes a second, blocking descriptor of a connection: one that Go's poller does not know.
func dup(conn syscall.Conn) (fd int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	var dupErr error
	err = raw.Control(func(old uintptr) {
		if fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0); dupErr != nil {
			return
		}
		// The flag belongs to the open file, so the old descriptor loses it too; it is closed next.
		if dupErr = unix.SetNonblock(fd, false); dupErr != nil {
			unix.Close(fd)
		}
	})
	if err = errors.Join(err, dupErr); err != nil {
		return -1, err
	}
	return fd, nil
}

// AllocateConnectionResources does nothing: over TCP the target cannot be faster than our receive window.
func (c *Conn) AllocateConnectionResources() error { return nil }

// NoticeKeyValues takes over what was negotiated. It must come before EnableDatamover.
func (c *Conn) NoticeKeyValues(keys *login.Keys) {
	c.keys = settingsOf(keys)
	c.out.init(c.mem, len(c.tasks), c.keys.maxOutstandingR2T)
}

// EnableDatamover starts to receive.
func (c *Conn) EnableDatamover(n iscsi.Notifier) error {
	if c.state != attached {
		return fmt.Errorf("enable: %w", ErrClosed)
	}
	c.notifier, c.state = n, up
	c.receive()
	return nil
}

// Limits tells what the connection can carry.
func (c *Conn) Limits() iscsi.Limits {
	pages := c.ring != nil && c.ring.HasBuffers() && c.keys.dataDigest == 0 // a digest takes a processor that sees the data
	return iscsi.Limits{
		Outstanding: len(c.tasks),
		MaxTransfer: maxTransfer,
		PagesIn:     pages && !c.in.small,
		PagesOut:    pages && c.keys.sendMax >= directSize,
	}
}

// Received returns how many bytes have come so far. It moves while Data-In and R2T keep a target busy that the session does not hear of,
// so a time-out can tell a slow target from a dead one.
func (c *Conn) Received() uint64 { return c.bytesIn }

// Flush sends what is waiting, if nothing is under way: at once as far as the socket has room, and the rest by the ring. A SENDMSG of the ring would
// end as soon, but its completion would wake the reactor for nothing.
func (c *Conn) Flush() error {
	for c.state == up && !c.outstanding[opSend] && c.build() {
		if !c.push() {
			c.send()
		}
	}
	return nil
}

// push sends of the message what needs no ring and no waiting, and returns whether it is gone. An error of the socket is left to the ring to tell.
func (c *Conn) push() bool {
	for {
		if pages, _, _ := c.out.pages(); pages != nil {
			return false
		}
		msg := c.prepareMessage()
		n, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(c.fd), msg, uintptr(c.messageFlags()|unix.MSG_DONTWAIT))
		if errno != 0 {
			c.pollFirst[opSend] = errno == unix.EAGAIN
			return false
		}
		if c.advance(int(n)) {
			return true
		}
		if int(n) < c.sendLength {
			c.pollFirst[opSend] = true
			return false
		}
	}
}

// prepareMessage makes the struct msghdr of all up to the next pages, and returns its address.
func (c *Conn) prepareMessage() uintptr {
	iov := c.out.rest()
	c.mem.outMsg.Iov = &iov[0]
	c.mem.outMsg.SetIovlen(len(iov))
	c.sendLength = 0
	for i := range iov {
		c.sendLength += int(iov[i].Len)
	}
	return uintptr(unsafe.Pointer(c.mem.outMsg))
}

// messageFlags are those of its SENDMSG.
func (c *Conn) messageFlags() uint32 {
	if c.out.hasPages && c.out.iovecNext+int(c.mem.outMsg.Iovlen) < c.out.iovecs {
		return unix.MSG_NOSIGNAL | unix.MSG_MORE
	}
	return unix.MSG_NOSIGNAL
}

// receive queues the next RECV.
func (c *Conn) receive() {
	first, second, waitAll := c.in.plan()
	sqe := c.ring.SQE()
	switch {
	case waitAll && c.in.pages != nil:
		place, base := c.in.pages.Fixed()
		sqe.PrepRecv(c.fd, base+uintptr(c.in.offset()), uint32(c.in.left), unix.MSG_WAITALL)
		sqe.UseFixed(place)
	case waitAll:
		sqe.PrepRecv(c.fd, addr(first), uint32(len(first)), unix.MSG_WAITALL)
	case len(first) == 0:
		sqe.PrepRecv(c.fd, addr(second), uint32(len(second)), 0)
	default:
		setIovec(&c.mem.in[0], first)
		setIovec(&c.mem.in[1], second)
		c.mem.inMsg.Iov = &c.mem.in[0]
		c.mem.inMsg.SetIovlen(2)
		sqe.PrepRecvmsg(c.fd, unsafe.Pointer(c.mem.inMsg), 0)
	}
	if c.pollFirst[opReceive] {
		sqe.Ioprio |= uapi.IORING_RECVSEND_POLL_FIRST
	}
	c.submitted(opReceive, sqe)
}

// send queues the next piece of the message: pages, or all up to the next pages.
func (c *Conn) send() {
	sqe := c.ring.SQE()
	if pages, off, n := c.out.pages(); pages != nil {
		place, base := pages.Fixed()
		sqe.PrepSend(c.fd, base+uintptr(off), uint32(n), unix.MSG_NOSIGNAL)
		sqe.UseFixed(place)
		c.sendLength = n
	} else {
		c.prepareMessage()
		sqe.PrepSendmsg(c.fd, unsafe.Pointer(c.mem.outMsg), c.messageFlags())
	}
	if c.pollFirst[opSend] {
		sqe.Ioprio |= uapi.IORING_RECVSEND_POLL_FIRST
	}
	c.submitted(opSend, sqe)
}

// Complete takes the completion of an operation. It implements [uring.Completer].
func (c *Conn) Complete(token uint32, res int32, flags uint32) {
	c.outstanding[token] = false
	if c.state == closing {
		c.finalize()
		return
	}
	var err error
	switch token {
	case opReceive:
		err = c.received(res, flags)
	case opSend:
		err = c.sent(res)
	}
	if err != nil {
		c.ConnectionTerminate(err)
	}
}

func (c *Conn) received(res int32, flags uint32) error {
	switch {
	case res > 0:
		c.bytesIn += uint64(res)
		c.pollFirst[opReceive] = flags&uapi.IORING_CQE_F_SOCK_NONEMPTY == 0
		if err := c.landed(int(res)); err != nil {
			return err
		}
	case res == 0:
		return fmt.Errorf("target closed the connection%s: %w", c.in.position(), io.EOF)
	case !again(res):
		return fmt.Errorf("receive: %w", unix.Errno(-res))
	}
	if c.state == up {
		c.receive()
	}
	return nil
}

func (c *Conn) sent(res int32) error {
	switch {
	case res >= 0:
		c.pollFirst[opSend] = int(res) < c.sendLength
		if c.advance(int(res)) {
			return nil
		}
		if !c.pollFirst[opSend] && c.push() {
			return nil
		}
	case !again(res):
		return fmt.Errorf("send: %w", unix.Errno(-res))
	}
	c.send()
	return nil
}

// submitted enters an operation into the account and gives it its key.
func (c *Conn) submitted(op uint32, sqe *uapi.SQE) {
	sqe.UserData = c.slot.Key(op)
	c.outstanding[op] = true
}

// again reports whether an operation that failed with res is simply to be repeated.
func again(res int32) bool {
	return unix.Errno(-res) == unix.EINTR || unix.Errno(-res) == unix.EAGAIN
}

// ConnectionTerminate shuts the socket down. When the kernel has let go of every buffer, ConnectionTerminateNotify follows with reason, or
// with ErrClosed if that is nil.
//
// With a reason the connection is reset and what was not sent yet is thrown away, so that no old command can reach the target late. Without
// one (after a logout) it is closed in order.
func (c *Conn) ConnectionTerminate(reason error) {
	if c.state >= closing {
		return
	}
	c.state, c.reason = closing, reason
	if reason == nil {
		c.reason = fmt.Errorf("%w", ErrClosed)
	} else {
		unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // close(2) resets
	}
	unix.Shutdown(c.fd, unix.SHUT_RDWR) // ENOTCONN when the target was faster
	c.cancel(opCancelReceive, opReceive)
	c.cancel(opCancelSend, opSend)
}

// cancel asks the kernel to end an operation. The request itself always completes, which is what brings finalize about even when nothing
// was outstanding.
func (c *Conn) cancel(token, op uint32) {
	sqe := c.ring.SQE()
	sqe.PrepCancel(c.slot.Key(op))
	c.submitted(token, sqe)
}

// finalize gives everything back after the last completion, and tells the session.
func (c *Conn) finalize() {
	for _, o := range c.outstanding {
		if o {
			return
		}
	}
	c.state = closed
	unix.Close(c.fd)
	c.fd = -1
	c.ring.Detach(c.slot)
	c.ring.Release(int(opCount))
	c.mem.close()
	c.in, c.out = receiver{}, sender{}
	clear(c.tasks)
	if n := c.notifier; n != nil {
		c.notifier = nil
		n.ConnectionTerminateNotify(c.reason)
	}
}

// errBroken marks what the session did wrong, not the target.
var errBroken = errors.New("request does not fit the connection")

// SendControl queues a PDU; Flush lets it leave. For a SCSI Command that writes it adds the immediate data and queues the unsolicited
// data, as negotiated.
func (c *Conn) SendControl(bhs *pdu.BHS, data []byte, t *iscsi.Task) error {
	if c.state != up {
		return fmt.Errorf("send %v: %w", bhs.Opcode(), ErrClosed)
	}
	if t != nil {
		return c.sendCommand(bhs, t)
	}
	return c.sendControl(bhs, data)
}
