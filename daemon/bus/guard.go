package bus

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"reflect"
	"strings"
	"sync/atomic"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"iserd.org/iserd/api"
)

// This file stands between the bus and the library, because anybody may send us descriptors. The library (godbus 5.2.4) panics on an array of
// descriptors, which would end the daemon, and closes none that its message does not reach a method with. So descriptors pass only with the one call
// that takes them, one of them, in the form that this call has; from every other message they are taken off, as if none had been sent.
//
//	bus <--socket--> guard <--socket pair--> library
//
// What comes from the library is passed on as it is. Before the client's BEGIN the stream is lines of text, after it messages (D-Bus specification,
// "Authentication protocol" and "Message Format").

const (
	maxMessage  = 128 << 20
	maxRights   = 4096 // bytes of control messages, far more than the 253 descriptors that one may carry
	unixFDs     = 9    // header field UNIX_FDS
	fixedHeader = 16
)

// guard is one connection.
type guard struct {
	bus, lib *net.UnixConn
	begun    atomic.Bool
}

// dialBus connects the library to a bus. Only a bus on a UNIX socket passes descriptors, and only that is guarded. closed ends when nothing of the
// connection is left.
func dialBus(address string, opts ...dbus.ConnOption) (conn *dbus.Conn, closed <-chan struct{}, err error) {
	if address == "system" {
		address = os.Getenv("DBUS_SYSTEM_BUS_ADDRESS")
		if address == "" {
			address = "unix:path=/run/dbus/system_bus_socket"
		}
	}
	var errs []error
	for _, a := range strings.Split(address, ";") {
		path, ok := socketPath(a)
		if !ok {
			done := make(chan struct{})
			close(done)
			if conn, err = dbus.Dial(a, opts...); err == nil {
				return conn, done, nil
			}
			errs = append(errs, err)
			continue
		}
		bus, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		return guarded(bus, opts...)
	}
	return nil, nil, errors.Join(errs...)
}

// socketPath reads an address such as unix:path=/run/x,guid=y.
func socketPath(address string) (string, bool) {
	rest, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		return "", false
	}
	for _, kv := range strings.Split(rest, ",") {
		key, value, _ := strings.Cut(kv, "=")
		name, err := url.PathUnescape(value)
		if err != nil {
			return "", false
		}
		switch key {
		case "path":
			return name, true
		case "abstract":
			return "@" + name, true
		}
	}
	return "", false
}

// guarded puts a guard before a bus.
func guarded(bus *net.UnixConn, opts ...dbus.ConnOption) (*dbus.Conn, <-chan struct{}, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		_ = bus.Close()
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "bus")
		c, cerr := net.FileConn(f)
		_ = f.Close()
		if cerr != nil {
			err = cerr
			continue
		}
		ends[i] = c.(*net.UnixConn)
	}
	if err != nil {
		for _, c := range append(ends[:], bus) {
			if c != nil {
				_ = c.Close()
			}
		}
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	g := &guard{bus: bus, lib: ends[0]}
	out, in, closed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() { defer close(out); defer g.end(); g.runOut() }()
	go func() { defer close(in); defer g.end(); g.runIn() }()
	go func() { <-out; <-in; close(closed) }()
	conn, err := dbus.DialUnix(ends[1], opts...)
	if err != nil {
		g.end()
		_ = ends[1].Close()
		<-closed
	}
	return conn, closed, err
}

// end closes both sides, so that each of the two goroutines ends with the other.
func (g *guard) end() {
	_ = g.bus.Close()
	_ = g.lib.Close()
}

// runOut passes on what the library says, descriptors included.
func (g *guard) runOut() {
	begin := []byte("BEGIN\r\n")
	buf, oob := make([]byte, 64<<10), make([]byte, maxRights)
	var tail []byte
	for {
		n, oobn, _, _, err := g.lib.ReadMsgUnix(buf, oob)
		if n == 0 || err != nil {
			return
		}
		if !g.begun.Load() {
			tail = append(tail, buf[:n]...)
			g.begun.Store(bytes.Contains(tail, begin)) // before the bus hears of it
			tail = tail[max(0, len(tail)-len(begin)):]
		}
		files, _ := rights(oob[:oobn])
		err = send(g.bus, buf[:n], files)
		closeFDs(files)
		if err != nil {
			return
		}
	}
}

