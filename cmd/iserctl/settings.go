package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi/login"
)

// settingsHelp lists what can be set, of a discovery or of all.
func settingsHelp(discovery bool) string {
	var b strings.Builder
	t := newTable(&b)
	for i := range api.SettingTable {
		if r := &api.SettingTable[i]; !discovery || r.Discovery {
			t.row("  "+r.Name, r.Help+": "+r.Range()+"; default "+r.Default())
		}
	}
	_ = t.flush() // into memory
	return b.String()
}

// assignments reads NAME=VALUE.
func assignments(args []string) (map[string]string, error) {
	set := make(map[string]string, len(args))
	for _, a := range args {
		name, value, ok := strings.Cut(a, "=")
		if _, err := api.FindSetting(name); err != nil {
			return nil, err
		}
		if !ok {
			return nil, api.Errorf(api.ErrInvalidArgs, "%q: expected NAME=VALUE", a)
		}
		if _, twice := set[name]; twice {
			return nil, api.Errorf(api.ErrInvalidArgs, "%s is set twice", name)
		}
		var try api.Settings // so that the daemon's refusal is known without it
		if err := try.Set(name, value); err != nil {
			return nil, err
		}
		set[name] = value
	}
	return set, nil
}

// atLeast wants n arguments or more.
func atLeast(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < n {
			return api.Errorf(api.ErrInvalidArgs, "%s is missing", what)
		}
		return nil
	}
}

// settingRows shows settings: what the user has set, and the defaults of the rest.
func settingRows(t table, s *api.Settings, secrets []string, discovery bool) {
	for i := range api.SettingTable {
		r := &api.SettingTable[i]
		if discovery && !r.Discovery {
			continue
		}
		text := r.Text(s)
		if text == "" || r.Name == "transport" && text == api.TransportAuto {
			text = r.Default() + " (default)"
		}
		t.row(r.Name, text)
	}
	for _, name := range []string{api.CHAPSecret, api.CHAPTargetSecret} {
		text := "none"
		if slices.Contains(secrets, name) {
			text = "stored"
		}
		t.row(name, text)
	}
}

// changed says what became of records.
func (a *app) changed(r api.NodesReply) error {
	if a.json {
		return a.print(r)
	}
	for i := range r.Nodes {
		n := &r.Nodes[i]
		fmt.Fprintf(a.out, "Changed %s at %s.\n", n.Target, n.Portal())
		if n.SessionState != "" && len(n.Pending) > 0 {
			a.warn("%s is logged in: %s will count after iserctl logout and login", n.Target, strings.Join(n.Pending, ", "))
		}
	}
	return nil
}

func (a *app) nodeSetCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "set TARGET NAME=VALUE...", Short: "Change how a target is logged in to",
		Long: "Change settings of the stored records of a target. They count from the next login on.\n\n" + settingsHelp(false) +
			"\nSecrets are no settings: iserctl node secret.",
		Args: atLeast(2, "the name of a target, or NAME=VALUE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args[:1]); err != nil {
				return err
			}
			set, err := assignments(args[1:])
			if err != nil {
				return err
			}
			r, err := a.daemon().SetNodes(cmd.Context(), api.SettingsRequest{Target: f.Target, Portal: f.Portal, Set: set})
			if err != nil {
				return err
			}
			return a.changed(r)
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only the record of this portal")
	return c
}

func (a *app) nodeUnsetCommand() *cobra.Command {
	f := api.NodeFilter{}
	c := &cobra.Command{
		Use: "unset TARGET NAME...", Short: "Take settings back to their defaults",
		Long: "Take settings of the stored records of a target back to their defaults. The name moved_to makes a record forget where the target says it has moved.",
		Args: atLeast(2, "the name of a target, or of a setting"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args[:1]); err != nil {
				return err
			}
			for _, name := range args[1:] {
				if _, err := api.FindSetting(name); err != nil && name != api.MovedTo {
					return err
				}
			}
			r, err := a.daemon().SetNodes(cmd.Context(), api.SettingsRequest{Target: f.Target, Portal: f.Portal, Unset: args[1:]})
			if err != nil {
				return err
			}
			return a.changed(r)
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only the record of this portal")
	return c
}

// secretFlags say which secret, and where it comes from.
type secretFlags struct {
	file     string
	mutual   bool
	remove   bool
	generate bool
}

const secretHelp = "A secret is never an argument, where everybody could read it. It comes from the terminal, without being shown, or from a file\n" +
	"(--file F) or from standard input (--file -), less one newline at the end. It is stored in a file of its own that only root can\n" +
	"read, and never shown again. RFC 7143 wants 12 bytes or more; some targets take no more than 16."

func (s *secretFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&s.file, "file", "", "read the secret from this file, - is standard input")
	c.Flags().BoolVar(&s.mutual, "mutual", false, "the secret with which the target proves itself to us (mutual CHAP)")
	c.Flags().BoolVar(&s.remove, "remove", false, "remove the secret")
	c.Flags().BoolVar(&s.generate, "generate", false, "make a secret of 128 random bits and print it this once, for the target's side")
}

