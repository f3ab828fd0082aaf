package test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/internal/testbed"
)

// packageLimit is how long the tests of one package may take in the guest; the scenarios take longest. In a soak it is so much longer for
// each round.
const (
	packageLimit = 40 * time.Minute
	roundLimit   = 15 * time.Minute
)

// TestGuest runs in one guest all tests that need what only a guest has. See the package comment.
func TestGuest(t *testing.T) {
	if !testbed.Wanted() {
		t.Skip("boots a guest; make test-guest does it, or GUEST=1 in the environment")
	}
	root, err := testbed.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	packages, err := choose(root, os.Getenv("GUEST_RUN"))
	if err != nil {
		t.Fatal(err)
	}
	soak, limit, err := soaking(os.Getenv("SOAK"))
	if err != nil {
		t.Fatal(err)
	}
	bed, err := testbed.Prepare(t.Context(), t.Output())
	require.Need(t, "guest", err)
	h := &harness{bed: bed, root: root, env: soak, limit: limit}
	defer h.shut(t)
	for _, p := range packages {
		t.Run(p.Dir, func(t *testing.T) { h.run(t, p) })
	}
}

// choose returns the packages with tests for the guest, narrowed by what GUEST_RUN says.
func choose(root, wish string) ([]Package, error) {
	all, err := Discover(root)
	if err != nil {
		return nil, err
	}
	suffix, expression, _ := strings.Cut(wish, ":")
	re, err := regexp.Compile(expression)
	if err != nil {
		return nil, fmt.Errorf("GUEST_RUN: %w", err)
	}
	var chosen []Package
	for _, p := range all {
		if suffix != "" && p.Dir != suffix && !strings.HasSuffix(p.Dir, "/"+suffix) {
			continue
		}
		var tests []string
		for _, name := range p.Guest {
			if re.MatchString(name) {
				tests = append(tests, name)
			}
		}
		if p.Guest = tests; len(tests) > 0 {
			chosen = append(chosen, p)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no test for the guest matches GUEST_RUN=%q", wish)
	}
	return chosen, nil
}

// soaking returns what a number of rounds adds to the environment of the guest's tests, and how long those of one package may take then.
func soaking(rounds string) (env []string, limit time.Duration, err error) {
	if rounds == "" {
		return nil, packageLimit, nil
	}
	n, err := strconv.ParseUint(rounds, 10, 16)
	if err != nil || n == 0 {
		return nil, 0, fmt.Errorf("SOAK=%q: a number of rounds is wanted, 1 or more", rounds)
	}
	return []string{"SOAK=" + rounds}, packageLimit + time.Duration(n)*roundLimit, nil
}

// references are packages whose tests log in to targets that the environment names, with the program that makes the targets.
var references = map[string]string{"iscsi/login": "./test/reference"}

// harness holds the guest, which is replaced when tests may have damaged it.
type harness struct {
	bed   *testbed.Bed
	root  string // of the checkout
	env   []string
	limit time.Duration // for the tests of one package
	guest *testbed.Guest
}

// TestSoaking: a soak gives the guest's tests the rounds and the time for them, and what is no number of rounds is refused before a guest boots.
func TestSoaking(t *testing.T) {
	for _, c := range []struct {
		rounds string
		env    []string
		limit  time.Duration // 0: refused
	}{
		{"", nil, packageLimit},
		{"1", []string{"SOAK=1"}, packageLimit + roundLimit},
		{"50", []string{"SOAK=50"}, packageLimit + 50*roundLimit},
		{"0", nil, 0}, {"-1", nil, 0}, {"yes", nil, 0}, {"1e3", nil, 0},
	} {
		env, limit, err := soaking(c.rounds)
		if !slices.Equal(env, c.env) || limit != c.limit || (err == nil) != (c.limit > 0) {
			t.Errorf("SOAK=%q: %q, %v, %v", c.rounds, env, limit, err)
		}
	}
}

// boot starts a guest unless one runs.
func (h *harness) boot(t *testing.T) error {
	if h.guest != nil {
		return nil
	}
	cfg := testbed.GuestConfig{SystemBus: true}
	if os.Getenv("GUEST_CONSOLE") == "1" {
		cfg.Console = os.Stderr
	}
	guest, err := h.bed.Boot(context.WithoutCancel(t.Context()), cfg)
	if err != nil {
		return err
	}
	h.guest = guest
	return h.uploadData(t)
}

// install builds a package's tests and puts them into the guest; for the scenarios also the project's programs.
func (h *harness) install(t *testing.T, p Package) error {
	binary := filepath.Join(t.TempDir(), "test")
	if err := testbed.BuildTest(t.Context(), binary, "./"+p.Dir); err != nil {
		return err
	}
	if err := h.boot(t); err != nil {
		return err
	}
	if p.Dir == scenarios {
		if err := h.guest.InstallPrograms(t.Context(), append([]string{"./examples/sharedmemory"}, testbed.Programs...)...); err != nil {
			return err
		}
		// The program that an upgrade brings.
		if err := h.guest.InstallVersion(t.Context(), "iserd-io.next", "./cmd/iserd-io", "next"); err != nil {
			return err
		}
	}
	return h.guest.Upload(t.Context(), guestDir(p), binary)
}

// guestRoot stands for the root of the checkout in the guest: files that are not Go are there, so that tests find their data and those
// of other packages by the usual relative paths.
const guestRoot = "/srv/test"

// guestDir is where a package's tests run in the guest.
func guestDir(p Package) string { return path.Join(guestRoot, p.Dir) }

// uploadData puts the checkout's files into the guest, Go and hidden ones left out.
func (h *harness) uploadData(t *testing.T) error {
	tree := t.TempDir()
	err := filepath.WalkDir(h.root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(h.root, name)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel != "." && (strings.HasPrefix(d.Name(), ".") || rel == "bin") {
				return filepath.SkipDir
			}
			return os.MkdirAll(filepath.Join(tree, rel), 0o755)
		}
		if !d.Type().IsRegular() || strings.HasSuffix(name, ".go") {
			return nil
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(tree, rel), b, 0o644)
	})
	if err != nil {
		return err
	}
	entries, err := filepath.Glob(filepath.Join(tree, "*"))
	if err != nil {
		return err
	}
	return h.guest.Upload(t.Context(), guestRoot, entries...)
}

