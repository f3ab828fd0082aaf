package bus

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// memfd makes sealed memory.
func memfd(t *testing.T, n int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("bus test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

func errorName(err error) string {
	var e dbus.Error
	if errors.As(err, &e) {
		return e.Name
	}
	return ""
}

// polkit answers for the length of the test.
func polkit(t *testing.T, address string, answer func(subject, action string) bool) {
	t.Helper()
	pk := connect(t, address)
	a := authority{func(subject, action string, _ uint32) (bool, bool) { return answer(subject, action), false }}
	if err := pk.Export(a, polkitPath, "org.freedesktop.PolicyKit1.Authority"); err != nil {
		t.Fatal(err)
	}
	if r, err := pk.RequestName(polkitName, 0); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatal(r, err)
	}
}

type opened struct {
	id     uint32
	fd     dbus.UnixFD
	length uint64
}

func borrow(conn *dbus.Conn) (o opened, err error) {
	err = conn.Object(busName, managerPath).Call(managerInterface+".BorrowBuffer", 0, opts{}).Store(&o.id, &o.fd, &o.length)
	return o, err
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Memory is lent and taken in over the bus, to whom polkit lets, for as long as the caller is there.
func TestBuffers(t *testing.T) {
	f := start(t, func(uint32) bool { return false })
	if _, err := f.d.Login(t.Context(), api.LoginRequest{Target: iqn, Portal: portal}); err != nil {
		t.Fatal(err)
	}
	address := f.address()
	stranger := connect(t, address)
	var mu sync.Mutex
	var actions []string
	polkit(t, address, func(subject, action string) bool {
		mu.Lock()
		defer mu.Unlock()
		actions = append(actions, action)
		return subject != stranger.Names()[0]
	})
	if _, err := borrow(stranger); errorName(err) != api.ErrAccessDenied {
		t.Errorf("borrow without leave: %v", err)
	}

	client, err := dbus.Connect(address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	m := client.Object(busName, managerPath)
	slice, err := borrow(client)
	if err != nil || slice.length != 4<<20 {
		t.Fatalf("borrow: %+v, %v", slice, err)
	}
	mem, err := unix.Mmap(int(slice.fd), 0, int(slice.length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(int(slice.fd))
	copy(mem, "secret")
	f.until(bufferPath(slice.id), "PropertiesChanged")
	if x := f.get(bufferPath(slice.id), bufferInterface, "Owner"); x != client.Names()[0] {
		t.Errorf("owner %v", x)
	}
	if x := f.get(bufferPath(slice.id), bufferInterface, "State"); x != api.BufferLent {
		t.Errorf("state %v", x)
	}
	var id uint32
	var length uint64
	own := memfd(t, 1<<20, unix.F_SEAL_SHRINK)
	register := func(file *os.File, o opts) error {
		return m.Call(managerInterface+".RegisterBuffer", 0, dbus.UnixFD(file.Fd()), o).Store(&id, &length)
	}
	if err := register(own, opts{"devices": dbus.MakeVariant([]dbus.ObjectPath{devicePath(1)})}); err != nil || length != 1<<20 {
		t.Fatalf("register: %d, %v", length, err)
	}
	if x := f.get(bufferPath(id), bufferInterface, "Devices"); !slices.Equal(x.([]dbus.ObjectPath), []dbus.ObjectPath{devicePath(1)}) {
		t.Errorf("devices %v", x)
	}
	var stats map[string]uint64
	if err := f.call(bufferPath(id), bufferInterface+".GetStatistics", opts{}).Store(&stats); err != nil || stats["requests"] != 7 || len(stats) != 2 {
		t.Errorf("statistics %v, %v", stats, err)
	}
	for _, x := range []struct {
		name string
		err  error
		want string
	}{
		{"not sealed", register(memfd(t, 4096, 0), opts{}), api.ErrInvalidArgs},
		{"odd length", register(memfd(t, 5000, unix.F_SEAL_SHRINK), opts{}), api.ErrInvalidArgs},
		{"too much", register(memfd(t, 1<<30, unix.F_SEAL_SHRINK), opts{}), api.ErrLimitsExceeded}, // with what is lent
		{"no such device", register(memfd(t, 4096, unix.F_SEAL_SHRINK), opts{"devices": dbus.MakeVariant([]dbus.ObjectPath{devicePath(7)})}), api.ErrNotFound},
		{"no device", register(memfd(t, 4096, unix.F_SEAL_SHRINK), opts{"devices": dbus.MakeVariant([]dbus.ObjectPath{"/x"})}), api.ErrInvalidArgs},
		{"unknown option", register(memfd(t, 4096, unix.F_SEAL_SHRINK), opts{"x": dbus.MakeVariant(1)}), api.ErrInvalidArgs},
		{"no process", m.Call(managerInterface+".AdoptProcess", 0, uint32(1<<30), opts{}).Err, api.ErrNotFound},
		{"unknown id", m.Call(managerInterface+".ReleaseBuffer", 0, uint32(99), opts{}).Err, api.ErrNotFound},
		{"not the owner", stranger.Object(busName, managerPath).Call(managerInterface+".ReleaseBuffer", 0, id, opts{}).Err, api.ErrAccessDenied},
		{"slice of another", stranger.Object(busName, managerPath).Call(managerInterface+".ReleaseBuffer", 0, slice.id, opts{}).Err, api.ErrAccessDenied},
	} {
		if errorName(x.err) != x.want {
			t.Errorf("%s: %v, want %s", x.name, x.err, x.want)
		}
	}
	if err := m.Call(managerInterface+".ReleaseBuffer", 0, id, opts{}).Err; err != nil {
		t.Error(err)
	}
	if err := register(own, opts{}); err != nil { // again
		t.Error(err)
	}
	second, err := borrow(client)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(int(second.fd))
	if _, err := borrow(client); errorName(err) != api.ErrLimitsExceeded {
		t.Errorf("a third slice: %v", err)
	}

	// The caller vanishes.
	_ = unix.Munmap(mem)
	_ = client.Close()
	waitFor(t, func() bool {
		r := f.d.Buffers(t.Context())
		return r.Arena.Free == 2 && len(r.Buffers) == 2
	})
	again := connect(t, address)
	for range 2 {
		if slice, err = borrow(again); err != nil {
			t.Fatal(err)
		}
		mem, err := unix.Mmap(int(slice.fd), 0, int(slice.length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(int(slice.fd))
		if strings.Contains(string(mem[:16]), "secret") {
			t.Error("not overwritten")
		}
		_ = unix.Munmap(mem)
		if err := again.Object(busName, managerPath).Call(managerInterface+".ReleaseBuffer", 0, slice.id, opts{}).Err; err != nil {
			t.Error(err)
		}
	}
	waitFor(t, func() bool { return f.d.Buffers(t.Context()).Arena.Free == 2 })
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(actions)
	if got := slices.Compact(actions); !slices.Equal(got, []string{actionAdopt, actionRegister}) {
		t.Errorf("actions %q", got)
	}
}

// Descriptors that come where none are expected, and those that go out, do not stay in the daemon.
func TestDescriptors(t *testing.T) {
	f := start(t, trusted)
	mem := memfd(t, 8192, 0)
	fd := dbus.UnixFD(mem.Fd())
	m := f.conn.Object(busName, managerPath)
	round := func() {
		for _, call := range []*dbus.Call{
			m.Call("org.freedesktop.DBus.Peer.Ping", 0, fd),
			m.Call(managerInterface+".Nonsense", 0, []dbus.UnixFD{fd, fd}),
			m.Call(managerInterface+".Login", 0, iqn, opts{"portal": dbus.MakeVariant(fd)}),
			m.Call(managerInterface+".RegisterBuffer", 0, fd, opts{"x": dbus.MakeVariant(fd)}),
			m.Call(managerInterface+".RegisterBuffer", 0, fd),
			m.Call(managerInterface+".RegisterBuffer", 0, fd, opts{}),
			f.conn.Object(busName, "/nowhere").Call(managerInterface+".RegisterBuffer", 0, fd, opts{}),
		} {
			if call.Err == nil && call.Method != "org.freedesktop.DBus.Peer.Ping" {
				t.Errorf("%s is answered", call.Method)
			}
		}
		o, err := borrow(f.conn)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(int(o.fd))
		if err := m.Call(managerInterface+".ReleaseBuffer", 0, o.id, opts{}).Err; err != nil {
			t.Error(err)
		}
		waitFor(t, func() bool { return f.d.Buffers(t.Context()).Arena.Free == 2 })
	}
	round()
	before := countFDs(t)
	for range 5 {
		round()
	}
	if n := countFDs(t); n > before {
		links, _ := filepath.Glob("/proc/self/fd/*")
		for _, l := range links {
			to, _ := os.Readlink(l)
			t.Logf("%s -> %s", l, to)
		}
		t.Errorf("%d descriptors, %d before", n, before)
	}
}
