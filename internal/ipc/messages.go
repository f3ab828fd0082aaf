package ipc

import (
	"encoding/json"
	"time"

	"iserd.org/iserd/api"
)

// Version is the version of the messages. Both processes send theirs in Hello; a data plane that outlived an upgrade may be older than
// the control plane, so a field is only ever added.
const Version = 1

// Method names of the requests that the control plane sends.
const (
	MethodHello  = "hello"  // HelloRequest -> HelloReply
	MethodLogin  = "login"  // LoginRequest -> Group
	MethodLogout = "logout" // LogoutRequest -> Empty
	MethodAttach = "attach" // AttachRequest -> Empty; the unit's queues are fetching when it returns
	MethodDetach = "detach" // DetachRequest -> Empty; the character device is closed when it returns
	MethodAbort  = "abort"  // AbortRequest -> Empty; the device's requests fail, and none waits for the target any more when it returns
	MethodState  = "state"  // Empty -> State
	MethodRescan = "rescan" // RescanRequest -> Group: the target was asked for its units again

	// Shared memory. The order of a buffer's life: add; then for each device REG_BUF by the control plane and bind; UNREG_BUF and unbind; remove.
	MethodBufferAdd    = "buffer-add"    // BufferAddRequest with one descriptor -> Empty; mapped and registered with every adapter in use
	MethodBufferRemove = "buffer-remove" // BufferRemoveRequest -> Empty; nothing of it is mapped or registered any more
	MethodBufferBind   = "buffer-bind"   // BufferBindRequest -> Empty
	MethodBufferUnbind = "buffer-unbind" // BufferBindRequest -> Empty

	MethodShutdown = "shutdown" // ShutdownRequest -> Empty
)

// Event names that the data plane sends without being asked.
const (
	EventGroup  = "group"  // Group: a session group changed state
	EventDevice = "device" // Device: a device changed state
)

// Empty is the body of a message that carries nothing.
type Empty struct{}

// HelloRequest opens the conversation.
type HelloRequest struct {
	Version int    `json:"version"`
	Build   string `json:"build"`
}

// HelloReply tells what the data plane is.
type HelloReply struct {
	Version  int      `json:"version"`
	Build    string   `json:"build"`
	PID      int      `json:"pid"`
	Reactors int      `json:"reactors"` // data-path threads, hence queues of a device and sessions of a group
	RDMA     []string `json:"rdma"`     // names of the RDMA devices seen
	Settings bool     `json:"settings"` // it heeds the settings and secrets of a LoginRequest
	Start    *Start   `json:"start"`    // nil from one that is too old to say
}

// Start is what a data plane was started with.
type Start struct {
	Reactors   int           `json:"reactors"`    // 0: one for each CPU
	BufferPool int           `json:"buffer_pool"` // MiB
	ACKTimeout time.Duration `json:"ack_timeout"` // nanoseconds; 0: by the kind of adapter
}

// Transport is what carries a session.
type Transport string

// The transports. Auto is only ever asked for; a group that is up says which one it took.
const (
	TransportAuto Transport = "auto"
	TransportISER Transport = "iser"
	TransportTCP  Transport = "tcp"
)

// LoginRequest asks for one session per reactor to one portal of a target, and for the inventory of its logical units.
type LoginRequest struct {
	Group         string        `json:"group"` // key of the session group, chosen by the control plane and stable over restarts
	Target        string        `json:"target"`
	Portal        string        `json:"portal"` // ADDR:PORT, [ADDR%ZONE]:PORT
	Transport     Transport     `json:"transport"`
	InitiatorName string        `json:"initiator_name"`
	ISID          [6]byte       `json:"isid"`    // of reactor 0; the qualifier (last two bytes) counts up with the reactor
	Timeout       time.Duration `json:"timeout"` // of the whole login, nanoseconds

	// RequestTimeout is how long a command may go without an answer before it is aborted, nanoseconds; 0: for ever.
	RequestTimeout time.Duration `json:"request_timeout,omitempty"`
	// Others are further portals of the target, in the order of preference, and Policy says what for: one of the values of the setting path_policy. ""
	// is "single".
	Others []Route `json:"others,omitempty"`
	Policy string  `json:"policy,omitempty"`
	// How the sessions are made, the first time and whenever one is lost. Transport is not looked at: the field above counts.
	Settings     api.Settings `json:"settings"`
	Secret       api.Secret   `json:"secret,omitzero"`        // for CHAP; with it we answer the target's challenge
	TargetSecret api.Secret   `json:"target_secret,omitzero"` // with it the target has to answer ours
}

