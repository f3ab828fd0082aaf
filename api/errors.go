package api

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Prefix is what the project's own failure names start with.
const Prefix = "org.iserd.Iser1.Error."

// Failure names. They are D-Bus error names, and the "code" of a failure in JSON.
const (
	ErrNotFound             = Prefix + "NotFound"             // no such record, target or device
	ErrSessionNotFound      = Prefix + "SessionNotFound"      // no session matches
	ErrAlreadyLoggedIn      = Prefix + "AlreadyLoggedIn"      // the session exists
	ErrConnectionFailed     = Prefix + "ConnectionFailed"     // the portal refused or cannot be reached
	ErrTimeout              = Prefix + "Timeout"              // the portal did not answer in time
	ErrLoginFailed          = Prefix + "LoginFailed"          // the login broke off; trying again may help
	ErrFatalLogin           = Prefix + "FatalLogin"           // the target refused for good (status class 02)
	ErrAuthenticationFailed = Prefix + "AuthenticationFailed" // status 02/01, or the target failed to prove itself
	ErrLogoutFailed         = Prefix + "LogoutFailed"         // the session could not be ended cleanly
	ErrDatabase             = Prefix + "Database"             // a record cannot be read or written
	ErrNotSupported         = Prefix + "NotSupported"         // the kernel, the build or the target lacks a feature
	ErrBusy                 = Prefix + "Busy"                 // a device is in use
	ErrAgain                = Prefix + "Again"                // not now; the same request may succeed later
	ErrTransportUnavailable = Prefix + "TransportUnavailable" // no RDMA device serves the address, or the portal has no iSER
	ErrProtocolError        = Prefix + "ProtocolError"        // the target broke the protocol
	ErrPDUTimeout           = Prefix + "PduTimeout"           // a request within a session was not answered in time
	ErrCommandFailed        = Prefix + "CommandFailed"        // the logical unit refused a command
	ErrReservationConflict  = Prefix + "ReservationConflict"  // another initiator holds the unit, or the key is another one
	ErrCancelled            = Prefix + "Cancelled"            // the caller gave up
	ErrInternal             = Prefix + "Internal"             // a fault of this project
	ErrDaemonUnreachable    = Prefix + "DaemonUnreachable"    // no daemon answers on the socket; made by the client
	ErrDaemonProtocol       = Prefix + "DaemonProtocol"       // the daemon's answer makes no sense; made by the client
	ErrAlreadyRunning       = Prefix + "AlreadyRunning"       // a second daemon was started
	ErrAccessDenied         = "org.freedesktop.DBus.Error.AccessDenied"
	ErrInvalidArgs          = "org.freedesktop.DBus.Error.InvalidArgs"
	ErrLimitsExceeded       = "org.freedesktop.DBus.Error.LimitsExceeded"
	ErrUnknownObject        = "org.freedesktop.DBus.Error.UnknownObject"
	ErrInteractiveRequired  = "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired"
)

// exitCodes maps failure names to the exit codes of iscsiadm.
var exitCodes = map[string]int{
	ErrSessionNotFound:      2,
	ErrLimitsExceeded:       3,
	ErrConnectionFailed:     4,
	ErrLoginFailed:          5,
	ErrDatabase:             6,
	ErrInvalidArgs:          7,
	ErrTimeout:              8,
	ErrProtocolError:        9,
	ErrInternal:             9,
	ErrLogoutFailed:         10,
	ErrPDUTimeout:           11,
	ErrTransportUnavailable: 12,
	ErrAccessDenied:         13,
	ErrInteractiveRequired:  13,
	ErrAlreadyLoggedIn:      15,
	ErrAlreadyRunning:       16, // "bad management request" is the nearest of iscsiadm's
	ErrDaemonProtocol:       18,
	ErrFatalLogin:           19,
	ErrDaemonUnreachable:    20,
	ErrNotFound:             21,
	ErrUnknownObject:        21,
	ErrAuthenticationFailed: 24,
	ErrNotSupported:         27,
	ErrBusy:                 28,
	ErrAgain:                29,
	ErrCommandFailed:        33, // iscsiadm has none for these two
	ErrReservationConflict:  34,
	ErrCancelled:            1,
}

// Error is a failure with a stable name.
type Error struct {
	Name string `json:"code"`
	Text string `json:"message"`

	cause error
}

// Errorf makes an Error. The format is that of fmt.Errorf; a %w operand can be found with errors.Is and errors.As.
func Errorf(name, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Name: name, Text: err.Error(), cause: err}
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns what the error was made from, or nil when it came over a wire.
func (e *Error) Unwrap() error { return e.cause }

// Wrap puts text in front of err and keeps its name. An err without a name gets the fallback. Wrap(nil) is nil.
func Wrap(err error, fallback, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return Errorf(nameOr(err, fallback), "%s: %w", fmt.Sprintf(format, args...), err)
}

// NameOf returns the failure name of err: that of the outermost *Error in its chain, ErrTimeout or ErrCancelled for a context that
// ended, ErrInternal for anything else, and "" for nil.
func NameOf(err error) string {
	if err == nil {
		return ""
	}
	return nameOr(err, ErrInternal)
}

func nameOr(err error, fallback string) string {
	var e *Error
	switch {
	case errors.As(err, &e): // the outermost
		return e.Name
	case errors.Is(err, context.DeadlineExceeded):
		return ErrTimeout
	case errors.Is(err, context.Canceled):
		return ErrCancelled
	}
	return fallback
}

// Is reports whether err carries the failure name.
func Is(err error, name string) bool { return err != nil && NameOf(err) == name }

// ExitCode returns the exit code for err: 0 for nil, the code of iscsiadm(8) for a known name, 1 otherwise.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	if c, ok := exitCodes[NameOf(err)]; ok {
		return c
	}
	return 1
}

// FullName completes a failure name that came without the prefix ("NotFound"). A name that this package does not know becomes ErrInternal.
func FullName(code string) string {
	if code != "" && !strings.Contains(code, ".") {
		code = Prefix + code
	}
	if _, ok := exitCodes[code]; ok {
		return code
	}
	return ErrInternal
}
