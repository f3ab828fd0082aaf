package ipc

import "time"

// Single SCSI commands, beside those that serve the block devices.
const (
	MethodScsi    = "scsi"    // ScsiRequest -> ScsiReply
	MethodReserve = "reserve" // ReserveRequest -> ReserveReply
)

// MaxScsiData is the data of one command, bytes: half of the memory that control commands have, and what iSER moves in one command.
const MaxScsiData = 512 << 10

// ScsiRequest asks for one command to a logical unit of a session group, which need not be served. It may be one that the target did not report.
type ScsiRequest struct {
	Group   string        `json:"group"`
	LUN     uint64        `json:"lun"`
	Session int           `json:"session"`       // index of the session
	CDB     []byte        `json:"cdb"`           // 6 to 16 bytes
	In      int           `json:"in,omitempty"`  // bytes that the command may read
	Out     []byte        `json:"out,omitempty"` // what it writes; not together with In
	Timeout time.Duration `json:"timeout"`       // nanoseconds; the command is aborted then

	// SkipAttention sends the command again when it only met a unit attention, which told of something that happened before.
	SkipAttention bool `json:"skip_attention,omitempty"`
}

// ScsiReply is what the unit answered; a status other than GOOD is an answer, too.
type ScsiReply struct {
	Status   uint8  `json:"status"`
	Sense    []byte `json:"sense,omitempty"`
	Data     []byte `json:"data,omitempty"`
	Residual int64  `json:"residual,omitempty"` // bytes that were not moved; negative: the unit had that many more
}

// ReserveRequest changes registrations or the reservation of a unit by PERSISTENT RESERVE OUT. The unit is reached through several sessions, each an
// I_T nexus of its own, and every one of them is registered, so that all queues of its device get in.
type ReserveRequest struct {
	Group          string        `json:"group"`
	LUN            uint64        `json:"lun"`
	Action         uint8         `json:"action"` // service action of SPC: 0 to 6
	Key            uint64        `json:"key"`
	ActionKey      uint64        `json:"action_key"`
	Type           uint8         `json:"type"`
	PersistLoss    bool          `json:"persist_loss,omitempty"`
	AllTargetPorts bool          `json:"all_target_ports,omitempty"`
	Timeout        time.Duration `json:"timeout"` // of all of it, nanoseconds
}

// ReserveReply tells what was done.
type ReserveReply struct {
	Sessions int `json:"sessions"` // that have carried it out
}
