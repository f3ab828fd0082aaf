package bus

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/godbus/dbus/v5"
)

// call makes a method call as bytes, with a count of descriptors.
func call(t testing.TB, path dbus.ObjectPath, iface, member string, fds uint32, body ...any) []byte {
	t.Helper()
	msg := &dbus.Message{Type: dbus.TypeMethodCall, Headers: map[dbus.HeaderField]dbus.Variant{
		dbus.FieldPath: dbus.MakeVariant(path), dbus.FieldInterface: dbus.MakeVariant(iface), dbus.FieldMember: dbus.MakeVariant(member),
		dbus.FieldDestination: dbus.MakeVariant(busName), dbus.FieldSender: dbus.MakeVariant(":1.7"),
	}, Body: body}
	if fds > 0 {
		msg.Headers[dbus.FieldUnixFDs] = dbus.MakeVariant(fds)
	}
	if len(body) > 0 {
		msg.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(body...))
	}
	var b bytes.Buffer
	if err := msg.EncodeTo(&b, binary.LittleEndian); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Descriptors pass with the one call that takes them, and with nothing else.
func TestInspect(t *testing.T) {
	const register = "RegisterBuffer"
	h := dbus.UnixFDIndex(0)
	for _, x := range []struct {
		name  string
		msg   []byte
		files int
		pass  bool
		count uint32
	}{
		{"register", call(t, managerPath, managerInterface, register, 1, h, opts{}), 1, true, 1},
		{"with options", call(t, managerPath, managerInterface, register, 1, h, opts{"devices": dbus.MakeVariant([]dbus.ObjectPath{"/x"})}), 1, true, 1},
		{"none came", call(t, managerPath, managerInterface, register, 1, h, opts{}), 0, false, 0},
		{"two came", call(t, managerPath, managerInterface, register, 1, h, opts{}), 2, false, 0},
		{"says two", call(t, managerPath, managerInterface, register, 2, h, opts{}), 2, false, 0},
		{"says none", call(t, managerPath, managerInterface, register, 0, h, opts{}), 1, false, 0},
		{"another index", call(t, managerPath, managerInterface, register, 1, dbus.UnixFDIndex(1), opts{}), 1, false, 0},
		{"in an option", call(t, managerPath, managerInterface, register, 1, h, opts{"x": dbus.MakeVariant(h)}), 1, false, 0},
		{"array in an option", call(t, managerPath, managerInterface, register, 1, h, opts{"x": dbus.MakeVariant([]dbus.UnixFDIndex{h})}), 1, false, 0},
		{"key of an option", call(t, managerPath, managerInterface, register, 1, h, opts{"x": dbus.MakeVariant(map[dbus.UnixFDIndex]string{h: ""})}), 1, false, 0},
		{"array", call(t, managerPath, managerInterface, register, 1, []dbus.UnixFDIndex{h}), 1, false, 0},
		{"no argument", call(t, managerPath, managerInterface, register, 1), 1, false, 0},
		{"another method", call(t, managerPath, managerInterface, "Login", 1, h, opts{}), 1, false, 0},
		{"another interface", call(t, managerPath, deviceInterface, register, 1, h, opts{}), 1, false, 0},
		{"another object", call(t, "/x", managerInterface, register, 1, h, opts{}), 1, false, 0},
		{"ordinary", call(t, managerPath, managerInterface, "Login", 0, "x", opts{}), 0, false, 0},
	} {
		order, n, err := frame(x.msg)
		if err != nil || n != len(x.msg) {
			t.Errorf("%s: %d bytes, %v; want %d", x.name, n, err, len(x.msg))
			continue
		}
		pass, err := inspect(x.msg, order, x.files)
		if pass != x.pass || err != nil {
			t.Errorf("%s: passes: %v, %v", x.name, pass, err)
		}
		msg, err := dbus.DecodeMessage(bytes.NewReader(x.msg))
		if err != nil {
			t.Errorf("%s: %v", x.name, err)
			continue
		}
		if count, _ := msg.Headers[dbus.FieldUnixFDs].Value().(uint32); count != x.count {
			t.Errorf("%s: says %d descriptors, want %d", x.name, count, x.count)
		}
	}
}

// FuzzInspect: whatever comes, nothing panics, and what passes is the one call.
func FuzzInspect(f *testing.F) {
	f.Add(call(f, managerPath, managerInterface, "RegisterBuffer", 1, dbus.UnixFDIndex(0), opts{}), 1)
	f.Add(call(f, managerPath, managerInterface, "Login", 2, []dbus.UnixFDIndex{0, 1}), 2)
	f.Add([]byte("l\x01\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00\x08\x00\x00\x00\x09\x01u\x00\x01\x00\x00\x00"), 1)
	f.Fuzz(func(t *testing.T, b []byte, files int) {
		if len(b) < fixedHeader {
			return
		}
		order, n, err := frame(b)
		if err != nil || n > len(b) {
			return
		}
		b = b[:n]
		pass, err := inspect(b, order, files)
		if pass && (err != nil || files != 1 || !registers(b)) {
			t.Fatalf("passes with %d descriptors, %v", files, err)
		}
	})
}

func TestSocketPath(t *testing.T) {
	for in, want := range map[string]string{
		"unix:path=/run/a%20b,guid=1": "/run/a b", "unix:abstract=x": "@x", "unix:guid=1,path=/y": "/y", "unix:path=/y%2": "", "tcp:host=x": "", "unix:tmpdir=/z": "",
	} {
		if got, _ := socketPath(in); got != want {
			t.Errorf("socketPath(%q) = %q, want %q", in, got, want)
		}
	}
}
