package rdma

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// SGE names one piece of registered memory: ibv_sge.
type SGE struct {
	Addr uintptr
	Len  uint32 // bytes
	LKey uint32 // of the MR that covers it
}

// MaxSGE is the number of pieces a work request may have: a header and a data part.
const MaxSGE = 2

// WRIDMask covers the part of a WRID that is the caller's: 48 bits.
const WRIDMask = 1<<48 - 1

// SendWR is one send work request.
type SendWR struct {
	WRID     uint64 // the caller's 48 bits, returned in WC.WRID
	SGE      [MaxSGE]SGE
	NumSGE   int
	Signaled bool // ask for a completion on success too; failure always completes
	Inline   bool // the data is copied at Flush, LKey is not used; at most QPCaps.MaxInline bytes
}

// RecvWR is one receive buffer. Its completion carries the number of bytes received.
type RecvWR struct {
	WRID   uint64 // the caller's 48 bits, returned in WC.WRID
	SGE    [MaxSGE]SGE
	NumSGE int
}

// Remote names memory of the peer: the address and RKey the peer advertised.
type Remote struct {
	Addr uint64
	RKey uint32
}

// Op says what completed.
type Op uint8

// The operations a WC reports. The numbers are part of the wr_id, see the package comment.
const (
	OpSend  Op = 0 // SEND
	OpRecv  Op = 1 // receive
	OpWrite Op = 2 // RDMA WRITE by this side
	OpRead  Op = 3 // RDMA READ by this side
)

func (o Op) String() string {
	switch o {
	case OpSend:
		return "send"
	case OpRecv:
		return "recv"
	case OpWrite:
		return "rdma write"
	case OpRead:
		return "rdma read"
	}
	return fmt.Sprintf("op %d", uint8(o))
}

// WC is a work completion. It is valid during HandleWC only.
type WC struct {
	WRID   uint64 // as posted
	Op     Op     // as posted, valid for failures too
	Status Status
	Bytes  uint32 // received; only for OpRecv with StatusSuccess
	Vendor uint32 // adapter's own error code, for failures
}

// Err returns nil for a success, else a *[WCError].
func (wc *WC) Err() error {
	if wc.Status == StatusSuccess {
		return nil
	}
	return &WCError{Status: wc.Status, Vendor: wc.Vendor, WRID: wc.WRID, Op: wc.Op}
}

// WCHandler receives the completions of one QP, on the goroutine that calls [CQ.Poll] (or [CQ.Flush], for work requests the adapter did not
// take: [StatusNotPosted]). HandleWC may post on any QP of the same CQ and may close its own Conn; it must not block. A call of Poll or
// Flush from it returns at once and does nothing.
type WCHandler interface {
	HandleWC(wc *WC)
}

// QPCaps sizes a queue pair.
type QPCaps struct {
	MaxSend   int // send work requests outstanding, unsignalled ones included
	MaxRecv   int // receive work requests outstanding
	MaxInline int // bytes of inline data a send may carry
}

// Access is what an adapter may do with registered memory. Local read is always allowed.
type Access uint32

// The access rights of ibv_reg_mr(3). RemoteWrite requires LocalWrite.
const (
	LocalWrite  Access = 1 << 0
	RemoteWrite Access = 1 << 1
	RemoteRead  Access = 1 << 2
)

func (a Access) String() string {
	var s []string
	for _, f := range []struct {
		bit  Access
		name string
	}{{LocalWrite, "local write"}, {RemoteWrite, "remote write"}, {RemoteRead, "remote read"}} {
		if a&f.bit != 0 {
			s = append(s, f.name)
			a &^= f.bit
		}
	}
	if a != 0 || len(s) == 0 {
		s = append(s, fmt.Sprintf("%#x", uint32(a)))
	}
	return strings.Join(s, "|")
}

// ResolveConfig says where to connect to.
type ResolveConfig struct {
	Target netip.AddrPort // a link-local IPv6 address needs its zone
	Source netip.Addr     // optional: the local address, and with it the adapter

	// ACKTimeout is the time after which an unacknowledged packet is sent again, rounded up to 4.096 us * 2^n; 0 leaves the default, which
	// on RoCE is 0.54 s. Set here, before the route is resolved, it travels in the connection request and rules the peer's QP too, raised to
	// this adapter's own ACK delay (cm_ack_timeout in the kernel's cm.c). Kernels without the option ignore it.
	ACKTimeout time.Duration

	// SoftwareACKTimeout counts instead of ACKTimeout with an adapter that is a driver's work (see [Device.Software]), unless it is 0.
	SoftwareACKTimeout time.Duration
}

