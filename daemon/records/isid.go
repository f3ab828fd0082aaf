package records

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// isidBlock is how many qualifiers, hence sessions, one group has: at most one per reactor.
const isidBlock = 64

const blocksPerRandom = 65536 / isidBlock

// MaxReactors is how many sessions a group can have.
const MaxReactors = isidBlock

// ISIDs hands out initiator session IDs, the same ones for the same group for ever.
//
// The form is the "random" type of RFC 7143 section 11.12.5: 80, 24 random bits, and a 16-bit qualifier. Each group owns a block of 64
// consecutive qualifiers, one per reactor. 1024 groups share a random part, then another one is drawn.
type ISIDs struct {
	path string
	fs   files

	mu   sync.Mutex
	data isidFile
	err  error // the file is damaged
}

type isidFile struct {
	Schema  int            `json:"schema"`
	Randoms []string       `json:"randoms"` // 6 hexadecimal digits each
	Groups  map[string]int `json:"groups"`  // group -> block number
	Next    int            `json:"next"`    // first block never handed out
}

// OpenISIDs reads the file at path. A damaged file makes Get fail, not OpenISIDs, so that devices that exist can still be looked after.
func OpenISIDs(path string) *ISIDs { return openISIDs(path, osFiles{}) }

func openISIDs(path string, f files) *ISIDs {
	s := &ISIDs{path: path, fs: f, data: isidFile{Schema: schema, Groups: make(map[string]int)}}
	b, err := readBounded(path, 8<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return s
	}
	if err == nil {
		s.data, err = decodeISIDs(b)
	}
	if err != nil {
		s.err = fmt.Errorf("the session identifiers in %s cannot be used: %w; restore the file, or remove it when no session of ours is left at any target", path, err)
	}
	return s
}

// decodeISIDs takes any bytes.
func decodeISIDs(b []byte) (isidFile, error) {
	var d isidFile
	if err := json.Unmarshal(b, &d); err != nil {
		return isidFile{}, fmt.Errorf("damaged: %w", err)
	}
	if d.Schema != schema {
		return isidFile{}, fmt.Errorf("schema %d, this version reads %d", d.Schema, schema)
	}
	if d.Groups == nil {
		d.Groups = make(map[string]int)
	}
	for _, r := range d.Randoms {
		if b, err := hex.DecodeString(r); err != nil || len(b) != 3 {
			return isidFile{}, fmt.Errorf("damaged: random part %q", r)
		}
	}
	if d.Next < 0 || d.Next > len(d.Randoms)*blocksPerRandom {
		return isidFile{}, fmt.Errorf("damaged: next block %d with %d random parts", d.Next, len(d.Randoms))
	}
	used := make(map[int]string, len(d.Groups))
	for g, n := range d.Groups {
		if n < 0 || n >= d.Next {
			return isidFile{}, fmt.Errorf("damaged: block %d of %q was never handed out", n, g)
		}
		if other, ok := used[n]; ok {
			return isidFile{}, fmt.Errorf("damaged: %q and %q share block %d", g, other, n)
		}
		used[n] = g
	}
	return d, nil
}

// Get returns the ISID of reactor 0 of a group, and the group's number (from 1, never reused). The first call for a group stores the
// choice before it returns.
func (s *ISIDs) Get(group string) (isid [6]byte, number int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return isid, 0, s.err
	}
	n, ok := s.data.Groups[group]
	if !ok {
		if n, err = s.addLocked(group); err != nil {
			return isid, 0, err
		}
	}
	random, err := hex.DecodeString(s.data.Randoms[n/blocksPerRandom])
	if err != nil {
		return isid, 0, fmt.Errorf("session identifiers: %w", err)
	}
	q := n % blocksPerRandom * isidBlock
	isid = [6]byte{0x80, random[0], random[1], random[2], byte(q >> 8), byte(q)}
	return isid, n + 1, nil
}

// Number returns the number of a group that has one.
func (s *ISIDs) Number(group string) (int, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.data.Groups[group]
	return n + 1, ok
}

// addLocked gives group the next block. Memory changes only when the disk has it.
func (s *ISIDs) addLocked(group string) (int, error) {
	next := isidFile{Schema: schema, Randoms: s.data.Randoms, Groups: make(map[string]int, len(s.data.Groups)+1), Next: s.data.Next + 1}
	for g, n := range s.data.Groups {
		next.Groups[g] = n
	}
	n := s.data.Next
	next.Groups[group] = n
	if n/blocksPerRandom >= len(next.Randoms) {
		var r [3]byte
		_, _ = rand.Read(r[:]) // never fails
		next.Randoms = append(append([]string(nil), next.Randoms...), hex.EncodeToString(r[:]))
	}
	b, err := json.MarshalIndent(next, "", "  ")
	if err != nil {
		return 0, fmt.Errorf("session identifiers: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return 0, fmt.Errorf("session identifiers: %w", err)
	}
	if err := replaceFile(s.fs, s.path, append(b, '\n')); err != nil {
		return 0, err
	}
	s.data = next
	return n, nil
}
