package test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"iserd.org/iserd/internal/testbed"
)

// names are what a package declares: "Func", "Type", "Type.Method", "Type.Field", constants and variables; and of its tests also the strings,
// which subtests are named by.
type names struct {
	symbols, tests, strings map[string]bool
}

// tree reads every Go file of the module, by the folder's path below the root.
func tree(t *testing.T, root string) map[string]*names {
	all := map[string]*names{}
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			if base := e.Name(); base != "." && strings.HasPrefix(base, ".") || base == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(rel)
		if all[dir] == nil {
			all[dir] = &names{map[string]bool{}, map[string]bool{}, map[string]bool{}}
		}
		if strings.HasSuffix(name, "_test.go") {
			all[dir].addTests(file)
		} else {
			all[dir].addSymbols(file)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// receiver is the type of a method's receiver.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	e := f.Recv.List[0].Type
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.Ident:
			return x.Name + "."
		default:
			return "?."
		}
	}
}

func (n *names) addTests(file *ast.File) {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
			n.tests[f.Name.Name] = true
		}
	}
	ast.Inspect(file, func(x ast.Node) bool {
		if l, ok := x.(*ast.BasicLit); ok && l.Kind == token.STRING {
			if s, err := strconv.Unquote(l.Value); err == nil {
				n.strings[s] = true
			}
		}
		return true
	})
}

func (n *names) addSymbols(file *ast.File) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			n.symbols[receiver(d)+d.Name.Name] = true
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.ValueSpec:
					for _, id := range spec.Names {
						n.symbols[id.Name] = true
					}
				case *ast.TypeSpec:
					n.addType(spec)
				}
			}
		}
	}
}

// addType adds a type with its fields and, if it is an interface, its methods.
func (n *names) addType(spec *ast.TypeSpec) {
	n.symbols[spec.Name.Name] = true
	var fields *ast.FieldList
	switch x := spec.Type.(type) {
	case *ast.StructType:
		fields = x.Fields
	case *ast.InterfaceType:
		fields = x.Methods
	default:
		return
	}
	for _, f := range fields.List {
		for _, id := range f.Names {
			n.symbols[spec.Name.Name+"."+id.Name] = true
		}
	}
}

// split cuts "iscsi/login.Machine.Step" into folder and name.
func split(s string) (dir, name string) {
	slash := strings.LastIndexByte(s, '/') + 1
	d, n, _ := strings.Cut(s[slash:], ".")
	return s[:slash] + d, n
}

// code says what is wrong with the name of a symbol, "" for nothing.
func code(all map[string]*names, s string) string {
	dir, name := split(s)
	switch n := all[dir]; {
	case n == nil:
		return "no package " + dir
	case !n.symbols[name]:
		return "no " + name + " in " + dir
	}
	return ""
}

// test says what is wrong with the name of a test, "" for nothing. What follows a slash is a subtest: a script in testdata, or a string of the
// package's tests.
func test(root string, all map[string]*names, s string) string {
	i := strings.Index(s, ".Test")
	if i < 0 {
		i = strings.Index(s, ".Fuzz")
	}
	if i < 0 {
		return "not the name of a test"
	}
	dir := s[:i]
	name, sub, has := strings.Cut(s[i+1:], "/")
	switch n := all[dir]; {
	case n == nil:
		return "no package " + dir
	case !n.tests[name]:
		return "no " + name + " in " + dir
	case strings.HasSuffix(name, "Scripts") && has:
		if _, err := os.Stat(filepath.Join(root, dir, "testdata", sub+".txt")); err != nil {
			return err.Error()
		}
	case has && !n.strings[sub]:
		return "no subtest " + strconv.Quote(sub) + " of " + name
	}
	return ""
}

var (
	quoted  = regexp.MustCompile("`([^`]+)`")
	section = regexp.MustCompile(`^\d+(\.\d+)*$`)
	levels  = map[string]bool{"MUST": true, "MUST NOT": true, "SHOULD": true, "SHOULD NOT": true, "MAY": true}
)

// list says what is wrong with a cell that is to hold names in backquotes and nothing else.
func list(cell string, check func(string) string) (problems []string) {
	names := quoted.FindAllStringSubmatch(cell, -1)
	if len(names) == 0 || strings.Trim(quoted.ReplaceAllString(cell, ""), ", ") != "" {
		problems = append(problems, "not a list of names: "+cell)
	}
	for _, m := range names {
		if p := check(m[1]); p != "" {
			problems = append(problems, p)
		}
	}
	return problems
}

