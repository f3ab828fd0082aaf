package api

// RescanRequest asks targets for their logical units again. Session is a target name, a session number or a device path; "" means all sessions.
type RescanRequest struct {
	Session string `json:"session"`
}

// RescanReply tells what has changed.
type RescanReply struct {
	Version  int            `json:"version"`
	Sessions []RescanResult `json:"sessions"`
}

// RescanResult is what a rescan brought for one session. Devices are paths such as /dev/ublkb0.
type RescanResult struct {
	SessionID int      `json:"session_id"`
	Target    string   `json:"target"`
	Added     []string `json:"added"`
	Removed   []string `json:"removed"`
	Grown     []string `json:"grown"`
	Problems  []string `json:"problems"`        // sentences about devices that could not follow their unit
	Error     *Error   `json:"error,omitempty"` // the target could not be asked
}

// UnservedUnit is a logical unit that has no block device.
type UnservedUnit struct {
	SessionID int    `json:"session_id"`
	Target    string `json:"target"`
	Unit
}
