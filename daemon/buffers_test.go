package daemon_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
	"iserd.org/iserd/daemon/daemontest"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/internal/require"
)

var (
	alice = daemon.Owner{UID: 1000, Name: ":1.10"}
	bob   = daemon.Owner{UID: 1001, Name: ":1.11"}
)

// memfd makes memory as a program would, sealed unless told otherwise.
func memfd(t *testing.T, n int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("daemon test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

// shm makes a file on tmpfs.
func shm(t *testing.T, n int64) string {
	t.Helper()
	f, err := os.CreateTemp("/dev/shm", "iserd")
	if err != nil {
		require.Need(t, "root", err)
	}
	t.Cleanup(func() { os.Remove(f.Name()) })
	defer f.Close()
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// registered tells how many buffers each device knows, by the driver; data plane and driver have to agree.
func (l *lab) registered() map[int]int {
	l.t.Helper()
	bound := make(map[int]int)
	for _, b := range l.Plane.Buffers() {
		for _, x := range b.Bindings {
			bound[x.UblkID]++
		}
	}
	out := make(map[int]int)
	for _, id := range l.Blocks.Left() {
		if out[id] = l.Blocks.Registered(id); out[id] != bound[id] {
			l.t.Errorf("device %d: the driver knows %d buffers, the data plane %d", id, out[id], bound[id])
		}
	}
	return out
}

func (l *lab) wantRegistered(d *daemontest.Daemon, want ...int) {
	l.t.Helper()
	eventually(l.t, d, fmt.Sprintf("registration of %v", want), func() bool {
		for id, n := range want {
			if l.Blocks.Registered(id) != n {
				return false
			}
		}
		return true
	})
	settled(l.t, d)
	for id, n := range l.registered() {
		if n != want[id] {
			l.t.Errorf("device %d knows %d buffers, want %d", id, n, want[id])
		}
	}
}

// settled waits until no buffer is on its way.
func settled(t *testing.T, d *daemontest.Daemon) {
	t.Helper()
	eventually(t, d, "rest", func() bool {
		for _, b := range d.Buffers(context.Background()).Buffers {
			for _, x := range b.Devices {
				if x.State == api.BufferPending && !strings.Contains(x.Reason, "session is") {
					return false
				}
			}
		}
		return true
	})
}

func find(t *testing.T, d *daemontest.Daemon, id uint32) api.Buffer {
	t.Helper()
	for _, b := range d.Buffers(context.Background()).Buffers {
		if b.ID == id {
			return b
		}
	}
	t.Fatalf("no buffer %d", id)
	return api.Buffer{}
}

// A file on tmpfs is registered live with every device, then with those that come later before they start, and goes in the right order.
func TestBufferPath(t *testing.T) {
	l := newLab(t)
	l.Config.SharedArena = 0
	d := l.start()
	ctx := context.Background()
	l.login(d)
	path := shm(t, 1<<20)
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	b := r.Buffers[0]
	if b.Kind != api.BufferPath || b.State != api.BufferReady || b.Length != 1<<20 || b.Path != path || b.Requests != 7 || b.Bytes != 28672 || len(b.Devices) != 2 ||
		b.Devices[1].Path != "/dev/ublkb1" || b.Devices[1].State != api.BufferRegistered || r.Arena.Slices != 0 || r.Arena.Reason == "" {
		t.Errorf("reply %+v", r)
	}
	l.wantRegistered(d, 1, 1)
	eventually(t, d, "merging off", func() bool {
		return l.Blocks.Attribute(0, "nomerges") == "2" && l.Blocks.Attribute(1, "nomerges") == "2"
	})
	if s := l.Blocks.Attribute(0, "scheduler"); s != "none" {
		t.Errorf("scheduler %q", s)
	}
	other := iqn + "-other"
	l.Plane.AddTarget(other, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	if _, err := d.Login(ctx, api.LoginRequest{Target: other, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	if calls := l.Blocks.Calls(); !slices.Contains(calls, "reg 2") || slices.Index(calls, "reg 2") > slices.Index(calls, "start 2") {
		t.Errorf("not registered before the start: %v", calls)
	}
	l.wantRegistered(d, 1, 1, 1)
	// Only for one device, and a part of the file.
	part := shm(t, 1<<20)
	r, err = d.AddPath(ctx, api.BufferAddRequest{Path: part, Offset: 8192, Length: 4096, Devices: []string{"/dev/ublkb1"}})
	if err != nil || len(r.Buffers[0].Devices) != 1 || r.Buffers[0].Length != 4096 {
		t.Errorf("part: %+v, %v", r, err)
	}
	l.wantRegistered(d, 1, 2, 1)
	if got := d.Devices(ctx, false).Devices; got[1].Buffers != 2 || !got[1].Tiers[0].Possible {
		t.Errorf("device %+v", got[1])
	}
	// A logout frees what is registered without a word to the driver, and the limited buffer is there for the same unit again.
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	for _, c := range l.Blocks.Calls() {
		if strings.HasPrefix(c, "unreg") {
			t.Errorf("%s before the device went", c)
		}
	}
	l.login(d)
	l.wantRegistered(d, 1, 2, 1)
	for _, x := range d.Buffers(ctx).Buffers {
		out, err := d.RemoveBuffer(ctx, x.ID, nil)
		if err != nil || len(out.Buffers) != 1 || out.Buffers[0].State != api.BufferRemoving {
			t.Errorf("remove: %+v, %v", out, err)
		}
	}
	l.wantRegistered(d, 0, 0, 0)
	if left := l.Plane.Buffers(); len(left) != 0 || len(d.Buffers(ctx).Buffers) != 0 {
		t.Errorf("left: %+v", left)
	}
	eventually(t, d, "merging on", func() bool {
		return l.Blocks.Attribute(0, "nomerges") == "0" && l.Blocks.Attribute(2, "nomerges") == "0"
	})
	for _, target := range []string{iqn, other} {
		if _, err := d.Logout(ctx, api.LogoutRequest{Session: target}); err != nil {
			t.Error(err)
		}
	}
	l.clean()
}

// Memory that does not qualify, or is too much, is refused with a reason, and nothing is left.
func TestBufferMisuse(t *testing.T) {
	l := newLab(t)
	l.Config.SharedLimit, l.Config.SharedUserLimit = 4, 2
	d := l.start()
	ctx := context.Background()
	l.login(d)
	ordinary := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(ordinary, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	var fst unix.Statfs_t
	if err := unix.Statfs(ordinary, &fst); err != nil || fst.Type == unix.TMPFS_MAGIC {
		t.Skip("the temporary directory is on tmpfs")
	}
	for _, x := range []struct {
		name string
		r    api.BufferAddRequest
		want string
		says string
	}{
		{"ordinary file", api.BufferAddRequest{Path: ordinary}, api.ErrInvalidArgs, "only memfd, tmpfs and hugetlbfs"},
		{"no file", api.BufferAddRequest{Path: "/dev/shm/iserd-none"}, api.ErrNotFound, "no such file"},
		{"relative", api.BufferAddRequest{Path: "x"}, api.ErrInvalidArgs, "absolute"},
		{"directory", api.BufferAddRequest{Path: "/dev/shm"}, api.ErrInvalidArgs, "/dev/shm"},
		{"device", api.BufferAddRequest{Path: "/dev/zero"}, api.ErrInvalidArgs, "no regular file"},
		{"empty", api.BufferAddRequest{Path: shm(t, 0)}, api.ErrInvalidArgs, "below the size"},
		{"not whole pages", api.BufferAddRequest{Path: shm(t, 5000)}, api.ErrInvalidArgs, "multiple of the page size"},
		{"odd offset", api.BufferAddRequest{Path: shm(t, 8192), Offset: 100}, api.ErrInvalidArgs, "offset 100"},
		{"huge offset", api.BufferAddRequest{Path: shm(t, 8192), Offset: 1<<64 - 4096}, api.ErrInvalidArgs, "offset"},
		{"too long", api.BufferAddRequest{Path: shm(t, 8192), Length: 12288}, api.ErrInvalidArgs, "length 12288"},
		{"unknown device", api.BufferAddRequest{Path: shm(t, 8192), Devices: []string{"/dev/ublkb9"}}, api.ErrNotFound, "/dev/ublkb9"},
		{"over the limit", api.BufferAddRequest{Path: shm(t, 5<<20)}, api.ErrLimitsExceeded, "shared_limit"},
	} {
		if _, err := d.AddPath(ctx, x.r); !api.Is(err, x.want) || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: %s: %v; want %s, %q", x.name, api.NameOf(err), err, x.want, x.says)
		}
	}
	readOnly, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", memfd(t, 8192, unix.F_SEAL_SHRINK).Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	disk, err := os.OpenFile(ordinary, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	pipe, _, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	for _, x := range []struct {
		name string
		f    *os.File
		want string
		says string
	}{
		{"not sealed", memfd(t, 8192, 0), api.ErrInvalidArgs, "F_SEAL_SHRINK"},
		{"sealed against writing", memfd(t, 8192, unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE), api.ErrInvalidArgs, "writing"},
		{"future writing", memfd(t, 8192, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE), api.ErrInvalidArgs, "writing"},
		{"read-only", readOnly, api.ErrInvalidArgs, "reading and writing"},
		{"ordinary file", disk, api.ErrInvalidArgs, "only memfd"},
		{"pipe", pipe, api.ErrInvalidArgs, "no regular file"},
		{"empty", memfd(t, 0, unix.F_SEAL_SHRINK), api.ErrInvalidArgs, "0 bytes"},
		{"not whole pages", memfd(t, 5000, unix.F_SEAL_SHRINK), api.ErrInvalidArgs, "5000 bytes"},
		{"over the user's limit", memfd(t, 3<<20, unix.F_SEAL_SHRINK), api.ErrLimitsExceeded, "user 1000"},
	} {
		if _, err := d.AddClient(ctx, alice, x.f, nil); !api.Is(err, x.want) || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: %s: %v; want %s, %q", x.name, api.NameOf(err), err, x.want, x.says)
		}
	}
	if _, err := d.RemoveBuffer(ctx, 4711, nil); !api.Is(err, api.ErrNotFound) {
		t.Errorf("unknown id: %v", err)
	}
	if _, err := d.RemoveProcess(ctx, 4711); !api.Is(err, api.ErrNotFound) {
		t.Errorf("unknown process: %v", err)
	}
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: 1 << 30}); !api.Is(err, api.ErrNotFound) {
		t.Errorf("no process: %v", err)
	}
	// Twice the same memory, also in part.
	f := memfd(t, 1<<20, unix.F_SEAL_SHRINK)
	b, err := d.AddClient(ctx, alice, f, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.AddClient(ctx, bob, f, nil); !api.Is(err, api.ErrInvalidArgs) || !strings.Contains(err.Error(), fmt.Sprintf("buffer %d", b.ID)) {
		t.Errorf("twice: %v", err)
	}
	if _, err := d.RemoveBuffer(ctx, b.ID, func(string) error { return api.Errorf(api.ErrAccessDenied, "no") }); !api.Is(err, api.ErrAccessDenied) {
		t.Errorf("removal by somebody else: %v", err)
	}
	// Refused by a driver, or by the data plane.
	l.Blocks.Fail("reg", fmt.Errorf("REG_BUF: %w", unix.EFAULT))
	if _, err := d.AddClient(ctx, alice, memfd(t, 4096, unix.F_SEAL_SHRINK), nil); err == nil || !strings.Contains(err.Error(), "bad address") {
		t.Errorf("driver refuses: %v", err)
	}
	l.Plane.Fail(ipc.MethodBufferAdd, 0, &ipc.Error{Code: api.ErrLimitsExceeded, Text: "no room for a registration"})
	if _, err := d.AddClient(ctx, alice, memfd(t, 4096, unix.F_SEAL_SHRINK), nil); !api.Is(err, api.ErrLimitsExceeded) {
		t.Errorf("data plane refuses: %v", err)
	}
	l.Plane.Fail(ipc.MethodBufferBind, 0, &ipc.Error{Code: "NotFound", Text: "no"})
	if _, err := d.AddClient(ctx, alice, memfd(t, 4096, unix.F_SEAL_SHRINK), nil); !api.Is(err, api.ErrNotFound) {
		t.Errorf("data plane refuses to bind: %v", err)
	}
	l.wantRegistered(d, 3, 3) // the arena and the one that was right
	d.OwnerGone(alice.Name)
	l.wantRegistered(d, 2, 2)
	eventually(t, d, "only the arena", func() bool { return len(d.Buffers(ctx).Buffers) == 2 && len(l.Plane.Buffers()) == 2 })
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Fatal(err)
	}
	l.clean()
}

// Memory that is longer than one command to the driver takes goes in parts, all or none.
func TestBufferParts(t *testing.T) {
	l := newLab(t)
	l.Config.SharedArena, l.Config.SharedLimit = 0, 16<<10
	d := l.start()
	ctx := context.Background()
	l.login(d)
	path := shm(t, 9<<30) // nothing of it is touched
	l.Plane.Fail(ipc.MethodBufferAdd, 1, &ipc.Error{Code: api.ErrLimitsExceeded, Text: "no room"})
	if _, err := d.AddPath(ctx, api.BufferAddRequest{Path: path}); !api.Is(err, api.ErrLimitsExceeded) {
		t.Errorf("second part refused: %v", err)
	}
	if left := l.Plane.Buffers(); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: path})
	if err != nil || len(r.Buffers) != 1 || r.Buffers[0].Length != 9<<30 || r.Buffers[0].Requests != 21 {
		t.Fatalf("%+v, %v", r, err)
	}
	l.wantRegistered(d, 3, 3)
	var lengths []int64
	for _, b := range l.Plane.Buffers() {
		lengths = append(lengths, b.Length)
	}
	if want := []int64{4 << 30, 4 << 30, 1 << 30}; !slices.Equal(lengths, want) {
		t.Errorf("parts of %v bytes, want %v", lengths, want)
	}
	d.Kill()
	d = l.start()
	if got := d.Buffers(ctx).Buffers; len(got) != 1 || got[0].ID != r.Buffers[0].ID || got[0].Length != 9<<30 || got[0].State != api.BufferReady {
		t.Errorf("after a restart: %+v", got)
	}
	next, err := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 4096)})
	if err != nil || next.Buffers[0].ID != r.Buffers[0].ID+3 {
		t.Errorf("next: %+v, %v", next, err)
	}
	for _, id := range []uint32{r.Buffers[0].ID, next.Buffers[0].ID} {
		if _, err := d.RemoveBuffer(ctx, id, nil); err != nil {
			t.Error(err)
		}
	}
	l.wantRegistered(d, 0, 0)
	eventually(t, d, "the end", func() bool { return len(l.Plane.Buffers()) == 0 })
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// A device whose session is not up is left alone until it is.
func TestBufferWaits(t *testing.T) {
	l := newLab(t)
	l.Config.SharedArena = 0
	d := l.start()
	ctx := context.Background()
	l.login(d)
	other := iqn + "-other"
	l.Plane.AddTarget(other, &daemontest.Target{Units: []ipc.Unit{daemontest.Disk(0, 1<<20)}})
	if _, err := d.Login(ctx, api.LoginRequest{Target: other, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	state := func(want string) {
		t.Helper()
		eventually(t, d, want, func() bool {
			return slices.ContainsFunc(d.Sessions().Sessions, func(s api.Session) bool { return s.Target == iqn && s.State == want })
		})
	}
	l.Plane.SetGroup(iqn, ipc.GroupRecovering, nil)
	state(api.SessionRecovering)
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 8192)})
	if err != nil {
		t.Fatal(err)
	}
	b := r.Buffers[0]
	if b.State != api.BufferWaiting || b.Devices[0].State != api.BufferPending || b.Devices[0].Reason != "the session is recovering" || b.Devices[2].State != api.BufferRegistered {
		t.Errorf("while recovering: %+v", b)
	}
	l.wantRegistered(d, 0, 0, 1)
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	l.wantRegistered(d, 1, 1, 1)
	if b := find(t, d, b.ID); b.State != api.BufferReady {
		t.Errorf("after: %+v", b)
	}
	l.Plane.SetGroup(iqn, ipc.GroupRecovering, nil)
	state(api.SessionRecovering)
	r, err = d.RemoveBuffer(ctx, b.ID, nil)
	if err != nil || r.Buffers[0].State != api.BufferRemoving || len(r.Buffers[0].Devices) != 2 {
		t.Errorf("removal while recovering: %+v, %v", r, err)
	}
	l.wantRegistered(d, 1, 1, 0)
	if len(l.Plane.Buffers()) != 1 {
		t.Error("the data plane let go of memory that a device still knows")
	}
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	l.wantRegistered(d, 0, 0, 0)
	eventually(t, d, "the end", func() bool { return len(l.Plane.Buffers()) == 0 && len(d.Buffers(ctx).Buffers) == 0 })
	// A session that failed is taken down with its devices, and a removal that waited for it is over.
	r, err = d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 8192)})
	if err != nil {
		t.Fatal(err)
	}
	l.Plane.SetGroup(iqn, ipc.GroupFailed, &ipc.Error{Code: "ConnectionFailed", Text: "gone"})
	state(api.SessionFailed)
	if r, err = d.RemoveBuffer(ctx, r.Buffers[0].ID, nil); err != nil || len(r.Buffers[0].Devices) != 2 {
		t.Errorf("removal: %+v, %v", r, err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	eventually(t, d, "the end", func() bool { return len(l.Plane.Buffers()) == 0 && len(d.Buffers(ctx).Buffers) == 0 })
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: other}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// A command to the driver that does not come through in time is tried again; meanwhile other devices are served.
func TestBufferStall(t *testing.T) {
	t.Cleanup(daemon.Hurry(50*time.Millisecond, time.Second))
	l := newLab(t)
	l.Config.SharedArena, l.Config.ControlTimeout = 0, 300*time.Millisecond
	d := l.start()
	ctx := context.Background()
	l.login(d)
	l.Blocks.Stall(0, true)
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 8192)})
	if err != nil {
		t.Fatal(err)
	}
	b := r.Buffers[0]
	if b.State != api.BufferWaiting || b.Devices[0].State != api.BufferPending || !strings.Contains(b.Devices[0].Reason, "deadline") || b.Devices[1].State != api.BufferRegistered {
		t.Errorf("while stalled: %+v", b)
	}
	l.Blocks.Stall(0, false)
	l.wantRegistered(d, 1, 1)
	l.Blocks.Stall(1, true)
	if _, err := d.RemoveBuffer(ctx, b.ID, nil); err != nil {
		t.Error(err)
	}
	l.Blocks.Stall(1, false)
	l.wantRegistered(d, 0, 0)
	eventually(t, d, "the end", func() bool { return len(l.Plane.Buffers()) == 0 && len(d.Buffers(ctx).Buffers) == 0 })
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// The next control plane goes on with what there is, and finishes or undoes what the last one had begun.
func TestBufferTakeOver(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.login(d)
	alive := func(names ...string) func(string) bool {
		return func(n string) bool { return slices.Contains(names, n) }
	}
	d.BusJoined("bus1", alive())
	var ids []uint32
	for _, o := range []daemon.Owner{alice, bob} {
		b, err := d.AddClient(ctx, o, memfd(t, 1<<20, unix.F_SEAL_SHRINK), nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, b.ID)
	}
	slice, f, err := d.Borrow(ctx, alice)
	if err != nil {
		t.Fatal(err)
	}
	mine := mapAll(t, f)
	path := shm(t, 1<<20)
	if _, err := d.AddPath(ctx, api.BufferAddRequest{Path: path}); err != nil {
		t.Fatal(err)
	}
	l.wantRegistered(d, 5, 5)
	before := d.Buffers(ctx)
	d.Kill()
	d = l.start()
	d.BusJoined("bus1", alive(alice.Name))
	if got := find(t, d, slice.ID); got.State != api.BufferLent || got.Owner != alice.Name || got.UID != 1000 {
		t.Errorf("slice: %+v", got)
	}
	l.wantRegistered(d, 4, 4) // bob is gone
	var after []api.Buffer
	for _, b := range before.Buffers {
		if b.ID != ids[1] {
			after = append(after, b)
		}
	}
	eventually(t, d, "the end of what was bob's", func() bool { return len(d.Buffers(ctx).Buffers) == len(after) })
	if got := d.Buffers(ctx); !same(got.Buffers, after) || got.Arena != before.Arena {
		t.Errorf("after\n%+v\nbefore\n%+v", got, before)
	}
	// New memory gets numbers of its own, also after the one with the highest is gone.
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 4096)})
	if err != nil || slices.Contains([]uint32{before.Buffers[0].ID, before.Buffers[4].ID, ids[0]}, r.Buffers[0].ID) {
		t.Errorf("new: %+v, %v", r, err)
	}
	extra := r.Buffers[0].ID
	d.Kill()

	// What a daemon leaves that is killed at the worst moment. Registered and not bound:
	orphan := memfd(t, 4096, unix.F_SEAL_SHRINK)
	bounded, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	index, err := l.Blocks.RegisterBuffer(bounded, 0, orphan, 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(l.RunDir(), "buffers", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("device-0", `{"part":4000}`)
	// Unregistered and still bound; the buffer was being removed:
	var bound int
	for _, b := range l.Plane.Buffers() {
		if b.ID == extra {
			for _, x := range b.Bindings {
				if x.UblkID == 1 {
					bound = x.Index
				}
			}
		}
	}
	if err := l.Blocks.UnregisterBuffer(bounded, 1, bound); err != nil {
		t.Fatal(err)
	}
	write("device-1", fmt.Sprintf(`{"part":%d,"unregister":true,"index":%d}`, extra, bound))
	write(fmt.Sprintf("%d.unsettled", extra), "")
	write("4711.unsettled", "")
	write("slice-4711.json", "{")
	write("device-77", "{}")
	d = l.start()
	d.BusJoined("bus1", alive(alice.Name))
	l.wantRegistered(d, 4, 4)
	t.Logf("orphan had index %d", index)
	eventually(t, d, "the end of what was being removed", func() bool { return len(d.Buffers(ctx).Buffers) == len(after) })
	if got := d.Buffers(ctx); !same(got.Buffers, after) {
		t.Errorf("after the worst\n%+v\nbefore\n%+v", got, after)
	}
	files, _ := filepath.Glob(filepath.Join(l.RunDir(), "buffers", "*"))
	if len(files) != 1 || filepath.Base(files[0]) != fmt.Sprintf("slice-%d.json", slice.ID) {
		t.Errorf("files %v", files)
	}
	// Another bus has other programs under the same names.
	copy(mine, "secret")
	unmap(t, mine)
	d.Kill()
	d = l.start()
	d.BusJoined("bus2", alive(alice.Name))
	l.wantRegistered(d, 3, 3)
	eventually(t, d, "the slice is free", func() bool { return find(t, d, slice.ID).State == api.BufferFree })
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// same compares what two daemons say of buffers.
func same(a, b []api.Buffer) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}

// A data plane that dies, or only its connection: memory whose owner is there stays registered.
func TestBufferDataPlaneRestart(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.login(d)
	path := shm(t, 1<<20)
	r, err := d.AddPath(ctx, api.BufferAddRequest{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Plane.Cut(l.RunDir()); err != nil {
		t.Fatal(err)
	}
	eventually(t, d, "the connection", func() bool { return d.Status(ctx).DataPlane.State == api.DataPlaneUp })
	l.wantRegistered(d, 3, 3)
	l.Plane.Kill()
	l.Blocks.ServerDied()
	eventually(t, d, "a new data plane", func() bool { return l.Plane.Starts() == 2 && len(l.Plane.Buffers()) == 3 })
	// The driver still has it registered, and the new data plane is told by which numbers.
	eventually(t, d, "the devices", func() bool {
		bound := 0
		for _, b := range l.Plane.Buffers() {
			bound += len(b.Bindings)
		}
		return bound == 6
	})
	if b := find(t, d, r.Buffers[0].ID); b.Path != path || len(b.Devices) != 2 || b.State != api.BufferReady {
		t.Errorf("buffer %+v", b)
	}
	l.Plane.SetGroup(iqn, ipc.GroupUp, nil)
	l.wantRegistered(d, 3, 3)
	if _, err := d.RemoveBuffer(ctx, r.Buffers[0].ID, nil); err != nil {
		t.Error(err)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

func mapAll(t *testing.T, f *os.File) []byte {
	t.Helper()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	// As a program would: through a descriptor of its own of the same description.
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	m, err := unix.Mmap(fd, 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func unmap(t *testing.T, m []byte) {
	t.Helper()
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
}

// Slices are lent to one program at a time, and come back empty.
func TestArena(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	d.BusJoined("bus", func(string) bool { return true })
	l.login(d)
	calls := len(l.Blocks.Calls())
	a, f, err := d.Borrow(ctx, alice)
	if err != nil || a.Kind != api.BufferSlice || a.State != api.BufferLent || a.Length != 4<<20 || a.Owner != alice.Name || len(a.Devices) != 2 {
		t.Fatalf("%+v, %v", a, err)
	}
	b, g, err := d.Borrow(ctx, bob)
	if err != nil || a.ID == b.ID {
		t.Fatalf("%+v, %v", b, err)
	}
	if n := len(l.Blocks.Calls()); n != calls {
		t.Errorf("lending needed commands to the driver: %v", l.Blocks.Calls()[calls:])
	}
	if _, _, err := d.Borrow(ctx, alice); !api.Is(err, api.ErrLimitsExceeded) || !strings.Contains(err.Error(), "all 2 slices") {
		t.Errorf("third: %v", err)
	}
	if r := d.Buffers(ctx); r.Arena != (api.Arena{Slices: 2, SliceSize: 4 << 20, Lent: 2}) {
		t.Errorf("arena %+v", r.Arena)
	}
	eventually(t, d, "merging off", func() bool { return l.Blocks.Attribute(0, "nomerges") == "2" })
	mine, theirs := mapAll(t, f), mapAll(t, g)
	copy(mine, "alice's secret")
	copy(theirs, "bob's")
	if string(mine[:5]) != "alice" {
		t.Error("one memory for two")
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if want := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL; err != nil || seals != want {
		t.Errorf("seals %#x, %v; want %#x", seals, err, want)
	}
	// Returned while it is mapped: nobody gets it.
	if _, err := d.RemoveBuffer(ctx, a.ID, func(owner string) error {
		if owner != alice.Name {
			t.Errorf("owner %q", owner)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if got := find(t, d, a.ID); got.State != api.BufferReturned || got.Owner != "" {
		t.Errorf("returned: %+v", got)
	}
	if _, _, err := d.Borrow(ctx, bob); !api.Is(err, api.ErrLimitsExceeded) {
		t.Errorf("a slice that its former borrower still has: %v", err)
	}
	if string(mine[:5]) != "alice" {
		t.Error("overwritten while somebody has it")
	}
	// Requests in flight.
	l.Plane.Busy(1)
	unmap(t, mine)
	for _, n := range []int{1, -1} {
		l.Plane.Busy(n)
		if _, _, err := d.Borrow(ctx, bob); !api.Is(err, api.ErrLimitsExceeded) {
			t.Errorf("a slice with requests in flight (%d): %v", n, err)
		}
	}
	l.Plane.Busy(0)
	eventually(t, d, "the slice is free", func() bool { return find(t, d, a.ID).State == api.BufferFree })
	again, f, err := d.Borrow(ctx, bob)
	if err != nil || again.ID != a.ID {
		t.Fatalf("%+v, %v", again, err)
	}
	mine = mapAll(t, f)
	if !bytes.Equal(mine, make([]byte, len(mine))) {
		t.Errorf("not overwritten: %q", mine[:20])
	}
	// Pages taken out: it is replaced.
	if err := unix.Madvise(mine[8192:12288], unix.MADV_REMOVE); err != nil {
		t.Fatal(err)
	}
	unmap(t, mine)
	unmap(t, theirs)
	d.OwnerGone(bob.Name)
	eventually(t, d, "two free slices", func() bool { return d.Buffers(ctx).Arena.Free == 2 && len(d.Buffers(ctx).Buffers) == 2 })
	l.wantRegistered(d, 2, 2)
	for _, x := range d.Buffers(ctx).Buffers {
		if x.ID == a.ID {
			t.Error("the damaged slice is still there")
		}
		if _, err := d.RemoveBuffer(ctx, x.ID, nil); !api.Is(err, api.ErrInvalidArgs) {
			t.Errorf("removal of a free slice: %v", err)
		}
	}
	eventually(t, d, "merging on", func() bool { return l.Blocks.Attribute(0, "nomerges") == "0" })
	// The user's limit counts what is lent.
	d.Kill()
	l.Config.SharedUserLimit = 7
	d = l.start()
	d.BusJoined("bus", func(string) bool { return true })
	if _, _, err := d.Borrow(ctx, alice); err != nil {
		t.Error(err)
	}
	if _, _, err := d.Borrow(ctx, alice); !api.Is(err, api.ErrLimitsExceeded) || !strings.Contains(err.Error(), "shared_user_limit") {
		t.Errorf("over the limit: %v", err)
	}
	d.OwnerGone(alice.Name)
	eventually(t, d, "two free slices", func() bool { return d.Buffers(ctx).Arena.Free == 2 })
	// Another size: the old ones go.
	d.Kill()
	l.Config.SharedArena, l.Config.SharedSlice = 3, 1
	d = l.start()
	eventually(t, d, "other slices", func() bool {
		r := d.Buffers(ctx)
		return len(r.Buffers) == 3 && r.Arena == api.Arena{Slices: 3, SliceSize: 1 << 20, Free: 3}
	})
	l.wantRegistered(d, 3, 3)
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// A kernel before 7.1 has none of it, says so, and does not allocate.
func TestBufferOldKernel(t *testing.T) {
	l := newLab(t)
	l.Blocks.Old()
	d := l.start()
	ctx := context.Background()
	l.login(d)
	_, _, borrow := d.Borrow(ctx, alice)
	_, client := d.AddClient(ctx, alice, memfd(t, 4096, unix.F_SEAL_SHRINK), nil)
	_, path := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 4096)})
	_, adopt := d.Adopt(ctx, api.BufferAdoptRequest{PID: 1})
	for name, err := range map[string]error{"borrow": borrow, "client": client, "path": path, "adopt": adopt} {
		if !api.Is(err, api.ErrNotSupported) || !strings.Contains(err.Error(), "7.1") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if r := d.Buffers(ctx); len(r.Buffers) != 0 || !strings.Contains(r.Arena.Reason, "UBLK_F_SHMEM_ZC") {
		t.Errorf("%+v", r)
	}
	for _, x := range d.Devices(ctx, false).Devices {
		if s := x.Tiers[0]; s.Name != api.TierShared || s.Possible || !strings.Contains(s.Reason, "UBLK_F_SHMEM_ZC") {
			t.Errorf("%s: %+v", x.Path, x.Tiers)
		}
		if s := x.Tiers[1]; s.Name != api.TierRegistered || !s.Possible {
			t.Errorf("%s: %+v", x.Path, x.Tiers)
		}
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// Few hits are worth a warning, with counters by queue on request.
func TestBufferWarning(t *testing.T) {
	l := newLab(t)
	d := l.start()
	ctx := context.Background()
	l.login(d)
	if _, err := d.AddPath(ctx, api.BufferAddRequest{Path: shm(t, 4096), Devices: []string{"/dev/ublkb0"}}); err != nil {
		t.Fatal(err)
	}
	warned := func() bool { return len(d.Devices(ctx, false).Devices[0].Warnings) > 0 }
	eventually(t, d, "merging off", func() bool { return l.Blocks.Attribute(0, "nomerges") == "2" })
	l.Plane.Count(0, 60, 40)
	l.Plane.Count(1, 0, 400)
	if warned() {
		t.Error("warned about 60 % hits")
	}
	l.Plane.Count(0, 0, 100)
	devs := d.Devices(ctx, true).Devices
	if w := devs[0].Warnings; len(w) != 1 || !strings.Contains(w[0], "only 60 of 200 requests") {
		t.Errorf("warnings %q", w)
	}
	if len(devs[1].Warnings) != 0 {
		t.Errorf("a device without memory in use: %q", devs[1].Warnings)
	}
	q := devs[0].QueueStats
	if len(q) != 2 || q[0].RequestsShared != 60 || q[0].RequestsRegistered != 151 || q[1].RequestsRegistered != 1 || devs[0].Stats.RequestsRegistered != 152 {
		t.Errorf("queues %+v", q)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
}

// share is a program with shared memory that knows nothing of the daemon: two mappings that qualify and one that is too small.
func share() error {
	anon, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		return err
	}
	if _, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON); err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("pool", 0)
	if err != nil {
		return err
	}
	if err := unix.Ftruncate(fd, 256<<10+100); err != nil { // the rest is no whole page
		return err
	}
	for i := range int64(2) { // neighbours in the file, wherever they are in memory
		if _, err := unix.Mmap(fd, i<<17, 132<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "unmap":
			if err := unix.Munmap(anon); err != nil {
				return err
			}
		case "exec":
			return syscall.Exec("/bin/sh", []string{"sh", "-c", "read x"}, nil)
		}
	}
	return nil
}

type sharer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
}

func startSharer(t *testing.T) *sharer {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DAEMON_TEST_SHARER=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return &sharer{cmd, in}
}

// A process that knows nothing of the daemon has its shared memory registered until it ends, executes something else, or unmaps it.
func TestAdopt(t *testing.T) {
	if os.Geteuid() != 0 {
		require.Need(t, "root", errors.New("not root"))
	}
	t.Cleanup(daemon.Hurry(time.Second, 50*time.Millisecond))
	l := newLab(t)
	l.Config.SharedArena = 0
	d := l.start()
	ctx := context.Background()
	l.login(d)
	p := startSharer(t)
	pid := p.cmd.Process.Pid
	r, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: pid})
	if err != nil || len(r.Buffers) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	sizes := []uint64{r.Buffers[0].Length, r.Buffers[1].Length}
	slices.Sort(sizes)
	if !slices.Equal(sizes, []uint64{256 << 10, 1 << 20}) || r.Buffers[0].PID != pid || r.Buffers[0].Kind != api.BufferProcess ||
		!slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, "4096 bytes are fewer") }) {
		t.Errorf("%+v", r)
	}
	l.wantRegistered(d, 2, 2)
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: pid}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("adopted twice: %v", err)
	}
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: pid, Minimum: 16 << 20}); !api.Is(err, api.ErrNotSupported) {
		t.Errorf("nothing of that size: %v", err)
	}
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: os.Getpid()}); !api.Is(err, api.ErrInvalidArgs) {
		t.Errorf("the daemon itself: %v", err)
	}
	// A new daemon finds the same process.
	d.Kill()
	d = l.start()
	if n := len(d.Buffers(ctx).Buffers); n != 2 {
		t.Errorf("%d buffers after a restart", n)
	}
	fmt.Fprintln(p.in, "unmap")
	l.wantRegistered(d, 1, 1)
	eventually(t, d, "one is left", func() bool { got := d.Buffers(ctx).Buffers; return len(got) == 1 && got[0].Length == 256<<10 })
	fmt.Fprintln(p.in, "exec")
	l.wantRegistered(d, 0, 0)
	if err := p.cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process has ended: %v", err)
	}

	// It ends.
	p = startSharer(t)
	if _, err = d.Adopt(ctx, api.BufferAdoptRequest{PID: p.cmd.Process.Pid, Minimum: 4096}); err != nil {
		t.Fatal(err)
	}
	l.wantRegistered(d, 3, 3)
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	l.wantRegistered(d, 0, 0)

	// It ends while no daemon is there.
	p = startSharer(t)
	if _, err = d.Adopt(ctx, api.BufferAdoptRequest{PID: p.cmd.Process.Pid}); err != nil {
		t.Fatal(err)
	}
	d.Kill()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	d = l.start()
	l.wantRegistered(d, 0, 0)

	// Let go by hand; and refused for one of its mappings, which leaves none.
	p = startSharer(t)
	pid = p.cmd.Process.Pid
	l.Blocks.Fail("reg", unix.ENOMEM)
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: pid}); err == nil {
		t.Error("adopted although a driver refuses")
	}
	l.wantRegistered(d, 0, 0)
	eventually(t, d, "nothing left", func() bool { return len(d.Buffers(ctx).Buffers) == 0 })
	if _, err := d.Adopt(ctx, api.BufferAdoptRequest{PID: pid}); err != nil {
		t.Fatal(err)
	}
	out, err := d.RemoveProcess(ctx, pid)
	if err != nil || len(out.Buffers) != 2 {
		t.Errorf("%+v, %v", out, err)
	}
	l.wantRegistered(d, 0, 0)
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
	l.clean()
}

