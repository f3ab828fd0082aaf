package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"iserd.org/iserd/api"
)

func write(t testing.TB, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// origins prints where each option that is no default comes from, without the directory.
func origins(l Loaded, dir string) map[string]string {
	out := map[string]string{}
	for name, o := range l.Origins {
		out[name] = strings.TrimPrefix(o.String(), dir+"/")
	}
	return out
}

func TestLayers(t *testing.T) {
	dir := t.TempDir()
	src := Sources{Files: []string{dir + "/vendor.toml", dir + "/iserd.toml", dir + "/iserd.toml.d"}, Environment: true, Flags: pflag.NewFlagSet("", pflag.ContinueOnError)}
	AddFlags(src.Flags)

	got, err := Load(src)
	if err != nil || cmp.Diff(Default(), got.Config) != "" || len(got.Origins)+len(got.Files) != 0 {
		t.Fatalf("without files: %v, %v", got, err)
	}
	write(t, dir+"/vendor.toml", "queue_depth = 1\nmax_io = 4096\nlog_level = \"warn\"\nlogin_timeout = \"1s\"\nbuffer_pool = 5\n")
	write(t, dir+"/iserd.toml", "# comment\r\n\r\nmax_io = 0x2000\r\nlog_level = 'error'\r\n")
	write(t, dir+"/iserd.toml.d/20.toml", "log_level = \"\"\"\ndebug\"\"\"\nrequest_timeout = 0\n")
	write(t, dir+"/iserd.toml.d/10.toml", "log_level = \"warn\"")
	write(t, dir+"/iserd.toml.d/30.conf", "nonsense")
	t.Setenv("ISERD_LOGIN_TIMEOUT", "7s")
	t.Setenv("ISERD_BUFFER_POOL", "6")
	t.Setenv("ISERD_QUEUE_DEPTH", "")         // as if it were not there
	t.Setenv("ISERD_SOCKET", "/of/iserctl")   // of another program
	t.Setenv("ISERDX_QUEUE_DEPTH", "nothing") // of nobody
	if err := src.Flags.Parse([]string{"--buffer-pool=7", "--data-plane", "none"}); err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.QueueDepth, want.MaxIO, want.LogLevel, want.LoginTimeout, want.BufferPool, want.DataPlane, want.RequestTimeout = 1, 8192, "debug", 7*time.Second, 7, "none", 0
	got, err = Load(src)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got.Config); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[string]string{
		"queue_depth": "vendor.toml:1", "max_io": "iserd.toml:3", "log_level": "iserd.toml.d/20.toml:1", "request_timeout": "iserd.toml.d/20.toml:3",
		"login_timeout": "environment ISERD_LOGIN_TIMEOUT", "buffer_pool": "flag --buffer-pool", "data_plane": "flag --data-plane",
	}, origins(got, dir)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{dir + "/vendor.toml", dir + "/iserd.toml", dir + "/iserd.toml.d/10.toml", dir + "/iserd.toml.d/20.toml"}, got.Files); d != "" {
		t.Error(d)
	}
}

// bad loads one file, and gives what is wrong with it without its name.
func bad(t testing.TB, path, text string) []string {
	t.Helper()
	_, err := Load(Sources{Named: []string{write(t, path, text)}})
	if err == nil {
		return nil
	}
	if !api.Is(err, api.ErrInvalidArgs) || !strings.HasPrefix(err.Error(), "configuration: ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%q: error %q", text, err)
	}
	var out []string
	for _, p := range ProblemsOf(err) {
		if p.Origin.Kind != api.OriginFile || p.Origin.Name != path {
			t.Errorf("%q: place %+v", text, p.Origin)
		}
		out = append(out, strings.TrimPrefix(p.String(), path+":"))
	}
	return out
}

