package iscsiadm

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"iserd.org/iserd/api"
)

// session is -m session.
func (r *run) session(ctx context.Context) error {
	if r.sid < 0 {
		switch {
		case r.op == opNew:
			return r.refuse(codeInvalid, "session mode: Operation 'new' only allowed with specific session IDs")
		case r.logout, r.rescan, r.stats:
			return r.records(ctx, filter{port: noPort})
		}
		list, err := r.sessions(ctx, filter{port: noPort})
		if err != nil {
			return err
		}
		if len(list) == 0 {
			return r.refuse(codeNotFound, "No active sessions.")
		}
		return r.printSessions(ctx, list)
	}
	list, err := r.sessions(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	for _, s := range list {
		if s.ID != r.sid {
			continue
		}
		switch {
		case r.op == opNew:
			return r.unsupported("a target has one session; the number of its connections follows from the threads of the data plane")
		case !r.logout && !r.rescan && !r.stats && r.op == 0 && r.level > 0:
			return r.printSessions(ctx, []api.Session{s})
		}
		return r.records(ctx, filter{s.Target, s.Address, int(s.Port), ""})
	}
	return r.refuse(codeSysfs, "Could not get session info for sid %d", r.sid)
}

// identity is how messages name a session.
func identity(s *api.Session) string {
	return fmt.Sprintf("sid: %d, target: %s, portal: %s,%d", s.ID, s.Target, s.Address, s.Port)
}

// stateNames are the words for the states of a session: that of the connection, that of the session in sysfs, and what the daemon does.
func stateNames(state string) (connection, session, daemon string) {
	switch state {
	case api.SessionUp:
		return "LOGGED IN", "LOGGED_IN", "NO CHANGE"
	case api.SessionLogin:
		return "IN LOGIN", "FREE", "NO CHANGE"
	case api.SessionClosing:
		return "IN LOGOUT", "LOGGED_IN", "CLEANUP"
	case api.SessionRecovering:
		return "TRANSPORT WAIT", "FAILED", "REOPEN"
	}
	return "FREE", "FAILED", "CLEANUP"
}

func (r *run) printSessions(ctx context.Context, list []api.Session) error {
	if r.level > 3 || r.level < -1 {
		return r.refuse(codeInvalid, "Invalid info level %d. Try 0 - 3.", r.level)
	}
	if r.level < 1 {
		for i := range list {
			s := &list[i]
			r.print("%s: [%d] %s,%d %s (non-flash)\n", s.Transport, s.ID, address(s.Address, int(s.Port)), s.TPGT, s.Target)
		}
		return nil
	}
	nodes, err := r.nodes(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	var devices map[string]string
	if r.level == 3 {
		reply, err := r.d.Devices(ctx)
		if err != nil {
			return err
		}
		devices = map[string]string{}
		for _, d := range reply.Devices {
			devices[d.Path] = d.State
		}
		r.print("version %s\n", recordVersion)
	}
	last := ""
	for i := range list {
		s := &list[i]
		if s.Target != last {
			r.print("Target: %s (non-flash)\n", s.Target)
			last = s.Target
		}
		var n *api.Node
		for i := range nodes {
			if nodes[i].ID == s.Node {
				n = &nodes[i]
			}
		}
		r.sessionTree(s, n, devices)
	}
	return nil
}

// sessionTree prints a session. n is its record, nil when there is none any more.
func (r *run) sessionTree(s *api.Session, n *api.Node, devices map[string]string) {
	at := api.Portal{Address: s.Address, Port: s.Port}
	local := ""
	var negotiated map[string]string
	if len(s.Connections) > 0 {
		c := &s.Connections[0]
		if p, err := api.ParsePortal(c.Portal); err == nil && c.Portal != "" {
			at = p
		}
		local, negotiated = host(c.LocalAddress), c.Negotiated
	}
	iface := ifaceDefault
	if s.Transport == api.TransportISER {
		iface = ifaceISER
	}
	var how api.Settings
	var secrets []string
	if n != nil {
		iface, how, secrets = ifaceOf(n), n.Settings, n.Secrets
	}
	line := func(format string, args ...any) { r.print("\t\t"+format+"\n", args...) }
	title := func(text string, width int) {
		stars := strings.Repeat("*", width)
		line("%s", stars)
		line("%s", text)
		line("%s", stars)
	}
	r.print("\tCurrent Portal: %s,%d\n", address(at.Address, int(at.Port)), s.TPGT)
	r.print("\tPersistent Portal: %s,%d\n", address(s.Address, int(s.Port)), s.TPGT)
	title("Interface:", 10)
	line("Iface Name: %s", iface)
	line("Iface Transport: %s", s.Transport)
	line("Iface Initiatorname: %s", or(s.InitiatorName))
	if strings.Contains(local, ":") {
		local = "[" + local + "]"
	}
	line("Iface IPaddress: %s", or(local))
	line("Iface HWaddress: %s", ifaceDefault)
	line("Iface Netdev: %s", cmp.Or(how.NetworkInterface, ifaceDefault))
	connection, state, daemon := stateNames(s.State)
	line("SID: %d", s.ID)
	line("iSCSI Connection State: %s", connection)
	line("iSCSI Session State: %s", state)
	line("Internal iscsid Session State: %s", daemon)
	if r.level < 2 {
		return
	}
	iser := s.Transport == api.TransportISER
	value := func(name string) string { return or(find(name, nodeKeys).show(&how, secrets, iser)) }
	title("Timeouts:", 9)
	line("Recovery Timeout: %s", value("node.session.timeo.replacement_timeout"))
	line("Target Reset Timeout: %s", empty)
	line("LUN Reset Timeout: %s", empty)
	line("Abort Timeout: %s", empty)
	title("CHAP:", 5)
	line("username: %s", value("node.session.auth.username"))
	line("password: %s", masked)
	line("username_in: %s", value("node.session.auth.username_in"))
	line("password_in: %s", masked)
	title("Negotiated iSCSI params:", 24)
	for _, name := range []string{"HeaderDigest", "DataDigest", "MaxRecvDataSegmentLength", "MaxXmitDataSegmentLength", "FirstBurstLength", "MaxBurstLength",
		"ImmediateData", "InitialR2T", "MaxOutstandingR2T"} {
		if v := negotiated[name]; v != "" {
			line("%s: %s", name, v)
		}
	}
	if r.level < 3 {
		return
	}
	title("Attached SCSI devices:", 24)
	line("Host Number: %d\tState: running", s.ID)
	for _, u := range s.Units {
		line("scsi%d Channel 00 Id 0 Lun: %d", s.ID, u.LUN)
		if u.Device != "" {
			state := "running"
			if d, ok := devices[u.Device]; !ok || d != api.DeviceLive {
				state = "blocked"
			}
			if devices[u.Device] == api.DeviceDead {
				state = "offline"
			}
			line("\tAttached scsi disk %s\t\tState: %s", strings.TrimPrefix(u.Device, "/dev/"), state)
		}
	}
}

// host is the address of ADDR:PORT, or of ADDR.
func host(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		return h
	}
	return s
}

// eachSession does something with every session that matches.
func (r *run) eachSession(ctx context.Context, f filter, do func(context.Context, *api.Session) error) error {
	list, err := r.sessions(ctx, f)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return r.refuse(codeNotFound, "No session found.")
	}
	var first error
	for i := range list {
		if err := do(ctx, &list[i]); err != nil && first == nil {
			first = err
		}
	}
	if first != nil {
		return r.refuse(codeOf(first), "Could not execute operation on all sessions: %s", message(codeOf(first)))
	}
	return nil
}