// maxDeaths is how often the guest may die in the tests of one package of what is not the project's, see [testbed.GuestError.Foreign].
const maxDeaths = 2

// run executes the tests of a package in the guest. When the guest dies of what is not the project's, those that had no end are run in
// another one; a test in which the second dies, too, has failed.
func (h *harness) run(t *testing.T, p Package) {
	cut := map[string]bool{} // tests that were running when a guest died
	for deaths := 0; ; deaths++ {
		if err := h.install(t, p); err != nil {
			t.Fatal(err)
		}
		again := h.once(t, p, deaths < maxDeaths, cut)
		if len(again) == 0 {
			return
		}
		h.renew(t)
		p.Guest = again
	}
}

// once is one attempt of run. It returns the tests to run again, after a death that may be forgiven.
func (h *harness) once(t *testing.T, p Package, forgive bool, cut map[string]bool) (again []string) {
	before := len(h.guest.Complaints())
	m := &mirrors{forgive: forgive, cut: cut}
	exit, err := h.execute(t, p, m)
	for _, c := range h.guest.Complaints()[before:] {
		t.Logf("the guest's kernel says: %s", c.Line)
	}
	if died := new(testbed.GuestError); errors.As(err, &died) && m.died && forgive {
		t.Logf("the guest died of what is not the project's; what had no end yet is run in another one: %v", err)
		return slices.DeleteFunc(slices.Clone(p.Guest), func(name string) bool { return m.ended[name] })
	}
	if left := new(testbed.LeftoverError); errors.As(err, &left) {
		t.Log(err)
		err = nil
	}
	if err != nil {
		t.Error(err)
	} else if exit != 0 && !t.Failed() {
		t.Errorf("the test binary ended with status %d", exit)
	}
	if t.Failed() {
		h.renew(t)
		return nil
	}
	h.inspect(t)
	return nil
}

