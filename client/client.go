// Package client speaks the control API of iserd over its local socket. The command line is built on it; other Go programs that run as root
// can use it as well.
//
// Every method returns failures as *api.Error, with api.ErrDaemonUnreachable when no daemon answers, api.ErrAccessDenied when the caller may not
// use the socket, and api.ErrDaemonProtocol when the answer makes no sense.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"syscall"
	"time"

	"iserd.org/iserd/api"
)

// DefaultSocket is where iserd listens.
const DefaultSocket = "/run/iserd/control.sock"

// maxAnswer bounds what is read from a daemon.
const maxAnswer = 64 << 20

// Client is a connection to the daemon, made when it is needed. It is safe for concurrent use.
type Client struct {
	path string
	http http.Client
}

// New returns a Client for the daemon at the socket path, "" for DefaultSocket.
func New(path string) *Client {
	if path == "" {
		path = DefaultSocket
	}
	c := &Client{path: path}
	d := net.Dialer{Timeout: 5 * time.Second}
	c.http.Transport = &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", path) },
		DisableCompression: true,
	}
	return c
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Discover asks a portal for its targets.
func (c *Client) Discover(ctx context.Context, r api.DiscoverRequest) (out api.TargetsReply, err error) {
	return out, c.call(ctx, http.MethodPost, "discover", r, &out)
}

// Login makes a session and its devices.
func (c *Client) Login(ctx context.Context, r api.LoginRequest) (out api.LoginReply, err error) {
	return out, c.call(ctx, http.MethodPost, "login", r, &out)
}

// Logout ends a session and removes its devices.
func (c *Client) Logout(ctx context.Context, r api.LogoutRequest) (out api.LogoutReply, err error) {
	return out, c.call(ctx, http.MethodPost, "logout", r, &out)
}

// Rescan asks targets for their logical units again; devices follow.
func (c *Client) Rescan(ctx context.Context, r api.RescanRequest) (out api.RescanReply, err error) {
	return out, c.call(ctx, http.MethodPost, "rescan", r, &out)
}

// Abort ends a device in spite of whatever keeps it.
func (c *Client) Abort(ctx context.Context, r api.AbortRequest) (out api.AbortReply, err error) {
	return out, c.call(ctx, http.MethodPost, "devices/abort", r, &out)
}

// Upgrade replaces the data plane under load.
func (c *Client) Upgrade(ctx context.Context, r api.UpgradeRequest) (out api.UpgradeReply, err error) {
	return out, c.call(ctx, http.MethodPost, "upgrade", r, &out)
}

// Config tells what the daemon goes by.
func (c *Client) Config(ctx context.Context) (out api.ConfigReply, err error) {
	return out, c.call(ctx, http.MethodGet, "config", nil, &out)
}

// Reload has the daemon read its configuration again.
func (c *Client) Reload(ctx context.Context, r api.ReloadRequest) (out api.ReloadReply, err error) {
	return out, c.call(ctx, http.MethodPost, "reload", r, &out)
}

// Nodes lists stored records.
func (c *Client) Nodes(ctx context.Context, f api.NodeFilter) (out api.NodesReply, err error) {
	q := url.Values{"target": {f.Target}, "portal": {f.Portal}}
	return out, c.call(ctx, http.MethodGet, "nodes?"+q.Encode(), nil, &out)
}

// AddNode stores a record by hand.
func (c *Client) AddNode(ctx context.Context, target, portal string) (out api.NodesReply, err error) {
	return out, c.call(ctx, http.MethodPost, "nodes/add", api.NodeFilter{Target: target, Portal: portal}, &out)
}

// DeleteNodes removes the records that match and returns them.
func (c *Client) DeleteNodes(ctx context.Context, f api.NodeFilter) (out api.NodesReply, err error) {
	return out, c.call(ctx, http.MethodPost, "nodes/delete", f, &out)
}

// Sessions lists live sessions.
func (c *Client) Sessions(ctx context.Context) (out api.SessionsReply, err error) {
	return out, c.call(ctx, http.MethodGet, "sessions", nil, &out)
}

