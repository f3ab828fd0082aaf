package main

import (
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/config"
)

// dataPlaneCommand makes the command by which a service manager starts the data plane: this process becomes it, with the options of the configuration.
func dataPlaneCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "data-plane",
		Short: "Become the data plane, iserd-io, as it is configured: for a service manager that starts it instead of iserd",
		Long: "Become the data plane, iserd-io, with the options of the configuration. Options in which something is wrong are logged and take what they\n" +
			"had without that: devices that wait for a data plane must not wait for somebody who mends a file.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return api.Errorf(api.ErrInvalidArgs, "unexpected argument %q", args[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error { return becomeDataPlane(f) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.runDir, "run-dir", "/run/iserd", "sockets and the state of this boot")
	fl.StringVar(&f.configFile, "config", "", "read this file instead of /etc/iserd/iserd.toml and its drop-ins")
	config.AddFlags(fl)
	f.options = fl
	return cmd
}

func becomeDataPlane(f flags) error {
	l, err := f.load()
	if err != nil {
		log := newLogger(l.Config.LogLevel)
		for _, p := range config.ProblemsOf(err) {
			log.Error(p)
		}
		log.Error("the data plane starts without what is wrong in the configuration")
	}
	if l.Config.DataPlane == "none" { // this is who starts it
		l.Config.DataPlane = ""
	}
	cmd, err := dataPlane(l.Config, f.runDir)
	if err != nil {
		return api.Errorf(api.ErrNotFound, "%w", err)
	}
	return api.Errorf(api.ErrInternal, "%s: %w", cmd.Path, syscall.Exec(cmd.Path, cmd.Args, os.Environ()))
}
