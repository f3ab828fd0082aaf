package ublk

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// command is a row of the table of control commands.
type command struct {
	name    string
	op      uint32
	serial  bool                  // one at a time per device; the others neither wait nor change anything
	feature Features              // without which the driver does not know the command
	late    string                // what it means when the command does not return in time
	hints   map[unix.Errno]string // what an errno means for this command
}

var (
	cmdGetFeatures = command{name: "GET_FEATURES", op: uapi.UBLK_U_CMD_GET_FEATURES}
	cmdGetInfo     = command{name: "GET_DEV_INFO", op: uapi.UBLK_U_CMD_GET_DEV_INFO}
	cmdAdd         = command{name: "ADD_DEV", op: uapi.UBLK_U_CMD_ADD_DEV, serial: true, hints: map[unix.Errno]string{
		unix.EINVAL: "the driver refuses this combination of features, queues and depth",
		unix.ENOSPC: "no device id is free",
	}}
	cmdSetParams = command{name: "SET_PARAMS", op: uapi.UBLK_U_CMD_SET_PARAMS, serial: true, hints: map[unix.Errno]string{
		unix.EACCES: "the device is live; parameters are set before START_DEV",
		unix.EINVAL: "the driver refuses these parameters; is MaxSectors above the device's MaxIOBytes?",
	}}
	cmdGetParams = command{name: "GET_PARAMS", op: uapi.UBLK_U_CMD_GET_PARAMS, serial: true}
	cmdStart     = command{name: "START_DEV", op: uapi.UBLK_U_CMD_START_DEV, serial: true, late: "the data plane has not fetched every tag of every queue",
		hints: map[unix.Errno]string{
			unix.EINVAL: "the pid is not that of the process that opened the character device, or no parameters are set",
			unix.EEXIST: "the device is live, or was before: delete it and add a new one",
			unix.EINTR:  "interrupted, or the data plane let go of the device",
		}}
	cmdStop = command{name: "STOP_DEV", op: uapi.UBLK_U_CMD_STOP_DEV, serial: true,
		late: "requests are in flight that the data plane does not answer; fail them there, or kill the data plane"}
	cmdTryStop = command{name: "TRY_STOP_DEV", op: uapi.UBLK_U_CMD_TRY_STOP_DEV, serial: true, feature: FeatureSafeStop,
		late:  "requests are in flight that the data plane does not answer; fail them there, or kill the data plane",
		hints: map[unix.Errno]string{unix.EBUSY: "somebody has the block device open"}}
	cmdDelete = command{name: "DEL_DEV", op: uapi.UBLK_U_CMD_DEL_DEV, serial: true,
		late: "somebody still holds the character device open or mapped; the device goes away when it is released"}
	cmdDeleteAsync   = command{name: "DEL_DEV_ASYNC", op: uapi.UBLK_U_CMD_DEL_DEV_ASYNC, serial: true}
	cmdUpdateSize    = command{name: "UPDATE_SIZE", op: uapi.UBLK_U_CMD_UPDATE_SIZE, serial: true, feature: FeatureUpdateSize}
	cmdStartRecovery = command{name: "START_USER_RECOVERY", op: uapi.UBLK_U_CMD_START_USER_RECOVERY, serial: true, hints: map[unix.Errno]string{
		unix.EBUSY:  "the character device of the old server is still open, or the device is not waiting for recovery",
		unix.EINVAL: "the device was added without USER_RECOVERY",
	}}
	cmdEndRecovery = command{name: "END_USER_RECOVERY", op: uapi.UBLK_U_CMD_END_USER_RECOVERY, serial: true,
		late: "the data plane has not fetched every tag of every queue",
		hints: map[unix.Errno]string{
			unix.EINVAL: "the pid is not that of the process that opened the character device",
			unix.EBUSY:  "the device is not waiting for recovery",
		}}
	cmdQuiesce = command{name: "QUIESCE_DEV", op: uapi.UBLK_U_CMD_QUIESCE_DEV, serial: true, feature: FeatureQuiesce, hints: map[unix.Errno]string{
		unix.EBUSY: "every tag of a queue stayed in flight; new requests wait from now on: try again, or end the data plane",
	}}
)