// execute runs the test binary and mirrors its tests under t. Its output passes through test2json on the host.
func (h *harness) execute(t *testing.T, p Package, m *mirrors) (int, error) {
	parse := exec.CommandContext(t.Context(), "go", "tool", "test2json")
	in, err := parse.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := parse.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := parse.Start(); err != nil {
		return 0, err
	}
	root, events := newNode(), make(chan error, 1)
	go func() { events <- readEvents(out, root) }()
	type end struct {
		code int
		err  error
	}
	ended := make(chan end, 1)
	env := append([]string{"REQUIRE=ublk,rdma,root,guest,uring,dbus,systemd,target", "GUEST=inside"}, h.env...)
	if program := references[p.Dir]; program != "" {
		named, stop, err := h.reference(t, program)
		if err != nil {
			return 0, err
		}
		defer stop()
		env = append(env, named...)
	}
	go func() {
		code, err := h.guest.Run(t.Context(), testbed.Command{
			Args: []string{
				"./test", "-test.v=test2json", "-test.timeout=" + h.limit.String(), "-test.run=^(" + strings.Join(p.Guest, "|") + ")$",
			},
			Dir:     guestDir(p),
			Env:     env,
			Timeout: h.limit + time.Minute,
		}, in, in)
		if died := new(testbed.GuestError); errors.As(err, &died) {
			m.died = died.Foreign() // before the nodes end
		}
		in.Close()
		ended <- end{code, err}
	}()
	ran := m.mirrorPackage(t, root)
	e := <-ended
	if err := errors.Join(e.err, <-events); err != nil {
		return e.code, err
	}
	if err := parse.Wait(); err != nil {
		return e.code, fmt.Errorf("test2json: %w", err)
	}
	if ran == 0 {
		return e.code, errors.New("the guest ran no test")
	}
	return e.code, nil
}

// reference starts a program that makes targets, and returns the environment it prints and what ends it.
func (h *harness) reference(t *testing.T, program string) (env []string, stop func(), err error) {
	if err := h.guest.InstallPrograms(t.Context(), program); err != nil {
		return nil, nil, err
	}
	in, closeInput := io.Pipe()
	out, in2 := io.Pipe()
	var said strings.Builder
	ended := make(chan error, 1)
	go func() {
		code, err := h.guest.Run(t.Context(), testbed.Command{Args: []string{path.Base(program)}, Stdin: in, Timeout: h.limit}, in2, &said)
		if err == nil && code != 0 {
			err = fmt.Errorf("%s: %s", program, strings.TrimSpace(said.String()))
		}
		in2.CloseWithError(err)
		ended <- err
	}()
	stop = func() {
		closeInput.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	sc := bufio.NewScanner(out)
	for sc.Scan() && sc.Text() != "" {
		env = append(env, sc.Text())
	}
	if err := sc.Err(); err != nil {
		return nil, nil, err
	}
	return env, stop, nil
}

// mirrors are the mirrored tests of one execution.
type mirrors struct {
	forgive bool            // a test that a death of the guest cut short is skipped, for it is run again
	cut     map[string]bool // tests that were cut short, now or before
	died    bool            // the guest died, and not of us; valid when a node has ended
	ended   map[string]bool // tests that have run to their end, or may not be run again
}

// mirrorPackage replays the tests of a binary and returns how many there were; what the binary prints outside of tests belongs to t.
func (m *mirrors) mirrorPackage(t *testing.T, root *node) (ran int) {
	m.ended = map[string]bool{}
	for {
		e, ok := root.next()
		switch {
		case !ok:
			return ran
		case e.child != nil:
			ran++
			t.Run(e.name, func(t *testing.T) {
				m.ended[e.name] = true
				mirror(t, e.child, func() bool {
					if !m.died || !m.forgive || m.cut[e.name] {
						return false
					}
					delete(m.ended, e.name)
					return true
				})
			})
			if !m.ended[e.name] {
				m.cut[e.name] = true
			}
		case e.Action == "output" && !frame(e.Output):
			io.WriteString(t.Output(), e.Output)
		case e.Action == "fail":
			t.Fail()
		}
	}
}

// inspect looks at what a package left in the guest: devices, targets. The next package gets a fresh guest then.
func (h *harness) inspect(t *testing.T) {
	const script = `ls -d /dev/ublkc* /sys/kernel/config/target/iscsi/iqn* /sys/kernel/config/target/iscsi/eui* /sys/kernel/config/target/core/*_*/* 2>/dev/null; true`
	var out strings.Builder
	if _, err := h.guest.Run(t.Context(), testbed.Command{Args: []string{"sh", "-c", script}, Timeout: time.Minute}, &out, nil); err != nil {
		t.Error(err)
		h.renew(t)
		return
	}
	if left := strings.Fields(out.String()); len(left) > 0 {
		t.Logf("left behind in the guest: %s", strings.Join(left, " "))
		h.renew(t)
	}
}

// renew gives up the guest; the next package boots another.
func (h *harness) renew(t *testing.T) {
	if err := h.guest.Close(); err != nil {
		t.Logf("closing the guest: %v", err)
	}
	h.guest = nil
}

// shut ends the last guest, which nothing has complained about: so it has to go down in order.
func (h *harness) shut(t *testing.T) {
	if h.guest != nil {
		if err := h.guest.Close(); err != nil {
			t.Error(err)
		}
	}
}
