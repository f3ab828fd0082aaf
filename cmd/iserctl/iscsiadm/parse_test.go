package iscsiadm

import (
	"reflect"
	"strings"
	"testing"
)

func str(s string) *string { return &s }

// TestParse: the command lines of os-brick, csi-lib-iscsi and Ansible, and the forms that getopt_long(3) allows.
func TestParse(t *testing.T) {
	none := call{port: noPort, tpgt: noTPGT, sid: -1, level: -1}
	with := func(f func(*call)) call {
		c := none
		f(&c)
		return c
	}
	login := with(func(c *call) { c.mode, c.target, c.address, c.port, c.login = modeNode, "T", "10.0.0.1", 3260, true })
	for _, x := range []struct {
		line string
		want call
	}{
		{"-m node -T T -p 10.0.0.1:3260 -l", login},
		{"-lmnode -TT -p10.0.0.1:3260", login},
		{"--login --mode node --targetname T --portal 10.0.0.1:3260", login},
		{"--login --mode=node --target=T --portal=10.0.0.1:3260", login},
		{"left -m node out -T T -p 10.0.0.1:3260 -l this", login},
		{"-m node -T T -p 10.0.0.1:3260 -l -- -Z --bogus", login},
		{"-m node -T x -T T -p 10.0.0.1:3260 --login", login},
		{"-m node -p [fd00::1]:3261,4 -u", with(func(c *call) { c.mode, c.address, c.port, c.tpgt, c.logout = modeNode, "fd00::1", 3261, 4, true })},
		{"-m node -p fd00::1", with(func(c *call) { c.mode, c.address = modeNode, "fd00::1" })},
		{"-m node -p fd00::1,2", with(func(c *call) { c.mode, c.address, c.tpgt = modeNode, "fd00::1", 2 })},
		{"-m node -p [fd00::1]", with(func(c *call) { c.mode, c.address = modeNode, "fd00::1" })},
		{"-m node -p storage:860", with(func(c *call) { c.mode, c.address, c.port = modeNode, "storage", 860 })},
		{"-m node -p 10.0.0.1,1", with(func(c *call) { c.mode, c.address, c.tpgt = modeNode, "10.0.0.1", 1 })},
		{"-m node -T T --interface default --op new", with(func(c *call) { c.mode, c.target, c.ifaces, c.op = modeNode, "T", []string{"default"}, opNew })},
		{"-m node --op update -n a -v 1 -n b -v 2", with(func(c *call) {
			c.mode, c.op, c.params = modeNode, opUpdate, []param{{"a", "1"}, {"b", "2"}}
		})},
		{"-m node --op=update --value 1 --name a", with(func(c *call) { c.mode, c.op, c.params = modeNode, opUpdate, []param{{"a", "1"}} })},
		{"-m node -o update -n a -n b -v 2", with(func(c *call) { c.mode, c.op, c.params = modeNode, opUpdate, []param{{"b", "2"}} })},
		{"-m discovery -t st -p 10.0.0.1 -o new -o delete", with(func(c *call) {
			c.mode, c.disc, c.address, c.op = modeDiscovery, typeSendTargets, "10.0.0.1", opNew|opDelete
		})},
		{"-m discoverydb --type sendtargets -p 10.0.0.1 --discover -I iser -I default", with(func(c *call) {
			c.mode, c.disc, c.address, c.discover, c.ifaces = modeDiscoveryDB, typeSendTargets, "10.0.0.1", true, []string{"iser", "default"}
		})},
		{"-m session -P3", with(func(c *call) { c.mode, c.level = modeSession, 3 })},
		{"-m session -r 7 -R", with(func(c *call) { c.mode, c.sid, c.rescan = modeSession, 7, true })},
		{"-m session --sid=/sys/class/iscsi_session/session7 -s -d 8", with(func(c *call) { c.mode, c.sid, c.stats, c.debug = modeSession, 7, true, 8 })},
		{"-m session -r /sys/devices/platform/host2/session7/iscsi_session -u", with(func(c *call) { c.mode, c.sid, c.logout = modeSession, 7, true })},
		{"-m node --loginall=automatic -W", with(func(c *call) { c.mode, c.loginAll = modeNode, str("automatic") })},
		{"-m node --logoutall all -S", with(func(c *call) { c.mode, c.logoutAll = modeNode, str("all") })},
		{"-m host -H 3 -C chap", with(func(c *call) { c.mode, c.sub = modeHost, "chap" })},
		{"-k 0", with(func(c *call) { c.kill = true })},
	} {
		got, end := parse(strings.Fields(x.line))
		if end != nil || !reflect.DeepEqual(got, x.want) {
			t.Errorf("%s: %+v %+v, want %+v", x.line, got, end, x.want)
		}
	}
	got, end := parse([]string{"-m", "node", "-o", "update", "-n", "node.session.auth.username", "-v", ""})
	if end != nil || len(got.params) != 1 || got.params[0].value != "" {
		t.Errorf("an empty value: %+v %+v", got, end)
	}
}

