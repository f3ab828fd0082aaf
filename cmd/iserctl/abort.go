package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

func (a *app) deviceAbortCommand() *cobra.Command {
	r := api.AbortRequest{}
	c := &cobra.Command{
		Use: "abort /dev/ublkbN", Short: "End a block device with I/O errors, whatever keeps it",
		Long: "End a block device that logout cannot end: its target hangs or is gone for good, or no data plane takes it over. All its requests fail\n" +
			"with I/O errors and the block device goes away; whoever has it open keeps a file without a disk. The session stays, with its other\n" +
			"devices. The unit is served again on request: iserctl rescan.\n\n" +
			"A device that works and is in use needs --force. So does one whose data plane does not answer: that process is killed then, and its\n" +
			"other devices wait for the next one, without errors.",
		Args: exactly(1, "a device"),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Device = args[0]
			reply, err := a.daemon().Abort(cmd.Context(), r)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(reply)
			}
			fmt.Fprintf(a.out, "Aborted %s, logical unit %d of %s.\n", reply.Device, reply.LUN, reply.Target)
			return nil
		},
	}
	c.Flags().BoolVar(&r.Force, "force", false, "end it although it is in use, and kill a data plane that does not answer")
	return c
}
