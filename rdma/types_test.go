package rdma

import (
	"errors"
	"go/ast"
	"go/build"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestErrorTexts(t *testing.T) {
	ve := &VerbError{Call: "ibv_reg_mr", Err: syscall.ENOMEM, Hint: "raise the limit"}
	wc := &WC{WRID: 5, Op: OpWrite, Status: StatusRemoteAccess, Vendor: 0x1f}
	oe := &opError{text: "no RDMA device serves 127.0.0.1", kind: ErrNoDevice, cause: &VerbError{Call: "x", Err: syscall.ENODEV}}
	for _, c := range []struct {
		err  error
		text string
		is   []error
	}{
		{ve, "ibv_reg_mr: cannot allocate memory: raise the limit", []error{syscall.ENOMEM}},
		{&VerbError{Call: "rdma_connect", Err: syscall.EINVAL}, "rdma_connect: invalid argument", []error{syscall.EINVAL}},
		{wc.Err(), "rdma write: remote access error (status 10, vendor 0x1f, wrid 0x5)", []error{StatusRemoteAccess}},
		{&RejectError{Reason: 8}, "connection refused: reason 8: invalid service ID (no listener)", []error{ErrRefused}},
		{&RejectError{Reason: 99}, "connection refused: reason 99: unknown reason", []error{ErrRefused}},
		{oe, "no RDMA device serves 127.0.0.1", []error{ErrNoDevice, syscall.ENODEV}},
		{&opError{text: "x", kind: ErrTimeout}, "x", []error{ErrTimeout}},
	} {
		if c.err.Error() != c.text {
			t.Errorf("got  %s\nwant %s", c.err, c.text)
		}
		for _, is := range c.is {
			if !errors.Is(c.err, is) {
				t.Errorf("%v is not %v", c.err, is)
			}
		}
		if errors.Is(c.err, ErrClosed) || errors.Is(c.err, StatusFlushed) {
			t.Errorf("%v is everything", c.err)
		}
	}
	if err := (&WC{}).Err(); err != nil {
		t.Errorf("a success is %v", err)
	}
}

func TestStrings(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{StatusSuccess.String(), "success"},
		{StatusNotPosted.String(), "not posted"},
		{Status(77).String(), "status 77"},
		{OpRead.String(), "rdma read"},
		{Op(9).String(), "op 9"},
		{(LocalWrite | RemoteRead).String(), "local write|remote read"},
		{Access(0).String(), "0x0"},
		{Access(0x81).String(), "local write|0x80"},
		{EventPortUp.String(), "port up"},
		{EventOther.String(), "other"},
		{EventKind(0).String(), "event 0"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	for s := StatusSuccess; s <= StatusTagRendezvous; s++ {
		if s.String() == "" {
			t.Errorf("status %d has no name", uint32(s))
		}
	}
}

// TestSameShape compares the exported declarations of the builds with and without cgo: what compiles with one compiles with the other.
func TestSameShape(t *testing.T) {
	needSource(t)
	with, without := exported(t, true), exported(t, false)
	for _, d := range with {
		if !slices.Contains(without, d) {
			t.Errorf("only with cgo: %s", d)
		}
	}
	for _, d := range without {
		if !slices.Contains(with, d) {
			t.Errorf("only without cgo: %s", d)
		}
	}
	if len(with) < 40 {
		t.Errorf("only %d declarations were found", len(with))
	}
}

// needSource skips where the test binary was copied without the tree, as into a guest.
func needSource(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("doc.go"); err != nil {
		t.Skip("needs the source files:", err)
	}
}

// TestOnlyHere: no other package of the module imports "C".
func TestOnlyHere(t *testing.T) {
	needSource(t)
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || path == "../rdma") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return nil // not ours to judge
		}
		for _, imp := range f.Imports {
			if imp.Path.Value == `"C"` {
				t.Errorf("%s imports \"C\"", path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// exported lists the signatures of exported functions, methods of exported types and names of exported types, and rejects C types in them.
func exported(t *testing.T, cgo bool) []string {
	ctx := build.Default
	ctx.CgoEnabled = cgo
	pkg, err := ctx.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	fset := token.NewFileSet()
	for _, name := range append(pkg.GoFiles, pkg.CgoFiles...) {
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range f.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if !d.Name.IsExported() {
					continue
				}
				d.Body, d.Doc = nil, nil
				if d.Recv != nil {
					recv := d.Recv.List[0]
					recv.Names = nil
					typ := recv.Type
					if p, ok := typ.(*ast.StarExpr); ok {
						typ = p.X
					}
					if id, ok := typ.(*ast.Ident); !ok || !id.IsExported() {
						continue
					}
				}
				var b strings.Builder
				printer.Fprint(&b, token.NewFileSet(), d)
				if strings.Contains(b.String(), "C.") {
					t.Errorf("a C type crosses the border: %s", b.String())
				}
				out = append(out, b.String())
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if ts, ok := spec.(*ast.TypeSpec); ok && ts.Name.IsExported() {
						out = append(out, "type "+ts.Name.Name)
					}
				}
			}
		}
	}
	return out
}
