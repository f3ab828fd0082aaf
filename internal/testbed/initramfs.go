package testbed

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/ulikunitz/xz"
)

// cpio writes an archive in the "newc" format, which the kernel unpacks as its initramfs (Documentation/driver-api/early-userspace/
// buffer-format.rst). Errors are kept until close. The kernel accepts several archives in a row, so the modules of a kernel are archived
// once and the init program is put in front of them at each boot.
type cpio struct {
	w   io.Writer
	ino int
	err error
}

func newCPIO(w io.Writer) *cpio { return &cpio{w: w} }

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeChar = 0o020000
)

func (c *cpio) dir(name string)                         { c.entry(name, modeDir|0o755, 0, 0, nil) }
func (c *cpio) file(name string, perm uint32, b []byte) { c.entry(name, modeFile|perm, 0, 0, b) }
func (c *cpio) char(name string, perm, major, minor uint32) {
	c.entry(name, modeChar|perm, major, minor, nil)
}

func (c *cpio) entry(name string, mode, major, minor uint32, b []byte) {
	if c.err != nil {
		return
	}
	c.ino++
	nlink := 1
	var out bytes.Buffer
	fmt.Fprintf(&out, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.ino, mode, 0, 0, nlink, 0, len(b), 0, 0, major, minor, len(name)+1, 0, name)
	pad(&out)
	out.Write(b)
	pad(&out)
	_, c.err = c.w.Write(out.Bytes())
}

// pad fills up to a multiple of four bytes; every entry starts on one.
func pad(b *bytes.Buffer) {
	for b.Len()%4 != 0 {
		b.WriteByte(0)
	}
}

func (c *cpio) close() error {
	c.entry("TRAILER!!!", 0, 0, 0, nil)
	return c.err
}

// writeInitramfs writes the initramfs of one boot: the init program, the console it speaks to, and the kernel's boot modules.
func writeInitramfs(to, init, modules string) error {
	program, err := os.ReadFile(init)
	if err != nil {
		return err
	}
	archive, err := os.ReadFile(modules)
	if err != nil {
		return err
	}
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	w := newCPIO(f)
	w.dir("dev")
	w.char("dev/console", 0o600, 5, 1)
	w.file("init", 0o755, program)
	if err := w.close(); err != nil {
		return err
	}
	if _, err := f.Write(archive); err != nil {
		return err
	}
	return f.Close()
}

// readModule reads a kernel module, decompressed if need be.
func readModule(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil || !strings.HasSuffix(path, ".xz") {
		return b, err
	}
	r, err := xz.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if b, err = io.ReadAll(r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}
