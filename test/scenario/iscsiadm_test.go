package scenario

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// iscsiadmCall is one command line, given to open-iscsi's iscsiadm and to ours. $T, $P, $A are the target, its portal and the portal's address, $C is
// a target that wants CHAP, $S the number of the session, which each has of its own.
type iscsiadmCall struct {
	line string
	only string   // compare only lines with this text: others belong to other tests' targets
	free []string // names, in front of " = " or ": ", whose values may differ
	last bool     // compare only the last line on standard error: the lines before tell of attempts
}

// What records and sessions may say differently: defaults of our own, and times that there are none of. docs/iscsiadm.md lists them.
var (
	ownDefaults = []string{
		"node.session.auth.chap_algs", "node.session.timeo.replacement_timeout", "node.session.iscsi.InitialR2T", "node.session.iscsi.FirstBurstLength",
		"node.session.iscsi.MaxBurstLength", "node.conn[0].timeo.logout_timeout", "node.conn[0].timeo.login_timeout", "node.conn[0].timeo.noop_out_timeout",
		"node.session.iscsi.DefaultTime2Wait",
	}
	ownSession = []string{
		"Iface Initiatorname", "Recovery Timeout", "Target Reset Timeout", "LUN Reset Timeout", "Abort Timeout",
		"MaxRecvDataSegmentLength", "FirstBurstLength", "MaxBurstLength", "InitialR2T",
	}
)

const sameSettings = " -n node.session.auth.chap_algs -v SHA256,MD5 -n node.session.timeo.replacement_timeout -v 42 -n node.session.iscsi.InitialR2T -v No" +
	" -n node.session.iscsi.FirstBurstLength -v 65536 -n node.session.iscsi.MaxBurstLength -v 262144 -n node.conn[0].timeo.logout_timeout -v 9" +
	" -n node.conn[0].timeo.login_timeout -v 20 -n node.conn[0].timeo.noop_out_timeout -v 7 -n node.session.iscsi.DefaultTime2Wait -v 2" +
	" -n node.conn[0].iscsi.HeaderDigest -v CRC32C,None"

