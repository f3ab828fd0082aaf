package iscsi

import "iserd.org/iserd/scsi"

// Direction tells which way a task's data goes, seen from the initiator as SCSI does.
type Direction uint8

// The directions.
const (
	NoData Direction = iota // the command has no data
	Read                    // target to initiator; over iSER the target issues RDMA Write
	Write                   // initiator to target; over iSER the target issues RDMA Read
)

// Outcome tells how a task ended.
type Outcome uint8

// The outcomes.
const (
	Responded    Outcome = iota // the target answered: Status, Sense and the residual are valid
	TargetFailed                // the target answered with a response code other than "completed at target": Response says which
	Lost                        // the connection ended first; the target may or may not have carried the command out
	NotSent                     // the session was already down, or cannot reach the Pages; the target has not seen the command
	Aborted                     // task management has ended it; the target may or may not have carried the command out, but will not any more
)

// MaxSense is how many bytes of sense data a task keeps (SPC-4 section 4.5 allows 252; the fields in use end far before).
const MaxSense = 96

// A Task is one SCSI command on its way: the memory of a request that lives as long as its tag does.
//
// The layer above fills the first block and hands it to [Session.Submit]; from then until TaskDone the task and its Data belong to the
// session. The second block is valid in TaskDone.
type Task struct {
	LUN       scsi.LUN
	CDB       [16]byte
	Direction Direction
	Data      []byte      // the command's data, in a region that the transport has registered; len is the expected transfer length
	Region    int         // ID of the mempool region that holds Data
	Pages     Pages       // the command's data, if it is not in Data; only where the session Reaches it
	Handler   TaskHandler // called once when the task has ended

	Outcome  Outcome
	Response uint8       // RFC 7143 section 11.4.3
	Status   scsi.Status // valid if Outcome is Responded
	Overflow bool        // Residual counts bytes that did not fit (O bit)
	Residual uint32      // bytes that were not moved (U bit), or did not fit
	SenseLen int
	Sense    [MaxSense]byte

	itt   uint32
	cmdSN uint32
	next  *Task // in Session.waiting
}

// Pages are data that is not mapped in this process: pages of another one that a driver has put into the ring's table of registered buffers. A
// connection moves them by operations of the ring.
type Pages interface {
	// Len is the expected transfer length.
	Len() int

	// Fixed is their place in the table, and what operations give as the address of their first byte.
	Fixed() (place uint16, base uintptr)

	// CopyOut copies src into them, from byte off on; only for a Read.
	CopyOut(src []byte, off int) error
}

// Length is the expected transfer length, bytes.
func (t *Task) Length() int {
	if t.Pages != nil {
		return t.Pages.Len()
	}
	return len(t.Data)
}

// A TaskHandler is told about the end of its tasks, on the session's owner. It may submit again at once.
type TaskHandler interface {
	TaskDone(t *Task)
}

// ITT is the Initiator Task Tag that the task has while it is outstanding.
func (t *Task) ITT() uint32 { return t.itt }
