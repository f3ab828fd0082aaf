package ipc

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	chunk      = 32 << 10 // payload of one datagram; well below the default send buffer, so a datagram always fits
	maxMessage = 8 << 20
	maxFiles   = 16

	flagMore = 1

	// writeTimeout bounds how long a peer that does not read can hold a sender.
	writeTimeout = 10 * time.Second
)

// ErrTooLarge tells that a message is over the limit of 8 MiB.
var ErrTooLarge = errors.New("message is larger than 8 MiB")

// ErrClosed tells that the connection is gone.
var ErrClosed = errors.New("connection closed")

// envelope is what a message looks like.
type envelope struct {
	V      int             `json:"v"`
	ID     uint64          `json:"id,omitempty"`     // request and its reply
	Method string          `json:"method,omitempty"` // request, event
	Body   json.RawMessage `json:"body,omitempty"`
	Error  *Error          `json:"error,omitempty"`
	Cancel uint64          `json:"cancel,omitempty"` // withdraws a request
}

// conn frames messages on a SOCK_SEQPACKET socket. One goroutine reads; any may write.
type conn struct {
	c *net.UnixConn

	mu  sync.Mutex // held while a message is written
	out []byte     // datagram under construction
}

func newConn(c *net.UnixConn) *conn { return &conn{c: c, out: make([]byte, 0, chunk+1)} }

// write sends one message. files stay the caller's.
func (c *conn) write(e *envelope, files []*os.File) error {
	e.V = Version
	msg, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if len(msg) > maxMessage {
		return fmt.Errorf("send %s: %d bytes: %w", e.Method, len(msg), ErrTooLarge)
	}
	if len(files) > maxFiles {
		return fmt.Errorf("send %s: %d descriptors, at most %d", e.Method, len(files), maxFiles)
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.c.SetWriteDeadline(time.Now().Add(writeTimeout))
	for {
		n := min(len(msg), chunk)
		flag := byte(0)
		if n < len(msg) {
			flag = flagMore
		}
		c.out = append(append(c.out[:0], flag), msg[:n]...)
		if _, _, err := c.c.WriteMsgUnix(c.out, oob, nil); err != nil {
			// Part of a message may be out: the stream is of no more use.
			_ = c.c.Close()
			return fmt.Errorf("%w: %w", ErrClosed, err)
		}
		oob, msg = nil, msg[n:]
		if len(msg) == 0 {
			return nil
		}
	}
}

// read returns the next message and the descriptors that came with it, which are the caller's to close.
func (c *conn) read(buf []byte) (e *envelope, files []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(files)
			files = nil
		}
	}()
	var msg []byte
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	for first := true; ; first = false {
		n, oobn, flags, _, err := c.c.ReadMsgUnix(buf, oob)
		if err != nil {
			return nil, files, fmt.Errorf("%w: %w", ErrClosed, err)
		}
		if oobn > 0 {
			fs, err := parseRights(oob[:oobn])
			files = append(files, fs...)
			if err != nil {
				return nil, files, err
			}
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || n < 1 || buf[0]&^flagMore != 0 || !first && oobn > 0 {
			return nil, files, errors.New("malformed datagram")
		}
		if len(msg)+n-1 > maxMessage {
			return nil, files, fmt.Errorf("receive: %w", ErrTooLarge)
		}
		msg = append(msg, buf[1:n]...)
		if buf[0]&flagMore == 0 {
			break
		}
	}
	e = new(envelope)
	if err := json.Unmarshal(msg, e); err != nil {
		return nil, files, fmt.Errorf("malformed message: %w", err)
	}
	return e, files, nil
}

// parseRights takes the descriptors out of control messages. On an error it returns those found so far.
func parseRights(oob []byte) (files []*os.File, err error) {
	ms, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("malformed control message: %w", err)
	}
	for i := range ms {
		if ms[i].Header.Level != unix.SOL_SOCKET || ms[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&ms[i])
		if err != nil {
			return files, fmt.Errorf("malformed descriptors: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// checkPeer admits root and the user of this process.
func checkPeer(c *net.UnixConn) error {
	cred, err := PeerCred(c)
	if err != nil {
		return err
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("peer of user %d (pid %d) refused", cred.Uid, cred.Pid)
	}
	return nil
}

// PeerCred returns the credentials of the process at the other end, as the kernel recorded them at connect time.
func PeerCred(c syscall.Conn) (*unix.Ucred, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, fmt.Errorf("peer credentials: %w", err)
	}
	if cerr != nil {
		return nil, fmt.Errorf("peer credentials: %w", cerr)
	}
	return cred, nil
}
