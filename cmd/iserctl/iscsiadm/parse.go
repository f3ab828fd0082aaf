package iscsiadm

import (
	"fmt"
	"strconv"
	"strings"
)

// mode is what -m names.
type mode string

const (
	modeDiscovery   mode = "discovery"
	modeDiscoveryDB mode = "discoverydb"
	modeNode        mode = "node"
	modeSession     mode = "session"
	modeIface       mode = "iface"
	modeHost        mode = "host"
	modeFW          mode = "fw"
)

// allowed lists the options of each mode; any other is an error.
var allowed = map[mode]string{
	modeDiscovery: "DSIPdmntplov", modeDiscoveryDB: "DSIPdmntplov", modeNode: "RsPIdmlSonvupTULW", modeSession: "mPiRdrusonSv",
	modeHost: "CHdmPotnvxA", modeIface: "HIdnvmPoCabci", modeFW: "dmlWnv",
}

// op is a set of operations: -o may come more than once.
type op int

const (
	opNew op = 1 << iota
	opDelete
	opUpdate
	opShow
	opNonpersistent
	opApply
	opApplyAll
	opLogin
	opLogout
)

var opNames = map[string]op{
	"new": opNew, "delete": opDelete, "update": opUpdate, "show": opShow, "nonpersistent": opNonpersistent,
	"apply": opApply, "applyall": opApplyAll, "login": opLogin, "logout": opLogout,
}

// Types of discovery; "" is none, or one that iscsiadm does not know, which it treats alike.
const (
	typeSendTargets = "sendtargets"
	typeISNS        = "isns"
	typeFW          = "fw"
)

// The places of -p that were not given.
const (
	noPort = -1
	noTPGT = -1
)

// param is a pair of -n and -v.
type param struct{ name, value string }

// call is a command line.
type call struct {
	mode    mode
	op      op
	disc    string
	target  string
	address string // of -p, as it was written but for brackets; "" none
	port    int
	tpgt    int
	ifaces  []string
	params  []param
	sid     int // -1 none
	level   int // of -P; -1 none
	debug   int
	sub     string // of -C
	kill    bool

	login, logout, discover, rescan, stats bool
	loginAll, logoutAll                    *string
}

// stop ends a run while the command line is read. It is a value, not an error: --version is one.
type stop struct {
	out  string   // for standard output
	errs []string // for standard error; those without "! " in front get the name of the program
	code int
}

// longOptions are the long forms, in the order in which an ambiguous abbreviation lists them. A short option takes an argument when one of its long forms does.
var longOptions = []struct {
	name  string
	short byte
	arg   bool
}{
	{"mode", 'm', true}, {"portal", 'p', true}, {"targetname", 'T', true}, {"interface", 'I', true}, {"op", 'o', true}, {"type", 't', true},
	{"name", 'n', true}, {"value", 'v', true}, {"host", 'H', true}, {"sid", 'r', true}, {"rescan", 'R', false}, {"print", 'P', true},
	{"discover", 'D', false}, {"login", 'l', false}, {"loginall", 'L', true}, {"logout", 'u', false}, {"logoutall", 'U', true},
	{"stats", 's', false}, {"killiscsid", 'k', true}, {"debug", 'd', true}, {"show", 'S', false}, {"version", 'V', false}, {"help", 'h', false},
	{"submode", 'C', true}, {"ip", 'a', true}, {"packetsize", 'b', true}, {"count", 'c', true}, {"interval", 'i', true}, {"index", 'x', true},
	{"portal_type", 'A', true}, {"no_wait", 'W', false},
}

// takesArgument tells whether a short option exists and wants an argument.
func takesArgument(short byte) (arg, ok bool) {
	for _, l := range longOptions {
		if l.short == short {
			return l.arg, true
		}
	}
	return false, false
}

// option is one option as getopt_long(3) sees it. A wrong one has fault set, and the short form as far as it is known.
type option struct {
	short byte
	arg   string
	fault string
}

