package scenario

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// onBus makes sure that the daemon is on the system bus.
func onBus(t testing.TB) {
	t.Helper()
	guestOnly(t)
	const policy = "/etc/dbus-1/system.d/org.iserd.Iser1.conf"
	if _, err := os.Stat(policy); err != nil {
		text, err := os.ReadFile("../../packaging/dbus/org.iserd.Iser1.conf")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(policy, text, 0o644); err != nil {
			t.Fatal(err)
		}
		must(t, "busctl", "call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "ReloadConfig")
	}
	control.need(t)
	waitFor(t, "the daemon is on the bus", 30*time.Second, func() error {
		if s := status(t).Bus; s != "connected" {
			return errors.New(s)
		}
		return nil
	})
}

// buffers lists shared memory.
func buffers(t testing.TB) api.BuffersReply {
	t.Helper()
	return query[api.BuffersReply](t, "buffer", "list")
}

// onlyArena waits until nothing but free slices is left.
func onlyArena(t testing.TB) {
	t.Helper()
	waitFor(t, "only free slices are left", 20*time.Second, func() error {
		r := buffers(t)
		for _, b := range r.Buffers {
			if b.State != api.BufferFree {
				return fmt.Errorf("buffer %d, a %s, is %s", b.ID, b.Kind, b.State)
			}
		}
		if r.Arena.Free != r.Arena.Slices || r.Arena.Slices != 2 {
			return fmt.Errorf("arena: %+v", r.Arena)
		}
		return nil
	})
}

const hugePagesKnob = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"

// setHugePages makes so many huge pages of 2 MiB, used ones among them.
func setHugePages(t testing.TB, n int) {
	t.Helper()
	if err := os.WriteFile(hugePagesKnob, []byte(strconv.Itoa(n)), 0); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(hugePagesKnob); strings.TrimSpace(string(got)) != strconv.Itoa(n) {
		t.Fatalf("%s huge pages of %d", got, n)
	}
}

// hugePages makes a hugetlbfs with room for n pages of 2 MiB.
func hugePages(t testing.TB, n int) (dir string) {
	t.Helper()
	setHugePages(t, n)
	dir = t.TempDir()
	must(t, "mount", "-t", "hugetlbfs", "none", dir)
	t.Cleanup(func() {
		run(t, "umount", dir)
		_ = os.WriteFile(hugePagesKnob, []byte("0"), 0)
	})
	return dir
}

// memoryFile makes a file of n bytes.
func memoryFile(t testing.TB, path string, n int64) string {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(path) })
	return path
}

// addBuffer registers a file, which is removed at the end of the test unless it was before.
func addBuffer(t testing.TB, args ...string) api.Buffer {
	t.Helper()
	r := query[api.BuffersReply](t, append([]string{"buffer", "add"}, args...)...)
	if len(r.Buffers) != 1 || r.Buffers[0].State != api.BufferReady {
		t.Fatalf("buffer add %v: %+v", args, r)
	}
	t.Cleanup(func() { run(t, "iserctl", "buffer", "remove", fmt.Sprint(r.Buffers[0].ID)) })
	return r.Buffers[0]
}

// hitRate checks that nearly all requests since before came from shared memory, and all bytes are accounted for.
func hitRate(t testing.TB, g *target, before map[uint16]api.Device) {
	t.Helper()
	for lun, d := range devices(t, g.name) {
		a, b := before[lun].Stats, d.Stats
		hits, misses := b.RequestsShared-a.RequestsShared, b.RequestsRegistered-a.RequestsRegistered
		if hits < 50 || misses*20 > hits {
			t.Errorf("%s: %d requests from shared memory, %d not\n%s", d.Path, hits, misses, iserctl(t, "buffer", "list"))
		}
		if moved := b.ReadBytes + b.WriteBytes; b.BytesShared+b.BytesRegistered != moved || b.RequestsShared+b.RequestsRegistered != b.Reads+b.Writes {
			t.Errorf("%s: tiers do not add up: %+v", d.Path, b)
		}
		if b.Errors != 0 {
			t.Errorf("%s: %d errors", d.Path, b.Errors)
		}
		if len(d.Warnings) != 0 {
			t.Errorf("%s: %q", d.Path, d.Warnings)
		}
	}
}

