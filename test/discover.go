package test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// hostFeatures are what a test may need and still run on the host.
var hostFeatures = []string{"root", "uring", "tgtd", "source", "gcc", "libiscsi"}

// hostPackages boot guests themselves, so they run on the host whatever they need.
var hostPackages = []string{"test", "internal/testbed"}

// scenarios is the package whose tests all run in the guest.
const scenarios = "test/scenario"

// Package is a folder with tests.
type Package struct {
	Dir   string   // below the module's root, with slashes
	Guest []string // tests that run in the guest, sorted
	Host  []string // tests that run on the host, sorted
}

// Discover reads the test files below root and tells for each package which of its top-level tests run where.
//
// A test runs in the guest when it, or a function of the package's test files that it mentions, calls require.Need with a feature that
// the host need not have. Functions are told apart by name only; where that is wrong a test runs in the guest that need not.
func Discover(root string) ([]Package, error) {
	files := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" || name == "vendor") {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(name, "_test.go") {
			files[filepath.Dir(path)] = append(files[filepath.Dir(path)], path)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var packages []Package
	for _, dir := range slices.Sorted(maps.Keys(files)) {
		rel, err := filepath.Rel(root, dir)
		if err != nil {
			return nil, err
		}
		p, err := readPackage(filepath.ToSlash(rel), files[dir])
		if err != nil {
			return nil, err
		}
		packages = append(packages, p)
	}
	return packages, nil
}

// function is what the sources say about a name.
type function struct {
	needs    bool            // calls require.Need for something of the guest
	mentions map[string]bool // names in its body
}

func readPackage(dir string, files []string) (Package, error) {
	p := Package{Dir: dir}
	functions := map[string]*function{}
	var tests []string
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return p, fmt.Errorf("discover tests: %w", err)
		}
		for _, d := range f.Decls {
			fd, ok := d.(*ast.FuncDecl)
			if !ok || fd.Body == nil {
				continue
			}
			if fd.Recv == nil && isTest(fd.Name.Name) {
				tests = append(tests, fd.Name.Name)
			}
			fn := functions[fd.Name.Name]
			if fn == nil {
				fn = &function{mentions: map[string]bool{}}
				functions[fd.Name.Name] = fn
			}
			fn.read(fd.Body)
		}
	}
	// What a function mentions, it may call: needs spread until nothing changes.
	for changed := true; changed; {
		changed = false
		for _, fn := range functions {
			if fn.needs {
				continue
			}
			for m := range fn.mentions {
				if other := functions[m]; other != nil && other.needs {
					fn.needs, changed = true, true
					break
				}
			}
		}
	}
	slices.Sort(tests)
	for _, t := range tests {
		if !slices.Contains(hostPackages, dir) && (functions[t].needs || dir == scenarios) {
			p.Guest = append(p.Guest, t)
		} else {
			p.Host = append(p.Host, t)
		}
	}
	return p, nil
}

// isTest tells whether go test runs a function of this name. Fuzz targets count: their seeds run as tests.
func isTest(name string) bool {
	for _, prefix := range []string{"Test", "Fuzz"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok && name != "TestMain" && (rest == "" || !(rest[0] >= 'a' && rest[0] <= 'z')) {
			return true
		}
	}
	return false
}

// read collects what a body mentions and needs.
func (fn *function) read(body *ast.BlockStmt) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			fn.mentions[n.Name] = true
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Need" && len(n.Args) == 3 {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "require" && ofGuest(n.Args[1]) {
					fn.needs = true
				}
			}
		}
		return true
	})
}

// ofGuest tells whether the feature given to require.Need is one of the guest; one that is not a constant is taken for it.
func ofGuest(feature ast.Expr) bool {
	lit, ok := feature.(*ast.BasicLit)
	if !ok {
		return true
	}
	s, err := strconv.Unquote(lit.Value)
	return err != nil || !slices.Contains(hostFeatures, s)
}
