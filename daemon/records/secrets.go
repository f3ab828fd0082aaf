package records

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// Secrets keeps the CHAP secrets, one file for each record that has some, apart from the records: those may be shown, copied and sent to others.
// The directory has mode 0700 and a file 0600; a file that others could read or that belongs to somebody else is refused, because what is in it
// may be known or forged. No secret is kept in memory, only which there are.
type Secrets struct {
	dir string
	fs  files

	mu    sync.Mutex
	names map[string][]string // by ID
}

// SecretSet are the secrets of one record.
type SecretSet struct {
	Secret       api.Secret `json:"chap_secret,omitzero"`
	TargetSecret api.Secret `json:"chap_target_secret,omitzero"`
}

type secretFile struct {
	Schema int `json:"schema"`
	SecretSet
}

// OpenSecrets uses dir, which it makes if needed.
func OpenSecrets(dir string) (*Secrets, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	left, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	for _, f := range left {
		_ = os.Remove(f) // a write that a crash cut off
	}
	s := &Secrets{dir: dir, fs: osFiles{}, names: make(map[string][]string)}
	list, err := filepath.Glob(filepath.Join(dir, "n*.json"))
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	for _, f := range list {
		id := strings.TrimSuffix(filepath.Base(f), ".json")
		if set, err := s.getLocked(id); err == nil { // one that cannot be read is reported when it is needed
			s.names[id] = set.Names()
		}
	}
	return s, nil
}

// Names lists which secrets a record has.
func (s *Secrets) Names(id string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.names[id]...)
}

// Names lists which secrets of the set there are.
func (s SecretSet) Names() []string {
	names := []string{}
	if !s.Secret.IsZero() {
		names = append(names, api.CHAPSecret)
	}
	if !s.TargetSecret.IsZero() {
		names = append(names, api.CHAPTargetSecret)
	}
	return names
}

// put changes one secret; the zero value removes it.
func (s *SecretSet) put(name string, secret api.Secret) error {
	switch name {
	case api.CHAPSecret:
		s.Secret = secret
	case api.CHAPTargetSecret:
		s.TargetSecret = secret
	default:
		return api.Errorf(api.ErrInvalidArgs, "there is no secret %q; there are %s and %s", name, api.CHAPSecret, api.CHAPTargetSecret)
	}
	if !s.Secret.IsZero() && s.Secret.Equal(s.TargetSecret) {
		return api.Errorf(api.ErrInvalidArgs, "the secrets of the two directions are the same; then an answer could be reflected (RFC 7143 section 9.2.1)")
	}
	return nil
}

var idForm = regexp.MustCompile(`^n[0-9a-f]{16}$`)

func (s *Secrets) path(id string) (string, error) {
	if !idForm.MatchString(id) {
		return "", fmt.Errorf("secrets: %q is not the ID of a record", id)
	}
	return filepath.Join(s.dir, id+".json"), nil
}

// Get reads the secrets of a record. None is no error.
func (s *Secrets) Get(id string) (SecretSet, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.getLocked(id)
}

func (s *Secrets) getLocked(id string) (SecretSet, error) {
	path, err := s.path(id)
	if err != nil {
		return SecretSet{}, err
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return SecretSet{}, nil
	}
	if err != nil {
		return SecretSet{}, fmt.Errorf("secrets in %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() { _ = f.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return SecretSet{}, fmt.Errorf("secrets in %s: %w", path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return SecretSet{}, fmt.Errorf("secrets in %s: not a file", path)
	case st.Mode&0o077 != 0:
		return SecretSet{}, fmt.Errorf("secrets in %s: others can read the file, and may have: set new secrets", path)
	case int(st.Uid) != os.Geteuid() && st.Uid != 0:
		return SecretSet{}, fmt.Errorf("secrets in %s: the file belongs to user %d", path, st.Uid)
	case st.Size > maxRecord:
		return SecretSet{}, fmt.Errorf("secrets in %s: larger than %d bytes", path, maxRecord)
	}
	b := make([]byte, st.Size)
	defer func() { clear(b) }()
	if _, err := f.ReadAt(b, 0); err != nil {
		return SecretSet{}, fmt.Errorf("secrets in %s: %w", path, err)
	}
	var file secretFile
	if json.Unmarshal(b, &file) != nil { // its error could quote what it met
		return SecretSet{}, fmt.Errorf("secrets in %s: damaged", path)
	}
	if file.Schema != schema {
		return SecretSet{}, fmt.Errorf("secrets in %s: schema %d, this version reads %d", path, file.Schema, schema)
	}
	return file.SecretSet, nil
}

// Set stores one secret of a record, or removes it when it is the zero value. A file that cannot be read is replaced.
func (s *Secrets) Set(id, name string, secret api.Secret) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	path, err := s.path(id)
	if err != nil {
		return err
	}
	set, err := s.getLocked(id)
	switch {
	case err != nil && secret.IsZero():
		return s.deleteLocked(id, path)
	case err != nil:
		// Starting afresh would lose the other secret, and with it what it demands of the target.
		return fmt.Errorf("%w; remove the secrets of the record first, then set each of them again", err)
	}
	if err := set.put(name, secret); err != nil {
		return err
	}
	if len(set.Names()) == 0 {
		return s.deleteLocked(id, path)
	}
	b, err := json.MarshalIndent(secretFile{schema, set}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode secrets: %w", err)
	}
	defer clear(b)
	if err := replaceFile(s.fs, path, append(b, '\n')); err != nil {
		return err
	}
	s.names[id] = set.Names()
	return nil
}

// Delete removes the secrets of a record.
func (s *Secrets) Delete(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	path, err := s.path(id)
	if err != nil {
		return err
	}
	return s.deleteLocked(id, path)
}

func (s *Secrets) deleteLocked(id, path string) error {
	delete(s.names, id)
	if err := s.fs.Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("delete secrets: %w", err)
	}
	return s.fs.SyncDir(s.dir)
}
