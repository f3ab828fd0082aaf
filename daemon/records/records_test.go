package records

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"iserd.org/iserd/api"
)

const iqn = "iqn.2003-01.org.example:t"

var day = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func target(n int, transports ...string) api.Target {
	return api.Target{Target: fmt.Sprint(iqn, n), Address: "10.0.0.1", Port: 3260, TPGT: n, Transports: transports}
}

func open(t *testing.T, dir string) *Nodes {
	t.Helper()
	s, err := OpenNodes(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// everySetting has a value for each row of the table.
func everySetting(t *testing.T) api.Settings {
	t.Helper()
	var s api.Settings
	for _, r := range api.SettingTable {
		value := map[api.SettingKind]string{
			api.KindText: "somebody", api.KindAddress: "10.0.0.7", api.KindDevice: "rxe0", api.KindBool: "No", api.KindList: "SHA256",
			api.KindBytes: "4096", api.KindNumber: "3", api.KindSeconds: "12",
		}[r.Kind]
		if r.Kind == api.KindChoice {
			value = r.Values[len(r.Values)-1]
		}
		if r.Name == "transport" {
			value = "auto"
		}
		if err := s.Set(r.Name, value); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestMerge(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	both := []string{"iser", "tcp"}
	if err := s.Merge("10.0.0.1:3260", both, []api.Target{target(1, "iser"), target(2, "tcp")}, api.Settings{}, day); err != nil {
		t.Fatal(err)
	}
	// The user sets something; discovery must leave it alone.
	id := s.List()[0].ID()
	mine := everySetting(t)
	if _, err := s.Change(id, func(n *Node) error {
		n.Settings.Settings, n.MovedTo = mine, "10.0.0.9:3260"
		return nil
	}); err != nil {
		t.Fatal(err)
	}

	later := day.Add(time.Hour)
	if err := s.Merge("10.0.0.1:3260", []string{"tcp"}, []api.Target{target(1, "tcp")}, api.Settings{Transport: "iser", SourceAddress: "10.0.0.2"}, later); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir) // as the disk has it
	got := s.List()
	want := []Node{
		{MakeKey(iqn+"1", api.Portal{Address: "10.0.0.1", Port: 3260}), Found{1, both, "10.0.0.1:3260", later, false}, Settings{"manual", mine}, "10.0.0.9:3260"},
		{MakeKey(iqn+"2", api.Portal{Address: "10.0.0.1", Port: 3260}), Found{2, []string{"tcp"}, "10.0.0.1:3260", day, true}, Settings{"manual", api.Settings{Transport: "auto"}}, ""},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	// Over the transport that is not asked, nothing can be told.
	if err := s.Merge("10.0.0.1:3260", []string{"iser"}, nil, api.Settings{}, later); err != nil {
		t.Fatal(err)
	}
	if s.List()[0].Found.Missing {
		t.Error("a target seen over tcp is marked as missing by a discovery over iser")
	}
	if err := s.Delete(id); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(id); !errors.Is(err, ErrNotFound) {
		t.Errorf("second delete: %v", err)
	}
	if len(open(t, dir).List()) != 1 {
		t.Error("the record is still on the disk")
	}
}

func TestHostileNames(t *testing.T) {
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "nodes"))
	for _, name := range []string{"../../etc/passwd", iqn + "/../x", "", "iqn.2003-01.org.example:\n"} {
		err := s.Merge("x", nil, []api.Target{{Target: name, Address: "10.0.0.1", Port: 1}}, api.Settings{}, day)
		if err == nil {
			t.Errorf("%q is stored", name)
		}
		if _, err := s.Add(Key{Target: name, Address: "10.0.0.1", Port: 1}); err == nil {
			t.Errorf("%q is stored", name)
		}
	}
	if _, err := s.Add(Key{Target: iqn, Address: "../x", Port: 1}); err == nil {
		t.Error("an address with a slash is stored")
	}
	if e, _ := os.ReadDir(dir); len(e) != 1 {
		t.Errorf("files outside: %v", e)
	}
}

func TestDamagedRecords(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := s.Merge("p", nil, []api.Target{target(1), target(2), target(3)}, api.Settings{}, day); err != nil {
		t.Fatal(err)
	}
	l := s.List()
	path := func(i int) string { return filepath.Join(dir, l[i].ID()+".json") }
	whole, err := os.ReadFile(path(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path(0), whole[:len(whole)/2], 0o600); err != nil { // torn
		t.Fatal(err)
	}
	if err := os.WriteFile(path(1), whole, 0o600); err != nil { // another's content
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		".tmp-123": "left by a crash", "n0000000000000000.json": "", "n0000000000000001.json": strings.Repeat(" ", maxRecord+1), "README": "x",
		"n0000000000000002.json": strings.Replace(string(whole), `"schema": 1`, `"schema": 2`, 1),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, dir)
	if got := s.List(); len(got) != 1 || got[0].Target != iqn+"3" {
		t.Errorf("loaded %v", got)
	}
	if p := s.Problems(); len(p) != 5 {
		t.Errorf("%d problems: %q", len(p), p)
	}
	if _, err := os.Stat(filepath.Join(dir, ".tmp-123")); err == nil {
		t.Error("the leftover of a crash is still there")
	}
	if b, _ := os.ReadFile(path(0)); len(b) != len(whole)/2 {
		t.Error("the damaged record was touched")
	}
	// Finding the target again repairs the record.
	if err := s.Merge("p", nil, []api.Target{target(1)}, api.Settings{}, day); err != nil {
		t.Fatal(err)
	}
	if p := s.Problems(); len(p) != 4 {
		t.Errorf("%d problems after a repair: %q", len(p), p)
	}
}

// faulty fails one operation.
type faulty struct {
	osFiles
	op string
}

func (f *faulty) err(op string) error {
	if f.op == op {
		return syscall.ENOSPC
	}
	return nil
}

type faultyTemp struct {
	tempFile
	f *faulty
}

func (f *faulty) CreateTemp(dir, pattern string) (tempFile, error) {
	if err := f.err("create"); err != nil {
		return nil, err
	}
	t, err := f.osFiles.CreateTemp(dir, pattern)
	return faultyTemp{t, f}, err
}

func (f *faulty) Rename(from, to string) error {
	if err := f.err("rename"); err != nil {
		return err
	}
	return f.osFiles.Rename(from, to)
}

func (t faultyTemp) Write(b []byte) (int, error) {
	if err := t.f.err("write"); err != nil {
		n, _ := t.tempFile.Write(b[:len(b)/2])
		return n, err
	}
	return t.tempFile.Write(b)
}

func (t faultyTemp) Sync() error {
	if err := t.f.err("sync"); err != nil {
		return err
	}
	return t.tempFile.Sync()
}

// TestDiskFull: each step of a write fails once; memory and disk keep the old content and nothing is left over.
func TestDiskFull(t *testing.T) {
	for _, op := range []string{"create", "write", "sync", "rename"} {
		t.Run(op, func(t *testing.T) {
			dir := t.TempDir()
			f := &faulty{}
			s, err := openNodes(filepath.Join(dir, "nodes"), f, Key.check)
			if err != nil {
				t.Fatal(err)
			}
			ids := openISIDs(filepath.Join(dir, "isid.json"), f)
			if err := s.Merge("p", []string{"tcp"}, []api.Target{target(1, "tcp")}, api.Settings{}, day); err != nil {
				t.Fatal(err)
			}
			first, _, err := ids.Get("a")
			if err != nil {
				t.Fatal(err)
			}
			before := s.List()

			f.op = op
			if err := s.Merge("p", []string{"tcp"}, []api.Target{target(1, "tcp", "iser"), target(2)}, api.Settings{}, day); !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("merge: %v", err)
			}
			if _, _, err := ids.Get("b"); !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("isid: %v", err)
			}
			if d := cmp.Diff(before, s.List()); d != "" {
				t.Error("memory: ", d)
			}
			if d := cmp.Diff(before, open(t, filepath.Join(dir, "nodes")).List()); d != "" {
				t.Error("disk: ", d)
			}
			if e, _ := os.ReadDir(filepath.Join(dir, "nodes")); len(e) != 1 {
				t.Errorf("left over: %v", e)
			}

			f.op = ""
			if isid, n, err := ids.Get("a"); err != nil || isid != first || n != 1 {
				t.Errorf("isid of a: %x, %d, %v", isid, n, err)
			}
			if _, n, err := ids.Get("b"); err != nil || n != 2 {
				t.Errorf("isid of b: %d, %v", n, err)
			}
		})
	}
}

func TestISIDs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "isid.json")
	s := OpenISIDs(path)
	seen := make(map[[6]byte]int)
	groups := blocksPerRandom + 3
	for i := range groups {
		// Writing a thousand files would only test the disk: fill most of it in memory.
		if i > 3 && i < blocksPerRandom-1 {
			s.data.Groups[fmt.Sprint("g", i)] = i
			s.data.Next = i + 1
		}
		isid, n, err := s.Get(fmt.Sprint("g", i))
		if err != nil || n != i+1 {
			t.Fatalf("group %d: %d, %v", i, n, err)
		}
		if isid[0] != 0x80 || isid[5]%isidBlock != 0 {
			t.Fatalf("group %d: isid %x", i, isid)
		}
		if j, ok := seen[isid]; ok {
			t.Fatalf("groups %d and %d share %x", i, j, isid)
		}
		seen[isid] = i
	}
	if len(s.data.Randoms) != 2 {
		t.Errorf("%d random parts", len(s.data.Randoms))
	}
	s2 := OpenISIDs(path)
	for isid, i := range seen {
		if got, _, err := s2.Get(fmt.Sprint("g", i)); err != nil || got != isid {
			t.Fatalf("group %d after a restart: %x, was %x, %v", i, got, isid, err)
		}
	}
	if n, ok := s2.Number("g7"); !ok || n != 8 {
		t.Errorf("number of g7: %d, %v", n, ok)
	}
	if _, ok := s2.Number("x"); ok {
		t.Error("a group that is not there has a number")
	}

	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b[:len(b)-10], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenISIDs(path).Get("g1"); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("damaged file: %v", err)
	}
}

