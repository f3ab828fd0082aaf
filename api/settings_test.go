package api

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestSet(t *testing.T) {
	good := []struct{ name, value, text string }{
		{"transport", "TCP", "tcp"}, {"source_address", "10.0.0.1", "10.0.0.1"}, {"source_address", "::ffff:10.0.0.1", "10.0.0.1"},
		{"source_address", "fe80::1%eth0", "fe80::1%eth0"}, {"network_interface", "eth0.5", "eth0.5"}, {"rdma_device", "mlx5_0", "mlx5_0"},
		{"auth", "CHAP", "chap"}, {"chap_user", "me and you", "me and you"}, {"chap_algorithms", "sha-256, md5", "SHA256,MD5"},
		{"chap_algorithms", "SHA3-256,SHA3-256", "SHA3-256"}, {"header_digest", "crc32c,none", "CRC32C,None"}, {"data_digest", "None", "None"},
		{"max_recv_data_segment_length", "512", "512"}, {"max_burst_length", "16777215", "16777215"}, {"immediate_data", "no", "No"},
		{"initial_r2t", "true", "Yes"}, {"max_outstanding_r2t", "65535", "65535"}, {"login_timeout", "5m", "300"}, {"noop_out_interval", "0", "0"},
		{"replacement_timeout", "0", "0"}, {"replacement_timeout", "Forever", "forever"}, {"replacement_timeout", "24h", "86400"},
	}
	for _, c := range good {
		var s Settings
		if err := s.Set(c.name, c.value); err != nil {
			t.Errorf("%s=%s: %v", c.name, c.value, err)
			continue
		}
		r, _ := FindSetting(c.name)
		b, err := json.Marshal(s)
		var again Settings
		if err == nil {
			err = json.Unmarshal(b, &again)
		}
		if r.Text(&again) != c.text || err != nil || again.Check() != nil || !reflect.DeepEqual(s, s.Clone()) {
			t.Errorf("%s=%s: %s, reads back as %q, %v, %v", c.name, c.value, b, r.Text(&again), err, again.Check())
		}
		if d := s.Changed(&Settings{}); !slices.Equal(d, []string{c.name}) {
			t.Errorf("%s=%s: changed %v", c.name, c.value, d)
		}
		if err := s.Unset(c.name); err != nil || !reflect.DeepEqual(s, Settings{}) {
			t.Errorf("%s: unset leaves %+v, %v", c.name, s, err)
		}
	}
	bad := []struct{ name, value, says string }{
		{"transport", "rdma", "auto, iser or tcp"}, {"source_address", "host", "an IP address"}, {"source_address", "0.0.0.0", "an IP address"},
		{"source_address", "224.0.0.1", "an IP address"}, {"network_interface", "../x", "device"}, {"network_interface", "abcdefghijklmnop", "device"},
		{"rdma_device", "a b", "device"}, {"chap_user", "", "1 to 255 bytes"}, {"chap_user", "a\nb", "1 to 255 bytes"},
		{"chap_user", strings.Repeat("x", 256), "1 to 255"}, {"chap_algorithms", "MD4", "MD5, SHA1, SHA256, SHA3-256"}, {"chap_algorithms", ",", "MD5"},
		{"header_digest", "CRC32", "CRC32C,None"}, {"max_recv_data_segment_length", "262145", "512 to 262144 bytes"},
		{"max_burst_length", "511", "512 to 16777215 bytes"}, {"max_burst_length", "-1", "512"}, {"max_burst_length", "1e6", "512"},
		{"max_burst_length", "99999999999999999999", "512"}, {"immediate_data", "maybe", "Yes or No"}, {"login_timeout", "0", "1 to 600 seconds"},
		{"login_timeout", "1.5s", "1 to 600"}, {"login_timeout", "forever", "1 to 600"}, {"replacement_timeout", "-1", "or forever"},
		{"colour", "red", "replacement_timeout"}, {"chap_secret", "x", "node secret"}, {"chap_target_secret", "x", "node secret"},
	}
	for _, c := range bad {
		var s Settings
		err := s.Set(c.name, c.value)
		if !Is(err, ErrInvalidArgs) || !strings.Contains(err.Error(), c.says) || !reflect.DeepEqual(s, Settings{}) {
			t.Errorf("%s=%q: %v, want a text with %q; left %+v", c.name, c.value, err, c.says, s)
		}
	}
}

