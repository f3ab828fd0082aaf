package iscsiadm

import (
	"slices"
	"strconv"
	"strings"

	"iserd.org/iserd/api"
)

// empty is how iscsiadm shows that there is no value.
const empty = "<empty>"

// masked is how it shows a secret.
const masked = "********"

// key is one name of open-iscsi's records, in the order of a dump.
type key struct {
	name    string
	preset  string   // what a record shows when nothing else is known: open-iscsi's own default
	choices []string // values that it may have; nil: any
	fixed   bool     // part of the record's identity, cannot be changed

	setting string // name in api.SettingTable, "" for one that means nothing here
	secret  string // or the name of a secret

	// Values that a caller may count on, although they are not kept: the caller is told.
	warn func(value string) string
}

func yesNo() []string    { return []string{"No", "Yes"} }
func startups() []string { return []string{"manual", "automatic", "onboot"} }
func digests() []string  { return []string{"None", "CRC32C", "CRC32C,None", "None,CRC32C"} }

func warnIf(bad func(string) bool, text string) func(string) string {
	return func(v string) string {
		if bad(v) {
			return text
		}
		return ""
	}
}

// nodeKeys are the names of a node's record behind those of its iface.
var nodeKeys = []key{
	{name: "node.discovery_address", fixed: true},
	{name: "node.discovery_port", preset: "0", fixed: true},
	{name: "node.discovery_type", preset: "static", fixed: true},
	{name: "node.session.initial_cmdsn", preset: "0"},
	{name: "node.session.initial_login_retry_max", preset: "8"},
	{name: "node.session.xmit_thread_priority", preset: "0"},
	{name: "node.session.cmds_max", preset: "128"},
	{name: "node.session.queue_depth", preset: "32"},
	{name: "node.session.nr_sessions", preset: "1",
		warn: warnIf(func(v string) bool { return atoi(v) > 1 }, "the number of sessions follows from the threads of the data plane")},
	{name: "node.session.auth.authmethod", preset: "None", choices: []string{"None", "CHAP"}, setting: "auth"},
	{name: "node.session.auth.username", setting: "chap_user"},
	{name: "node.session.auth.password", secret: api.CHAPSecret},
	{name: "node.session.auth.username_in", setting: "chap_target_user"},
	{name: "node.session.auth.password_in", secret: api.CHAPTargetSecret},
	{name: "node.session.auth.chap_algs", setting: "chap_algorithms"},
	{name: "node.session.timeo.replacement_timeout", preset: "120", setting: "replacement_timeout"},
	{name: "node.session.err_timeo.abort_timeout", preset: "15"},
	{name: "node.session.err_timeo.lu_reset_timeout", preset: "30"},
	{name: "node.session.err_timeo.tgt_reset_timeout", preset: "30"},
	{name: "node.session.err_timeo.host_reset_timeout", preset: "60"},
	{name: "node.session.iscsi.FastAbort", preset: "Yes", choices: yesNo()},
	{name: "node.session.iscsi.InitialR2T", choices: yesNo(), setting: "initial_r2t"},
	{name: "node.session.iscsi.ImmediateData", choices: yesNo(), setting: "immediate_data"},
	{name: "node.session.iscsi.FirstBurstLength", setting: "first_burst_length"},
	{name: "node.session.iscsi.MaxBurstLength", setting: "max_burst_length"},
	{name: "node.session.iscsi.DefaultTime2Retain", setting: "default_time2retain"},
	{name: "node.session.iscsi.DefaultTime2Wait", setting: "default_time2wait"},
	{name: "node.session.iscsi.MaxConnections", preset: "1"},
	{name: "node.session.iscsi.MaxOutstandingR2T", setting: "max_outstanding_r2t"},
	{name: "node.session.iscsi.ERL", preset: "0"},
	{name: "node.session.scan", preset: "auto", choices: []string{"manual", "auto"},
		warn: warnIf(func(v string) bool { return v == "manual" }, "every logical unit gets its device at the login")},
	{name: "node.session.reopen_max", preset: "0"},
	{name: "node.session.conn_reopen_log_freq", preset: "1"},
	{name: "node.conn[0].address", fixed: true},
	{name: "node.conn[0].port", preset: "3260", fixed: true},
	{name: "node.conn[0].startup", preset: "manual", choices: startups()},
	{name: "node.conn[0].tcp.window_size", preset: "524288"},
	{name: "node.conn[0].tcp.type_of_service", preset: "0"},
	{name: "node.conn[0].timeo.logout_timeout", preset: "15", setting: "logout_timeout"},
	{name: "node.conn[0].timeo.login_timeout", preset: "15", setting: "login_timeout"},
	{name: "node.conn[0].timeo.auth_timeout", preset: "45"},
	{name: "node.conn[0].timeo.noop_out_interval", preset: "5", setting: "noop_out_interval"},
	{name: "node.conn[0].timeo.noop_out_timeout", preset: "5", setting: "noop_out_timeout"},
	{name: "node.conn[0].iscsi.MaxXmitDataSegmentLength", preset: "0"},
	{name: "node.conn[0].iscsi.MaxRecvDataSegmentLength", preset: "262144", setting: "max_recv_data_segment_length"},
	{name: "node.conn[0].iscsi.HeaderDigest", preset: "None", choices: digests(), setting: "header_digest"},
	{name: "node.conn[0].iscsi.DataDigest", preset: "None", choices: digests(), setting: "data_digest"},
	{name: "node.conn[0].iscsi.IFMarker", preset: "No", choices: yesNo()},
	{name: "node.conn[0].iscsi.OFMarker", preset: "No", choices: yesNo()},
}

