package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// This file is about files whose pages can be shared: memfds, and files on tmpfs and hugetlbfs.

// inode identifies a file in this boot. The kernel numbers the segments of SysV shared memory apart from all other files of the file system that
// they lie on with memfds and shared anonymous memory, so the same number occurs twice there (newseg in ipc/shm.c).
type inode struct {
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
	SysV bool   `json:"sysv,omitempty"`
}

// makeInode makes the identity of a file. path is as the kernel shows it in /proc; a memfd's begins with "/memfd:" whatever its name.
func makeInode(dev, ino uint64, path string) inode {
	return inode{dev, ino, strings.HasPrefix(path, "/SYSV") && strings.HasSuffix(path, " (deleted)")}
}

// compare orders files.
func (n inode) compare(m inode) int {
	sysv := 0
	if n.SysV != m.SysV {
		sysv = 1
		if m.SysV {
			sysv = -1
		}
	}
	return cmp.Or(cmp.Compare(n.Dev, m.Dev), cmp.Compare(n.Ino, m.Ino), sysv)
}

// describe returns the identity of what a link of /proc/PID/fd leads to.
func describe(link string) (inode, error) {
	var st unix.Stat_t
	if err := unix.Stat(link, &st); err != nil {
		return inode{}, err
	}
	path, err := os.Readlink(link)
	return makeInode(st.Dev, st.Ino, path), err
}

// memoryFile is a file whose pages can be shared.
type memoryFile struct {
	*os.File
	inode inode
	size  int64
	page  int64 // bytes of one page, 4096 or that of a huge page
}

// statMemory checks that f is a file whose pages can be pinned for long: regular, and on tmpfs (as a memfd is) or hugetlbfs.
func statMemory(f *os.File) (memoryFile, error) {
	m := memoryFile{File: f}
	var st unix.Stat_t
	var fst unix.Statfs_t
	err := control(f, func(fd int) (err error) {
		m.inode, err = describe(fmt.Sprintf("/proc/self/fd/%d", fd))
		return errors.Join(err, unix.Fstat(fd, &st), unix.Fstatfs(fd, &fst))
	})
	if err != nil {
		return m, fmt.Errorf("stat: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return m, errors.New("it is no regular file")
	}
	m.size = st.Size
	switch fst.Type {
	case unix.TMPFS_MAGIC:
		m.page = int64(os.Getpagesize()) // Bsize is that, too, and has been the size of a huge page with huge=always
	case unix.HUGETLBFS_MAGIC:
		m.page = fst.Bsize
	default:
		return m, fmt.Errorf("its file system (type %#x) writes pages back to a disk; only memfd, tmpfs and hugetlbfs can be registered", fst.Type)
	}
	return m, nil
}

// span checks a range of the file: whole pages that are there. length 0 is up to the end.
func (m *memoryFile) span(off, length int64) (int64, error) {
	if off < 0 || off%m.page != 0 || off >= m.size {
		return 0, fmt.Errorf("offset %d: expected a multiple of the page size, %d, below the size, %d", off, m.page, m.size)
	}
	if length == 0 {
		length = m.size - off
	}
	if length < 0 || length%m.page != 0 || length > m.size-off {
		return 0, fmt.Errorf("length %d: expected a multiple of the page size, %d, of at most %d", length, m.page, m.size-off)
	}
	return length, nil
}

// control runs f with the descriptor of a file.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// checkClient checks a descriptor that a program handed over: memory that it can neither take away nor has opened for reading only.
func checkClient(f *os.File) (memoryFile, error) {
	m, err := statMemory(f)
	if err != nil {
		return m, api.Errorf(api.ErrInvalidArgs, "the descriptor cannot be registered: %w", err)
	}
	var flags, seals int
	var sealErr error
	err = control(f, func(fd int) (err error) {
		flags, err = unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		seals, sealErr = unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
		return err
	})
	switch {
	case err != nil:
		return m, api.Errorf(api.ErrInvalidArgs, "the descriptor cannot be registered: %w", err)
	case flags&unix.O_ACCMODE != unix.O_RDWR || flags&unix.O_PATH != 0:
		return m, api.Errorf(api.ErrInvalidArgs, "the memfd is not open for reading and writing")
	case sealErr != nil || seals&unix.F_SEAL_SHRINK == 0:
		return m, api.Errorf(api.ErrInvalidArgs, "the memfd is not sealed against shrinking: make it with MFD_ALLOW_SEALING, set its size, then add F_SEAL_SHRINK")
	case seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0:
		return m, api.Errorf(api.ErrInvalidArgs, "the memfd is sealed against writing")
	}
	return m, nil
}

// openMemory opens a file that an administrator named.
func openMemory(path string) (memoryFile, error) {
	if !filepath.IsAbs(path) {
		return memoryFile{}, api.Errorf(api.ErrInvalidArgs, "%q: expected an absolute path", path)
	}
	// O_NONBLOCK: a path may lead to a FIFO.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return memoryFile{}, api.Errorf(api.ErrNotFound, "%s: no such file; it has to exist, in its full size, before it is registered", path)
	case err != nil:
		return memoryFile{}, api.Errorf(api.ErrInvalidArgs, "open %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	m, err := statMemory(f)
	if err != nil {
		_ = f.Close()
		return m, api.Errorf(api.ErrInvalidArgs, "%s cannot be registered: %w", path, err)
	}
	return m, nil
}

// newMemory makes a memfd of n bytes with pages that are all there, sealed so that its size stays as it is. It has huge pages of 2 MiB if n is a multiple
// of that and so many are free.
func newMemory(name string, n int64) (memoryFile, error) {
	const huge = 2 << 20
	var err error
	for _, flags := range []int{unix.MFD_HUGETLB | unix.MFD_HUGE_2MB, 0} {
		if flags != 0 && n%huge != 0 {
			continue
		}
		var m memoryFile
		if m, err = newMemfd(name, n, flags); err == nil {
			return m, nil
		}
	}
	return memoryFile{}, err
}

func newMemfd(name string, n int64, flags int) (memoryFile, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		return memoryFile{}, fmt.Errorf("memfd: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, n); err != nil {
		return memoryFile{}, fmt.Errorf("memfd of %d bytes: %w", n, err)
	}
	if err := unix.Fallocate(fd, 0, 0, n); err != nil {
		return memoryFile{}, fmt.Errorf("memfd of %d bytes: %w", n, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return memoryFile{}, fmt.Errorf("seal memfd: %w", err)
	}
	// The description that memfd_create made is not counted among the file's writers, which heldByOthers counts; one that was opened is.
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_RDWR, 0)
	if err != nil {
		return memoryFile{}, fmt.Errorf("open memfd: %w", err)
	}
	m, err := statMemory(f)
	if err == nil {
		err = m.scrub() // pages that were only allocated count as holes
	}
	if err != nil {
		_ = f.Close()
	}
	return m, err
}

// reopen makes another description of the same file, which heldByOthers sees for as long as somebody has it open or mapped.
func (m *memoryFile) reopen() (f *os.File, err error) {
	err = control(m.File, func(fd int) (err error) {
		f, err = os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_RDWR, 0)
		return err
	})
	return f, err
}

// heldByOthers tells whether somebody has the file open or mapped through a description other than this one. When sure is false the kernel does not tell
// for this kind of file, and what /proc shows of processes other than the given ones was taken.
//
// A write lease is granted only if the file has no other description that is open, and a mapping keeps its description open (fcntl(2), F_SETLEASE;
// check_conflicting_open in fs/locks.c).
func (m *memoryFile) heldByOthers(except ...int) (held, sure bool) {
	err := control(m.File, func(fd int) error {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
			return err
		}
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
		return err
	})
	switch {
	case err == nil:
		return false, true
	case errors.Is(err, unix.EAGAIN):
		return true, true
	}
	// hugetlbfs has no leases.
	return m.inode.usedBy(except...) != 0, false
}

