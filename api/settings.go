package api

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Settings are how a session or a discovery is made, as far as the user has set it. A field that is empty or nil is not set: the default of
// its row in [SettingTable] holds. Lengths are in bytes, times in seconds. The secrets are not here: see [Secret].
type Settings struct {
	Transport        string `json:"transport,omitempty"`
	PathPolicy       string `json:"path_policy,omitempty"`
	SourceAddress    string `json:"source_address,omitempty"`
	NetworkInterface string `json:"network_interface,omitempty"`
	RDMADevice       string `json:"rdma_device,omitempty"`

	Auth           string   `json:"auth,omitempty"`
	CHAPUser       string   `json:"chap_user,omitempty"`
	CHAPTargetUser string   `json:"chap_target_user,omitempty"`
	CHAPAlgorithms []string `json:"chap_algorithms,omitempty"`
	CHAPPolicy     string   `json:"chap_policy,omitempty"`

	HeaderDigest string `json:"header_digest,omitempty"`
	DataDigest   string `json:"data_digest,omitempty"`

	MaxRecvDataSegmentLength *int  `json:"max_recv_data_segment_length,omitempty"`
	MaxBurstLength           *int  `json:"max_burst_length,omitempty"`
	FirstBurstLength         *int  `json:"first_burst_length,omitempty"`
	ImmediateData            *bool `json:"immediate_data,omitempty"`
	InitialR2T               *bool `json:"initial_r2t,omitempty"`
	MaxOutstandingR2T        *int  `json:"max_outstanding_r2t,omitempty"`
	DefaultTime2Wait         *int  `json:"default_time2wait,omitempty"`
	DefaultTime2Retain       *int  `json:"default_time2retain,omitempty"`

	LoginTimeout       *int `json:"login_timeout,omitempty"`
	LogoutTimeout      *int `json:"logout_timeout,omitempty"`
	NoopOutInterval    *int `json:"noop_out_interval,omitempty"`
	NoopOutTimeout     *int `json:"noop_out_timeout,omitempty"`
	RequestTimeout     *int `json:"request_timeout,omitempty"`
	ReplacementTimeout *int `json:"replacement_timeout,omitempty"` // Forever: without end
}

// Forever is a time without end.
const Forever = -1

// Values of the setting path_policy.
const (
	PathSingle   = "single"   // sessions stay with the portal that they were made with
	PathFailover = "failover" // they go to another portal when theirs does not answer, and back when it does
	PathSpread   = "spread"   // so, and each begins with a portal of its own

	PathRoundRobin  = "round-robin"  // there are sessions with every portal, and requests take them in turn
	PathLeastQueued = "least-queued" // so, but a request takes the session that has the fewest commands
)

// Values of the setting auth.
const (
	AuthAuto = "auto" // CHAP when there is a secret; a target that asks for none is fine, unless it has to prove itself
	AuthNone = "none" // never, also when there is a secret
	AuthCHAP = "chap" // a target that does not ask for CHAP is refused
)

// Values of the setting chap_policy.
const (
	PolicyAny    = "any"
	PolicyStrong = "strong"
)

// StrongSecret is the length of a secret that may stand alone, without IPsec, in bytes (RFC 7143 section 9.2.1).
const StrongSecret = 12

// Names of the secrets.
const (
	CHAPSecret       = "chap_secret"        // proves us to the target
	CHAPTargetSecret = "chap_target_secret" // proves the target to us: mutual CHAP
)

// CHAPAlgorithmNames are the values of chap_algorithms.
var CHAPAlgorithmNames = []string{"MD5", "SHA1", "SHA256", "SHA3-256"}

// SettingKind is the type of a setting's value.
type SettingKind string

// The kinds.
const (
	KindChoice  SettingKind = "choice"  // one of Values
	KindList    SettingKind = "list"    // some of Values with commas between, in order of preference
	KindText    SettingKind = "text"    // Min to Max bytes
	KindAddress SettingKind = "address" // an IP address
	KindDevice  SettingKind = "device"  // the name of a device in sysfs
	KindBytes   SettingKind = "bytes"   // a number from Min to Max
	KindNumber  SettingKind = "number"
	KindSeconds SettingKind = "seconds"
	KindBool    SettingKind = "bool" // Yes or No
)

