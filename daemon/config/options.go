package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"iserd.org/iserd/api"
)

// Config are the settings. What they mean is in Options.
type Config struct {
	InitiatorName    string
	LogLevel         string
	DataPlane        string
	LoginTimeout     time.Duration
	DiscoveryTimeout time.Duration
	ControlTimeout   time.Duration
	RequestTimeout   time.Duration
	QueueDepth       int
	MaxIO            int // bytes
	Reactors         int
	BufferPool       int // MiB
	ACKTimeout       time.Duration
	SharedArena      int // MiB
	SharedSlice      int // MiB
	SharedLimit      int // MiB
	SharedUserLimit  int // MiB
}

// Kind is the type of an option's value.
type Kind string

// The kinds.
const (
	KindText   Kind = "text"
	KindTime   Kind = "time"   // text such as "30s" or "1m30s"
	KindNumber Kind = "number" // whole
)

// Option describes one field of Config.
type Option struct {
	Name     string
	Kind     Kind
	Unit     string   // of a number, "" for a count
	Values   []string // of text: one of them
	Min, Max int64    // of a number; of a time in nanoseconds
	Multiple int64    // a number is a multiple of it
	Zero     string   // what 0 stands for, if it is allowed beside the range
	Default  any
	Effect   string // when a change counts: api.EffectNow, ...
	Help     string

	check func(string) error
	field func(*Config) any
}

// Options has every option, in the order in which they are shown.
var Options = []Option{
	{Name: "initiator_name", Kind: KindText, Default: "", Effect: api.EffectDaemon, check: checkName,
		Help:  "name by which targets know this machine; empty: that of /etc/iserd/initiatorname, which is made once",
		field: func(c *Config) any { return &c.InitiatorName }},
	{Name: "log_level", Kind: KindText, Values: []string{"error", "warn", "info", "debug"}, Default: "info", Effect: api.EffectNow,
		Help:  "what is logged; by the data plane from its next start on",
		field: func(c *Config) any { return &c.LogLevel }},
	{Name: "data_plane", Kind: KindText, Default: "", Effect: api.EffectDaemon,
		Help:  "program that carries the I/O; empty: iserd-io beside iserd, then in PATH; none: somebody else starts it",
		field: func(c *Config) any { return &c.DataPlane }},
	{Name: "login_timeout", Kind: KindTime, Min: int64(time.Second), Max: int64(10 * time.Minute), Default: 30 * time.Second, Effect: api.EffectLogin,
		Help:  "time for a login, connecting included",
		field: func(c *Config) any { return &c.LoginTimeout }},
	{Name: "discovery_timeout", Kind: KindTime, Min: int64(time.Second), Max: int64(10 * time.Minute), Default: 15 * time.Second, Effect: api.EffectNow,
		Help:  "time for asking one portal over one transport for its targets",
		field: func(c *Config) any { return &c.DiscoveryTimeout }},
	{Name: "control_timeout", Kind: KindTime, Min: int64(time.Second), Max: int64(10 * time.Minute), Default: 15 * time.Second, Effect: api.EffectNow,
		Help:  "time for one command to the block driver",
		field: func(c *Config) any { return &c.ControlTimeout }},
	{Name: "request_timeout", Kind: KindTime, Min: int64(time.Second), Max: int64(10 * time.Minute), Zero: "for ever", Default: 30 * time.Second, Effect: api.EffectLogin,
		Help:  "time for the answer to a command, twice that for a cache flush, before it is aborted and sent again; a record's own setting goes before it",
		field: func(c *Config) any { return &c.RequestTimeout }},
	{Name: "queue_depth", Kind: KindNumber, Min: 1, Max: 4096, Default: 128, Effect: api.EffectDevice,
		Help:  "requests of one queue of a device",
		field: func(c *Config) any { return &c.QueueDepth }},
	{Name: "max_io", Kind: KindNumber, Unit: "bytes", Min: 4096, Max: 1 << 20, Multiple: 4096, Default: 512 << 10, Effect: api.EffectDevice,
		Help:  "size of the largest request; the target may lower it",
		field: func(c *Config) any { return &c.MaxIO }},
	{Name: "reactors", Kind: KindNumber, Min: 1, Max: 64, Zero: "one for each CPU", Default: 0, Effect: api.EffectDataPlane,
		Help:  "data-path threads, hence sessions with each target and queues of each device",
		field: func(c *Config) any { return &c.Reactors }},
	{Name: "buffer_pool", Kind: KindNumber, Unit: "MiB", Min: 4, Max: 16 << 10, Default: 64, Effect: api.EffectDataPlane,
		Help:  "memory for I/O buffers that one reactor may come to hold, pinned and registered with the RDMA adapter; it begins with 4 MiB",
		field: func(c *Config) any { return &c.BufferPool }},
	{Name: "ack_timeout", Kind: KindTime, Min: int64(time.Millisecond), Max: int64(10 * time.Second), Zero: "16ms, soft RoCE 2s", Default: time.Duration(0), Effect: api.EffectDataPlane,
		Help:  "when an RDMA adapter sends again what is not acknowledged, rounded up to 4.096 us times a power of two",
		field: func(c *Config) any { return &c.ACKTimeout }},
	{Name: "shared_arena", Kind: KindNumber, Unit: "MiB", Min: 0, Max: 64 << 10, Default: 8, Effect: api.EffectDaemon,
		Help:  "memory that is kept registered with every device and lent in slices, pinned; a multiple of shared_slice; 0 lends none; needs Linux 7.1",
		field: func(c *Config) any { return &c.SharedArena }},
	{Name: "shared_slice", Kind: KindNumber, Unit: "MiB", Min: 1, Max: 4096, Default: 4, Effect: api.EffectDaemon,
		Help:  "size of one slice, the largest memory that one program is lent at once",
		field: func(c *Config) any { return &c.SharedSlice }},
	{Name: "shared_limit", Kind: KindNumber, Unit: "MiB", Min: 0, Max: 16 << 20, Default: 4096, Effect: api.EffectNow,
		Help:  "memory besides the arena that all users together may register, pinned as long as it is; what is registered stays; 0 allows none",
		field: func(c *Config) any { return &c.SharedLimit }},
	{Name: "shared_user_limit", Kind: KindNumber, Unit: "MiB", Min: 0, Max: 16 << 20, Default: 1024, Effect: api.EffectNow,
		Help:  "how much of it one user other than root may register, lent slices included",
		field: func(c *Config) any { return &c.SharedUserLimit }},
}