// Route is a portal of a target with the transport to it.
type Route struct {
	Portal    string    `json:"portal"`
	Transport Transport `json:"transport"`
}

// Group states.
const (
	GroupUp         = "up"         // every session is in the full-feature phase
	GroupRecovering = "recovering" // a session was lost and is being replaced; its requests wait; see Error
	GroupFailed     = "failed"     // a session could not be replaced in time; its requests fail; see Error
)

// Group is one session group: the sessions of one initiator with one target portal group, one per reactor.
type Group struct {
	ID              string    `json:"id"`
	Target          string    `json:"target"`
	Portal          string    `json:"portal"`
	TPGT            uint16    `json:"tpgt"`
	Transport       Transport `json:"transport"`        // iser or tcp
	TransportReason string    `json:"transport_reason"` // one sentence: why this transport
	State           string    `json:"state"`
	Since           time.Time `json:"since"`
	Error           *Error    `json:"error,omitempty"`
	InitiatorName   string    `json:"initiator_name"`
	Sessions        []Session `json:"sessions"`
	Units           []Unit    `json:"units"`

	Settings api.Settings `json:"settings"`           // those of the LoginRequest
	Others   []Route      `json:"others,omitempty"`   // likewise
	MovedTo  string       `json:"moved_to,omitempty"` // portal to which the target has moved for good, by its own word
}

// Session is one session, on one reactor.
type Session struct {
	Reactor      int               `json:"reactor"`
	ISID         [6]byte           `json:"isid"`
	TSIH         uint16            `json:"tsih"`
	State        string            `json:"state"` // RFC 7143 section 8 names: "LOGGED_IN", "FAILED", "FREE"
	LocalAddress string            `json:"local_address"`
	RDMADevice   string            `json:"rdma_device,omitempty"`
	Negotiated   map[string]string `json:"negotiated"` // text keys as on the wire
	Outstanding  int               `json:"outstanding"`
	WindowWaits  uint64            `json:"window_waits"`

	// What was done about commands without an answer, over all sessions that this one has replaced.
	Aborts     uint64 `json:"aborts,omitempty"` // ABORT TASK
	Resets     uint64 `json:"resets,omitempty"` // LOGICAL UNIT RESET
	Drops      uint64 `json:"drops,omitempty"`  // sessions that were ended
	AuthMethod string `json:"auth_method"`      // "None", or "CHAP" with algorithm and direction
	Portal     string `json:"portal,omitempty"` // where the session is, when that is not the group's portal

	Transport Transport `json:"transport"`
	TPGT      uint16    `json:"tpgt"`

	Access map[uint16]string `json:"access,omitempty"` // by number of unit: the asymmetric access state of the session's target port
}

