package test

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func TestDiscover(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"a/a_test.go": `package a
import ("testing"; "iserd.org/iserd/internal/require")
type rig struct{}
func (rig) open(t *testing.T) { require.Need(t, "ublk", nil) }
func newRig(t *testing.T) rig { var r rig; r.open(t); return r }
func TestDirect(t *testing.T) { require.Need(t, "rdma", nil) }
func TestByHelper(t *testing.T) { newRig(t) }
func TestRoot(t *testing.T) { require.Need(t, "root", nil) }
func TestPlain(t *testing.T) { t.Run("x", func(t *testing.T) {}) }
func TestInClosure(t *testing.T) { t.Run("x", func(t *testing.T) { newRig(t) }) }
func FuzzPlain(f *testing.F) {}
func TestMain(m *testing.M) { newRig(nil) }
func Testify(t *testing.T) {}
`,
		"a/b_test.go": `package a_test
import ("testing"; "iserd.org/iserd/internal/require")
var feature = "root"
func TestVariable(t *testing.T) { require.Need(t, feature, nil) }
`,
		"test/scenario/s_test.go":          "package scenario\nimport \"testing\"\nfunc TestAll(t *testing.T) {}\n",
		"internal/testbed/t_test.go":       "package testbed\nimport (\"testing\"; \"iserd.org/iserd/internal/require\")\nfunc TestBoot(t *testing.T) { require.Need(t, \"guest\", nil) }\n",
		"a/testdata/broken_test.go":        "not Go",
		".hidden/broken_test.go":           "not Go",
		"a/plain.go":                       "package a\n",
		"internal/testbed/sub/sub_test.go": "package sub\nimport \"testing\"\nfunc TestSub(t *testing.T) {}\n",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Discover(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []Package{
		{Dir: "a", Guest: []string{"TestByHelper", "TestDirect", "TestInClosure", "TestVariable"}, Host: []string{"FuzzPlain", "TestPlain", "TestRoot"}},
		{Dir: "internal/testbed", Host: []string{"TestBoot"}},
		{Dir: "internal/testbed/sub", Host: []string{"TestSub"}},
		{Dir: "test/scenario", Guest: []string{"TestAll"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}
