package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

func (a *app) rescanCommand() *cobra.Command {
	r := api.RescanRequest{}
	return &cobra.Command{
		Use: "rescan [TARGET|SESSION|/dev/ublkbN]", Short: "Ask targets for their logical units again, and let the block devices follow",
		Long: "Ask a target, or all that are logged in, for their logical units again. Units that are new get a block device, devices of units that\n" +
			"are gone are removed if nobody uses them, devices of units that have grown grow. This also happens by itself when a target tells\n" +
			"of a change, which it does with the answer to the next request.",
		Args: atMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if err := checkSession(args[0]); err != nil {
					return err
				}
				r.Session = args[0]
			}
			reply, err := a.daemon().Rescan(cmd.Context(), r)
			if err != nil {
				return err
			}
			if a.json {
				err = a.print(reply)
			} else {
				a.showRescan(reply)
			}
			for _, s := range reply.Sessions {
				if err == nil && s.Error != nil {
					err = s.Error
				}
			}
			return err
		},
	}
}

func (a *app) showRescan(r api.RescanReply) {
	if len(r.Sessions) == 0 {
		a.warn("no sessions")
	}
	for _, s := range r.Sessions {
		if s.Error != nil {
			a.warn("session %d, %s: %s", s.SessionID, s.Target, s.Error.Text)
			continue
		}
		var what []string
		for _, x := range []struct {
			what string
			list []string
		}{{"new", s.Added}, {"removed", s.Removed}, {"grown", s.Grown}} {
			if len(x.list) > 0 {
				what = append(what, x.what+": "+strings.Join(x.list, ", "))
			}
		}
		if len(what) == 0 {
			what = append(what, "nothing new")
		}
		fmt.Fprintf(a.out, "Session %d, %s: %s.\n", s.SessionID, s.Target, strings.Join(what, "; "))
		for _, p := range s.Problems {
			a.warn("warning: %s", p)
		}
	}
}

// unservedTable lists the units that have no block device.
func (a *app) unservedTable(units []api.UnservedUnit) error {
	if len(units) == 0 {
		return nil
	}
	fmt.Fprintln(a.out, "\nLogical units without a block device:")
	t := newTable(a.out, "TARGET", "LUN", "TYPE", "MODEL", "REASON")
	for _, u := range units {
		t.row(u.Target, strconv.Itoa(int(u.LUN)), u.Type, dash(strings.TrimSpace(u.Vendor+" "+u.Product)), dash(u.Reason))
	}
	return t.flush()
}
