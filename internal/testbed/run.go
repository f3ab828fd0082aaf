package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"iserd.org/iserd/internal/testbed/wire"
)

// Command is what [Guest.Run] executes.
type Command struct {
	Args    []string      // program and arguments; the program is looked up in the guest's PATH, which begins with Bin
	Env     []string      // NAME=value, added to the guest's few
	Dir     string        // working directory; /tmp when empty
	Stdin   io.Reader     // may be nil
	Timeout time.Duration // after which the command and all it started are killed; 10 minutes when 0
}

// TimeoutError says that a command took too long and was ended.
type TimeoutError struct {
	Args    []string
	Limit   time.Duration
	Console []string // the kernel's list of blocked tasks is among the lines
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("%s: ended after %s; the last %d lines of the console:\n\t%s", e.Args[0], e.Limit, len(e.Console), strings.Join(e.Console, "\n\t"))
}

// LeftoverError says that a command ended and left processes running, which were killed.
type LeftoverError struct {
	Args      []string
	Processes []string // NAME[PID]
}

func (e *LeftoverError) Error() string {
	return fmt.Sprintf("%s: left running, and killed: %s", e.Args[0], strings.Join(e.Processes, " "))
}

// Run executes a command in the guest and returns its exit status; a command that a signal ended has 128 plus the signal's number. Its
// output goes to stdout and stderr as it comes; they may be nil, and when they are equal the order of both is kept. A slow writer holds up
// the guest.
//
// All processes of a command end with it. Those it left running are named by a [*LeftoverError], with the exit status still valid. A
// command that takes longer than its time-out, or whose ctx is cancelled, is killed: a [*TimeoutError], or ctx's error. A guest that fails
// meanwhile, or whose kernel makes a fatal complaint, gives a [*GuestError].
func (g *Guest) Run(ctx context.Context, c Command, stdout, stderr io.Writer) (exit int, err error) {
	if len(c.Args) == 0 {
		return -1, errors.New("guest: no command given")
	}
	if c.Timeout == 0 {
		c.Timeout = 10 * time.Minute
	}
	merge := stdout != nil && sameWriter(stdout, stderr)
	if stdout == nil {
		stdout = io.Discard
	}
	if stderr == nil {
		stderr = io.Discard
	}
	x := &execution{stdout: stdout, stderr: stderr, exit: make(chan wire.Exit, 1)}
	g.mu.Lock()
	g.lastID++
	id := g.lastID
	g.runs[id] = x
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.runs, id)
		g.mu.Unlock()
	}()
	if err := g.conn.SendJSON(wire.TypeStart, id, wire.Start{Args: c.Args, Env: c.Env, Dir: c.Dir, Merge: merge}); err != nil {
		return -1, g.lost()
	}
	if c.Stdin != nil {
		go g.runStdin(id, c.Stdin)
	} else if err := g.conn.Send(wire.TypeInput, id, nil); err != nil {
		return -1, g.lost()
	}
	e, err := g.await(ctx, c, id, x)
	if err != nil {
		return -1, err
	}
	if e.Error != "" {
		return e.Code, fmt.Errorf("guest: %s: %s", c.Args[0], e.Error)
	}
	if s := fatalOf(g.console.all()); s != "" {
		return e.Code, g.failure(kernelFailed + s)
	}
	if len(e.Leftover) > 0 {
		return e.Code, &LeftoverError{c.Args, e.Leftover}
	}
	return e.Code, nil
}

// sameWriter compares two writers, which may be of a type that cannot be compared.
func sameWriter(a, b io.Writer) (same bool) {
	defer func() { _ = recover() }()
	return a == b
}

// runStdin forwards input until its end. It outlives the command when the reader blocks, as a terminal does.
func (g *Guest) runStdin(id uint32, r io.Reader) {
	buf := make([]byte, 16<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 && g.conn.Send(wire.TypeInput, id, buf[:n]) != nil {
			return
		}
		if err != nil {
			g.conn.Send(wire.TypeInput, id, nil)
			return
		}
	}
}

// await waits for the command's end, and forces it when the time is up.
func (g *Guest) await(ctx context.Context, c Command, id uint32, x *execution) (wire.Exit, error) {
	limit := time.NewTimer(c.Timeout)
	defer limit.Stop()
	fatal := g.fatal
	var late error
	done := ctx.Done()
	for {
		select {
		case e := <-x.exit:
			if t, ok := late.(*TimeoutError); ok {
				t.Console = g.console.tail(reportLines)
			}
			return e, late
		case <-g.dead:
			if ctx.Err() != nil {
				return wire.Exit{}, ctx.Err()
			}
			return wire.Exit{}, g.failure("")
		case <-fatal:
			// Time for the rest of the report to reach the console; a panic ends the guest before that.
			fatal = nil
			limit.Reset(min(c.Timeout, 10*time.Second))
		case <-done:
			done, late = nil, ctx.Err()
			limit.Reset(killLimit)
			g.conn.Send(wire.TypeKill, id, nil)
		case <-limit.C:
			if late != nil {
				g.end(fmt.Sprintf("%s cannot be killed; its processes hang in the kernel", c.Args[0]))
				<-g.dead
				return wire.Exit{}, g.failure("")
			}
			late = &TimeoutError{Args: c.Args, Limit: c.Timeout}
			limit.Reset(killLimit)
			g.conn.Send(wire.TypeKill, id, nil)
		}
	}
}

// lost describes a guest whose port is closed; QEMU's end follows at once.
func (g *Guest) lost() error {
	select {
	case <-g.dead:
	case <-time.After(killLimit):
		g.end("it does not listen")
		<-g.dead
	}
	return g.failure("")
}
