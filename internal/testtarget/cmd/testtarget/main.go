// Command testtarget serves units by the scripted target of package testtarget, for initiators that are not a Go test: iscsi-test-cu, open-iscsi,
// iserd in a scenario.
//
//	testtarget [-listen ADDR:PORT] [-iser] [-name IQN] [-unit SPEC]... [-user NAME -secret-file FILE] [-control]
//
// SPEC is a list of size=64M, file=PATH, block=4096, physical=3, serial=TEXT, type=5, space=16M, thin, ro; "none" leaves a LUN out. It prints one line,
// "listening on ADDR:PORT name IQN", when initiators can log in, and ends with SIGTERM, SIGINT or, with -control, at the end of its standard
// input. With -control each line of standard input is a command; "help" lists them, and every one is answered by a line that begins with
// "ok" or "error".
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"iserd.org/iserd/internal/testtarget"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	if err := run(os.Args[1:], os.Stdin, os.Stdout, signals); err != nil {
		fmt.Fprintln(os.Stderr, "testtarget:", err)
		os.Exit(1)
	}
}

// run serves until a signal comes or, with -control, in ends.
func run(words []string, in io.Reader, out io.Writer, signals <-chan os.Signal) error {
	var c testtarget.Config
	flags := flag.NewFlagSet("testtarget", flag.ContinueOnError)
	flags.StringVar(&c.Addr, "listen", "127.0.0.1:3260", "address and port")
	flags.BoolVar(&c.ISER, "iser", false, "speak iSER over RDMA")
	flags.StringVar(&c.Name, "name", testtarget.DefaultName, "iSCSI name")
	user := flags.String("user", "", "ask for CHAP with this name")
	secretFile := flags.String("secret-file", "", "file with the secret of -user")
	control := flags.Bool("control", false, "take commands from standard input")
	flags.Func("unit", "a logical unit; see the package comment", func(s string) error {
		u, err := parseUnit(s)
		c.Units = append(c.Units, u)
		return err
	})
	if err := flags.Parse(words); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is too much", flags.Args())
	}
	if *user != "" {
		secret, err := os.ReadFile(*secretFile)
		if err != nil {
			return fmt.Errorf("-secret-file: %w", err)
		}
		c.CHAP = &testtarget.CHAP{User: *user, Secret: strings.TrimRight(string(secret), "\n")}
	}
	target, err := testtarget.Start(c)
	if err != nil {
		return err
	}
	defer target.Close()
	fmt.Fprintf(out, "listening on %s name %s\n", target.Addr(), target.Name())
	if !*control {
		<-signals
		return nil
	}
	lines := make(chan string)
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(in); s.Scan(); {
			select {
			case lines <- s.Text():
			case <-ended:
				return
			}
		}
	}()
	for {
		select {
		case <-signals:
			return nil
		case line, ok := <-lines:
			if !ok {
				return nil
			}
			words := strings.Fields(line)
			if len(words) == 0 {
				continue
			}
			answer, err := command(target, words)
			if err != nil {
				answer = "error " + strings.ReplaceAll(err.Error(), "\n", "; ")
			} else {
				answer = strings.TrimSpace("ok " + answer)
			}
			fmt.Fprintln(out, answer)
		}
	}
}

// parseUnit reads the SPEC of a unit; nil stands for none.
func parseUnit(spec string) (*testtarget.Unit, error) {
	if spec == "none" {
		return nil, nil
	}
	var size int64
	var path string
	set := testtarget.Unit{}
	for _, item := range strings.Split(spec, ",") {
		key, value, _ := strings.Cut(item, "=")
		var err error
		switch key {
		case "size":
			size, err = parseSize(value)
		case "file":
			path = value
		case "block":
			set.BlockSize, err = strconv.Atoi(value)
		case "physical":
			set.PhysicalBlocks, err = strconv.Atoi(value)
		case "serial":
			set.Serial = value
		case "type":
			var n uint64
			n, err = strconv.ParseUint(value, 0, 5)
			set.Type = byte(n)
		case "space":
			set.Space, err = parseSize(value)
		case "thin":
			set.Thin = true
		case "ro":
			set.ReadOnly = true
		default:
			err = errors.New("there is no such property")
		}
		if err != nil {
			return nil, fmt.Errorf("unit %q: %s: %w", spec, item, err)
		}
	}
	if path == "" && size == 0 {
		return nil, fmt.Errorf("unit %q: a size or a file is needed", spec)
	}
	u := testtarget.NewUnit(int(size))
	if path != "" {
		var err error
		if u, err = testtarget.NewFileUnit(path, size); err != nil {
			return nil, err
		}
	}
	u.BlockSize, u.PhysicalBlocks, u.Serial, u.Type = set.BlockSize, set.PhysicalBlocks, set.Serial, set.Type
	u.Thin, u.Space, u.ReadOnly = set.Thin, set.Space, set.ReadOnly
	return u, nil
}

