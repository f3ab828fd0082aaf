package main

import (
	"cmp"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

func (a *app) upgradeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "upgrade", Short: "Replace the data plane by the program that is installed now, without an I/O error",
		Long: "Replace the data plane, iserd-io, by the program that is installed now, while its devices are in use. The new one gets ready first; then\n" +
			"the devices pause: the kernel holds new requests back, those under way are answered, the new data plane logs in again and goes on.\n" +
			"Nobody sees an error. Devices whose requests are not answered in time (their session is lost, the kernel is older than 6.16) are handed over with\n" +
			"their requests, which are sent again.\n\n" +
			"A new data plane that does not get ready changes nothing. If there is none any more, devices wait, and this command starts the one\n" +
			"that is installed.\n" +
			"The daemon itself is replaced by restarting it, which no device notices.",
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			reply, err := a.daemon().Upgrade(cmd.Context(), api.UpgradeRequest{})
			if err != nil {
				return err
			}
			if a.json {
				return a.print(reply)
			}
			return a.showUpgrade(reply)
		},
	}
}

func (a *app) showUpgrade(r api.UpgradeReply) error {
	switch {
	case r.Old.PID == 0:
		fmt.Fprintf(a.out, "Started the data plane: %s, process %d.\n", r.New.Build, r.New.PID)
	default:
		fmt.Fprintf(a.out, "Replaced the data plane: %s, process %d, by %s, process %d.\n", r.Old.Build, r.Old.PID, r.New.Build, r.New.PID)
	}
	if len(r.Devices) > 0 {
		fmt.Fprintf(a.out, "%d devices paused for at most %d ms.\n\n", len(r.Devices), r.PauseMS)
		t := newTable(a.out, "DEVICE", "TARGET", "LUN", "STATE", "PAUSE", "REQUESTS")
		for _, d := range r.Devices {
			requests := "all answered first"
			if d.How != api.HandOverQuiesced {
				requests = "sent again: " + cmp.Or(d.Reason, "they were not answered")
			}
			t.row(d.Device, d.Target, strconv.Itoa(int(d.LUN)), d.State, strconv.FormatInt(d.PauseMS, 10)+" ms", requests)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	for _, p := range r.Problems {
		a.warn("warning: %s", p)
	}
	return nil
}
