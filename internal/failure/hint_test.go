package failure

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
)

// Every status of RFC 7143 section 11.13.5 has a name and an exit status, and what a person can do about is said.
func TestStatuses(t *testing.T) {
	for _, c := range []struct {
		class, detail uint8
		err           error
		name          string
		exit          int
		hint          string
	}{
		{1, 1, login.ErrMovedTemporarily, api.ErrFatalLogin, 19, ""},
		{1, 2, login.ErrMovedPermanently, api.ErrFatalLogin, 19, ""},
		{2, 0, login.ErrInitiatorError, api.ErrFatalLogin, 19, ""},
		{2, 1, login.ErrAuthFailed, api.ErrAuthenticationFailed, 24, "node secret"},
		{2, 2, login.ErrAuthorizationFailed, api.ErrAuthenticationFailed, 24, "initiator name"},
		{2, 3, login.ErrNotFound, api.ErrNotFound, 21, "discover"},
		{2, 4, login.ErrRemoved, api.ErrNotFound, 21, "discover"},
		{2, 5, login.ErrVersion, api.ErrFatalLogin, 19, ""},
		{2, 6, login.ErrTooManyConnections, api.ErrFatalLogin, 19, "reactors"},
		{2, 7, login.ErrMissingParameter, api.ErrFatalLogin, 19, ""},
		{2, 8, login.ErrCannotInclude, api.ErrFatalLogin, 19, ""},
		{2, 9, login.ErrSessionType, api.ErrFatalLogin, 19, ""},
		{2, 10, login.ErrNoSession, api.ErrFatalLogin, 19, ""},
		{2, 11, login.ErrInvalidDuringLogin, api.ErrFatalLogin, 19, ""},
		{3, 0, login.ErrTargetError, api.ErrLoginFailed, 5, ""},
		{3, 1, login.ErrUnavailable, api.ErrLoginFailed, 5, ""},
		{3, 2, login.ErrOutOfResources, api.ErrLoginFailed, 5, "memory"},
		{0, 0, login.ErrNoDigest, api.ErrFatalLogin, 19, "header_digest=CRC32C,None"},
		{0, 0, login.ErrConnectionLost, api.ErrLoginFailed, 5, ""},
	} {
		err := fmt.Errorf("login at portal: %w", &login.LoginError{Target: "iqn.2003-01.org.example:t", Class: c.class, Detail: c.detail, Err: c.err})
		name := Name(err, api.ErrInternal)
		if exit := api.ExitCode(api.Errorf(name, "x")); name != c.name || exit != c.exit {
			t.Errorf("%02x/%02x: %s, %d; want %s, %d", c.class, c.detail, name, exit, c.name, c.exit)
		}
		if h := Hint(err); !strings.Contains(h, c.hint) || (h == "") != (c.hint == "") || !strings.Contains(Text(err), err.Error()) || !strings.Contains(Text(err), h) {
			t.Errorf("%02x/%02x: hint %q, want %q; text %q", c.class, c.detail, h, c.hint, Text(err))
		}
	}
	if Hint(iscsi.ErrTimeout) != "" || Text(errors.New("x")) != "x" {
		t.Error("a hint for what has none")
	}
}

// The commands and settings that hints name exist.
func TestHintsNameWhatExists(t *testing.T) {
	for _, h := range hints {
		s := bufio.NewScanner(strings.NewReader(h.hint))
		s.Split(bufio.ScanWords)
		for s.Scan() {
			name, value, ok := strings.Cut(strings.Trim(s.Text(), ",;:"), "=")
			if !ok {
				continue
			}
			var set api.Settings
			if err := set.Set(name, value); err != nil {
				t.Errorf("%q: %v", h.hint, err)
			}
		}
	}
	text, err := os.ReadFile("../../docs/login.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{"| 02/01 authentication", "| 02/02", "| 02/03", "| other 02/xx | FatalLogin | 19 |", "| 03/02", "| 01/01"} {
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/login.md lacks %q", row)
		}
	}
}
