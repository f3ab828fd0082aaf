// Package failure names the failures of the layers below the daemon: whatever went wrong in a login, a discovery or a device gets one of the
// error names of package api, by which programs and exit codes know it. The data plane and the control plane use the same table.
package failure

import (
	"context"
	"errors"
	"net"
	"syscall"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/rdma"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// Name returns the error name of package api for an error of packages iscsi, login, rdma, ublk or of the network; fallback for any other. The
// more particular come first: a login that ran out of time is a time-out.
func Name(err error, fallback string) string {
	var refused *login.LoginError
	var violation *pdu.ProtocolError
	var network net.Error
	var status *scsi.StatusError
	switch {
	case isAny(err, iscsi.ErrTimeout, context.DeadlineExceeded, rdma.ErrTimeout, syscall.ETIMEDOUT), errors.As(err, &network) && network.Timeout():
		return api.ErrTimeout
	case isAny(err, context.Canceled):
		return api.ErrCancelled
	case errors.As(err, &refused):
		return loginName(refused)
	case errors.As(err, &violation):
		return api.ErrProtocolError
	case isAny(err, scsi.ErrReservationConflict):
		return api.ErrReservationConflict
	case errors.As(err, &status):
		return api.ErrCommandFailed
	case isAny(err, iscsi.ErrSessionLost):
		return api.ErrLoginFailed
	case isAny(err, rdma.ErrNoDevice, rdma.ErrDeviceRemoved, rdma.ErrNotSupported, rdma.ErrRefused):
		return api.ErrTransportUnavailable
	case isAny(err, rdma.ErrUnreachable, syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.ECONNRESET):
		return api.ErrConnectionFailed
	case isAny(err, ublk.ErrBusy):
		return api.ErrBusy
	case isAny(err, ublk.ErrNotSupported):
		return api.ErrNotSupported
	}
	return fallback
}

func loginName(e *login.LoginError) string {
	switch {
	case isAny(e, login.ErrAuthFailed, login.ErrAuthorizationFailed):
		return api.ErrAuthenticationFailed
	case isAny(e, login.ErrNotFound, login.ErrRemoved):
		return api.ErrNotFound
	case isAny(e, login.ErrNoISER, login.ErrHelloRequired):
		return api.ErrTransportUnavailable
	case isAny(e, login.ErrConnectionLost), e.Retryable():
		return api.ErrLoginFailed
	}
	return api.ErrFatalLogin
}

func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}
