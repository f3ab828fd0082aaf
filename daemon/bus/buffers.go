package bus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"reflect"
	"strconv"
	"sync"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// devicesOption reads the option devices, object paths, as paths of devices.
func devicesOption(o *options) []string {
	var out []string
	for _, p := range option[[]dbus.ObjectPath](o, "devices") {
		n, err := strconv.Atoi(path.Base(string(p)))
		if err != nil || devicePath(n) != p {
			if o.err == nil {
				o.err = api.Errorf(api.ErrInvalidArgs, "%s is no device", p)
			}
			continue
		}
		out = append(out, "/dev/ublkb"+strconv.Itoa(n))
	}
	return out
}

// BorrowBuffer lends a slice of the arena.
func (m manager) BorrowBuffer(msg dbus.Message, opts map[string]dbus.Variant) (uint32, dbus.UnixFD, uint64, *dbus.Error) {
	o := options{m: opts}
	err := o.done()
	if msg.Flags&dbus.FlagNoReplyExpected != 0 && err == nil {
		err = api.Errorf(api.ErrInvalidArgs, "the memory comes with the reply, and the caller wants none")
	}
	if err != nil {
		return 0, 0, 0, dbusError(err)
	}
	var b api.Buffer
	fd := -1
	err = m.c.change(msg, actionRegister, func(ctx context.Context) error {
		owner, err := m.c.caller(ctx, &msg)
		if err != nil {
			return err
		}
		var f *os.File
		if b, f, err = m.c.s.Borrow(ctx, owner); err != nil {
			return err
		}
		if err := m.c.stillThere(ctx, owner.Name); err != nil {
			return err
		}
		// The slice may be taken back before the reply is out; the reply's descriptor is its own, see outbox.
		raw, err := f.SyscallConn()
		if err == nil {
			rerr := raw.Control(func(n uintptr) { fd, err = unix.FcntlInt(n, unix.F_DUPFD_CLOEXEC, 0) })
			err = errors.Join(rerr, err)
		}
		return api.Wrap(err, api.ErrInternal, "hand out memory")
	})
	if err != nil {
		return 0, 0, 0, dbusError(err)
	}
	return b.ID, dbus.UnixFD(fd), b.Length, nil
}

// RegisterBuffer registers memory of the caller.
func (m manager) RegisterBuffer(msg dbus.Message, memory dbus.UnixFD, opts map[string]dbus.Variant) (uint32, uint64, *dbus.Error) {
	f := os.NewFile(uintptr(memory), "memory of a program")
	defer func() { _ = f.Close() }()
	o := options{m: opts}
	devices := devicesOption(&o)
	if err := o.done(); err != nil {
		return 0, 0, dbusError(err)
	}
	var b api.Buffer
	err := m.c.change(msg, actionRegister, func(ctx context.Context) error {
		owner, err := m.c.caller(ctx, &msg)
		if err != nil {
			return err
		}
		if b, err = m.c.s.AddClient(ctx, owner, f, devices); err != nil {
			return err
		}
		return m.c.stillThere(ctx, owner.Name)
	})
	return b.ID, b.Length, dbusError(err)
}

// AdoptProcess registers the shared memory of a process.
func (m manager) AdoptProcess(msg dbus.Message, pid uint32, opts map[string]dbus.Variant) ([]uint32, uint64, *dbus.Error) {
	o := options{m: opts}
	r := api.BufferAdoptRequest{PID: int(pid), Minimum: option[uint64](&o, "minimum"), Devices: devicesOption(&o)}
	if err := o.done(); err != nil {
		return nil, 0, dbusError(err)
	}
	ids, total := []uint32{}, uint64(0)
	err := m.c.change(msg, actionAdopt, func(ctx context.Context) error {
		reply, err := m.c.s.Adopt(ctx, r)
		for _, b := range reply.Buffers {
			ids = append(ids, b.ID)
			total += b.Length
		}
		return err
	})
	return ids, total, dbusError(err)
}

// ReleaseBuffer returns a slice, or ends the registration of memory. It is for the program that has it, and for root.
func (m manager) ReleaseBuffer(msg dbus.Message, id uint32, opts map[string]dbus.Variant) *dbus.Error {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return dbusError(err)
	}
	return dbusError(m.c.change(msg, "", func(ctx context.Context) error {
		caller, err := m.c.caller(ctx, &msg)
		if err != nil {
			return err
		}
		_, err = m.c.s.RemoveBuffer(ctx, id, func(owner string) error {
			if owner == caller.Name || caller.Trusted {
				return nil
			}
			return api.Errorf(api.ErrAccessDenied, "permission denied: buffer %d belongs to another program", id)
		})
		return err
	}))
}