// send writes all of b, and descriptors with its first byte.
func send(c *net.UnixConn, b []byte, files []int) error {
	if len(files) > 0 {
		n, _, err := c.WriteMsgUnix(b, unix.UnixRights(files...), nil)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	_, err := c.Write(b)
	return err
}

// rights takes the descriptors out of control messages.
func rights(oob []byte) (files []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	ms, err := unix.ParseSocketControlMessage(oob)
	for i := range ms {
		fds, ferr := unix.ParseUnixRights(&ms[i])
		files, err = append(files, fds...), errors.Join(err, ferr)
	}
	return files, err
}

func closeFDs(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}

// runIn passes on what the bus says, message by message.
func (g *guard) runIn() {
	r := &reader{conn: g.bus, oob: make([]byte, maxRights)}
	defer func() { closeFDs(r.files) }()
	head := make([]byte, fixedHeader)
	for {
		n, err := r.Read(head)
		if err != nil {
			return
		}
		// BEGIN goes out only after the last line was passed on, so what is read once it has gone out is a message.
		if !g.begun.Load() {
			if _, err := g.lib.Write(head[:n]); err != nil {
				return
			}
			continue
		}
		if _, err := io.ReadFull(r, head[n:]); err != nil {
			return
		}
		order, length, err := frame(head)
		if err != nil {
			return
		}
		msg := append(head[:fixedHeader:fixedHeader], make([]byte, length-fixedHeader)...)
		if _, err := io.ReadFull(r, msg[fixedHeader:]); err != nil {
			return
		}
		files := r.files
		r.files = nil
		pass, err := inspect(msg, order, len(files))
		if err == nil && pass {
			err = send(g.lib, msg, files)
		} else if err == nil {
			err = send(g.lib, msg, nil)
		}
		closeFDs(files)
		if err != nil {
			return
		}
	}
}

// reader reads a socket and keeps the descriptors that come.
type reader struct {
	conn  *net.UnixConn
	oob   []byte
	files []int
}

func (r *reader) Read(b []byte) (int, error) {
	n, oobn, flags, _, err := r.conn.ReadMsgUnix(b, r.oob)
	files, rerr := rights(r.oob[:oobn])
	r.files = append(r.files, files...)
	switch {
	case err != nil:
		return n, err
	case n == 0:
		return 0, io.EOF
	case flags&unix.MSG_CTRUNC != 0:
		return n, errors.New("control messages are cut off")
	}
	return n, rerr
}

// frame reads the fixed part of a message's header: byte order, and the length of the whole message.
func frame(head []byte) (binary.ByteOrder, int, error) {
	var order binary.ByteOrder = binary.LittleEndian
	switch head[0] {
	case 'l':
	case 'B':
		order = binary.BigEndian
	default:
		return nil, 0, errors.New("no message")
	}
	body, fields := uint64(order.Uint32(head[4:])), uint64(order.Uint32(head[12:]))
	length := fixedHeader + (fields+7)&^7 + body
	if length > maxMessage {
		return nil, 0, errors.New("message is too long")
	}
	return order, int(length), nil
}

// inspect tells whether a message's descriptors may pass. If not, the message says afterwards that it has none.
func inspect(msg []byte, order binary.ByteOrder, files int) (pass bool, err error) {
	at, err := findUnixFDs(msg, order)
	if err != nil || at < 0 {
		return false, err
	}
	said := order.Uint32(msg[at:])
	order.PutUint32(msg[at:], 0)
	if said == 1 && files == 1 && registers(msg) {
		order.PutUint32(msg[at:], 1)
		return true, nil
	}
	return false, nil
}

// registers tells whether a message is a call of RegisterBuffer whose first argument is the first descriptor, and which mentions no other.
func registers(b []byte) (yes bool) {
	defer func() {
		if recover() != nil { // it does not panic without descriptors, as far as is known
			yes = false
		}
	}()
	msg, err := dbus.DecodeMessage(bytes.NewReader(b))
	if err != nil || msg.Type != dbus.TypeMethodCall || len(msg.Body) != 2 {
		return false
	}
	iface, _ := msg.Headers[dbus.FieldInterface].Value().(string)
	member, _ := msg.Headers[dbus.FieldMember].Value().(string)
	path, _ := msg.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
	first, ok := msg.Body[0].(dbus.UnixFDIndex)
	if path != managerPath || iface != managerInterface || member != "RegisterBuffer" || !ok || first != 0 {
		return false
	}
	_, ok = msg.Body[1].(map[string]dbus.Variant)
	others := false
	walk(reflect.ValueOf(msg.Body[1]), func(x any) {
		_, fd := x.(dbus.UnixFDIndex)
		others = others || fd
	})
	return ok && !others
}

// findUnixFDs finds the value of the header field UNIX_FDS; -1 is none.
//
//	array of (code y, value v), each at a multiple of 8; the values of all fields have the types s, o, g and u
func findUnixFDs(msg []byte, order binary.ByteOrder) (int, error) {
	bad := api.Errorf(api.ErrProtocolError, "malformed message header")
	end := fixedHeader + int(order.Uint32(msg[12:]))
	if end > len(msg) {
		return 0, bad
	}
	for at := fixedHeader; at < end; {
		at = (at + 7) &^ 7
		if at+4 > end || msg[at+1] != 1 || msg[at+3] != 0 {
			return 0, bad
		}
		code, form := msg[at], msg[at+2]
		at += 4
		switch form {
		case 'g':
			if at >= end {
				return 0, bad
			}
			at += 1 + int(msg[at]) + 1
		case 's', 'o', 'u':
			at = (at + 3) &^ 3
			if at+4 > end {
				return 0, bad
			}
			if form == 'u' && code == unixFDs {
				return at, nil
			}
			if form != 'u' {
				if n := order.Uint32(msg[at:]); uint64(n) < uint64(len(msg)) {
					at += int(n) + 1
				} else {
					return 0, bad
				}
			}
			at += 4
		default:
			return 0, bad
		}
	}
	return -1, nil
}

// walk calls f with each simple value in v.
func walk(v reflect.Value, f func(x any)) {
	switch v.Kind() {
	case reflect.Interface:
		walk(v.Elem(), f)
	case reflect.Slice:
		for i := range v.Len() {
			walk(v.Index(i), f)
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			walk(it.Key(), f)
			walk(it.Value(), f)
		}
	default:
		if !v.IsValid() {
			return
		}
		if x, ok := v.Interface().(dbus.Variant); ok {
			walk(reflect.ValueOf(x.Value()), f)
			return
		}
		f(v.Interface())
	}
}
