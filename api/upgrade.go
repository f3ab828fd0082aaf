package api

// UpgradeRequest replaces the data plane by the program that is installed now.
type UpgradeRequest struct{}

// UpgradeReply tells how the data plane was replaced.
type UpgradeReply struct {
	Version int       `json:"version"`
	Old     DataPlane `json:"old"` // process 0: there was none
	New     DataPlane `json:"new"`
	// Devices are those that the old one served, by number.
	Devices []HandedDevice `json:"devices"`
	// PauseMS is the longest time for which a device answered no request, milliseconds.
	PauseMS  int64    `json:"pause_ms"`
	Problems []string `json:"problems"` // sentences about what has not come back yet
}

// DataPlane is one data plane.
type DataPlane struct {
	PID   int    `json:"pid"`
	Build string `json:"build"`
}

// Ways in which a device goes from one data plane to the next.
const (
	HandOverQuiesced = "quiesced" // every request was answered before the old one ended
	HandOverReissued = "reissued" // the new one was given requests that the old one had not answered
)

// HandedDevice is a device after the data plane was replaced.
type HandedDevice struct {
	Device  string `json:"device"` // path
	Target  string `json:"target"`
	LUN     uint16 `json:"lun"`
	State   string `json:"state"` // as in Device
	How     string `json:"how"`   // HandOverQuiesced, ...
	Reason  string `json:"reason,omitempty"`
	PauseMS int64  `json:"pause_ms"` // until now, if it has not come back
}
