package api

import "time"

// Version is the version of the JSON form.
const Version = 1

// Node is a stored record: one target at one portal.
type Node struct {
	ID           string    `json:"id"` // "n" and 16 hexadecimal digits, from a hash of the key; stable
	Target       string    `json:"target"`
	Address      string    `json:"address"`
	Port         uint16    `json:"port"`
	TPGT         int       `json:"tpgt"`       // target portal group tag, -1 unknown
	Interface    string    `json:"interface"`  // "default"
	Transport    string    `json:"transport"`  // the setting: auto, iser or tcp
	SeenOver     []string  `json:"seen_over"`  // transports over which discovery listed it
	Startup      string    `json:"startup"`    // "manual"; automatic login is not there yet
	Discovered   time.Time `json:"discovered"` // last discovery that listed it; zero for one made by hand
	Missing      bool      `json:"missing"`    // the last discovery of its source did not list it
	Source       string    `json:"source"`     // portal it was discovered from
	SessionState string    `json:"session_state,omitempty"`
	Settings     Settings  `json:"settings"`           // what the user has set
	Secrets      []string  `json:"secrets"`            // names of the secrets that are stored
	MovedTo      string    `json:"moved_to,omitempty"` // portal to which the target has moved for good, by its own word
	Pending      []string  `json:"pending,omitempty"`  // settings that were changed since the session was made
}

// Portal returns the node's portal.
func (n *Node) Portal() Portal { return Portal{n.Address, n.Port} }

// Session states.
const (
	SessionUp         = "up"
	SessionLogin      = "login"      // login in progress
	SessionClosing    = "closing"    // logout in progress
	SessionRecovering = "recovering" // lost and being brought back; requests wait; see LastError
	SessionFailed     = "failed"     // lost for good; see LastError
)

// Session is one live session group: all sessions with one target portal group, one per data-path thread, shown as one.
type Session struct {
	ID              int          `json:"id"`   // small number, stable for the node
	Node            string       `json:"node"` // node ID, whether or not a record is stored
	Target          string       `json:"target"`
	Address         string       `json:"address"`
	Port            uint16       `json:"port"`
	TPGT            int          `json:"tpgt"`
	State           string       `json:"state"`
	Transport       string       `json:"transport"` // iser or tcp
	TransportReason string       `json:"transport_reason"`
	InitiatorName   string       `json:"initiator_name"`
	Since           time.Time    `json:"since"`
	LastError       *Error       `json:"last_error,omitempty"`
	Connections     []Connection `json:"connections"`
	Units           []Unit       `json:"units"`
}

// Connection is one iSCSI session of a session group, on one data-path thread.
type Connection struct {
	Reactor      int               `json:"reactor"`
	ISID         string            `json:"isid"` // 12 hexadecimal digits
	TSIH         uint16            `json:"tsih"`
	State        string            `json:"state"` // RFC 7143 name
	LocalAddress string            `json:"local_address"`
	RDMADevice   string            `json:"rdma_device,omitempty"`
	Negotiated   map[string]string `json:"negotiated"`
	// What was done about commands without an answer, over all sessions that this one has replaced.
	Aborts     uint64 `json:"aborts"`                // ABORT TASK
	Resets     uint64 `json:"resets"`                // LOGICAL UNIT RESET
	Drops      uint64 `json:"drops"`                 // sessions that were ended
	AuthMethod string `json:"auth_method,omitempty"` // "None", or "CHAP" with algorithm and direction
	Portal     string `json:"portal,omitempty"`      // where it is, when that is not the session's portal
	Transport  string `json:"transport"`             // by which it is there

	Access map[uint16]string `json:"access,omitempty"` // by LUN: asymmetric access state of the target port, for units with ALUA and several portals
}

// Unit is a logical unit of a session.
type Unit struct {
	LUN     uint16 `json:"lun"`    // as a person counts
	Type    string `json:"type"`   // "disk", "tape", ...; "no device" when that is not known
	Device  string `json:"device"` // /dev/ublkbN, or "" when it is not served
	Reason  string `json:"reason,omitempty"`
	Size    uint64 `json:"size"` // bytes
	Vendor  string `json:"vendor"`
	Product string `json:"product"`
	Serial  string `json:"serial"`
	WWID    string `json:"wwid"`
}