// sharedJob is a fio job with verified data in blocks of 512 bytes to 1 MiB, from memory that is named by fio's option mem.
func sharedJob(name, device, mem string, seed int) fioJob {
	return fioJob{name: name, file: device, options: []string{
		"rw=randrw", "bsrange=512-1m", "blockalign=512", "iodepth=4", "ioengine=io_uring", "direct=1", "size=16m", "mem=" + mem,
		"verify=crc32c", "verify_fatal=1", "serialize_overlap=1", "randrepeat=1", fmt.Sprintf("randseed=%d", seed),
	}}
}

// sharedJobMemory is what the job maps at most.
const sharedJobMemory = 6 * mib

// A program borrows memory, or brings its own, over the system bus: its data moves without a copy.
func TestSharedMemoryClient(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	onBus(t)
	g.login(t)
	dev := devices(t, g.name)[0].Path
	for _, args := range [][]string{nil, {"-memfd"}} {
		before := devices(t, g.name)
		out := must(t, "sharedmemory", append(args, "-overwrite", dev)...)
		t.Logf("%s", out)
		hitRate(t, g, before)
		var shared uint64
		if m := regexp.MustCompile(`(?m)^shared +(\d+) requests`).FindStringSubmatch(out); m != nil {
			shared, _ = strconv.ParseUint(m[1], 10, 64)
		}
		if shared < 200 {
			t.Errorf("the program says %d requests without a copy:\n%s", shared, out)
		}
		onlyArena(t)
	}
	g.logout(t)
}

// Programs that can be told where to put their memory: fio on hugetlbfs and on tmpfs.
func TestSharedMemoryFio(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 20 * mib}})
	onBus(t)
	dir := hugePages(t, 8)
	g.login(t)
	d := devices(t, g.name)[0]
	for _, c := range []struct{ name, mem, path string }{
		{"huge pages", "mmaphuge", filepath.Join(dir, "pool")},
		{"small pages", "mmapshared", "/dev/shm/pool"},
	} {
		t.Run(c.name, func(t *testing.T) {
			memoryFile(t, c.path, sharedJobMemory)
			b := addBuffer(t, c.path)
			before := devices(t, g.name)
			fio(t, []fioJob{sharedJob("fio", d.Path, c.mem+":"+c.path, 1)})
			hitRate(t, g, before)
			var after api.Buffer
			for _, x := range buffers(t).Buffers {
				if x.ID == b.ID {
					after = x
				}
			}
			if after.Requests < 50 || after.Bytes == 0 {
				t.Errorf("buffer: %+v", after)
			}
			t.Logf("\n%s%s", iserctl(t, "device", "stats"), iserctl(t, "buffer", "list"))
			iserctl(t, "buffer", "remove", fmt.Sprint(b.ID))
			// Without registration the same job is served with a copy.
			was := devices(t, g.name)[0].Stats
			fio(t, []fioJob{sharedJob("fio", d.Path, c.mem+":"+c.path, 2)})
			if now := devices(t, g.name)[0].Stats; now.RequestsShared != was.RequestsShared || now.RequestsRegistered == was.RequestsRegistered {
				t.Errorf("after the removal: %+v, before %+v", now, was)
			}
			onlyArena(t)
		})
	}
	g.logout(t)
}

// Two devices of two targets and two buffers, at the same time.
func TestSharedMemoryTwo(t *testing.T) {
	a := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 20 * mib}})
	b := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 20 * mib}})
	onBus(t)
	a.login(t)
	memoryFile(t, "/dev/shm/one", sharedJobMemory)
	one := addBuffer(t, "/dev/shm/one")
	b.login(t) // gets it before it starts
	memoryFile(t, "/dev/shm/two", sharedJobMemory)
	two := addBuffer(t, "/dev/shm/two")
	da, db := devices(t, a.name), devices(t, b.name)
	// Each job's memory serves the other device in a second run.
	for i, mem := range [][]string{{"/dev/shm/one", "/dev/shm/two"}, {"/dev/shm/two", "/dev/shm/one"}} {
		fio(t, []fioJob{sharedJob("a", da[0].Path, "mmapshared:"+mem[0], 2*i), sharedJob("b", db[0].Path, "mmapshared:"+mem[1], 2*i+1)})
	}
	hitRate(t, a, da)
	hitRate(t, b, db)
	for _, x := range buffers(t).Buffers {
		if (x.ID == one.ID || x.ID == two.ID) && (x.Requests < 100 || len(x.Devices) != 2) {
			t.Errorf("buffer %+v", x)
		}
	}
	iserctl(t, "buffer", "remove", fmt.Sprint(one.ID))
	iserctl(t, "buffer", "remove", fmt.Sprint(two.ID))
	a.logout(t)
	b.logout(t)
	onlyArena(t)
}

