package daemon

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// This file finds the shared memory of a process that knows nothing of the daemon, and watches the process.

// minimumMapping is the smallest mapping that is worth adopting, bytes.
const minimumMapping = 64 << 10

// mapping is a line of /proc/PID/maps.
type mapping struct {
	start, end uint64
	perms      string // "rw-s"
	offset     int64
	inode      inode
	path       string
}

// parseMaps reads the form of /proc/PID/maps. A line that makes no sense is left out.
//
//	7f1c2c000000-7f1c2c400000 rw-s 00000000 00:01 1028                       /memfd:pool (deleted)
func parseMaps(text []byte) []mapping {
	var out []mapping
	for line := range bytes.Lines(text) {
		var m mapping
		var major, minor uint32
		var ino uint64
		head, path, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), "/")
		if n, err := fmt.Sscanf(head, "%x-%x %s %x %x:%x %d", &m.start, &m.end, &m.perms, &m.offset, &major, &minor, &ino); n != 7 || err != nil {
			continue
		}
		if path != "" {
			m.path = "/" + path
		}
		m.inode = makeInode(unix.Mkdev(major, minor), ino, m.path)
		out = append(out, m)
	}
	return out
}

func readMaps(pid int) ([]mapping, error) {
	text, err := readProc(pid, "maps")
	return parseMaps(text), err
}

// writable tells whether others see what the process writes there.
func (m *mapping) writable() bool {
	return strings.HasPrefix(m.perms, "rw") && strings.HasSuffix(m.perms, "s")
}

// sharedRange is a range of a file that a process has mapped.
type sharedRange struct {
	memoryFile
	offset, length int64
	name           string // as the kernel shows it
}

// sharedMemory opens the shared writable mappings of a process that can be registered and have at least minimum bytes. Neighbours in one file are one,
// however they are mapped. notes tell what was left out.
func sharedMemory(pid int, minimum int64) (out []sharedRange, notes []string, err error) {
	maps, err := readMaps(pid)
	if err != nil {
		return nil, nil, noProcess(pid, err)
	}
	defer func() {
		if err != nil {
			closeRanges(out)
			out = nil
		}
	}()
	for _, m := range maps {
		if !m.writable() {
			continue
		}
		// Opening this way finds files that have no name, and finds exactly what is mapped.
		f, err := os.OpenFile(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.start, m.end), os.O_RDWR|unix.O_NONBLOCK, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // unmapped meanwhile
		}
		if errors.Is(err, fs.ErrPermission) {
			return out, notes, api.Errorf(api.ErrAccessDenied, "the mappings of process %d cannot be opened (CAP_SYS_ADMIN is needed): %w", pid, err)
		}
		if err != nil {
			notes = append(notes, fmt.Sprintf("%s: %v", m.path, err)) // a device that is no file, say
			continue
		}
		mf, err := statMemory(f)
		if err != nil {
			_ = f.Close()
			notes = append(notes, fmt.Sprintf("%s: %v", m.path, err))
			continue
		}
		c := sharedRange{memoryFile: mf, offset: m.offset, length: int64(m.end - m.start), name: m.path}
		// What lies beyond the end of the file has no pages, and a page that it ends in is left out.
		c.length = min(c.length, mf.size/mf.page*mf.page-c.offset)
		if c.length <= 0 {
			_ = f.Close()
			continue
		}
		out = append(out, c)
	}
	out = unite(out)
	kept := out[:0]
	for _, c := range out {
		if c.length < minimum {
			_ = c.Close()
			notes = append(notes, fmt.Sprintf("%s: %d bytes are fewer than the minimum of %d", c.name, c.length, minimum))
			continue
		}
		kept = append(kept, c)
	}
	return kept, notes, nil
}

// unite makes one of ranges of one file that touch or overlap.
func unite(in []sharedRange) []sharedRange {
	slices.SortStableFunc(in, func(a, b sharedRange) int {
		return cmp.Or(a.inode.compare(b.inode), cmp.Compare(a.offset, b.offset))
	})
	var out []sharedRange
	for _, c := range in {
		if n := len(out); n > 0 && out[n-1].inode == c.inode && c.offset <= out[n-1].offset+out[n-1].length {
			last := &out[n-1]
			last.length = max(last.length, c.offset+c.length-last.offset)
			_ = c.Close()
			continue
		}
		out = append(out, c)
	}
	return out
}

func closeRanges(list []sharedRange) {
	for _, c := range list {
		_ = c.Close()
	}
}

func noProcess(pid int, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return api.Errorf(api.ErrNotFound, "there is no process %d", pid)
	}
	return api.Errorf(api.ErrInternal, "process %d: %w", pid, err)
}

// process is a running process that cannot be mistaken for another one of the same number.
type process struct {
	pid   int
	start uint64   // clock ticks after boot
	uid   uint32   // effective
	fd    *os.File // pidfd
	maps  *os.File // of its memory as it was when opened: reads as empty when the process has ended or executed another program
}

// openProcess finds a process. want is its start time, 0 for any.
func openProcess(pid int, want uint64) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // a thread, or a number that no process has
		return nil, api.Errorf(api.ErrNotFound, "there is no process %d", pid)
	}
	if err != nil {
		return nil, noProcess(pid, err)
	}
	p := &process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	if p.start, err = startTime(pid); err == nil && want != 0 && p.start != want {
		err = unix.ESRCH
	}
	if err == nil {
		p.maps, err = os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	}
	var st unix.Stat_t
	if err == nil {
		err = unix.Stat(fmt.Sprintf("/proc/%d", pid), &st)
	}
	if err != nil {
		p.close()
		return nil, noProcess(pid, err)
	}
	p.uid = st.Uid
	return p, nil
}

// startTime reads field 22 of /proc/PID/stat.
func startTime(pid int) (uint64, error) {
	b, err := readProc(pid, "stat")
	if err != nil {
		return 0, err
	}
	// "PID (name) STATE ...", and the name may hold anything.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return 0, fmt.Errorf("stat of process %d has %d fields", pid, len(f)+2)
	}
	return strconv.ParseUint(f[19], 10, 64)
}

// wait returns when the process has ended, or close was called.
func (p *process) wait() {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, 0)
		return err == nil && n == 1 || err != nil && !errors.Is(err, syscall.EINTR)
	})
}

// mapped lists what the process has mapped; nothing when it has ended or executed another program.
func (p *process) mapped() []mapping {
	text, err := io.ReadAll(io.NewSectionReader(p.maps, 0, 1<<30))
	if err != nil {
		return nil
	}
	return parseMaps(text)
}

// has tells whether a range of a file is still mapped, shared and writable.
func has(maps []mapping, n inode, off, length int64) bool {
	for _, m := range maps {
		if m.inode == n && m.writable() && m.offset < off+length && off < m.offset+int64(m.end-m.start) {
			return true
		}
	}
	return false
}

func (p *process) close() {
	_ = p.fd.Close()
	if p.maps != nil {
		_ = p.maps.Close()
	}
}
