package iscsi

import (
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
)

// A Datamover moves the PDUs and the data of one connection: the initiator half of the interface of RFC 5047 section 8.
//
// All methods run on the connection's owner. The target-only primitives (Put_Data, Get_Data) have no place here: over iSER the target
// reads and writes the task's memory by RDMA, over TCP the Datamover itself answers R2T and places Data-In.
type Datamover interface {
	// SendControl sends one control-type PDU (RFC 5047 section 8.1). bhs and data are copied before it returns. For a SCSI Command t is the
	// task whose Data the target will read or write; its memory belongs to the Datamover until the response was notified or the
	// connection's end was. For every other PDU t is nil.
	//
	// The PDU may leave only at the next Flush. Errors: the connection cannot carry the PDU, and is of no further use.
	SendControl(bhs *pdu.BHS, data []byte, t *Task) error

	// Flush lets everything leave that SendControl has queued: one doorbell or one system call for a batch.
	Flush() error

	// AllocateConnectionResources prepares for the full feature phase (section 8.4): over iSER it posts every receive, which must happen
	// before the last Login Request leaves, because the target may answer and go on at once.
	AllocateConnectionResources() error

	// NoticeKeyValues hands over what was negotiated (section 8.8).
	NoticeKeyValues(keys *login.Keys)

	// EnableDatamover enters the full feature phase (section 8.6): from now on PDUs go up to n.
	EnableDatamover(n Notifier) error

	// DeallocateTaskResources lets go of a task that ended without a response (section 8.9), after an abort that the target confirmed. An error
	// means that its memory cannot be given back yet: the connection has to end, and the task with it.
	DeallocateTaskResources(t *Task) error

	// ConnectionTerminate ends the connection (section 8.7). ConnectionTerminateNotify follows once no task memory can be reached
	// by the target any more; not before. It is safe to call twice.
	ConnectionTerminate(reason error)

	// Limits tells what the connection can carry.
	Limits() Limits
}

// Limits bound what a session may hand to its Datamover.
type Limits struct {
	Outstanding int // SCSI commands and control PDUs that may wait for an answer at once
	MaxTransfer int // bytes of one command's data

	// PagesIn and PagesOut say that tasks which read, or write, may have Pages, and that it pays. They may change.
	PagesIn, PagesOut bool

	// Unordered says that StatSN is not to be relied on. isert counts it up and posts the response without a lock, on several CPUs at
	// once, so numbers arrive out of order, twice, or not at all (seen every few seconds under load on Linux 7.2). Nothing is lost on a
	// reliable connection, and a response that comes twice is known by its tag.
	Unordered bool
}

// A Notifier receives what a Datamover has to tell (RFC 5047 section 9). Its methods run on the connection's owner.
type Notifier interface {
	// ControlNotify brings a control-type PDU. bhs and data are only valid during the call.
	ControlNotify(bhs *pdu.BHS, data []byte)

	// ConnectionTerminateNotify tells that the connection has ended, exactly once and last. No memory of any task can be reached by
	// the target any more. err is never nil.
	ConnectionTerminateNotify(err error)
}
