package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/ipc"
)

const (
	maxBody     = 64 << 10
	maxScsiBody = 2*ipc.MaxScsiData + maxBody // data as hexadecimal digits
	// maxRequest bounds a whole request; logins have their own, shorter bound.
	maxRequest = 20 * time.Minute
)

type credKey struct{}

// ServeSocket answers the control API on a UNIX socket at path until ctx ends: HTTP/1.1, JSON, for root and the daemon's own user. The caller holds the
// lock of the run directory, so a file at path is a leftover. started runs when requests are accepted.
func (s *Service) ServeSocket(ctx context.Context, path string, started func()) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("control socket: %w", err)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	// Until here others may connect as far as the umask lets them; their credentials turn them away.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = ln.Close()
		return fmt.Errorf("control socket: %w", err)
	}
	srv := &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: maxRequest, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10,
		BaseContext:    func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			cred, err := ipc.PeerCred(c.(*net.UnixConn))
			if err != nil {
				cred = nil
			}
			return context.WithValue(ctx, credKey{}, cred)
		},
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-ctx.Done()
		// Requests at work see the end of ctx, undo what they did, and get a moment to answer.
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*s.Config().ControlTimeout)
		defer cancel()
		if srv.Shutdown(sctx) != nil {
			_ = srv.Close()
		}
	}()
	started()
	err = srv.Serve(ln)
	if ctx.Err() != nil {
		<-ended
		return nil
	}
	return fmt.Errorf("control socket: %w", err)
}

// Handler is the control API.
//
//	GET  /v1/status /v1/sessions /v1/devices?queues=1 /v1/nodes?target=&portal= /v1/portals /v1/buffers /v1/config
//	POST /v1/discover /v1/firmware /v1/login /v1/logout /v1/rescan /v1/upgrade /v1/devices/abort /v1/nodes/add /v1/nodes/delete /v1/nodes/set /v1/nodes/secret
//	POST /v1/portals/set /v1/portals/secret /v1/portals/delete /v1/buffers/add /v1/buffers/adopt /v1/buffers/remove
//	POST /v1/reload /v1/scsi /v1/scsi/reserve /v1/scsi/reservation
//
// Each answer is one of the replies of package api; a failure is an ErrorReply.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", get(func(r *http.Request) (any, error) {
		return api.StatusReply{Version: api.Version, Status: s.Status(r.Context())}, nil
	}))
	mux.HandleFunc("GET /v1/config", get(func(r *http.Request) (any, error) { return s.Configuration(), nil }))
	mux.HandleFunc("POST /v1/reload", post(s.Reload))
	mux.HandleFunc("GET /v1/sessions", get(func(*http.Request) (any, error) { return s.Sessions(), nil }))
	mux.HandleFunc("GET /v1/devices", get(func(r *http.Request) (any, error) {
		return s.Devices(r.Context(), r.FormValue("queues") != ""), nil
	}))
	mux.HandleFunc("GET /v1/buffers", get(func(r *http.Request) (any, error) { return s.Buffers(r.Context()), nil }))
	mux.HandleFunc("POST /v1/buffers/add", post(s.AddPath))
	mux.HandleFunc("POST /v1/buffers/adopt", post(s.Adopt))
	mux.HandleFunc("POST /v1/buffers/remove", post(func(ctx context.Context, r api.BufferRemoveRequest) (api.BuffersReply, error) {
		switch {
		case r.ID != 0 && r.PID != 0 || r.ID == 0 && r.PID == 0:
			return api.BuffersReply{}, api.Errorf(api.ErrInvalidArgs, "name a buffer or a process")
		case r.PID != 0:
			return s.RemoveProcess(ctx, r.PID)
		}
		return s.RemoveBuffer(ctx, r.ID, nil)
	}))
	mux.HandleFunc("GET /v1/nodes", get(func(r *http.Request) (any, error) {
		return s.Nodes(api.NodeFilter{Target: r.FormValue("target"), Portal: r.FormValue("portal")})
	}))
	mux.HandleFunc("POST /v1/scsi", postUpTo(maxScsiBody, s.Scsi))
	mux.HandleFunc("POST /v1/scsi/reserve", post(s.Reserve))
	mux.HandleFunc("POST /v1/scsi/reservation", post(s.Reservation))
	mux.HandleFunc("GET /v1/portals", get(func(*http.Request) (any, error) { return s.Portals(), nil }))
	mux.HandleFunc("POST /v1/portals/set", post(s.SetPortal))
	mux.HandleFunc("POST /v1/portals/secret", post(s.SetPortalSecret))
	mux.HandleFunc("POST /v1/portals/delete", post(s.DeletePortal))
	mux.HandleFunc("POST /v1/nodes/set", post(s.SetNode))
	mux.HandleFunc("POST /v1/nodes/secret", post(s.SetNodeSecret))
	mux.HandleFunc("POST /v1/firmware", post(s.Firmware))
	mux.HandleFunc("POST /v1/discover", post(s.Discover))
	mux.HandleFunc("POST /v1/login", post(s.Login))
	mux.HandleFunc("POST /v1/logout", post(s.Logout))
	mux.HandleFunc("POST /v1/rescan", post(s.Rescan))
	mux.HandleFunc("POST /v1/devices/abort", post(s.Abort))
	mux.HandleFunc("POST /v1/upgrade", post(s.Upgrade))
	mux.HandleFunc("POST /v1/nodes/add", post(func(_ context.Context, f api.NodeFilter) (any, error) {
		n, err := s.AddNode(f.Target, f.Portal)
		return api.NodesReply{Version: api.Version, Nodes: []api.Node{n}, Problems: []string{}}, err
	}))
	mux.HandleFunc("POST /v1/nodes/delete", post(func(_ context.Context, f api.NodeFilter) (api.NodesReply, error) { return s.DeleteNodes(f) }))
	mux.HandleFunc("/", get(func(r *http.Request) (any, error) {
		return nil, api.Errorf(api.ErrNotSupported, "%s %s is no request of this daemon", r.Method, r.URL.Path)
	}))
	return guard(s.settled(mux))
}