func parseSize(s string) (int64, error) {
	shift := 0
	if s != "" {
		if i := strings.IndexByte("KMGT", s[len(s)-1]); i >= 0 {
			s, shift = s[:len(s)-1], 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(s, 10, 40)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%q is not a size such as 512, 64M or 1T", s)
	}
	return n << shift, nil
}

// verb is a command of -control.
type verb struct {
	usage string
	run   func(t *testtarget.Target, a args) (string, error)
}

// args are the words after the verb; a wrong one is noted.
type args struct {
	words []string
	err   *error
}

func (a args) num(i int) int {
	n, err := strconv.ParseInt(a.words[i], 0, 64)
	if err != nil && *a.err == nil {
		*a.err = fmt.Errorf("%q is not a number", a.words[i])
	}
	return int(n)
}

func (a args) unit(t *testtarget.Target) *testtarget.Unit {
	u := t.Unit(a.num(0))
	if u == nil {
		if *a.err == nil {
			*a.err = fmt.Errorf("there is no unit at LUN %s", a.words[0])
		}
		return testtarget.NewUnit(512)
	}
	return u
}

// onEach makes a verb of something that is done to every session.
func onEach(usage string, f func(c *testtarget.Conn, a args) error) verb {
	return verb{usage, func(t *testtarget.Target, a args) (string, error) {
		var errs []error
		list := t.Conns()
		for _, c := range list {
			if c.FullFeature() {
				errs = append(errs, f(c, a))
			}
		}
		return fmt.Sprintf("%d connections", len(list)), errors.Join(errs...)
	}}
}

var verbs = map[string]verb{
	"grow": {"LUN SIZE", func(t *testtarget.Target, a args) (string, error) {
		n, err := parseSize(a.words[1])
		if err != nil {
			return "", err
		}
		return "", a.unit(t).Grow(n)
	}},
	"map": {"LUN SPEC", func(t *testtarget.Target, a args) (string, error) {
		u, err := parseUnit(a.words[1])
		if lun := a.num(0); err == nil && *a.err == nil {
			t.Map(lun, u)
		}
		return "", err
	}},
	"unmap": {"LUN", func(t *testtarget.Target, a args) (string, error) {
		t.Unmap(a.num(0))
		return "", nil
	}},
	"serial": {"LUN TEXT", func(t *testtarget.Target, a args) (string, error) {
		u := a.unit(t)
		u.SetSerial(a.words[1])
		u.Attention(0x3f, 0x03)
		return "", nil
	}},
	"alua": {"LUN GROUP STATE", func(t *testtarget.Target, a args) (string, error) {
		a.unit(t).SetALUA(uint16(a.num(1)), byte(a.num(2)))
		return "", nil
	}},
	"attention": {"LUN ASC ASCQ", func(t *testtarget.Target, a args) (string, error) {
		a.unit(t).Attention(byte(a.num(1)), byte(a.num(2)))
		return "", nil
	}},
	"fault": {"LUN COUNT STATUS KEY ASC ASCQ", func(t *testtarget.Target, a args) (string, error) {
		var sense []byte
		if a.num(2) == testtarget.CheckCondition {
			sense = testtarget.Sense(byte(a.num(3)), byte(a.num(4)), byte(a.num(5)))
		}
		a.unit(t).FaultNext(a.num(1), -1, byte(a.num(2)), sense)
		return "", nil
	}},
	"faultless": {"LUN", func(t *testtarget.Target, a args) (string, error) {
		a.unit(t).ClearFaults()
		return "", nil
	}},
	"held": {"LUN", func(t *testtarget.Target, a args) (string, error) {
		return strconv.FormatInt(a.unit(t).Held(), 10), nil
	}},
	"async": onEach("EVENT P1 P2 P3", func(c *testtarget.Conn, a args) error {
		return c.Async(byte(a.num(0)), uint16(a.num(1)), uint16(a.num(2)), uint16(a.num(3)))
	}),
	"ping":         onEach("TTT", func(c *testtarget.Conn, a args) error { return c.Ping(uint32(a.num(0)), nil) }),
	"close-window": onEach("", func(c *testtarget.Conn, _ args) error { c.CloseWindow(); return nil }),
	"open-window":  onEach("", func(c *testtarget.Conn, _ args) error { return c.OpenWindow() }),
	"drop":         onEach("", func(c *testtarget.Conn, _ args) error { c.Close(); return nil }),
	"sessions": {"", func(t *testtarget.Target, _ args) (string, error) {
		return fmt.Sprintf("%d now, %d so far", t.Sessions(), t.Logins()), nil
	}},
	"violations": {"", func(t *testtarget.Target, _ args) (string, error) { return strings.Join(t.Violations(), "; "), nil }},
}

func command(t *testtarget.Target, words []string) (out string, err error) {
	if words[0] == "help" {
		for _, name := range slices.Sorted(maps.Keys(verbs)) {
			out += "; " + strings.TrimSpace(name+" "+verbs[name].usage)
		}
		return strings.TrimPrefix(out, "; "), nil
	}
	v, ok := verbs[words[0]]
	if want := len(strings.Fields(v.usage)); !ok || len(words) != want+1 {
		return "", fmt.Errorf("%s: usage is %q; help lists the commands", words[0], v.usage)
	}
	var wrong error
	out, err = v.run(t, args{words[1:], &wrong})
	return out, errors.Join(wrong, err)
}
