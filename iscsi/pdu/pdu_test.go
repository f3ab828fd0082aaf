package pdu

import (
	"bufio"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestCommonFields(t *testing.T) {
	var b BHS
	b.init(OpNOPOut)
	b.SetImmediate(true)
	b.SetFinal(true)
	b.SetDataSegmentLength(0x123456)
	b.SetLUN(0x0102030405060708)
	b.SetInitiatorTaskTag(0x11121314)
	b.SetCmdSN(0x21222324)
	b.SetExpStatSN(0x31323334)
	b.SetMaxCmdSN(0x41424344)
	want := "40800000" + "00123456" + "0102030405060708" + "11121314" + "00000000" + "21222324" + "31323334" + "41424344" + strings.Repeat("00", 12)
	if got := hex.EncodeToString(b[:]); got != want {
		t.Fatalf("header\n got %s\nwant %s", got, want)
	}
	if b.StatSN() != b.CmdSN() || b.ExpCmdSN() != b.ExpStatSN() {
		t.Fatal("initiator and target numbers share their places")
	}
	b.SetImmediate(false)
	if b.Immediate() || b.Opcode() != OpNOPOut {
		t.Fatal("I bit and opcode overlap")
	}
}

// TestFixedBits checks the bits that a PDU has to have whatever it says: F, and in the second byte what was asked for.
func TestFixedBits(t *testing.T) {
	for b, want := range map[*BHS]byte{
		NewLogoutRequest(new(BHS), CloseSession).BHS:      0x80,
		NewLogoutRequest(new(BHS), RemoveForRecovery).BHS: 0x82,
		NewTaskRequest(new(BHS), LogicalUnitReset).BHS:    0x85,
		NewNOPOut(new(BHS)).BHS:                           0x80,
		NewLogoutResponse(new(BHS), LogoutSuccess).BHS:    0x80,
		NewTaskResponse(new(BHS), TaskDoesNotExist).BHS:   0x80,
		NewSCSIResponse(new(BHS)).BHS:                     0x80,
		NewAsyncMessage(new(BHS), AsyncSCSI).BHS:          0x80,
		NewReject(new(BHS), RejectProtocolError).BHS:      0x80,
		NewR2T(new(BHS)).BHS:                              0x80,
		NewNOPIn(new(BHS)).BHS:                            0x80,
	} {
		if b[1] != want {
			t.Errorf("%v: second byte %#02x, want %#02x", b.Opcode(), b[1], want)
		}
	}
}

func TestPadding(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 4, 3: 4, 4: 4, 5: 8, MaxDataSegmentLength: 1 << 24} {
		if Padded(n) != want || Padding(n) != want-n {
			t.Errorf("Padded(%d) = %d, Padding = %d", n, Padded(n), Padding(n))
		}
	}
}

// TestSettersRoundTrip calls each SetX of each view with a value and expects X to give it back and nothing outside X to change twice.
func TestSettersRoundTrip(t *testing.T) {
	var b BHS
	views := []any{
		&b, NewSCSICommand(&b), NewSCSIResponse(&b), NewDataOut(&b), NewDataIn(&b), NewR2T(&b), NewTaskRequest(&b, AbortTask),
		NewTaskResponse(&b, 0), NewLoginRequest(&b), NewLoginResponse(&b), NewTextRequest(&b), NewTextResponse(&b),
		NewLogoutRequest(&b, 0), NewLogoutResponse(&b, 0), NewNOPOut(&b), NewNOPIn(&b), NewAsyncMessage(&b, 0), NewReject(&b, 0),
	}
	calls := 0
	for _, v := range views {
		rv := reflect.ValueOf(v)
		for i := range rv.NumMethod() {
			name := rv.Type().Method(i).Name
			get := rv.MethodByName(strings.TrimPrefix(name, "Set"))
			set := rv.Method(i)
			if !strings.HasPrefix(name, "Set") || !get.IsValid() || set.Type().NumIn() != 1 {
				continue
			}
			for _, fill := range []byte{0x00, 0xff} {
				for j := range b {
					b[j] = fill
				}
				arg := reflect.New(set.Type().In(0)).Elem()
				switch arg.Kind() {
				case reflect.Bool:
					arg.SetBool(fill == 0)
				case reflect.Int:
					arg.SetInt(0x5a5a5a)
				case reflect.Array:
					for j := range arg.Len() {
						arg.Index(j).SetUint(0x5a)
					}
				default:
					arg.SetUint(0x5a5a5a5a5a5a5a5a & (1<<arg.Type().Bits() - 1))
					if arg.Type() == reflect.TypeFor[TaskAttribute]() {
						arg.SetUint(5)
					}
				}
				set.Call([]reflect.Value{arg})
				if got := get.Call(nil)[0].Interface(); !reflect.DeepEqual(got, arg.Interface()) {
					t.Errorf("%T.%s(%v): getter says %v", v, name, arg, got)
				}
				calls++
			}
		}
	}
	if calls < 100 {
		t.Fatalf("only %d setters were tried", calls)
	}
}