// Setting describes one field of Settings.
type Setting struct {
	Name     string
	Kind     SettingKind
	Values   []string
	Min, Max int
	Forever  bool // the word "forever" is a value, too

	// What holds when nothing is set, by transport. "" means that the setting means nothing there.
	TCP, ISER string
	Discovery bool // means something for a discovery, too
	Help      string

	field func(*Settings) any
}

// maxSegment is the largest length that the header of a PDU can have.
const maxSegment = 1<<24 - 1

var digestValues = []string{"None", "CRC32C", "CRC32C,None", "None,CRC32C"}

// SettingTable has every setting, in the order in which they are shown.
var SettingTable = []Setting{
	{Name: "transport", Kind: KindChoice, Values: []string{TransportAuto, TransportISER, TransportTCP}, TCP: "auto", ISER: "auto",
		Help: "auto takes iSER where the portal answers over RDMA", field: func(s *Settings) any { return &s.Transport }},
	{Name: "path_policy", Kind: KindChoice, Values: []string{PathSingle, PathFailover, PathSpread, PathRoundRobin, PathLeastQueued}, TCP: PathFailover, ISER: PathFailover,
		Help: "whether sessions go to other portals of the target when theirs does not answer, and how they begin", field: func(s *Settings) any { return &s.PathPolicy }},
	{Name: "source_address", Kind: KindAddress, TCP: "by route", ISER: "by route", Discovery: true,
		Help: "address that connections come from", field: func(s *Settings) any { return &s.SourceAddress }},
	{Name: "network_interface", Kind: KindDevice, Max: 15, TCP: "by route", ISER: "by route", Discovery: true,
		Help: "network interface that connections go through", field: func(s *Settings) any { return &s.NetworkInterface }},
	{Name: "rdma_device", Kind: KindDevice, Max: 63, ISER: "by route", Discovery: true,
		Help: "RDMA device that connections go through", field: func(s *Settings) any { return &s.RDMADevice }},
	{Name: "auth", Kind: KindChoice, Values: []string{AuthAuto, AuthNone, AuthCHAP}, TCP: "auto", ISER: "auto", Discovery: true,
		Help: "auto uses CHAP when there is a secret; chap refuses a target that does not ask for it", field: func(s *Settings) any { return &s.Auth }},
	{Name: "chap_user", Kind: KindText, Min: 1, Max: 255, TCP: "initiator name", ISER: "initiator name", Discovery: true,
		Help: "name that we give", field: func(s *Settings) any { return &s.CHAPUser }},
	{Name: "chap_target_user", Kind: KindText, Min: 1, Max: 255, TCP: "any", ISER: "any", Discovery: true,
		Help: "name that the target has to give when it proves itself", field: func(s *Settings) any { return &s.CHAPTargetUser }},
	{Name: "chap_algorithms", Kind: KindList, Values: CHAPAlgorithmNames, TCP: "SHA3-256,SHA1,MD5,SHA256", ISER: "SHA3-256,SHA1,MD5,SHA256", Discovery: true,
		Help: "hashes that are allowed, best first; leave out what is too weak", field: func(s *Settings) any { return &s.CHAPAlgorithms }},
	{Name: "chap_policy", Kind: KindChoice, Values: []string{PolicyAny, PolicyStrong}, TCP: PolicyAny, ISER: PolicyAny, Discovery: true,
		Help: "strong refuses MD5, SHA1, secrets of less than 12 bytes, and a target that does not ask for CHAP", field: func(s *Settings) any { return &s.CHAPPolicy }},
	{Name: "header_digest", Kind: KindChoice, Values: digestValues, TCP: "None", Discovery: false,
		Help: "checksum of headers; one value alone is required, two are a preference", field: func(s *Settings) any { return &s.HeaderDigest }},
	{Name: "data_digest", Kind: KindChoice, Values: digestValues, TCP: "None",
		Help: "checksum of data; likewise", field: func(s *Settings) any { return &s.DataDigest }},
	{Name: "max_recv_data_segment_length", Kind: KindBytes, Min: 512, Max: 262144, TCP: "262144",
		Help: "longest data segment that the target may send", field: func(s *Settings) any { return &s.MaxRecvDataSegmentLength }},
	{Name: "max_burst_length", Kind: KindBytes, Min: 512, Max: maxSegment, TCP: "1048576", ISER: "16776192",
		Help: "longest sequence of data that is asked for at once", field: func(s *Settings) any { return &s.MaxBurstLength }},
	{Name: "first_burst_length", Kind: KindBytes, Min: 512, Max: maxSegment, TCP: "65536", ISER: "65536",
		Help: "most data sent without being asked for; not above max_burst_length", field: func(s *Settings) any { return &s.FirstBurstLength }},
	{Name: "immediate_data", Kind: KindBool, TCP: "Yes", ISER: "Yes",
		Help: "data behind the command itself; over iSER only for writes of up to 8 KiB", field: func(s *Settings) any { return &s.ImmediateData }},
	{Name: "initial_r2t", Kind: KindBool, TCP: "Yes",
		Help: "No allows data without being asked for; always Yes over iSER", field: func(s *Settings) any { return &s.InitialR2T }},
	{Name: "max_outstanding_r2t", Kind: KindNumber, Min: 1, Max: 65535, TCP: "1", ISER: "1",
		Help: "requests for data of one command at a time", field: func(s *Settings) any { return &s.MaxOutstandingR2T }},
	{Name: "default_time2wait", Kind: KindNumber, Max: 3600, TCP: "2", ISER: "2",
		Help: "seconds before a lost connection may be made again, as told to the target", field: func(s *Settings) any { return &s.DefaultTime2Wait }},
	{Name: "default_time2retain", Kind: KindNumber, Max: 3600, TCP: "0", ISER: "0",
		Help: "seconds for which the target keeps the tasks of a lost connection", field: func(s *Settings) any { return &s.DefaultTime2Retain }},
	{Name: "login_timeout", Kind: KindSeconds, Min: 1, Max: 600, TCP: "the daemon's", ISER: "the daemon's", Discovery: true,
		Help: "time for a login, connecting included, and for each attempt to bring a lost session back", field: func(s *Settings) any { return &s.LoginTimeout }},
	{Name: "logout_timeout", Kind: KindSeconds, Min: 1, Max: 120, TCP: "5", ISER: "5",
		Help: "time for the target to agree to a logout", field: func(s *Settings) any { return &s.LogoutTimeout }},
	{Name: "noop_out_interval", Kind: KindSeconds, Max: 3600, TCP: "5", ISER: "5",
		Help: "silence after which the target is asked whether it is there; 0 never asks", field: func(s *Settings) any { return &s.NoopOutInterval }},
	{Name: "noop_out_timeout", Kind: KindSeconds, Min: 1, Max: 3600, TCP: "15", ISER: "15",
		Help: "time for the answer, then the session is given up", field: func(s *Settings) any { return &s.NoopOutTimeout }},
	{Name: "request_timeout", Kind: KindSeconds, Max: 600, TCP: "the daemon's", ISER: "the daemon's",
		Help: "time for the answer to a command, then it is aborted and sent again; 0 waits without end", field: func(s *Settings) any { return &s.RequestTimeout }},
	{Name: "replacement_timeout", Kind: KindSeconds, Max: 86400, Forever: true, TCP: "30", ISER: "30",
		Help: "time that requests wait for a lost session before they fail; 0 fails them at once", field: func(s *Settings) any { return &s.ReplacementTimeout }},
}