// unknowingRole makes the test binary a program that knows nothing of the daemon.
const unknowingRole = "ISERD_SCENARIO_UNKNOWING"

// unknowing writes a device from shared anonymous memory and reads it back, until it is killed or something is wrong.
func unknowing(dev string) error {
	const n = 128 << 10
	fd, err := unix.Open(dev, unix.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(-1, 0, 4*n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		return err
	}
	for i := uint64(1); ; i++ {
		src, dst := mem[512*(i%8):][:n], mem[2*n+512*(i%16):][:n]
		for k := 0; k < n; k += 512 {
			binary.NativeEndian.PutUint64(src[k:], i<<32+uint64(k))
		}
		at := int64(i%32) * n
		if got, err := unix.Pwrite(fd, src, at); err != nil || got != n {
			return fmt.Errorf("write at %d: %d, %w", at, got, err)
		}
		if got, err := unix.Pread(fd, dst, at); err != nil || got != n {
			return fmt.Errorf("read at %d: %d, %w", at, got, err)
		}
		if !bytes.Equal(src, dst) {
			return fmt.Errorf("round %d: what is at %d reads back differently", i, at)
		}
	}
}

// Processes that know nothing of the daemon and keep their I/O memory in shared mappings are adopted while they run: fio with SysV segments, and one with
// shared anonymous memory. Both compare what they read with what they wrote, before, while and after they are adopted.
func TestSharedMemoryAdopt(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 20 * mib}})
	onBus(t)
	g.login(t)
	dev := devices(t, g.name)[0].Path
	job := sharedJob("fio", dev, "shm", 1)
	job.options = append(job.options, "loops=1000", "runtime=120", "time_based=1")
	file := filepath.Join(t.TempDir(), "job")
	text := fmt.Sprintf("[global]\nthread=1\n[%s]\nfilename=%s\n%s\n", job.name, job.file, strings.Join(job.options, "\n"))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		cmd  *exec.Cmd
	}{
		{"shared anonymous memory", exec.Command(self, dev)}, {"SysV shared memory", exec.Command("fio", file)},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			c.cmd.Env, c.cmd.Dir = append(os.Environ(), unknowingRole+"=1"), t.TempDir()
			c.cmd.Stdout, c.cmd.Stderr = &out, &out
			if err := c.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := false
			defer func() {
				if !ended {
					c.cmd.Process.Kill()
					c.cmd.Wait()
				}
			}()
			pid := fmt.Sprint(c.cmd.Process.Pid)
			before := devices(t, g.name)
			progress(t, before)
			if a, b := before[0].Stats, devices(t, g.name)[0].Stats; a.RequestsShared != b.RequestsShared {
				t.Errorf("%d requests came from memory that is not registered", b.RequestsShared-a.RequestsShared)
			}
			r := query[api.BuffersReply](t, "buffer", "adopt", pid)
			if len(r.Buffers) == 0 || r.Buffers[0].PID != c.cmd.Process.Pid {
				t.Fatalf("adopted: %+v", r)
			}
			adopted := devices(t, g.name)
			waitFor(t, "requests from the adopted memory", 60*time.Second, func() error {
				a, b := adopted[0].Stats, devices(t, g.name)[0].Stats
				if n := b.RequestsShared - a.RequestsShared; n < 100 {
					return fmt.Errorf("%d, and %d others; adopted: %+v", n, b.RequestsRegistered-a.RequestsRegistered, r)
				}
				return nil
			})
			hitRate(t, g, adopted)
			// It goes on when it is let go; what is adopted again ends with it.
			iserctl(t, "buffer", "remove", "--pid", pid)
			onlyArena(t)
			progress(t, before)
			iserctl(t, "buffer", "adopt", pid)
			c.cmd.Process.Kill()
			err := c.cmd.Wait()
			ended = true
			if s := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() { // it would have ended by itself after a difference
				t.Errorf("%v: %.3000s", err, out.String())
			}
			onlyArena(t)
		})
	}
	if s := devices(t, g.name)[0].Stats; s.Errors != 0 {
		t.Errorf("%d errors", s.Errors)
	}
	g.logout(t)
}