// MaxResources as ResponderResources or InitiatorDepth means as many as the adapter (and, when accepting, the peer) allows.
const MaxResources = 0xff

// ConnectParams are the values of the connection request or reply, rdma_connect(3).
type ConnectParams struct {
	PrivateData []byte // at most 56 bytes active, 196 passive (InfiniBand and RoCE, RDMA_PS_TCP)

	// ResponderResources is the number of RDMA Reads the peer may have outstanding here; InitiatorDepth those of this side at the peer.
	// Both are lowered to the adapter's limit. An initiator of iSER gives the first MaxResources (the target reads write data) and may
	// leave the second at 0 (it issues none).
	ResponderResources uint8
	InitiatorDepth     uint8

	RetryCount    uint8 // 0..7, transport retries; not used when accepting, where the peer's value rules
	RNRRetryCount uint8 // 0..7, retries when the peer has no receive posted; 7 means without end

	// ACKTimeout as in ResolveConfig, but set here it rules the local QP only.
	ACKTimeout time.Duration
}

// EventKind says what happened to an established connection.
type EventKind uint8

// The events of [Conn.OnEvent].
const (
	EventDisconnected  EventKind = iota + 1 // the peer or the network ended it; the QP is in error, its WRs come back flushed
	EventDeviceRemoved                      // the adapter goes away: close the Conn, its CQ and MRs soon, the removal may wait for it
	EventAddrChange                         // the address moved to another adapter (bonding failover): connect again
	EventTimewaitExit                       // the number of the disconnected QP may be used again
	EventQPError                            // the adapter put the QP into the error state; its WRs come back flushed
	EventCQError                            // the CQ overran or broke: every Conn on it is lost
	EventPortDown                           // the port the Conn uses lost its link; traffic is retried until RetryCount is used up
	EventPortUp                             // the port is active again
	EventOther                              // see Event.Code
)

var eventNames = [...]string{"", "disconnected", "device removed", "address change", "timewait exit", "queue pair error",
	"completion queue error", "port down", "port up", "other"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) && k > 0 {
		return eventNames[k]
	}
	return fmt.Sprintf("event %d", uint8(k))
}

// Event is one event of an established connection.
type Event struct {
	Kind EventKind
	Code string // rdma-core's name of it, for logs
}

// DeviceInfo describes an RDMA device of this host.
type DeviceInfo struct {
	Name     string // as in /sys/class/infiniband
	NodeGUID uint64
	NodeType string // "CA", "RNIC", ...
	Ports    []PortInfo
}

// PortInfo describes one port of a device.
type PortInfo struct {
	Num       int    // from 1
	State     string // "ACTIVE", "DOWN", ...
	LinkLayer string // "Ethernet", "InfiniBand"
	MTU       int    // bytes of payload of one packet
	GIDs      []GID
}

// GID is one entry of a port's address table. On RoCE its IP address is the one the adapter serves.
type GID struct {
	Index  int
	Addr   netip.Addr // a GID is an IPv6 address; RoCE v2 over IPv4 maps it, which is undone here
	Type   string     // "IB", "RoCE v1", "RoCE v2"
	Netdev string     // network interface, if any
}

// Limits are the adapter's own.
type Limits struct {
	MaxQPWR            int   // work requests per queue
	MaxSGE             int   // pieces per work request
	MaxCQE             int   // entries per completion queue
	MaxMR              int   // registrations
	MaxMRSize          int64 // bytes, saturated
	ResponderResources uint8 // RDMA Reads a peer may have outstanding at one QP
	InitiatorDepth     uint8 // RDMA Reads one QP may have outstanding at a peer
	CompVectors        int   // interrupt vectors completion queues are spread over
}

// QPAttr is the state of a connection's queue pair, as the adapter has it.
type QPAttr struct {
	QPN                uint32
	PeerQPN            uint32
	State              string        // "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"
	PathMTU            int           // bytes
	ACKTimeout         time.Duration // 0: without end
	RetryCount         uint8
	RNRRetryCount      uint8
	ResponderResources uint8
	InitiatorDepth     uint8
}

// CQStats counts what a completion queue's owner did. Batching is WRs per Flush and WCs per Poll.
type CQStats struct {
	Polls      uint64 // crossings to fetch completions
	EmptyPolls uint64 // of these, without a completion
	WCs        uint64 // completions given to handlers
	Stale      uint64 // completions of QPs already destroyed, dropped
	Posts      uint64 // crossings to post
	WRs        uint64 // work requests posted
	Events     uint64 // notifications drained from the completion channel
}