// scan splits arguments as getopt_long(3) does: options may stand behind other arguments, which are left out as iscsiadm does; short ones may be
// clustered and may have the argument attached; long ones may be abbreviated; "--" ends them.
func scan(args []string) []option {
	var opts []option
	for i := 0; i < len(args); i++ {
		a := args[i]
		switch {
		case a == "--":
			return opts
		case strings.HasPrefix(a, "--"):
			opts = append(opts, scanLong(a[2:], args, &i))
		case len(a) > 1 && a[0] == '-':
			for j := 1; j < len(a); j++ {
				c := a[j]
				arg, ok := takesArgument(c)
				o := option{short: c}
				switch {
				case !ok:
					o.fault = fmt.Sprintf("invalid option -- '%c'", c)
				case arg && j+1 < len(a):
					o.arg, j = a[j+1:], len(a)
				case arg && i+1 < len(args):
					i++
					o.arg, j = args[i], len(a)
				case arg:
					o.fault = fmt.Sprintf("option requires an argument -- '%c'", c)
				}
				opts = append(opts, o)
			}
		}
	}
	return opts
}

// scanLong reads what stands behind "--", and the argument behind it.
func scanLong(text string, args []string, i *int) option {
	name, arg, attached := strings.Cut(text, "=")
	var found []int
	for n, l := range longOptions {
		if l.name == name {
			found = []int{n}
			break
		}
		if strings.HasPrefix(l.name, name) {
			found = append(found, n)
		}
	}
	switch {
	case len(found) == 0:
		return option{fault: "unrecognized option '--" + name + "'"}
	case len(found) > 1:
		fault := "option '--" + text + "' is ambiguous; possibilities:"
		for _, n := range found {
			fault += " '--" + longOptions[n].name + "'"
		}
		return option{fault: fault}
	}
	l := longOptions[found[0]]
	o := option{short: l.short, arg: arg}
	switch {
	case attached && !l.arg:
		o.fault = "option '--" + l.name + "' doesn't allow an argument"
	case l.arg && !attached && *i+1 < len(args):
		*i++
		o.arg = args[*i]
	case l.arg && !attached:
		o.fault = "option '--" + l.name + "' requires an argument"
	}
	return o
}

// parse reads a command line. Whatever ends the run already, errors, --help and --version, comes back as a stop.
func parse(args []string) (call, *stop) {
	c := call{port: noPort, tpgt: noTPGT, sid: -1, level: -1}
	opts := scan(args)
	var faults []string
	var wrong byte // the last option that getopt_long has refused
	var name, value *string
	invalid := func(format string, args ...any) *stop {
		return &stop{errs: append(faults, fmt.Sprintf(format, args...)), code: codeInvalid}
	}
	for _, o := range opts {
		if o.fault != "" {
			faults = append(faults, o.fault)
			wrong = o.short
			continue
		}
		switch o.short {
		case 'm':
			c.mode = mode(o.arg)
			if s := checkOptions(c.mode, opts); s != nil {
				s.errs = append(faults, s.errs...)
				return c, s
			}
		case 'k':
			if c.kill = true; atoi(o.arg) < 0 {
				return c, invalid("Invalid killiscsid priority %d Priority must be greater than or equal to zero.", atoi(o.arg))
			}
		case 't':
			c.disc = ""
			switch o.arg {
			case "sendtargets", "st":
				c.disc = typeSendTargets
			case typeISNS, typeFW:
				c.disc = o.arg
			}
		case 'o':
			if c.op |= opNames[o.arg]; c.op == 0 {
				return c, invalid("can not recognize operation: '%s'", o.arg)
			}
		case 'n':
			name = &o.arg
		case 'v':
			value = &o.arg
		case 'r':
			if c.sid = sessionNumber(o.arg); c.sid < 0 {
				s := invalid("%s is an invalid session ID or path", o.arg)
				s.code = codeUnknown
				return c, s
			}
		case 'P':
			c.level = atoi(o.arg)
		case 'd':
			c.debug = atoi(o.arg)
		case 'T':
			c.target = o.arg
		case 'p':
			c.address, c.port, c.tpgt = splitPortal(o.arg, c.port)
		case 'I':
			if o.arg == "" || len(o.arg) > maxIface {
				return c, &stop{out: fmt.Sprintf("Invalid iface name %s. Must be from 1 to %d characters.\n", o.arg, maxIface), errs: faults, code: codeInvalid}
			}
			c.ifaces = append(c.ifaces, o.arg)
		case 'C':
			c.sub = o.arg
		case 'R':
			c.rescan = true
		case 'D':
			c.discover = true
		case 'l':
			c.login = true
		case 'u':
			c.logout = true
		case 's':
			c.stats = true
		case 'L':
			c.loginAll = &o.arg
		case 'U':
			c.logoutAll = &o.arg
		case 'V':
			return c, &stop{out: versionLine(), errs: faults}
		case 'h':
			return c, &stop{out: usage, errs: faults}
		}
		if name != nil && value != nil {
			c.params = append(c.params, param{*name, *value})
			name, value = nil, nil
		}
	}
	switch {
	case wrong != 0:
		return c, invalid("unrecognized character '%c'", wrong)
	case c.kill:
	case c.mode == "":
		s := invalid("no mode specified")
		s.errs = append(s.errs, tryHelp)
		return c, s
	case len(faults) > 0:
		return c, &stop{errs: faults, code: codeInvalid}
	}
	return c, nil
}