// Unit is a logical unit that the target reported.
type Unit struct {
	LUN               uint64 `json:"lun"`    // 8-byte SAM LUN, big endian value
	Number            uint16 `json:"number"` // as a person counts: peripheral or flat address
	Usable            bool   `json:"usable"` // can be served as a block device
	Reason            string `json:"reason,omitempty"`
	DeviceType        uint8  `json:"device_type"` // SPC peripheral device type
	Vendor            string `json:"vendor"`
	Product           string `json:"product"`
	Revision          string `json:"revision"`
	Serial            string `json:"serial"`
	WWID              string `json:"wwid"`   // VPD 0x83: "naa.6001405…", "eui.…", "t10.…"
	Blocks            uint64 `json:"blocks"` // logical blocks
	LogicalBlockSize  uint32 `json:"logical_block_size"`
	PhysicalBlockSize uint32 `json:"physical_block_size"`
	AlignmentOffset   uint32 `json:"alignment_offset"` // bytes
	OptimalIOSize     uint32 `json:"optimal_io_size"`  // bytes, 0 unknown
	MaxTransfer       uint32 `json:"max_transfer"`     // bytes, what one request may carry, from the target and the transport
	ReadOnly          bool   `json:"read_only"`        // write protected
	WriteCache        bool   `json:"write_cache"`      // WCE: flushes are needed
	FUA               bool   `json:"fua"`              // DPOFUA
	Rotational        bool   `json:"rotational"`       // VPD 0xB1

	MinIOSize          uint32 `json:"min_io_size,omitempty"`         // bytes, 0 unknown
	MaxDiscard         uint64 `json:"max_discard,omitempty"`         // bytes of one DISCARD, 0: none
	DiscardGranularity uint32 `json:"discard_granularity,omitempty"` // bytes
	DiscardAlignment   uint32 `json:"discard_alignment,omitempty"`   // bytes from the start of the unit to the first granule
	MaxZeroes          uint64 `json:"max_zeroes,omitempty"`          // bytes of one WRITE_ZEROES, 0: none
	Discard            uint8  `json:"discard_method,omitempty"`      // by which command, as package lu numbers them; 0 for none
	Zeroes             uint8  `json:"zeroes_method,omitempty"`
	ZeroesUnmap        bool   `json:"zeroes_unmap,omitempty"`  // zeroing may deallocate
	CacheAssumed       bool   `json:"cache_assumed,omitempty"` // write_cache is a guess
	Changed            string `json:"changed,omitempty"`       // why the device of this unit, or of one that had its number, is served no more
}

// RescanRequest asks a target for its logical units again, and looks at each.
type RescanRequest struct {
	Group string `json:"group"`
}

// LogoutRequest ends a session group. Its devices must be detached before.
type LogoutRequest struct {
	Group string `json:"group"`
}

// AttachRequest asks the data plane to serve a logical unit through a ublk device that the control plane has added.
type AttachRequest struct {
	Group   string `json:"group"`
	LUN     uint64 `json:"lun"`
	WWID    string `json:"wwid"`   // of the unit, and
	Serial  string `json:"serial"` // as the control plane knows it: another one is not served under its name
	UblkID  int    `json:"ublk_id"`
	Queues  int    `json:"queues"`
	Depth   int    `json:"depth"`
	MaxIO   int    `json:"max_io"` // bytes of one request
	Recover bool   `json:"recover"`
}

// DetachRequest asks the data plane to let go of a device that was stopped.
type DetachRequest struct {
	UblkID int `json:"ublk_id"`
}

// AbortRequest asks the data plane to fail the requests of a device, those under way too, from now on and for good.
type AbortRequest struct {
	UblkID int `json:"ublk_id"`
}

// ShutdownRequest ends the data plane if nothing uses it.
type ShutdownRequest struct {
	OnlyIfIdle bool `json:"only_if_idle"`
}

// State is everything that a control plane needs in order to take over.
type State struct {
	Groups  []Group  `json:"groups"`
	Devices []Device `json:"devices"`
	Buffers []Buffer `json:"buffers"`
	Objects Objects  `json:"objects"`

	Reactors []ReactorStats `json:"reactors"`
}

// BufferAddRequest hands over memory that applications share with the data plane: a range of the file whose descriptor comes along.
type BufferAddRequest struct {
	ID     uint32          `json:"id"`     // chosen by the control plane, not in use
	Offset int64           `json:"offset"` // bytes into the file, a multiple of the page size
	Length int64           `json:"length"` // bytes, a multiple of the page size
	Label  json.RawMessage `json:"label"`  // kept for the control plane that comes next, and given back in State
}

// BufferRemoveRequest lets go of a buffer. The driver must not know it any more: every device had UNREG_BUF, or is gone.
type BufferRemoveRequest struct {
	ID uint32 `json:"id"`
}

// BufferBindRequest says that a device's driver calls a buffer by an index (the answer of REG_BUF), or does so no longer. A request that comes
// by an index not bound yet is served with a copy.
type BufferBindRequest struct {
	UblkID int    `json:"ublk_id"`
	Index  int    `json:"index"`
	ID     uint32 `json:"id"`
}

