package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

// reserveCommands are the commands about persistent reservations.
func (a *app) reserveCommands() []*cobra.Command {
	list := []*cobra.Command{
		a.reservationCommand(api.AskKeys, "List the registered keys, one for each nexus", a.showKeys),
		a.reservationCommand(api.AskReservation, "Show who holds the unit", a.showReservation),
		a.reservationCommand(api.AskCapabilities, "Show what kinds of reservations the unit has", a.showCapabilities),
		a.reservationCommand(api.AskFullStatus, "List the registered nexuses with their keys", a.showFullStatus),
	}
	const (
		key = 1 << iota
		newKey
		kind
		options
	)
	for _, x := range []struct {
		action, short, long string
		flags               int
	}{
		{api.ReserveRegister, "Register a key, or remove it", "Register the sessions of the device with --new-key. Those that are registered already give their --key;\n" +
			"--new-key 0 removes the registration.", key | newKey | options},
		{api.ReserveRegisterIgnore, "Register a key whatever was registered before", "Register the sessions of the device with --new-key, whatever they were registered with before.", newKey | options},
		{api.ReserveReserve, "Reserve the unit", "Reserve the unit in the name of the device, whose sessions are registered with --key. The types let these do:\n" +
			"  we-ro, we-ar  everybody may read, only registered initiators may write\n  ea-ro, ea-ar  only registered initiators may read or write\n" +
			"With -ro one of them holds the reservation, with -ar all do. The types we and ea let one session in only and are refused for a device that has\n" +
			"several, one for each CPU.", key | kind},
		{api.ReserveRelease, "Give the reservation up", "Give the reservation up. The registrations stay.", key | kind},
		{api.ReserveClear, "Remove the reservation and all registrations", "Remove the reservation and the registrations of all initiators.", key},
		{api.ReservePreempt, "Take the registration of another initiator away", "Remove the registrations with --new-key, and take over the reservation if one of them held it.", key | newKey | kind},
		{api.ReservePreemptAbort, "The same, and end its commands", "Remove the registrations with --new-key, end their commands, and take over the reservation if one of them held it.", key | newKey | kind},
	} {
		var u unitFlag
		r := api.ReserveRequest{Action: x.action}
		keyText, newKeyText := "", ""
		c := &cobra.Command{
			Use: x.action + " " + unitUsage, Short: x.short, Long: x.long, Args: exactly(1, "a device or session"),
			RunE: func(cmd *cobra.Command, args []string) (err error) {
				if r.Unit, err = u.name(args[0]); err != nil {
					return err
				}
				if x.flags&newKey != 0 && newKeyText == "" {
					return api.Errorf(api.ErrInvalidArgs, "%s: --new-key is missing", x.action)
				}
				if x.flags&kind != 0 && r.Type == "" {
					return api.Errorf(api.ErrInvalidArgs, "%s: --type is missing: we-ro, ea-ro, we-ar or ea-ar", x.action)
				}
				if r.Key, err = keyFlag("key", keyText); err != nil {
					return err
				}
				if r.NewKey, err = keyFlag("new-key", newKeyText); err != nil {
					return err
				}
				r.Timeout = a.seconds()
				reply, err := a.daemon().Reserve(cmd.Context(), r)
				if err != nil {
					return err
				}
				if a.json {
					return a.print(reply)
				}
				fmt.Fprintf(a.out, "%s: %s done by %d of the device's sessions.\n", args[0], r.Action, reply.Sessions)
				return nil
			},
		}
		f := c.Flags()
		u.add(c)
		if x.flags&key != 0 {
			f.StringVar(&keyText, "key", "", "key under which the sessions are registered")
		}
		if x.flags&newKey != 0 {
			what := "key to register, 0 to remove the registration"
			if x.flags&kind != 0 {
				what = "key whose registrations are taken away"
			}
			f.StringVar(&newKeyText, "new-key", "", what)
		}
		if x.flags&kind != 0 {
			f.StringVar(&r.Type, "type", "", "we-ro, ea-ro, we-ar, ea-ar; with one session we and ea, too")
		}
		if x.flags&options != 0 {
			f.BoolVar(&r.PersistLoss, "aptpl", false, "survive a loss of power at the target, if it can")
			f.BoolVar(&r.AllTargetPorts, "all-target-ports", false, "register at every port of the target, if it can")
		}
		list = append(list, c)
	}
	return list
}

// keyFlag reads a key, which is 0 if it was not given.
func keyFlag(name, text string) (api.Key, error) {
	if text == "" {
		return 0, nil
	}
	k, err := api.ParseKey(text)
	return k, api.Wrap(err, api.ErrInvalidArgs, "--%s", name)
}

// reservationCommand is one that asks.
func (a *app) reservationCommand(what, short string, show func(api.ReservationReply) error) *cobra.Command {
	return a.unitCommand(what, short, func(ctx context.Context, unit api.UnitName) error {
		r, err := a.daemon().Reservation(ctx, api.ReservationRequest{Unit: unit, What: what, Timeout: a.seconds()})
		if err != nil {
			return err
		}
		if a.json {
			return a.print(r)
		}
		return show(r)
	})
}

func (a *app) showKeys(r api.ReservationReply) error {
	if len(r.Keys) == 0 {
		a.warn("no keys are registered")
	}
	for _, k := range r.Keys {
		fmt.Fprintln(a.out, k)
	}
	return nil
}

func (a *app) showReservation(r api.ReservationReply) error {
	if r.Held == nil {
		a.warn("the unit is not reserved")
		return nil
	}
	t := newTable(a.out)
	t.row("key", r.Held.Key.String())
	t.row("type", r.Held.Type)
	return t.flush()
}

func (a *app) showCapabilities(r api.ReservationReply) error {
	c := r.Capabilities
	if c == nil {
		return api.Errorf(api.ErrDaemonProtocol, "the daemon does not say what the unit can do")
	}
	t := newTable(a.out)
	t.row("types", dash(strings.Join(c.Types, ", ")))
	t.row("survive a loss of power", yes(c.PersistLoss))
	t.row("do so now", yes(c.PersistLossActive))
	t.row("all target ports at once", yes(c.AllTargetPorts))
	t.row("other initiators at once", yes(c.SpecifyInitiators))
	return t.flush()
}

func (a *app) showFullStatus(r api.ReservationReply) error {
	if len(r.Registrations) == 0 {
		a.warn("no keys are registered")
		return nil
	}
	t := newTable(a.out, "KEY", "INITIATOR", "PORT", "HOLDS", "OWN")
	for _, x := range r.Registrations {
		port := strconv.Itoa(int(x.TargetPort))
		if x.AllTargetPorts {
			port = "all"
		}
		t.row(x.Key.String(), x.Initiator, port, dash(x.Type), yes(x.Own))
	}
	return t.flush()
}
