package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path"
	"strings"
	"sync"
	"time"
)

// checksum is what a download must amount to; the zero value accepts anything (it is then checked by other means).
type checksum struct {
	sha256 string // hexadecimal
	size   int64  // bytes
}

// stall is how long a download may bring nothing, and progressEvery how often it says how far it is.
const (
	stall         = 30 * time.Second
	progressEvery = 2 * time.Second
)

var errStalled = fmt.Errorf("nothing arrived for %s", stall)

// client asks apt's proxy first, as apt would.
var client = sync.OnceValue(func() *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = stall
	if out, err := exec.Command("apt-config", "shell", "p", "Acquire::http::Proxy").Output(); err == nil {
		v := strings.Trim(strings.TrimPrefix(strings.TrimSpace(string(out)), "p="), "'")
		if u, err := url.Parse(v); err == nil && u.Host != "" {
			t.Proxy = http.ProxyURL(u)
		}
	}
	return &http.Client{Transport: t}
})

// download fetches a URL to a file, which appears under its name only when complete and right. One failure is tried again.
func download(ctx context.Context, l *log, from, to string, want checksum) error {
	err := fetch(ctx, l, from, to, want)
	if err == nil || ctx.Err() != nil || errors.As(diskFull(err, to), new(*Problem)) {
		return diskFull(err, to)
	}
	l.printf("%v; trying once more", err)
	if err = fetch(ctx, l, from, to, want); err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	p := &Problem{What: "cannot download " + from, Do: "check this host's network and proxy, and try again", Err: err}
	var broken *brokenError
	if errors.As(err, &broken) {
		p.Do = "try again later: the mirror is being updated, or something between it and this host changes files"
	}
	return p
}

type brokenError struct{ got, want string }

func (e *brokenError) Error() string {
	return fmt.Sprintf("the file is broken: its checksum is %s, not %s", e.got, e.want)
}

func fetch(ctx context.Context, l *log, from, to string, want checksum) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return err
	}
	resp, err := client().Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the server answers %s", resp.Status)
	}
	part := to + ".part"
	f, err := os.Create(part)
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(part)
		}
	}()
	watchdog := time.AfterFunc(stall, func() { cancel(errStalled) })
	defer watchdog.Stop()
	total := max(want.size, resp.ContentLength)
	sum, name := sha256.New(), path.Base(from)
	var n int64
	buf := make([]byte, 256<<10)
	for next := time.Now().Add(progressEvery); ; {
		k, rerr := resp.Body.Read(buf)
		watchdog.Reset(stall)
		sum.Write(buf[:k])
		if _, err := f.Write(buf[:k]); err != nil {
			return err
		}
		n += int64(k)
		if time.Now().After(next) && total > 0 {
			l.printf("downloading %s: %d %% of %d MB", name, 100*n/total, total/1e6)
			next = time.Now().Add(progressEvery)
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			if cause := context.Cause(ctx); cause == errStalled {
				return cause
			}
			return rerr
		}
	}
	if got := hex.EncodeToString(sum.Sum(nil)); want.sha256 != "" && got != want.sha256 {
		return &brokenError{got, want.sha256}
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(part, to)
}
