package pdu

import (
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

func TestDecodeKeys(t *testing.T) {
	long := strings.Repeat("v", MaxValueLength)
	for _, c := range []struct {
		in   string
		want Keys
		err  string
	}{
		{"", nil, ""},
		{"A=b\x00", Keys{{"A", "b"}}, ""},
		{"A=b\x00C=d=e\x00", Keys{{"A", "b"}, {"C", "d=e"}}, ""},
		{"A=\x00", Keys{{"A", ""}}, ""},
		{"A=b\x00\x00\x00\x00", Keys{{"A", "b"}}, ""},
		{"\x00\x00", Keys{}, ""},
		{"A=b\x00A=c\x00", Keys{{"A", "b"}, {"A", "c"}}, ""},
		{"X-com.example.key=1\x00X#NodeArchitecture=a\x00", Keys{{"X-com.example.key", "1"}, {"X#NodeArchitecture", "a"}}, ""},
		{"A=b", nil, "does not end with NUL"},
		{"Ab\x00", nil, "no \"=\""},
		{"=b\x00", nil, "not a key name"},
		{"A b=c\x00", nil, "not a key name"},
		{"A/b=c\x00", nil, "not a key name"},
		{strings.Repeat("k", 63) + "=v\x00", Keys{{strings.Repeat("k", 63), "v"}}, ""},
		{strings.Repeat("k", 64) + "=v\x00", nil, "not a key name"},
		{"K=" + long + "\x00", Keys{{"K", long}}, ""},
		{"K=" + long + "v\x00", nil, "8193 bytes"},
	} {
		got, err := DecodeKeys([]byte(c.in))
		if c.err != "" {
			if err == nil || got != nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("DecodeKeys(%.40q) = %v, %v, want error %q", c.in, got, err, c.err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("DecodeKeys(%.40q) = %v, %v", c.in, got, err)
		}
		if err == nil && !strings.Contains(c.in, "\x00\x00") && string(got.Append(nil)) != c.in {
			t.Errorf("%.40q does not come back", c.in)
		}
	}
	if v, ok := (Keys{{"A", "1"}, {"A", "2"}}).Get("A"); v != "1" || !ok {
		t.Error("Get is not the first")
	}
}

// TestDecodeKeysMemory feeds the worst text (as many pairs as fit) and bounds what is allocated for it.
func TestDecodeKeysMemory(t *testing.T) {
	const pairs = 20000
	text := []byte(strings.Repeat("a=\x00", pairs))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	keys, err := DecodeKeys(text)
	runtime.ReadMemStats(&after)
	if err != nil || len(keys) != pairs {
		t.Fatal(len(keys), err)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 4<<20 {
		t.Fatalf("%d bytes were allocated for a text of %d", got, len(text))
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"iqn.2003-01.org.example:t1", "iqn.2003-01.org.example:t1"},
		{"IQN.2003-01.Org.Example:T1", "iqn.2003-01.org.example:t1"},
		{"iqn.2001-04.com.example", "iqn.2001-04.com.example"},
		{"iqn.2001-04.com.example:storage:diskarrays-sn-a8675309", "iqn.2001-04.com.example:storage:diskarrays-sn-a8675309"},
		{"iqn.1991-05.com.microsoft:my_host", "iqn.1991-05.com.microsoft:my_host"},
		{"eui.02004567A425678D", "eui.02004567a425678d"},
		{"naa.52004567BA64678D", "naa.52004567ba64678d"},
		{"naa.62004567BA64678D0123456789ABCDEF", "naa.62004567ba64678d0123456789abcdef"},
		{"iqn.2003-01.a:" + strings.Repeat("x", 223-14), "iqn.2003-01.a:" + strings.Repeat("x", 223-14)},
		{"iqn.2003-01.a:" + strings.Repeat("x", 224-14), ""},
		{"", ""}, {"iqn", ""}, {"iqn.", ""}, {"iqn.2003-01", ""}, {"iqn.2003-01.", ""}, {"iqn.2003-13.org.example", ""},
		{"iqn.2003-00.org.example", ""}, {"iqn.03-01.org.example", ""}, {"iqn.2003-01.:x", ""}, {"iqn.2003-01..org", ""},
		{"iqn.2003-01.org.example:a/b", ""}, {"iqn.2003-01.org.example:../../etc", ""}, {"iqn.2003-01.org.example:a b", ""},
		{"iqn.2003-01.org.example:a\nb", ""}, {"iqn.2003-01.org.example:a\x00", ""}, {"iqn.2003-01.org.example:\u212a", ""},
		{"iqn.2003-01.org.example:%n", ""}, {"iqn.2003-01.org.example:'", ""}, {"iqn.2003-01.-org", ""},
		{"eui.0200", ""}, {"eui.02004567A425678G", ""}, {"naa.02", ""}, {"wwn.02004567A425678D", ""}, {"iqn-2003-01.org", ""},
	} {
		got, err := NormalizeName(c.in)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("NormalizeName(%q) = %q, %v", c.in, got, err)
		}
	}
	if ValidName("iqn.2003-01.org.Example") == nil {
		t.Error("upper case is not normal")
	}
}

func TestAddresses(t *testing.T) {
	for _, c := range []struct{ in, host, out string }{
		{"10.0.0.1", "10.0.0.1", "10.0.0.1:3260"},
		{"10.0.0.1:5000,1", "10.0.0.1", "10.0.0.1:5000,1"},
		{"10.0.0.1,65535", "10.0.0.1", "10.0.0.1:3260,65535"},
		{"[fd00::1]:3260,1", "fd00::1", "[fd00::1]:3260,1"},
		{"[FD00:0:0::1]", "fd00::1", "[fd00::1]:3260"},
		{"[fe80::1%eth0]:3260", "fe80::1%eth0", "[fe80::1%eth0]:3260"},
		{"Storage.Example.org:860,0", "storage.example.org", "storage.example.org:860,0"},
		{"host", "host", "host:3260"}, {"host.", "host.", "host.:3260"},
		{"", "", ""}, {":3260", "", ""}, {"10.0.0.1:", "", ""}, {"10.0.0.1:0", "", ""}, {"10.0.0.1:65536", "", ""},
		{"10.0.0.1:+1", "", ""}, {"10.0.0.1,", "", ""}, {"10.0.0.1,1,2", "", ""}, {"10.0.0.256", "", ""}, {"10.0.0", "", ""},
		{"fd00::1", "", ""}, {"[fd00::1", "", ""}, {"[10.0.0.1]", "", ""}, {"[fd00::1]x", "", ""}, {"[fe80::1%a/b]", "", ""},
		{"a/b", "", ""}, {"a b", "", ""}, {"-a", "", ""}, {"a..b", "", ""}, {"a;reboot", "", ""}, {strings.Repeat("a.", 130), "", ""},
	} {
		a, err := ParseAddress(c.in)
		if c.out == "" {
			if err == nil || a != (Address{}) {
				t.Errorf("ParseAddress(%q) = %+v, want an error", c.in, a)
			}
			continue
		}
		if err != nil || a.Host != c.host || a.String() != c.out {
			t.Errorf("ParseAddress(%q) = %+v %q, %v", c.in, a, a.String(), err)
		}
	}
}

func TestSendTargets(t *testing.T) {
	keys := Keys{
		{"TargetName", "iqn.2003-01.org.example:T1"},
		{"TargetAddress", "10.0.0.1:3260,1"},
		{"TargetAddress", "[fd00::1]:3260,1"},
		{"TargetAddress", "10.0.0.1:3260,1"},
		{"TargetAlias", "ignored"},
		{"TargetName", "../etc/passwd"},
		{"TargetAddress", "10.0.0.9:3260,1"},
		{"TargetName", "iqn.2003-01.org.example:t2"},
		{"TargetAddress", "bad host,1"},
		{"TargetAddress", "10.0.0.1:3260"},
		{"TargetAddress", "10.0.0.2:3260,2"},
		{"TargetName", "iqn.2003-01.org.example:t1"},
		{"TargetAddress", "10.0.0.3:3260,3"},
		{"TargetName", "iqn.2003-01.org.example:t3"},
	}
	got, err := ParseSendTargets(keys)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, r := range got {
		lines = append(lines, fmt.Sprintf("%s %v %v", r.Name, r.Addresses, r.Problem != nil))
	}
	want := []string{
		"iqn.2003-01.org.example:t1 [10.0.0.1:3260,1 [fd00::1]:3260,1 10.0.0.3:3260,3] false",
		" [10.0.0.9:3260,1] true",
		"iqn.2003-01.org.example:t2 [10.0.0.2:3260,2] true",
		"iqn.2003-01.org.example:t3 [] false",
	}
	if !reflect.DeepEqual(lines, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
	if _, err := ParseSendTargets(Keys{{"TargetAddress", "10.0.0.1,1"}}); err == nil {
		t.Error("an address without a name was accepted")
	}
	if got, err := ParseSendTargets(nil); err != nil || got != nil {
		t.Error(got, err)
	}
}