// goldenCase is one PDU of testdata/pdus.hex.
type goldenCase struct {
	file, dir, text string
	header, segment []byte
}

// readGolden reads blocks of "I|T", hex lines and "= decoded text". Lines with "#" tell where the bytes are from.
func readGolden(t testing.TB) []goldenCase {
	files, err := filepath.Glob("testdata/*.hex")
	if err != nil || len(files) == 0 {
		t.Fatal("no golden files", err)
	}
	var cases []goldenCase
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var c goldenCase
		var data []byte
		for s := bufio.NewScanner(f); s.Scan(); {
			switch line := strings.TrimSpace(s.Text()); {
			case line == "" || line[0] == '#':
			case line == "I" || line == "T":
				c, data = goldenCase{file: name, dir: line}, nil
			case line[0] == '=':
				c.text = strings.TrimSpace(line[1:])
				if len(data) < HeaderLength {
					t.Fatalf("%s: %q has %d bytes", name, c.text, len(data))
				}
				c.header, c.segment = data[:HeaderLength], data[HeaderLength:]
				cases = append(cases, c)
			default:
				b, err := hex.DecodeString(strings.ReplaceAll(line, " ", ""))
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				data = append(data, b...)
			}
		}
	}
	return cases
}

func TestGolden(t *testing.T) {
	for _, c := range readGolden(t) {
		b := HeaderOf(c.header)
		dir := FromInitiator
		if c.dir == "T" {
			dir = FromTarget
		}
		if err := b.Valid(dir, len(c.segment)); err != nil {
			t.Errorf("%s: %s: %v", c.file, c.text, err)
		}
		if got := b.String(); got != c.text {
			t.Errorf("%s:\n got %s\nwant %s", c.file, got, c.text)
		}
	}
}