// State is the driver's state of a device.
type State uint16

// The states, UBLK_S_DEV_*.
const (
	StateDead     State = State(uapi.UBLK_S_DEV_DEAD) // added, or stopped: no block device
	StateLive     State = State(uapi.UBLK_S_DEV_LIVE)
	StateQuiesced State = State(uapi.UBLK_S_DEV_QUIESCED) // the server is gone; requests wait for recovery
	StateFailIO   State = State(uapi.UBLK_S_DEV_FAIL_IO)  // the server is gone; requests fail until recovery
)

func (s State) String() string {
	switch s {
	case StateDead:
		return "dead"
	case StateLive:
		return "live"
	case StateQuiesced:
		return "quiesced"
	case StateFailIO:
		return "fail_io"
	}
	return fmt.Sprintf("state %d", uint16(s))
}

// DeviceSpec says what device Add makes.
type DeviceSpec struct {
	ID         int // wanted number of /dev/ublkbN; negative lets the driver choose
	Queues     int // hardware queues, 1 to 4096; the driver lowers it to the number of CPUs
	Depth      int // tags per queue, 1 to 4096
	MaxIOBytes uint32
	Features   Features // as chosen by the caller; the data half of this package needs FeatureUserCopy
	ServerTag  uint64   // kept by the driver for the server: tells whose device it is
}

// DeviceInfo is what the driver says about a device.
type DeviceInfo struct {
	ID         int
	Queues     int
	Depth      int
	MaxIOBytes uint32 // of one request
	State      State
	PID        int // of the process that serves it, 0 or -1 for none
	Features   Features
	ServerTag  uint64
	OwnerUID   uint32
	OwnerGID   uint32
}

// CharPath is the device node that the data plane opens.
func (i DeviceInfo) CharPath() string { return charPath(i.ID) }

// BlockPath is the device node that users open; it exists while the device is live or waits for recovery.
func (i DeviceInfo) BlockPath() string { return fmt.Sprintf("/dev/ublkb%d", i.ID) }

func charPath(id int) string { return fmt.Sprintf("/dev/ublkc%d", id) }

func decodeInfo(k *uapi.UblksrvCtrlDevInfo) DeviceInfo {
	return DeviceInfo{
		ID:         int(int32(k.DevID)),
		Queues:     int(k.NrHwQueues),
		Depth:      int(k.QueueDepth),
		MaxIOBytes: k.MaxIoBufBytes,
		State:      State(k.State),
		PID:        int(k.UblksrvPid),
		Features:   Features(k.Flags),
		ServerTag:  k.UblksrvFlags,
		OwnerUID:   k.OwnerUID,
		OwnerGID:   k.OwnerGID,
	}
}

// Features is what the driver can do. It was read when the Control was opened.
//
// Source: UBLK_U_CMD_GET_FEATURES.
func (c *Control) Features(context.Context) (Features, error) { return c.features, nil }

