package scsi

import "syscall"

// Kind is what a caller does with a command that ended.
type Kind uint8

// Kinds of action.
const (
	Done       Kind = 1 // the command did its work
	RetryNow   Kind = 2 // send it again, a bounded number of times
	RetryDelay Kind = 3 // send it again after a pause, for as long as the unit may take
	Fail       Kind = 4 // give Errno to the block layer
)

var kindNames = [...]string{Done: "done", RetryNow: "retry now", RetryDelay: "retry after a delay", Fail: "fail"}

// String is a short text.
func (k Kind) String() string {
	if int(k) < len(kindNames) && kindNames[k] != "" {
		return kindNames[k]
	}
	return "no action"
}

// Attention says what changed at the unit, so that the caller looks at it besides retrying.
type Attention uint8

// Attentions.
const (
	AttentionNone            Attention = 0
	AttentionOther           Attention = 1  // nothing to look at
	AttentionReset           Attention = 2  // the unit was reset or powered on: a volatile cache may be lost, reservations are gone
	AttentionCapacityChanged Attention = 3  // READ CAPACITY again
	AttentionLunsChanged     Attention = 4  // REPORT LUNS again
	AttentionModeChanged     Attention = 5  // MODE SENSE again: write protection, cache
	AttentionInquiryChanged  Attention = 6  // INQUIRY and VPD 83 again: it may be another unit
	AttentionALUAChanged     Attention = 7  // REPORT TARGET PORT GROUPS again
	AttentionSpaceThreshold  Attention = 8  // the pool behind a thin unit is getting full: tell the operator
	AttentionReservation     Attention = 9  // our registration or reservation was taken away
	AttentionDeferred        Attention = 10 // a write that was already reported as done is lost: report it
)

var attentionNames = [...]string{
	AttentionNone: "none", AttentionOther: "other", AttentionReset: "reset", AttentionCapacityChanged: "capacity changed",
	AttentionLunsChanged: "reported LUNs changed", AttentionModeChanged: "mode parameters changed",
	AttentionInquiryChanged: "inquiry data changed", AttentionALUAChanged: "access state changed",
	AttentionSpaceThreshold: "space threshold reached", AttentionReservation: "reservation lost",
	AttentionDeferred: "an earlier write failed",
}

// String is a short text.
func (a Attention) String() string {
	if int(a) < len(attentionNames) {
		return attentionNames[a]
	}
	return "unknown"
}

// Action is what Classify says.
type Action struct {
	Kind        Kind
	Errno       syscall.Errno // for Fail; also what to give when the retries are used up
	Attention   Attention     // what changed, AttentionNone for nothing
	Unsupported bool          // the unit does not know the command or a field of it: for an optional command, stop using it (EOPNOTSUPP)
}

// anyCode stands for every ASC or ASCQ in a row of the table.
const anyCode = -1

// row is one line of the table: what a sense code means, and why.
type row struct {
	key       SenseKey
	asc, ascq int
	action    Action
	why       string
}