// settleTimeout is how long a request waits for a daemon that has just started.
const settleTimeout = 20 * time.Second

// settled lets requests wait until the daemon knows what a former one has left, so that nobody is told of no devices while there are some. Only
// the status and the configuration are answered at any time.
func (s *Service) settled(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains([]string{"/v1/status", "/v1/config", "/v1/reload"}, r.URL.Path) {
			timeout := time.NewTimer(settleTimeout)
			defer timeout.Stop()
			select {
			case <-s.ready:
			case <-r.Context().Done():
				return
			case <-timeout.C:
				answer(w, nil, api.Errorf(api.ErrAgain, "the daemon is still starting and waits for its data plane; see: iserctl status"))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// guard admits root and the daemon's own user.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cred, _ := r.Context().Value(credKey{}).(*unix.Ucred)
		if cred == nil || cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
			answer(w, nil, api.Errorf(api.ErrAccessDenied, "permission denied: only root may use this socket"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func get(f func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		out, err := f(r)
		answer(w, out, err)
	}
}

func post[In, Out any](f func(context.Context, In) (Out, error)) http.HandlerFunc {
	return postUpTo(maxBody, f)
}

// postUpTo takes a body of at most limit bytes.
func postUpTo[In, Out any](limit int64, f func(context.Context, In) (Out, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in In
		d := json.NewDecoder(http.MaxBytesReader(w, r.Body, limit))
		d.DisallowUnknownFields() // an option that this daemon does not know must not be left out in silence
		if err := d.Decode(&in); err != nil {
			answer(w, nil, api.Errorf(api.ErrInvalidArgs, "request: %w", err))
			return
		}
		out, err := f(r.Context(), in)
		answer(w, out, err)
	}
}

func answer(w http.ResponseWriter, out any, err error) {
	code := http.StatusOK
	if err != nil {
		name := api.NameOf(err)
		code = statusCode(name)
		out = api.ErrorReply{Version: api.Version, Error: &api.Error{Name: name, Text: oneLine(err)}}
	}
	b, err := json.Marshal(out)
	if err != nil {
		code, b = http.StatusInternalServerError, []byte("{}")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(b, '\n')) // a caller that is gone does not care
}

func statusCode(name string) int {
	switch name {
	case api.ErrNotFound, api.ErrSessionNotFound, api.ErrUnknownObject:
		return http.StatusNotFound
	case api.ErrInvalidArgs:
		return http.StatusBadRequest
	case api.ErrAccessDenied, api.ErrInteractiveRequired:
		return http.StatusForbidden
	case api.ErrBusy, api.ErrAlreadyLoggedIn, api.ErrReservationConflict:
		return http.StatusConflict
	case api.ErrNotSupported:
		return http.StatusNotImplemented
	case api.ErrAgain:
		return http.StatusServiceUnavailable
	case api.ErrTimeout, api.ErrPDUTimeout:
		return http.StatusGatewayTimeout
	case api.ErrConnectionFailed, api.ErrLoginFailed, api.ErrFatalLogin, api.ErrAuthenticationFailed, api.ErrTransportUnavailable, api.ErrProtocolError,
		api.ErrCommandFailed:
		return http.StatusBadGateway
	}
	return http.StatusInternalServerError
}
