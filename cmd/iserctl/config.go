package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/config"
)

func (a *app) configCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use: "check [FILE...]", Short: "Tell what is wrong with the daemon's files, or with others",
		Long: "Tell what is wrong with configuration files, all of it, each with file and line. Later files go before earlier ones; a directory stands\n" +
			"for the *.toml in it. Without FILE these are the daemon's: " + strings.Join(config.Places, ", ") + ".\n" +
			"No daemon is needed, and none is asked. What its environment and its command line say is not looked at: see iserctl config show.",
		RunE: func(_ *cobra.Command, args []string) error {
			src := config.Sources{Files: config.Places}
			if len(args) > 0 {
				src = config.Sources{Named: args}
			}
			l, err := config.Load(src)
			problems := config.ProblemsOf(err)
			if a.json {
				r := api.ConfigCheckReply{Version: api.Version, Files: l.Files, Problems: append([]api.ConfigProblem{}, problems...)}
				if err := a.print(r); err != nil {
					return err
				}
			} else {
				a.showCheck(l.Files, problems)
			}
			if n := len(problems); n > 0 {
				return api.Errorf(api.ErrInvalidArgs, "%s in the configuration", plural(n, "error"))
			}
			return err
		},
	}
}

func (a *app) showCheck(files []string, problems []api.ConfigProblem) {
	if len(files)+len(problems) == 0 {
		fmt.Fprintln(a.out, "No files: all defaults.")
	}
	for _, f := range files {
		bad := false
		for _, p := range problems {
			bad = bad || p.Origin.Kind == api.OriginFile && p.Origin.Name == f
		}
		if !bad {
			fmt.Fprintln(a.out, f+": good")
		}
	}
	for _, p := range problems {
		fmt.Fprintln(a.out, p)
	}
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func (a *app) configShowCommand() *cobra.Command {
	var origin bool
	c := &cobra.Command{
		Use: "show", Short: "Show what the running daemon goes by", Args: exactly(0, ""),
		Long: "Show the options as the running daemon has them, what waits and for what, and what a reload would change: files may be others by now.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Config(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			return a.showConfig(r, origin)
		},
	}
	c.Flags().BoolVar(&origin, "origin", false, "where each value comes from")
	return c
}

func (a *app) showConfig(r api.ConfigReply, origin bool) error {
	head := []string{"OPTION", "VALUE"}
	if origin {
		head = append(head, "FROM")
	}
	t := newTable(a.out, append(head, "IN FORCE")...)
	for _, o := range r.Options {
		cells := []string{o.Name, dash(o.Value.Text)}
		if origin {
			cells = append(cells, o.Origin.String())
		}
		holds := "yes"
		switch {
		case o.Unknown:
			holds = "not known: no data plane says so"
		case o.InForce != nil:
			holds = fmt.Sprintf("no: %s, %s", cmp.Or(o.InForce.Text, "empty"), waits[o.Effect])
		}
		t.row(append(cells, holds)...)
	}
	if err := t.flush(); err != nil {
		return err
	}
	if len(r.Changes) > 0 {
		fmt.Fprintln(a.out, "\nThe files say otherwise by now; iserctl daemon reload would change:")
		if err := a.showChanges(r.Changes); err != nil {
			return err
		}
	}
	for _, p := range r.Problems {
		a.warn("warning: a reload would fail: %s", p)
	}
	return nil
}

// waits says what a change that does not count yet waits for.
var waits = map[string]string{
	api.EffectNow:       "at once",
	api.EffectLogin:     "until the next login",
	api.EffectDevice:    "for devices that are there",
	api.EffectDataPlane: "until the data plane starts again: iserctl daemon upgrade",
	api.EffectDaemon:    "until the daemon starts again: systemctl restart iserd",
}

// counts says from when on a change counts.
var counts = map[string]string{
	api.EffectNow:       "now",
	api.EffectLogin:     "for logins from now on",
	api.EffectDevice:    "for devices made from now on",
	api.EffectDataPlane: "when the data plane starts again: iserctl daemon upgrade",
	api.EffectDaemon:    "when the daemon starts again: systemctl restart iserd",
}

func (a *app) showChanges(list []api.ConfigChange) error {
	t := newTable(a.out, "OPTION", "OLD", "NEW", "FROM", "COUNTS")
	for _, c := range list {
		text := cmp.Or(counts[c.Effect], c.Effect)
		if len(c.KeptBy) > 0 {
			keep := " keep what they have"
			if len(c.KeptBy) == 1 {
				keep = " keeps what it has"
			}
			text += "; " + strings.Join(c.KeptBy, ", ") + keep
		}
		t.row(c.Name, dash(c.Old.Text), dash(c.New.Text), c.Origin.String(), text)
	}
	return t.flush()
}

func (a *app) reloadCommand() *cobra.Command {
	return &cobra.Command{
		Use: "reload", Short: "Have the daemon read its configuration again", Args: exactly(0, ""),
		Long: "Have the daemon read its files again, as SIGHUP and systemctl reload do, and tell what has changed and from when on it counts. If\n" +
			"anything is wrong with the files nothing changes, and this command fails.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := a.daemon().Reload(cmd.Context(), api.ReloadRequest{})
			if err != nil {
				return err
			}
			if a.json {
				return a.print(r)
			}
			if len(r.Changes) == 0 {
				fmt.Fprintln(a.out, "Nothing has changed.")
				return nil
			}
			return a.showChanges(r.Changes)
		},
	}
}