// headKeys come first in a node's record.
var headKeys = []key{
	{name: "node.name", fixed: true},
	{name: "node.tpgt", preset: "-1", fixed: true},
	{name: "node.startup", preset: "manual", choices: startups(),
		warn: warnIf(func(v string) bool { return v != "manual" }, "there is no automatic login; log in at boot with a unit of your own")},
	{name: "node.leading_login", preset: "No", choices: yesNo()},
}

// silentKeys can be set, but a dump does not show them.
var silentKeys = []key{
	{name: "node.session.auth.password_length"}, {name: "node.session.auth.password_in_length"}, {name: "node.conn[0].tcp.congestion_control"},
	{name: "iface.transport_name", choices: []string{"tcp", "iser"}, setting: "transport"},
}

// discoveryKeys are the names of a portal's record.
var discoveryKeys = []key{
	{name: "discovery.startup", preset: "manual", choices: []string{"manual", "automatic"},
		warn: warnIf(func(v string) bool { return v != "manual" }, "portals are asked when somebody asks")},
	{name: "discovery.type", preset: "sendtargets", fixed: true},
	{name: "discovery.sendtargets.address", fixed: true},
	{name: "discovery.sendtargets.port", preset: "3260", fixed: true},
	{name: "discovery.sendtargets.auth.authmethod", preset: "None", choices: []string{"None", "CHAP"}, setting: "auth"},
	{name: "discovery.sendtargets.auth.username", setting: "chap_user"},
	{name: "discovery.sendtargets.auth.password", secret: api.CHAPSecret},
	{name: "discovery.sendtargets.auth.username_in", setting: "chap_target_user"},
	{name: "discovery.sendtargets.auth.password_in", secret: api.CHAPTargetSecret},
	{name: "node.session.auth.chap_algs", setting: "chap_algorithms"}, // so named
	{name: "discovery.sendtargets.timeo.login_timeout", preset: "15", setting: "login_timeout"},
	{name: "discovery.sendtargets.use_discoveryd", preset: "No", choices: yesNo(),
		warn: warnIf(func(v string) bool { return v == "Yes" }, "portals are asked when somebody asks")},
	{name: "discovery.sendtargets.discoveryd_poll_inval", preset: "30"},
	{name: "discovery.sendtargets.reopen_max", preset: "5"},
	{name: "discovery.sendtargets.timeo.auth_timeout", preset: "45"},
	{name: "discovery.sendtargets.timeo.active_timeout", preset: "30"},
	{name: "discovery.sendtargets.iscsi.MaxRecvDataSegmentLength", preset: "32768"},
}

