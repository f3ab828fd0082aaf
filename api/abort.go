package api

// AbortRequest ends a block device, such as /dev/ublkb0, in spite of whatever keeps it.
type AbortRequest struct {
	Device string `json:"device"`
	// Force ends a device that works although somebody uses it, and kills a data plane that does not answer.
	Force bool `json:"force"`
}

// AbortReply tells what was ended.
type AbortReply struct {
	Version   int    `json:"version"`
	Device    string `json:"device"`
	SessionID int    `json:"session_id"` // 0: nothing is known of its session
	Target    string `json:"target"`
	LUN       uint16 `json:"lun"`
}
