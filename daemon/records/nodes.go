package records

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"iserd.org/iserd/api"
)

const (
	schema      = 1
	maxRecord   = 64 << 10
	maxNodes    = 16384
	defaultFace = "default"
)

// ErrNotFound tells that no record has the ID.
var ErrNotFound = errors.New("no such record")

// Key names a record: one target at one portal through one interface. It never changes.
type Key struct {
	Target    string `json:"target"`
	Address   string `json:"address"`
	Port      uint16 `json:"port"`
	Interface string `json:"interface"`
}

// MakeKey returns the key for a target at a portal, through the default interface.
func MakeKey(target string, p api.Portal) Key {
	return Key{Target: target, Address: p.Address, Port: p.Port, Interface: defaultFace}
}

// ID is the key's stable short form: "n" and the first 16 hexadecimal digits of a SHA-256. It is safe as a file name and in an object path.
func (k Key) ID() string {
	h := sha256.Sum256([]byte(strings.Join([]string{k.Target, k.Address, strconv.Itoa(int(k.Port)), k.Interface}, "\x00")))
	return "n" + hex.EncodeToString(h[:8])
}

// Portal returns the key's portal.
func (k Key) Portal() api.Portal { return api.Portal{Address: k.Address, Port: k.Port} }

// check applies the rules for names to what a file says.
func (k Key) check() error {
	if err := api.CheckName(k.Target); err != nil {
		return err
	}
	p, err := api.ParsePortal(k.Portal().String())
	if err != nil {
		return err
	}
	if p != k.Portal() {
		return fmt.Errorf("address %q is not in its normal form %q", k.Address, p.Address)
	}
	if k.Interface != defaultFace {
		return fmt.Errorf("interface %q is not known", k.Interface)
	}
	return nil
}

// Found is what discovery said about a record. Only discovery writes it.
type Found struct {
	TPGT       int       `json:"tpgt"` // -1 unknown
	Transports []string  `json:"transports"`
	Source     string    `json:"source"` // the portal that was asked; "" for a record made by hand
	Time       time.Time `json:"time"`
	Missing    bool      `json:"missing"` // the last discovery of Source did not list it
}

// Settings are what the user set. Discovery never writes them.
type Settings struct {
	Startup string `json:"startup"` // manual
	api.Settings
}

// Node is a record.
type Node struct {
	Key
	Found    Found
	Settings Settings
	MovedTo  string // portal to which the target has moved for good, by its own word; "" if it has not
}

// nodeFile is a record's form on the disk.
type nodeFile struct {
	Schema int `json:"schema"`
	Key
	Found    Found    `json:"found"`
	Settings Settings `json:"settings"`
	MovedTo  string   `json:"moved_to,omitempty"`
}

// Nodes is the set of node records in a directory.
type Nodes struct {
	dir   string
	fs    files
	check func(Key) error // of a record that may be here

	mu       sync.Mutex
	nodes    map[string]Node   // by ID
	problems map[string]string // by file name
}

// OpenNodes reads the records in dir, which it makes if needed. A damaged record is no error, see Problems.
func OpenNodes(dir string) (*Nodes, error) { return openNodes(dir, osFiles{}, Key.check) }

func openNodes(dir string, fs files, check func(Key) error) (*Nodes, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("node records: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("node records: %w", err)
	}
	s := &Nodes{dir: dir, fs: fs, check: check, nodes: make(map[string]Node), problems: make(map[string]string)}
	for _, e := range entries {
		name := e.Name()
		id, isJSON := strings.CutSuffix(name, ".json")
		switch {
		case strings.HasPrefix(name, tempPrefix):
			_ = fs.Remove(filepath.Join(dir, name)) // a write that a crash cut off
		case isJSON:
			n, err := readNode(filepath.Join(dir, name), check)
			if err == nil && n.ID() != id {
				err = fmt.Errorf("its content belongs into %s.json", n.ID())
			}
			if err != nil {
				s.problems[name] = fmt.Sprintf("record %s cannot be used: %v", filepath.Join(dir, name), err)
				continue
			}
			s.nodes[id] = n
		}
	}
	return s, nil
}

func readNode(path string, check func(Key) error) (Node, error) {
	b, err := readBounded(path, maxRecord)
	if err != nil {
		return Node{}, err
	}
	return decodeNode(b, check)
}

// decodeNode takes any bytes. check judges the key.
func decodeNode(b []byte, check func(Key) error) (Node, error) {
	var f nodeFile
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&f); err != nil {
		return Node{}, fmt.Errorf("damaged: %w", err)
	}
	if d.More() {
		return Node{}, errors.New("damaged: more than one object")
	}
	if f.Schema != schema {
		return Node{}, fmt.Errorf("schema %d, this version reads %d", f.Schema, schema)
	}
	if err := check(f.Key); err != nil {
		return Node{}, fmt.Errorf("damaged: %w", err)
	}
	if f.Settings.Startup == "" {
		f.Settings.Startup = "manual"
	}
	t, err := api.CheckTransport(f.Settings.Transport)
	if err != nil {
		return Node{}, fmt.Errorf("damaged: %w", err)
	}
	f.Settings.Transport = t
	if err := f.Settings.Check(); err != nil {
		return Node{}, fmt.Errorf("damaged: %w", err)
	}
	if f.MovedTo != "" {
		if p, err := api.ParsePortal(f.MovedTo); err != nil || p.String() != f.MovedTo {
			return Node{}, fmt.Errorf("damaged: moved to %q", f.MovedTo)
		}
	}
	return Node{Key: f.Key, Found: f.Found, Settings: f.Settings, MovedTo: f.MovedTo}, nil
}