// silentDiscoveryKeys can be set, but a dump does not show them.
var silentDiscoveryKeys = []key{
	{name: "discovery.sendtargets.auth.password_length"}, {name: "discovery.sendtargets.auth.password_in_length"},
}

// ifaceKeys are the names of an iface's record, with what they show.
var ifaceKeys = []key{
	{name: "iface.iscsi_ifacename"}, {name: "iface.net_ifacename"}, {name: "iface.ipaddress"}, {name: "iface.prefix_len", preset: "0"},
	{name: "iface.hwaddress"}, {name: "iface.transport_name"}, {name: "iface.initiatorname"}, {name: "iface.state"},
	{name: "iface.vlan_id", preset: "0"}, {name: "iface.vlan_priority", preset: "0"}, {name: "iface.vlan_state"}, {name: "iface.iface_num", preset: "0"},
	{name: "iface.mtu", preset: "0"}, {name: "iface.port", preset: "0"}, {name: "iface.bootproto"}, {name: "iface.subnet_mask"}, {name: "iface.gateway"},
	{name: "iface.dhcp_alt_client_id_state"}, {name: "iface.dhcp_alt_client_id"}, {name: "iface.dhcp_dns"}, {name: "iface.dhcp_learn_iqn"},
	{name: "iface.dhcp_req_vendor_id_state"}, {name: "iface.dhcp_vendor_id_state"}, {name: "iface.dhcp_vendor_id"}, {name: "iface.dhcp_slp_da"},
	{name: "iface.fragmentation"}, {name: "iface.gratuitous_arp"}, {name: "iface.incoming_forwarding"}, {name: "iface.tos_state"},
	{name: "iface.tos", preset: "0"}, {name: "iface.ttl", preset: "0"}, {name: "iface.delayed_ack"}, {name: "iface.tcp_nagle"},
	{name: "iface.tcp_wsf_state"}, {name: "iface.tcp_wsf", preset: "0"}, {name: "iface.tcp_timer_scale", preset: "0"}, {name: "iface.tcp_timestamp"},
	{name: "iface.redirect"}, {name: "iface.def_task_mgmt_timeout", preset: "0"}, {name: "iface.header_digest"}, {name: "iface.data_digest"},
	{name: "iface.immediate_data"}, {name: "iface.initial_r2t"}, {name: "iface.data_seq_inorder"}, {name: "iface.data_pdu_inorder"},
	{name: "iface.erl", preset: "0"}, {name: "iface.max_receive_data_len", preset: "0"}, {name: "iface.first_burst_len", preset: "0"},
	{name: "iface.max_outstanding_r2t", preset: "0"}, {name: "iface.max_burst_len", preset: "0"}, {name: "iface.chap_auth"}, {name: "iface.bidi_chap"},
	{name: "iface.strict_login_compliance"}, {name: "iface.discovery_auth"}, {name: "iface.discovery_logout"},
}

// find looks a name up in tables.
func find(name string, tables ...[]key) *key {
	for _, t := range tables {
		for i := range t {
			if t[i].name == name {
				return &t[i]
			}
		}
	}
	return nil
}

// row is the row of the daemon's setting behind a key, or nil.
func (k *key) row() *api.Setting {
	if k.setting == "" {
		return nil
	}
	r, err := api.FindSetting(k.setting)
	if err != nil {
		return nil
	}
	return r
}