// startHolder starts the example, which keeps its memory until it is killed.
func startHolder(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sharedmemory", append([]string{"-overwrite", "-hold", "-rounds", "10"}, args...)...)
	var out bytes.Buffer
	cmd.Stderr = &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Process.Kill(); cmd.Wait() })
	seen := ""
	buf := make([]byte, 4096)
	for !strings.Contains(seen, "tcp ") { // the last line
		n, err := stdout.Read(buf)
		seen += string(buf[:n])
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			t.Fatalf("%v: %s%s", args, seen, out.String())
		}
	}
	return cmd
}

// A program that vanishes loses what it had: its slice is overwritten and lent again, its own memory is no longer registered. And misuse is answered.
func TestSharedMemoryOwners(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	onBus(t)
	g.login(t)
	dev := devices(t, g.name)[0].Path
	first, second := startHolder(t, dev), startHolder(t, "-memfd", dev)
	third := startHolder(t, dev)
	r := buffers(t)
	if r.Arena.Lent != 2 || len(r.Buffers) != 3 {
		t.Fatalf("%+v", r)
	}
	if b, err := os.ReadFile("/sys/block/" + filepath.Base(dev) + "/queue/nomerges"); err != nil || strings.TrimSpace(string(b)) != "2" {
		t.Errorf("nomerges %q, %v", b, err)
	}
	over := run(t, "sharedmemory", "-overwrite", dev)
	if over.code == 0 || !strings.Contains(over.stderr, "all 2 slices") {
		t.Errorf("a third borrower: %d, %s", over.code, over.stderr)
	}
	// The control plane is replaced meanwhile: everybody keeps what they have.
	control.kill(t)
	control.need(t)
	onBus(t)
	if now := buffers(t); now.Arena.Lent != 2 || len(now.Buffers) != 3 || now.Arena.Slices != 2 {
		t.Errorf("after a restart: %+v", now)
	}
	for _, c := range []*exec.Cmd{first, second, third} {
		c.Process.Kill()
		c.Wait()
	}
	onlyArena(t)
	must(t, "sharedmemory", "-overwrite", dev) // which looks whether its memory is empty
	waitFor(t, "merging is on again", 10*time.Second, func() error {
		if b, err := os.ReadFile("/sys/block/" + filepath.Base(dev) + "/queue/nomerges"); err != nil || strings.TrimSpace(string(b)) != "0" {
			return fmt.Errorf("nomerges %q, %v", b, err)
		}
		return nil
	})

	conn, err := dbus.ConnectSystemBus()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	m := conn.Object("org.iserd.Iser1", "/org/iserd/Iser1/Manager")
	memfd := func(n int64, seals int) dbus.UnixFD {
		fd, err := unix.MemfdCreate("misuse", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Ftruncate(fd, n); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return dbus.UnixFD(fd)
	}
	file, err := os.CreateTemp("/var/tmp", "memory")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if err := file.Truncate(mib); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name   string
		method string
		arg    any
		want   string
	}{
		{"not sealed", "RegisterBuffer", memfd(mib, 0), api.ErrInvalidArgs},
		{"ordinary file", "RegisterBuffer", dbus.UnixFD(file.Fd()), api.ErrInvalidArgs},
		{"not whole pages", "RegisterBuffer", memfd(mib+512, unix.F_SEAL_SHRINK), api.ErrInvalidArgs},
		{"over the limit", "RegisterBuffer", memfd(5<<30, unix.F_SEAL_SHRINK), api.ErrLimitsExceeded},
		{"unknown buffer", "ReleaseBuffer", uint32(4711), api.ErrNotFound},
		{"no process", "AdoptProcess", uint32(1 << 22), api.ErrNotFound},
		{"array of descriptors", "RegisterBuffer", []dbus.UnixFD{memfd(mib, unix.F_SEAL_SHRINK)}, "org.freedesktop.DBus.Error.InvalidArgs"},
	} {
		var e dbus.Error
		if err := m.Call("org.iserd.Iser1.Manager."+x.method, 0, x.arg, map[string]dbus.Variant{}).Err; !errors.As(err, &e) || e.Name != x.want {
			t.Errorf("%s: %v, want %s", x.name, err, x.want)
		}
	}
	for _, x := range []struct {
		args []string
		code int
	}{
		{[]string{"add", file.Name()}, 7}, {[]string{"add", "/dev/shm/none"}, 21}, {[]string{"remove", "4711"}, 21}, {[]string{"adopt", "4194304"}, 21},
		{[]string{"adopt", "2"}, 27}, // a thread of the kernel has no memory
	} {
		r := run(t, "iserctl", append([]string{"buffer"}, x.args...)...)
		if r.code != x.code {
			t.Errorf("buffer %v: exit status %d, want %d: %s", x.args, r.code, x.code, r.stderr)
		}
		oneLine(t, r)
	}
	onlyArena(t)
	if left, _ := filepath.Glob("/run/iserd/buffers/*"); len(left) != 0 {
		t.Errorf("files %v", left)
	}
	g.logout(t)
}

