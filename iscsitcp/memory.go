package iscsitcp

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/iscsi/pdu"
)

// Sizes of what a connection keeps outside the Go heap.
const (
	digestLength   = 4
	headerStride   = pdu.HeaderLength + digestLength // a header and its digest
	tailStride     = 8                               // padding (at most 3 bytes) and data digest (4)
	messagePDUs    = 128                             // PDUs in one SENDMSG at most
	messageIovecs  = 3 * messagePDUs                 // header, data, tail
	controlBuffers = 16                              // PDUs of the session with a data segment, waiting to leave
	controlMax     = 8192                            // bytes of a data segment that is not Data-In or Data-Out
	bufferSize     = 65536                           // read-ahead
)

// The parts before the structures keep them aligned, or this line does not compile.
var _ = [1]struct{}{}[(bufferSize+controlBuffers*controlMax+messagePDUs*(headerStride+tailStride))%16]

// A compile-time check: the largest PDU that is put together in the read-ahead buffer fits there.
var _ = [1]struct{}{}[(bufferSize-(headerStride+controlMax+digestLength))>>31]

// memory is the mapping of one connection: everything the kernel reads or writes on its behalf except the data of tasks.
//
//	+----------------+--------------+----------------+-------------+--------------+--------+------------------+
//	| receive buffer | control data | headers 52 x n | tails 8 x n | send iovecs  | iovecs | msghdr x 2       |
//	+----------------+--------------+----------------+-------------+--------------+--------+------------------+
type memory struct {
	mapping []byte

	buffer  []byte
	control []byte
	headers []byte
	tails   []byte
	out     []unix.Iovec
	in      []unix.Iovec
	outMsg  *unix.Msghdr
	inMsg   *unix.Msghdr
}

func newMemory() (*memory, error) {
	const (
		iovecSize = int(unsafe.Sizeof(unix.Iovec{}))
		msgSize   = (int(unsafe.Sizeof(unix.Msghdr{})) + 15) &^ 15
		total     = bufferSize + controlBuffers*controlMax + messagePDUs*(headerStride+tailStride) +
			(messageIovecs+2)*iovecSize + 2*msgSize
	)
	b, err := unix.Mmap(-1, 0, total, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of connection buffers: %w", total, err)
	}
	m := &memory{mapping: b}
	carve := func(n int) []byte {
		part := b[:n:n]
		b = b[n:]
		return part
	}
	m.buffer = carve(bufferSize)
	m.control = carve(controlBuffers * controlMax)
	m.headers = carve(messagePDUs * headerStride)
	m.tails = carve(messagePDUs * tailStride)
	m.out = unsafe.Slice((*unix.Iovec)(unsafe.Pointer(&carve(messageIovecs * iovecSize)[0])), messageIovecs)
	m.in = unsafe.Slice((*unix.Iovec)(unsafe.Pointer(&carve(2 * iovecSize)[0])), 2)
	m.outMsg = (*unix.Msghdr)(unsafe.Pointer(&carve(msgSize)[0]))
	m.inMsg = (*unix.Msghdr)(unsafe.Pointer(&carve(msgSize)[0]))
	return m, nil
}

// close unmaps. Preconditions: no operation that uses the mapping is outstanding.
func (m *memory) close() error {
	if m.mapping == nil {
		return nil
	}
	err := unix.Munmap(m.mapping)
	*m = memory{}
	return err
}

// zeros pad the data of pages.
var zeros [pdu.Alignment]byte

func setIovec(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}
