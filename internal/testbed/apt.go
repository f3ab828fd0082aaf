package testbed

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/ulikunitz/xz"
)

// suite is where the kernel comes from, release is the guest's user space.
const (
	release = "trixie"
	suite   = release + "-backports"
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// indexAge is how long a downloaded index is taken for fresh.
const indexAge = 24 * time.Hour

// mirror returns the Debian mirror that apt is set up for, without a trailing slash, as in http://deb.debian.org/debian.
func mirror(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages")
	out, err := cmd.Output()
	if err != nil {
		return "", &Problem{What: "apt does not tell its mirrors", Do: "check that this is Debian, and that `apt-get indextargets` works", Err: err}
	}
	if m := pickMirror(string(out)); m != "" {
		return m, nil
	}
	return "", &Problem{
		What: "apt has no Debian mirror over http",
		Do:   "add one to /etc/apt/sources.list, as in: deb http://deb.debian.org/debian bookworm main",
	}
}

// pickMirror chooses among lines of "URI codename component": the main archive, not security nor somebody else's.
func pickMirror(targets string) string {
	var other string
	for _, line := range strings.Split(targets, "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || !strings.HasPrefix(f[0], "http") || strings.Contains(f[0], "security") {
			continue
		}
		u := strings.TrimRight(f[0], "/")
		if f[len(f)-1] != "main" {
			continue
		}
		if strings.HasSuffix(u, "/debian") {
			return u
		}
		if strings.Contains(u, "debian") && other == "" {
			other = u
		}
	}
	return other
}

// stanza is one paragraph of a Debian control file; folded lines are joined with newlines.
type stanza map[string]string

// readStanzas calls f for each paragraph of r until f returns false.
func readStanzas(r io.Reader, f func(stanza) bool) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 64<<10), 4<<20)
	s, last := stanza{}, ""
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.TrimSpace(line) == "":
			if len(s) > 0 && !f(s) {
				return nil
			}
			s, last = stanza{}, ""
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				s[last] += "\n" + strings.TrimSpace(line)
			}
		default:
			name, value, ok := strings.Cut(line, ":")
			if !ok {
				return fmt.Errorf("control file: line %.60q has no colon", line)
			}
			last = name
			s[last] = strings.TrimSpace(value)
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("control file: %w", err)
	}
	if len(s) > 0 {
		f(s)
	}
	return nil
}

// index is the list of packages of the kernel's suite.
type index struct {
	mirror   string
	packages map[string]stanza // by name; of several versions the newest
}

// refreshIndex returns the path of the suite's Packages.xz in dir, downloading it when the copy there is older than indexAge. The list is
// only ever replaced by one that Debian signed.
func refreshIndex(ctx context.Context, l *log, mirror, dir string) (string, error) {
	path := filepath.Join(dir, "Packages.xz")
	stamp := filepath.Join(dir, "mirror")
	if st, err := os.Stat(stamp); err == nil && time.Since(st.ModTime()) < indexAge {
		if b, err := os.ReadFile(stamp); err == nil && string(b) == mirror {
			return path, nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", diskFull(err, dir)
	}
	base := mirror + "/dists/" + suite
	release := filepath.Join(dir, "InRelease")
	if err := download(ctx, l, base+"/InRelease", release, checksum{}); err != nil {
		return "", err
	}
	signed, err := verifySignature(ctx, release)
	if err != nil {
		return "", err
	}
	const name = "main/binary-amd64/Packages.xz"
	sum, err := findChecksum(signed, name)
	if err != nil {
		return "", fmt.Errorf("%s/InRelease: %w", base, err)
	}
	if err := download(ctx, l, base+"/"+name, path, sum); err != nil {
		return "", err
	}
	return path, diskFull(os.WriteFile(stamp, []byte(mirror), 0o644), dir)
}

// verifySignature returns the signed text of an InRelease file, checked against the keys of Debian's archive.
func verifySignature(ctx context.Context, path string) ([]byte, error) {
	var text, said bytes.Buffer
	cmd := exec.CommandContext(ctx, "gpgv", "--keyring", keyring, "--output", "-", path)
	cmd.Stdout, cmd.Stderr = &text, &said
	if err := cmd.Run(); err != nil {
		os.Remove(path)
		do := "try again; if it stays, something between this host and the mirror changes files"
		if strings.Contains(said.String(), "No public key") {
			do = "bring the package debian-archive-keyring up to date"
		}
		return nil, &Problem{What: "the signature of " + suite + " does not verify", Do: do, Err: err}
	}
	return text.Bytes(), nil
}

// findChecksum finds the SHA256 and size of a file in the text of a Release file.
func findChecksum(release []byte, name string) (checksum, error) {
	var sum checksum
	err := readStanzas(bytes.NewReader(release), func(s stanza) bool {
		for _, line := range strings.Split(s["SHA256"], "\n") {
			f := strings.Fields(line)
			if len(f) == 3 && f[2] == name {
				sum = checksum{sha256: f[0]}
				fmt.Sscan(f[1], &sum.size)
			}
		}
		return true
	})
	if err == nil && sum.sha256 == "" {
		err = fmt.Errorf("no SHA256 of %s", name)
	}
	return sum, err
}

// readIndex reads a Packages.xz.
func readIndex(path, mirror string) (*index, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := xz.NewReader(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	x := &index{mirror: mirror, packages: map[string]stanza{}}
	err = readStanzas(r, func(s stanza) bool {
		if n := s["Package"]; strings.HasPrefix(n, "linux-") {
			if old, ok := x.packages[n]; !ok || olderVersion(old["Version"], s["Version"]) {
				x.packages[n] = s
			}
		}
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return x, nil
}

// olderVersion reports whether Debian version a is older than b.
func olderVersion(a, b string) bool {
	return exec.Command("dpkg", "--compare-versions", a, "lt", b).Run() == nil
}

// depends returns the names a package depends on, the first of each alternative.
func (s stanza) depends() []string {
	var names []string
	for _, d := range strings.Split(s["Depends"], ",") {
		first, _, _ := strings.Cut(d, "|")
		if f := strings.Fields(first); len(f) > 0 {
			names = append(names, f[0])
		}
	}
	return names
}

// closure returns the packages reached from root over Depends, as far as keep says, in the order found.
func (x *index) closure(root string, keep func(name string) bool) ([]stanza, error) {
	var found []stanza
	seen := map[string]bool{}
	for queue := []string{root}; len(queue) > 0; queue = queue[1:] {
		n := queue[0]
		if seen[n] || (n != root && !keep(n)) {
			continue
		}
		seen[n] = true
		s, ok := x.packages[n]
		if !ok {
			if n == root {
				return nil, fmt.Errorf("suite %s has no package %s", suite, n)
			}
			continue // it lives in another suite, and is not part of the kernel
		}
		found = append(found, s)
		queue = append(queue, s.depends()...)
	}
	return found, nil
}
