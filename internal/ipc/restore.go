package ipc

// MethodRestore brings a session group back that an earlier data plane had: RestoreRequest -> Group. It answers at once, with the group recovering.
const MethodRestore = "restore"

// RestoreRequest is a login whose target may be away for now. The group is there from the beginning and takes the devices of its units; their
// requests wait for the sessions, which are logged in with the ISIDs of the lost ones, and fail when the replacement timeout has passed.
type RestoreRequest struct {
	LoginRequest        // Transport is iser or tcp
	TPGT         uint16 `json:"tpgt"`
	Units        []Unit `json:"units"` // that have devices

	// Clean says that the sessions before had nothing under way when they ended, so that there is nothing to be ended at the target.
	Clean bool `json:"clean,omitempty"`
}