func (r *run) rescanSession(ctx context.Context, s *api.Session) error {
	r.print("Rescanning session [%s]\n", identity(s))
	reply, err := r.d.Rescan(ctx, api.RescanRequest{Session: strconv.Itoa(s.ID)})
	for _, x := range reply.Sessions {
		if err == nil && x.Error != nil {
			err = x.Error
		}
	}
	if err != nil {
		r.fail("Could not rescan session sid %d.", s.ID)
		r.detail(err)
	}
	return err
}

// sessionStats prints the counters of a session: what the devices count, in the names of the kernel's initiator.
func (r *run) sessionStats(ctx context.Context, s *api.Session) error {
	reply, err := r.d.Devices(ctx)
	if err != nil {
		return err
	}
	var sum api.DeviceStats
	for _, d := range reply.Devices {
		if d.SessionID == s.ID {
			sum.Reads += d.Stats.Reads
			sum.Writes += d.Stats.Writes + d.Stats.Flushes + d.Stats.Discards + d.Stats.Zeroes
			sum.ReadBytes += d.Stats.ReadBytes
			sum.WriteBytes += d.Stats.WriteBytes
		}
	}
	var tasks, timeouts uint64
	for _, c := range s.Connections {
		tasks += c.Aborts + c.Resets
		timeouts += c.Drops
	}
	r.print("Stats for session [%s]\niSCSI SNMP:\n", identity(s))
	commands := sum.Reads + sum.Writes
	for _, x := range []struct {
		name  string
		value uint64
	}{
		{"txdata_octets", sum.WriteBytes}, {"rxdata_octets", sum.ReadBytes}, {"noptx_pdus", 0}, {"scsicmd_pdus", commands}, {"tmfcmd_pdus", tasks},
		{"login_pdus", 0}, {"text_pdus", 0}, {"dataout_pdus", 0}, {"logout_pdus", 0}, {"snack_pdus", 0}, {"noprx_pdus", 0}, {"scsirsp_pdus", commands},
		{"tmfrsp_pdus", 0}, {"textrsp_pdus", 0}, {"datain_pdus", 0}, {"logoutrsp_pdus", 0}, {"r2t_pdus", 0}, {"async_pdus", 0}, {"rjt_pdus", 0},
		{"digest_err", 0}, {"timeout_err", timeouts},
	} {
		r.print("\t%s: %d\n", x.name, x.value)
	}
	return nil
}

