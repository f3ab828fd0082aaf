package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
	"iserd.org/iserd/test/bench/plan"
)

// Where the targets are. Every target has both portals, so that all initiators meet the same object.
const (
	iserPortal = "10.0.0.1:3260"
	tcpPortal  = "10.0.0.1:3261"
	span       = 128 << 20 // bytes of the first unit of each target, and what fio works on
	otherUnit  = 8 << 20   // bytes of the other units
)

// targetName returns the name of target i.
func targetName(i int) string { return fmt.Sprintf("iqn.2003-01.org.example:bench%d", i) }

// want describes who is logged in to what.
type want struct {
	initiator plan.Initiator // Iserd for all of ours, IbIser for both of its kind
	memory    plan.Memory    // that is registered with the daemon
	transport string
	devices   int
	targets   int
}

func wantOf(c plan.Cell) want {
	w := want{initiator: c.Initiator, transport: c.Transport, devices: c.Devices, targets: c.Targets}
	switch {
	case c.Initiator.Registered():
		w.initiator, w.memory = plan.Iserd, c.Initiator.Memory()
	case c.Initiator == plan.IbIserHuge:
		w.initiator = plan.IbIser
	}
	return w
}

// site is the targets and whoever is logged in to them: one initiator at a time.
type site struct {
	have    want
	targets []*targets.LIO
	iserd   iserd
	peer    openISCSI
	paths   []string // block devices: the first unit of each target first
}

// need brings about what is wanted, and sets what has to be equal for all. Only what differs from the present state is changed.
func (s *site) need(ctx context.Context, w want) error {
	if w == s.have && s.alive() == nil {
		return nil
	}
	if err := s.leave(ctx); err != nil {
		return err
	}
	if err := s.serve(w); err != nil {
		return err
	}
	err := s.enter(ctx, w)
	if err == nil {
		err = s.tune()
	}
	return s.orLeave(ctx, err)
}

// enter logs in to targets that are there, and checks what has appeared.
func (s *site) enter(ctx context.Context, w want) (err error) {
	switch w.initiator {
	case plan.Iserd:
		s.paths, err = s.iserd.login(ctx, w)
	case plan.IbIser, plan.ISCSITCP:
		s.paths, err = s.peer.login(ctx, w)
	case plan.NullBlk:
		s.paths, err = s.nullBlk(ctx)
	case plan.Libiscsi: // logs in by itself
		s.have = w
		return nil
	default:
		return fmt.Errorf("initiator %q is unknown here", w.initiator)
	}
	if errors.As(err, new(skipError)) {
		return err // nobody has logged in
	}
	s.have = w
	if err == nil && len(s.paths) != w.devices {
		err = fmt.Errorf("%d devices appeared, want %d", len(s.paths), w.devices)
	}
	if err == nil {
		err = s.alive()
	}
	return err
}

// orLeave logs out after an error: whatever failed may have come half the way.
func (s *site) orLeave(ctx context.Context, err error) error {
	if err != nil {
		if lerr := s.leave(ctx); lerr != nil {
			err = fmt.Errorf("%w (and then: %v)", err, lerr)
		}
	}
	return err
}

// alive tells whether the devices are there, and are block devices.
func (s *site) alive() error {
	for _, p := range s.paths {
		if err := blockDevice(p); err != nil {
			return err
		}
	}
	return nil
}

// serve makes the targets, unless they are there.
func (s *site) serve(w want) error {
	if w.initiator == plan.NullBlk {
		return nil
	}
	n := max(w.targets, 1)
	if len(s.targets) == n {
		total := 0
		for _, t := range s.targets {
			total += t.LUNs()
		}
		if total == w.devices {
			return nil
		}
	}
	if err := s.unserve(); err != nil {
		return err
	}
	for i := range n {
		var units []targets.Unit
		for k := range w.devices / n {
			u := targets.Unit{Kind: targets.Ramdisk, Size: otherUnit}
			if k == 0 {
				u.Size = span
			}
			units = append(units, u)
		}
		t, err := targets.NewLIO(targets.LIOConfig{
			Name: targetName(i), Units: units,
			Portals: []targets.Portal{targets.ParsePortal(iserPortal, true), targets.ParsePortal(tcpPortal, false)},
		})
		if err != nil {
			return err
		}
		s.targets = append(s.targets, t)
	}
	return nil
}

func (s *site) unserve() error {
	var errs []error
	for _, t := range s.targets {
		errs = append(errs, t.Close())
	}
	s.targets = nil
	return errors.Join(errs...)
}

// tune sets the I/O scheduler of all devices to none.
func (s *site) tune() error {
	for _, p := range s.paths {
		if err := os.WriteFile(filepath.Join("/sys/block", filepath.Base(p), "queue/scheduler"), []byte("none"), 0); err != nil {
			return err
		}
	}
	return nil
}

// blockDevice makes sure that fio will not write a regular file and report splendid figures.
func blockDevice(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st.Mode()&os.ModeDevice == 0 || st.Mode()&os.ModeCharDevice != 0 {
		return fmt.Errorf("%s is not a block device", path)
	}
	return nil
}

// leave logs out whoever is logged in, and waits until the targets have seen it.
func (s *site) leave(ctx context.Context) error {
	var err error
	switch s.have.initiator {
	case plan.Iserd:
		err = s.iserd.logout(ctx, s.have)
	case plan.IbIser, plan.ISCSITCP:
		err = s.peer.logout(ctx, s.have)
	case plan.NullBlk:
		err = s.noNullBlk(ctx)
	}
	s.have, s.paths = want{}, nil
	if err != nil {
		return err
	}
	for _, t := range s.targets {
		if err := await("the target has no session", func() error {
			n, err := t.Sessions()
			if err == nil && n > 0 {
				err = fmt.Errorf("%d are left", n)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// close ends everything.
func (s *site) close(ctx context.Context) error {
	return errors.Join(s.leave(ctx), s.iserd.stop(ctx), s.peer.stop(ctx), s.unserve())
}

// nullBlk makes a device of the null_blk driver that answers at once.
func (s *site) nullBlk(ctx context.Context) ([]string, error) {
	_, err := run(ctx, "modprobe", "null_blk", "nr_devices=1", "queue_mode=2", "irqmode=0", "submit_queues=1", "bs=512", "gb=1")
	return []string{"/dev/nullb0"}, err
}

func (s *site) noNullBlk(ctx context.Context) error {
	_, err := run(ctx, "modprobe", "-r", "null_blk")
	return err
}

// patience bounds every wait for something that happens by itself. It is long because guest time is no measure of it: while the guest has
// nothing to do but wait for the host, as for a page of a program that is read for the first time, time passes at once. What hangs for
// ever costs little for the same reason.
const patience = 10 * time.Minute

// await calls f until it returns nil: for events of other programs and of the kernel that have no descriptor to wait on. After a while it
// calls it less often.
func await(what string, f func() error) error {
	pause := 10 * time.Millisecond
	for begin := time.Now(); ; time.Sleep(pause) {
		err := f()
		if err == nil {
			return nil
		}
		switch waited := time.Since(begin); {
		case waited > patience:
			return fmt.Errorf("%s: not within %v: %w", what, patience, err)
		case waited > 30*time.Second:
			pause = time.Second
		}
	}
}

// readFile returns the trimmed text of a small file.
func readFile(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}