var iscsiadmCalls = []iscsiadmCall{
	// Command lines that are wrong.
	{line: ""}, {line: "-m bogus"}, {line: "-m node -Z"}, {line: "-Z -m node"}, {line: "-m node --bogus"}, {line: "-m node --log"}, {line: "-m node -l -T"},
	{line: "-m node -o bogus"}, {line: "-m node -P 2"}, {line: "-m node -L nobody"}, {line: "-m node -l -u -T x"}, {line: "-m node -l -o update -T x"},
	{line: "-m session -r x"}, {line: "-m session -o new"}, {line: "-m discoverydb -t st"}, {line: "-m discoverydb -p $A"}, {line: "-m discovery -p 10.0.0.77"},

	// What is not there.
	{line: "-m session"}, {line: "-m session -u"}, {line: "-m session -R"}, {line: "-m session -s"}, {line: "-m host"},
	{line: "-m node -T nosuch"}, {line: "-m node -T nosuch -l"}, {line: "-m node -T nosuch -u"}, {line: "-m node -T nosuch -R"},
	{line: "-m node -T nosuch -o delete"}, {line: "-m node -T nosuch -o update -n node.startup -v manual"},
	{line: "-m session -r 9999 -u", last: true}, {line: "-m fw"}, {line: "-m iface"},

	// Records of portals.
	{line: "-m discoverydb -t st -p 10.0.0.77"}, {line: "-m discoverydb -t st -p 10.0.0.77 -o update -n discovery.sendtargets.auth.username -v me"},
	{line: "-m discoverydb -t st -p 10.0.0.77 -o new"}, {line: "-m discoverydb", only: "10.0.0.77"},
	{line: "-m discoverydb -t st -p 10.0.0.77", free: ownDefaults},
	{line: "-m discoverydb -t st -p 10.0.0.77 -o update -n discovery.sendtargets.auth.authmethod -v CHAP -n discovery.sendtargets.auth.username -v me" +
		" -n discovery.sendtargets.auth.password -v twelve-bytes-1"},
	{line: "-m discoverydb -t st -p 10.0.0.77 -o show", free: ownDefaults}, {line: "-m discoverydb -t st -p 10.0.0.77 -o update -n bogus -v x"},
	{line: "-m discoverydb -t st -p 10.0.0.77 -o delete"}, {line: "-m discoverydb -t st -p 10.0.0.77 -o delete"},

	// Discovery and records of nodes.
	{line: "-m discovery -t sendtargets -p $P", only: "$T"}, {line: "-m node", only: "$T"}, {line: "-m discoverydb -t st -p $P -D", only: "$T"},
	{line: "-m node -T $T -p $P", free: ownDefaults}, {line: "--mode node --target=$T --portal $P --op=show", free: ownDefaults},
	{line: "-m node -T $T -p $P -o update" + sameSettings}, {line: "-m node -T $T -p $P"},
	{line: "-m node -T $T -p $P -o update -n node.bogus -v 1"}, {line: "-m node -T $T -p $P -o update -n node.name -v x"},
	{line: "-m node -T $T -p $P -o update -n node.startup -v x"}, {line: "-m node -T $T -p $P -o update"},
	{line: "-m node -T $T -p $P -o update -n iface.net_ifacename -v eth0"},
	{line: "-m node -T $T -p $P -o update -n node.conn[0].iscsi.HeaderDigest -v None"},
	{line: "-m node -T $T -p $P -u"}, {line: "-m node -T $T -p $P -R"}, {line: "-m node -T $T -p $P -s"},

	// A session.
	{line: "-m node -T $T -p $P -l"}, {line: "-m node -T $T -p $P -l"}, {line: "-m session"}, {line: "-m session -P 0"},
	{line: "-m session -P 1", free: ownSession}, {line: "-m session -P 2", free: ownSession}, {line: "-m session -P 3", free: ownSession},
	{line: "-m session -r $S -P 1", free: ownSession}, {line: "-m session -r /sys/class/iscsi_session/session$S -P 1", free: ownSession},
	{line: "-m session -P 4"}, {line: "-m host"}, {line: "-m session -r $S"}, {line: "-m session -r $S -R"}, {line: "-m node -T $T -R"},
	{line: "-m session -r $S -s"}, {line: "-m node -T $T -p $P -s"}, {line: "-m node -T $T -p $P -o delete"},
	{line: "-m session -r $S -u"}, {line: "-m node -T $T -p $P -u"}, {line: "-m session"},

	// CHAP, first with a wrong secret.
	{line: "-m node -o new -T $C -p $P,1"},
	{line: "-m node -T $C -o update -n node.session.auth.authmethod -v CHAP -n node.session.auth.username -v me -n node.session.auth.password -v wrong-secret"},
	{line: "-m node -T $C -l"}, {line: "-m node -T $C -o update -n node.session.auth.password -v twelve-bytes-1"},
	{line: "-m node -T $C -S", free: append([]string{
		"node.tpgt", "node.session.auth.password", "node.discovery_address", "node.discovery_port", "node.discovery_type",
	}, ownDefaults...)},
	{line: "-m node -T $C -l"}, {line: "-m node -T $C -u"}, {line: "-m node -T $C -o delete"}, {line: "-m node -T $C -l"},
	{line: "-m node -T $T -p $P -o delete"}, {line: "-m node -T $T -p $P"},

	// As os-brick, csi-lib-iscsi and Ansible write it.
	{line: "-m node -T $T -p $P --interface default --op new"}, {line: "-m node --op show -p $P", only: "node.startup"},
	{line: "-m node -T $T -p $P", free: ownDefaults}, {line: "-m node -T $T -p $P --login"}, {line: "-m session"},
	{line: "-m node -T $T -p $P --op update -n node.startup -v manual"}, {line: "-m node --rescan"}, {line: "-m session --rescan"},
	{line: "-m node -T $T -p $P --logout"}, {line: "-m node -T $T -p $P --logout"},
	{line: "-m node -T $T -p $P --op delete"}, {line: "-m node -T $T -p $P --op delete"},
	{line: "-m iface -o show"}, {line: "-m iface -o show -I default"},
	{line: "-m discoverydb -t sendtargets -p $P -I default -o new"}, {line: "-m discoverydb -t sendtargets -p $P -I default --discover", only: "$T"},
	{line: "-m node -T $T -p $P -R"}, {line: "-m node -T $T -o delete"}, {line: "-m discoverydb -t sendtargets -p $P -I default -o delete"},
	{line: "--mode discovery --type sendtargets --portal $P", only: "$T"}, {line: "--mode node", only: "$T"}, {line: "--mode session"},
	{line: "--mode node --targetname $T --op=update --name node.session.auth.authmethod --value CHAP"},
	{line: "--mode node --targetname $T", only: "node.startup"}, {line: "--mode node --targetname $T --login --portal $P"},
	{line: "--mode node --rescan -T $T"}, {line: "--mode node --targetname $T --logout"},
}

// Numbers that each has of its own.
var ownNumbers = []struct {
	find *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`\bsid: \d+`), "sid: N"}, {regexp.MustCompile(`^tcp: \[\d+\]`), "tcp: [N]"}, {regexp.MustCompile(`\bSID: \d+`), "SID: N"},
	{regexp.MustCompile(`Host Number: \d+`), "Host Number: N"}, {regexp.MustCompile(`\bscsi\d+ Channel`), "scsiN Channel"},
	{regexp.MustCompile(`Attached scsi disk \w+`), "Attached scsi disk DISK"}, {regexp.MustCompile(`_(octets|pdus|err): \d+`), "_$1: N"},
	{regexp.MustCompile(`iscsiadm version \S+.*`), "iscsiadm version V"}, {regexp.MustCompile("\x00"), ""},
}

