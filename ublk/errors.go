package ublk

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Sentinels. They leave this package wrapped: compare with errors.Is.
var (
	// ErrNotSupported: the kernel has no ublk driver, or one that lacks what was asked for. The text says what to do.
	ErrNotSupported = errors.New("not supported")
	// ErrBusy: somebody uses the device, or an earlier command of this Control is still at work on it.
	ErrBusy = errors.New("device is busy")
	// ErrNotFound: there is no such device.
	ErrNotFound = errors.New("no such ublk device")
	// ErrExist: the id is taken, or the device is live already.
	ErrExist = errors.New("exists already")
	// ErrClosed: the Control, Device or Ring was closed.
	ErrClosed = errors.New("closed")
)

// CtrlError is the failure of a control command. It unwraps to the errno, if the driver gave one, and to a sentinel or a context's error.
type CtrlError struct {
	Dev     int    // device id, -1 when the command concerns none or the driver was to choose
	Command string // as in the kernel, without the prefix: "START_DEV"
	Errno   unix.Errno
	Feature Features // what the kernel lacks, when Err is ErrNotSupported and it is known
	Err     error    // sentinel or context error; may be nil
	Hint    string   // what to do, or what the driver's errno means here

	// Pending says that the caller gave up and the command is still at work in the kernel. Later commands for the device wait for it.
	Pending bool
}

func (e *CtrlError) Error() string {
	var b strings.Builder
	b.WriteString("ublk")
	if e.Dev >= 0 {
		fmt.Fprintf(&b, " device %d", e.Dev)
	}
	b.WriteString(": " + e.Command)
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	if e.Errno != 0 {
		b.WriteString(": " + e.Errno.Error())
	}
	if e.Hint != "" {
		b.WriteString(": " + e.Hint)
	}
	if e.Pending {
		b.WriteString(": the command is still at work in the kernel")
	}
	return b.String()
}

// Unwrap gives errors.Is and errors.As the sentinel and the errno.
func (e *CtrlError) Unwrap() []error {
	var errs []error
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	if e.Errno != 0 {
		errs = append(errs, e.Errno)
	}
	return errs
}

// errnoError makes the error of a command that the driver refused with errno.
func errnoError(dev int, c command, errno unix.Errno) *CtrlError {
	e := &CtrlError{Dev: dev, Command: c.name, Errno: errno, Hint: c.hints[errno]}
	switch errno {
	case unix.ENODEV:
		e.Err = ErrNotFound
	case unix.EBUSY:
		e.Err = ErrBusy
	case unix.EEXIST:
		e.Err = ErrExist
	case unix.ENOENT:
		if c.op == cmdUnregBuf.op {
			e.Err = ErrNoBuffer
		}
	case unix.EOPNOTSUPP:
		e.Err, e.Feature = ErrNotSupported, c.feature
		if e.Hint == "" && c.feature != 0 {
			e.Hint = "the kernel lacks " + c.feature.needs()
		}
	case unix.EPERM, unix.EACCES:
		if e.Hint == "" {
			e.Hint = "needs CAP_SYS_ADMIN in the initial user namespace"
		}
	}
	return e
}