// Slices of huge pages stay with the user who had them, since nobody can tell whether that user still has them; another user gets a new one.
func TestArenaHuge(t *testing.T) {
	const knob = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	old, err := os.ReadFile(knob)
	if err == nil && os.Getenv("GUEST") != "inside" {
		err = errors.New("only the guest's memory is touched")
	}
	if err == nil {
		err = os.WriteFile(knob, []byte("8"), 0)
	}
	if now, _ := os.ReadFile(knob); err == nil && strings.TrimSpace(string(now)) != "8" {
		err = fmt.Errorf("%s huge pages of 8", now)
	}
	require.Need(t, "guest", err)
	t.Cleanup(func() { _ = os.WriteFile(knob, old, 0) })
	l := newLab(t)
	l.Config.SharedArena = 4
	d := l.start()
	ctx := context.Background()
	d.BusJoined("bus", func(string) bool { return true })
	l.login(d)
	fd, err := unix.MemfdCreate("probe", unix.MFD_HUGETLB)
	if err != nil {
		t.Fatal(err)
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	_ = unix.Close(fd)
	told := !errors.Is(err, unix.EINVAL) // some kernels tell
	var last uint32
	for i, o := range []daemon.Owner{alice, alice, bob} {
		b, f, err := d.Borrow(ctx, o)
		if err != nil || b.PageSize != 2<<20 {
			t.Fatalf("%+v, %v", b, err)
		}
		if i > 0 && (b.ID == last) != (o == alice || told) {
			t.Errorf("slice %d for %s after slice %d", b.ID, o.Name, last)
		}
		last = b.ID
		m := mapAll(t, f)
		if !bytes.Equal(m[:100], make([]byte, 100)) {
			t.Errorf("not overwritten: %q", m[:100])
		}
		copy(m, o.Name)
		unmap(t, m)
		d.OwnerGone(o.Name)
		eventually(t, d, "a free slice", func() bool { return d.Buffers(ctx).Arena.Free == 1 })
		l.wantRegistered(d, 1, 1)
	}
	if _, err := d.Logout(ctx, api.LogoutRequest{Session: iqn}); err != nil {
		t.Error(err)
	}
}
