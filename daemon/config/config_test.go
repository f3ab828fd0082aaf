package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"iserd.org/iserd/api"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLayers(t *testing.T) {
	dir := t.TempDir()
	old := Places
	t.Cleanup(func() { Places = old })
	Places = []string{dir + "/vendor.toml", dir + "/iserd.toml", dir + "/iserd.d"}

	got, err := Load("")
	if err != nil || cmp.Diff(Default(), got) != "" {
		t.Fatalf("without files: %v, %v", got, err)
	}
	write(t, dir+"/vendor.toml", "queue_depth = 1\nmax_io = 4096\nlog_level = \"warn\"\nlogin_timeout = \"1s\"\n")
	write(t, dir+"/iserd.toml", "# comment\nmax_io = 8192\nlog_level = \"error\"\n")
	write(t, dir+"/iserd.d/20.toml", "log_level = \"debug\"\n")
	write(t, dir+"/iserd.d/10.toml", "log_level = \"warn\"\n")
	write(t, dir+"/iserd.d/30.conf", "nonsense")
	t.Setenv("ISERD_LOGIN_TIMEOUT", "7s")
	want := Default()
	want.QueueDepth, want.MaxIO, want.LogLevel, want.LoginTimeout = 1, 8192, "debug", 7*time.Second
	got, err = Load("")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestBad(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]string{
		"queue_depth = 1\n\nqueue_dept = 2\n":          "x.toml:3: unknown key \"queue_dept\"",
		"[node]\n\"iqn.2003-01.org.example\" = 1\n":    "x.toml:1: unknown key \"node\"",
		"queue_depth = ":                               "x.toml",
		"queue_depth = 0":                              "queue_depth is 0",
		"queue_depth = \"many\"":                       "queue_depth",
		"reactors = 65":                                "reactors is 65",
		"buffer_pool = 3":                              "buffer_pool is 3",
		"ack_timeout = \"1us\"":                        "ack_timeout is 1µs",
		"shared_arena = 9":                             "shared_arena is 9",
		"shared_slice = 0":                             "shared_slice is 0",
		"shared_limit = -1":                            "shared_limit is -1",
		"shared_user_limit = 16777217":                 "shared_user_limit is 16777217",
		"max_io = 5000":                                "max_io is 5000",
		"max_io = 2097152":                             "max_io is 2097152",
		"log_level = \"loud\"":                         "log_level",
		"login_timeout = \"10ms\"":                     "login_timeout is 10ms",
		"discovery_timeout = \"1h\"":                   "discovery_timeout is 1h",
		"initiator_name = \"me\"":                      "initiator_name",
		"log_level = \"info\"\nlog_level = \"info\"\n": "x.toml",
	} {
		_, err := Load(write(t, dir+"/x.toml", text))
		if !api.Is(err, api.ErrInvalidArgs) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want one line with %q", text, err, want)
		}
	}
	if _, err := Load(dir + "/none.toml"); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("a named file that is missing: %v", err)
	}
}
