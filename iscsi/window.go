package iscsi

import "iserd.org/iserd/iscsi/serial"

// window is the command window of a session: which CmdSN may be sent (RFC 7143 section 4.2.2.1).
//
//	ExpCmdSN                 CmdSN        MaxCmdSN
//	   |-- sent, not yet received --|-- may be sent --|   closed
type window struct {
	cmdSN    uint32 // of the next command
	expCmdSN uint32 // the target has received all before it
	maxCmdSN uint32 // the last that the target will take
}

// open reports whether a command may be sent now.
func (w *window) open() bool { return serial.LessEq(w.cmdSN, w.maxCmdSN) }

// take returns the number for the next command and counts it as sent. Preconditions: open.
func (w *window) take() uint32 {
	n := w.cmdSN
	w.cmdSN++
	return n
}

// update notes the ExpCmdSN and MaxCmdSN of a PDU. A pair with MaxCmdSN < ExpCmdSN-1 is ignored, and neither number ever goes back: PDUs
// of a session with several connections may arrive out of order, and a target may repeat old values.
func (w *window) update(exp, max uint32) {
	if serial.Less(max, exp-1) {
		return
	}
	if serial.Less(w.expCmdSN, exp) {
		w.expCmdSN = exp
	}
	if serial.Less(w.maxCmdSN, max) {
		w.maxCmdSN = max
	}
}