// senseTable maps CHECK CONDITION to an action; the first row that fits counts, so the special stands before the general.
//
// The errno become block status codes in the kernel (block/blk-core.c): EBADE reservation conflict, ENODATA medium, ENOSPC no space,
// EREMOTEIO target, EILSEQ protection, ENOLINK transport, ENODEV offline, ETIMEDOUT time-out, all others I/O error. Multipath above us takes another
// path for I/O error, ENOLINK, ENODEV and ETIMEDOUT, and does not for the others, whose answer would be the same on every path.
var senseTable = []row{
	{KeyNoSense, anyCode, anyCode, Action{RetryNow, syscall.EIO, 0, false}, "a false alarm, but nobody knows how much was transferred"},
	{KeyRecoveredError, anyCode, anyCode, Action{Done, 0, 0, false}, "the data are good"},

	{KeyNotReady, 0x04, 0x00, Action{RetryDelay, syscall.EIO, 0, false}, "cause not reportable: may pass"},
	{KeyNotReady, 0x04, 0x01, Action{RetryDelay, syscall.EIO, 0, false}, "becoming ready"},
	{KeyNotReady, 0x04, 0x04, Action{RetryDelay, syscall.EIO, 0, false}, "format"},
	{KeyNotReady, 0x04, 0x05, Action{RetryDelay, syscall.EIO, 0, false}, "rebuild"},
	{KeyNotReady, 0x04, 0x06, Action{RetryDelay, syscall.EIO, 0, false}, "recalculation"},
	{KeyNotReady, 0x04, 0x07, Action{RetryDelay, syscall.EIO, 0, false}, "operation"},
	{KeyNotReady, 0x04, 0x08, Action{RetryDelay, syscall.EIO, 0, false}, "long write"},
	{KeyNotReady, 0x04, 0x09, Action{RetryDelay, syscall.EIO, 0, false}, "self-test"},
	{KeyNotReady, 0x04, 0x0a, Action{RetryDelay, syscall.ENOLINK, AttentionALUAChanged, false}, "access state in transition"},
	{KeyNotReady, 0x04, 0x0b, Action{Fail, syscall.ENOLINK, AttentionALUAChanged, false}, "this path is in standby; another one may work"},
	{KeyNotReady, 0x04, 0x0c, Action{Fail, syscall.ENOLINK, AttentionALUAChanged, false}, "this path is unavailable; another one may work"},
	{KeyNotReady, 0x04, 0x11, Action{RetryDelay, syscall.EIO, 0, false}, "waits for spin-up"},
	{KeyNotReady, 0x04, 0x14, Action{RetryDelay, syscall.EIO, 0, false}, "space allocation in progress"},
	{KeyNotReady, 0x04, 0x1a, Action{RetryDelay, syscall.EIO, 0, false}, "start or stop in progress"},
	{KeyNotReady, 0x04, 0x1b, Action{RetryDelay, syscall.EIO, 0, false}, "sanitize"},
	{KeyNotReady, 0x04, 0x1d, Action{RetryDelay, syscall.EIO, 0, false}, "configuration in progress"},
	{KeyNotReady, 0x04, 0x24, Action{RetryDelay, syscall.EIO, 0, false}, "depopulation"},
	{KeyNotReady, 0x04, 0x25, Action{RetryDelay, syscall.EIO, 0, false}, "depopulation restoration"},
	{KeyNotReady, 0x3a, anyCode, Action{Fail, syscall.ENODEV, 0, false}, "no medium"},
	{KeyNotReady, anyCode, anyCode, Action{Fail, syscall.EIO, 0, false}, "needs an operator: start, manual intervention, offline"},

	{KeyMediumError, anyCode, anyCode, Action{Fail, syscall.ENODATA, 0, false}, "the medium is bad there; a retry or another path finds the same"},
	{KeyHardwareError, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "the device behind the target is broken"},

	{KeyIllegalRequest, 0x10, anyCode, Action{Fail, syscall.EILSEQ, 0, false}, "protection information check failed"},
	{KeyIllegalRequest, 0x20, anyCode, Action{Fail, syscall.EREMOTEIO, 0, true}, "command not known"},
	{KeyIllegalRequest, 0x24, anyCode, Action{Fail, syscall.EREMOTEIO, 0, true}, "field in CDB not known"},
	{KeyIllegalRequest, 0x25, anyCode, Action{Fail, syscall.ENODEV, AttentionLunsChanged, false}, "the unit is gone from this target"},
	{KeyIllegalRequest, 0x26, anyCode, Action{Fail, syscall.EREMOTEIO, 0, true}, "field in parameter list not known"},
	{KeyIllegalRequest, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "the same request fails on every path"},

	{KeyUnitAttention, 0x28, anyCode, Action{RetryNow, syscall.EIO, AttentionInquiryChanged, false}, "medium may have changed"},
	{KeyUnitAttention, 0x29, anyCode, Action{RetryNow, syscall.EIO, AttentionReset, false}, "power on, reset, nexus loss"},
	{KeyUnitAttention, 0x2a, 0x01, Action{RetryNow, syscall.EIO, AttentionModeChanged, false}, "mode parameters"},
	{KeyUnitAttention, 0x2a, 0x03, Action{RetryNow, syscall.EIO, AttentionReservation, false}, "reservations preempted"},
	{KeyUnitAttention, 0x2a, 0x04, Action{RetryNow, syscall.EIO, AttentionReservation, false}, "reservations released"},
	{KeyUnitAttention, 0x2a, 0x05, Action{RetryNow, syscall.EIO, AttentionReservation, false}, "registrations preempted"},
	{KeyUnitAttention, 0x2a, 0x06, Action{RetryNow, syscall.EIO, AttentionALUAChanged, false}, "access state"},
	{KeyUnitAttention, 0x2a, 0x07, Action{RetryNow, syscall.EIO, AttentionALUAChanged, false}, "access state transition failed"},
	{KeyUnitAttention, 0x2a, 0x09, Action{RetryNow, syscall.EIO, AttentionCapacityChanged, false}, "capacity"},
	{KeyUnitAttention, 0x38, 0x07, Action{RetryNow, syscall.EIO, AttentionSpaceThreshold, false}, "thin provisioning soft threshold"},
	{KeyUnitAttention, 0x3f, 0x01, Action{RetryNow, syscall.EIO, AttentionInquiryChanged, false}, "microcode"},
	{KeyUnitAttention, 0x3f, 0x03, Action{RetryNow, syscall.EIO, AttentionInquiryChanged, false}, "inquiry data"},
	{KeyUnitAttention, 0x3f, 0x05, Action{RetryNow, syscall.EIO, AttentionInquiryChanged, false}, "device identifier"},
	{KeyUnitAttention, 0x3f, 0x0e, Action{RetryNow, syscall.EIO, AttentionLunsChanged, false}, "reported LUNs data"},
	{KeyUnitAttention, anyCode, anyCode, Action{RetryNow, syscall.EIO, AttentionOther, false}, "the command was not executed"},

	{KeyDataProtect, 0x27, 0x07, Action{Fail, syscall.ENOSPC, 0, false}, "thin unit is out of space"},
	{KeyDataProtect, 0x27, anyCode, Action{Fail, syscall.EIO, AttentionModeChanged, false}, "write protected: since when?"},
	{KeyDataProtect, anyCode, anyCode, Action{Fail, syscall.EIO, 0, false}, "access denied"},

	{KeyAbortedCommand, 0x10, anyCode, Action{Fail, syscall.EILSEQ, 0, false}, "protection information check failed"},
	{KeyAbortedCommand, anyCode, anyCode, Action{RetryNow, syscall.EIO, 0, false}, "the target gave the command up"},

	{KeyBlankCheck, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "no disk says this"},
	{KeyCopyAborted, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "no command of ours copies"},
	{KeyVolumeOverflow, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "past the end of the medium"},
	{KeyMiscompare, anyCode, anyCode, Action{Fail, syscall.EREMOTEIO, 0, false}, "no command of ours compares"},
}

