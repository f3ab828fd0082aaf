package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
)

// loginsReply is the JSON form of discover --login.
type loginsReply struct {
	Version int               `json:"version"`
	Targets []api.Target      `json:"targets"`
	Notes   []string          `json:"notes"`
	Logins  []api.LoginReply  `json:"logins"`
	Errors  []loginErrorReply `json:"errors"`
}

type loginErrorReply struct {
	Target string     `json:"target"`
	Error  *api.Error `json:"error"`
}

func (a *app) discoverCommand() *cobra.Command {
	r := api.DiscoverRequest{}
	login, firmware := false, false
	var set []string
	c := &cobra.Command{
		Use: "discover ADDR[:PORT]", Short: "Ask a portal for its targets, or the firmware for those it booted from",
		Long: "Ask a portal for its targets with SendTargets. With --transport auto the question goes over RDMA and over TCP, since\n" +
			"many targets list only the portals of the transport that was used. How a portal is asked can be stored: iserctl discovery.\n\n" +
			"--firmware lists the interfaces and targets of the iSCSI Boot Firmware Table (iBFT). A target whose portal says nothing is\n" +
			"stored by hand: iserctl node add. iSNS is not supported: see docs/login.md.",
		Args: func(cmd *cobra.Command, args []string) error {
			if firmware {
				return exactly(0, "")(cmd, args)
			}
			return exactly(1, "the address of a portal")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if firmware {
				if login || len(set) > 0 {
					return api.Errorf(api.ErrInvalidArgs, "--firmware goes with --save only; log in with: iserctl login TARGET")
				}
				return a.showFirmware(cmd.Context(), r.Save)
			}
			var err error
			if r.Set, err = assignments(set); err != nil {
				return err
			}
			p, err := api.ParsePortal(args[0])
			if err != nil {
				return err
			}
			if r.Transport, err = api.CheckTransport(r.Transport); err != nil {
				return err
			}
			r.Portal, r.Timeout = p.String(), a.seconds()
			reply, err := a.daemon().Discover(cmd.Context(), r)
			if err != nil {
				return err
			}
			if !login {
				return a.showTargets(reply)
			}
			return a.loginAll(cmd.Context(), reply, r.Transport)
		},
	}
	c.Flags().StringVar(&r.Transport, "transport", api.TransportAuto, "auto, iser or tcp")
	c.Flags().BoolVar(&r.Save, "save", false, "store what is found; settings that exist are kept")
	c.Flags().BoolVar(&login, "login", false, "log in to every target found")
	c.Flags().BoolVar(&firmware, "firmware", false, "list what the firmware has booted from (iBFT) instead")
	c.Flags().StringArrayVar(&set, "set", nil, "NAME=VALUE: a setting for this time (see iserctl discovery set --help)")
	return c
}

func (a *app) showTargets(r api.TargetsReply) error {
	if a.json {
		return a.print(r)
	}
	for _, n := range r.Notes {
		a.warn("%s", n)
	}
	if len(r.Targets) == 0 {
		a.warn("the portal offers no target to this initiator")
		return nil
	}
	t := newTable(a.out, "TARGET", "PORTAL", "TPGT", "TRANSPORTS")
	for _, x := range r.Targets {
		t.row(x.Target, api.Portal{Address: x.Address, Port: x.Port}.String(), tag(x.TPGT), strings.Join(x.Transports, ","))
	}
	return t.flush()
}

// loginAll logs in to each target once, through the first of its portals that lets us.
func (a *app) loginAll(ctx context.Context, found api.TargetsReply, transport string) error {
	reply := loginsReply{Version: api.Version, Targets: found.Targets, Notes: found.Notes, Logins: []api.LoginReply{}, Errors: []loginErrorReply{}}
	if !a.json {
		if err := a.showTargets(found); err != nil {
			return err
		}
	}
	// Portals seen over RDMA come first.
	ts := slices.Clone(found.Targets)
	slices.SortStableFunc(ts, func(x, y api.Target) int {
		if c := strings.Compare(x.Target, y.Target); c != 0 {
			return c
		}
		return slices.Index(y.Transports, api.TransportISER) - slices.Index(x.Transports, api.TransportISER)
	})
	var first error
	for i := 0; i < len(ts); {
		name := ts[i].Target
		var err error
		for ; i < len(ts) && ts[i].Target == name; i++ {
			if i > 0 && ts[i-1].Target == name && !worthAnotherPortal(err) {
				continue
			}
			var l api.LoginReply
			l, err = a.daemon().Login(ctx, api.LoginRequest{
				Target: name, Portal: api.Portal{Address: ts[i].Address, Port: ts[i].Port}.String(), Transport: transport, Timeout: a.seconds(),
			})
			if err == nil {
				reply.Logins = append(reply.Logins, l)
				if !a.json {
					if err := a.showLogin(l); err != nil {
						return err
					}
				}
			}
		}
		if err != nil {
			e := &api.Error{Name: api.NameOf(err), Text: err.Error()}
			reply.Errors = append(reply.Errors, loginErrorReply{name, e})
			if first == nil {
				first = err
			} else if !a.json {
				a.warn("%s", err) // the first is printed at the end, with the exit code
			}
		}
	}
	if a.json {
		if err := a.print(reply); err != nil {
			return err
		}
	}
	return first
}

