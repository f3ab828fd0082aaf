package ublk

import (
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// FuzzDescriptor: whatever the driver's descriptor of a request says, the getters keep their bounds, the trace is one line, and no copy leaves the
// request.
func FuzzDescriptor(f *testing.F) {
	add := func(d uapi.UblksrvIoDesc, n, off int) {
		f.Add((*[unsafe.Sizeof(d)]byte)(unsafe.Pointer(&d))[:], n, off)
	}
	add(uapi.UblksrvIoDesc{OpFlags: uint32(OpRead), NrSectors: 8, StartSector: 2048}, 4096, 0)
	add(uapi.UblksrvIoDesc{OpFlags: uint32(OpWrite) | uint32(FlagFUA), NrSectors: 65536, StartSector: 1 << 60}, 1, 1<<25-1)
	add(uapi.UblksrvIoDesc{OpFlags: uint32(OpDiscard), NrSectors: 1<<32 - 1}, 1<<31, -1)
	add(uapi.UblksrvIoDesc{OpFlags: uapi.UBLK_IO_F_SHMEM_ZC | uint32(OpRead), NrSectors: 1, Addr: 1<<63 | 1<<32 - 1}, 512, 0)
	f.Fuzz(func(t *testing.T, b []byte, n, off int) {
		r := &Request{out: true}
		if len(b) < int(unsafe.Sizeof(r.desc)) {
			return
		}
		copy((*[unsafe.Sizeof(r.desc)]byte)(unsafe.Pointer(&r.desc))[:], b)
		if r.Len() < 0 || r.Len() != int(r.Sectors())*SectorSize || uint64(r.Sector()) != r.desc.StartSector {
			t.Fatalf("%v has %d bytes at %d", r, r.Len(), r.Sector())
		}
		if index, offset, ok := r.Shared(); ok && (index < 0 || offset < 0 || offset > 1<<32-1) {
			t.Fatalf("data at %d of buffer %d", offset, index)
		}
		if s := r.String(); s == "" || strings.ContainsAny(s, "\n\x00") {
			t.Fatalf("trace %q", s)
		}
		if n >= 0 && r.within(n, off) && (off < 0 || n > r.Len() || off+n > r.Len()) {
			t.Fatalf("%d bytes at %d are within %v", n, off, r)
		}
		// One byte beyond the end, and any copy of the wrong kind, is refused before the driver sees it.
		if err := r.CopyIn(make([]byte, 1), r.Len()); err != unix.EINVAL {
			t.Fatal(err)
		}
		if err := r.CopyOut(make([]byte, 1), r.Len()); err != unix.EINVAL {
			t.Fatal(err)
		}
	})
}
