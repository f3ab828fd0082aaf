package ublk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCtrlError(t *testing.T) {
	for _, c := range []struct {
		err  *CtrlError
		is   []error
		text string
	}{
		{errnoError(3, cmdTryStop, unix.EBUSY), []error{ErrBusy, unix.EBUSY},
			"ublk device 3: TRY_STOP_DEV: device is busy: device or resource busy: somebody has the block device open"},
		{errnoError(3, cmdTryStop, unix.EOPNOTSUPP), []error{ErrNotSupported, unix.EOPNOTSUPP},
			"ublk device 3: TRY_STOP_DEV: not supported: operation not supported: the kernel lacks SAFE_STOP_DEV (kernel 7.0)"},
		{errnoError(0, cmdDelete, unix.ENODEV), []error{ErrNotFound, unix.ENODEV}, "ublk device 0: DEL_DEV: no such ublk device: no such device"},
		{errnoError(-1, cmdAdd, unix.EPERM), []error{unix.EPERM, fs.ErrPermission},
			"ublk: ADD_DEV: operation not permitted: needs CAP_SYS_ADMIN in the initial user namespace"},
		{errnoError(1, cmdStart, unix.EEXIST), []error{ErrExist}, "ublk device 1: START_DEV: exists already: file exists: the device is live, or was before: delete it and add a new one"},
		{&CtrlError{Dev: 2, Command: "STOP_DEV", Err: context.DeadlineExceeded, Pending: true}, []error{context.DeadlineExceeded},
			"ublk device 2: STOP_DEV: context deadline exceeded: the command is still at work in the kernel"},
	} {
		for _, want := range c.is {
			if !errors.Is(fmt.Errorf("wrapped: %w", c.err), want) {
				t.Errorf("%v is not %v", c.err, want)
			}
		}
		if got := c.err.Error(); got != c.text {
			t.Errorf("text\n%q, want\n%q", got, c.text)
		}
	}
}

func TestOpenControlMissing(t *testing.T) {
	if _, err := openControlFile(filepath.Join(t.TempDir(), "ublk-control")); !errors.Is(err, ErrNotSupported) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no module: %v", err)
	}
}

func TestStateString(t *testing.T) {
	for s, want := range map[State]string{StateDead: "dead", StateLive: "live", StateQuiesced: "quiesced", StateFailIO: "fail_io", 9: "state 9"} {
		if s.String() != want {
			t.Errorf("state %d is %q", uint16(s), s)
		}
	}
}