func TestValid(t *testing.T) {
	type edit func(b *BHS)
	for _, c := range []struct {
		name string
		dir  Direction
		room int
		make edit
		want string // part of the error, empty for none
	}{
		{"reserved opcode", FromTarget, 0, func(b *BHS) { b[0] = 0x2a }, "not defined"},
		{"vendor opcode", FromTarget, 0, func(b *BHS) { b[0] = 0x3c }, "not defined"},
		{"initiator PDU from target", FromTarget, 0, func(b *BHS) { NewSCSICommand(b) }, "wrong side"},
		{"AHS from target", FromTarget, 0, func(b *BHS) { NewSCSIResponse(b); b[4] = 1 }, "additional header"},
		{"R2T with data", FromTarget, 99, func(b *BHS) { r := NewR2T(b); r.SetDesiredDataTransferLength(1); b.SetDataSegmentLength(4) }, "it has none"},
		{"R2T for nothing", FromTarget, 0, func(b *BHS) { NewR2T(b) }, "0 bytes"},
		{"R2T without tag", FromTarget, 0, func(b *BHS) {
			r := NewR2T(b)
			r.SetDesiredDataTransferLength(1)
			r.SetTargetTransferTag(ReservedTag)
		}, "without TargetTransferTag"},
		{"good R2T", FromTarget, 0, func(b *BHS) { r := NewR2T(b); r.SetDesiredDataTransferLength(1) }, ""},
		{"segment longer than received", FromTarget, 7, func(b *BHS) { NewSCSIResponse(b); b.SetDataSegmentLength(8) }, "7 are there"},
		{"segment fits", FromTarget, 8, func(b *BHS) { NewSCSIResponse(b); b.SetDataSegmentLength(8) }, ""},
		{"both residuals", FromTarget, 0, func(b *BHS) { NewSCSIResponse(b); b[1] |= 6 }, "both overflow"},
		{"both read residuals", FromTarget, 0, func(b *BHS) { NewSCSIResponse(b); b[1] |= 0x18 }, "both read overflow"},
		{"status without F", FromTarget, 0, func(b *BHS) { NewDataIn(b); b[1] = 1 }, "without F"},
		{"T and C", FromTarget, 0, func(b *BHS) { NewLoginResponse(b); b[1] = 0xc1 }, "both T and C"},
		{"CSG 2", FromTarget, 0, func(b *BHS) { NewLoginResponse(b); b[1] = 0x08 }, "CSG 2"},
		{"NSG 2", FromTarget, 0, func(b *BHS) { NewLoginResponse(b); b[1] = 0x86 }, "stage 2"},
		{"NSG behind CSG", FromTarget, 0, func(b *BHS) { NewLoginResponse(b); b[1] = 0x84 }, "stage 0"},
		{"failed login has no flags", FromTarget, 0, func(b *BHS) { r := NewLoginResponse(b); b[1] = 0xff; r.SetStatus(2, 1) }, ""},
		{"F and C", FromTarget, 0, func(b *BHS) { NewTextResponse(b); b[1] = 0xc0 }, "both F and C"},
		{"command with AHS", FromInitiator, 0, func(b *BHS) { NewSCSICommand(b); b[4] = 2 }, ""},
	} {
		var b BHS
		c.make(&b)
		err := b.Valid(c.dir, c.room)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		var pe *ProtocolError
		if !errors.As(err, &pe) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one about %q", c.name, err, c.want)
		}
	}
}

func TestOpcodeTable(t *testing.T) {
	for op := range opcodes {
		r := &opcodes[op]
		if r.name == "" {
			continue
		}
		if want := FromInitiator; (op >= 0x20) != (r.dir == FromTarget) || r.decode == nil || r.segment == 0 || r.dir < want {
			t.Errorf("row %#02x is not complete: %+v", op, r)
		}
	}
	if got := Opcode(0x3c).String(); got != "opcode 0x3c" {
		t.Error(got)
	}
}

func TestSenseData(t *testing.T) {
	for _, c := range []struct {
		in, out string
		ok      bool
	}{
		{"", "", true}, {"00", "", false}, {"0000", "", true}, {"0001", "", false}, {"0001aa", "aa", true}, {"0001aabb", "aa", true},
		{"ffffaa", "", false}, {"00020102", "0102", true},
	} {
		in, _ := hex.DecodeString(c.in)
		got, err := SenseData(in)
		if hex.EncodeToString(got) != c.out || (err == nil) != c.ok {
			t.Errorf("SenseData(%s) = %x, %v", c.in, got, err)
		}
	}
	s, err := SenseData(AppendSense(nil, []byte{0x70, 0, 5}))
	if err != nil || hex.EncodeToString(s) != "700005" {
		t.Error(s, err)
	}
}

func TestNoAllocation(t *testing.T) {
	buf := make([]byte, 128)
	var sink uint32
	if n := testing.AllocsPerRun(100, func() {
		c := NewSCSICommand(HeaderOf(buf))
		c.SetLUN(1)
		c.SetInitiatorTaskTag(7)
		c.SetExpectedDataTransferLength(4096)
		c.SetRead(true)
		c.SetFinal(true)
		c.SetAttribute(AttributeSimple)
		c.CDB()[0] = 0x88
		sink += c.CmdSN()
	}); n != 0 {
		t.Errorf("building a command allocates %v times", n)
	}
	NewSCSIResponse(HeaderOf(buf))
	if n := testing.AllocsPerRun(100, func() {
		h := HeaderOf(buf)
		if h.Valid(FromTarget, 0) != nil {
			t.Fatal("not valid")
		}
		r := AsSCSIResponse(h)
		sink += r.StatSN() + r.ResidualCount() + uint32(r.Status())
	}); n != 0 {
		t.Errorf("reading a response allocates %v times", n)
	}
	_ = sink
}