// show is what a dump shows of a key.
func (k *key) show(s *api.Settings, secrets []string, iser bool) string {
	switch {
	case k.secret != "":
		if slices.Contains(secrets, k.secret) {
			return masked
		}
		return ""
	case k.setting == "auth":
		if s.Auth == api.AuthCHAP || s.Auth == api.AuthAuto || s.Auth == "" && slices.Contains(secrets, api.CHAPSecret) {
			return "CHAP"
		}
		return "None"
	case k.setting == "":
		return k.preset
	}
	r := k.row()
	text := r.Text(s)
	if text == "" {
		text = r.TCP
		if iser {
			text = r.ISER
		}
	}
	if _, err := strconv.Atoi(text); err != nil && numeric(r) {
		if text == "forever" {
			return "-1"
		}
		return k.preset // "the daemon's"
	}
	if r.Text(s) == "" && r.Kind == api.KindText {
		return "" // a default in words
	}
	return text
}

func numeric(r *api.Setting) bool {
	return r.Kind == api.KindBytes || r.Kind == api.KindNumber || r.Kind == api.KindSeconds
}

// change collects what a list of pairs asks the daemon for.
type change struct {
	set     map[string]string
	unset   []string
	secrets []secret // in order
	notes   []string // what is not kept
}

type secret struct {
	name  string
	value api.Secret
}

// badParam is a refusal of a pair, in the words of iscsiadm.
type badParam []string

// add takes a pair. tables are the names that may be used.
func (c *change) add(p param, tables ...[]key) badParam {
	k := find(p.name, tables...)
	switch {
	case k == nil:
		return badParam{"Cannot modify " + p.name + ". Invalid param name."}
	case k.fixed:
		return badParam{"Cannot modify " + p.name + ". It is used to look up the record and cannot be changed."}
	case k.choices != nil && !slices.Contains(k.choices, p.value):
		return badParam{"unknown value format '" + p.value + "' for parameter name '" + p.name + "'", "Unknown parameter " + p.name + "."}
	case k.secret != "":
		if len(p.value) > api.MaxSecretLen {
			return badParam{"the value for parameter name '" + p.name + "' is too long", "Unknown parameter " + p.name + "."}
		}
		c.secrets = append(c.secrets, secret{k.secret, api.NewSecret([]byte(p.value))})
		return nil
	}
	if k.warn != nil {
		if text := k.warn(p.value); text != "" {
			c.notes = append(c.notes, p.name+" = "+p.value+" is not kept: "+text)
		}
	}
	r := k.row()
	if r == nil {
		return nil
	}
	value := p.value
	switch {
	case k.setting == "auth":
		// With CHAP, iscsiadm accepts a target that asks for none.
		if value = api.AuthNone; p.value == "CHAP" {
			value = api.AuthAuto
		}
	case k.setting == "noop_out_timeout" && atoi(value) <= 0:
		// iscsid never asks then.
		c.put("noop_out_interval", "0")
		return nil
	case numeric(r) && r.Min > 0 && atoi(value) == 0: // a time or length of 0 would never work
		value = ""
	case numeric(r):
		n := atoi(value)
		if value = strconv.Itoa(min(max(n, r.Min), r.Max)); n < 0 && r.Forever {
			value = "forever"
		}
	case r.Kind == api.KindList:
		value = strings.Join(strings.FieldsFunc(value, func(c rune) bool { return c == ',' || c == ' ' }), ",")
	}
	if value == "" {
		delete(c.set, k.setting)
		c.unset = append(c.unset, k.setting)
		return nil
	}
	var try api.Settings
	if err := try.Set(k.setting, value); err != nil {
		return badParam{"unknown value format '" + p.value + "' for parameter name '" + p.name + "'", "Unknown parameter " + p.name + "."}
	}
	c.put(k.setting, value)
	return nil
}

func (c *change) put(name, value string) {
	if c.set == nil {
		c.set = map[string]string{}
	}
	c.unset = slices.DeleteFunc(c.unset, func(n string) bool { return n == name })
	c.set[name] = value
}