// FindSetting returns the row of a name. The error is ErrInvalidArgs and lists the names.
func FindSetting(name string) (*Setting, error) {
	if name == CHAPSecret || name == CHAPTargetSecret {
		return nil, Errorf(ErrInvalidArgs, "%s is a secret and no setting: others could read it here; see: iserctl node secret --help", name)
	}
	if i := slices.IndexFunc(SettingTable, func(r Setting) bool { return r.Name == name }); i >= 0 {
		return &SettingTable[i], nil
	}
	var names []string
	for _, r := range SettingTable {
		names = append(names, r.Name)
	}
	return nil, Errorf(ErrInvalidArgs, "unknown setting %s; there are %s", quote(name), strings.Join(names, ", "))
}

// Range says in a few words what values are possible.
func (r *Setting) Range() string {
	switch r.Kind {
	case KindChoice:
		return oneOf(r.Values)
	case KindList:
		return "a list of " + strings.Join(r.Values, ", ")
	case KindText:
		return fmt.Sprintf("%d to %d bytes of text", max(r.Min, 1), r.Max)
	case KindAddress:
		return "an IP address"
	case KindDevice:
		return "the name of a device"
	case KindBool:
		return "Yes or No"
	case KindBytes:
		return fmt.Sprintf("%d to %d bytes", r.Min, r.Max)
	case KindSeconds:
		if r.Forever {
			return fmt.Sprintf("%d to %d seconds, or forever", r.Min, r.Max)
		}
		return fmt.Sprintf("%d to %d seconds", r.Min, r.Max)
	}
	return fmt.Sprintf("%d to %d", r.Min, r.Max)
}

