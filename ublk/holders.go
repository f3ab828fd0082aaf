package ublk

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// HolderKind says how a block device is held.
type HolderKind string

// The kinds of holders.
const (
	HolderMount   HolderKind = "mount"   // Name is the mount point
	HolderSwap    HolderKind = "swap"    // Name is the path that was given to swapon(8)
	HolderDevice  HolderKind = "device"  // Name is a device on top: device mapper, md, bcache, loop
	HolderProcess HolderKind = "process" // Name is the process's, PID its number
)

// Holder is one user of a block device.
type Holder struct {
	Kind   HolderKind
	Device string // what is held: "ublkb3", or the partition "ublkb3p1"
	Name   string
	PID    int // of a process, else 0
}

func (h Holder) String() string {
	switch h.Kind {
	case HolderMount:
		return h.Device + " is mounted on " + h.Name
	case HolderSwap:
		return h.Device + " is swap space (" + h.Name + ")"
	case HolderDevice:
		return h.Device + " is part of " + h.Name
	default:
		return fmt.Sprintf("%s is open in process %d (%s)", h.Device, h.PID, h.Name)
	}
}

// Holders names who uses /dev/ublkbN and its partitions: mounts that process 1 or the caller sees, swap, devices stacked on top, and
// processes with an open descriptor. It reads /proc and /sys and never opens the block device, so it is safe in any process and in any
// state of the device. It is a snapshot, and users inside the kernel that leave no trace there (an iSCSI target's backstore) are not in
// it: TryStop is the judge, Holders the explanation.
//
// Errors: ErrNotFound when there is no block device of that number.
func Holders(id int) ([]Holder, error) {
	return scan{proc: "/proc", sys: "/sys"}.holders("ublkb" + strconv.Itoa(id))
}

// HoldersOf is [Holders] for several devices with one look at the processes of the system, which is most of the work. Devices that do not exist
// have none.
func HoldersOf(ids []int) (map[int][]Holder, error) {
	return scan{proc: "/proc", sys: "/sys"}.holdersOf(ids)
}

// List gives the numbers of the devices that exist, in ascending order; those that were never started, too. Without the driver there are
// none.
func List() ([]int, error) { return scan{sys: "/sys"}.list() }

// scan reads a system's state below two roots, which tests replace.
type scan struct{ proc, sys string }

// part is a block device or one of its partitions.
type part struct {
	name string
	rdev uint64
}

func (s scan) list() ([]int, error) {
	entries, err := os.ReadDir(filepath.Join(s.sys, "class/ublk-char"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ublk devices: %w", err)
	}
	var ids []int
	for _, e := range entries {
		if n, ok := strings.CutPrefix(e.Name(), "ublkc"); ok {
			if id, err := strconv.Atoi(n); err == nil && id >= 0 {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return ids, nil
}

func (s scan) holders(disk string) ([]Holder, error) {
	parts, err := s.parts(disk)
	if err != nil {
		return nil, err
	}
	return append(append(s.inKernel(parts), s.stacked(parts)...), s.processes(parts)...), nil
}

func (s scan) holdersOf(ids []int) (map[int][]Holder, error) {
	var all []part
	disks := make(map[string]int) // of a disk or partition
	found := make(map[int][]Holder)
	for _, id := range ids {
		parts, err := s.parts("ublkb" + strconv.Itoa(id))
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, p := range parts {
			disks[p.name] = id
		}
		all = append(all, parts...)
		found[id] = s.stacked(parts)
	}
	for _, h := range append(s.inKernel(all), s.processes(all)...) {
		id := disks[h.Device]
		found[id] = append(found[id], h)
	}
	return found, nil
}

// inKernel looks at mounts and swap space.
func (s scan) inKernel(parts []part) []Holder { return append(s.mounts(parts), s.swaps(parts)...) }

// parts gives the disk and its partitions with their device numbers.
func (s scan) parts(disk string) ([]part, error) {
	dir := filepath.Join(s.sys, "block", disk)
	rdev, err := readDev(filepath.Join(dir, "dev"))
	if err != nil {
		return nil, fmt.Errorf("holders of %s: %w: %w", disk, ErrNotFound, err)
	}
	parts := []part{{disk, rdev}}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("holders of %s: %w", disk, err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), disk+"p") {
			continue
		}
		if rdev, err := readDev(filepath.Join(dir, e.Name(), "dev")); err == nil {
			parts = append(parts, part{e.Name(), rdev})
		}
	}
	return parts, nil
}

// readDev reads "MAJOR:MINOR".
func readDev(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return parseDev(strings.TrimSpace(string(b)))
}

func parseDev(s string) (uint64, error) {
	major, minor, ok := strings.Cut(s, ":")
	a, errA := strconv.ParseUint(major, 10, 32)
	b, errB := strconv.ParseUint(minor, 10, 32)
	if !ok || errA != nil || errB != nil {
		return 0, fmt.Errorf("device number %q: want MAJOR:MINOR", s)
	}
	return unix.Mkdev(uint32(a), uint32(b)), nil
}

// mounts looks at the mounts of process 1 and of the caller, by device number and, for file systems with numbers of their own (btrfs), by
// source.
func (s scan) mounts(parts []part) []Holder {
	var found []Holder
	for _, who := range []string{"1", "self"} {
		b, err := os.ReadFile(filepath.Join(s.proc, who, "mountinfo"))
		if err != nil {
			continue // another user's process 1; the caller's own view is left
		}
		for _, m := range parseMountinfo(b) {
			for _, p := range parts {
				h := Holder{Kind: HolderMount, Device: p.name, Name: m.point}
				if (m.rdev == p.rdev || m.source == "/dev/"+p.name) && !slices.Contains(found, h) {
					found = append(found, h)
				}
			}
		}
	}
	return found
}

type mount struct {
	rdev          uint64
	point, source string
}

// parseMountinfo reads the lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)); lines that do not parse are left out.
func parseMountinfo(b []byte) []mount {
	var mounts []mount
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		sep := slices.Index(f, "-")
		if sep < 6 || len(f) < sep+3 {
			continue
		}
		rdev, err := parseDev(f[2])
		if err != nil {
			continue
		}
		mounts = append(mounts, mount{rdev, unescape(f[4]), unescape(f[sep+2])})
	}
	return mounts
}

// unescape undoes the octal escapes of /proc files: \040 is a space.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// swaps looks at /proc/swaps; the first line is a heading.
func (s scan) swaps(parts []part) []Holder {
	f, err := os.Open(filepath.Join(s.proc, "swaps"))
	if err != nil {
		return nil // a kernel without swap
	}
	defer f.Close()
	var found []Holder
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[1] != "partition" {
			continue
		}
		path := unescape(fields[0])
		for _, p := range parts {
			if path == "/dev/"+p.name || isDevice(path, p.rdev) {
				found = append(found, Holder{Kind: HolderSwap, Device: p.name, Name: path})
			}
		}
	}
	return found
}

