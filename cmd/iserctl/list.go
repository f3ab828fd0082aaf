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
		Use: "show TARGET", Short: "Show the stored records of a target, with every setting", Args: exactly(1, "the name of a target"),
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
				t.row("startup", n.Startup)
				t.row("seen over", seen(n))
				t.row("found at", dash(n.Source))
				t.row("found", when(n.Discovered))
				t.row("session", dash(n.SessionState))
				if n.MovedTo != "" {
					t.row("moved to", n.MovedTo)
				}
				settingRows(t, &n.Settings, n.Secrets, false)
				if len(n.Pending) > 0 {
					t.row("after the next login", strings.Join(n.Pending, ", "))
				}
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
			} else if err := a.deviceTable(r.Devices); err != nil {
				return err
			}
			for i := range r.Devices {
				if d := &r.Devices[i]; d.Reason != "" {
					a.warn("%s is dead: %s", d.Path, d.Reason)
				}
			}
			return a.unservedTable(r.Unserved)
		},
	}
}

func (a *app) deviceTable(devs []api.Device) error {
	t := newTable(a.out, "DEVICE", "SIZE", "BLOCK", "TARGET", "LUN", "TRANSPORT", "MODEL", "SERIAL", "MODE", "STATE", "TIERS")
	for i := range devs {
		d := &devs[i]
		mode := "rw"
		if d.ReadOnly {
			mode = "ro"
		}
		t.row(d.Path, size(d.Size), strconv.Itoa(int(d.LogicalBlockSize))+"/"+strconv.Itoa(int(d.PhysicalBlockSize)), d.Target, strconv.Itoa(int(d.LUN)),
			d.Transport, dash(strings.TrimSpace(d.Vendor+" "+d.Product)), dash(d.Serial), mode, d.State, dash(tierNames(d)))
	}
	return t.flush()
}

// tierNames lists the ways that a device's requests can go.
func tierNames(d *api.Device) string {
	var names []string
	for _, t := range d.Tiers {
		if t.Possible {
			names = append(names, t.Name)
		}
	}
	return strings.Join(names, ",")
}

func (a *app) deviceShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show /dev/ublkbN", Short: "Show a block device, and which ways its requests can go", Args: exactly(1, "a device"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if n, ok := strings.CutPrefix(strings.TrimPrefix(args[0], "/dev/"), "ublkb"); !ok || n == "" {
				return api.Errorf(api.ErrInvalidArgs, "%q: expected a device such as /dev/ublkb0", args[0])
			}
			r, err := a.daemon().DeviceQueues(cmd.Context())
			if err != nil {
				return err
			}
			var found []api.Device
			for _, d := range r.Devices {
				if strings.TrimPrefix(d.Path, "/dev/") == strings.TrimPrefix(args[0], "/dev/") {
					found = append(found, d)
				}
			}
			if len(found) == 0 {
				return api.Errorf(api.ErrNotFound, "no device %s; see: iserctl device list", args[0])
			}
			r.Devices = found
			if a.json {
				return a.print(r)
			}
			d := &found[0]
			t := newTable(a.out)
			t.row("device", d.Path)
			t.row("state", d.State)
			if d.Reason != "" {
				t.row("reason", d.Reason)
			}
			t.row("target", d.Target)
			t.row("portal", api.Portal{Address: d.Address, Port: d.Port}.String())
			t.row("transport", d.Transport)
			t.row("logical unit", strconv.Itoa(int(d.LUN)))
			t.row("size", size(d.Size))
			t.row("block size", fmt.Sprintf("%d, physical %d", d.LogicalBlockSize, d.PhysicalBlockSize))
			t.row("model", dash(strings.TrimSpace(d.Vendor+" "+d.Product+" "+d.Revision)))
			t.row("serial", dash(d.Serial))
			t.row("identity", dash(d.WWID))
			t.row("read-only", yesNo(d.ReadOnly))
			t.row("write cache", yesNo(d.WriteCache))
			t.row("discard", upTo(d.MaxDiscard, fmt.Sprintf(", in pieces of %s", size(uint64(d.DiscardGranularity)))))
			t.row("write zeroes", upTo(d.MaxZeroes, ""))
			t.row("queues", fmt.Sprintf("%d of %d requests, of at most %s", d.Queues, d.QueueDepth, size(uint64(d.MaxIO))))
			t.row("shared memory", fmt.Sprintf("%d buffers registered", d.Buffers))
			for _, x := range d.Tiers {
				t.row("tier "+x.Name, yesNo(x.Possible)+": "+x.Reason)
			}
			if err := t.flush(); err != nil {
				return err
			}
			a.warnings(found)
			return nil
		},
	}
}

// upTo tells whether the unit carries out ranges, and how long ones.
func upTo(most uint64, more string) string {
	if most == 0 {
		return "no"
	}
	return "yes, up to " + size(most) + " in a request" + more
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// warnings prints what the daemon warns of.
func (a *app) warnings(devs []api.Device) {
	for _, d := range devs {
		for _, w := range d.Warnings {
			a.warn("warning: %s: %s", d.Path, w)
		}
	}
}

func (a *app) deviceStatsCommand() *cobra.Command {
	queues := false
	c := &cobra.Command{
		Use: "stats", Short: "Show the counters of the block devices",
		Long: "Show the counters of the block devices since they were made. The last columns tell how the payload of reads and writes\n" +
			"went, in requests and bytes: SHARED without a copy, REGISTERED with one copy through memory that was registered once,\n" +
			"TCP through a socket.",
		Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			get := a.daemon().Devices
			if queues {
				get = a.daemon().DeviceQueues
			}
			r, err := get(cmd.Context())
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
			head := []string{"DEVICE"}
			if queues {
				head = append(head, "QUEUE")
			}
			t := newTable(a.out, append(head, "READS", "READ", "WRITES", "WRITTEN", "FLUSHES", "ERRORS", "RETRIES", "IN FLIGHT",
				"SHARED", "BYTES", "REGISTERED", "BYTES", "TCP", "BYTES")...)
			for i := range r.Devices {
				d := &r.Devices[i]
				if !queues {
					t.row(append([]string{d.Path}, counters(&d.Stats)...)...)
				}
				for q := range d.QueueStats {
					t.row(append([]string{d.Path, strconv.Itoa(q)}, counters(&d.QueueStats[q])...)...)
				}
			}
			if err := t.flush(); err != nil {
				return err
			}
			a.warnings(r.Devices)
			return nil
		},
	}
	c.Flags().BoolVar(&queues, "queues", false, "one line for each queue")
	return c
}

func counters(s *api.DeviceStats) []string {
	n := func(v uint64) string { return strconv.FormatUint(v, 10) }
	return []string{
		n(s.Reads), size(s.ReadBytes), n(s.Writes), size(s.WriteBytes), n(s.Flushes), n(s.Errors), n(s.Retries), strconv.Itoa(s.InFlight),
		n(s.RequestsShared), size(s.BytesShared), n(s.RequestsRegistered), size(s.BytesRegistered), n(s.RequestsTCP), size(s.BytesTCP),
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