// Device states.
const (
	DeviceStarting = "starting"
	DeviceLive     = "live"
	DeviceWaiting  = "waiting" // its data plane is gone; requests wait for the next one
	DeviceDead     = "dead"    // the kernel or the data plane let go of it
)

// Device is one logical unit served as a block device.
type Device struct {
	UblkID            int         `json:"ublk_id"`
	Path              string      `json:"path"`
	State             string      `json:"state"`
	SessionID         int         `json:"session_id"`
	Target            string      `json:"target"`
	Address           string      `json:"address"`
	Port              uint16      `json:"port"`
	Transport         string      `json:"transport"`
	LUN               uint16      `json:"lun"`
	Size              uint64      `json:"size"` // bytes
	LogicalBlockSize  uint32      `json:"logical_block_size"`
	PhysicalBlockSize uint32      `json:"physical_block_size"`
	ReadOnly          bool        `json:"read_only"`
	WriteCache        bool        `json:"write_cache"`
	Vendor            string      `json:"vendor"`
	Product           string      `json:"product"`
	Revision          string      `json:"revision"`
	Serial            string      `json:"serial"`
	WWID              string      `json:"wwid"`
	Queues            int         `json:"queues"`
	QueueDepth        int         `json:"queue_depth"`
	MaxIO             int         `json:"max_io"` // bytes
	Stats             DeviceStats `json:"stats"`
	// Tiers are the ways that requests can go, best first.
	Tiers []Tier `json:"tiers"`
	// Buffers is how many buffers of shared memory are registered with the device, slices that nobody has included.
	Buffers int `json:"buffers"`
	// Reason tells why the unit is not served any more: it is gone, or another one. State is dead then, and every request fails.
	Reason string `json:"reason,omitempty"`
	// What DISCARD and WRITE_ZEROES may carry, bytes; 0 for a unit that cannot.
	MaxDiscard         uint64 `json:"max_discard"`
	DiscardGranularity uint32 `json:"discard_granularity"`
	MaxZeroes          uint64 `json:"max_zeroes"`
	// QueueStats are the counters of each queue, when they were asked for.
	QueueStats []DeviceStats `json:"queue_stats,omitempty"`
	// Warnings are sentences about what is not as it should be.
	Warnings []string `json:"warnings,omitempty"`
}

// DeviceStats are the counters of a device, all queues added up.
type DeviceStats struct {
	Reads           uint64 `json:"reads"`
	Writes          uint64 `json:"writes"`
	Flushes         uint64 `json:"flushes"`
	Discards        uint64 `json:"discards"`
	Zeroes          uint64 `json:"zeroes"` // WRITE_ZEROES
	ReadBytes       uint64 `json:"read_bytes"`
	WriteBytes      uint64 `json:"write_bytes"`
	Errors          uint64 `json:"errors"`
	Retries         uint64 `json:"retries"`
	InFlight        int    `json:"in_flight"`
	BytesShared     uint64 `json:"bytes_shared"`         // no copy
	BytesRegistered uint64 `json:"bytes_registered"`     // one copy, memory registered once
	BytesTCP        uint64 `json:"bytes_tcp"`            // through a socket
	BytesLent       uint64 `json:"bytes_lent,omitempty"` // of those, what moved between the socket and the application's own pages

	// READs and WRITEs by the same tiers.
	RequestsShared     uint64 `json:"requests_shared"`
	RequestsRegistered uint64 `json:"requests_registered"`
	RequestsTCP        uint64 `json:"requests_tcp"`
}

// Target is one line of a discovery: a target at a portal.
type Target struct {
	Target     string   `json:"target"`
	Address    string   `json:"address"`
	Port       uint16   `json:"port"`
	TPGT       int      `json:"tpgt"`
	Transports []string `json:"transports"` // those over which it was listed
	Saved      bool     `json:"saved"`
}

// DataPlane states, as Status shows them.
const (
	DataPlaneUp       = "up"
	DataPlaneStarting = "starting"
	DataPlaneDown     = "down"
)

// Status is the daemon at a glance.
type Status struct {
	Version       string          `json:"daemon_version"`
	PID           int             `json:"pid"`
	Since         time.Time       `json:"since"`
	State         string          `json:"state"` // starting, running, degraded, stopping
	InitiatorName string          `json:"initiator_name"`
	DataPlane     DataPlaneStatus `json:"data_plane"`
	Ublk          UblkStatus      `json:"ublk"`
	Bus           string          `json:"bus"` // "connected", or why not
	Nodes         int             `json:"nodes"`
	Sessions      int             `json:"sessions"`
	Devices       int             `json:"devices"`
	Problems      []string        `json:"problems"` // sentences; empty when all is well
}