// tableRows calls f for each row of the tables in a document, with the number of its line, the heading above it, and the first row of its table.
func tableRows(t *testing.T, root, document string, f func(line int, heading string, head, cells []string)) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(document)))
	if err != nil {
		t.Fatal(err)
	}
	var heading string
	var head []string
	for i, line := range strings.Split(string(b), "\n") {
		if h, ok := strings.CutPrefix(line, "## "); ok {
			heading = h
		}
		body, ok := strings.CutPrefix(line, "| ")
		if !ok {
			if !strings.HasPrefix(line, "|") {
				head = nil
			}
			continue
		}
		cells := strings.Split(strings.TrimSuffix(body, " |"), " | ")
		if head == nil {
			head = cells
			continue
		}
		f(i+1, heading, head, cells)
	}
}

// row says what is wrong with a row of a table.
func row(root string, all map[string]*names, cells []string) (problems []string) {
	if len(cells) != 5 {
		return []string{"five cells are wanted"}
	}
	if !section.MatchString(cells[0]) || cells[1] == "" || !levels[cells[2]] {
		problems = append(problems, "no section, requirement or level")
	}
	if reason, ok := strings.CutPrefix(cells[3], "not supported because "); ok {
		if len(reason) < 10 || cells[4] != "-" {
			problems = append(problems, "no reason, or a test of what is not supported")
		}
		return problems
	}
	for i, check := range []func(string) string{
		func(s string) string { return code(all, s) },
		func(s string) string { return test(root, all, s) },
	} {
		if reason, ok := strings.CutPrefix(cells[3+i], "none because "); ok && i == 1 && len(reason) >= 10 {
			continue
		}
		problems = append(problems, list(cells[3+i], check)...)
	}
	return problems
}

// TestConformance reads docs/conformance.md: each row of its tables names code and tests that there are, or says why there are none.
func TestConformance(t *testing.T) {
	root, err := testbed.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	all := tree(t, root)
	rows, seen := map[string]int{}, map[string]bool{}
	tableRows(t, root, "docs/conformance.md", func(line int, document string, _, cells []string) {
		for _, p := range row(root, all, cells) {
			t.Errorf("docs/conformance.md:%d: %s", line, p)
		}
		if key := path.Join(document, cells[0], strings.Join(cells[1:2], "")); seen[key] {
			t.Errorf("docs/conformance.md:%d: the row is there twice", line)
		} else {
			seen[key] = true
		}
		rows[document]++
	})
	for rfc, least := range map[string]int{"RFC 7143": 150, "RFC 7145": 40, "RFC 5047": 8} {
		if rows[rfc] < least {
			t.Errorf("%d rows for %s, at least %d are wanted", rows[rfc], rfc, least)
		}
	}
	t.Log(rows)
}

// TestConformanceNotices: a name that is gone is found, of each sort.
func TestConformanceNotices(t *testing.T) {
	root, err := testbed.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	all := tree(t, root)
	good := []string{"4.2", "what", "MUST", "`iscsi.Session.Manage`, `iscsi/pdu.BHS`", "`iscsi.TestAbortTask`, `iscsi/login.TestScripts/chap`, `iscsi.TestReject/ping`"}
	if p := row(root, all, good); p != nil {
		t.Errorf("a good row: %q", p)
	}
	for i, bad := range map[int][]string{
		0: {"four", "4.", ""},
		1: {""},
		2: {"must", ""},
		3: {"`iscsi.Session.Nothing`", "`iscsi.Nothing`", "`nothing.Session`", "iscsi.Session", "", "not supported", "not supported because x", "`iscsi.TestAbortTask`"},
		4: {"`iscsi.TestNothing`", "`nothing.TestAbortTask`", "`iscsi/login.TestScripts/nothing`", "`iscsi.TestReject/no such subtest`", "-", "none", "none because x", "`iscsi.Session`"},
	} {
		for _, cell := range bad {
			cells := append([]string(nil), good...)
			cells[i] = cell
			if p := row(root, all, cells); p == nil {
				t.Errorf("not noticed: %q", cells)
			}
		}
	}
	if p := row(root, all, good[:4]); p == nil {
		t.Error("not noticed: a cell is missing")
	}
}
