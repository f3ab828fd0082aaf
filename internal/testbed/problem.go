package testbed

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

// Problem is a failure of the testbed's surroundings rather than of what is tested: no network, no QEMU, a full disk.
type Problem struct {
	What string // one clause: what is wrong
	Do   string // one clause: what to do about it
	Err  error  // cause; may be nil
}

func (p *Problem) Error() string {
	s := p.What
	if p.Err != nil {
		s += ": " + p.Err.Error()
	}
	return s + "; " + p.Do
}

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// diskFull makes a Problem of an error that a full file system caused, and leaves others alone.
func diskFull(err error, dir string) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &Problem{What: fmt.Sprintf("no space left for %s", dir), Do: "free some, or set ISERD_CACHE to a folder on another file system", Err: err}
	}
	return err
}

// needSpace checks that dir, which exists, has n bytes free.
func needSpace(dir string, n uint64) error {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < n {
		return &Problem{
			What: fmt.Sprintf("%s has %d MiB free and %d MiB are needed", dir, free>>20, n>>20),
			Do:   "free some, or set ISERD_CACHE to a folder on another file system",
		}
	}
	return nil
}

// log prints what the testbed does, one line per event, with the seconds since it began.
type log struct {
	mu    sync.Mutex
	w     io.Writer
	begin time.Time
}

// newLog logs to w; a nil w discards.
func newLog(w io.Writer) *log {
	if w == nil {
		w = io.Discard
	}
	return &log{w: w, begin: time.Now()}
}

func (l *log) printf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.w, "[%5.1fs] %s\n", time.Since(l.begin).Seconds(), fmt.Sprintf(format, args...))
}

// cacheDir is where everything that took time to get is kept.
func cacheDir() (string, error) {
	if d := os.Getenv("ISERD_CACHE"); d != "" {
		return d, nil
	}
	return "/var/cache/iserd-testbed", nil
}