// Default says what holds when nothing is set.
func (r *Setting) Default() string {
	switch {
	case r.TCP == r.ISER:
		return r.TCP
	case r.ISER == "":
		return r.TCP + " (TCP only)"
	case r.TCP == "":
		return r.ISER + " (iSER only)"
	}
	return r.TCP + " over TCP, " + r.ISER + " over iSER"
}

// Text is the value that was set, or "".
func (r *Setting) Text(s *Settings) string {
	switch p := r.field(s).(type) {
	case *string:
		return *p
	case *[]string:
		return strings.Join(*p, ",")
	case **bool:
		switch {
		case *p == nil:
			return ""
		case **p:
			return "Yes"
		}
		return "No"
	case **int:
		switch {
		case *p == nil:
			return ""
		case **p == Forever:
			return "forever"
		}
		return strconv.Itoa(**p)
	}
	return ""
}

// Set gives a setting a value from text. On an error, which is ErrInvalidArgs and names the range, s is as it was.
func (s *Settings) Set(name, value string) error {
	r, err := FindSetting(name)
	if err != nil {
		return err
	}
	next := *s
	if err := r.parse(&next, strings.TrimSpace(value)); err != nil {
		return Errorf(ErrInvalidArgs, "%s=%s: %w; expected %s", name, quote(value), err, r.Range())
	}
	*s = next
	return nil
}

// Unset takes a setting back to its default.
func (s *Settings) Unset(name string) error {
	r, err := FindSetting(name)
	if err != nil {
		return err
	}
	switch p := r.field(s).(type) {
	case *string:
		*p = ""
	case *[]string:
		*p = nil
	case **bool:
		*p = nil
	case **int:
		*p = nil
	}
	return nil
}

// parse puts a checked value into s.
func (r *Setting) parse(s *Settings, text string) error {
	if text == "" {
		return fmt.Errorf("no value")
	}
	switch p := r.field(s).(type) {
	case *string:
		v, err := r.parseText(text)
		*p = v
		return err
	case *[]string:
		list, err := r.parseList(text)
		*p = list
		return err
	case **bool:
		v, err := parseBool(text)
		*p = &v
		return err
	case **int:
		v, err := r.parseNumber(text)
		*p = &v
		return err
	}
	return nil
}

func (r *Setting) parseText(text string) (string, error) {
	switch r.Kind {
	case KindChoice:
		for _, v := range r.Values {
			if strings.EqualFold(v, text) {
				return v, nil
			}
		}
		return "", fmt.Errorf("no such choice")
	case KindAddress:
		a, err := netip.ParseAddr(text)
		if err != nil || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" && checkZone(a.Zone()) != "" {
			return "", fmt.Errorf("no unicast address")
		}
		return a.Unmap().String(), nil
	case KindDevice:
		if len(text) > r.Max || text == "." || text == ".." || strings.ContainsFunc(text, func(c rune) bool {
			return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.')
		}) {
			return "", fmt.Errorf("no name of a device")
		}
		return text, nil
	}
	if len(text) < r.Min || len(text) > r.Max || !utf8.ValidString(text) || strings.ContainsFunc(text, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return "", fmt.Errorf("too long, not UTF-8, or with control characters")
	}
	return text, nil
}

func (r *Setting) parseList(text string) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		i := slices.IndexFunc(r.Values, func(v string) bool {
			return strings.EqualFold(v, part) || strings.EqualFold(strings.ReplaceAll(v, "SHA", "SHA-"), part)
		})
		if i < 0 {
			return nil, fmt.Errorf("%s is not known", quote(part))
		}
		if !slices.Contains(out, r.Values[i]) {
			out = append(out, r.Values[i])
		}
	}
	return out, nil
}

