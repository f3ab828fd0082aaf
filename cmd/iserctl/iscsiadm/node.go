package iscsiadm

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"iserd.org/iserd/api"
)

// Ifaces that there are.
const (
	ifaceDefault = "default"
	ifaceISER    = "iser"
)

// ifaceOf is the iface of a record.
func ifaceOf(n *api.Node) string {
	if n.Settings.Transport == api.TransportISER {
		return ifaceISER
	}
	return ifaceDefault
}

// transportOf is the transport of an iface.
func transportOf(iface string) string {
	if iface == ifaceISER {
		return "iser"
	}
	return "tcp"
}

// knownIface is the iface that was asked for, "" for none. iscsiadm takes the first of several.
func (r *run) knownIface(code int) (string, error) {
	if len(r.ifaces) == 0 {
		return "", nil
	}
	if len(r.ifaces) > 1 {
		r.fail("%s mode only accepts one interface. Using the first one %s.", strings.ToUpper(string(r.mode)), r.ifaces[0])
	}
	if n := r.ifaces[0]; n == ifaceDefault || n == ifaceISER {
		return n, nil
	}
	return "", r.refuse(code, "Could not read iface info for %s.", r.ifaces[0])
}

// filter selects records and sessions.
type filter struct {
	target  string
	address string // "" any
	port    int    // noPort any
	iface   string
}

// canonical makes addresses comparable.
func canonical(a string) string {
	if ip, err := netip.ParseAddr(a); err == nil {
		return ip.Unmap().String()
	}
	return strings.ToLower(a)
}

func (f *filter) matches(target, addr string, port uint16, iface string) bool {
	return (f.target == "" || f.target == target) && (f.address == "" || canonical(f.address) == canonical(addr)) &&
		(f.port == noPort || f.port == int(port)) && (f.iface == "" || f.iface == iface)
}

func (f *filter) node(n *api.Node) bool { return f.matches(n.Target, n.Address, n.Port, ifaceOf(n)) }

// session does not look at the iface: a record with the iface "default" may be logged in over RDMA.
func (f *filter) session(s *api.Session) bool {
	x := *f
	x.iface = ""
	return x.matches(s.Target, s.Address, s.Port, "")
}

// nodes lists the records that match.
func (r *run) nodes(ctx context.Context, f filter) ([]api.Node, error) {
	reply, err := r.d.Nodes(ctx, api.NodeFilter{})
	if err != nil {
		return nil, err
	}
	for _, p := range reply.Problems {
		r.fail("%s", p)
	}
	return slices.DeleteFunc(reply.Nodes, func(n api.Node) bool { return !f.node(&n) }), nil
}

// someNodes is nodes, and no record is an error.
func (r *run) someNodes(ctx context.Context, f filter) ([]api.Node, error) {
	list, err := r.nodes(ctx, f)
	if err == nil && len(list) == 0 {
		err = r.refuse(codeNotFound, "No records found")
	}
	return list, err
}