// Buffers outlive the control process, and the data plane's death if their owner does.
func TestSharedMemoryRestart(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 20 * mib}})
	onBus(t)
	g.login(t)
	d := devices(t, g.name)[0]
	memoryFile(t, "/dev/shm/pool", sharedJobMemory)
	b := addBuffer(t, "/dev/shm/pool")
	wait := startFio(t, []fioJob{sharedJob("fio", d.Path, "mmapshared:/dev/shm/pool", 1)})
	progress(t, devices(t, g.name))
	control.kill(t)
	control.need(t)
	wait()
	hitRate(t, g, map[uint16]api.Device{0: {}})
	after := buffers(t)
	found := false
	for _, x := range after.Buffers {
		found = found || x.ID == b.ID && x.State == api.BufferReady && x.Path == b.Path && len(x.Devices) == 1 && x.Since.Equal(b.Since)
	}
	if !found {
		t.Errorf("buffer %d is not the same after the restart: %+v", b.ID, after)
	}

	pid := status(t).DataPlane.PID
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a new data plane", 30*time.Second, func() error {
		if s := status(t).DataPlane; s.PID == pid || s.State != api.DataPlaneUp {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	// The device stays, and so does what its driver knows of the memory.
	waitFor(t, "the device is served again", 60*time.Second, func() error {
		if x := devices(t, g.name)[0]; x.State != api.DeviceLive || x.Path != d.Path {
			return fmt.Errorf("%+v", x)
		}
		if s := query[api.SessionsReply](t, "session", "list").Sessions; len(s) != 1 || s[0].State != api.SessionUp {
			return fmt.Errorf("sessions %+v", s)
		}
		return nil
	})
	before := devices(t, g.name)
	fio(t, []fioJob{sharedJob("fio", before[0].Path, "mmapshared:/dev/shm/pool", 2)})
	hitRate(t, g, before)
	iserctl(t, "buffer", "remove", fmt.Sprint(b.ID))
	g.logout(t)
	onlyArena(t)
}

// copyFunctions are where the driver copies between the pages of a request and a buffer: in the mode that is used by a read or write of the character
// device, and below that by one function for all modes.
var copyFunctions = []string{"ublk_ch_read_iter", "ublk_ch_write_iter", "ublk_copy_user_pages"}

// driverFunctions lists the functions of the ublk driver. The list is long and reading it slow.
var driverFunctions = sync.OnceValues(func() (names []string, err error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// ffffffffc04d7b70 t ublk_copy_user_pages.isra.0	[ublk_drv]
		if rest, ok := bytes.CutSuffix(lines.Bytes(), []byte("\t[ublk_drv]")); ok {
			names = append(names, string(rest[bytes.LastIndexByte(rest, ' ')+1:]))
		}
	}
	return names, nil
})

