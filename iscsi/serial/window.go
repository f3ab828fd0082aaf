package serial

// Window is the command window of a session: what the target last said about the CmdSN that it accepts.
//
//	ExpCmdSN                 CmdSN (next to send)        MaxCmdSN
//	   |<-- sent, not yet acknowledged -->|<-- Room() -->|
//
// The zero value is not a window; start with the numbers of the final Login Response. A Window belongs to one goroutine or reactor.
//
// Source: RFC 7143 section 4.2.2.1 (command numbering and acknowledging).
type Window struct {
	ExpCmdSN uint32 // next CmdSN that the target expects
	MaxCmdSN uint32 // last CmdSN that the target accepts
}

// Update takes ExpCmdSN and MaxCmdSN of a PDU from the target and tells whether the window moved.
//
// Old values come in late when a target answers on several threads, so both only move forward, each for itself. A pair with
// MaxCmdSN < ExpCmdSN-1 is nonsense, and both numbers of it are ignored, as the RFC demands.
func (w *Window) Update(expCmdSN, maxCmdSN uint32) bool {
	if Less(maxCmdSN, expCmdSN-1) {
		return false
	}
	moved := false
	if Less(w.ExpCmdSN, expCmdSN) {
		w.ExpCmdSN = expCmdSN
		moved = true
	}
	if Less(w.MaxCmdSN, maxCmdSN) {
		w.MaxCmdSN = maxCmdSN
		moved = true
	}
	return moved
}

// Room is the number of non-immediate commands that may be sent now, starting with number cmdSN.
func (w *Window) Room(cmdSN uint32) uint32 {
	if !LessEq(cmdSN, w.MaxCmdSN) {
		return 0
	}
	return w.MaxCmdSN - cmdSN + 1
}

// Open tells whether command number cmdSN may be sent now.
func (w *Window) Open(cmdSN uint32) bool {
	return LessEq(cmdSN, w.MaxCmdSN)
}
