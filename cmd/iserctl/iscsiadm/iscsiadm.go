// Package iscsiadm understands the command line of open-iscsi's iscsiadm(8) and carries it out with iserd: the programs that call iscsiadm and
// read its lines and exit codes (os-brick, csi-lib-iscsi, Ansible) work with targets that iserd serves. docs/iscsiadm.md lists what is different.
//
// The words are those of open-iscsi 2.1.11, the one in Debian 13. Standard output carries what iscsiadm prints there; errors and warnings go to
// standard error with "iscsiadm: " in front. A record is a record of the daemon, a session is a session group, an iface is a transport: "default"
// is whatever the record says, "iser" is RDMA.
package iscsiadm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"iserd.org/iserd/api"
)

// Name is the base name of a program that is this one.
const Name = "iscsiadm"

// Daemon is what is needed of iserd; *client.Client has it.
type Daemon interface {
	Discover(context.Context, api.DiscoverRequest) (api.TargetsReply, error)
	Login(context.Context, api.LoginRequest) (api.LoginReply, error)
	Logout(context.Context, api.LogoutRequest) (api.LogoutReply, error)
	Rescan(context.Context, api.RescanRequest) (api.RescanReply, error)
	Nodes(context.Context, api.NodeFilter) (api.NodesReply, error)
	AddNode(ctx context.Context, target, portal string) (api.NodesReply, error)
	DeleteNodes(context.Context, api.NodeFilter) (api.NodesReply, error)
	SetNodes(context.Context, api.SettingsRequest) (api.NodesReply, error)
	SetNodeSecret(context.Context, api.SecretRequest) (api.NodesReply, error)
	Sessions(context.Context) (api.SessionsReply, error)
	Devices(context.Context) (api.DevicesReply, error)
	Portals(context.Context) (api.PortalsReply, error)
	SetPortal(context.Context, api.SettingsRequest) (api.PortalsReply, error)
	SetPortalSecret(context.Context, api.SecretRequest) (api.PortalsReply, error)
	DeletePortal(ctx context.Context, portal string) (api.PortalsReply, error)
	Firmware(context.Context, api.FirmwareRequest) (api.FirmwareReply, error)
}

// Run carries out a command line, without the name of the program, and returns the exit code.
func Run(ctx context.Context, d Daemon, args []string, stdout, stderr io.Writer) int {
	r := &run{d: d, out: stdout, err: stderr}
	c, end := parse(args)
	if end != nil {
		for _, line := range end.errs {
			r.fail("%s", line)
		}
		fmt.Fprint(stdout, end.out)
		return end.code
	}
	r.call = c
	err := r.do(ctx)
	if err == nil {
		return 0
	}
	var code exit
	if errors.As(err, &code) {
		return int(code)
	}
	r.trouble(err)
	return codeOf(err)
}

// exit is an exit code whose reason is printed already.
type exit int

func (e exit) Error() string { return message(int(e)) }

// run is one call.
type run struct {
	call
	d        Daemon
	out, err io.Writer
}

// do leaves the errors of the daemon, which are not printed yet, and those of type exit, which are.
func (r *run) do(ctx context.Context) error {
	switch {
	case r.kill:
		return r.unsupported("iserd is stopped with: systemctl stop iserd")
	case r.sub != "":
		return r.unsupported("there is no adapter with a configuration of its own, so no submode %s", r.sub)
	}
	switch r.mode {
	case modeDiscovery, modeDiscoveryDB:
		return r.discovery(ctx)
	case modeNode:
		return r.node(ctx)
	case modeSession:
		return r.session(ctx)
	case modeIface:
		return r.iface(ctx)
	case modeHost:
		return r.hosts(ctx)
	}
	return r.firmware(ctx)
}

// fail prints a line on standard error.
func (r *run) fail(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if text, ok := strings.CutPrefix(line, plain); ok {
		fmt.Fprintln(r.err, text)
		return
	}
	fmt.Fprintln(r.err, "iscsiadm: "+line)
}

// print prints on standard output.
func (r *run) print(format string, args ...any) { fmt.Fprintf(r.out, format, args...) }

// refuse is fail with an exit code.
func (r *run) refuse(code int, format string, args ...any) error {
	r.fail(format, args...)
	return exit(code)
}

// unsupported refuses what the daemon cannot do.
func (r *run) unsupported(format string, args ...any) error {
	return r.refuse(codeNotSupported, "%s: %s", message(codeNotSupported), fmt.Sprintf(format, args...))
}

// trouble prints what the daemon says. One that cannot be asked has iscsiadm's words in front.
func (r *run) trouble(err error) {
	text := strings.Join(strings.Fields(err.Error()), " ")
	if api.Is(err, api.ErrDaemonUnreachable) {
		text = "can not connect to iSCSI daemon: " + text
	}
	r.fail("%s", text)
}

// detail prints the daemon's reason when -d asks for more than iscsiadm's own words, or when there is nobody to give those.
func (r *run) detail(err error) {
	if r.debug > 0 || api.Is(err, api.ErrDaemonUnreachable) {
		r.trouble(err)
	}
}

// address formats an address as iscsiadm does: with brackets if it has no dot.
func address(a string, port int) string {
	if strings.Contains(a, ".") {
		return fmt.Sprintf("%s:%d", a, port)
	}
	return fmt.Sprintf("[%s]:%d", a, port)
}

// or is text, or <empty>.
func or(text string) string {
	if text == "" {
		return empty
	}
	return text
}
