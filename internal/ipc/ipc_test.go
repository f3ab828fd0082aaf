package ipc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"iserd.org/iserd/internal/require"

	"iserd.org/iserd/api"
)

func TestMain(m *testing.M) {
	if p := os.Getenv("IPC_TEST_DIAL"); p != "" { // see TestForeignUser
		c, err := Dial(context.Background(), p)
		if err == nil {
			err = c.Call(context.Background(), "echo", "x", nil)
		}
		fmt.Print(err)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// script is a handler with a few behaviours.
type script struct {
	started atomic.Int32
	ended   chan error // contexts of "hang", as they end
}

func (s *script) Handle(ctx context.Context, method string, body json.RawMessage) (any, error) {
	switch method {
	case "echo":
		return body, nil
	case "hang":
		s.started.Add(1)
		<-ctx.Done()
		s.ended <- ctx.Err()
		return nil, ctx.Err()
	case "coded":
		return nil, fmt.Errorf("wrapped: %w", &Error{Code: "Busy", Text: "in use"})
	case "plain":
		return nil, errors.New("odd")
	case "panic":
		panic("boo")
	case "big":
		return strings.Repeat("x", maxMessage+1), nil
	case "file":
		b := make([]string, 0, 2)
		for _, f := range Files(ctx) {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				return nil, err
			}
			t, err := io.ReadAll(f)
			if err != nil {
				return nil, err
			}
			b = append(b, string(t))
		}
		return b, nil
	}
	return nil, &Error{Code: "NotSupported", Text: "unknown method " + method}
}

func start(t *testing.T) (*Server, *script, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "io.sock")
	h := &script{ended: make(chan error, 16)}
	s, err := Serve(context.Background(), path, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, h, path
}

func dial(t *testing.T, path string) *Client {
	t.Helper()
	c, err := Dial(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestCall(t *testing.T) {
	_, _, path := start(t)
	c := dial(t, path)
	ctx := context.Background()
	n, forever := 65536, api.Forever
	in := LoginRequest{
		Group: "g", ISID: [6]byte{0x80, 1, 2, 3, 4, 5}, Timeout: time.Second, Secret: api.NewSecret([]byte("a secret \x00\xff")),
		Settings: api.Settings{CHAPAlgorithms: []string{"SHA256"}, MaxBurstLength: &n, ReplacementTimeout: &forever},
	}
	var out LoginRequest
	if err := c.Call(ctx, "echo", in, &out); err != nil {
		t.Fatalf("echo: %v", err)
	}
	if !out.Secret.Equal(in.Secret) || !out.TargetSecret.IsZero() {
		t.Error("the secret is another one")
	}
	in.Secret, out.Secret = api.Secret{}, api.Secret{}
	if !reflect.DeepEqual(in, out) {
		t.Fatalf("echo: %+v", out)
	}
	var coded *Error
	if err := c.Call(ctx, "coded", Empty{}, nil); !errors.As(err, &coded) || coded.Code != "Busy" || coded.Text != "in use" {
		t.Errorf("coded: %v", err)
	}
	if err := c.Call(ctx, "plain", Empty{}, nil); !errors.As(err, &coded) || coded.Code != "Internal" || coded.Text != "odd" {
		t.Errorf("plain: %v", err)
	}
	if err := c.Call(ctx, "panic", Empty{}, nil); !errors.As(err, &coded) || !strings.Contains(coded.Text, "boo") {
		t.Errorf("panic: %v", err)
	}
	if err := c.Call(ctx, "big", Empty{}, nil); !errors.As(err, &coded) || !strings.Contains(coded.Text, "8 MiB") {
		t.Errorf("big: %v", err)
	}
	if err := c.Call(ctx, "echo", strings.Repeat("x", maxMessage), nil); !errors.Is(err, ErrTooLarge) {
		t.Errorf("oversize request: %v", err)
	}
	if err := c.Call(ctx, "echo", 1, &coded); err == nil || !strings.Contains(err.Error(), "decode") {
		t.Errorf("wrong type: %v", err)
	}
	if err := c.Call(ctx, "echo", 1, nil); err != nil {
		t.Errorf("connection did not survive the failures: %v", err)
	}
}

// TestFragments sends messages around every border of a datagram, many at a time.
func TestFragments(t *testing.T) {
	_, _, path := start(t)
	c := dial(t, path)
	var wg sync.WaitGroup
	for i, n := range []int{0, 1, chunk - 200, chunk - 30, chunk - 29, chunk, chunk + 1, 3 * chunk, 1 << 20, 7 << 20} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			in := strings.Repeat(string(rune('a'+i)), n)
			var out string
			if err := c.Call(context.Background(), "echo", in, &out); err != nil || out != in {
				t.Errorf("%d bytes: %d back, %v", n, len(out), err)
			}
		}()
	}
	wg.Wait()
}

func TestConcurrent(t *testing.T) {
	s, _, path := start(t)
	c := dial(t, path)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for j := range 20 {
				var out int
				if err := c.Call(context.Background(), "echo", i*1000+j, &out); err != nil || out != i*1000+j {
					t.Errorf("echo %d: %d, %v", i*1000+j, out, err)
				}
				if err := s.Notify("e", i); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	for range 50 * 20 {
		if e, ok := <-c.Events(); !ok || e.Name != "e" {
			t.Fatalf("event %v, %v", e, ok)
		}
	}
	wg.Wait()
}

func TestWithdraw(t *testing.T) {
	_, h, path := start(t)
	c := dial(t, path)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "hang", Empty{}, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("hang: %v", err)
	}
	if err := <-h.ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("handler's context: %v", err)
	}
	if err := c.Call(context.Background(), "echo", 1, nil); err != nil {
		t.Fatal(err)
	}
	if err := c.Call(ctx, "echo", 1, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("call with an ended context: %v", err)
	}
}