// sessions lists the sessions that match.
func (r *run) sessions(ctx context.Context, f filter) ([]api.Session, error) {
	reply, err := r.d.Sessions(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(reply.Sessions, func(s api.Session) bool { return !f.session(&s) }), nil
}

// node is -m node.
func (r *run) node(ctx context.Context) error {
	switch {
	case r.loginAll != nil:
		return r.loginByStartup(ctx, *r.loginAll)
	case r.logoutAll != nil:
		return r.logoutByStartup(ctx, *r.logoutAll)
	}
	iface, err := r.knownIface(codeNoMemory)
	if err != nil {
		return err
	}
	f := filter{r.target, r.address, r.port, iface}
	if f.address != "" && f.port == noPort {
		f.port = api.DefaultPort
	}
	return r.records(ctx, f)
}

// records does what node mode does with the records and sessions that match.
func (r *run) records(ctx context.Context, f filter) error {
	all := f.target == "" && f.address == "" && f.iface == ""
	switch {
	case r.op == opNew:
		return r.newRecord(ctx, f)
	case r.rescan:
		return r.eachSession(ctx, f, r.rescanSession)
	case r.stats:
		return r.eachSession(ctx, f, r.sessionStats)
	case r.login && r.logout:
		return r.refuse(codeInvalid, "Invalid parameters. Both login and logout passed in")
	case (r.login || r.logout) && r.op != 0:
		return r.refuse(codeInvalid, "Invalid parameters. Login/logout and op passed in")
	case r.login:
		list, err := r.someNodes(ctx, f)
		if err != nil {
			return err
		}
		return r.loginAllOf(ctx, list)
	case r.logout:
		list, err := r.sessions(ctx, f)
		if err != nil {
			return err
		}
		return r.logoutAllOf(ctx, list)
	case r.op == 0 && all:
		return r.printNodes(ctx)
	case r.op == 0, r.op == opShow:
		list, err := r.someNodes(ctx, f)
		for i := range list {
			r.dumpNode(&list[i])
		}
		return err
	case r.op == opUpdate:
		return r.update(ctx, f)
	case r.op == opDelete:
		return r.deleteRecords(ctx, f)
	}
	return r.refuse(codeInvalid, "operation is not supported.")
}

func (r *run) printNodes(ctx context.Context) error {
	if r.level > 1 || r.level < -1 {
		return r.refuse(codeInvalid, "Invalid info level %d. Try 0 or 1.", r.level)
	}
	list, err := r.someNodes(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	if r.level == 1 {
		r.tree(list, "", true)
		return nil
	}
	for _, n := range list {
		// The tag is unsigned in this line, so that none is 4294967295, and signed in all others.
		r.print("%s,%d %s\n", address(n.Address, int(n.Port)), uint32(n.TPGT), n.Target)
	}
	return nil
}

// tree prints records below their targets.
func (r *run) tree(list []api.Node, indent string, ifaces bool) {
	last := ""
	for i := range list {
		n := &list[i]
		if n.Target != last {
			r.print("%sTarget: %s\n", indent, n.Target)
			last = n.Target
		}
		r.print("%s\tPortal: %s,%d\n", indent, address(n.Address, int(n.Port)), n.TPGT)
		if ifaces {
			r.print("%s\t\tIface Name: %s\n", indent, ifaceOf(n))
		}
	}
}

func (r *run) field(name, value string) { r.print("%s = %s\n", name, or(value)) }

// dumpNode prints a record.
func (r *run) dumpNode(n *api.Node) {
	iser := n.Settings.Transport == api.TransportISER
	own := map[string]string{
		"node.name": n.Target, "node.tpgt": fmt.Sprint(n.TPGT), "node.startup": n.Startup,
		"node.conn[0].address": n.Address, "node.conn[0].port": fmt.Sprint(n.Port),
	}
	if p, err := api.ParsePortal(n.Source); err == nil && n.Source != "" {
		own["node.discovery_address"], own["node.discovery_port"], own["node.discovery_type"] = p.Address, fmt.Sprint(p.Port), "send_targets"
	}
	show := func(keys []key) {
		for i := range keys {
			k := &keys[i]
			value, ok := own[k.name]
			if !ok {
				value = k.show(&n.Settings, n.Secrets, iser)
			}
			r.field(k.name, value)
		}
	}
	r.print("# BEGIN RECORD %s\n", recordVersion)
	show(headKeys)
	r.ifaceFields(ifaceOf(n))
	show(nodeKeys)
	r.print("# END RECORD\n")
}

// newRecord is -o new. A record that exists keeps what was set.
func (r *run) newRecord(ctx context.Context, f filter) error {
	const cannot = "Error while adding record: %s"
	if f.target == "" || f.address == "" {
		r.fail(cannot, message(codeInvalid))
		return r.refuse(codeInvalid, "a new record needs a target and a portal: -T TARGET -p ADDR")
	}
	portal := api.Portal{Address: f.address, Port: uint16(f.port)}
	if f.port < 1 || f.port > 65535 {
		return r.refuse(codeInvalid, cannot, message(codeInvalid))
	}
	_, err := r.d.AddNode(ctx, f.target, portal.String())
	if err == nil && f.iface == ifaceISER {
		_, err = r.d.SetNodes(ctx, api.SettingsRequest{Target: f.target, Portal: portal.String(), Set: map[string]string{"transport": api.TransportISER}})
	}
	if err != nil {
		r.fail(cannot, message(codeOf(err)))
		r.trouble(err)
		return exit(codeOf(err))
	}
	iface := f.iface
	if iface == "" {
		iface = ifaceDefault
	}
	r.print("New iSCSI node [%s:[hw=,ip=,net_if=,iscsi_if=%s] %s,%d,%d %s] added\n", transportOf(iface), iface, f.address, f.port, r.tpgt, f.target)
	return nil
}

const notAll = "Could not execute operation on all records: %s"

// update is -o update.
func (r *run) update(ctx context.Context, f filter) error {
	if len(r.params) == 0 {
		return r.refuse(codeInvalid, "update requires name and value")
	}
	params := slices.Clone(r.params)
	for i := range params {
		p := &params[i]
		if p.name == "node.transport_name" {
			p.name = "iface.transport_name"
		}
		if strings.HasPrefix(p.name, "iface.") && p.name != "iface.transport_name" {
			return r.refuse(codeInvalid, "Cannot modify %s. Use iface mode to update this value.", p.name)
		}
		if p.name == "iface.transport_name" {
			list, err := r.sessions(ctx, f)
			if err != nil {
				return err
			}
			if len(list) > 0 {
				return r.refuse(codeSessionExists, "Cannot modify node/iface transport name while a session is using it. Log out the session then update record.")
			}
		}
	}
	list, err := r.someNodes(ctx, f)
	if err != nil {
		return err
	}
	var c change
	for _, p := range params {
		if bad := c.add(p, headKeys, nodeKeys, silentKeys); bad != nil {
			for _, line := range bad {
				r.fail("%s", line)
			}
			return r.refuse(codeInvalid, notAll, message(codeInvalid))
		}
	}
	for i := range list {
		target, portal := list[i].Target, list[i].Portal().String()
		if len(c.set)+len(c.unset) > 0 {
			if _, err := r.d.SetNodes(ctx, api.SettingsRequest{Target: target, Portal: portal, Set: c.set, Unset: c.unset}); err != nil {
				return r.notAllRecords(err)
			}
		}
		for _, s := range c.secrets {
			if _, err := r.d.SetNodeSecret(ctx, api.SecretRequest{Target: target, Portal: portal, Name: s.name, Secret: s.value}); err != nil {
				return r.notAllRecords(err)
			}
		}
	}
	for _, n := range c.notes {
		r.fail("%s", n)
	}
	return nil
}

func (r *run) notAllRecords(err error) error {
	r.trouble(err)
	return r.refuse(codeOf(err), notAll, message(codeOf(err)))
}

// deleteRecords is -o delete.
func (r *run) deleteRecords(ctx context.Context, f filter) error {
	list, err := r.someNodes(ctx, f)
	if err != nil {
		return err
	}
	live, err := r.sessions(ctx, f)
	if err != nil {
		return err
	}
	for i := range list {
		n := &list[i]
		own := filter{n.Target, n.Address, int(n.Port), ""}
		if slices.ContainsFunc(live, func(s api.Session) bool { return own.session(&s) }) {
			r.fail("This command will remove the record [iface: %s, target: %s, portal: %s,%d], but a session is using it. "+
				"Logout session then rerun command to remove record.", ifaceOf(n), n.Target, n.Address, n.Port)
			return r.refuse(codeSessionExists, notAll, message(codeSessionExists))
		}
		if _, err := r.d.DeleteNodes(ctx, api.NodeFilter{Target: n.Target, Portal: n.Portal().String()}); err != nil {
			return r.notAllRecords(err)
		}
	}
	return nil
}

// loginByStartup is -L.
func (r *run) loginByStartup(ctx context.Context, when string) error {
	if when != "all" && !slices.Contains(startups(), when) {
		r.fail("Invalid loginall option %s.", when)
		return r.refuse(codeInvalid, tryHelp)
	}
	list, err := r.nodes(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(n api.Node) bool { return when != "all" && n.Startup != when })
	if len(list) == 0 {
		return r.refuse(codeNotFound, "No records found")
	}
	return r.loginAllOf(ctx, list)
}

// logoutByStartup is -U.
func (r *run) logoutByStartup(ctx context.Context, when string) error {
	if when != "all" && when != "automatic" && when != "manual" {
		r.fail("Invalid logoutall option %s.", when)
		return r.refuse(codeInvalid, tryHelp)
	}
	list, err := r.sessions(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	nodes, err := r.nodes(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	return r.logoutAllOf(ctx, slices.DeleteFunc(list, func(s api.Session) bool {
		return !slices.ContainsFunc(nodes, func(n api.Node) bool {
			return n.Target == s.Target && n.Portal() == (api.Portal{Address: s.Address, Port: s.Port}) && (when == "all" || n.Startup == when)
		})
	}))
}

// attempt is one record's login.
type attempt struct {
	node *api.Node
	err  error
	idle bool // another record of the target has the session
}

// loginAllOf logs in to records: all targets at once, the records of one target one after the other until one has a session, since a target has one
// session, which uses its other portals by itself.
func (r *run) loginAllOf(ctx context.Context, list []api.Node) error {
	live, err := r.d.Sessions(ctx)
	if err != nil {
		return err
	}
	code := 0
	up := map[string]*api.Session{}
	for i := range live.Sessions {
		if s := &live.Sessions[i]; s.State != api.SessionFailed { // a failed one gives way to a login
			up[s.Target] = s
		}
	}
	targets := map[string][]*attempt{}
	var all []*attempt
	for i := range list {
		n := &list[i]
		if s := up[n.Target]; s != nil {
			switch {
			case at(n, s):
				r.fail("%s: 1 session requested, but 1 already present.", ifaceOf(n))
				code = codeSessionExists
			case !slices.ContainsFunc(list, func(o api.Node) bool { return o.Target == n.Target && at(&o, s) }):
				r.elsewhere(&attempt{node: n}, s)
				code = cmp.Or(code, codeNotSupported)
			}
			continue
		}
		a := &attempt{node: n}
		all = append(all, a)
		targets[n.Target] = append(targets[n.Target], a)
	}
	var wg sync.WaitGroup
	var say sync.Mutex
	for _, of := range targets {
		wg.Add(1)
		go func() {
			defer wg.Done()
			done := false
			for _, a := range of {
				if a.idle = done; done {
					continue
				}
				if r.debug > 0 {
					say.Lock()
					r.print("Logging in to [%s]\n", a)
					say.Unlock()
				}
				_, a.err = r.d.Login(ctx, api.LoginRequest{Target: a.node.Target, Portal: a.node.Portal().String()})
				done = a.err == nil
			}
		}()
	}
	wg.Wait()
	for _, a := range all {
		if a.idle {
			continue
		}
		if a.err == nil {
			r.print("Login to [%s] successful.\n", a)
			continue
		}
		if api.Is(a.err, api.ErrAlreadyLoggedIn) { // another program was faster: perhaps through another portal
			live, err := r.d.Sessions(ctx)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(live.Sessions, func(s api.Session) bool { return s.Target == a.node.Target })
			if i >= 0 && !at(a.node, &live.Sessions[i]) {
				r.elsewhere(a, &live.Sessions[i])
				code = cmp.Or(code, codeNotSupported)
				continue
			}
		}
		c := loginCode(a.err)
		r.fail("Could not login to [%s].", a)
		r.fail("initiator reported error (%d - %s)", c, message(c))
		r.detail(a.err)
		code = cmp.Or(code, c)
	}
	if code != 0 {
		return r.refuse(code, "Could not log into all portals")
	}
	return nil
}

// at tells whether a session was made with the portal of a record.
func at(n *api.Node, s *api.Session) bool {
	return n.Portal() == api.Portal{Address: s.Address, Port: s.Port}
}

// elsewhere reports a login to a target that is logged in through another portal. It is not "session exists": os-brick takes that as success and then
// looks for this portal in the list of sessions for ever.
func (r *run) elsewhere(a *attempt, s *api.Session) {
	r.fail("Could not login to [%s].", a)
	r.fail("initiator reported error (%d - %s)", codeNotSupported, message(codeNotSupported))
	r.fail("%s is logged in at %s; a target has one session, which uses its other portals by itself", a.node.Target, address(s.Address, int(s.Port)))
}

func (a *attempt) String() string {
	return fmt.Sprintf("iface: %s, target: %s, portal: %s,%d", ifaceOf(a.node), a.node.Target, a.node.Address, a.node.Port)
}
