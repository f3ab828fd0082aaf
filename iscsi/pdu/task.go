package pdu

import "fmt"

// TaskRequest is the Task Management Function Request (RFC 7143 section 11.5).
//
//	off len
//	  1   1  0x80, 0x7f Function
//	  8   8  LUN, for functions on a task or logical unit
//	 16   4  InitiatorTaskTag
//	 20   4  ReferencedTaskTag, 0xffffffff unless Function names a task
//	 24   4  CmdSN
//	 28   4  ExpStatSN
//	 32   4  RefCmdSN, CmdSN of the referenced task
//	 36   4  ExpDataSN, for TASK REASSIGN
type TaskRequest struct{ *BHS }

// TaskFunction is what a TaskRequest asks for.
type TaskFunction uint8

// Task management functions (RFC 7143 section 11.5).
const (
	AbortTask        TaskFunction = 1
	AbortTaskSet     TaskFunction = 2
	ClearACA         TaskFunction = 3
	ClearTaskSet     TaskFunction = 4
	LogicalUnitReset TaskFunction = 5
	TargetWarmReset  TaskFunction = 6
	TargetColdReset  TaskFunction = 7
	TaskReassign     TaskFunction = 8
)

var taskFunctionNames = [...]string{
	AbortTask: "ABORT TASK", AbortTaskSet: "ABORT TASK SET", ClearACA: "CLEAR ACA", ClearTaskSet: "CLEAR TASK SET",
	LogicalUnitReset: "LOGICAL UNIT RESET", TargetWarmReset: "TARGET WARM RESET", TargetColdReset: "TARGET COLD RESET",
	TaskReassign: "TASK REASSIGN",
}

// String is the RFC's name of the function.
func (f TaskFunction) String() string { return nameOf(taskFunctionNames[:], int(f), "function") }

// NewTaskRequest starts a Task Management Function Request PDU in b, with ReferencedTaskTag reserved.
func NewTaskRequest(b *BHS, f TaskFunction) TaskRequest {
	p := TaskRequest{b.init(OpTaskRequest)}
	p.BHS[1] = 0x80 | byte(f)&0x7f
	p.SetReferencedTaskTag(ReservedTag)
	return p
}

// AsTaskRequest views b as a Task Management Function Request.
func AsTaskRequest(b *BHS) TaskRequest { return TaskRequest{b} }

// Function is what is asked for.
func (p TaskRequest) Function() TaskFunction { return TaskFunction(p.BHS[1] & 0x7f) }

// ReferencedTaskTag is the InitiatorTaskTag of the task that is meant.
func (p TaskRequest) ReferencedTaskTag() uint32 { return p.u32(20) }

// SetReferencedTaskTag names the task that is meant.
func (p TaskRequest) SetReferencedTaskTag(v uint32) { p.put32(20, v) }

// RefCmdSN is the CmdSN of the referenced task; with it the target can tell a task that it never got.
func (p TaskRequest) RefCmdSN() uint32 { return p.u32(32) }

// SetRefCmdSN sets the CmdSN of the referenced task.
func (p TaskRequest) SetRefCmdSN(v uint32) { p.put32(32, v) }

// TaskResponse answers a TaskRequest (RFC 7143 section 11.6).
//
//	off len
//	  1   1  0x80
//	  2   1  Response
//	 16   4  InitiatorTaskTag
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
type TaskResponse struct{ *BHS }

// TaskResult is the outcome of a task management function.
type TaskResult uint8

// Outcomes (RFC 7143 section 11.6).
const (
	TaskFunctionComplete     TaskResult = 0
	TaskDoesNotExist         TaskResult = 1
	TaskLUNDoesNotExist      TaskResult = 2
	TaskStillAllegiant       TaskResult = 3
	TaskReassignNotSupported TaskResult = 4
	TaskFunctionNotSupported TaskResult = 5
	TaskAuthorizationFailed  TaskResult = 6
	TaskFunctionRejected     TaskResult = 255
)

var taskResultNames = [...]string{
	TaskFunctionComplete: "function complete", TaskDoesNotExist: "task does not exist", TaskLUNDoesNotExist: "LUN does not exist",
	TaskStillAllegiant: "task still allegiant", TaskReassignNotSupported: "task allegiance reassignment not supported",
	TaskFunctionNotSupported: "function not supported", TaskAuthorizationFailed: "function authorization failed",
	TaskFunctionRejected: "function rejected",
}

// String is the RFC's text for the outcome, in lower case.
func (r TaskResult) String() string { return nameOf(taskResultNames[:], int(r), "response") }

// NewTaskResponse starts a Task Management Function Response PDU in b.
func NewTaskResponse(b *BHS, r TaskResult) TaskResponse {
	p := TaskResponse{b.init(OpTaskResponse)}
	p.BHS[1], p.BHS[2] = 0x80, byte(r)
	return p
}

// AsTaskResponse views b as a Task Management Function Response.
func AsTaskResponse(b *BHS) TaskResponse { return TaskResponse{b} }

// Response is the outcome.
func (p TaskResponse) Response() TaskResult { return TaskResult(p.BHS[2]) }

func decodeTaskRequest(b *BHS) string {
	p := TaskRequest{b}
	return fmt.Sprintf("%s LUN=%#016x RTT=%#08x RefCmdSN=%d CmdSN=%d ExpStatSN=%d",
		p.Function(), p.LUN(), p.ReferencedTaskTag(), p.RefCmdSN(), p.CmdSN(), p.ExpStatSN())
}

func decodeTaskResponse(b *BHS) string {
	return fmt.Sprintf("%q %s", TaskResponse{b}.Response(), decodeSN(b))
}
