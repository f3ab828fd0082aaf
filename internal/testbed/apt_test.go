package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"
)

func TestPickMirror(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{
		{"plain", "http://deb.debian.org/debian/ bookworm main\n", "http://deb.debian.org/debian"},
		{"security first", "http://deb.debian.org/debian-security/ bookworm-security main\nhttps://mirror.example/debian bookworm main\n", "https://mirror.example/debian"},
		{"foreign first", "https://packages.example.com/apt/ sdk main\nhttp://ftp.example.net/pub/debian/ bookworm main\n", "http://ftp.example.net/pub/debian"},
		{"odd path", "http://cache.example/debian-mirror/ bookworm main\n", "http://cache.example/debian-mirror"},
		{"media only", "cdrom:[Debian]/ bookworm main\n", ""},
		{"no code name yet", "http://deb.debian.org/debian/ main\n", "http://deb.debian.org/debian"},
		{"other component", "http://deb.debian.org/debian/ bookworm contrib\n", ""},
		{"nothing", "", ""},
	} {
		if got := pickMirror(tc.in); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestReadStanzas(t *testing.T) {
	const in = "\nPackage: a\nDescription: one\n two\n\tthree\nSize: 5\n\n\nPackage: b\n"
	var got []stanza
	if err := readStanzas(strings.NewReader(in), func(s stanza) bool { got = append(got, s); return true }); err != nil {
		t.Fatal(err)
	}
	want := []stanza{{"Package": "a", "Description": "one\ntwo\nthree", "Size": "5"}, {"Package": "b"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if err := readStanzas(strings.NewReader("no colon\n"), func(stanza) bool { return true }); err == nil {
		t.Error("a line without a colon was taken")
	}
}

func FuzzReadStanzas(f *testing.F) {
	f.Add("Package: a\nDepends: b | c (>= 1), d\n\nPackage: b\n x\n")
	f.Add(" x\n\ty\n:\n")
	f.Fuzz(func(t *testing.T, in string) {
		readStanzas(strings.NewReader(in), func(s stanza) bool { s.depends(); return true })
	})
}

// packagesOf is an index in the shape of trixie-backports.
func packagesOf(size int) string {
	sum := strings.Repeat("0", 64)
	return fmt.Sprintf(`Package: linux-image-amd64
Version: 7.2.12-1
Depends: linux-base-amd64 (= 7.2.12-1), linux-image-7.2.12+deb13-amd64 (= 7.2.12-1)
Filename: pool/meta.deb
Size: 1692
SHA256: %[1]s

Package: linux-image-amd64
Version: 7.1.3-1
Depends: linux-image-7.1.3+deb13-amd64
Filename: pool/oldmeta.deb
Size: 1692
SHA256: %[1]s

Package: linux-base-amd64
Depends: linux-base-7.2.12+deb13-amd64
Version: 7.2.12-1
Filename: pool/metabase.deb
Size: 1200
SHA256: %[1]s

Package: linux-image-7.2.12+deb13-amd64
Version: 7.2.12-1
Depends: dracut | initramfs-tools (>= 0.120), linux-base-7.2.12+deb13-amd64, linux-binary-7.2.12+deb13-amd64, linux-modules-7.2.12+deb13-amd64
Filename: pool/image.deb
Size: 1900
SHA256: %[1]s

Package: linux-base-7.2.12+deb13-amd64
Version: 7.2.12-1
Filename: pool/base.deb
Size: 1090008
SHA256: %[1]s

Package: linux-binary-7.2.12+deb13-amd64
Version: 7.2.12-1
Filename: pool/binary.deb
Size: 13968908
SHA256: %[1]s

Package: linux-modules-7.2.12+deb13-amd64
Version: 7.2.12-1
Depends: kmod
Filename: pool/modules.deb
Size: %[2]d
SHA256: %[1]s

Package: zsh
Version: 1
`, sum, size)
}

func writeIndex(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "Packages.xz")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := xz.NewWriter(f)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestKernelPackages(t *testing.T) {
	if _, err := lookPath("dpkg"); err != nil {
		t.Skip("compares versions with dpkg: ", err)
	}
	x, err := readIndex(writeIndex(t, packagesOf(159105900)), "http://mirror")
	if err != nil {
		t.Fatal(err)
	}
	if v := x.packages[kernelRoot]["Version"]; v != "7.2.12-1" {
		t.Errorf("chose version %s", v)
	}
	debs, err := x.kernelPackages()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range debs {
		names = append(names, s["Filename"])
	}
	if got := strings.Join(names, " "); got != "pool/base.deb pool/binary.deb pool/modules.deb" {
		t.Errorf("got %s", got)
	}
	if _, err := (&index{packages: map[string]stanza{}}).kernelPackages(); err == nil {
		t.Error("an empty index has a kernel")
	}
}

func TestFindChecksum(t *testing.T) {
	const release = "Origin: Debian\nMD5Sum:\n 00 1 main/binary-amd64/Packages.xz\nSHA256:\n aa 2 main/binary-amd64/Packages\n bb 3 main/binary-amd64/Packages.xz\n"
	if sum, err := findChecksum([]byte(release), "main/binary-amd64/Packages.xz"); err != nil || sum != (checksum{"bb", 3}) {
		t.Errorf("got %v, %v", sum, err)
	}
	if _, err := findChecksum([]byte(release), "contrib"); err == nil {
		t.Error("found what is not there")
	}
}

func TestDownload(t *testing.T) {
	const text = "a package"
	sum := sha256.Sum256([]byte(text))
	good := checksum{sha256: hex.EncodeToString(sum[:])}
	tries := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tries++
		switch r.URL.Path {
		case "/good":
			fmt.Fprint(w, text)
		case "/flaky":
			if tries == 1 {
				http.Error(w, "busy", http.StatusServiceUnavailable)
				return
			}
			fmt.Fprint(w, text)
		case "/broken":
			fmt.Fprint(w, "something else")
		default:
			http.NotFound(w, r)
		}
	}))
	defer srv.Close()
	for _, tc := range []struct{ path, want string }{
		{"/good", ""},
		{"/flaky", ""},
		{"/broken", "checksum"},
		{"/missing", "404"},
	} {
		tries = 0
		to := filepath.Join(t.TempDir(), "file")
		err := download(t.Context(), newLog(nil), srv.URL+tc.path, to, good)
		if tc.want == "" {
			if b, rerr := os.ReadFile(to); err != nil || string(b) != text {
				t.Errorf("%s: %v, %q, %v", tc.path, err, b, rerr)
			}
			continue
		}
		if !errors.As(err, new(*Problem)) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want a Problem with %q", tc.path, err, tc.want)
		}
		if left, _ := filepath.Glob(to + "*"); len(left) > 0 {
			t.Errorf("%s: left behind: %v", tc.path, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := download(ctx, newLog(nil), srv.URL+"/good", filepath.Join(t.TempDir(), "x"), good); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	srv.Close()
	if err := download(t.Context(), newLog(nil), srv.URL+"/good", filepath.Join(t.TempDir(), "x"), good); !errors.As(err, new(*Problem)) {
		t.Errorf("no network: %v", err)
	}
}

// TestNoTools looks for tools where none are: the error is one line that names the package and what to do.
func TestNoTools(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("ISERD_CACHE", t.TempDir())
	_, err := Prepare(t.Context(), nil)
	if !errors.As(err, new(*Problem)) || !strings.Contains(err.Error(), "qemu-system-x86") || !strings.Contains(err.Error(), "make deps") {
		t.Errorf("got %v", err)
	}
}

// TestNoNetwork points apt's mirror to a dead address: with an empty cache that is an error, with a kernel in it that kernel serves.
func TestNoNetwork(t *testing.T) {
	bin := t.TempDir()
	script := "#!/bin/sh\necho http://127.0.0.1:1/debian/ bookworm main\n"
	if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	cache := t.TempDir()
	if _, err := newestKernel(t.Context(), newLog(nil), cache); !errors.As(err, new(*Problem)) || !strings.Contains(err.Error(), "network") {
		t.Errorf("empty cache: %v", err)
	}
	dir := filepath.Join(cache, "kernel", "7.2.12-1")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinuz"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	k, err := newestKernel(t.Context(), newLog(&said), cache)
	if err != nil || k.version != "7.2.12-1" || !strings.Contains(said.String(), "from the cache") {
		t.Errorf("got %v, %v; said %s", k, err, said.String())
	}
}

func TestNeedSpace(t *testing.T) {
	if err := needSpace(t.TempDir(), 1); err != nil {
		t.Error(err)
	}
	if err := needSpace(t.TempDir(), 1<<62); !errors.As(err, new(*Problem)) || !strings.Contains(err.Error(), "ISERD_CACHE") {
		t.Errorf("got %v", err)
	}
}