func encodeNode(n Node) ([]byte, error) {
	b, err := json.MarshalIndent(nodeFile{schema, n.Key, n.Found, n.Settings, n.MovedTo}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return append(b, '\n'), nil
}

// Problems lists the records that could not be read, one sentence each.
func (s *Nodes) Problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.problems))
}

// List returns all records, ordered by target, address and port.
func (s *Nodes) List() []Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Node, 0, len(s.nodes))
	for _, n := range s.nodes {
		out = append(out, n.clone())
	}
	slices.SortFunc(out, func(a, b Node) int {
		if c := strings.Compare(a.Target, b.Target); c != 0 {
			return c
		}
		if c := strings.Compare(a.Address, b.Address); c != 0 {
			return c
		}
		return int(a.Port) - int(b.Port)
	})
	return out
}

func (n Node) clone() Node {
	n.Found.Transports = slices.Clone(n.Found.Transports)
	n.Settings.Settings = n.Settings.Clone()
	return n
}

// Get returns the record with the ID.
func (s *Nodes) Get(id string) (Node, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.nodes[id]
	if !ok {
		return Node{}, fmt.Errorf("%s: %w", id, ErrNotFound)
	}
	return n.clone(), nil
}

// Delete removes a record.
func (s *Nodes) Delete(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.nodes[id]; !ok {
		return fmt.Errorf("%s: %w", id, ErrNotFound)
	}
	if err := s.fs.Remove(filepath.Join(s.dir, id+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete record: %w", err)
	}
	delete(s.nodes, id)
	return s.fs.SyncDir(s.dir)
}

// Add makes a record by hand. One that exists keeps its settings and is returned.
func (s *Nodes) Add(k Key) (Node, error) {
	if k.Interface == "" {
		k.Interface = defaultFace
	}
	if err := s.check(k); err != nil {
		return Node{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.nodes[k.ID()]; ok {
		return n.clone(), nil
	}
	n := newNode(k)
	return n.clone(), s.putLocked(n)
}

func newNode(k Key) Node {
	return Node{Key: k, Found: Found{TPGT: -1}, Settings: Settings{Startup: "manual", Settings: api.Settings{Transport: api.TransportAuto}}}
}

// Change lets f alter the settings of a record, or where its target has moved to, and stores it. When f fails, or what it leaves does not pass
// [api.Settings.Check], nothing changes.
func (s *Nodes) Change(id string, f func(*Node) error) (Node, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.nodes[id]
	if !ok {
		return Node{}, fmt.Errorf("%s: %w", id, ErrNotFound)
	}
	n = n.clone()
	key, found := n.Key, n.clone().Found
	if err := f(&n); err != nil {
		return Node{}, err
	}
	n.Key, n.Found = key, found
	if err := n.Settings.Check(); err != nil {
		return Node{}, err
	}
	return n.clone(), s.putLocked(n)
}

// putLocked writes a record. What is in memory changes only when the disk has it.
func (s *Nodes) putLocked(n Node) error {
	id := n.ID()
	if _, ok := s.nodes[id]; !ok && len(s.nodes) >= maxNodes {
		return fmt.Errorf("there are %d node records already; delete some", maxNodes)
	}
	b, err := encodeNode(n)
	if err != nil {
		return err
	}
	if err := replaceFile(s.fs, filepath.Join(s.dir, id+".json"), b); err != nil {
		return err
	}
	s.nodes[id] = n.clone()
	delete(s.problems, id+".json")
	return nil
}

// Merge stores the result of a discovery of source, in which the given transports answered. New records get the settings of fresh, known
// ones keep theirs, and a record that source listed before and does not list now is marked as missing. After an
// error part of it may be stored; merging again completes it.
func (s *Nodes) Merge(source string, answered []string, found []api.Target, fresh api.Settings, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	listed := make(map[string]bool, len(found))
	for _, t := range found {
		k := MakeKey(t.Target, api.Portal{Address: t.Address, Port: t.Port})
		if err := k.check(); err != nil {
			return err
		}
		n, ok := s.nodes[k.ID()]
		if !ok {
			n = newNode(k)
			n.Settings.Settings = fresh.Clone()
			n.Settings.Transport = orAuto(fresh.Transport)
		}
		listed[k.ID()] = true
		// A transport that was not asked this time keeps what was known about it.
		ts := slices.Clone(t.Transports)
		for _, old := range n.Found.Transports {
			if !slices.Contains(answered, old) && !slices.Contains(ts, old) {
				ts = append(ts, old)
			}
		}
		slices.Sort(ts)
		n.Found = Found{TPGT: t.TPGT, Transports: ts, Source: source, Time: now.UTC().Truncate(time.Second)}
		if err := s.putLocked(n); err != nil {
			return err
		}
	}
	for id, n := range s.nodes {
		if listed[id] || n.Found.Missing || n.Found.Source != source {
			continue
		}
		if slices.ContainsFunc(n.Found.Transports, func(t string) bool { return !slices.Contains(answered, t) }) {
			continue // it may still be there over the transport that did not answer
		}
		n.Found.Missing = true
		if err := s.putLocked(n); err != nil {
			return err
		}
	}
	return nil
}

func orAuto(transport string) string {
	if transport == "" {
		return api.TransportAuto
	}
	return transport
}