// normal brings an answer into a form that can be compared.
func (c *iscsiadmCall) normal(r result, target string) []string {
	var lines []string
	only := strings.ReplaceAll(c.only, "$T", target)
	stdout, _, _ := strings.Cut(r.stdout, "iSCSI Extended:\n") // what only the kernel's initiator counts
	for _, line := range strings.Split(stdout, "\n") {
		if line == "" || !strings.Contains(line, only) || strings.HasPrefix(line, "iSCSI Transport Class version") ||
			strings.HasPrefix(strings.TrimSpace(line), "MaxXmitDataSegmentLength:") {
			continue
		}
		lines = append(lines, line)
	}
	if c.only != "" {
		slices.Sort(lines)
		lines = slices.Compact(lines)
	}
	errs := strings.Split(strings.TrimSuffix(r.stderr, "\n"), "\n")
	if c.last {
		errs = errs[len(errs)-1:]
	}
	for _, line := range errs {
		if line != "" {
			lines = append(lines, "2> "+line)
		}
	}
	for i := range lines {
		for _, n := range ownNumbers {
			lines[i] = n.find.ReplaceAllString(lines[i], n.with)
		}
		for _, name := range c.free {
			for _, between := range []string{" = ", ": "} {
				if head, _, ok := strings.Cut(lines[i], between); ok && strings.TrimSpace(head) == name {
					lines[i] = head + between + "*"
				}
			}
		}
	}
	return append(lines, fmt.Sprintf("=> %d", r.code))
}

// TestIscsiadm gives the same command lines to the iscsiadm of Debian and to ours, against the same target, and compares every line and every exit code.
func TestIscsiadm(t *testing.T) {
	g := newTarget(t, kinds[1], twoUnits(t, 16<<20, 16<<20))
	c := &target{name: newName(t), transport: "tcp", kind: kinds[1], units: twoUnits(t, 16<<20, 16<<20), chap: &targets.CHAP{User: "me", Secret: "twelve-bytes-1"}}
	c.lioAt(t, g.portal, false)
	control.need(t)
	openISCSI(t, otherName)
	sid := func(ours bool) string {
		r := iscsiadm(t, ours, "-m session")
		_, rest, _ := strings.Cut(r.stdout, "[")
		n, _, _ := strings.Cut(rest, "]")
		return n
	}
	t.Cleanup(func() {
		for _, ours := range []bool{false, true} {
			for _, line := range []string{
				"-m session -u", "-m node -o delete -T " + g.name, "-m node -o delete -T " + c.name, "-m discoverydb -t st -o delete -p " + g.portal,
			} {
				iscsiadm(t, ours, line)
			}
		}
	})
	addr, _, _ := strings.Cut(g.portal, ":")
	for _, call := range iscsiadmCalls {
		line := strings.NewReplacer("$T", g.name, "$C", c.name, "$P", g.portal, "$A", addr).Replace(call.line)
		answer := func(ours bool) []string {
			line := line
			if strings.Contains(line, "$S") {
				line = strings.ReplaceAll(line, "$S", sid(ours))
			}
			return call.normal(iscsiadm(t, ours, line), g.name)
		}
		var want, got []string
		want, got = answer(false), answer(true)
		if strings.HasSuffix(call.line, "-P 3") && len(want) != len(got) { // the kernel finds disks in its own time
			waitFor(t, "the kernel's disks", 20*time.Second, func() error {
				if want = answer(false); len(want) < len(got) {
					return fmt.Errorf("%d lines", len(want))
				}
				return nil
			})
		}
		if !slices.Equal(want, got) {
			t.Errorf("iscsiadm %s\n%s", line, difference(want, got))
			if strings.HasSuffix(line, " -l") && got[len(got)-1] != "=> 0" {
				t.Logf("with a reason: %s", iscsiadm(t, true, line+" -d 1").stderr)
			}
		}
	}
}

// iscsiadm runs open-iscsi's program, or ours.
func iscsiadm(t testing.TB, ours bool, line string) result {
	t.Helper()
	args := strings.Fields(line)
	if ours {
		return run(t, "iserctl", append([]string{"iscsiadm"}, args...)...)
	}
	return run(t, "iscsiadm", args...)
}

// difference shows the lines that only one side has.
func difference(want, got []string) string {
	var b strings.Builder
	for _, l := range want {
		if !slices.Contains(got, l) {
			fmt.Fprintf(&b, "\topen-iscsi: %q\n", l)
		}
	}
	for _, l := range got {
		if !slices.Contains(want, l) {
			fmt.Fprintf(&b, "\tours:       %q\n", l)
		}
	}
	if b.Len() == 0 {
		fmt.Fprintf(&b, "\topen-iscsi: %q\n\tours:       %q\n", want, got)
	}
	return b.String()
}
