package dataplane

import (
	"context"
	"errors"
	"fmt"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/scsi"
)

// Single commands of users, by the way of the control commands: no request of a device waits for them, and they need none of its memory.

// Bounds of a command's time.
const (
	defaultCommandTimeout = 30 * time.Second
	maxCommandTimeout     = 15 * time.Minute
)

// scsi runs one command as it is, and hands back whatever the unit says.
func (p *Plane) scsi(ctx context.Context, r ipc.ScsiRequest) (ipc.ScsiReply, error) {
	invalid := func(format string, args ...any) (ipc.ScsiReply, error) {
		return ipc.ScsiReply{}, &ipc.Error{Code: api.ErrInvalidArgs, Text: fmt.Sprintf(format, args...)}
	}
	g, err := p.group(r.Group)
	if err != nil {
		return ipc.ScsiReply{}, err
	}
	switch n := len(r.CDB); {
	case n > 16 && n <= 260:
		return ipc.ScsiReply{}, &ipc.Error{Code: api.ErrNotSupported, Text: fmt.Sprintf("command of %d bytes: more than 16 need an additional header segment, which is not sent", n)}
	case n < 6 || n > 260:
		return invalid("command of %d bytes: commands have 6 to 260", n)
	case r.In < 0 || r.In > ipc.MaxScsiData || len(r.Out) > ipc.MaxScsiData:
		return invalid("%d bytes of data: a command may move %d", max(r.In, len(r.Out)), ipc.MaxScsiData)
	case r.In > 0 && len(r.Out) > 0:
		return invalid("a command that reads and writes needs an additional header segment, which is not sent")
	case r.Session < 0 || r.Session >= len(g.paths):
		return invalid("session %d: there are %d", r.Session, len(g.paths))
	}
	ctx, cancel := commandContext(ctx, r.Timeout)
	defer cancel()
	c := command{lun: scsi.LUN(r.LUN), in: r.In}
	if len(r.Out) > 0 {
		c.out = r.Out
	}
	copy(c.cdb[:], r.CDB)
	x := executor{p: g.paths[r.Session]}
	var a answer
	if r.SkipAttention {
		a, err = x.settle(ctx, c)
	} else {
		a, err = x.run(ctx, c)
	}
	if err != nil {
		return ipc.ScsiReply{}, commandError(err)
	}
	return ipc.ScsiReply{Status: uint8(a.Status), Sense: a.Sense, Data: a.Data, Residual: a.residual}, nil
}

// group finds a session group.
func (p *Plane) group(id string) (*group, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[id]; g != nil {
		return g, nil
	}
	return nil, &ipc.Error{Code: api.ErrSessionNotFound, Text: fmt.Sprintf("session group %q does not exist", id)}
}

func commandContext(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout <= 0 {
		timeout = defaultCommandTimeout
	}
	return context.WithTimeout(ctx, min(timeout, maxCommandTimeout))
}

// commandError names what kept a command from being answered.
func commandError(err error) error {
	switch {
	case errors.Is(err, errNoRoom):
		return &ipc.Error{Code: api.ErrAgain, Text: err.Error()}
	case errors.Is(err, iscsi.ErrTimeout):
		return &ipc.Error{Code: api.ErrPDUTimeout, Text: err.Error() + "; whether it was carried out is not known"}
	case errors.Is(err, iscsi.ErrSessionLost), errors.Is(err, iscsi.ErrAborted):
		return &ipc.Error{Code: api.ErrAgain, Text: err.Error() + "; whether the command was carried out is not known"}
	}
	return err
}

// settle runs a command until the unit says something about it: a unit attention tells of something that happened before, and BUSY passes.
func (e executor) settle(ctx context.Context, c command) (answer, error) {
	for try := 0; ; try++ {
		a, err := e.run(ctx, c)
		if err != nil || a.Status == scsi.StatusGood {
			return a, err
		}
		var sense *scsi.Sense
		if s, err := scsi.ParseSense(a.Sense); err == nil {
			sense = &s
		}
		busy := a.Status == scsi.StatusBusy || a.Status == scsi.StatusTaskSetFull
		if !busy && (sense == nil || sense.Key != scsi.KeyUnitAttention) || try >= 20 {
			return a, nil
		}
		if busy {
			select {
			case <-time.After(250 * time.Millisecond):
			case <-ctx.Done():
				return a, nil
			}
		}
	}
}

// codedReply is coded for a handler's result.
func codedReply[T any](out T, err error) (any, error) {
	if err != nil {
		return nil, coded(err)
	}
	return out, nil
}