// Add makes a device: /dev/ublkcN appears, the block device only with Start. The returned DeviceInfo holds the id, the number of queues
// and the limits that the driver settled on; use those.
//
// Errors: ErrNotSupported when the driver lacks a feature of the spec (the device is removed again), ErrExist when the id is taken.
//
// Source: UBLK_U_CMD_ADD_DEV, ublk_ctrl_add_dev.
func (c *Control) Add(ctx context.Context, spec DeviceSpec) (DeviceInfo, error) {
	switch {
	case spec.Queues < 1 || spec.Queues > uapi.UBLK_MAX_NR_QUEUES:
		return DeviceInfo{}, &CtrlError{Dev: spec.ID, Command: cmdAdd.name, Errno: unix.EINVAL, Hint: fmt.Sprintf("%d queues: want 1 to %d", spec.Queues, uapi.UBLK_MAX_NR_QUEUES)}
	case spec.Depth < 1 || spec.Depth > uapi.UBLK_MAX_QUEUE_DEPTH:
		return DeviceInfo{}, &CtrlError{Dev: spec.ID, Command: cmdAdd.name, Errno: unix.EINVAL, Hint: fmt.Sprintf("depth %d: want 1 to %d", spec.Depth, uapi.UBLK_MAX_QUEUE_DEPTH)}
	case spec.MaxIOBytes > 1<<uapi.UBLK_IO_BUF_BITS:
		return DeviceInfo{}, &CtrlError{Dev: spec.ID, Command: cmdAdd.name, Errno: unix.EINVAL, Hint: fmt.Sprintf("requests of %d bytes: want at most 32 MiB", spec.MaxIOBytes)}
	}
	if lacks := spec.Features &^ c.features; lacks != 0 {
		return DeviceInfo{}, lackError(spec.ID, lacks)
	}
	if spec.ID < 0 {
		spec.ID = -1
	}
	k := uapi.UblksrvCtrlDevInfo{
		NrHwQueues:    uint16(spec.Queues),
		QueueDepth:    uint16(spec.Depth),
		MaxIoBufBytes: spec.MaxIOBytes,
		DevID:         uint32(int32(spec.ID)),
		Flags:         uint64(spec.Features),
		UblksrvFlags:  spec.ServerTag,
	}
	// A device that appears after its caller has given up has no owner: remove it.
	orphan := func(b []byte, res int32) {
		if res < 0 {
			return
		}
		var late uapi.UblksrvCtrlDevInfo
		copy(bytesOf(&late), b)
		c.undo(int(int32(late.DevID)))
	}
	if _, err := c.runLate(ctx, cmdAdd, spec.ID, 0, bytesOf(&k), orphan); err != nil {
		return DeviceInfo{}, err
	}
	info := decodeInfo(&k)
	if lacks := spec.Features &^ info.Features; lacks != 0 {
		c.undo(info.ID)
		return DeviceInfo{}, lackError(info.ID, lacks)
	}
	return info, nil
}

func lackError(id int, lacks Features) error {
	return &CtrlError{Dev: id, Command: cmdAdd.name, Err: ErrNotSupported, Feature: lacks, Hint: "the driver lacks " + lacks.needs()}
}

// undo deletes a device that nobody has opened.
func (c *Control) undo(id int) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = c.Delete(ctx, id) // it was never started; what cannot be removed shows up in List
}

// SetParams sets the properties of the block device, between Add and Start.
//
// Errors: a *CtrlError with EINVAL and the offending field in words.
//
// Source: UBLK_U_CMD_SET_PARAMS, ublk_validate_params.
func (c *Control) SetParams(ctx context.Context, id int, p Params) error {
	if err := p.Validate(); err != nil {
		return &CtrlError{Dev: id, Command: cmdSetParams.name, Errno: unix.EINVAL, Hint: err.Error()}
	}
	k := p.encode()
	_, err := c.run(ctx, cmdSetParams, id, 0, bytesOf(&k))
	return err
}

// GetParams reads the properties of the block device; Sectors is the size after the last UpdateSize.
//
// Source: UBLK_U_CMD_GET_PARAMS.
func (c *Control) GetParams(ctx context.Context, id int) (Params, error) {
	k := uapi.UblkParams{Len: uint32(unsafe.Sizeof(uapi.UblkParams{}))}
	if _, err := c.run(ctx, cmdGetParams, id, 0, bytesOf(&k)); err != nil {
		return Params{}, err
	}
	return decodeParams(&k), nil
}

// Info reads what the driver knows about a device. It waits for no other command and answers even when the device is stuck.
//
// Errors: ErrNotFound.
//
// Source: UBLK_U_CMD_GET_DEV_INFO.
func (c *Control) Info(ctx context.Context, id int) (DeviceInfo, error) {
	var k uapi.UblksrvCtrlDevInfo
	if _, err := c.run(ctx, cmdGetInfo, id, 0, bytesOf(&k)); err != nil {
		return DeviceInfo{}, err
	}
	return decodeInfo(&k), nil
}

// Start makes the block device appear. It waits until the process pid, which has opened the character device, has fetched every tag of
// every queue; when ctx ends first the device stays as it was, and Stop or Delete get the fetched tags back. Reads arrive as soon as the
// block device exists, before Start returns: everything that a request needs must be up.
//
// Source: UBLK_U_CMD_START_DEV, ublk_ctrl_start_dev.
func (c *Control) Start(ctx context.Context, id, pid int) error {
	_, err := c.run(ctx, cmdStart, id, uint64(pid), nil)
	return err
}