func TestBad(t *testing.T) {
	path := t.TempDir() + "/x.toml"
	for _, r := range []struct {
		text string
		want []string
	}{
		{"queue_depth = 1\n\nqueue_dept = 2\n", []string{`3: unknown key "queue_dept", is it queue_depth?`}},
		{"Queue_Depth = 1\n", []string{`1: unknown key "Queue_Depth", is it queue_depth?`}},
		{"\"log-level\" = 'info'\n", []string{`1: unknown key "log-level", is it log_level?`}},
		{"nothing_like_it = 1\n", []string{`1: unknown key "nothing_like_it"`}},
		{"queue_depth.x = 1\n", []string{`1: unknown key "queue_depth.x", is it queue_depth?`}},
		{"chap_secret = \"hush\"\n", []string{`1: unknown key "chap_secret"; secrets are no options, see: iserctl node secret --help`}},
		{"[node]\n\"iqn.2003-01.org.example\" = 1\nqueue_depth = 0\n", []string{`1: unknown table "node": there are no tables here`}},
		{"[[a.b]]\n[c]\n", []string{`1: unknown table "a.b": there are no tables here`, `2: unknown table "c": there are no tables here`}},
		{"queue_depth = ", []string{"1: this is no TOML: incomplete number"}},
		{"queue_depth = \n", []string{"1: this is no TOML: incomplete number"}},
		{"queue_depth = 1 max_io = 4096", []string{"1: this is no TOML: expected newline but got U+006D 'm'"}},
		{"queue_depth = 0", []string{"1: queue_depth is 0, expected 1 to 4096"}},
		{"queue_depth = \"many\"", []string{`1: queue_depth is the text "many", expected a number: 1 to 4096`}},
		{"queue_depth = 1.5", []string{`1: queue_depth is the fraction 1.5, expected a number: 1 to 4096`}},
		{"queue_depth = 99999999999999999999", []string{`1: queue_depth cannot be read: couldn't parse decimal number: strconv.ParseInt: parsing "99999999999999999999": value out of range; expected 1 to 4096`}},
		{"reactors = 65", []string{"1: reactors is 65, expected 1 to 64, or 0: one for each CPU"}},
		{"reactors = true", []string{"1: reactors is true, expected a number: 1 to 64, or 0: one for each CPU"}},
		{"buffer_pool = 3", []string{"1: buffer_pool is 3, expected 4 to 16384 (MiB)"}},
		{"buffer_pool = 2026-11-22", []string{"1: buffer_pool is a date or a time of day, expected a number: 4 to 16384 (MiB)"}},
		{"ack_timeout = \"1us\"", []string{"1: ack_timeout is 1µs, expected 1ms to 10s, or 0: 16ms, soft RoCE 2s"}},
		{"shared_arena = 9", []string{"1: shared_arena is 9, expected a multiple of shared_slice, which is 4 (MiB)"}},
		{"shared_slice = 3", []string{"1: shared_arena is 8, expected a multiple of shared_slice, which is 3 (MiB)"}},
		{"shared_slice = 0", []string{"1: shared_slice is 0, expected 1 to 4096 (MiB)"}},
		{"shared_limit = -1", []string{"1: shared_limit is -1, expected 0 to 16777216 (MiB)"}},
		{"shared_user_limit = 16777217", []string{"1: shared_user_limit is 16777217, expected 0 to 16777216 (MiB)"}},
		{"max_io = 5000", []string{"1: max_io is 5000, expected a multiple of 4096 from 4096 to 1048576 (bytes)"}},
		{"max_io = 2097152", []string{"1: max_io is 2097152, expected a multiple of 4096 from 4096 to 1048576 (bytes)"}},
		{"log_level = \"loud\"", []string{`1: log_level is "loud", expected error, warn, info or debug`}},
		{"log_level = 3", []string{"1: log_level is the number 3, expected text in quotes: error, warn, info or debug"}},
		{"log_level = []", []string{"1: log_level is a list, expected text in quotes: error, warn, info or debug"}},
		{"log_level = {}", []string{"1: log_level is a table, expected text in quotes: error, warn, info or debug"}},
		{"data_plane = \"a\\nb\"", []string{`1: data_plane is "a\nb", expected a path, or none`}},
		{"login_timeout = \"10ms\"", []string{"1: login_timeout is 10ms, expected 1s to 10m"}},
		{"login_timeout = 0", []string{`1: login_timeout is the number 0, expected a time in quotes such as "30s" or "2m": 1s to 10m`}},
		{"login_timeout = 30", []string{`1: login_timeout is the number 30, expected a time in quotes such as "30s" or "2m": 1s to 10m`}},
		{"login_timeout = \"soon\"", []string{`1: login_timeout is "soon", expected a time such as 30s or 2m: 1s to 10m`}},
		{"discovery_timeout = \"1h\"", []string{"1: discovery_timeout is 1h, expected 1s to 10m"}},
		{"initiator_name = \"me\"", nil}, // the text is that of package api
		{"log_level = \"info\"\nlog_level = \"info\"\n", []string{"2: log_level is set a second time, first in line 1"}},
		// One slip does not hide the next.
		{"queue_depth = 0\nmax_i = 1\nlogin_timeout = = \"2s\"\nbuffer_pool = \"x\"\n\n# end\nreactors = 99", []string{
			"1: queue_depth is 0, expected 1 to 4096", `2: unknown key "max_i", is it max_io?`, "3: this is no TOML: incomplete number",
			`4: buffer_pool is the text "x", expected a number: 4 to 16384 (MiB)`, "7: reactors is 99, expected 1 to 64, or 0: one for each CPU",
		}},
	} {
		got := bad(t, path, r.text)
		if r.want == nil && len(got) == 1 && strings.HasPrefix(got[0], "1: initiator_name: ") {
			continue
		}
		if d := cmp.Diff(r.want, got); d != "" {
			t.Errorf("%q: %s", r.text, d)
		}
	}
}