// stillThere makes sure that a program that left the bus while it was served has nothing.
func (c *connection) stillThere(ctx context.Context, name string) error {
	if c.alive(ctx, name) {
		return nil
	}
	c.s.OwnerGone(name)
	return api.Errorf(api.ErrCancelled, "the caller has left the bus")
}

// alive tells whether a unique name is on the bus. When the bus does not say, it is.
func (c *connection) alive(ctx context.Context, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, polkitTimeout)
	defer cancel()
	has := true
	err := c.conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.NameHasOwner", 0, name).Store(&has)
	return has || err != nil
}

// watchOwners takes back what programs have that leave the bus, or have left it before.
func (c *connection) watchOwners() error {
	err := c.conn.AddMatchSignal(dbus.WithMatchSender("org.freedesktop.DBus"), dbus.WithMatchInterface("org.freedesktop.DBus"),
		dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(2, ""))
	if err != nil {
		return fmt.Errorf("watch programs: %w", err)
	}
	signals := make(chan *dbus.Signal, 64)
	c.conn.Signal(signals)
	c.mu.Lock()
	c.calls.Add(1)
	c.mu.Unlock()
	go func() {
		defer c.calls.Done()
		for {
			var s *dbus.Signal
			select {
			case s = <-signals:
			case <-c.ctx.Done():
			}
			if s == nil {
				return
			}
			if s.Sender != "org.freedesktop.DBus" || s.Name != "org.freedesktop.DBus.NameOwnerChanged" || len(s.Body) != 3 {
				continue
			}
			if name, ok := s.Body[0].(string); ok && s.Body[2] == "" {
				c.s.OwnerGone(name)
			}
		}
	}()
	var id string
	if err := c.conn.BusObject().Call("org.freedesktop.DBus.GetId", 0).Store(&id); err != nil {
		return fmt.Errorf("identify the bus: %w", err)
	}
	c.s.BusJoined(id, func(name string) bool { return c.alive(c.ctx, name) })
	return nil
}

// newOutbox makes the options of a connection that closes descriptors once they have gone out.
func newOutbox() []dbus.ConnOption {
	out := &outbox{files: make(map[uint32]map[dbus.UnixFD]bool)}
	return []dbus.ConnOption{dbus.WithOutgoingInterceptor(out.note), dbus.WithSerialGenerator(out)}
}

// outbox closes the descriptors of messages that have gone out. It is the connection's source of serial numbers, since the library tells that one
// when a message is through, and nobody else.
type outbox struct {
	mu    sync.Mutex
	last  uint32
	files map[uint32]map[dbus.UnixFD]bool
}

// GetSerial gives the next number.
func (b *outbox) GetSerial() uint32 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last++; b.last == 0 {
		b.last = 1
	}
	return b.last
}

// RetireSerial takes back the number of a message that was sent, or could not be.
func (b *outbox) RetireSerial(serial uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for fd := range b.files[serial] {
		_ = unix.Close(int(fd))
	}
	delete(b.files, serial)
}

// note sees a message before it is sent.
func (b *outbox) note(msg *dbus.Message) {
	found := make(map[dbus.UnixFD]bool)
	walk(reflect.ValueOf(msg.Body), func(x any) {
		if fd, ok := x.(dbus.UnixFD); ok {
			found[fd] = true
		}
	})
	if len(found) > 0 {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.files[msg.Serial()] = found
	}
}

// buffer is org.iserd.Iser1.Buffer.
type buffer struct {
	c  *connection
	id uint32
}

// GetStatistics reads the counters.
func (b buffer) GetStatistics(opts map[string]dbus.Variant) (map[string]uint64, *dbus.Error) {
	o := options{m: opts}
	if err := o.done(); err != nil {
		return nil, dbusError(err)
	}
	for _, x := range b.c.s.Buffers(b.c.ctx).Buffers {
		if x.ID == b.id {
			return map[string]uint64{"requests": x.Requests, "bytes": x.Bytes}, nil
		}
	}
	return nil, dbusError(api.Errorf(api.ErrUnknownObject, "the buffer is gone"))
}
