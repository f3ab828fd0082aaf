package config

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/viper"

	"iserd.org/iserd/api"
)

// Config are the settings. The tags are the names in the file.
type Config struct {
	// InitiatorName is the name by which targets know this machine; "" takes /etc/iserd/initiatorname.
	InitiatorName string `mapstructure:"initiator_name"`
	// LogLevel is error, warn, info or debug. Default info.
	LogLevel string `mapstructure:"log_level"`
	// DataPlane is the program that carries the I/O; "" looks beside this program and in PATH, "none" leaves starting it to someone else.
	DataPlane string `mapstructure:"data_plane"`
	// LoginTimeout bounds one login, connecting included. 1 s to 10 min, default 30 s.
	LoginTimeout time.Duration `mapstructure:"login_timeout"`
	// DiscoveryTimeout bounds one SendTargets exchange over one transport. 1 s to 10 min, default 15 s.
	DiscoveryTimeout time.Duration `mapstructure:"discovery_timeout"`
	// ControlTimeout bounds one command to the block driver. 1 s to 10 min, default 15 s.
	ControlTimeout time.Duration `mapstructure:"control_timeout"`
	// RequestTimeout is how long a command may go without an answer of the target before it is aborted and sent again; a cache flush twice as long.
	// 1 s to 10 min, default 30 s; 0: for ever. It counts for logins to come, and a record's own setting goes before it.
	RequestTimeout time.Duration `mapstructure:"request_timeout"`
	// QueueDepth is the number of requests of one queue. 1 to 4096, default 128.
	QueueDepth int `mapstructure:"queue_depth"`
	// MaxIO is the size of the largest request, bytes. 4096 to 1048576, a multiple of 4096, default 524288; the target may lower it.
	MaxIO int `mapstructure:"max_io"`
	// Reactors is the number of data-path threads, and with it of sessions with each target and of queues of each device. 0 to 64, default 0:
	// one for each CPU. It counts when the data plane starts.
	Reactors int `mapstructure:"reactors"`
	// BufferPool is how much memory for I/O buffers one reactor may come to hold, MiB, pinned and registered with the RDMA adapter. It begins
	// with 4 MiB and takes 4 more whenever a request finds none. 4 to 16384, default 64. It counts when the data plane starts.
	BufferPool int `mapstructure:"buffer_pool"`
	// ACKTimeout is when an RDMA adapter sends again what the other side has not acknowledged. 1 ms to 10 s, rounded up to 4.096 us times a power of
	// two; default 0: 16 ms, with an adapter that is software (soft RoCE) 2 s. It counts when the data plane starts.
	ACKTimeout time.Duration `mapstructure:"ack_timeout"`
	// SharedArena is the memory that is kept registered with every device and lent to programs in slices, MiB, pinned. 0 to 65536, a multiple of
	// SharedSlice, default 8; 0 lends none. It needs kernel 7.1 or later, and is not allocated before that.
	SharedArena int `mapstructure:"shared_arena"`
	// SharedSlice is the size of one slice, MiB, and so the largest memory that one program is lent at once. 1 to 4096, default 4.
	SharedSlice int `mapstructure:"shared_slice"`
	// SharedLimit is how much memory that is not the arena's may be registered by all users together, MiB, pinned as long as it is. 0 to 16777216,
	// default 4096; 0 allows none.
	SharedLimit int `mapstructure:"shared_limit"`
	// SharedUserLimit is how much of it one user other than root may register, slices that are lent to the user included, MiB. 0 to 16777216,
	// default 1024.
	SharedUserLimit int `mapstructure:"shared_user_limit"`
}

// Places that Load reads when no file is named.
var Places = []string{"/usr/lib/iserd/iserd.toml", "/etc/iserd/iserd.toml", "/etc/iserd/iserd.d"}

// Default returns the built-in settings.
func Default() Config {
	return Config{
		LogLevel: "info", LoginTimeout: 30 * time.Second, DiscoveryTimeout: 15 * time.Second, ControlTimeout: 15 * time.Second,
		RequestTimeout: 30 * time.Second, QueueDepth: 128, MaxIO: 512 << 10, BufferPool: 64, SharedArena: 8, SharedSlice: 4, SharedLimit: 4096, SharedUserLimit: 1024,
	}
}

// Load reads the settings. file "" reads Places, where a missing one is fine; a named file must be there. Errors are
// api.ErrInvalidArgs with the file and line where there is one.
func Load(file string) (Config, error) {
	v := viper.NewWithOptions(viper.KeyDelimiter("::"))
	d := Default()
	defaults := map[string]any{
		"initiator_name": d.InitiatorName, "log_level": d.LogLevel, "data_plane": d.DataPlane, "login_timeout": d.LoginTimeout,
		"discovery_timeout": d.DiscoveryTimeout, "control_timeout": d.ControlTimeout, "request_timeout": d.RequestTimeout, "queue_depth": d.QueueDepth, "max_io": d.MaxIO,
		"reactors": d.Reactors, "buffer_pool": d.BufferPool, "ack_timeout": d.ACKTimeout, "shared_arena": d.SharedArena, "shared_slice": d.SharedSlice,
		"shared_limit": d.SharedLimit, "shared_user_limit": d.SharedUserLimit,
	}
	v.SetEnvPrefix("ISERD")
	for k, x := range defaults {
		v.SetDefault(k, x)
		if err := v.BindEnv(k); err != nil {
			return Config{}, fmt.Errorf("configuration: %w", err)
		}
	}
	files := []string{file}
	if file == "" {
		var err error
		if files, err = existing(Places); err != nil {
			return Config{}, api.Errorf(api.ErrInvalidArgs, "configuration: %w", err)
		}
	}
	for _, f := range files {
		if err := merge(v, f, defaults); err != nil {
			return Config{}, err
		}
	}
	var c Config
	if err := v.UnmarshalExact(&c); err != nil {
		return Config{}, api.Errorf(api.ErrInvalidArgs, "configuration: %s", oneLine(err))
	}
	return c, c.Check()
}

