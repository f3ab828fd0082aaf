package records

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// files are the file operations that writing needs; a test replaces them to make a disk full.
type files interface {
	CreateTemp(dir, pattern string) (tempFile, error)
	Rename(from, to string) error
	Remove(path string) error
	SyncDir(dir string) error
}

type tempFile interface {
	io.WriteCloser
	Name() string
	Sync() error
}

type osFiles struct{}

func (osFiles) CreateTemp(dir, pattern string) (tempFile, error) { return os.CreateTemp(dir, pattern) }
func (osFiles) Rename(from, to string) error                     { return os.Rename(from, to) }
func (osFiles) Remove(path string) error                         { return os.Remove(path) }

func (osFiles) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}

const tempPrefix = ".tmp-"

// replaceFile makes path hold data, or leaves it as it was. The mode is 0600.
func replaceFile(fs files, path string, data []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := fs.CreateTemp(dir, tempPrefix+"*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = fs.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if _, err := f.Write(data); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Sync(); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := fs.Rename(f.Name(), path); err != nil {
		return err
	}
	return fs.SyncDir(dir)
}

// readBounded reads a file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("read %s: larger than %d bytes", path, limit)
	}
	return b, nil
}
