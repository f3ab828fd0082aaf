// Package standby is how iserd has a data plane get ready while another one serves, so that devices do not wait for its start.
//
//	iserd                                   iserd-io --standby FD
//	  |  -- starts, with a socket as FD -->   |  everything but the control socket is set up
//	  |  <-- one line, ipc.HelloReply ----    |  ready
//	  |     (the other one ends)              |  waits
//	  |  -- "serve\n" ------------------->    |  serves
//
// A socket that is closed before that word ends the process that waits: nobody is left who could have it serve.
package standby

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/ipc"
)

const word = "serve\n"

// maxHello bounds the line, bytes.
const maxHello = 64 << 10

// Waiting is iserd's end.
type Waiting struct{ conn net.Conn }

// Pair makes the two ends: ours, and the descriptor for the process, which the caller closes when that is started.
func Pair() (ours *Waiting, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "standby")
	conn, err := fileConn(fds[0])
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return &Waiting{conn}, theirs, nil
}

// fileConn makes a connection of a descriptor, which is closed.
func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "standby")
	defer func() { _ = f.Close() }()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("standby: descriptor %d: %w", fd, err)
	}
	return conn, nil
}

// Hello waits until the process is ready, and returns what it is.
func (w *Waiting) Hello(ctx context.Context) (h ipc.HelloReply, err error) {
	line, err := readLine(ctx, w.conn)
	if err == nil {
		err = json.Unmarshal(line, &h)
	}
	if err != nil {
		return ipc.HelloReply{}, fmt.Errorf("it does not get ready: %w", err)
	}
	return h, nil
}

// Serve has the process serve. It lives on then, whatever becomes of us.
func (w *Waiting) Serve() error {
	_, err := io.WriteString(w.conn, word)
	if cerr := w.conn.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("the data plane that was ready has ended: %w", err)
	}
	return nil
}

// Close ends the process, unless it serves.
func (w *Waiting) Close() error { return w.conn.Close() }

// ErrDropped tells that nobody will have this process serve.
var ErrDropped = errors.New("was not needed")

// Await is the process's part: it says what it is and returns when it is to serve. It closes the descriptor.
func Await(ctx context.Context, fd int, hello any) error {
	conn, err := fileConn(fd)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	b, err := json.Marshal(hello)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("%w: %w", ErrDropped, err)
	}
	line, err := readLine(ctx, conn)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrDropped, err)
	case string(line) != word:
		return fmt.Errorf("standby: %q instead of %q", line, word)
	}
	return nil
}

// readLine reads until the end of a line, or until ctx ends.
func readLine(ctx context.Context, conn net.Conn) ([]byte, error) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	line, err := bufio.NewReader(io.LimitReader(conn, maxHello)).ReadBytes('\n')
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return line, err
}