// maxIface is the longest name of an iface.
const maxIface = 64

// checkOptions tells whether a mode exists and knows all options of the command line.
func checkOptions(m mode, opts []option) *stop {
	may, ok := allowed[m]
	if !ok {
		return &stop{errs: []string{string(m) + " mode is unkonwn/unsupported"}, code: codeInvalid} // so spelt
	}
	for _, o := range opts {
		if o.fault == "" && strings.IndexByte(may, o.short) >= 0 {
			continue
		}
		var errs []string
		if o.fault != "" {
			errs = append(errs, o.fault)
		}
		what := "-"
		if o.short != 0 {
			what += string(rune(o.short))
		}
		return &stop{errs: append(errs, fmt.Sprintf("%s mode: option '%s' is not allowed/supported", m, what)), code: codeInvalid}
	}
	return nil
}

// splitPortal takes ADDR[:PORT][,TPGT] apart. Nothing is checked; a port that is not there stays what it was.
func splitPortal(s string, port int) (addr string, p, tpgt int) {
	p, tpgt = port, noTPGT
	rest := ""
	switch {
	case strings.HasPrefix(s, "[") && strings.Contains(s, "]"):
		addr, rest, _ = strings.Cut(s[1:], "]")
	case strings.Count(s, ":") > 1 && !strings.Contains(s, "."): // IPv6 without brackets
		addr, rest = s, ""
		if a, t, ok := strings.Cut(s, ","); ok {
			addr, rest = a, ","+t
		}
	default:
		n := strings.IndexAny(s, ":,")
		if n < 0 {
			n = len(s)
		}
		addr, rest = s[:n], s[n:]
	}
	rest, t, ok := strings.Cut(rest, ",")
	if ok {
		tpgt = atoi(t)
	}
	if n, ok := strings.CutPrefix(rest, ":"); ok {
		p = atoi(n)
	}
	return addr, p, tpgt
}

// sessionNumber reads the number of a session, or a path in sysfs that ends in one. -1 is none.
func sessionNumber(s string) int {
	if i := strings.LastIndex(s, "/session"); i >= 0 && strings.HasPrefix(s, "/") {
		s, _, _ = strings.Cut(s[i+len("/session"):], "/")
	}
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return int(n)
	}
	return -1
}

// atoi is C's: leading digits count, what is no number is 0.
func atoi(s string) int {
	s = strings.TrimLeft(s, " \t\n\v\f\r")
	sign := 1
	if s != "" && (s[0] == '-' || s[0] == '+') {
		if s[0] == '-' {
			sign = -1
		}
		s = s[1:]
	}
	n := 0
	for i := 0; i < len(s) && s[i] >= '0' && s[i] <= '9' && n < 1<<27; i++ {
		n = n*10 + int(s[i]-'0')
	}
	return sign * n
}
