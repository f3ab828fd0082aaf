package failure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsi/pdu"
	"iserd.org/iserd/rdma"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

func TestName(t *testing.T) {
	refused := func(class, detail uint8, err error) error {
		return &login.LoginError{Target: "iqn.2003-01.org.example:t", Class: class, Detail: detail, Err: err}
	}
	for _, c := range []struct {
		err  error
		want string
		exit int
	}{
		{refused(2, 1, login.ErrAuthFailed), api.ErrAuthenticationFailed, 24},
		{refused(2, 3, login.ErrNotFound), api.ErrNotFound, 21},
		{refused(2, 0, login.ErrInitiatorError), api.ErrFatalLogin, 19},
		{refused(3, 1, login.ErrUnavailable), api.ErrLoginFailed, 5},
		{refused(0, 0, login.ErrNoISER), api.ErrTransportUnavailable, 12},
		{refused(0, 0, fmt.Errorf("%w: %w", login.ErrConnectionLost, syscall.ECONNRESET)), api.ErrLoginFailed, 5},
		{refused(0, 0, fmt.Errorf("%w: %w", login.ErrConnectionLost, iscsi.ErrTimeout)), api.ErrTimeout, 8},
		{&pdu.ProtocolError{Section: "11.2", Offset: -1, What: "nonsense"}, api.ErrProtocolError, 9},
		{rdma.ErrNoDevice, api.ErrTransportUnavailable, 12},
		{&rdma.RejectError{Reason: rdma.RejectNoListener}, api.ErrTransportUnavailable, 12},
		{rdma.ErrUnreachable, api.ErrConnectionFailed, 4},
		{syscall.ECONNREFUSED, api.ErrConnectionFailed, 4},
		{context.DeadlineExceeded, api.ErrTimeout, 8},
		{os.ErrDeadlineExceeded, api.ErrTimeout, 8},
		{context.Canceled, api.ErrCancelled, 1},
		{ublk.ErrBusy, api.ErrBusy, 28},
		{ublk.ErrNotSupported, api.ErrNotSupported, 27},
		{&scsi.StatusError{Status: scsi.StatusReservationConflict}, api.ErrReservationConflict, 34},
		{&scsi.StatusError{Status: scsi.StatusCheckCondition, Sense: &scsi.Sense{Key: scsi.KeyHardwareError}}, api.ErrCommandFailed, 33},
		{errors.New("something else"), api.ErrInternal, 9},
	} {
		err := fmt.Errorf("login at portal: %w", c.err)
		got := Name(err, api.ErrInternal)
		if got != c.want {
			t.Errorf("%v: %s, want %s", err, got, c.want)
		}
		if exit := api.ExitCode(api.Errorf(got, "%w", err)); exit != c.exit {
			t.Errorf("%v: exit status %d, want %d", err, exit, c.exit)
		}
	}
}