// DataPlaneStatus describes the process that carries the I/O.
type DataPlaneStatus struct {
	State         string   `json:"state"`
	PID           int      `json:"pid"`
	Version       string   `json:"version"`
	Reactors      int      `json:"reactors"`
	RDMADevices   []string `json:"rdma_devices"`
	Connections   int      `json:"connections"`
	QPs           int      `json:"qps"`
	CQs           int      `json:"cqs"`
	MRs           int      `json:"mrs"`
	Descriptors   int      `json:"descriptors"`
	PoolBytes     int      `json:"pool_bytes"`
	PoolBytesUsed int      `json:"pool_bytes_used"`
}

// UblkStatus tells whether block devices can be made.
type UblkStatus struct {
	Available bool   `json:"available"`
	Features  uint64 `json:"features"` // bits of UBLK_CMD_GET_FEATURES
	Reason    string `json:"reason,omitempty"`
}

// Seconds is a duration as the API carries it.
type Seconds float64

// Duration converts s; a negative, huge or non-finite value becomes 0, which means "the default".
func (s Seconds) Duration() time.Duration {
	if !(s > 0 && s < 86400) {
		return 0
	}
	return time.Duration(float64(s) * float64(time.Second))
}

// DiscoverRequest asks a portal for its targets with SendTargets.
type DiscoverRequest struct {
	Portal    string  `json:"portal"`
	Transport string  `json:"transport"` // auto asks over both and merges
	Save      bool    `json:"save"`
	Timeout   Seconds `json:"timeout"` // 0: the configured default

	// Set are settings for this time, over those that are stored for the portal. A binding (source_address, network_interface, rdma_device) also
	// goes into the records that are made.
	Set map[string]string `json:"set,omitempty"`
}

// LoginRequest asks for a session with a target.
type LoginRequest struct {
	Target    string  `json:"target"`
	Portal    string  `json:"portal"`    // "" takes the stored records
	Transport string  `json:"transport"` // "" takes the record's setting
	Timeout   Seconds `json:"timeout"`
}

// LogoutRequest ends a session. Session is a target name, a session number or a device path.
type LogoutRequest struct {
	Session string `json:"session"`
	// Force ends a session that has failed although its devices are still open; their users see I/O errors. A session that works is
	// never taken away from under an open device.
	Force bool `json:"force"`
}

// NodeFilter selects records. Empty fields match all.
type NodeFilter struct {
	Target string `json:"target"`
	Portal string `json:"portal"`
}

// LogoutReply tells what was ended.
type LogoutReply struct {
	Version int      `json:"version"`
	Session Session  `json:"session"`
	Devices []string `json:"devices"`
}

// Replies of the socket API, also the form of iserctl's --json.
type (
	// NodesReply lists stored records.
	NodesReply struct {
		Version  int      `json:"version"`
		Nodes    []Node   `json:"nodes"`
		Problems []string `json:"problems"` // records that cannot be read
	}
	// SessionsReply lists session groups.
	SessionsReply struct {
		Version  int       `json:"version"`
		Sessions []Session `json:"sessions"`
	}
	// DevicesReply lists block devices.
	DevicesReply struct {
		Version int      `json:"version"`
		Devices []Device `json:"devices"`
		// Unserved are the logical units that have no block device, with the reason.
		Unserved []UnservedUnit `json:"unserved"`
	}
	// TargetsReply lists what a discovery found.
	TargetsReply struct {
		Version int      `json:"version"`
		Targets []Target `json:"targets"`
		// Notes say which transport was not answered, when another was.
		Notes []string `json:"notes"`
	}
	// LoginReply is a new session with its devices.
	LoginReply struct {
		Version int      `json:"version"`
		Session Session  `json:"session"`
		Devices []Device `json:"devices"`
	}
	// StatusReply is the daemon's status.
	StatusReply struct {
		Version int    `json:"version"`
		Status  Status `json:"status"`
	}
	// ErrorReply is a failure.
	ErrorReply struct {
		Version int    `json:"version"`
		Error   *Error `json:"error"`
	}
)
