package records

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"iserd.org/iserd/api"
)

// namePrefix starts every name made here: the reversed domain of the project and a month in which it was registered (RFC 7143
// section 4.2.7.4).
const namePrefix = "iqn.2026-11.org.iserd:"

// InitiatorName returns the name by which this machine is known to targets, from the first of the files that exists, and the file. If none
// does, a name is made and stored in the first file that can be written. A file that holds no valid name is an error: a new
// name would lose access to every target that knows the old one.
func InitiatorName(paths ...string) (name, path string, err error) {
	for _, p := range paths {
		b, err := readBounded(p, 4096)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", p, fmt.Errorf("initiator name: %w", err)
		}
		n, err := parseName(string(b))
		if err != nil {
			return "", p, fmt.Errorf("initiator name in %s: %w", p, err)
		}
		return n, p, nil
	}
	var r [6]byte
	_, _ = rand.Read(r[:]) // never fails
	name = namePrefix + hex.EncodeToString(r[:])
	var errs []error
	for _, p := range paths {
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			errs = append(errs, err)
			continue
		}
		text := "# The name by which this machine is known to iSCSI targets. Two machines must never share one.\n" + name + "\n"
		if err := replaceFile(osFiles{}, p, []byte(text)); err != nil {
			errs = append(errs, err)
			continue
		}
		return name, p, nil
	}
	return "", "", fmt.Errorf("initiator name: cannot be stored: %w", errors.Join(errs...))
}

// parseName finds the one line that is not a comment. The form InitiatorName=NAME of open-iscsi is accepted.
func parseName(text string) (string, error) {
	name := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if name != "" {
			return "", errors.New("more than one name")
		}
		name = strings.TrimSpace(strings.TrimPrefix(line, "InitiatorName="))
	}
	if name == "" {
		return "", errors.New("no name in it")
	}
	return name, api.CheckName(name)
}