// existing lists the files that are there, directories replaced by the *.toml in them.
func existing(places []string) ([]string, error) {
	var out []string
	for _, p := range places {
		fi, err := os.Stat(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !fi.IsDir() {
			out = append(out, p)
			continue
		}
		m, err := filepath.Glob(filepath.Join(p, "*.toml"))
		if err != nil {
			return nil, err
		}
		slices.Sort(m)
		out = append(out, m...)
	}
	return out, nil
}

// merge adds one file. Its keys are checked here, where the file is still known.
func merge(v *viper.Viper, file string, known map[string]any) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return api.Errorf(api.ErrInvalidArgs, "configuration: %w", err)
	}
	one := viper.NewWithOptions(viper.KeyDelimiter("::"))
	one.SetConfigType("toml")
	if err := one.ReadConfig(bytes.NewReader(text)); err != nil {
		return api.Errorf(api.ErrInvalidArgs, "configuration: %s: %s", file, oneLine(err))
	}
	for _, k := range one.AllKeys() {
		if _, ok := known[k]; !ok {
			top, _, _ := strings.Cut(k, "::")
			return api.Errorf(api.ErrInvalidArgs, "configuration: %s:%d: unknown key %q", file, lineOf(text, top), top)
		}
	}
	if err := v.MergeConfigMap(one.AllSettings()); err != nil {
		return api.Errorf(api.ErrInvalidArgs, "configuration: %s: %s", file, oneLine(err))
	}
	return nil
}

// lineOf finds the line on which key is set, 1 if it cannot tell.
func lineOf(text []byte, key string) int {
	re := regexp.MustCompile(`(?i)^\s*\[*\s*"?` + regexp.QuoteMeta(key) + `"?\s*[\].=]`)
	s := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; s.Scan(); n++ {
		if re.Match(s.Bytes()) {
			return n
		}
	}
	return 1
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// Check tells whether every setting is in its range.
func (c *Config) Check() error {
	bad := func(format string, args ...any) error {
		return api.Errorf(api.ErrInvalidArgs, "configuration: "+format, args...)
	}
	if c.InitiatorName != "" {
		if err := api.CheckName(c.InitiatorName); err != nil {
			return api.Wrap(err, api.ErrInvalidArgs, "configuration: initiator_name")
		}
	}
	if !slices.Contains([]string{"error", "warn", "info", "debug"}, c.LogLevel) {
		return bad("log_level is %q, expected error, warn, info or debug", c.LogLevel)
	}
	for name, d := range map[string]time.Duration{
		"login_timeout": c.LoginTimeout, "discovery_timeout": c.DiscoveryTimeout, "control_timeout": c.ControlTimeout,
	} {
		if d < time.Second || d > 10*time.Minute {
			return bad("%s is %v, expected 1s to 10m", name, d)
		}
	}
	if d := c.RequestTimeout; d != 0 && (d < time.Second || d > 10*time.Minute) {
		return bad("request_timeout is %v, expected 1s to 10m, or 0 for none", d)
	}
	if c.QueueDepth < 1 || c.QueueDepth > 4096 {
		return bad("queue_depth is %d, expected 1 to 4096", c.QueueDepth)
	}
	if c.MaxIO < 4096 || c.MaxIO > 1<<20 || c.MaxIO%4096 != 0 {
		return bad("max_io is %d, expected a multiple of 4096 from 4096 to 1048576", c.MaxIO)
	}
	if c.Reactors < 0 || c.Reactors > 64 {
		return bad("reactors is %d, expected 0 to 64", c.Reactors)
	}
	if c.BufferPool < 4 || c.BufferPool > 16<<10 {
		return bad("buffer_pool is %d, expected 4 to 16384 (MiB)", c.BufferPool)
	}
	if d := c.ACKTimeout; d != 0 && (d < time.Millisecond || d > 10*time.Second) {
		return bad("ack_timeout is %v, expected 1ms to 10s, or 0 to leave it to the kind of adapter", d)
	}
	if c.SharedSlice < 1 || c.SharedSlice > 4096 {
		return bad("shared_slice is %d, expected 1 to 4096 (MiB)", c.SharedSlice)
	}
	if c.SharedArena < 0 || c.SharedArena > 64<<10 || c.SharedArena%c.SharedSlice != 0 {
		return bad("shared_arena is %d, expected 0 to 65536 (MiB), a multiple of shared_slice, which is %d", c.SharedArena, c.SharedSlice)
	}
	if c.SharedLimit < 0 || c.SharedLimit > 16<<20 {
		return bad("shared_limit is %d, expected 0 to 16777216 (MiB)", c.SharedLimit)
	}
	if c.SharedUserLimit < 0 || c.SharedUserLimit > 16<<20 {
		return bad("shared_user_limit is %d, expected 0 to 16777216 (MiB)", c.SharedUserLimit)
	}
	return nil
}
