package login

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"iserd.org/iserd/iscsi/pdu"
)

var update = flag.Bool("update", false, "rewrite the expected output of testdata/*.txt")

// TestScripts runs testdata/*.txt. A script is a list of blocks: command, "----", expected output, blank line.
//
//	new [tcp|iser] [discovery] [chap=USER:SECRET] [mutual=USER:SECRET] [required] [strong] [alg=5,7] [digest=CRC32C,None] [alias=TEXT] [Key=value ...]
//	resp [T] [C] [csg=N] [nsg=N] [statsn=N] [expcmdsn=N] [maxcmdsn=N] [tsih=N] [status=CCDD] [itt=N] [isid=HEX] [version=N] [op=HEX] [dsl=N] [short] [times=N]
//	Key=value                 one line each, the text of the response
//
// In a value, @chap(ALG,ID,SECRET,HEX) is a CHAP response and @repeat(TEXT,N) a long text; a line
// @keys(N) stands for N different keys that nobody knows. Random bytes of the machine are 01 02 03 ...
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			old, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(old))
			if *update {
				if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(old) {
				a, b := strings.Split(got, "\n"), strings.Split(string(old), "\n")
				for i := range a {
					if i >= len(b) || a[i] != b[i] {
						t.Fatalf("%s:%d: got\n%s\nrun with -update and review the diff", name, i+1, strings.Join(a[i:min(i+12, len(a))], "\n"))
					}
				}
				t.Fatal("output is shorter than expected")
			}
		})
	}
}

// counter is the random source of the scripts.
type counter byte

func (c *counter) Read(p []byte) (int, error) {
	for i := range p {
		*c++
		p[i] = byte(*c)
	}
	return len(p), nil
}

// runner is the state of one script.
type runner struct {
	t *testing.T
	m *Machine
}

// runScript gives the script back with the output that the machine makes now.
func runScript(t *testing.T, script string) string {
	r := &runner{t: t}
	var out strings.Builder
	lines := strings.Split(strings.TrimRight(script, "\n"), "\n")
	for i := 0; i < len(lines); {
		if lines[i] == "" || lines[i][0] == '#' {
			fmt.Fprintln(&out, lines[i])
			i++
			continue
		}
		start := i
		for i < len(lines) && lines[i] != "----" {
			i++
		}
		command := lines[start:i]
		for i < len(lines) && lines[i] != "" {
			i++
		}
		fmt.Fprintf(&out, "%s\n----\n%s", strings.Join(command, "\n"), r.run(command))
	}
	return out.String()
}

func (r *runner) run(command []string) string {
	args := strings.Fields(command[0])
	switch args[0] {
	case "new":
		return r.create(args[1:])
	case "resp":
		return r.respond(args[1:], command[1:])
	}
	r.t.Fatalf("unknown command %q", command[0])
	return ""
}

const (
	scriptITT = 0x10
	scriptCmd = 1
)

var scriptISID = [6]byte{0x80, 1, 2, 3, 4, 5}

func (r *runner) create(args []string) string {
	c := Config{
		InitiatorName: "iqn.2003-01.org.example:host", TargetName: "iqn.2003-01.org.example:t1", SessionType: Normal, Transport: TCP,
		ISID: scriptISID, ITT: scriptITT, CmdSN: scriptCmd, Rand: new(counter),
	}
	var edit pdu.Keys
	for _, a := range args {
		name, v, _ := strings.Cut(a, "=")
		switch name {
		case "tcp":
		case "iser":
			c.Transport = ISER
		case "discovery":
			c.SessionType, c.TargetName = Discovery, ""
		case "chap", "mutual":
			user, secret, _ := strings.Cut(v, ":")
			if name == "chap" {
				c.Auth.User, c.Auth.Secret = user, NewSecret([]byte(secret))
			} else {
				c.Auth.TargetUser, c.Auth.TargetSecret = user, NewSecret([]byte(secret))
			}
		case "required":
			c.Auth.Required = true
		case "strong":
			c.Auth.Strong = true
		case "alg":
			for n := range strings.SplitSeq(v, ",") {
				a, _ := strconv.Atoi(n)
				c.Auth.Algorithms = append(c.Auth.Algorithms, CHAPAlgorithm(a))
			}
		case "digest":
			for n := range strings.SplitSeq(v, ",") {
				d, _ := parseDigest(n)
				c.HeaderDigest, c.DataDigest = append(c.HeaderDigest, d), append(c.DataDigest, d)
			}
		case "alias":
			c.InitiatorAlias = v
		case "target":
			c.TargetName = v
		case "tsih":
			n, _ := parseNumber(v)
			c.TSIH = uint16(n)
		default:
			edit.Add(name, v)
		}
	}
	if edit != nil {
		k := DefaultKeys(c.Transport, c.SessionType)
		for _, e := range edit {
			row := &rows[rowOf(e.Name)]
			if row.flag != nil {
				*row.flag(&k), _ = parseBool(e.Value)
			} else {
				n, _ := parseNumber(e.Value)
				if row.mine != nil {
					*row.mine(&k) = n
				} else {
					row.setNumber(&k, n)
				}
			}
		}
		c.Keys = &k
	}
	var err error
	if r.m, err = New(c); err != nil {
		return "error: " + err.Error() + "\n"
	}
	return showRequest(r.t, r.m.Start())
}

var macro = regexp.MustCompile(`@(chap|repeat)\(([^)]*)\)`)