func (s *secretFlags) name() string {
	if s.mutual {
		return api.CHAPTargetSecret
	}
	return api.CHAPSecret
}

// read gets the secret.
func (a *app) readSecret(s *secretFlags) (api.Secret, error) {
	switch {
	case s.remove && s.file != "", s.remove && s.generate, s.file != "" && s.generate:
		return api.Secret{}, api.Errorf(api.ErrInvalidArgs, "--file, --generate and --remove do not go together")
	case s.generate && a.json:
		return api.Secret{}, api.Errorf(api.ErrInvalidArgs, "--generate prints a secret and does not go with --json")
	case s.remove:
		return api.Secret{}, nil
	}
	var b []byte
	var err error
	if s.generate {
		if b, err = login.GenerateSecret(nil); err != nil {
			return api.Secret{}, api.Errorf(api.ErrInternal, "%w", err)
		}
		fmt.Fprintf(a.out, "%s\n", b)
		return api.NewSecret(b), nil
	}
	switch {
	case s.file == "" && !term.IsTerminal(int(os.Stdin.Fd())):
		return api.Secret{}, api.Errorf(api.ErrInvalidArgs, "there is no terminal to ask at; give --file F, or --file - for standard input")
	case s.file == "":
		b, err = promptTwice(a.err, "Secret: ", "Again: ")
	case s.file == "-":
		b, err = readLimited(os.Stdin)
	default:
		var f *os.File
		if f, err = os.Open(s.file); err == nil {
			b, err = readLimited(f)
			_ = f.Close()
		}
	}
	if err != nil {
		return api.Secret{}, api.Wrap(err, api.ErrInvalidArgs, "secret")
	}
	whole := b
	defer clear(whole)
	for _, end := range []byte("\n\r") {
		if n := len(b) - 1; n >= 0 && b[n] == end {
			b = b[:n]
		}
	}
	if err := api.CheckSecret(b); err != nil {
		return api.Secret{}, err
	}
	if len(b) < api.StrongSecret {
		a.warn("warning: RFC 7143 section 9.2.1 wants secrets of %d bytes or more, this has %d", api.StrongSecret, len(b))
	}
	return api.NewSecret(b), nil
}

func readLimited(r io.Reader) ([]byte, error) {
	return io.ReadAll(io.LimitReader(r, api.MaxSecretLen+3))
}

// promptTwice asks at the terminal, twice because nobody sees what is typed.
func promptTwice(out io.Writer, first, second string) ([]byte, error) {
	ask := func(prompt string) ([]byte, error) {
		fmt.Fprint(out, prompt)
		defer fmt.Fprintln(out)
		return term.ReadPassword(int(os.Stdin.Fd()))
	}
	b, err := ask(first)
	if err != nil {
		return nil, err
	}
	again, err := ask(second)
	if err == nil && !slices.Equal(b, again) {
		err = fmt.Errorf("the two are different")
	}
	clear(again)
	return b, err
}

func (a *app) nodeSecretCommand() *cobra.Command {
	f := api.NodeFilter{}
	s := secretFlags{}
	c := &cobra.Command{
		Use: "secret TARGET", Short: "Store the CHAP secret for a target", Long: "Store the CHAP secret for the stored records of a target.\n\n" + secretHelp,
		Args: exactly(1, "the name of a target"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := filterArgs(&f, args); err != nil {
				return err
			}
			secret, err := a.readSecret(&s)
			if err != nil {
				return err
			}
			r, err := a.daemon().SetNodeSecret(cmd.Context(), api.SecretRequest{Target: f.Target, Portal: f.Portal, Name: s.name(), Secret: secret})
			if err != nil {
				return err
			}
			return a.changed(r)
		},
	}
	c.Flags().StringVar(&f.Portal, "portal", "", "only the record of this portal")
	s.add(c)
	return c
}

