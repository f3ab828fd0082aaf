package test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"iserd.org/iserd/internal/require"
)

// event is one line of test2json (go doc test2json).
type event struct {
	Action  string
	Test    string
	Output  string
	Elapsed float64 // seconds of the guest's clock
}

// node is a test in the guest. Its events queue up without bound, for the guest must not wait for the mirror: a parallel test's subtests
// are reported here only after the tests before it.
type node struct {
	mu     sync.Mutex
	more   sync.Cond
	events []nodeEvent
	ended  bool
}

// nodeEvent is an event of the test itself, or the beginning of a subtest.
type nodeEvent struct {
	event
	name  string // of the subtest
	child *node
}

func newNode() *node {
	n := &node{}
	n.more.L = &n.mu
	return n
}

func (n *node) put(e nodeEvent) {
	n.mu.Lock()
	n.events = append(n.events, e)
	n.mu.Unlock()
	n.more.Signal()
}

func (n *node) end() {
	n.mu.Lock()
	n.ended = true
	n.mu.Unlock()
	n.more.Signal()
}

// next waits for the next event; ok is false after the last.
func (n *node) next() (e nodeEvent, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for len(n.events) == 0 && !n.ended {
		n.more.Wait()
	}
	if len(n.events) == 0 {
		return nodeEvent{}, false
	}
	e = n.events[0]
	n.events = n.events[1:]
	return e, true
}

// readEvents hands the events of a test binary to the nodes of its tests, which hang below root, and ends all nodes at the end of r.
func readEvents(r io.Reader, root *node) error {
	nodes := map[string]*node{"": root}
	defer func() {
		for _, n := range nodes {
			n.end()
		}
	}()
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		var e event
		if err := json.Unmarshal(sc.Bytes(), &e); err != nil {
			return fmt.Errorf("test2json printed %.100q: %w", sc.Text(), err)
		}
		if e.Action == "run" {
			parent, name := root, e.Test
			// The parent is the longest name that runs; subtests may have slashes in theirs.
			for i, c := range e.Test {
				if c == '/' {
					if n := nodes[e.Test[:i]]; n != nil {
						parent, name = n, e.Test[i+1:]
					}
				}
			}
			n := newNode()
			nodes[e.Test] = n
			parent.put(nodeEvent{name: name, child: n})
			continue
		}
		n := nodes[e.Test]
		if n == nil {
			n = root
		}
		n.put(nodeEvent{event: e})
		if e.Test != "" && slices.Contains([]string{"pass", "fail", "skip"}, e.Action) {
			n.end()
		}
	}
	if err := sc.Err(); err != nil {
		io.Copy(io.Discard, r)
		return err
	}
	return nil
}

// mirror replays a node as test t: output as output, subtests as subtests, the verdict as verdict. again tells of a test without a verdict whether
// it will be run again; it is skipped then.
//
// A skip in the guest fails when REQUIRE names the guest: everything a test can need is there.
func mirror(t *testing.T, n *node, again func() bool) {
	verdict := ""
	for {
		e, ok := n.next()
		if !ok {
			break
		}
		if e.child != nil {
			t.Run(e.name, func(t *testing.T) { mirror(t, e.child, again) })
			continue
		}
		switch e.Action {
		case "output":
			if !frame(e.Output) {
				io.WriteString(t.Output(), e.Output)
			}
		case "pass", "fail", "skip":
			verdict = e.Action
		}
	}
	switch verdict {
	case "pass":
	case "skip":
		if require.Demanded("guest") {
			t.Error("skipped in the guest, where nothing is missing")
		} else {
			t.Skip("skipped in the guest")
		}
	case "fail":
		t.Fail()
	default:
		if again() {
			t.Skip("cut short by the end of the guest; it is run again")
		}
		t.Error("the guest reported no end of this test")
	}
}

// frame tells whether a line of output is go test's own, which the mirror's go test prints itself.
func frame(s string) bool {
	s = strings.TrimLeft(s, " ")
	for _, p := range []string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME ", "--- PASS: ", "--- FAIL: ", "--- SKIP: "} {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return s == "PASS\n" || s == "FAIL\n"
}

func TestReadEvents(t *testing.T) {
	const in = `{"Action":"start"}
{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"run","Test":"TestA/x/y"}
{"Action":"output","Test":"TestA/x/y","Output":"hello\n"}
{"Action":"pass","Test":"TestA/x/y","Elapsed":0.5}
{"Action":"pass","Test":"TestA","Elapsed":1}
{"Action":"run","Test":"TestHung"}
{"Action":"fail","Elapsed":2}
`
	root := newNode()
	if err := readEvents(strings.NewReader(in), root); err != nil {
		t.Fatal(err)
	}
	var got []string
	var walk func(prefix string, n *node)
	walk = func(prefix string, n *node) {
		for {
			e, ok := n.next()
			if !ok {
				got = append(got, prefix+" ends")
				return
			}
			if e.child != nil {
				walk(prefix+"["+e.name+"]", e.child)
			} else {
				got = append(got, strings.TrimSpace(prefix+" "+e.Action+" "+e.Output))
			}
		}
	}
	walk("", root)
	want := []string{
		"start", "[TestA] output === RUN   TestA", "[TestA][x/y] output hello", "[TestA][x/y] pass", "[TestA][x/y] ends", "[TestA] pass", "[TestA] ends",
		"[TestHung] ends", "fail", " ends",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if err := readEvents(strings.NewReader("not JSON\n"), newNode()); err == nil {
		t.Error("a line that is not JSON was taken")
	}
}
