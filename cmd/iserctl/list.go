package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

// filterArgs reads TARGET and --portal.
func filterArgs(f *api.NodeFilter, args []string) error {
	if len(args) > 0 {
		if err := api.CheckName(args[0]); err != nil {
			return err
		}
		f.Target = args[0]
	}
	if f.Portal != "" {
		p, err := api.ParsePortal(f.Portal)
		if err != nil {
			return err
		}
		f.Portal = p.String()
	}
	return nil
}

func atMostOne(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return api.Errorf(api.ErrInvalidArgs, "unexpected argument %q", args[1])
	}
	return nil
}

func (a *app) nodeListCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "list [TARGET]", Short: "List stored records", Args: atMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args); err != nil {
				return err
			}
			r, err := a.daemon().Nodes(cmd.Context(), f)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			for _, p := range r.Problems {
				a.warn("%s", p)
			}
			if len(r.Nodes) == 0 {
				a.warn("no records; store some with: iserctl discover ADDR --save")
				return nil
			}
			t := newTable(a.out, "TARGET", "PORTAL", "TPGT", "TRANSPORT", "SEEN OVER", "SESSION")
			for i := range r.Nodes {
				n := &r.Nodes[i]
				t.row(n.Target, n.Portal().String(), tag(n.TPGT), n.Transport, seen(n), dash(n.SessionState))
			}
			return t.flush()
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only records of this portal")
	return c
}

func seen(n *api.Node) string {
	s := dash(strings.Join(n.SeenOver, ","))
	if n.Missing {
		s += " (missing)"
	}
	return s
}

func (a *app) nodeShowCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "show TARGET", Short: "Show the stored records of a target", Args: exactly(1, "the name of a target"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args); err != nil {
				return err
			}
			r, err := a.daemon().Nodes(cmd.Context(), f)
			if err != nil {
				return err
			}
			if len(r.Nodes) == 0 {
				return api.Errorf(api.ErrNotFound, "no record of %s", f.Target)
			}
			if a.json {
				return a.print(r)
			}
			for i := range r.Nodes {
				n := &r.Nodes[i]
				if i > 0 {
					fmt.Fprintln(a.out)
				}
				t := newTable(a.out)
				t.row("target", n.Target)
				t.row("portal", n.Portal().String())
				t.row("portal group", tag(n.TPGT))
				t.row("interface", n.Interface)
				t.row("transport", n.Transport)
				t.row("startup", n.Startup)
				t.row("seen over", seen(n))
				t.row("found at", dash(n.Source))
				t.row("found", when(n.Discovered))
				t.row("session", dash(n.SessionState))
				if err := t.flush(); err != nil {
					return err
				}
			}
			return nil
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only the record of this portal")
	return c
}

func (a *app) nodeAddCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "add TARGET --portal ADDR", Short: "Store a record without asking the portal", Args: exactly(1, "the name of a target"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args); err != nil {
				return err
			}
			if f.Portal == "" {
				return api.Errorf(api.ErrInvalidArgs, "--portal is missing")
			}
			r, err := a.daemon().AddNode(cmd.Context(), f.Target, f.Portal)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			fmt.Fprintf(a.out, "Stored %s at %s.\n", f.Target, f.Portal)
			return nil
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "ADDR[:PORT] of the target")
	return c
}

func (a *app) nodeDeleteCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "delete TARGET", Short: "Remove the stored records of a target", Args: exactly(1, "the name of a target"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args); err != nil {
				return err
			}
			r, err := a.daemon().DeleteNodes(cmd.Context(), f)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			for i := range r.Nodes {
				fmt.Fprintf(a.out, "Removed %s at %s.\n", r.Nodes[i].Target, r.Nodes[i].Portal())
			}
			return nil
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only the record of this portal")
	return c
}

func (a *app) deviceListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List block devices", Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Devices(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			if len(r.Devices) == 0 {
				a.warn("no devices")
				return nil
			}
			return a.deviceTable(r.Devices)
		},
	}
}

func (a *app) deviceTable(devs []api.Device) error {
	t := newTable(a.out, "DEVICE", "SIZE", "BLOCK", "TARGET", "LUN", "TRANSPORT", "MODEL", "SERIAL", "MODE", "STATE")
	for i := range devs {
		d := &devs[i]
		mode := "rw"
		if d.ReadOnly {
			mode = "ro"
		}
		t.row(d.Path, size(d.Size), strconv.Itoa(int(d.LogicalBlockSize))+"/"+strconv.Itoa(int(d.PhysicalBlockSize)), d.Target, strconv.Itoa(int(d.LUN)),
			d.Transport, dash(strings.TrimSpace(d.Vendor+" "+d.Product)), dash(d.Serial), mode, d.State)
	}
	return t.flush()
}

func (a *app) deviceStatsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats", Short: "Show the counters of the block devices",
		Long: "Show the counters of the block devices since they were made. The last three columns tell how the payload went:\n" +
			"SHARED without a copy, REGISTERED with one copy through memory that was registered once, TCP through a socket.",
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Devices(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			if len(r.Devices) == 0 {
				a.warn("no devices")
				return nil
			}
			t := newTable(a.out, "DEVICE", "READS", "READ", "WRITES", "WRITTEN", "FLUSHES", "ERRORS", "RETRIES", "IN FLIGHT", "SHARED", "REGISTERED", "TCP")
			n := func(v uint64) string { return strconv.FormatUint(v, 10) }
			for i := range r.Devices {
				d := &r.Devices[i]
				s := &d.Stats
				t.row(d.Path, n(s.Reads), size(s.ReadBytes), n(s.Writes), size(s.WriteBytes), n(s.Flushes), n(s.Errors), n(s.Retries),
					strconv.Itoa(s.InFlight), size(s.BytesShared), size(s.BytesRegistered), size(s.BytesTCP))
			}
			return t.flush()
		},
	}
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show how the daemon is", Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Status(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			s := &r.Status
			t := newTable(a.out)
			t.row("iserd", fmt.Sprintf("%s, pid %d, %s", s.State, s.PID, s.Version))
			t.row("initiator name", s.InitiatorName)
			dp := s.DataPlane.State
			if dp == api.DataPlaneUp {
				dp = fmt.Sprintf("up, pid %d, %d threads, %d of %s of I/O buffers in use", s.DataPlane.PID, s.DataPlane.Reactors, s.DataPlane.PoolBytesUsed, size(uint64(s.DataPlane.PoolBytes)))
			}
			t.row("data plane", dp)
			t.row("RDMA devices", dash(strings.Join(s.DataPlane.RDMADevices, ", ")))
			ublk := "available"
			if !s.Ublk.Available {
				ublk = "not available"
			}
			t.row("ublk", ublk)
			t.row("bus", s.Bus)
			t.row("sessions", strconv.Itoa(s.Sessions))
			t.row("devices", strconv.Itoa(s.Devices))
			t.row("records", strconv.Itoa(s.Nodes))
			if err := t.flush(); err != nil {
				return err
			}
			for _, p := range s.Problems {
				fmt.Fprintln(a.out, "problem: "+p)
			}
			return nil
		},
	}
}

func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.DateTime)
}