// Default returns the built-in settings.
func Default() Config {
	var c Config
	for i := range Options {
		Options[i].set(&c, Options[i].Default)
	}
	return c
}

func find(name string) *Option {
	for i := range Options {
		if Options[i].Name == name {
			return &Options[i]
		}
	}
	return nil
}

// Flag is the name of the option's flag.
func (o *Option) Flag() string { return strings.ReplaceAll(o.Name, "_", "-") }

// Variable is the name of the option's environment variable.
func (o *Option) Variable() string { return envPrefix + "_" + strings.ToUpper(o.Name) }

// Value gives what a Config has, as a file would.
func (o *Option) Value(c *Config) api.ConfigValue {
	switch p := o.field(c).(type) {
	case *string:
		return api.ConfigValue{Text: *p}
	case *time.Duration:
		return api.ConfigValue{Text: span(*p)}
	default:
		return api.ConfigValue{Text: strconv.Itoa(*p.(*int)), Number: true}
	}
}

// Copy gives dst the option's value of src.
func (o *Option) Copy(dst, src *Config) {
	switch p := o.field(src).(type) {
	case *string:
		o.set(dst, *p)
	case *time.Duration:
		o.set(dst, *p)
	default:
		o.set(dst, *p.(*int))
	}
}

func (o *Option) set(c *Config, v any) {
	switch p := o.field(c).(type) {
	case *string:
		*p = v.(string)
	case *time.Duration:
		*p = v.(time.Duration)
	default:
		*p.(*int) = v.(int)
	}
}

