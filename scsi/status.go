package scsi

import (
	"errors"
	"fmt"
)

// Status is the SCSI status byte of a command.
type Status uint8

// Status codes (SAM-5).
const (
	StatusGood                Status = 0x00
	StatusCheckCondition      Status = 0x02
	StatusConditionMet        Status = 0x04
	StatusBusy                Status = 0x08
	StatusReservationConflict Status = 0x18
	StatusTaskSetFull         Status = 0x28
	StatusACAActive           Status = 0x30
	StatusTaskAborted         Status = 0x40
)

// String is the name of SAM.
func (s Status) String() string {
	switch s {
	case StatusGood:
		return "GOOD"
	case StatusCheckCondition:
		return "CHECK CONDITION"
	case StatusConditionMet:
		return "CONDITION MET"
	case StatusBusy:
		return "BUSY"
	case StatusReservationConflict:
		return "RESERVATION CONFLICT"
	case StatusTaskSetFull:
		return "TASK SET FULL"
	case StatusACAActive:
		return "ACA ACTIVE"
	case StatusTaskAborted:
		return "TASK ABORTED"
	}
	return fmt.Sprintf("status %#02x", uint8(s))
}

// What a failed command means. They come wrapped in a *StatusError: use errors.Is.
var (
	ErrReservationConflict = errors.New("reservation conflict: another initiator holds the unit")
	ErrBusy                = errors.New("unit is busy")
	ErrTaskSetFull         = errors.New("unit has no room for another command")
	ErrNotReady            = errors.New("unit is not ready")
	ErrMediumError         = errors.New("medium error")
	ErrHardwareError       = errors.New("hardware error")
	ErrIllegalRequest      = errors.New("unit refuses the request")
	ErrUnitGone            = errors.New("logical unit is not there any more")
	ErrUnitAttention       = errors.New("unit attention: the unit changed")
	ErrDataProtect         = errors.New("unit is write protected")
	ErrNoSpace             = errors.New("thin-provisioned unit has run out of space")
	ErrAborted             = errors.New("command was aborted by the target")
	ErrProtection          = errors.New("protection information does not match the data")
)

// StatusError is a failure that the logical unit reported.
type StatusError struct {
	Status   Status
	Sense    *Sense // nil when there was none, or none that can be read
	Residual int64  // bytes of the expected length that were not transferred; negative when the unit had more than that
}

// Error reads as "CHECK CONDITION: illegal request 05/20/00: invalid command operation code".
func (e *StatusError) Error() string {
	if e.Sense == nil {
		return e.Status.String()
	}
	return e.Status.String() + ": " + e.Sense.String()
}

// Unwrap is the sentinel for the meaning, nil when no one fits.
func (e *StatusError) Unwrap() error {
	switch e.Status {
	case StatusReservationConflict:
		return ErrReservationConflict
	case StatusBusy, StatusACAActive:
		return ErrBusy
	case StatusTaskSetFull:
		return ErrTaskSetFull
	case StatusTaskAborted:
		return ErrAborted
	}
	if e.Sense == nil {
		return nil
	}
	switch s := e.Sense; {
	case s.ASC == 0x10 && (s.Key == KeyIllegalRequest || s.Key == KeyAbortedCommand):
		return ErrProtection
	case s.Key == KeyNotReady:
		return ErrNotReady
	case s.Key == KeyMediumError:
		return ErrMediumError
	case s.Key == KeyHardwareError:
		return ErrHardwareError
	case s.Key == KeyIllegalRequest && s.ASC == 0x25:
		return ErrUnitGone
	case s.Key == KeyIllegalRequest:
		return ErrIllegalRequest
	case s.Key == KeyUnitAttention:
		return ErrUnitAttention
	case s.Key == KeyDataProtect && s.ASC == 0x27 && s.ASCQ == 0x07:
		return ErrNoSpace
	case s.Key == KeyDataProtect:
		return ErrDataProtect
	case s.Key == KeyAbortedCommand:
		return ErrAborted
	}
	return nil
}
