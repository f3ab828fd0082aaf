package testtarget

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// store is what holds a unit's content. Ranges are inside it; what was never written reads as zero. The unit's lock guards it.
type store interface {
	read(b []byte, off int64) error
	write(b []byte, off int64) error
	zero(off, n int64) error // may give the space back
	size() int64
	resize(n int64) error
	sync() error
	close() error
}

const chunkSize = 64 << 10

// memory is a store in chunks that are made when they are written.
type memory struct {
	chunks map[int64][]byte
	n      int64
}

func (m *memory) each(b []byte, off int64, f func(chunk int64, at int, part []byte)) {
	for len(b) > 0 {
		at := int(off % chunkSize)
		n := min(len(b), chunkSize-at)
		f(off/chunkSize, at, b[:n])
		b, off = b[n:], off+int64(n)
	}
}

func (m *memory) read(b []byte, off int64) error {
	m.each(b, off, func(chunk int64, at int, part []byte) {
		if c := m.chunks[chunk]; c != nil {
			copy(part, c[at:])
		} else {
			clear(part)
		}
	})
	return nil
}

func (m *memory) write(b []byte, off int64) error {
	m.each(b, off, func(chunk int64, at int, part []byte) {
		c := m.chunks[chunk]
		if c == nil {
			c = make([]byte, chunkSize)
			m.chunks[chunk] = c
		}
		copy(c[at:], part)
	})
	return nil
}

func (m *memory) zero(off, n int64) error {
	for n > 0 {
		at := off % chunkSize
		part := min(n, chunkSize-at)
		if part == chunkSize {
			delete(m.chunks, off/chunkSize)
		} else if c := m.chunks[off/chunkSize]; c != nil {
			clear(c[at : at+part])
		}
		off, n = off+part, n-part
	}
	return nil
}

func (m *memory) size() int64 { return m.n }

func (m *memory) resize(n int64) error {
	old := m.n
	m.n = n
	if n >= old {
		return nil
	}
	for chunk := range m.chunks {
		if chunk*chunkSize >= n {
			delete(m.chunks, chunk)
		}
	}
	if at := n % chunkSize; at > 0 {
		if c := m.chunks[n/chunkSize]; c != nil {
			clear(c[at:])
		}
	}
	return nil
}

func (m *memory) sync() error  { return nil }
func (m *memory) close() error { return nil }

// file is a store in a file; zeroed ranges become holes where the file system has them.
type file struct {
	f *os.File
	n int64
}

func openFile(path string, size int64) (*file, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	s := &file{f: f}
	if size == 0 {
		fi, err := f.Stat()
		if err != nil || fi.Size() == 0 {
			f.Close()
			return nil, fmt.Errorf("%s is empty, and no size is given", path)
		}
		size = fi.Size()
	}
	if err := s.resize(size); err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}

func (s *file) read(b []byte, off int64) error {
	_, err := s.f.ReadAt(b, off)
	return err
}

func (s *file) write(b []byte, off int64) error {
	_, err := s.f.WriteAt(b, off)
	return err
}

func (s *file) zero(off, n int64) error {
	err := unix.Fallocate(int(s.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	for b := make([]byte, min(n, 1<<20)); err != nil && n > 0; {
		part := min(n, int64(len(b)))
		if err := s.write(b[:part], off); err != nil {
			return err
		}
		if off, n = off+part, n-part; n == 0 {
			return nil
		}
	}
	return err
}

func (s *file) size() int64 { return s.n }

func (s *file) resize(n int64) error {
	if err := s.f.Truncate(n); err != nil {
		return err
	}
	s.n = n
	return nil
}

func (s *file) sync() error  { return s.f.Sync() }
func (s *file) close() error { return s.f.Close() }