// portalArg reads the address of a portal.
func portalArg(args []string) (string, error) {
	p, err := api.ParsePortal(args[0])
	return p.String(), err
}

// portalChanged says what became of a portal's record.
func (a *app) portalChanged(r api.PortalsReply, verb string) error {
	if a.json {
		return a.print(r)
	}
	for i := range r.Portals {
		fmt.Fprintf(a.out, "%s discovery at %s.\n", verb, r.Portals[i].Portal())
	}
	return nil
}

func (a *app) discoverySetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "set ADDR[:PORT] NAME=VALUE...", Short: "Change how a portal is asked",
		Long: "Change how a portal is asked for its targets, from the next discovery on. Where connections come from (source_address,\n" +
			"network_interface, rdma_device) also goes into the records that discover --save makes.\n\n" + settingsHelp(true) +
			"\nSecrets are no settings: iserctl discovery secret.",
		Args: atLeast(2, "the address of a portal, or NAME=VALUE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			portal, err := portalArg(args)
			if err != nil {
				return err
			}
			set, err := assignments(args[1:])
			if err != nil {
				return err
			}
			r, err := a.daemon().SetPortal(cmd.Context(), api.SettingsRequest{Portal: portal, Set: set})
			if err != nil {
				return err
			}
			return a.portalChanged(r, "Changed")
		},
	}
}

func (a *app) discoveryUnsetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "unset ADDR[:PORT] NAME...", Short: "Take settings back to their defaults", Args: atLeast(2, "the address of a portal, or the name of a setting"),
		RunE: func(cmd *cobra.Command, args []string) error {
			portal, err := portalArg(args)
			if err != nil {
				return err
			}
			r, err := a.daemon().SetPortal(cmd.Context(), api.SettingsRequest{Portal: portal, Unset: args[1:]})
			if err != nil {
				return err
			}
			return a.portalChanged(r, "Changed")
		},
	}
}

func (a *app) discoverySecretCommand() *cobra.Command {
	s := secretFlags{}
	c := &cobra.Command{
		Use: "secret ADDR[:PORT]", Short: "Store the CHAP secret for discoveries at a portal", Long: "Store the CHAP secret for discoveries at a portal.\n\n" + secretHelp,
		Args: exactly(1, "the address of a portal"),
		RunE: func(cmd *cobra.Command, args []string) error {
			portal, err := portalArg(args)
			if err != nil {
				return err
			}
			secret, err := a.readSecret(&s)
			if err != nil {
				return err
			}
			r, err := a.daemon().SetPortalSecret(cmd.Context(), api.SecretRequest{Portal: portal, Name: s.name(), Secret: secret})
			if err != nil {
				return err
			}
			return a.portalChanged(r, "Changed")
		},
	}
	s.add(c)
	return c
}

func (a *app) discoveryDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use: "delete ADDR[:PORT]", Short: "Forget how a portal is asked, secrets included", Args: exactly(1, "the address of a portal"),
		RunE: func(cmd *cobra.Command, args []string) error {
			portal, err := portalArg(args)
			if err != nil {
				return err
			}
			r, err := a.daemon().DeletePortal(cmd.Context(), portal)
			if err != nil {
				return err
			}
			return a.portalChanged(r, "Removed what was stored for")
		},
	}
}

func (a *app) discoveryShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show [ADDR[:PORT]]", Short: "Show how portals are asked", Args: atMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := a.daemon().Portals(cmd.Context())
			if err != nil {
				return err
			}
			if len(args) > 0 {
				portal, err := portalArg(args)
				if err != nil {
					return err
				}
				r.Portals = slices.DeleteFunc(r.Portals, func(p api.PortalRecord) bool { return p.Portal().String() != portal })
				if len(r.Portals) == 0 {
					return api.Errorf(api.ErrNotFound, "nothing is stored for discoveries at %s; it is asked with the defaults", portal)
				}
			}
			if a.json {
				return a.print(r)
			}
			for _, p := range r.Problems {
				a.warn("%s", p)
			}
			if len(r.Portals) == 0 {
				a.warn("nothing is stored; portals are asked with the defaults")
			}
			for i := range r.Portals {
				if i > 0 {
					fmt.Fprintln(a.out)
				}
				t := newTable(a.out)
				t.row("portal", r.Portals[i].Portal().String())
				settingRows(t, &r.Portals[i].Settings, r.Portals[i].Secrets, true)
				if err := t.flush(); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
