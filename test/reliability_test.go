package test

import (
	"slices"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed"
)

// fault says what is wrong with a row of a table of docs/reliability.md that ends with tests.
func fault(root string, all map[string]*names, cells []string) []string {
	if len(cells) != 5 || slices.Contains(cells, "") {
		return []string{"five cells with something in them are wanted"}
	}
	return list(cells[4], func(s string) string { return test(root, all, s) })
}

// TestReliability reads docs/reliability.md: each fault names tests that there are, and each scenario of a fault is named; a fault that no test
// shows has a reason; each time-out that may be set for a target has its row, and a comparison has both sides.
func TestReliability(t *testing.T) {
	const document = "docs/reliability.md"
	root, err := testbed.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	all := tree(t, root)
	faults, open, compared := 0, 0, 0
	named, timeouts := map[string]bool{}, map[string]bool{}
	tableRows(t, root, document, func(line int, heading string, head, cells []string) {
		switch {
		case head[len(head)-1] == "Tests":
			faults++
			for _, p := range fault(root, all, cells) {
				t.Errorf("%s:%d: %s", document, line, p)
			}
			for _, m := range quoted.FindAllStringSubmatch(cells[len(cells)-1], -1) {
				named[m[1]] = true
			}
		case heading == "Not shown by a test":
			open++
			if len(cells) != 2 || len(cells[1]) < 10 {
				t.Errorf("%s:%d: no reason", document, line)
			}
		case heading == "Time-outs":
			timeouts[strings.Trim(cells[0], "`")] = true
			if len(cells) != 4 || slices.Contains(cells, "") {
				t.Errorf("%s:%d: four cells with something in them are wanted", document, line)
			}
		case heading == "The same faults with open-iscsi":
			compared++
			if len(cells) != 7 || cells[2] == "" || cells[4] == "" {
				t.Errorf("%s:%d: how long it takes with both is wanted", document, line)
			}
		default:
			t.Errorf("%s:%d: a table of what?", document, line)
		}
	})
	if faults < 50 || open == 0 || compared == 0 {
		t.Errorf("%d faults with tests, %d without, %d compared: has the form of the tables changed?", faults, open, compared)
	}
	for name := range all["test/scenario"].tests {
		if strings.HasPrefix(name, "TestFault") && !named["test/scenario."+name] {
			t.Errorf("%s does not name %s", document, name)
		}
	}
	for _, r := range api.SettingTable {
		if (strings.HasSuffix(r.Name, "_timeout") || strings.HasSuffix(r.Name, "_interval")) && !timeouts[r.Name] {
			t.Errorf("%s: no row for %s", document, r.Name)
		}
	}
}

// TestReliabilityNotices: a row without tests, or with one that is gone, is found.
func TestReliabilityNotices(t *testing.T) {
	root, err := testbed.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	all := tree(t, root)
	good := []string{"a fault", "nothing", "-", "something", "`iscsi.TestAbortTask`, `iscsi/login.TestScripts/hostile`"}
	if p := fault(root, all, good); p != nil {
		t.Errorf("a good row: %q", p)
	}
	for _, bad := range [][]string{
		good[:4], {"", "nothing", "-", "something", good[4]}, {"a fault", "nothing", "-", "something", "none"},
		{"a fault", "nothing", "-", "something", "`iscsi.TestNothing`"}, {"a fault", "nothing", "-", "something", "`iscsi.TestAbortTask` and more"},
	} {
		if fault(root, all, bad) == nil {
			t.Errorf("not noticed: %q", bad)
		}
	}
}