// TestTakeover: the newest client wins; the older one's requests end.
func TestTakeover(t *testing.T) {
	s, h, path := start(t)
	old := dial(t, path)
	result := make(chan error, 1)
	go func() { result <- old.Call(context.Background(), "hang", Empty{}, nil) }()
	for h.started.Load() == 0 {
		if err := old.Call(context.Background(), "echo", 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	young := dial(t, path)
	if err := young.Call(context.Background(), "echo", 1, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, ErrClosed) {
		t.Fatalf("request of the older client: %v", err)
	}
	<-h.ended
	<-old.Done()
	if err := s.Notify("hello", 1); err != nil {
		t.Fatal(err)
	}
	if e := <-young.Events(); e.Name != "hello" {
		t.Fatalf("event %v", e)
	}
	if _, ok := <-old.Events(); ok {
		t.Fatal("the older client got an event")
	}
}

func TestServerEnds(t *testing.T) {
	s, h, path := start(t)
	c := dial(t, path)
	result := make(chan error, 1)
	go func() { result <- c.Call(context.Background(), "hang", Empty{}, nil) }()
	for h.started.Load() == 0 {
		if err := c.Call(context.Background(), "echo", 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, ErrClosed) {
		t.Fatalf("waiting call: %v", err)
	}
	if err := c.Call(context.Background(), "echo", 1, nil); !errors.Is(err, ErrClosed) {
		t.Fatalf("late call: %v", err)
	}
	if err := s.Notify("late", 1); err != nil {
		t.Fatal(err)
	}
	if _, err := Dial(context.Background(), path); !errors.Is(err, syscall.ENOENT) {
		t.Fatalf("dial after the end: %v", err)
	}
}

func TestSecondServer(t *testing.T) {
	s, _, path := start(t)
	if _, err := Serve(context.Background(), path, &script{}); !errors.Is(err, ErrInUse) {
		t.Fatalf("second server: %v", err)
	}
	c := dial(t, path)
	if err := c.Call(context.Background(), "echo", 1, nil); err != nil {
		t.Fatalf("the attempt hurt the first: %v", err)
	}
	_ = s.Close()
	// A file left by a server that was killed does not matter.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s2, err := Serve(context.Background(), path, &script{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s2.Close() }()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("socket: %v, %v", fi.Mode(), err)
	}
}

func TestFiles(t *testing.T) {
	_, _, path := start(t)
	c := dial(t, path)
	var fs []*os.File
	for _, s := range []string{"one", "two"} {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
		fs = append(fs, f)
	}
	before := countFDs(t)
	for range 20 {
		var out []string
		// The body is larger than a datagram: the descriptors must come with the first.
		if err := c.CallFiles(context.Background(), "file", strings.Repeat("x", 2*chunk), &out, fs); err != nil || len(out) != 2 || out[0] != "one" || out[1] != "two" {
			t.Fatalf("file: %v, %v", out, err)
		}
	}
	if err := c.Call(context.Background(), "echo", 1, nil); err != nil { // the handler's descriptors are closed before the next reply at the latest
		t.Fatal(err)
	}
	if after := countFDs(t); after > before+2 {
		t.Errorf("%d descriptors before, %d after 20 calls with 2 each", before, after)
	}
}

func countFDs(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestMalformed sends what no client of ours would; each must end the connection, and none the server.
func TestMalformed(t *testing.T) {
	_, _, path := start(t)
	for name, datagrams := range map[string][][]byte{
		"flag":            {{2, '{', '}'}},
		"json":            {{0, '{'}},
		"empty object":    {[]byte("\x00{}")},
		"array":           {[]byte("\x00[]")},
		"too long":        {bytes.Repeat([]byte{1}, 2*chunk)},
		"event from peer": {[]byte("\x00" + `{"method":"x"}`)},
	} {
		t.Run(name, func(t *testing.T) {
			nc, err := net.Dial("unixpacket", path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = nc.Close() }()
			for _, d := range datagrams {
				if _, err := nc.Write(d); err != nil {
					t.Fatal(err)
				}
			}
			_ = nc.SetReadDeadline(time.Now().Add(5 * time.Second))
			if n, err := nc.Read(make([]byte, 10)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("connection not closed: %d, %v", n, err)
			}
		})
	}
	c := dial(t, path)
	if err := c.Call(context.Background(), "echo", 1, nil); err != nil {
		t.Fatal(err)
	}
}

// TestForeignUser starts this test binary as another user, with the file permissions opened, so that only the credential check is left.
func TestForeignUser(t *testing.T) {
	if os.Geteuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	_, _, path := start(t)
	dir := t.TempDir()
	for d := filepath.Dir(path); len(d) > 4; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o755)
	}
	for d := dir; len(d) > 4; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o755)
	}
	if err := os.Chmod(path, 0o777); err != nil {
		t.Fatal(err)
	}
	bin, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(dir, "x")
	if err := os.WriteFile(exe, bin, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "IPC_TEST_DIAL="+path)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "closed") {
		t.Fatalf("foreign user: %s, %v", out, err)
	}
}

// FuzzServer feeds arbitrary datagrams: no panic, and the server goes on.
func FuzzServer(f *testing.F) {
	f.Add([]byte("\x00" + `{"v":1,"id":1,"method":"echo","body":{}}`))
	f.Add([]byte("\x01{"))
	f.Add([]byte("\x00" + `{"cancel":1}`))
	path := filepath.Join(f.TempDir(), "s")
	s, err := Serve(context.Background(), path, HandlerFunc(func(context.Context, string, json.RawMessage) (any, error) { return Empty{}, nil }))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = s.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		nc, err := net.Dial("unixpacket", path)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) > 0 {
			_, _ = nc.Write(b)
		}
		_ = nc.Close()
		c, err := Dial(context.Background(), path)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Call(context.Background(), "x", Empty{}, nil); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	})
}
