package ipc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
)

// Event is what the data plane says without being asked.
type Event struct {
	Name string
	Body json.RawMessage
}

// maxEvents is how many events may wait for a slow reader.
const maxEvents = 1024

// Client is the control plane's end of a connection. It is safe for concurrent use.
type Client struct {
	conn   *conn
	events chan Event
	done   chan struct{}

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan *envelope // nil once the connection is gone
	err     error                     // why it is gone
}

// Dial connects to the data plane at path and takes over from an earlier control client. The context bounds the connecting only.
// The error of a socket without a listener unwraps to ECONNREFUSED or ENOENT.
func Dial(ctx context.Context, path string) (*Client, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("connect to data plane: %w", err)
	}
	uc := nc.(*net.UnixConn)
	if err := checkPeer(uc); err != nil {
		_ = uc.Close()
		return nil, fmt.Errorf("connect to data plane at %s: %w", path, err)
	}
	c := &Client{
		conn: newConn(uc), events: make(chan Event, maxEvents), done: make(chan struct{}), waiting: make(map[uint64]chan *envelope),
	}
	go c.runReader()
	return c, nil
}

// Call sends a request and waits for its reply, which is decoded into out unless out is nil. When ctx ends first, the request is withdrawn and
// ctx's error returned; the data plane may still have done the work. A failure reported by the data plane is an *Error; a lost
// connection is ErrClosed.
func (c *Client) Call(ctx context.Context, method string, in, out any) error {
	return c.CallFiles(ctx, method, in, out, nil)
}

// CallFiles is Call with descriptors that the handler finds with Files. They stay the caller's.
func (c *Client) CallFiles(ctx context.Context, method string, in, out any, files []*os.File) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("%s: encode request: %w", method, err)
	}
	reply := make(chan *envelope, 1)
	c.mu.Lock()
	if c.waiting == nil {
		err := c.err
		c.mu.Unlock()
		return fmt.Errorf("%s: %w", method, err)
	}
	c.next++
	id := c.next
	c.waiting[id] = reply
	c.mu.Unlock()

	if err := c.conn.write(&envelope{ID: id, Method: method, Body: body}, files); err != nil {
		c.forget(id)
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case e := <-reply:
		return decodeReply(method, e, out)
	case <-c.done:
		select {
		case e := <-reply: // the reply came just before the end
			return decodeReply(method, e, out)
		default:
			return fmt.Errorf("%s: %w", method, c.Err())
		}
	case <-ctx.Done():
		if c.forget(id) {
			_ = c.conn.write(&envelope{Cancel: id}, nil)
		}
		return fmt.Errorf("%s: no answer from the data plane: %w", method, ctx.Err())
	}
}

func decodeReply(method string, e *envelope, out any) error {
	if e.Error != nil {
		return e.Error
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(e.Body, out); err != nil {
		return fmt.Errorf("%s: decode reply: %w", method, err)
	}
	return nil
}

// forget gives up waiting for a reply; it tells whether one was still outstanding.
func (c *Client) forget(id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.waiting[id]
	delete(c.waiting, id)
	return ok
}

// Events returns the channel of events. It is closed when the connection is gone.
func (c *Client) Events() <-chan Event { return c.events }

// Done is closed when the connection is gone.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err tells why the connection is gone, nil while it is there. It unwraps to ErrClosed unless the peer broke the form.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection and waits for its reader. Waiting calls fail with ErrClosed. Idempotent.
func (c *Client) Close() error {
	_ = c.conn.c.Close()
	<-c.done
	return nil
}

func (c *Client) runReader() {
	defer close(c.done)
	defer close(c.events)
	err := c.readAll()
	_ = c.conn.c.Close()
	c.mu.Lock()
	c.err, c.waiting = err, nil
	c.mu.Unlock()
}

func (c *Client) readAll() error {
	buf := make([]byte, chunk+1)
	for {
		e, files, err := c.conn.read(buf)
		if err != nil {
			return err
		}
		closeAll(files) // nothing that the data plane sends carries descriptors
		switch {
		case e.ID != 0:
			c.mu.Lock()
			reply := c.waiting[e.ID]
			delete(c.waiting, e.ID)
			c.mu.Unlock()
			if reply != nil {
				reply <- e
			}
		case e.Method != "":
			select {
			case c.events <- Event{e.Method, e.Body}:
			default:
				return fmt.Errorf("%w: %d events wait unread", ErrClosed, maxEvents)
			}
		default:
			return errors.New("malformed message: neither reply nor event")
		}
	}
}