// Classify says what to do with a command that ended with status and sense. sense is nil when there was none, or none that can be read.
//
// It is for failures: on the data path StatusGood is looked at before. A retry is for the caller to bound; when it gives up, Errno is what
// to answer.
func Classify(status Status, sense *Sense) Action {
	switch status {
	case StatusGood, StatusConditionMet:
		return Action{Kind: Done}
	case StatusBusy, StatusTaskSetFull, StatusACAActive:
		return Action{Kind: RetryDelay, Errno: syscall.EBUSY}
	case StatusReservationConflict:
		return Action{Kind: Fail, Errno: syscall.EBADE}
	case StatusTaskAborted:
		return Action{Kind: RetryNow, Errno: syscall.EIO}
	case StatusCheckCondition:
		if sense != nil {
			return classifySense(sense)
		}
	}
	return Action{Kind: Fail, Errno: syscall.EIO} // an unknown status, or a check condition that says nothing
}

func classifySense(s *Sense) Action {
	if s.Deferred {
		// An earlier write that was reported as done is lost. This command was not executed.
		return Action{Kind: RetryNow, Errno: syscall.EIO, Attention: AttentionDeferred}
	}
	for i := range senseTable {
		r := &senseTable[i]
		if r.key == s.Key && (r.asc == anyCode || r.asc == int(s.ASC)) && (r.ascq == anyCode || r.ascq == int(s.ASCQ)) {
			return r.action
		}
	}
	return Action{Kind: Fail, Errno: syscall.EIO} // vendor specific, reserved, completed
}