// What a damaged file may hold does not pass, and neither does what cannot go together.
func TestCheckSettings(t *testing.T) {
	n := func(v int) *int { return &v }
	for _, s := range []Settings{
		{Auth: "CHAP"}, {HeaderDigest: "crc"}, {SourceAddress: "x"}, {CHAPAlgorithms: []string{"md5"}}, {MaxBurstLength: n(-2)}, {LoginTimeout: n(Forever)},
		{RDMADevice: "/"}, {CHAPUser: "\x00"}, {FirstBurstLength: n(8192), MaxBurstLength: n(4096)}, {Transport: "tcp", RDMADevice: "rxe0"},
		{Transport: "iser", DataDigest: "CRC32C"}, {CHAPPolicy: "strong", CHAPAlgorithms: []string{"SHA256", "MD5"}}, {Transport: "iser", HeaderDigest: "CRC32C,None"},
	} {
		if err := s.Check(); !Is(err, ErrInvalidArgs) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	s := Settings{Transport: "iser", DataDigest: "None", FirstBurstLength: n(4096), MaxBurstLength: n(4096), ReplacementTimeout: n(Forever)}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
}

// A setting's name is its name in JSON, and no field is without a row.
func TestSettingTable(t *testing.T) {
	fields := map[string]bool{}
	for i := range reflect.TypeFor[Settings]().NumField() {
		name, _, _ := strings.Cut(reflect.TypeFor[Settings]().Field(i).Tag.Get("json"), ",")
		fields[name] = true
	}
	for _, r := range SettingTable {
		if !fields[r.Name] {
			t.Errorf("%s: no such field, or two rows", r.Name)
		}
		delete(fields, r.Name)
		if r.Help == "" || r.TCP == "" && r.ISER == "" || r.Range() == "" || r.Default() == "" {
			t.Errorf("%s: not described", r.Name)
		}
	}
	if len(fields) != 0 {
		t.Errorf("fields without a row: %v", fields)
	}
}

// The page for users has the table as the program has it.
func TestSettingsDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/login.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	for _, r := range SettingTable {
		discovery := ""
		if r.Discovery {
			discovery = "yes"
		}
		row := fmt.Sprintf("| `%s` | %s | %s | %s | %s |", r.Name, r.Range(), r.Default(), discovery, r.Help)
		if !strings.Contains(page, row) {
			t.Errorf("docs/login.md lacks the row\n%s", row)
		}
	}
}

func TestSecretHides(t *testing.T) {
	const text = "correct horse battery"
	s := NewSecret([]byte(text))
	in := struct {
		Secret Secret
		hidden Secret
		deep   *struct{ s []Secret }
	}{s, s, &struct{ s []Secret }{[]Secret{s}}}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%p"} {
		for _, v := range []any{s, &s, in, &in, []Secret{s}, map[string]Secret{"a": s}, fmt.Errorf("x: %v", in)} {
			out := fmt.Sprintf(verb, v)
			if strings.Contains(out, "correct") || strings.Contains(strings.ToLower(out), fmt.Sprintf("%x", "correct")) {
				t.Errorf("%s of %T shows the secret: %s", verb, v, out)
			}
		}
	}
	b, err := json.Marshal(s)
	var again Secret
	if err != nil || json.Unmarshal(b, &again) != nil || string(again.Reveal()) != text || !again.Equal(s) || again.Equal(Secret{}) {
		t.Errorf("JSON: %s, %v", b, err)
	}
	for _, bad := range []string{`1`, `"!"`, `"` + strings.Repeat("QUFB", 90) + `"`} {
		if err := json.Unmarshal([]byte(bad), &again); err == nil {
			t.Errorf("%s is read", bad)
		}
	}
}

// Whatever is set is refused with the range, or is a value that passes every check and reads back.
func FuzzSet(f *testing.F) {
	for _, r := range SettingTable {
		f.Add(r.Name, "1")
		f.Add(r.Name, strings.Join(r.Values, ","))
	}
	f.Add("source_address", "fe80::1%eth0")
	f.Add("login_timeout", "1h")
	f.Add("replacement_timeout", "forever")
	f.Fuzz(func(t *testing.T, name, value string) {
		var s Settings
		if err := s.Set(name, value); err != nil {
			if !Is(err, ErrInvalidArgs) || !reflect.DeepEqual(s, Settings{}) {
				t.Errorf("%q=%q: %v leaves %+v", name, value, err, s)
			}
			return
		}
		if err := s.Check(); err != nil {
			t.Errorf("%q=%q is taken and does not pass: %v", name, value, err)
		}
		b, err := json.Marshal(s)
		var again Settings
		if err != nil || json.Unmarshal(b, &again) != nil || len(s.Changed(&again)) != 0 {
			t.Errorf("%q=%q: %s reads back as %+v, %v", name, value, b, again, err)
		}
	})
}
