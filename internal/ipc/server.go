package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Handler answers requests. Handle runs on a goroutine of its own for each request; ctx ends when the caller withdraws the request, when
// its connection is lost or replaced, and when the server stops. The result becomes the body of the reply. An *Error (also wrapped)
// goes to the caller as it is; any other error gets the code "Internal".
type Handler interface {
	Handle(ctx context.Context, method string, body json.RawMessage) (any, error)
}

// HandlerFunc is a function that is a Handler.
type HandlerFunc func(ctx context.Context, method string, body json.RawMessage) (any, error)

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, method string, body json.RawMessage) (any, error) {
	return f(ctx, method, body)
}

// ErrInUse tells that another process serves the path.
var ErrInUse = errors.New("another process is serving")

// maxRequests is how many requests of one client run at a time; more wait in the socket.
const maxRequests = 256

// acceptPause is how long accepting rests after a failure, so that a shortage of descriptors does not become a busy loop.
const acceptPause = 100 * time.Millisecond

type filesKey struct{}

// Files returns the descriptors that came with the request whose context is given. They are closed when the handler returns; duplicate
// one to keep it.
func Files(ctx context.Context) []*os.File {
	fs, _ := ctx.Value(filesKey{}).([]*os.File)
	return fs
}

// Server is the data plane's end: a listener with at most one client.
type Server struct {
	h      Handler
	ln     *net.UnixListener
	lock   *os.File
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	done   chan struct{}

	requests context.Context // of all requests; ends after the connection was closed
	withdraw context.CancelFunc

	mu     sync.Mutex
	client *serverConn
}

// Serve listens at path (mode 0600, parent directory must exist) and answers requests with h until ctx ends or Close. It returns as soon as the
// socket accepts connections. Another live server at path is ErrInUse; what a dead one left behind is replaced.
func Serve(ctx context.Context, path string, h Handler) (*Server, error) {
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("serve %s: %w", path, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrInUse
		}
		return nil, fmt.Errorf("serve %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		_ = lock.Close()
		return nil, fmt.Errorf("serve %s: %w", path, err)
	}
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("serve %s: %w", path, err)
	}
	// Between bind and chmod others may connect as far as the umask lets them; checkPeer turns them away.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = ln.Close()
		_ = lock.Close()
		return nil, fmt.Errorf("serve %s: %w", path, err)
	}
	s := &Server{h: h, ln: ln, lock: lock, done: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.requests, s.withdraw = context.WithCancel(context.WithoutCancel(ctx))
	s.wg.Add(1)
	go s.runAccept()
	go s.runStop()
	return s, nil
}

// Notify sends an event to the client, if there is one. It fails only when body cannot be encoded; a client that is gone, or goes
// meanwhile, reads the state when it comes back.
func (s *Server) Notify(event string, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("event %s: %w", event, err)
	}
	s.mu.Lock()
	c := s.client
	s.mu.Unlock()
	if c != nil {
		_ = c.conn.write(&envelope{Method: event, Body: b}, nil)
	}
	return nil
}

// Close stops accepting, cuts the client off, waits for the handlers and removes the socket. Idempotent.
func (s *Server) Close() error {
	s.cancel()
	<-s.done
	return nil
}

// Done is closed when the server has stopped.
func (s *Server) Done() <-chan struct{} { return s.done }

func (s *Server) runStop() {
	<-s.ctx.Done()
	_ = s.ln.Close() // also removes the socket file
	s.replace(nil)
	s.withdraw()
	s.wg.Wait()
	_ = s.lock.Close()
	close(s.done)
}

// replace makes c the client and closes the one before. After the end of the server c is closed, too.
func (s *Server) replace(c *serverConn) {
	s.mu.Lock()
	old := s.client
	s.client = c
	s.mu.Unlock()
	if old != nil {
		old.close()
	}
	if c != nil && s.ctx.Err() != nil {
		c.close()
	}
}

func (s *Server) runAccept() {
	defer s.wg.Done()
	for {
		uc, err := s.ln.AcceptUnix()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select { // out of descriptors, say: the connection stays in the backlog
			case <-s.ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		if checkPeer(uc) != nil {
			_ = uc.Close()
			continue
		}
		c := &serverConn{s: s, conn: newConn(uc), slots: make(chan struct{}, maxRequests), running: make(map[uint64]context.CancelFunc)}
		c.ctx, c.cancel = context.WithCancel(s.requests)
		s.replace(c)
		s.wg.Add(1)
		go c.runReader()
	}
}

// serverConn is one client.
type serverConn struct {
	s      *Server
	conn   *conn
	ctx    context.Context
	cancel context.CancelFunc
	slots  chan struct{}

	mu      sync.Mutex
	running map[uint64]context.CancelFunc
}

// close ends the connection before the requests, so that their callers hear that it is gone and not that somebody withdrew them.
func (c *serverConn) close() {
	_ = c.conn.c.Close()
	c.cancel()
}

func (c *serverConn) runReader() {
	defer c.s.wg.Done()
	defer c.close()
	buf := make([]byte, chunk+1)
	for {
		e, files, err := c.conn.read(buf)
		if err != nil {
			return
		}
		switch {
		case e.Cancel != 0:
			closeAll(files)
			c.mu.Lock()
			if stop := c.running[e.Cancel]; stop != nil {
				stop()
			}
			c.mu.Unlock()
		case e.ID != 0 && e.Method != "":
			select {
			case c.slots <- struct{}{}:
			case <-c.ctx.Done():
				closeAll(files)
				return
			}
			c.start(e, files)
		default:
			closeAll(files)
			return // neither request nor withdrawal
		}
	}
}

// start runs the handler for a request.
func (c *serverConn) start(e *envelope, files []*os.File) {
	ctx, stop := context.WithCancel(c.ctx)
	if files != nil {
		ctx = context.WithValue(ctx, filesKey{}, files)
	}
	c.mu.Lock()
	c.running[e.ID] = stop
	c.mu.Unlock()
	c.s.wg.Add(1)
	go func() {
		defer c.s.wg.Done()
		defer closeAll(files)
		defer func() {
			c.mu.Lock()
			delete(c.running, e.ID)
			c.mu.Unlock()
			stop()
			<-c.slots
		}()
		reply := &envelope{ID: e.ID}
		out, err := handle(ctx, c.s.h, e.Method, e.Body)
		if err == nil {
			reply.Body, err = json.Marshal(out)
		}
		if err != nil {
			var coded *Error
			if !errors.As(err, &coded) {
				coded = &Error{Code: "Internal", Text: err.Error()}
			}
			reply.Body, reply.Error = nil, coded
		}
		if err := c.conn.write(reply, nil); errors.Is(err, ErrTooLarge) {
			_ = c.conn.write(&envelope{ID: e.ID, Error: &Error{Code: "Internal", Text: err.Error()}}, nil)
		}
	}()
}

// handle calls h. A panic is a fault of one request, and must not end I/O of all devices: it becomes an error that carries the stack.
func handle(ctx context.Context, h Handler, method string, body json.RawMessage) (out any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in %s: %v\n%s", method, p, debug.Stack())
		}
	}()
	return h.Handle(ctx, method, body)
}
