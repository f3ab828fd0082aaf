package api

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestCheckName(t *testing.T) {
	good := []string{
		"iqn.2003-01.org.example:disk1", "iqn.2003-01.org.example", "iqn.2026-11.org.iserd:0123456789ab",
		"iqn.2001-04.com.example:storage:diskarrays-sn-a8675309", "iqn.2001-04.com.example:disk_2",
		"eui.02004567A425678D", "naa.52004567BA64678D", "naa.62004567BA64678D0123456789ABCDEF",
		"iqn.2003-01.org.example:" + strings.Repeat("a", 223-24),
	}
	for _, n := range good {
		if err := CheckName(n); err != nil {
			t.Errorf("CheckName(%q) = %v", n, err)
		}
	}
	bad := []string{
		"", "disk1", "iqn", "iqn.", "iqn.2003", "iqn.2003-01", "iqn.2003-01.", "iqn.2003-13.org.example:a", "iqn.2003-00.org.example:a",
		"iqn.20x3-01.org.example", "IQN.2003-01.org.example:a", "iqn.2003-01.org.Example:a", "iqn.2003-01.org..example:a", "iqn.2003-01..org:a",
		"iqn.2003-01.org.:a", "iqn.2003-01.:a", "iqn.2003-01.org.example:a/b", "iqn.2003-01.org.example:a b", "iqn.2003-01.org.example:../../etc",
		"iqn.2003-01.org.example:a\nb", "iqn.2003-01.org.example:a\x00", "iqn.2003-01.org.example:ä", "iqn.2003-01.org.example:\xff",
		"eui.02004567A425678", "eui.02004567A425678DD", "eui.0200456zA425678D", "naa.5200", "naa.",
		"iqn.2003-01.org.example:" + strings.Repeat("a", 223-23),
	}
	for _, n := range bad {
		if err := CheckName(n); !Is(err, ErrInvalidArgs) {
			t.Errorf("CheckName(%q) = %v, want ErrInvalidArgs", n, err)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("CheckName(%q): text of more than one line: %q", n, err)
		}
	}
}

func TestParsePortal(t *testing.T) {
	good := map[string]string{
		"10.0.0.1": "10.0.0.1:3260", "10.0.0.1:860": "10.0.0.1:860", "fd00::1": "[fd00::1]:3260", "[fd00::1]": "[fd00::1]:3260",
		"[fd00::1]:1": "[fd00::1]:1", "[fe80::1%eth0]:3260": "[fe80::1%eth0]:3260", "fe80::1%eth0": "[fe80::1%eth0]:3260",
		"::ffff:10.0.0.1": "10.0.0.1:3260", "Storage.example.org": "storage.example.org:3260", "host:65535": "host:65535", "FD00:0::1": "[fd00::1]:3260",
	}
	for in, want := range good {
		p, err := ParsePortal(in)
		if err != nil || p.String() != want {
			t.Errorf("ParsePortal(%q) = %v, %v; want %s", in, p, err, want)
			continue
		}
		if again, err := ParsePortal(p.String()); err != nil || again != p {
			t.Errorf("ParsePortal(%q) does not read back: %v, %v", p, again, err)
		}
	}
	for _, in := range []string{
		"", ":", ":3260", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:+1", "10.0.0.1:x", "10.0.0.300", "10.0.0",
		"1.2.3.4.5", "fd00::1]:3260", "[fd00::1", "[10.0.0.1]:3260", "[host]:1", "fd00::zz", "a b", "a/b", "-a", "a..b", "0.0.0.0", "::", "ff02::1", "224.0.0.1",
		"a\nb", strings.Repeat("a", 64), "[]:3260", "http://10.0.0.1",
		"fe80::1%a/b", "fe80::1%a]", "[fe80::1%a\nb]:1", "fe80::1%abcdefghijklmnop",
	} {
		if p, err := ParsePortal(in); !Is(err, ErrInvalidArgs) {
			t.Errorf("ParsePortal(%q) = %v, %v; want ErrInvalidArgs", in, p, err)
		}
	}
}

func FuzzParsePortal(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "[fd00::1]:3260", "fe80::1%eth0", "host:1", "[", "::"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePortal(s)
		if err != nil {
			return
		}
		if again, err := ParsePortal(p.String()); err != nil || again != p {
			t.Fatalf("ParsePortal(%q) = %v, which reads back as %v, %v", s, p, again, err)
		}
	})
}

func FuzzCheckName(f *testing.F) {
	for _, s := range []string{"iqn.2003-01.org.example:a", "eui.02004567A425678D", "naa.", "iqn."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if CheckName(s) == nil && (strings.ContainsAny(s, "/\x00\n\"' \\") || len(s) > MaxNameLen) {
			t.Fatalf("CheckName accepts %q", s)
		}
	})
}

func TestErrors(t *testing.T) {
	cause := errors.New("no route")
	err := Wrap(Errorf(ErrConnectionFailed, "connect: %w", cause), ErrInternal, "login %s", "x")
	if err.Error() != "login x: connect: no route" || !Is(err, ErrConnectionFailed) || !errors.Is(err, cause) || ExitCode(err) != 4 {
		t.Errorf("Wrap lost something: %v, %s, %d", err, NameOf(err), ExitCode(err))
	}
	if Wrap(nil, ErrInternal, "x") != nil || ExitCode(nil) != 0 || NameOf(nil) != "" {
		t.Error("nil is not kept")
	}
	rows := []struct {
		err  error
		code int
	}{
		{fmt.Errorf("x: %w", context.DeadlineExceeded), 8}, {context.Canceled, 1}, {cause, 9},
		{&Error{Name: "org.example.Unknown"}, 1}, {&Error{Name: FullName("Busy")}, 28}, {&Error{Name: FullName("nonsense")}, 9}, {&Error{Name: FullName("")}, 9},
	}
	for _, r := range rows {
		if c := ExitCode(r.err); c != r.code {
			t.Errorf("ExitCode(%v) = %d, want %d", r.err, c, r.code)
		}
	}
}