// Range says which values are allowed.
func (o *Option) Range() string {
	text := ""
	switch {
	case o.check != nil:
		text = "an iSCSI name"
	case len(o.Values) > 0:
		text = strings.Join(o.Values[:len(o.Values)-1], ", ") + " or " + o.Values[len(o.Values)-1]
	case o.Kind == KindText:
		text = "a path, or none"
	case o.Kind == KindTime:
		text = span(time.Duration(o.Min)) + " to " + span(time.Duration(o.Max))
	case o.Multiple > 0:
		text = fmt.Sprintf("a multiple of %d from %d to %d", o.Multiple, o.Min, o.Max)
	default:
		text = fmt.Sprintf("%d to %d", o.Min, o.Max)
	}
	if o.Zero != "" {
		text += ", or 0: " + o.Zero
	}
	return text
}

// DefaultText is the default as a file would have it, "empty" for no text.
func (o *Option) DefaultText() string {
	c := Default()
	if text := o.Value(&c).Text; text != "" {
		return text
	}
	return "empty"
}

// expected is the end of a sentence about a wrong value.
func (o *Option) expected() string {
	text := o.Range()
	if o.Unit != "" {
		text += " (" + o.Unit + ")"
	}
	return "expected " + text
}

// fromFile checks a value that a file has.
func (o *Option) fromFile(v any) (any, error) {
	if s, ok := v.(string); ok && o.Kind != KindNumber {
		return o.fromText(s)
	}
	n, whole := v.(int64)
	switch {
	case whole && o.Kind == KindNumber:
		return o.number(n)
	case whole && n == 0 && o.Kind == KindTime && o.Zero != "":
		return time.Duration(0), nil
	}
	switch o.Kind {
	case KindNumber:
		return nil, fmt.Errorf("%s is %s, expected a number: %s", o.Name, describe(v), strings.TrimPrefix(o.expected(), "expected "))
	case KindTime:
		return nil, fmt.Errorf(`%s is %s, expected a time in quotes such as "30s" or "2m": %s`, o.Name, describe(v), o.Range())
	}
	return nil, fmt.Errorf("%s is %s, expected text in quotes: %s", o.Name, describe(v), o.Range())
}

// fromText checks a value that the environment or a flag has, or a text of a file.
func (o *Option) fromText(s string) (any, error) {
	switch o.Kind {
	case KindNumber:
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s is %s, expected a number: %s", o.Name, quote(s), strings.TrimPrefix(o.expected(), "expected "))
		}
		return o.number(n)
	case KindTime:
		d, err := time.ParseDuration(s)
		if err != nil {
			return nil, fmt.Errorf(`%s is %s, expected a time such as 30s or 2m: %s`, o.Name, quote(s), o.Range())
		}
		if (d != 0 || o.Zero == "") && (int64(d) < o.Min || int64(d) > o.Max) {
			return nil, fmt.Errorf("%s is %s, %s", o.Name, span(d), o.expected())
		}
		return d, nil
	}
	if o.check != nil && s != "" {
		if err := o.check(s); err != nil {
			return nil, fmt.Errorf("%s: %w", o.Name, err)
		}
	}
	for _, v := range o.Values {
		if v == s {
			return s, nil
		}
	}
	if len(o.Values) > 0 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, fmt.Errorf("%s is %s, %s", o.Name, quote(s), o.expected())
	}
	return s, nil
}

func (o *Option) number(n int64) (any, error) {
	if n == 0 && o.Zero != "" || n >= o.Min && n <= o.Max && (o.Multiple == 0 || n%o.Multiple == 0) {
		return int(n), nil
	}
	return nil, fmt.Errorf("%s is %d, %s", o.Name, n, o.expected())
}

func checkName(s string) error { return api.CheckName(s) }

// describe names a value of the wrong type.
func describe(v any) string {
	switch v := v.(type) {
	case string:
		return "the text " + quote(v)
	case int64:
		return fmt.Sprintf("the number %d", v)
	case float64:
		return "the fraction " + strconv.FormatFloat(v, 'g', -1, 64)
	case bool:
		return strconv.FormatBool(v)
	case []any:
		return "a list"
	case map[string]any:
		return "a table"
	}
	return "a date or a time of day"
}

// quote shows a text of somebody else's: bounded, and on one line.
func quote(s string) string {
	const most = 64
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.Quote(s)
}

// span writes a time without the zeroes at its end.
func span(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	if d == 0 {
		s = "0"
	}
	return s
}