// Devices lists block devices with their counters.
func (c *Client) Devices(ctx context.Context) (out api.DevicesReply, err error) {
	return out, c.call(ctx, http.MethodGet, "devices", nil, &out)
}

// DeviceQueues is Devices with the counters of each queue.
func (c *Client) DeviceQueues(ctx context.Context) (out api.DevicesReply, err error) {
	return out, c.call(ctx, http.MethodGet, "devices?queues=1", nil, &out)
}

// Buffers lists shared memory.
func (c *Client) Buffers(ctx context.Context) (out api.BuffersReply, err error) {
	return out, c.call(ctx, http.MethodGet, "buffers", nil, &out)
}

// AddBuffer registers a file on tmpfs or hugetlbfs.
func (c *Client) AddBuffer(ctx context.Context, r api.BufferAddRequest) (out api.BuffersReply, err error) {
	return out, c.call(ctx, http.MethodPost, "buffers/add", r, &out)
}

// AdoptProcess registers the shared memory of a process.
func (c *Client) AdoptProcess(ctx context.Context, r api.BufferAdoptRequest) (out api.BuffersReply, err error) {
	return out, c.call(ctx, http.MethodPost, "buffers/adopt", r, &out)
}

// RemoveBuffer ends the registration of a buffer, or of all memory of an adopted process, or takes a slice back.
func (c *Client) RemoveBuffer(ctx context.Context, r api.BufferRemoveRequest) (out api.BuffersReply, err error) {
	return out, c.call(ctx, http.MethodPost, "buffers/remove", r, &out)
}

// Scsi sends one command to a logical unit.
func (c *Client) Scsi(ctx context.Context, r api.ScsiRequest) (out api.ScsiReply, err error) {
	return out, c.call(ctx, http.MethodPost, "scsi", r, &out)
}

// Reserve changes persistent reservations.
func (c *Client) Reserve(ctx context.Context, r api.ReserveRequest) (out api.ReserveReply, err error) {
	return out, c.call(ctx, http.MethodPost, "scsi/reserve", r, &out)
}

// Reservation tells about persistent reservations.
func (c *Client) Reservation(ctx context.Context, r api.ReservationRequest) (out api.ReservationReply, err error) {
	return out, c.call(ctx, http.MethodPost, "scsi/reservation", r, &out)
}

// Status tells how the daemon is.
func (c *Client) Status(ctx context.Context) (out api.StatusReply, err error) {
	return out, c.call(ctx, http.MethodGet, "status", nil, &out)
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return api.Errorf(api.ErrInternal, "encode request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://iserd/v1/"+path, body)
	if err != nil {
		return api.Errorf(api.ErrInternal, "%w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.failure(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return c.failure(err)
	}
	if resp.StatusCode != http.StatusOK {
		var e api.ErrorReply
		if json.Unmarshal(b, &e) != nil || e.Error == nil {
			return api.Errorf(api.ErrDaemonProtocol, "the daemon answered %s without a reason", resp.Status)
		}
		return e.Error
	}
	if err := json.Unmarshal(b, out); err != nil {
		return api.Errorf(api.ErrDaemonProtocol, "the daemon's answer makes no sense: %w", err)
	}
	return nil
}

func (c *Client) failure(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return api.Errorf(api.ErrTimeout, "the daemon did not answer in time")
	case errors.Is(err, context.Canceled):
		return api.Errorf(api.ErrCancelled, "interrupted")
	case errors.Is(err, fs.ErrPermission):
		return api.Errorf(api.ErrAccessDenied, "permission denied for %s: run as root", c.path)
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return api.Errorf(api.ErrDaemonUnreachable, "iserd is not running (nobody listens at %s): start it with \"systemctl start iserd\" or \"iserd &\"", c.path)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return api.Errorf(api.ErrDaemonUnreachable, "iserd ended before it answered")
	}
	return api.Errorf(api.ErrDaemonUnreachable, "talk to iserd at %s: %w", c.path, err)
}