func parseBool(text string) (bool, error) {
	switch strings.ToLower(text) {
	case "yes", "true":
		return true, nil
	case "no", "false":
		return false, nil
	}
	return false, fmt.Errorf("neither Yes nor No")
}

func (r *Setting) parseNumber(text string) (int, error) {
	if r.Forever && strings.EqualFold(text, "forever") {
		return Forever, nil
	}
	v, err := strconv.ParseUint(text, 10, 31)
	if d, derr := time.ParseDuration(text); err != nil && derr == nil && r.Kind == KindSeconds {
		if sec := d.Seconds(); sec >= 0 && sec <= math.MaxInt32 && sec == math.Trunc(sec) {
			v, err = uint64(sec), nil
		}
	}
	if err != nil || int(v) < r.Min || int(v) > r.Max {
		return 0, fmt.Errorf("out of range")
	}
	return int(v), nil
}

// Check finds values that are out of range, as a damaged file may have them, and values that do not go together. The error is ErrInvalidArgs.
func (s *Settings) Check() error {
	for i := range SettingTable {
		r := &SettingTable[i]
		text := r.Text(s)
		if text == "" {
			continue
		}
		var again Settings
		if err := r.parse(&again, text); err != nil {
			return Errorf(ErrInvalidArgs, "%s=%s: %w; expected %s", r.Name, quote(text), err, r.Range())
		}
		if r.Text(&again) != text {
			return Errorf(ErrInvalidArgs, "%s=%s: expected %s", r.Name, quote(text), r.Range())
		}
	}
	bad := func(format string, args ...any) error { return Errorf(ErrInvalidArgs, format, args...) }
	if f, m := s.FirstBurstLength, s.MaxBurstLength; f != nil && m != nil && *f > *m {
		return bad("first_burst_length=%d is above max_burst_length=%d (RFC 7143 section 13.14)", *f, *m)
	}
	for _, a := range s.CHAPAlgorithms {
		if s.CHAPPolicy == PolicyStrong && (a == "MD5" || a == "SHA1") {
			return bad("chap_algorithms has %s, which chap_policy=strong refuses", a)
		}
	}
	if s.Transport == TransportTCP && s.RDMADevice != "" {
		return bad("rdma_device=%s does not go with transport=tcp", s.RDMADevice)
	}
	if s.Transport == TransportISER && (s.HeaderDigest != "" && s.HeaderDigest != "None" || s.DataDigest != "" && s.DataDigest != "None") {
		return bad("digests do not go with transport=iser: RDMA has its own checksums (RFC 7145 section 6.1)")
	}
	return nil
}

// Clone copies s, so that neither changes the other.
func (s Settings) Clone() Settings {
	var out Settings
	for i := range SettingTable {
		r := &SettingTable[i]
		switch p := r.field(&s).(type) {
		case *string:
			*r.field(&out).(*string) = *p
		case *[]string:
			*r.field(&out).(*[]string) = slices.Clone(*p)
		case **bool:
			if *p != nil {
				v := **p
				*r.field(&out).(**bool) = &v
			}
		case **int:
			if *p != nil {
				v := **p
				*r.field(&out).(**int) = &v
			}
		}
	}
	return out
}

// Changed lists the names of the settings in which s and o differ.
func (s *Settings) Changed(o *Settings) []string {
	var out []string
	for i := range SettingTable {
		if r := &SettingTable[i]; r.Text(s) != r.Text(o) && !(r.Name == "transport" && orAuto(s.Transport) == orAuto(o.Transport)) {
			out = append(out, r.Name)
		}
	}
	return out
}

func orAuto(t string) string {
	if t == "" {
		return TransportAuto
	}
	return t
}

// SecondsOr gives a time of the settings as a duration, or the fallback when it is not set.
func SecondsOr(v *int, fallback time.Duration) time.Duration {
	if v == nil {
		return fallback
	}
	return time.Duration(*v) * time.Second
}

func oneOf(values []string) string {
	if len(values) == 1 {
		return values[0]
	}
	return strings.Join(values[:len(values)-1], ", ") + " or " + values[len(values)-1]
}
