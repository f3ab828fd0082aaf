package login

import (
	"context"
	"errors"
	"fmt"
	"slices"

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
	Redirect *pdu.Address // where to go first, for class 1; nil when the target gave no usable address. See [LoginError.Redirection]
	Err      error        // one of the sentinels above, possibly with more text

	redirects []pdu.Address
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

// Retryable tells whether the same login at the same portal may succeed later: see [RetryOf].
func (e *LoginError) Retryable() bool {
	r := e.Retry()
	return r == RetryNow || r == RetryLater
}

// Redirection is where a target has moved (RFC 7143 section 11.13.5, class 1). It may come before any authentication, so whoever follows it
// authenticates at the new address as at the old one, and follows a few at most.
type Redirection struct {
	Permanent bool          // for good: the record may be changed; else the old address is to be asked again the next time
	Addresses []pdu.Address // at least one, each once, in the order of the target
}

// Redirection returns where to go, if the target said so; false for any other error, and where it gave no usable address.
func (e *LoginError) Redirection() (Redirection, bool) {
	return Redirection{Permanent: e.Detail == 2, Addresses: e.redirects}, e.Class == 1 && len(e.redirects) > 0
}

// Retry is what may help after a login that failed.
type Retry uint8

// What may help, from least to most.
const (
	RetryNever     Retry = iota // a person, or another configuration
	RetryElsewhere              // another address: the one of the redirection if there is one, else another portal of the target
	RetryLater                  // the same login after a pause, which grows from time to time
	RetryNow                    // the same login at once, a few times, and then as RetryLater
)

func (r Retry) String() string {
	return [...]string{"never", "elsewhere", "later", "now"}[r]
}

// Retry classifies a status, or a condition found on this side.
//
//	class 1                    elsewhere
//	not found, removed         elsewhere: the name may exist at another portal
//	rest of class 2            never, as RFC 7143 section 11.13.5 says
//	class 3                    later. LIO answers so for a name that it does not have, too
//	connection lost            now: LIO over iSER drops a login for which it finds no memory in one piece, and finds it the next time
//	other class                never
func (e *LoginError) Retry() Retry {
	switch {
	case errors.Is(e.Err, ErrConnectionLost):
		return RetryNow
	case e.Class == 1, errors.Is(e.Err, ErrNotFound), errors.Is(e.Err, ErrRemoved):
		return RetryElsewhere
	case e.Class == 3:
		return RetryLater
	}
	return RetryNever
}

// RetryOf classifies the error of a login, or of the way to one: a transport that is not there, a target that does not answer or breaks the
// protocol may be better later; only a *[LoginError] can say more. For context.Canceled, and for nil, it is RetryNever.
func RetryOf(err error) Retry {
	var e *LoginError
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return RetryNever
	case errors.As(err, &e):
		return e.Retry()
	}
	return RetryLater
}

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
	var bad error
	for _, k := range keys {
		if k.Name != "TargetAddress" {
			continue
		}
		a, err := pdu.ParseAddress(k.Value)
		if err != nil {
			bad = err
		} else if !slices.Contains(e.redirects, a) && len(e.redirects) < maxRedirects {
			e.redirects = append(e.redirects, a)
		}
	}
	switch {
	case len(e.redirects) > 0:
		e.Redirect = &e.redirects[0]
	case bad != nil:
		e.Err = fmt.Errorf("%w (no usable TargetAddress: %v)", e.Err, bad)
	default:
		e.Err = fmt.Errorf("%w (no TargetAddress)", e.Err)
	}
	return e
}

// maxRedirects is how many addresses of a redirection are taken.
const maxRedirects = 16
