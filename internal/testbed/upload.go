package testbed

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Bin is the folder in the guest for programs; it is first in PATH.
const Bin = "/usr/local/bin"

// Upload copies files and folders of the host into a folder of the guest, which is made when missing. Each keeps its own name and its
// permissions; links are followed.
//
// Programs belong there rather than on the share: running one from /host takes seconds, since 9p fetches it page by page each time.
func (g *Guest) Upload(ctx context.Context, to string, paths ...string) error {
	r, w := io.Pipe()
	go func() { w.CloseWithError(writeTar(w, paths)) }()
	defer r.Close()
	failed := &errorReader{r: r}
	var said bytes.Buffer
	code, err := g.Run(ctx, Command{Args: []string{"sh", "-c", `mkdir -p "$1" && exec tar -x -C "$1"`, "sh", to}, Stdin: failed}, &said, &said)
	switch {
	case failed.err != nil:
		return fmt.Errorf("copy to the guest's %s: %w", to, failed.err)
	case err != nil:
		return fmt.Errorf("copy to the guest's %s: %w", to, err)
	case code != 0:
		return fmt.Errorf("copy to the guest's %s: tar ended with status %d: %s", to, code, bytes.TrimSpace(said.Bytes()))
	}
	return nil
}

// errorReader remembers an error of the reader below, which the guest takes for the end of its input.
type errorReader struct {
	r   io.Reader
	err error
}

func (e *errorReader) Read(b []byte) (int, error) {
	n, err := e.r.Read(b)
	if err != nil && err != io.EOF {
		e.err = err
	}
	return n, err
}

// writeTar writes an archive of files and folders under their own names.
func writeTar(w io.Writer, paths []string) error {
	t := tar.NewWriter(w)
	for _, p := range paths {
		base := filepath.Dir(p)
		err := filepath.WalkDir(p, func(name string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := os.Stat(name)
			if err != nil {
				return err
			}
			h, err := tar.FileInfoHeader(info, "")
			if err != nil {
				return err
			}
			if h.Name, err = filepath.Rel(base, name); err != nil {
				return err
			}
			h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
			if err := t.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
				return err
			}
			f, err := os.Open(name)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(t, f)
			return err
		})
		if err != nil {
			return err
		}
	}
	return t.Close()
}