func TestISIDsConcurrent(t *testing.T) {
	s := OpenISIDs(filepath.Join(t.TempDir(), "isid.json"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make(map[string]map[[6]byte]bool)
	for i := range 40 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			g := fmt.Sprint("g", i%4)
			isid, _, err := s.Get(g)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if got[g] == nil {
				got[g] = make(map[[6]byte]bool)
			}
			got[g][isid] = true
		}()
	}
	wg.Wait()
	for g, m := range got {
		if len(m) != 1 {
			t.Errorf("%s has %d identifiers", g, len(m))
		}
	}
}

func TestInitiatorName(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "etc", "initiatorname"), filepath.Join(dir, "state", "initiatorname")
	// A file where a directory should be: cannot be written, also by root.
	if err := os.WriteFile(filepath.Join(dir, "etc"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n1, p, err := InitiatorName(a, b)
	if err == nil {
		t.Fatalf("unreadable first place gave %s in %s", n1, p)
	}
	if err := os.Remove(filepath.Join(dir, "etc")); err != nil {
		t.Fatal(err)
	}
	n1, p, err = InitiatorName(a, b)
	if err != nil || p != a || api.CheckName(n1) != nil || len(n1) != len(namePrefix)+12 {
		t.Fatalf("made %q in %s: %v", n1, p, err)
	}
	if fi, err := os.Stat(a); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if n2, p, err := InitiatorName(a, b); err != nil || n2 != n1 || p != a {
		t.Errorf("second time: %q in %s, %v", n2, p, err)
	}
	for text, want := range map[string]string{
		"InitiatorName=" + iqn + "\n": iqn, "## c\n\n " + iqn + " \n": iqn, "": "", "# c\n": "", "x\n": "", iqn + "\n" + iqn: "",
	} {
		if err := os.WriteFile(a, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, _, err := InitiatorName(a, b); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// TestInitiatorNameFallback: the first directory is read-only.
func TestInitiatorNameFallback(t *testing.T) {
	b := filepath.Join(t.TempDir(), "initiatorname")
	n, p, err := InitiatorName("/proc/iserd/initiatorname", b)
	if err != nil || p != b {
		t.Fatalf("%q in %s: %v", n, p, err)
	}
}

// TestRoundTrip: what is written reads back.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := Node{
			Key: MakeKey("iqn.2003-01.org.example:"+rapid.StringMatching(`[a-z0-9.:_-]{0,100}`).Draw(t, "name"), api.Portal{
				Address: rapid.SampledFrom([]string{"10.0.0.1", "fd00::1", "fe80::1%eth0", "host.example"}).Draw(t, "address"), Port: rapid.Uint16Min(1).Draw(t, "port"),
			}),
			Found:    Found{TPGT: rapid.IntRange(-1, 65535).Draw(t, "tpgt"), Source: "s", Time: day, Missing: rapid.Bool().Draw(t, "missing")},
			Settings: Settings{"manual", api.Settings{Transport: rapid.SampledFrom([]string{"auto", "tcp", "iser"}).Draw(t, "transport")}},
		}
		b, err := encodeNode(n)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeNode(b, Key.check)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(n, got); d != "" {
			t.Fatal(d)
		}
	})
}