// isDevice reports whether path is a node of the block device. stat(2) opens nothing.
func isDevice(path string, rdev uint64) bool {
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == rdev
}

// stacked looks at the holders directories of sysfs, and at the files behind loop devices.
func (s scan) stacked(parts []part) []Holder {
	var found []Holder
	disk := parts[0].name
	for _, p := range parts {
		dir := filepath.Join(s.sys, "block", disk, "holders")
		if p.name != disk {
			dir = filepath.Join(s.sys, "block", disk, p.name, "holders")
		}
		entries, _ := os.ReadDir(dir) // a disk that went away meanwhile has none
		for _, e := range entries {
			name := e.Name()
			if b, err := os.ReadFile(filepath.Join(s.sys, "block", name, "dm/name")); err == nil {
				name += " (" + strings.TrimSpace(string(b)) + ")"
			}
			found = append(found, Holder{Kind: HolderDevice, Device: p.name, Name: name})
		}
		loops, _ := filepath.Glob(filepath.Join(s.sys, "block/loop*/loop/backing_file"))
		for _, l := range loops {
			if b, err := os.ReadFile(l); err == nil && strings.TrimSpace(string(b)) == "/dev/"+p.name {
				found = append(found, Holder{Kind: HolderDevice, Device: p.name, Name: filepath.Base(filepath.Dir(filepath.Dir(l)))})
			}
		}
	}
	return found
}

// processes looks at the descriptors of all processes. A process that ends meanwhile, or that the caller may not look into, is left out.
func (s scan) processes(parts []part) []Holder {
	byPath, byNumber := make(map[string]string), make(map[uint64]string)
	for _, p := range parts {
		byPath["/dev/"+p.name], byNumber[p.rdev] = p.name, p.name
	}
	var found []Holder
	entries, _ := os.ReadDir(s.proc)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(s.proc, e.Name(), "fd")
		fds, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			path := filepath.Join(dir, fd.Name())
			link, err := os.Readlink(path)
			if err != nil || !strings.HasPrefix(link, "/") {
				continue // a socket, a pipe
			}
			// Only links that may be device nodes are looked up: a stat of a file on a dead network mount would hang.
			if !strings.HasPrefix(link, "/dev/") && !strings.Contains(link, "ublkb") {
				continue
			}
			name, ok := byPath[link]
			if !ok {
				var st unix.Stat_t
				if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
					continue
				}
				if name, ok = byNumber[st.Rdev]; !ok {
					continue
				}
			}
			if h := (Holder{Kind: HolderProcess, Device: name, Name: s.comm(pid), PID: pid}); !slices.Contains(found, h) {
				found = append(found, h)
			}
		}
	}
	return found
}

// comm is the name of a process.
func (s scan) comm(pid int) string {
	b, err := os.ReadFile(filepath.Join(s.proc, strconv.Itoa(pid), "comm"))
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(b))
}
