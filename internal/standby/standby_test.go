package standby

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/ipc"
)

// pair makes both ends, with a process's part at work on the other one.
func pair(t *testing.T, ctx context.Context) (ours *Waiting, ended <-chan error) {
	t.Helper()
	ours, theirs, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(theirs.Fd(), unix.F_DUPFD_CLOEXEC, 0) // Await closes its own
	if err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	end := make(chan error, 1)
	go func() { end <- Await(ctx, fd, ipc.HelloReply{Build: "next", PID: 7, Reactors: 3}) }()
	t.Cleanup(func() { _ = ours.Close() })
	return ours, end
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestServe(t *testing.T) {
	w, ended := pair(t, within(t))
	h, err := w.Hello(within(t))
	if err != nil || h.Build != "next" || h.PID != 7 || h.Reactors != 3 {
		t.Fatalf("%+v, %v", h, err)
	}
	select {
	case err := <-ended:
		t.Fatalf("it serves before it is told to: %v", err)
	default:
	}
	if err := w.Serve(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Whoever is not told to serve ends: iserd has dropped it, or has died; or it was told to end.
func TestDropped(t *testing.T) {
	w, ended := pair(t, within(t))
	if _, err := w.Hello(within(t)); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if err := <-ended; !errors.Is(err, ErrDropped) || !errors.Is(err, io.EOF) {
		t.Error(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	_, ended = pair(t, ctx)
	cancel()
	if err := <-ended; !errors.Is(err, ErrDropped) {
		t.Error(err)
	}
}

// A process that ends, says nothing, or something else, is told from one that is ready.
func TestNotReady(t *testing.T) {
	for _, c := range []struct {
		name string
		say  string
		keep bool
	}{{"gone", "", false}, {"silent", "", true}, {"other words", "what?\n", true}} {
		t.Run(c.name, func(t *testing.T) {
			w, theirs, err := Pair()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = w.Close() })
			if _, err := io.WriteString(theirs, c.say); err != nil {
				t.Fatal(err)
			}
			if !c.keep {
				_ = theirs.Close()
			} else {
				defer func(f *os.File) { _ = f.Close() }(theirs)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			if h, err := w.Hello(ctx); err == nil {
				t.Errorf("%+v", h)
			}
		})
	}
}

// One that has ended since it was ready does not serve.
func TestServeGone(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	w, ended := pair(t, ctx)
	if _, err := w.Hello(within(t)); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-ended
	if err := w.Serve(); err == nil {
		t.Error("nobody serves, and nobody noticed")
	}
}

func TestAwaitOtherWord(t *testing.T) {
	w, ended := pair(t, within(t))
	if _, err := io.WriteString(w.conn, "end\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || errors.Is(err, ErrDropped) {
		t.Error(err)
	}
}