func FuzzDecodeNode(f *testing.F) {
	b, _ := encodeNode(newNode(MakeKey(iqn, api.Portal{Address: "10.0.0.1", Port: 3260})))
	f.Add(b)
	f.Add(b[:len(b)/2])
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := decodeNode(b, Key.check)
		if err != nil {
			return
		}
		if err := n.check(); err != nil {
			t.Fatalf("accepted %s: %v", b, err)
		}
	})
}

func FuzzDecodeISIDs(f *testing.F) {
	f.Add([]byte(`{"schema":1,"randoms":["0a0b0c"],"groups":{"g":0},"next":1}`))
	f.Add([]byte(`{"schema":1,"randoms":[],"groups":{"g":0},"next":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := decodeISIDs(b)
		if err != nil {
			return
		}
		s := &ISIDs{path: "/proc/none/x", fs: osFiles{}, data: d}
		for g := range d.Groups {
			if _, _, err := s.Get(g); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// What does not pass the check is not stored, and a record stays what it is.
func TestChange(t *testing.T) {
	s := open(t, t.TempDir())
	n, err := s.Add(MakeKey(iqn, api.Portal{Address: "10.0.0.1", Port: 3260}))
	if err != nil {
		t.Fatal(err)
	}
	big, small := 1<<20, 4096
	for name, f := range map[string]func(*Node) error{
		"first burst above the longest": func(n *Node) error {
			n.Settings.FirstBurstLength, n.Settings.MaxBurstLength = &big, &small
			return nil
		},
		"error": func(n *Node) error {
			n.Settings.Auth = "chap"
			return errors.New("no")
		},
		"out of range": func(n *Node) error { n.Settings.Auth = "maybe"; return nil },
	} {
		if _, err := s.Change(n.ID(), f); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := s.Change(n.ID(), func(n *Node) error { n.Key.Port, n.Found.TPGT = 1, 9; return nil }); err != nil {
		t.Error(err)
	}
	got, _ := s.Get(n.ID())
	if d := cmp.Diff(n, got); d != "" {
		t.Error(d)
	}
	if _, err := s.Change("n0000000000000000", func(*Node) error { return nil }); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// A portal's record has no target, and a target's record has one.
func TestPortals(t *testing.T) {
	dir := t.TempDir()
	s, err := OpenPortals(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := api.Portal{Address: "10.0.0.1", Port: 3260}
	n, err := s.Add(PortalKey(p))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Add(MakeKey(iqn, p)); err == nil {
		t.Error("a target among the portals")
	}
	if _, err := open(t, t.TempDir()).Add(PortalKey(p)); err == nil {
		t.Error("a portal among the targets")
	}
	if s, err = OpenPortals(dir); err != nil || len(s.List()) != 1 || s.List()[0].ID() != n.ID() || len(s.Problems()) != 0 {
		t.Errorf("read again: %v, %v, %v", s.List(), s.Problems(), err)
	}
	if n.ID() == MakeKey(iqn, p).ID() {
		t.Error("the same file as a target's")
	}
}

func TestSecrets(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "secrets")
	s, err := OpenSecrets(dir)
	if err != nil {
		t.Fatal(err)
	}
	const id = "n0123456789abcdef"
	one, two := api.NewSecret([]byte("one secret \x00\n")), api.NewSecret([]byte("another secret"))
	if set, err := s.Get(id); err != nil || len(set.Names()) != 0 {
		t.Errorf("nothing stored: %v, %v", set, err)
	}
	if err := s.Set(id, api.CHAPSecret, one); err != nil {
		t.Fatal(err)
	}
	if err := s.Set(id, api.CHAPTargetSecret, one); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("the same for both directions: %v", err)
	}
	if err := s.Set(id, api.CHAPTargetSecret, two); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"password", ""} {
		if err := s.Set(id, bad, one); !api.Is(err, api.ErrInvalidArgs) {
			t.Errorf("secret %q: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "../x", "n0123456789abcdeF", id + "/"} {
		if err := s.Set(bad, api.CHAPSecret, one); err == nil {
			t.Errorf("id %q is accepted", bad)
		}
	}
	again, err := OpenSecrets(dir)
	if err != nil {
		t.Fatal(err)
	}
	set, err := again.Get(id)
	if err != nil || !set.Secret.Equal(one) || !set.TargetSecret.Equal(two) || len(set.Names()) != 2 {
		t.Errorf("read again: %v, %v", set, err)
	}
	path := filepath.Join(dir, id+".json")
	for p, want := range map[string]os.FileMode{dir: 0o700, path: 0o600} {
		if fi, err := os.Stat(p); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", p, fi.Mode(), err)
		}
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(id); err == nil || !strings.Contains(err.Error(), "others can read") {
		t.Errorf("readable for others: %v", err)
	}
	if err := os.WriteFile(path, []byte(`{"schema":1,"chap_secret":"!secret!"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(id); err == nil || strings.Contains(err.Error(), "!secret!") {
		t.Errorf("damaged: %v", err)
	}
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(id); err == nil {
		t.Error("a link is followed")
	}
	// What cannot be read may be another secret: it is not replaced by one alone, but it can be removed.
	if err := s.Set(id, api.CHAPSecret, two); err == nil || !strings.Contains(err.Error(), "remove") {
		t.Errorf("set although the others cannot be read: %v", err)
	}
	if err := s.Set(id, api.CHAPSecret, api.Secret{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Set(id, api.CHAPSecret, two); err != nil {
		t.Fatal(err)
	}
	if err := s.Set(id, api.CHAPSecret, api.Secret{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("an empty file stays: %v", err)
	}
	if err := s.Delete(id); err != nil {
		t.Error(err)
	}
}