// All that is wrong in all layers is told at once, also where another layer wins.
func TestBadLayers(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/a.toml", "queue_depth = 0\n")
	write(t, dir+"/d/b.toml", "queue_depth = 1\nlog_level = 'loud'\nreactors = 3\n")
	if err := os.Mkdir(dir+"/d/c.toml", 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ISERD_MAX_IO", "1")
	t.Setenv("ISERD_LOGIN_TIMOUT", "1s")
	t.Setenv("ISERD_CHAP_SECRET", "hush")
	src := Sources{Files: []string{dir + "/a.toml", dir + "/none.toml"}, Named: []string{dir + "/d", dir + "/missing"}, Environment: true, Flags: pflag.NewFlagSet("", pflag.ContinueOnError)}
	AddFlags(src.Flags)
	if err := src.Flags.Parse([]string{"--reactors=many", "--log-level=warn"}); err != nil {
		t.Fatal(err)
	}
	l, err := Load(src)
	got := map[string]bool{}
	for _, p := range ProblemsOf(err) {
		got[strings.ReplaceAll(p.String(), dir+"/", "")] = true
	}
	if d := cmp.Diff(map[string]bool{
		"a.toml:1: queue_depth is 0, expected 1 to 4096":                       true,
		`d/b.toml:2: log_level is "loud", expected error, warn, info or debug`: true,
		"d/c.toml: not a file":               true,
		"missing: no such file or directory": true,
		"environment ISERD_MAX_IO: max_io is 1, expected a multiple of 4096 from 4096 to 1048576 (bytes)":                 true,
		"environment ISERD_LOGIN_TIMOUT: there is no such option, is it login_timeout?":                                   true,
		"environment ISERD_CHAP_SECRET: there is no such option; secrets are no options, see: iserctl node secret --help": true,
		`flag --reactors: reactors is "many", expected a number: 1 to 64, or 0: one for each CPU`:                         true,
	}, got); d != "" {
		t.Error(d)
	}
	if strings.Contains(fmt.Sprint(err), "hush") {
		t.Errorf("the error shows a secret: %v", err)
	}
	// What is right is there.
	if l.Config.QueueDepth != 1 || l.Config.LogLevel != "warn" || l.Config.Reactors != 3 || l.Config.MaxIO != Default().MaxIO {
		t.Errorf("settings %+v", l.Config)
	}
}

// Every field has its row, and each row's default is a value that it would take.
func TestOptions(t *testing.T) {
	fields := map[any]string{}
	var c Config
	for i := range reflect.TypeFor[Config]().NumField() {
		fields[reflect.ValueOf(&c).Elem().Field(i).Addr().Interface()] = reflect.TypeFor[Config]().Field(i).Name
	}
	for i := range Options {
		o := &Options[i]
		p := o.field(&c)
		if fields[p] == "" || strings.ReplaceAll(o.Name, "_", "") != strings.ToLower(fields[p]) {
			t.Errorf("%s: the row of field %q", o.Name, fields[p])
		}
		delete(fields, p)
		d := Default()
		if o.Help == "" || o.Range() == "" || o.DefaultText() == "" {
			t.Errorf("%s: not described", o.Name)
		}
		if _, err := o.fromText(o.Value(&d).Text); err != nil {
			t.Errorf("%s: its default: %v", o.Name, err)
		}
		switch o.Effect {
		case api.EffectNow, api.EffectLogin, api.EffectDevice, api.EffectDataPlane, api.EffectDaemon:
		default:
			t.Errorf("%s: effect %q", o.Name, o.Effect)
		}
		var copied Config
		o.Copy(&copied, &d)
		if o.Value(&copied) != o.Value(&d) {
			t.Errorf("%s: copied %v", o.Name, o.Value(&copied))
		}
	}
	if len(fields) != 0 {
		t.Errorf("fields without a row: %v", fields)
	}
}

// effects is how the page for users writes when a change counts.
var effects = map[string]string{
	api.EffectNow: "at once", api.EffectLogin: "next login", api.EffectDevice: "new devices", api.EffectDataPlane: "start of the data plane", api.EffectDaemon: "start of the daemon",
}

// The page for users has the table as the program has it, and no other rows.
func TestDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	_, page, _ := strings.Cut(string(b), "\n## Options\n")
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "| `") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	for i := range Options {
		o := &Options[i]
		unit := o.Unit
		if o.Kind == KindTime {
			unit = "s, ms, m, h"
		}
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s | %s | %s | %s |", o.Name, o.Kind, unit, o.Range(), o.DefaultText(), effects[o.Effect], o.Help))
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("docs/configuration.md (-code +page): %s", d)
	}
}