// expand replaces the macros of a value.
func expand(t *testing.T, s string) string {
	return macro.ReplaceAllStringFunc(s, func(m string) string {
		p := macro.FindStringSubmatch(m)
		a := strings.Split(p[2], ",")
		if p[1] == "repeat" {
			n, _ := strconv.Atoi(a[1])
			return strings.Repeat(a[0], n)
		}
		alg, _ := strconv.Atoi(a[0])
		id, _ := strconv.Atoi(a[1])
		challenge, err := hex.DecodeString(a[3])
		if err != nil {
			t.Fatal(err)
		}
		c := chap{chosen: CHAPAlgorithm(alg)}
		return "0x" + hex.EncodeToString(c.digest(byte(id), NewSecret([]byte(a[2])), challenge))
	})
}

func (r *runner) respond(args, text []string) string {
	var segment []byte
	for _, l := range text {
		if v, ok := strings.CutPrefix(l, "@keys("); ok {
			n, _ := strconv.Atoi(strings.TrimSuffix(v, ")"))
			for i := range n {
				segment = fmt.Appendf(segment, "X-%d=\x00", i)
			}
			continue
		}
		segment = append(append(segment, expand(r.t, l)...), 0)
	}
	var b pdu.BHS
	h := pdu.NewLoginResponse(&b)
	h.SetISID(scriptISID)
	h.SetInitiatorTaskTag(scriptITT)
	h.SetExpCmdSN(scriptCmd)
	h.SetMaxCmdSN(scriptCmd + 31)
	h.SetDataSegmentLength(len(segment))
	var transit, more bool
	var csg, nsg pdu.Stage
	times := 1
	for _, a := range args {
		name, v, _ := strings.Cut(a, "=")
		n, _ := strconv.ParseUint(v, 0, 32)
		switch name {
		case "T":
			transit = true
		case "C":
			more = true
		case "csg":
			csg = pdu.Stage(n)
		case "nsg":
			nsg = pdu.Stage(n)
		case "statsn":
			h.SetStatSN(uint32(n))
		case "expcmdsn":
			h.SetExpCmdSN(uint32(n))
		case "maxcmdsn":
			h.SetMaxCmdSN(uint32(n))
		case "tsih":
			h.SetTSIH(uint16(n))
		case "itt":
			h.SetInitiatorTaskTag(uint32(n))
		case "isid":
			id, _ := hex.DecodeString(v)
			h.SetISID([6]byte(id))
		case "version":
			h.SetVersionActive(uint8(n))
		case "status":
			s, _ := hex.DecodeString(v)
			h.SetStatus(s[0], s[1])
		case "dsl":
			h.SetDataSegmentLength(int(n))
		case "short":
			segment = segment[:len(segment)-1]
			h.SetDataSegmentLength(len(segment))
		case "times":
			times = int(n)
		}
	}
	h.SetStage(transit, more, csg, nsg)
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "op="); ok {
			n, _ := strconv.ParseUint(v, 16, 8)
			b[0] = byte(n)
		}
	}
	out := ""
	for i := range times {
		req, res, err := r.m.Step(&b, bytes.Clone(segment))
		if n := count(req != nil, res != nil, err != nil); n != 1 {
			r.t.Fatalf("Step gave %d of request, result and error", n)
		}
		switch {
		case err != nil:
			out = "error: " + err.Error() + "\n"
			var le *LoginError
			if errors.As(err, &le) {
				out += fmt.Sprintf("login error, retry %v\n", RetryOf(err))
				if r, ok := le.Redirection(); ok {
					out += fmt.Sprintf("redirection, permanent %v: %v\n", r.Permanent, r.Addresses)
				}
			}
			if times > 1 {
				out = fmt.Sprintf("after %d: %s", i+1, out)
			}
			return out
		case res != nil:
			out = showResult(res)
		default:
			out = showRequest(r.t, req)
		}
	}
	return out
}

func count(list ...bool) (n int) {
	for _, b := range list {
		if b {
			n++
		}
	}
	return n
}

// showRequest prints the header, and the text one key per line, or its length when it is long.
func showRequest(t *testing.T, q *Request) string {
	if err := q.BHS.Valid(pdu.FromInitiator, len(q.Text)); err != nil || q.BHS.DataSegmentLength() != len(q.Text) {
		t.Fatalf("request %v is not valid: %v", &q.BHS, err)
	}
	s := "-> " + strings.TrimPrefix(q.BHS.String(), "Login Request I ") + "\n"
	if q.Final {
		s += "   final\n"
	}
	if len(q.Text) > 1024 {
		return s + fmt.Sprintf("   %d bytes of text\n", len(q.Text))
	}
	for pair := range strings.SplitSeq(strings.TrimSuffix(string(q.Text), "\x00"), "\x00") {
		if pair != "" {
			s += "   " + pair + "\n"
		}
	}
	return s
}

func showResult(r *Result) string {
	s := fmt.Sprintf("done TSIH=%#04x ExpStatSN=%d CmdSN=%d ExpCmdSN=%d MaxCmdSN=%d auth=%q alias=%q",
		r.TSIH, r.ExpStatSN, r.CmdSN, r.ExpCmdSN, r.MaxCmdSN, r.AuthMethod, r.TargetAlias)
	if r.HasPortalGroupTag {
		s += fmt.Sprintf(" TPGT=%d", r.TargetPortalGroupTag)
	}
	if r.TargetArchitecture != "" {
		s += fmt.Sprintf(" arch=%q", r.TargetArchitecture)
	}
	s += "\n"
	for _, k := range slices.Sorted(maps.Keys(r.Negotiated)) {
		s += "   " + k + "=" + r.Negotiated[k]
		if k == "MaxRecvDataSegmentLength" {
			s += fmt.Sprintf(" (ours %d)", r.Keys.MaxRecvDataSegmentLength)
		}
		s += "\n"
	}
	return s
}
