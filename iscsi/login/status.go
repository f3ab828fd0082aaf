package login

import (
	"errors"
	"fmt"

	"iserd.org/iserd/iscsi/pdu"
)

// What a refused login means. They come wrapped in a *[LoginError]: use errors.Is.
var (
	ErrMovedTemporarily    = errors.New("target has moved for now")
	ErrMovedPermanently    = errors.New("target has moved for good")
	ErrInitiatorError      = errors.New("target found an error in the login")
	ErrAuthFailed          = errors.New("authentication failed")
	ErrAuthorizationFailed = errors.New("initiator is not allowed to use the target")
	ErrNotFound            = errors.New("target not found")
	ErrRemoved             = errors.New("target was removed")
	ErrVersion             = errors.New("protocol version is not supported")
	ErrTooManyConnections  = errors.New("too many connections for this session")
	ErrMissingParameter    = errors.New("a required parameter is missing")
	ErrCannotInclude       = errors.New("connection cannot be included in the session")
	ErrSessionType         = errors.New("session type is not supported")
	ErrNoSession           = errors.New("session does not exist")
	ErrInvalidDuringLogin  = errors.New("request is not valid during login")
	ErrTargetError         = errors.New("error at the target")
	ErrUnavailable         = errors.New("service is unavailable")
	ErrOutOfResources      = errors.New("target is out of resources")

	// ErrConnectionLost is found on this side: the connection ended before the login did. See [Machine.Lost].
	ErrConnectionLost = errors.New("connection lost")
	// ErrNoISER is found on this side: the portal speaks RDMA but does not agree to iSER.
	ErrNoISER = errors.New("target does not agree to iSER (RDMAExtensions)")
	// ErrNoDigest is found on this side: the configuration wants a digest and the target has none.
	ErrNoDigest = errors.New("target does not agree to the digests that are required")
	// ErrHelloRequired is found on this side: the target wants an iSER Hello exchange, which no Linux target knows and we do not speak.
	ErrHelloRequired = errors.New("target requires the iSER Hello exchange")
)

// statusTable has the status codes of RFC 7143 section 11.13.5, class<<8 | detail.
var statusTable = map[uint16]error{
	0x0101: ErrMovedTemporarily,
	0x0102: ErrMovedPermanently,
	0x0200: ErrInitiatorError,
	0x0201: ErrAuthFailed,
	0x0202: ErrAuthorizationFailed,
	0x0203: ErrNotFound,
	0x0204: ErrRemoved,
	0x0205: ErrVersion,
	0x0206: ErrTooManyConnections,
	0x0207: ErrMissingParameter,
	0x0208: ErrCannotInclude,
	0x0209: ErrSessionType,
	0x020a: ErrNoSession,
	0x020b: ErrInvalidDuringLogin,
	0x0300: ErrTargetError,
	0x0301: ErrUnavailable,
	0x0302: ErrOutOfResources,
}

// LoginError is a login that ended without a session: the target's status, or a condition found on this side (Class 0).
type LoginError struct {
	Target   string       // target name, "discovery" for a discovery session
	Class    uint8        // status class: 1 redirection, 2 initiator error, 3 target error; 0 found on this side
	Detail   uint8        // status detail, within the class
	Redirect *pdu.Address // where to go, for class 1; nil when the target gave no usable address
	Err      error        // one of the sentinels above, possibly with more text
}

// Error reads as a path: "login iqn.2003-01.org.example:disk1: status 02/01: authentication failed".
func (e *LoginError) Error() string {
	s := "login " + e.Target
	if e.Class != 0 {
		s += fmt.Sprintf(": status %02x/%02x", e.Class, e.Detail)
	}
	s += ": " + e.Err.Error()
	if e.Redirect != nil {
		s += " to " + e.Redirect.String()
	}
	return s
}

// Unwrap is the meaning, for errors.Is.
func (e *LoginError) Unwrap() error { return e.Err }

// Retryable tells whether the same login may succeed later: the target reported a trouble of its own (class 3), or the connection was lost.
// LIO also uses class 3 for a target name that it does not have. A redirection is to be followed, not retried; all else needs a person or another configuration.
func (e *LoginError) Retryable() bool { return e.Class == 3 || errors.Is(e.Err, ErrConnectionLost) }

// statusError makes the error for a status other than success, with the redirection address if there is one.
func statusError(target string, class, detail uint8, text []byte) *LoginError {
	e := &LoginError{Target: target, Class: class, Detail: detail, Err: statusTable[uint16(class)<<8|uint16(detail)]}
	if e.Err == nil {
		switch class {
		case 2:
			e.Err = ErrInitiatorError
		case 3:
			e.Err = ErrTargetError
		default:
			e.Err = errors.New("unknown status")
		}
	}
	if class != 1 {
		return e
	}
	keys, err := pdu.DecodeKeys(text)
	if err != nil {
		e.Err = fmt.Errorf("%w (no usable TargetAddress: %v)", e.Err, err)
		return e
	}
	v, ok := keys.Get("TargetAddress")
	if !ok {
		e.Err = fmt.Errorf("%w (no TargetAddress)", e.Err)
		return e
	}
	a, err := pdu.ParseAddress(v)
	if err != nil {
		e.Err = fmt.Errorf("%w (no usable TargetAddress: %v)", e.Err, err)
		return e
	}
	e.Redirect = &a
	return e
}
