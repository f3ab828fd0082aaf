package dataplane

import (
	"context"
	"errors"
	"syscall"

	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/rdma"
	"iserd.org/iserd/ublk"
)

// Codes of the errors that cross to the control plane: the last parts of the D-Bus error names of package api.
const (
	codeNotFound             = "NotFound"
	codeSessionNotFound      = "SessionNotFound"
	codeAlreadyLoggedIn      = "AlreadyLoggedIn"
	codeConnectionFailed     = "ConnectionFailed"
	codeTimeout              = "Timeout"
	codeLoginFailed          = "LoginFailed"
	codeFatalLogin           = "FatalLogin"
	codeAuthenticationFailed = "AuthenticationFailed"
	codeTransportUnavailable = "TransportUnavailable"
	codeProtocolError        = "ProtocolError"
	codeNotSupported         = "NotSupported"
	codeBusy                 = "Busy"
	codeInternal             = "Internal"
	codeInvalid              = "org.freedesktop.DBus.Error.InvalidArgs"
)

// codeOf finds the code for an error of the layers below. Rows are tried in order: the more particular come first.
func codeOf(err error) string {
	var coded *ipc.Error
	var refused *login.LoginError
	var violation *pdu.ProtocolError
	switch {
	case errors.As(err, &coded):
		return coded.Code
	case isTimeout(err): // before the login that it ended
		return codeTimeout
	case errors.As(err, &refused):
		switch {
		case errors.Is(err, login.ErrAuthFailed), errors.Is(err, login.ErrAuthorizationFailed):
			return codeAuthenticationFailed
		case errors.Is(err, login.ErrNotFound), errors.Is(err, login.ErrRemoved):
			return codeNotFound
		case errors.Is(err, login.ErrNoISER), errors.Is(err, login.ErrHelloRequired):
			return codeTransportUnavailable
		case refused.Retryable():
			return codeLoginFailed
		}
		return codeFatalLogin
	case errors.As(err, &violation):
		return codeProtocolError
	case errors.Is(err, rdma.ErrNoDevice), errors.Is(err, rdma.ErrNotSupported):
		return codeTransportUnavailable
	case errors.Is(err, rdma.ErrRefused):
		return codeTransportUnavailable
	case errors.Is(err, rdma.ErrUnreachable), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ECONNRESET):
		return codeConnectionFailed
	case errors.Is(err, ublk.ErrBusy):
		return codeBusy
	case errors.Is(err, ublk.ErrNotSupported):
		return codeNotSupported
	}
	return codeInternal
}

// isTimeout reports whether somebody did not answer in time.
func isTimeout(err error) bool {
	return errors.Is(err, iscsi.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, rdma.ErrTimeout) ||
		errors.Is(err, syscall.ETIMEDOUT)
}

// classify gives an error the code that the control plane passes on.
func classify(err error) error {
	if err == nil {
		return nil
	}
	return &ipc.Error{Code: codeOf(err), Text: err.Error()}
}

// refusedByTarget reports whether a target was reached and said no, so that another transport would not help.
func refusedByTarget(err error) bool {
	var refused *login.LoginError
	return errors.As(err, &refused) && refused.Class != 0 // class 0 was found on this side: no iSER there, or the connection lost
}