// countCopies counts the calls of the copy functions while f runs, with the kernel's own tracing.
func countCopies(t testing.TB, f func()) (total int) {
	t.Helper()
	const dir = "/sys/kernel/tracing"
	if _, err := os.Stat(dir + "/kprobe_events"); err != nil {
		must(t, "mount", "-t", "tracefs", "tracefs", dir)
	}
	symbols, err := driverFunctions()
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, err = f.WriteString(text)
			f.Close()
		}
		if err != nil {
			t.Fatalf("tracing: %s: %q: %v", name, text, err)
		}
	}
	for i, name := range copyFunctions {
		symbol := ""
		for _, f := range symbols {
			// The compiler may have made a variant: NAME.isra.0.
			if base, variant, _ := strings.Cut(f, "."); base == name && !strings.Contains(variant, "cold") {
				symbol = f
			}
		}
		if symbol == "" {
			t.Fatalf("the driver has no function %s: the check needs another name", name)
		}
		write("kprobe_events", fmt.Sprintf("p:iserd/copy%d %s", i, symbol))
	}
	write("events/iserd/enable", "1")
	f()
	profile, err := os.ReadFile(dir + "/kprobe_profile")
	write("events/iserd/enable", "0")
	for i := range copyFunctions {
		write("kprobe_events", fmt.Sprintf("-:iserd/copy%d", i))
	}
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(string(profile)) {
		// Name, hits, misses.
		w := strings.Fields(line)
		if len(w) == 3 && strings.HasPrefix(w[0], "copy") {
			hits, herr := strconv.Atoi(w[1])
			missed, merr := strconv.Atoi(w[2])
			if herr != nil || merr != nil || missed != 0 {
				t.Errorf("kprobe_profile: %s", line)
			}
			total += hits
			found++
		}
	}
	if found != len(copyFunctions) {
		t.Fatalf("kprobe_profile has %d of %d functions:\n%s", found, len(copyFunctions), profile)
	}
	return total
}

// The proof that nothing is copied: the driver's copy functions are not entered once while a program does I/O from shared memory, and are for every
// request of one that does not.
func TestSharedMemoryNoCopy(t *testing.T) {
	g := newTarget(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	onBus(t)
	g.login(t)
	dev := devices(t, g.name)[0].Path
	for _, args := range [][]string{nil, {"-memfd"}} {
		before := devices(t, g.name)[0].Stats
		n := countCopies(t, func() { must(t, "sharedmemory", append(args, "-overwrite", "-rounds", "60", dev)...) })
		after := devices(t, g.name)[0].Stats
		requests := after.RequestsShared - before.RequestsShared
		if n != 0 || after.RequestsRegistered != before.RequestsRegistered || requests < 120 {
			t.Errorf("%v: the driver copied %d times; %d requests without a copy, %d with one", args, n, requests, after.RequestsRegistered-before.RequestsRegistered)
		}
		t.Logf("%v: %d requests, %d MiB, %d calls of %s", args, requests, (after.BytesShared-before.BytesShared)>>20, n, strings.Join(copyFunctions, ", "))
	}
	before := devices(t, g.name)[0].Stats
	n := countCopies(t, func() { must(t, "dd", "if="+dev, "of=/dev/null", "bs=64k", "count=64", "iflag=direct", "status=none") })
	after := devices(t, g.name)[0].Stats
	if requests := int(after.RequestsRegistered - before.RequestsRegistered); n < requests || requests < 64 || after.RequestsShared != before.RequestsShared {
		t.Errorf("ordinary memory: the driver copied %d times for %d requests, %d came without a copy", n, requests, after.RequestsShared-before.RequestsShared)
	}
	t.Logf("ordinary memory: %d calls", n)
	g.logout(t)
	onlyArena(t)
}

// What a device can do is shown, with the reason for what it cannot; over TCP there is a socket on the way.
func TestSharedMemoryShown(t *testing.T) {
	g := newTarget(t, kinds[1], []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	onBus(t)
	g.login(t)
	d := devices(t, g.name)[0]
	names, _ := json.Marshal(d.Tiers)
	if len(d.Tiers) != 3 || d.Tiers[0].Possible || d.Tiers[1].Possible || !d.Tiers[2].Possible || !strings.Contains(d.Tiers[0].Reason, "TCP") {
		t.Errorf("tiers %s", names)
	}
	if out := iserctl(t, "device", "show", d.Path); !strings.Contains(out, "tier tcp") {
		t.Errorf("%s", out)
	}
	must(t, "sharedmemory", "-overwrite", d.Path) // works all the same
	if b, err := os.ReadFile("/sys/block/" + filepath.Base(d.Path) + "/queue/scheduler"); err != nil || !strings.Contains(string(b), "[none]") && strings.TrimSpace(string(b)) != "none" {
		t.Errorf("scheduler %q, %v", b, err)
	}
	g.logout(t)
	onlyArena(t)
}