// logoutAllOf logs out of sessions.
func (r *run) logoutAllOf(ctx context.Context, list []api.Session) error {
	if len(list) == 0 {
		return r.refuse(codeNotFound, "No matching sessions found")
	}
	for i := range list {
		r.print("Logging out of session [%s]\n", identity(&list[i]))
	}
	code := 0
	for i := range list {
		s := &list[i]
		if _, err := r.d.Logout(ctx, api.LogoutRequest{Session: strconv.Itoa(s.ID)}); err != nil {
			c := codeOf(err)
			r.fail("Could not logout of [%s].", identity(s))
			r.fail("initiator reported error (%d - %s)", c, message(c))
			r.detail(err)
			code = c
			continue
		}
		r.print("Logout of [%s] successful.\n", identity(s))
	}
	if code != 0 {
		return r.refuse(code, "Could not logout of all requested sessions")
	}
	return nil
}

// hosts is -m host: the kernel makes one for each software session.
func (r *run) hosts(ctx context.Context) error {
	if r.level > 0 || r.op != 0 {
		return r.unsupported("there are no SCSI hosts; see iscsiadm -m session -P 3")
	}
	list, err := r.sessions(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return r.refuse(codeNotFound, "No iSCSI hosts.")
	}
	for i := range list {
		s := &list[i]
		local := ""
		if len(s.Connections) > 0 {
			local = host(s.Connections[0].LocalAddress)
		}
		if strings.Contains(local, ":") {
			local = "[" + local + "]"
		}
		r.print("%s: [%d] %s,[%s],%s %s\n", s.Transport, s.ID, or(local), empty, empty, empty)
	}
	return nil
}