// worthAnotherPortal tells whether a failure was about the way to the target.
func worthAnotherPortal(err error) bool {
	n := api.NameOf(err)
	return n == api.ErrConnectionFailed || n == api.ErrTimeout || n == api.ErrTransportUnavailable
}

func (a *app) loginCommand() *cobra.Command {
	r := api.LoginRequest{}
	c := &cobra.Command{
		Use: "login TARGET", Short: "Log in to a target and make its block devices",
		Long: "Log in to a target. Without --portal the stored records are used (iserctl discover ADDR --save).",
		Args: exactly(1, "the name of a target"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := api.CheckName(args[0]); err != nil {
				return err
			}
			r.Target, r.Timeout = args[0], a.seconds()
			if r.Portal != "" {
				p, err := api.ParsePortal(r.Portal)
				if err != nil {
					return err
				}
				r.Portal = p.String()
			}
			if _, err := api.CheckTransport(r.Transport); err != nil {
				return err
			}
			reply, err := a.daemon().Login(cmd.Context(), r)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(reply)
			}
			return a.showLogin(reply)
		},
	}
	c.Flags().StringVar(&r.Portal, "portal", "", "ADDR[:PORT] of the target")
	c.Flags().StringVar(&r.Transport, "transport", "", "auto, iser or tcp (default: the record's, else auto)")
	return c
}

func (a *app) showLogin(r api.LoginReply) error {
	s := &r.Session
	fmt.Fprintf(a.out, "Logged in to %s at %s over %s (%s), session %d.\n", s.Target, api.Portal{Address: s.Address, Port: s.Port}, s.Transport, s.TransportReason, s.ID)
	for _, u := range s.Units {
		if u.Device == "" {
			a.warn("warning: logical unit %d of %s is not served: %s", u.LUN, s.Target, u.Reason)
		}
	}
	if len(r.Devices) == 0 {
		a.warn("warning: %s offers no logical unit that can be served", s.Target)
		return nil
	}
	return a.deviceTable(r.Devices)
}

func (a *app) logoutCommand() *cobra.Command {
	r := api.LogoutRequest{}
	c := &cobra.Command{
		Use: "logout TARGET|SESSION|/dev/ublkbN", Short: "Remove the block devices of a session and log out",
		Long: "Remove the block devices of a session and log out. Refused, with the holders named, while a device is in use.",
		Args: exactly(1, "a target, the number of a session, or a device"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkSession(args[0]); err != nil {
				return err
			}
			r.Session = args[0]
			reply, err := a.daemon().Logout(cmd.Context(), r)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(reply)
			}
			fmt.Fprintf(a.out, "Logged out of %s, session %d.\n", reply.Session.Target, reply.Session.ID)
			return nil
		},
	}
	c.Flags().BoolVar(&r.Force, "force", false, "end a failed session although its devices are in use: their users get I/O errors")
	return c
}

// checkSession accepts what can name a session.
func checkSession(s string) error {
	if n, err := strconv.Atoi(s); err == nil && n > 0 {
		return nil
	}
	if n, ok := strings.CutPrefix(strings.TrimPrefix(s, "/dev/"), "ublkb"); ok {
		if id, err := strconv.Atoi(n); err == nil && id >= 0 {
			return nil
		}
	}
	if err := api.CheckName(s); err != nil {
		return api.Errorf(api.ErrInvalidArgs, "%w; a session number or a device such as /dev/ublkb0 is possible, too", err)
	}
	return nil
}

func (a *app) sessionListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List sessions", Args: exactly(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Sessions(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			if len(r.Sessions) == 0 {
				a.warn("no sessions")
				return nil
			}
			t := newTable(a.out, "SESSION", "TARGET", "PORTAL", "TPGT", "TRANSPORT", "STATE", "CONNECTIONS", "DEVICES")
			for _, s := range r.Sessions {
				var devs []string
				for _, u := range s.Units {
					if u.Device != "" {
						devs = append(devs, u.Device)
					}
				}
				t.row(strconv.Itoa(s.ID), s.Target, api.Portal{Address: s.Address, Port: s.Port}.String(), tag(s.TPGT), s.Transport, s.State,
					strconv.Itoa(len(s.Connections)), dash(strings.Join(devs, ",")))
			}
			if err := t.flush(); err != nil {
				return err
			}
			for _, s := range r.Sessions {
				if s.LastError != nil {
					a.warn("session %d: %s", s.ID, s.LastError.Text)
				}
			}
			return nil
		},
	}
}