// Stop removes the block device, used or not: it waits until the requests in flight are answered, and makes every fetched tag come back
// to the data plane. On a device that was never started it only does the latter. The wait cannot be interrupted; see the package comment
// for who may call.
//
// Source: UBLK_U_CMD_STOP_DEV, ublk_stop_dev.
func (c *Control) Stop(ctx context.Context, id int) error {
	_, err := c.run(ctx, cmdStop, id, 0, nil)
	return err
}

// TryStop is Stop for a device that nobody has open: openers that come later are refused, except root's. A device without a block device
// is stopped like by Stop.
//
// Errors: ErrBusy when somebody has it open ([Holders] tells who), ErrNotFound, ErrNotSupported before kernel 7.0 (look at Holders, then
// Stop).
//
// Source: UBLK_U_CMD_TRY_STOP_DEV, ublk_ctrl_try_stop_dev.
func (c *Control) TryStop(ctx context.Context, id int) error {
	_, err := c.run(ctx, cmdTryStop, id, 0, nil)
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	if _, infoErr := c.Info(ctx, id); infoErr != nil {
		return err
	}
	return c.Stop(ctx, id) // the device exists and has no disk
}

// Delete removes a device and returns when its id is free again. It waits until the data plane has closed and unmapped the character
// device; when ctx ends first, the device goes away later, by itself. A live device is stopped, as by Stop.
//
// Source: UBLK_U_CMD_DEL_DEV, ublk_ctrl_del_dev.
func (c *Control) Delete(ctx context.Context, id int) error {
	_, err := c.run(ctx, cmdDelete, id, 0, nil)
	return err
}

// DeleteAsync is Delete for a device that others may hold for long: it returns at once, and the device goes away, with its id, when the last of them
// has closed it. A kernel before 6.9 does not know it, then it is Delete.
//
// Source: UBLK_U_CMD_DEL_DEV_ASYNC.
func (c *Control) DeleteAsync(ctx context.Context, id int) error {
	_, err := c.run(ctx, cmdDeleteAsync, id, 0, nil)
	if errors.Is(err, ErrNotSupported) || errors.Is(err, unix.EOPNOTSUPP) {
		return c.Delete(ctx, id)
	}
	return err
}

// UpdateSize changes the size of a live device, up or down, and makes the kernel announce it.
//
// Source: UBLK_U_CMD_UPDATE_SIZE.
func (c *Control) UpdateSize(ctx context.Context, id int, size Sector) error {
	_, err := c.run(ctx, cmdUpdateSize, id, uint64(size), nil)
	return err
}

// StartRecovery prepares a device whose server has died (StateQuiesced, StateFailIO) for a new one, which then opens it and fetches.
//
// Errors: ErrBusy while the old server's descriptor is still open: try again after some milliseconds.
//
// Source: UBLK_U_CMD_START_USER_RECOVERY.
func (c *Control) StartRecovery(ctx context.Context, id int) error {
	_, err := c.run(ctx, cmdStartRecovery, id, 0, nil)
	return err
}

// EndRecovery makes a recovered device live. Like Start it waits until the process pid has fetched every tag.
//
// Source: UBLK_U_CMD_END_USER_RECOVERY.
func (c *Control) EndRecovery(ctx context.Context, id, pid int) error {
	_, err := c.run(ctx, cmdEndRecovery, id, uint64(pid), nil)
	return err
}

// Quiesce makes new requests wait and the idle tags come back to the data plane, which then answers what it holds and exits, for a
// successor to recover the device. timeout is how long the driver waits for one idle tag per queue, 0 for ever. The state stays live
// until the data plane has closed the character device. There is no way back other than recovery.
//
// Errors: ErrBusy when a queue had no idle tag in time; ErrNotSupported before kernel 6.16.
//
// Source: UBLK_U_CMD_QUIESCE_DEV.
func (c *Control) Quiesce(ctx context.Context, id int, timeout time.Duration) error {
	_, err := c.run(ctx, cmdQuiesce, id, uint64(timeout.Milliseconds()), nil)
	return err
}
