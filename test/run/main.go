// Command run executes the project's tests, each where it can run, and prints their events as one stream in the format of go test -json.
// A runner such as gotestsum turns the stream into progress and one summary:
//
//	gotestsum --raw-command -- go run ./test/run [-no-skip] [unit] [guest]
//
// unit is every test that runs on the host, with the race detector; guest is the rest, in a guest. Without arguments both run. Package
// test explains which is which. With -no-skip a test that skips is named at the end and makes the run fail.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"iserd.org/iserd/internal/testbed"
	"iserd.org/iserd/test"
)

func main() {
	noSkip := flag.Bool("no-skip", false, "a test that skips fails the run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := &runner{out: os.Stdout}
	err := r.run(ctx, flag.Args())
	if skipped := r.missing(); err == nil && *noSkip && len(skipped) > 0 {
		err = fmt.Errorf("%d tests were skipped, and none may be: %s", len(skipped), strings.Join(skipped, ", "))
	}
	if err == nil && r.failed {
		os.Exit(1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/run:", err)
		os.Exit(1)
	}
}

type runner struct {
	out     io.Writer
	failed  bool            // a go test ended with failures, which its events tell
	skipped []string        // PACKAGE.TEST
	again   map[string]bool // PACKAGE.TEST that was run again to its end
}

// missing returns the tests that were skipped and not run again. The second run of a test has a number behind its name, as go test does it.
func (r *runner) missing() []string {
	return slices.DeleteFunc(slices.Clone(r.skipped), func(name string) bool {
		for i := range len(name) + 1 {
			if (i == len(name) || name[i] == '/') && (r.again[name[:i]+"#01"] || r.again[name[:i]+"#02"]) {
				return true
			}
		}
		return false
	})
}

func (r *runner) run(ctx context.Context, parts []string) error {
	root, err := testbed.ModuleRoot()
	if err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if len(parts) == 0 {
		parts = []string{"unit", "guest"}
	}
	for _, part := range parts {
		switch part {
		case "unit":
			err = r.unit(ctx, root)
		case "guest":
			limit := "-timeout=60m"
			if os.Getenv("SOAK") != "" {
				limit = "-timeout=0" // the guest's tests have one that grows with the rounds
			}
			err = r.goTest(ctx, "-count=1", limit, "-run=^TestGuest$", "./test")
		default:
			err = fmt.Errorf("%s is neither unit nor guest", part)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unit runs the tests of the host. Packages of which some tests belong to the guest are run one by one, since the expression that leaves
// those out would hold for all packages of a call.
func (r *runner) unit(ctx context.Context, root string) error {
	packages, err := test.Discover(root)
	if err != nil {
		return err
	}
	mixed := map[string]test.Package{}
	for _, p := range packages {
		if len(p.Guest) > 0 {
			mixed["./"+p.Dir] = p
		}
	}
	// -e: a package that does not build is reported by go test, as any failure.
	list := exec.CommandContext(ctx, "go", "list", "-e", "-f", "{{.Dir}}", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	args := []string{"-race", "-timeout=20m"}
	for _, dir := range strings.Fields(string(out)) {
		dir = "." + strings.TrimPrefix(dir, root)
		if _, ok := mixed[dir]; !ok {
			args = append(args, dir)
		}
	}
	// TestGuest is the other part.
	if err := r.goTest(ctx, append([]string{"-skip=^TestGuest$"}, args...)...); err != nil {
		return err
	}
	for _, p := range packages {
		if len(p.Guest) > 0 && len(p.Host) > 0 {
			if err := r.goTest(ctx, "-race", "-timeout=20m", "-skip=^("+strings.Join(p.Guest, "|")+")$", "./"+p.Dir); err != nil {
				return err
			}
		}
	}
	return nil
}

// goTest runs go test -json and passes its events on. Failing tests are no error here: their events are on the stream.
func (r *runner) goTest(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := r.pass(out); err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		return err
	}
	err = cmd.Wait()
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		r.failed = true
		return nil
	}
	return err
}

// pass copies the stream and notes skipped tests.
func (r *runner) pass(in io.Reader) error {
	br := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := br.ReadBytes('\n')
		r.note(line)
		if _, werr := r.out.Write(line); werr != nil {
			return werr
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// note remembers what missing needs of an event.
func (r *runner) note(line []byte) {
	skip := bytes.Contains(line, []byte(`"Action":"skip"`))
	if !skip && !bytes.Contains(line, []byte(`"Action":"pass"`)) {
		return
	}
	var e struct{ Package, Test string }
	if json.Unmarshal(line, &e) != nil || e.Test == "" {
		return
	}
	name := e.Package + "." + e.Test
	switch {
	case skip:
		r.skipped = append(r.skipped, name)
	case strings.HasSuffix(name, "#01"), strings.HasSuffix(name, "#02"):
		if r.again == nil {
			r.again = map[string]bool{}
		}
		r.again[name] = true
	}
}