// Buffer is memory that applications share with the data plane.
type Buffer struct {
	ID         uint32          `json:"id"`
	Offset     int64           `json:"offset"`
	Length     int64           `json:"length"`
	Label      json.RawMessage `json:"label"`
	Descriptor int             `json:"descriptor"` // of the file, in the data plane: /proc/PID/fd/N
	Bindings   []BufferBinding `json:"bindings"`
	Requests   uint64          `json:"requests"` // that moved their data here without a copy
	Bytes      uint64          `json:"bytes"`
	InFlight   *int            `json:"in_flight,omitempty"` // requests that refer to it now; nil: the data plane does not count them
}

// BufferBinding is one device's index of a buffer.
type BufferBinding struct {
	UblkID int `json:"ublk_id"`
	Index  int `json:"index"`
}

// Objects counts what the data plane holds of the system, for leak checks.
type Objects struct {
	Connections   int `json:"connections"`
	QPs           int `json:"qps"`
	CQs           int `json:"cqs"`
	MRs           int `json:"mrs"`
	Descriptors   int `json:"descriptors"`
	PoolBytes     int `json:"pool_bytes"`
	PoolBytesUsed int `json:"pool_bytes_used"`
}

// Device states.
const (
	DeviceServing = "serving" // every queue has its requests fetched
	DeviceGone    = "gone"    // stopped by the kernel; waits for Detach
)

// Device is one ublk device that the data plane serves.
type Device struct {
	UblkID int          `json:"ublk_id"`
	Group  string       `json:"group"`
	LUN    uint64       `json:"lun"`
	State  string       `json:"state"`
	Queues []QueueStats `json:"queues"`
}

// QueueStats are the counters of one queue since it was attached.
type QueueStats struct {
	Reads      uint64    `json:"reads"`
	Writes     uint64    `json:"writes"`
	Flushes    uint64    `json:"flushes"`
	Discards   uint64    `json:"discards,omitempty"`
	Zeroes     uint64    `json:"zeroes,omitempty"` // WRITE_ZEROES
	ReadBytes  uint64    `json:"read_bytes"`
	WriteBytes uint64    `json:"write_bytes"`
	Errors     uint64    `json:"errors"`
	Retries    uint64    `json:"retries"`
	InFlight   int       `json:"in_flight"`
	Tiers      TierCount `json:"tiers"`         // payload bytes
	Requests   TierCount `json:"tier_requests"` // READs and WRITEs
	Lent       LentCount `json:"lent"`
}

// LentCount counts what of the TCP tier moved between the socket and the request's own pages; the rest was copied once more in between.
type LentCount struct {
	Requests uint64 `json:"requests"` // READs and WRITEs
	Bytes    uint64 `json:"bytes"`    // of payload
}

// TierCount counts by copy tier.
type TierCount struct {
	Shared     uint64 `json:"shared"`     // no copy: the adapter reached the application's memory
	Registered uint64 `json:"registered"` // one copy by the driver, to or from memory registered once
	TCP        uint64 `json:"tcp"`        // through a socket
}

// ReactorStats count what the thread of a reactor did since it began.
type ReactorStats struct {
	Turns      uint64 `json:"turns"`       // that found work
	Sleeps     uint64 `json:"sleeps"`      // waits for the ring
	DeepSleeps uint64 `json:"deep_sleeps"` // of those, the ones for which there was nothing to do for a while
	Enters     uint64 `json:"enters"`      // io_uring_enter
	Doorbells  uint64 `json:"doorbells"`   // crossings into the verbs library to post
	Polls      uint64 `json:"polls"`       // crossings to poll
	WCs        uint64 `json:"wcs"`         // completions found by them
	Events     uint64 `json:"events"`      // completion events taken
}

// Error is a failure with a stable code. Code is one of the names of package api.
type Error struct {
	Code string `json:"code"`
	Text string `json:"text"`
}

func (e *Error) Error() string { return e.Text }