// usedBy finds a process, besides the given ones, that has a file open or mapped. 0 is none.
func (n inode) usedBy(except ...int) int {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range procs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if slices.Contains(except, pid) {
			continue
		}
		fds, _ := filepath.Glob(dir + "/fd/*")
		for _, fd := range fds {
			if m, err := describe(fd); err == nil && m == n {
				return pid
			}
		}
		maps, err := readMaps(pid)
		if err != nil {
			continue
		}
		for _, m := range maps {
			if m.inode == n {
				return pid
			}
		}
	}
	return 0
}

// whole tells whether every page of the file is still there: who has it open can take pages out without changing its size.
func (m *memoryFile) whole() bool {
	hole := int64(-1)
	err := control(m.File, func(fd int) (err error) {
		hole, err = unix.Seek(fd, 0, unix.SEEK_HOLE)
		return err
	})
	return err == nil && hole == m.size
}

// scrub overwrites the file with zeroes.
func (m *memoryFile) scrub() (err error) {
	var mem []byte
	if err := control(m.File, func(fd int) (err error) {
		mem, err = unix.Mmap(fd, 0, int(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		return err
	}); err != nil {
		return fmt.Errorf("map: %w", err)
	}
	defer func() {
		// A page that was taken out and cannot be had again is SIGBUS.
		if p := recover(); p != nil {
			err = fmt.Errorf("page fault: %v", p)
		}
		if uerr := unix.Munmap(mem); err == nil {
			err = uerr
		}
	}()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	clear(mem)
	return nil
}

// fetchFile gets a descriptor of another process: the same description where the system allows that, else one of its own. Either way the file is the same.
func fetchFile(pid, fd int) (*os.File, error) {
	if pfd, err := unix.PidfdOpen(pid, 0); err == nil {
		n, err := unix.PidfdGetfd(pfd, fd, 0)
		_ = unix.Close(pfd)
		if err == nil {
			unix.CloseOnExec(n)
			return os.NewFile(uintptr(n), "memory"), nil
		}
	}
	return os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), os.O_RDWR, 0)
}

// readProc reads a file below /proc/PID.
func readProc(pid int, name string) ([]byte, error) {
	f, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), name))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(f)
}