// TestStop: what ends a run while the line is read.
func TestStop(t *testing.T) {
	for line, want := range map[string]stop{
		"-V":                 {out: versionLine()},
		"--version -m bogus": {out: versionLine()},
		"-m bogus --version": {errs: []string{"bogus mode is unkonwn/unsupported"}, code: codeInvalid},
		"-m node --help":     {errs: []string{"node mode: option '-h' is not allowed/supported"}, code: codeInvalid},
		"-h":                 {out: usage},
		"-m fw --print 0 -l": {errs: []string{"fw mode: option '-P' is not allowed/supported"}, code: codeInvalid},
		"-m node -k 1":       {errs: []string{"node mode: option '-k' is not allowed/supported"}, code: codeInvalid},
		"-k -1":              {errs: []string{"Invalid killiscsid priority -1 Priority must be greater than or equal to zero."}, code: codeInvalid},
		"-r 1x -m session":   {errs: []string{"1x is an invalid session ID or path"}, code: codeUnknown},
		"-o x -m bogus":      {errs: []string{"can not recognize operation: 'x'"}, code: codeInvalid},
		"-T x -Z":            {errs: []string{"invalid option -- 'Z'", "unrecognized character 'Z'"}, code: codeInvalid},
		"-Z -m node": {errs: []string{
			"invalid option -- 'Z'", "invalid option -- 'Z'", "node mode: option '-Z' is not allowed/supported"}, code: codeInvalid},
		"-m node --p x": {errs: []string{
			"option '--p' is ambiguous; possibilities: '--portal' '--print' '--packetsize' '--portal_type'",
			"node mode: option '-' is not allowed/supported"}, code: codeInvalid},
		"-m node --rescan -Q": {errs: []string{"invalid option -- 'Q'", "node mode: option '-Q' is not allowed/supported"}, code: codeInvalid},
	} {
		_, end := parse(strings.Fields(line))
		if end == nil || !reflect.DeepEqual(*end, want) {
			t.Errorf("%s: %+v, want %+v", line, end, want)
		}
	}
	if _, end := parse([]string{"-m", "node", "-I", ""}); end == nil || end.code != codeInvalid || !strings.HasPrefix(end.out, "Invalid iface name") {
		t.Errorf("an empty iface: %+v", end)
	}
}

// FuzzParse: no line makes the parser fall over; a line is refused with a reason, answered, or has a mode that exists.
func FuzzParse(f *testing.F) {
	for _, line := range []string{
		"-m node -T x -p [::1]:3260,1 -l", "--mode=session -P 3", "-m discoverydb -t st -p a,b:c -D", "-lmnode", "-m node -n a -v b -o update -o new", "--=",
		"--", "-", "-m", "-p[",
	} {
		f.Add(strings.ReplaceAll(line, " ", "\n"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, "\n")
		c, end := parse(args)
		if end != nil {
			if end.code != 0 && end.code != codeInvalid && end.code != codeUnknown || end.code != 0 && len(end.errs) == 0 && end.out == "" {
				t.Fatalf("%q: stopped with %+v", args, end)
			}
			return
		}
		if _, ok := allowed[c.mode]; !ok && !c.kill {
			t.Fatalf("%q: mode %q", args, c.mode)
		}
		for _, o := range scan(args) {
			if !c.kill && strings.IndexByte(allowed[c.mode], o.short) < 0 {
				t.Fatalf("%q: %s mode took option %q", args, c.mode, o.short)
			}
		}
	})
}
