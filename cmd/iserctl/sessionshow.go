package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

func (a *app) sessionShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show TARGET|SESSION|/dev/ublkbN", Short: "Show a session, and what was negotiated for its connections",
		Args: exactly(1, "a target, the number of a session, or a device"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkSession(args[0]); err != nil {
				return err
			}
			r, err := a.daemon().Sessions(cmd.Context())
			if err != nil {
				return err
			}
			r.Sessions = slices.DeleteFunc(r.Sessions, func(s api.Session) bool { return !names(&s, args[0]) })
			if len(r.Sessions) == 0 {
				return api.Errorf(api.ErrSessionNotFound, "no session matches %s; see: iserctl session list", args[0])
			}
			if a.json {
				return a.print(r)
			}
			return a.showSession(&r.Sessions[0])
		},
	}
}

// names tells whether what a person says means a session.
func names(s *api.Session, what string) bool {
	if n, err := strconv.Atoi(what); err == nil {
		return s.ID == n
	}
	return s.Target == what || slices.ContainsFunc(s.Units, func(u api.Unit) bool {
		return u.Device != "" && strings.TrimPrefix(u.Device, "/dev/") == strings.TrimPrefix(what, "/dev/")
	})
}

func (a *app) showSession(s *api.Session) error {
	t := newTable(a.out)
	t.row("session", strconv.Itoa(s.ID))
	t.row("target", s.Target)
	t.row("portal", api.Portal{Address: s.Address, Port: s.Port}.String())
	t.row("portal group", tag(s.TPGT))
	t.row("state", s.State)
	t.row("since", when(s.Since))
	t.row("transport", s.Transport+": "+s.TransportReason)
	t.row("initiator name", s.InitiatorName)
	for _, u := range s.Units {
		t.row("logical unit "+strconv.Itoa(int(u.LUN)), dash(u.Device+u.Reason))
	}
	if s.LastError != nil {
		t.row("last error", s.LastError.Text)
	}
	if err := t.flush(); err != nil {
		return err
	}
	for i := range s.Connections {
		c := &s.Connections[i]
		fmt.Fprintln(a.out)
		t := newTable(a.out)
		t.row("connection", strconv.Itoa(i))
		t.row("state", c.State)
		t.row("ISID", c.ISID)
		t.row("TSIH", strconv.Itoa(int(c.TSIH)))
		t.row("from", c.LocalAddress)
		if c.Portal != "" || c.Transport != s.Transport {
			t.row("is at", cmp.Or(c.Portal, api.Portal{Address: s.Address, Port: s.Port}.String())+" over "+c.Transport)
		}
		if c.RDMADevice != "" {
			t.row("RDMA device", c.RDMADevice)
		}
		for _, lun := range slices.Sorted(maps.Keys(c.Access)) {
			t.row("access to logical unit "+strconv.Itoa(int(lun)), c.Access[lun])
		}
		t.row("authentication", dash(c.AuthMethod))
		if c.Aborts+c.Drops > 0 {
			t.row("commands without an answer", fmt.Sprintf("%d aborted, %d unit resets, %d sessions ended", c.Aborts, c.Resets, c.Drops))
		}
		for _, k := range slices.Sorted(maps.Keys(c.Negotiated)) {
			t.row(k, c.Negotiated[k])
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	return nil
}