// FuzzParse: no text ends the reader, every problem has a line of the text, and a text without one means what it would mean again when it is written down.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", "queue_depth = 1\n", "log_level = \"\"\"\ndebug\"\"\"", "x = [\n1,\n", "[a]\nb = 1\n", "a = {b = 1}", "\"queue_depth\" = 0o17", "ack_timeout = \"1ms\"\r\n",
		"queue_depth.x = 1\nqueue_depth = 1", "= 1", "reactors = 1_0", "a.\"b.c\" = nan", "data_plane = '''\nx'''\nreactors = 2 # two", "request_timeout = 0\nrequest_timeout = '1s'", "\xff = 1", "# \xff", "a = 1\ra",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		settings, problems := parse("f", []byte(text))
		for _, p := range problems {
			if p.Origin.Line < 1 || p.Origin.Line > strings.Count(text, "\n")+1 || strings.Contains(p.Text, "\n") || p.Text == "" || p.Option != "" && find(p.Option) == nil {
				t.Errorf("problem %+v", p)
			}
		}
		c := Default()
		again := ""
		for i, s := range settings {
			if s.line < 1 || s.line > strings.Count(text, "\n")+1 || i > 0 && s.line <= settings[i-1].line {
				t.Errorf("%s at line %d", s.option.Name, s.line)
			}
			s.option.set(&c, s.value)
			v := s.option.Value(&c)
			if !v.Number {
				v.Text = tomlText(v.Text)
			}
			again += s.option.Name + " = " + v.Text + "\n"
		}
		second, problems := parse("g", []byte(again))
		if len(problems) != 0 || len(second) != len(settings) {
			t.Fatalf("%q is %q: %v", text, again, problems)
		}
		d := Default()
		for _, s := range second {
			s.option.set(&d, s.value)
		}
		if diff := cmp.Diff(c, d); diff != "" {
			t.Errorf("%q is %q: %s", text, again, diff)
		}
	})
}

// tomlText writes a basic string.
func tomlText(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
