package iscsi

// Slots is how many commands may be outstanding at once, hence how many slots EachOutstanding tells of.
func (s *Session) Slots() int { return len(s.slots) }

// EachOutstanding calls f for every task that the target has not answered yet, with its slot, a number below Slots. A slot is used again by other
// tasks: the CmdSN tells them apart. f must not submit, end or abort tasks.
func (s *Session) EachOutstanding(f func(slot int, t *Task)) {
	if s.inFlight == 0 {
		return
	}
	for i, t := range s.slots {
		if t != nil {
			f(i, t)
		}
	}
}

// Outstanding tells whether the task waits for an answer of the target to the command of that CmdSN.
func (s *Session) Outstanding(t *Task, cmdSN uint32) bool {
	return t.cmdSN == cmdSN && s.lookup(t.itt) == t
}

// Stalled tells whether commands wait for the target's command window although the target has answered everything that was sent.
func (s *Session) Stalled() bool { return s.waiting.head != nil && s.inFlight == 0 }

// CmdSN is the command sequence number that the task got when it was sent last.
func (t *Task) CmdSN() uint32 { return t.cmdSN }
