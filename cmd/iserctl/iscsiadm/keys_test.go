package iscsiadm

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"iserd.org/iserd/api"
)

// TestKeysExist: every key leads to a setting that there is, and to one that a discovery has if it is a discovery's.
func TestKeysExist(t *testing.T) {
	seen := map[string]bool{}
	for _, table := range [][]key{headKeys, nodeKeys, silentKeys, ifaceKeys, discoveryKeys} {
		for _, k := range table {
			if seen[k.name] && k.name != "iface.transport_name" && k.name != "node.session.auth.chap_algs" {
				t.Errorf("%s is there twice", k.name)
			}
			seen[k.name] = true
		}
	}
	for _, table := range [][]key{nodeKeys, silentKeys, discoveryKeys, silentDiscoveryKeys} {
		for _, k := range table {
			if k.setting == "" {
				continue
			}
			r := k.row()
			if r == nil {
				t.Errorf("%s: no setting %s", k.name, k.setting)
			} else if strings.HasPrefix(k.name, "discovery.") && !r.Discovery {
				t.Errorf("%s: %s means nothing for a discovery", k.name, k.setting)
			}
		}
	}
}

// TestChange: what becomes of values.
func TestChange(t *testing.T) {
	for _, x := range []struct {
		name, value string
		set         string // name=value, or a name that is unset
		note        bool
	}{
		{"node.session.auth.authmethod", "CHAP", "auth=auto", false},
		{"node.session.auth.authmethod", "None", "auth=none", false},
		{"node.session.auth.username", "me", "chap_user=me", false},
		{"node.session.auth.username", "", "chap_user", false},
		{"node.session.auth.chap_algs", "SHA256, MD5", "chap_algorithms=SHA256,MD5", false},
		{"node.session.timeo.replacement_timeout", "120", "replacement_timeout=120", false},
		{"node.session.timeo.replacement_timeout", "0", "replacement_timeout=0", false},
		{"node.session.timeo.replacement_timeout", "-1", "replacement_timeout=forever", false},
		{"node.session.timeo.replacement_timeout", "99999999", "replacement_timeout=86400", false},
		{"node.conn[0].timeo.login_timeout", "0", "login_timeout", false},
		{"node.conn[0].timeo.noop_out_timeout", "0", "noop_out_interval=0", false},
		{"node.conn[0].timeo.noop_out_interval", "0", "noop_out_interval=0", false},
		{"node.conn[0].iscsi.MaxRecvDataSegmentLength", "16777215", "max_recv_data_segment_length=262144", false},
		{"node.conn[0].iscsi.HeaderDigest", "None,CRC32C", "header_digest=None,CRC32C", false},
		{"node.session.iscsi.InitialR2T", "No", "initial_r2t=No", false},
		{"iface.transport_name", "iser", "transport=iser", false},
		{"node.session.queue_depth", "64", "", false},
		{"node.session.nr_sessions", "1", "", false},
		{"node.session.nr_sessions", "4", "", true},
		{"node.session.scan", "manual", "", true},
		{"node.session.scan", "auto", "", false},
		{"node.startup", "onboot", "", true},
		{"node.session.auth.password_length", "5", "", false},
	} {
		var c change
		if bad := c.add(param{x.name, x.value}, headKeys, nodeKeys, silentKeys); bad != nil {
			t.Errorf("%s=%s: %v", x.name, x.value, bad)
			continue
		}
		var got []string
		for _, k := range slices.Sorted(maps.Keys(c.set)) {
			got = append(got, k+"="+c.set[k])
		}
		got = append(got, c.unset...)
		if s := strings.Join(got, " "); s != x.set || len(c.notes) > 0 != x.note {
			t.Errorf("%s=%s: %q and notes %q, want %q", x.name, x.value, s, c.notes, x.set)
		}
	}
	var c change
	for _, p := range []param{
		{"node.session.auth.username", ""}, {"node.session.auth.username", "me"}, {"node.session.auth.password", "secret"}, {"node.session.auth.password_in", ""},
	} {
		if bad := c.add(p, nodeKeys); bad != nil {
			t.Fatal(bad)
		}
	}
	if len(c.unset) > 0 || c.set["chap_user"] != "me" {
		t.Errorf("the later value does not count: %+v", c)
	}
	if len(c.secrets) != 2 || c.secrets[0].name != api.CHAPSecret || string(c.secrets[0].value.Reveal()) != "secret" || !c.secrets[1].value.IsZero() {
		t.Error("secrets are other ones")
	}
	for _, p := range []param{
		{"node.session.auth.authmethod", "SRP"}, {"node.name", "x"}, {"node.conn[0].address", "x"}, {"nonsense", "x"}, {"node.conn[1].timeo.login_timeout", "5"},
		{"node.session.auth.chap_algs", "MD4"}, {"node.session.auth.username", strings.Repeat("x", 256)}, {"node.session.auth.password", strings.Repeat("x", 256)},
	} {
		var c change
		if bad := c.add(p, headKeys, nodeKeys, silentKeys); bad == nil {
			t.Errorf("%s=%s is taken", p.name, p.value)
		}
	}
}
