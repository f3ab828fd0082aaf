package daemon_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
)

// safeFile is every form that a file of the daemon's may have: none takes a word from a target.
var safeFile = regexp.MustCompile(`^(run|state|etc|devices|buffers|nodes|portals|secrets|n[0-9a-f]{16}\.json|\d+(\.json|\.env|\.properties)?|isids?\.json|initiatorname(\.json)?|[a-z]+\.sock|[a-z.-]+\.lock|arena|buffers\.json)$`)

// tree lists what lies below a directory, links with where they go.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil || name == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		if got[rel] = ""; e.Type()&fs.ModeSymlink != 0 {
			got[rel], err = os.Readlink(name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// Whatever a target calls itself and its units, the daemon's files keep names of its own making, no link leads anywhere, and the files that udev reads
// stay lines of KEY=VALUE. Names that are none are left out of a discovery; what is no name, but free text, is stored as such.
func TestHostileNames(t *testing.T) {
	hostile := []string{
		"../../../../etc/cron.d/x", "iqn.2003-01.org.example:../../x", "iqn.2003-01.org.example:a/b", "iqn.2003-01.org.example:a\nRUN=reboot", "iqn.2003-01.org.example:a b",
		"iqn.2003-01.org.example:$(reboot)", "iqn.2003-01.org.example:`x`", "iqn.2003-01.org.example:a\x00b", "iqn.2003-01.org.example:%n%s", "/dev/sda", "", ".", "..",
		"iqn.2003-01.org.example:" + strings.Repeat("x", 224), "iqn.2003-01.org.example:\u202eevil", "IQN.2003-01.ORG.EXAMPLE:UPPER",
	}
	l := newLab(t)
	var list []daemon.Found
	for _, name := range hostile {
		list = append(list, daemon.Found{Target: name, Address: "10.0.0.1", Port: 3260, TPGT: 1}, daemon.Found{Target: iqn, Address: name, Port: 3260, TPGT: 1})
	}
	l.Portals[portal] = &daemontest.Portal{Lists: map[string][]daemon.Found{"tcp": append(list, found(1)), "iser": list}}
	unit := daemontest.Disk(0, 64<<20)
	text := "../x\nRUN+=\"/bin/sh\" '$(reboot)`x`;|&\x00\u202e%s"
	unit.Vendor, unit.Product, unit.Revision, unit.Serial, unit.WWID = text, text, text, text, text
	l.Plane.AddTarget(iqn, &daemontest.Target{ISER: true, TPGT: 1, Units: []ipc.Unit{unit}})
	d := l.start()
	ctx := context.Background()
	r, err := d.Discover(ctx, api.DiscoverRequest{Portal: portal, Save: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range r.Targets {
		if api.CheckName(found.Target) != nil || strings.ContainsAny(found.Target+found.Address, "/ \n\x00$`%\u202e") {
			t.Errorf("taken: %+v", found)
		}
	}
	if len(r.Notes) == 0 {
		t.Error("nothing is said about what was left out")
	}
	l.login(d)
	files := 0
	for rel, link := range tree(t, l.Dir) {
		if link != "" {
			t.Errorf("%q is a link to %q", rel, link)
		}
		for part := range strings.SplitSeq(rel, string(filepath.Separator)) {
			if !safeFile.MatchString(part) {
				t.Errorf("file %q", rel)
			}
		}
		files++
	}
	if files < 8 {
		t.Errorf("only %d files were looked at", files)
	}
	properties, err := filepath.Glob(filepath.Join(l.RunDir(), "devices", "*"))
	if err != nil || len(properties) == 0 {
		t.Fatalf("device files %v, %v", properties, err)
	}
	for _, name := range properties {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, ".json") {
			continue // escaped by its encoder
		}
		for line := range strings.Lines(string(b)) {
			key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			if !ok || strings.Trim(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") != "" || strings.ContainsAny(value, " \t\r\x00'\"\\$`;|&<>(){}*?!/") {
				t.Errorf("%s: line %q", name, line)
			}
		}
	}
	if log := l.log.String(); strings.Contains(log, "\nRUN") || strings.Contains(log, "\x00") {
		t.Error("the log has raw text of the target")
	}
}
