package login

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"iserd.org/iserd/iscsi/pdu"
)

// TestCHAPVectors compares with values from another implementation (Python's hashlib): H(20, "initiatorsecret", 00 01 ... 0f).
func TestCHAPVectors(t *testing.T) {
	challenge := make([]byte, 16)
	for i := range challenge {
		challenge[i] = byte(i)
	}
	for alg, want := range map[CHAPAlgorithm]string{
		CHAPMD5:     "7555e1d81b783373861e5e51de1ec49a",
		CHAPSHA1:    "45ce0f3d9b477dc204b7deaf1a9725d16d895f53",
		CHAPSHA256:  "69726f9d825fabe00b2c99886a5356f54a19cb87e24080860ba092e7d852420c",
		CHAPSHA3256: "1899e40b6692a82e8e84ccb730918afd0124648d6a426a3ca8801e243e90335d",
	} {
		c := chap{chosen: alg}
		if got := hex.EncodeToString(c.digest(20, NewSecret([]byte("initiatorsecret")), challenge)); got != want {
			t.Errorf("%v: %s, want %s", alg, got, want)
		}
	}
}

func TestDecodeBinary(t *testing.T) {
	for _, c := range []struct{ in, out string }{
		{"0x00ff", "00ff"}, {"0X0A", "0a"}, {"0bAAE=", "0001"}, {"0BAAE=", "0001"},
		{"", ""}, {"0x", ""}, {"0b", ""}, {"0x0", ""}, {"0xzz", ""}, {"00ff", ""}, {"0b*", ""}, {"0x" + strings.Repeat("00", 1025), ""},
	} {
		b, err := decodeBinary("CHAP_C", c.in, maxChallenge)
		if hex.EncodeToString(b) != c.out || (err == nil) != (c.out != "") {
			t.Errorf("%.20q: %x, %v", c.in, b, err)
		}
	}
}

// TestSecretPrints tries every way that a secret could get out.
func TestSecretPrints(t *testing.T) {
	const word = "correct horse battery"
	c := Config{
		InitiatorName: "iqn.2003-01.org.example:host", TargetName: "iqn.2003-01.org.example:t1", SessionType: Normal, Transport: TCP,
		Auth: Auth{User: "me", Secret: NewSecret([]byte(word)), TargetSecret: NewSecret([]byte(word + "x"))},
	}
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, v := range []any{c.Auth.Secret, &c.Auth.Secret, c.Auth, c, &c, *m, m, m.chap} {
		for _, f := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			fmt.Fprintf(&all, f, v)
		}
		if b, err := json.Marshal(v); err == nil {
			all.Write(b)
		}
	}
	for _, bad := range []string{word, hex.EncodeToString([]byte(word)), "99 111 114 114"} {
		if strings.Contains(all.String(), bad) {
			t.Fatalf("the secret is in the output as %q", bad)
		}
	}
	if c.Auth.Secret.String() != "***" || (Secret{}).String() != "" || c.Auth.Secret.Len() != len(word) {
		t.Error("mask")
	}
	if !c.Auth.Secret.Equal(NewSecret([]byte(word))) || (Secret{}).Equal(Secret{}) || c.Auth.Secret.Equal(c.Auth.TargetSecret) {
		t.Error("Equal")
	}
	c.Auth.Secret.Wipe()
	if !c.Auth.Secret.IsZero() || !m.cfg.Auth.Secret.IsZero() {
		t.Error("a wiped secret lives on")
	}
}

// TestStatusTable: every status of the table has a meaning of its own and is reached through errors.Is.
func TestStatusTable(t *testing.T) {
	meanings := make(map[error]bool)
	for code, want := range statusTable {
		err := error(statusError("iqn.2003-01.org.example:t1", uint8(code>>8), uint8(code), nil))
		if !errors.Is(err, want) || meanings[want] {
			t.Errorf("%04x: %v", code, err)
		}
		meanings[want] = true
	}
	if len(statusTable) != 17 {
		t.Errorf("%d status codes, RFC 7143 section 11.13.5 has 17 besides success", len(statusTable))
	}
}

// TestLost: a lost connection may be retried, keeps its cause, and names the likely reason only where it is likely.
func TestLost(t *testing.T) {
	for i, m := range machines(t) {
		m.Start()
		err := m.Lost(io.ErrUnexpectedEOF)
		var le *LoginError
		if !errors.As(err, &le) || !le.Retryable() || !errors.Is(err, ErrConnectionLost) || !errors.Is(err, io.ErrUnexpectedEOF) ||
			strings.Contains(err.Error(), "CHAP") == m.cfg.Auth.enabled() {
			t.Errorf("%d: %v", i, err)
		}
		if _, _, err := m.Step(&pdu.BHS{}, nil); err == nil {
			t.Error("the machine lives on")
		}
	}
}

func TestRetryOf(t *testing.T) {
	lost := &LoginError{Err: fmt.Errorf("%w: reset", ErrConnectionLost)}
	for _, c := range []struct {
		err  error
		want Retry
	}{
		{nil, RetryNever}, {context.Canceled, RetryNever}, {context.DeadlineExceeded, RetryLater}, {io.EOF, RetryLater},
		{protocolErrorf("6", "odd"), RetryLater}, {lost, RetryNow}, {fmt.Errorf("session 2: %w", lost), RetryNow},
		{statusError("t", 1, 1, nil), RetryElsewhere}, {statusError("t", 2, 1, nil), RetryNever}, {statusError("t", 2, 3, nil), RetryElsewhere},
		{statusError("t", 3, 2, nil), RetryLater}, {&LoginError{Err: ErrNoISER}, RetryNever}, {&LoginError{Err: ErrAuthFailed}, RetryNever},
	} {
		if got := RetryOf(c.err); got != c.want {
			t.Errorf("%v: retry %v, want %v", c.err, got, c.want)
		}
	}
	if _, ok := (&LoginError{Class: 2, Detail: 2}).Redirection(); ok {
		t.Error("a redirection of class 2")
	}
}

// TestParameters: the table for showing has every key that means something, with what each side said.
func TestParameters(t *testing.T) {
	m, err := New(Config{InitiatorName: "iqn.2003-01.org.example:host", TargetName: "iqn.2003-01.org.example:t1", SessionType: Normal, Transport: ISER})
	if err != nil {
		t.Fatal(err)
	}
	m.Start()
	answer := func(csg, nsg pdu.Stage, text string) *Result {
		var b pdu.BHS
		h := pdu.NewLoginResponse(&b)
		h.SetStage(true, false, csg, nsg)
		h.SetTSIH(1)
		h.SetDataSegmentLength(len(text))
		_, res, err := m.Step(&b, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	answer(0, 1, "AuthMethod=None\x00")
	res := answer(1, 3, "RDMAExtensions=Yes\x00InitiatorRecvDataSegmentLength=4096\x00MaxAHSLength=512\x00MaxBurstLength=65536\x00InitialR2T=NotUnderstood\x00")
	got := map[string]Parameter{}
	for _, p := range res.Parameters {
		if res.Negotiated[p.Key] != p.Value || got[p.Key].Key != "" {
			t.Errorf("%+v, but %q was negotiated", p, res.Negotiated[p.Key])
		}
		got[p.Key] = p
	}
	if len(got) != len(res.Negotiated) {
		t.Errorf("%d parameters, %d negotiated", len(got), len(res.Negotiated))
	}
	for _, want := range []Parameter{
		{"InitiatorRecvDataSegmentLength", "4096", "8192", "4096"}, {"MaxAHSLength", "512", "", "512"}, {"MaxBurstLength", "65536", "16776192", "65536"},
		{"InitialR2T", "Yes", "Yes", "NotUnderstood"}, {"TargetRecvDataSegmentLength", "8192", "8192", ""}, {"iSERHelloRequired", "No", "", ""},
		{"TaskReporting", "RFC3720", "", ""},
	} {
		if got[want.Key] != want {
			t.Errorf("%+v, want %+v", got[want.Key], want)
		}
	}
	if k := res.Keys; k.MaxRecvDataSegmentLength != 4096 || k.TargetMaxRecvDataSegmentLength != 8192 {
		t.Errorf("segments of %d and %d bytes", k.MaxRecvDataSegmentLength, k.TargetMaxRecvDataSegmentLength)
	}
}

func TestSecretPolicy(t *testing.T) {
	a := Auth{User: "me", Secret: NewSecret([]byte("short")), TargetSecret: NewSecret([]byte("elevenbytes"))}
	if list := a.Weaknesses(); len(list) != 2 || strings.Contains(strings.Join(list, " "), "elevenbytes") || a.check() != nil {
		t.Errorf("weaknesses %q, check %v", list, a.check())
	}
	a.Strong = true
	if err := a.check(); err == nil {
		t.Error("short secrets pass")
	}
	one, err := GenerateSecret(nil)
	other, err2 := GenerateSecret(nil)
	if err != nil || err2 != nil || len(one) != 32 || bytes.Equal(one, other) {
		t.Errorf("secrets of %d bytes, %v, %v", len(one), err, err2)
	}
	a.Secret, a.TargetSecret = NewSecret(one), NewSecret(other)
	if err := a.check(); err != nil || len(a.Weaknesses()) != 0 {
		t.Errorf("%v, %v", err, a.Weaknesses())
	}
	if _, err := GenerateSecret(bytes.NewReader(one[:15])); err == nil {
		t.Error("a secret of 15 random bytes")
	}
}

// TestRowsComplete: every row can be read, written and proposed.
func TestRowsComplete(t *testing.T) {
	for i := range rows {
		r := &rows[i]
		set := 0
		for _, ok := range []bool{r.flag != nil, r.num != nil, r.dur != nil, r.digest != nil, r.text != nil} {
			if ok {
				set++
			}
		}
		k := rfcKeys
		if set != 1 || r.relevant == 0 || r.propose&^r.relevant != 0 || r.value(&k, true) == "" || rowOf(r.name) != i {
			t.Errorf("row %s", r.name)
		}
		if r.numeric() && (r.number(&k) < r.lo || r.number(&k) > r.hi) {
			t.Errorf("%s: default %d is not allowed", r.name, r.number(&k))
		}
		if r.propose != 0 && r.kind == declared && r.mine == nil {
			t.Errorf("%s: nothing of ours to declare", r.name)
		}
	}
	for _, tr := range []Transport{TCP, ISER} {
		for _, s := range []SessionType{Normal, Discovery} {
			c := Config{InitiatorName: "iqn.2003-01.org.example:host", SessionType: s, Transport: tr}
			if s == Normal {
				c.TargetName = "iqn.2003-01.org.example:t1"
			}
			if _, err := New(c); err != nil {
				t.Errorf("defaults of %v %v: %v", tr, s, err)
			}
		}
	}
}

// machines is one machine of each sort, for tests that throw things at them.
func machines(t testing.TB) []*Machine {
	var list []*Machine
	for _, c := range []Config{
		{SessionType: Normal, Transport: TCP, HeaderDigest: []Digest{DigestCRC32C, DigestNone}},
		{SessionType: Normal, Transport: ISER},
		{SessionType: Discovery, Transport: ISER},
		{SessionType: Normal, Transport: TCP, Auth: Auth{User: "u", Secret: NewSecret([]byte("s"))}},
		{SessionType: Normal, Transport: ISER, Auth: Auth{User: "u", Secret: NewSecret([]byte("s")), TargetSecret: NewSecret([]byte("t"))}},
	} {
		c.InitiatorName, c.ISID, c.ITT, c.Rand = "iqn.2003-01.org.example:host", scriptISID, scriptITT, new(counter)
		if c.SessionType == Normal {
			c.TargetName = "iqn.2003-01.org.example:t1"
		}
		m, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, m)
	}
	return list
}

// drive feeds a machine until it ends and checks what must always hold. next gives the text and the flag byte of each response.
func drive(t testing.TB, m *Machine, next func(step int) (flags byte, text []byte, ok bool)) *Result {
	req := m.Start()
	proposed := make(map[string]bool)
	for step := 0; ; step++ {
		if step > maxRequests {
			t.Fatal("no end")
		}
		if err := req.BHS.Valid(pdu.FromInitiator, len(req.Text)); err != nil || len(req.Text) > maxLoginText {
			t.Fatalf("request %v with %d bytes: %v", &req.BHS, len(req.Text), err)
		}
		if !pdu.AsLoginRequest(&req.BHS).Continue() && len(req.Text) > 0 && req.Text[len(req.Text)-1] == 0 {
			keys, err := pdu.DecodeKeys(req.Text)
			if err == nil {
				for _, k := range keys {
					if rowOf(k.Name) >= 0 && proposed[k.Name] {
						t.Fatalf("%s was sent twice", k.Name)
					}
					proposed[k.Name] = true
				}
			}
		}
		flags, text, ok := next(step)
		if !ok {
			return nil
		}
		var b pdu.BHS
		h := pdu.NewLoginResponse(&b)
		h.SetISID(scriptISID)
		h.SetInitiatorTaskTag(scriptITT)
		h.SetTSIH(1)
		h.SetDataSegmentLength(len(text))
		b[1] = flags
		n, res, err := m.Step(&b, text)
		if count(n != nil, res != nil, err != nil) != 1 {
			t.Fatal("not exactly one of request, result, error")
		}
		if err != nil {
			var le *LoginError
			var pe *pdu.ProtocolError
			if !errors.As(err, &le) && !errors.As(err, &pe) {
				t.Fatalf("error %T %v", err, err)
			}
			return nil
		}
		if res != nil {
			k := &res.Keys
			if k.MaxConnections != 1 || k.ErrorRecoveryLevel != 0 || !k.DataPDUInOrder || !k.DataSequenceInOrder || k.FirstBurstLength > k.MaxBurstLength ||
				k.TargetMaxRecvDataSegmentLength < 512 || m.cfg.Transport == ISER && m.cfg.SessionType == Normal && (!k.RDMAExtensions || k.ImmediateData || !k.InitialR2T) {
				t.Fatalf("outcome %+v", *k)
			}
			return res
		}
		req = n
	}
}

// TestRandomTarget is a target that sends known and unknown keys with plausible and wild values, in any stage.
func TestRandomTarget(t *testing.T) {
	values := []string{"Yes", "No", "None", "CRC32C", "CRC32C,None", "0", "1", "2", "512", "8192", "65536", "16777215", "99999999999", "Reject", "Irrelevant",
		"NotUnderstood", "", "CHAP", "0x00", "0x10"}
	names := []string{"AuthMethod", "CHAP_A", "CHAP_I", "CHAP_C", "CHAP_N", "CHAP_R", "TargetAlias", "TargetPortalGroupTag", "TaskReporting", "IFMarker", "OFMarkInt", "X-a"}
	for i := range rows {
		names = append(names, rows[i].name)
	}
	r := rand.New(rand.NewPCG(7, 7))
	done := 0
	for range 4000 {
		for _, m := range machines(t) {
			res := drive(t, m, func(step int) (byte, []byte, bool) {
				var keys pdu.Keys
				if step == 0 && r.IntN(4) > 0 {
					keys.Add("AuthMethod", m.cfg.Auth.methods()[0])
				}
				for range r.IntN(4) {
					keys.Add(names[r.IntN(len(names))], values[r.IntN(len(values))])
				}
				if m.stage == pdu.OperationalNegotiation && r.IntN(2) == 0 {
					keys.Add("RDMAExtensions", "Yes")
				}
				flags := byte(m.stage) << 2
				if m.transit && r.IntN(2) == 0 {
					flags |= 0x81
					if m.stage == pdu.OperationalNegotiation {
						flags |= 3
					}
				}
				return flags, keys.Append(nil), true
			})
			if res != nil {
				done++
			}
		}
	}
	if done < 100 {
		t.Fatalf("only %d logins came to an end", done)
	}
}

// FuzzMachine cuts the input into responses (flag byte, length in two bytes, text) and feeds them to each sort of machine.
func FuzzMachine(f *testing.F) {
	add := func(responses ...string) {
		var b []byte
		for _, s := range responses {
			b = append(b, s[0], byte((len(s)-1)>>8), byte(len(s)-1))
			b = append(b, s[1:]...)
		}
		f.Add(b)
	}
	add("\x81AuthMethod=None\x00TargetPortalGroupTag=1\x00", "\x87RDMAExtensions=Yes\x00MaxBurstLength=65536\x00")
	add("\x00AuthMethod=CHAP\x00", "\x00CHAP_A=5\x00CHAP_I=1\x00CHAP_C=0x00\x00", "\x81CHAP_N=a\x00CHAP_R=0x00\x00", "\x87")
	add("\x81AuthMethod=None\x00", "\x04IFMarker=No\x00OFMarkInt=1~2\x00X-a=b\x00", "\x44Target", "\x04Alias=a\x00", "\x87RDMAExtensions=Yes\x00")
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, m := range machines(t) {
			rest := data
			drive(t, m, func(int) (byte, []byte, bool) {
				if len(rest) < 3 {
					return 0, nil, false
				}
				flags, n := rest[0], min(int(rest[1])<<8|int(rest[2]), len(rest)-3)
				text := rest[3 : 3+n]
				rest = rest[3+n:]
				return flags, text, true
			})
		}
	})
}

// FuzzHeader feeds any 48 bytes and any segment as the first response.
func FuzzHeader(f *testing.F) {
	var b pdu.BHS
	h := pdu.NewLoginResponse(&b)
	h.SetISID(scriptISID)
	h.SetInitiatorTaskTag(scriptITT)
	h.SetStatus(1, 1)
	f.Add(b[:], []byte("TargetAddress=10.0.0.1:3260\x00"))
	f.Fuzz(func(t *testing.T, header, segment []byte) {
		if len(header) < pdu.HeaderLength {
			return
		}
		for _, m := range machines(t) {
			m.Start()
			req, res, err := m.Step(pdu.HeaderOf(header), segment)
			if count(req != nil, res != nil, err != nil) != 1 || res != nil {
				t.Fatal(req, res, err)
			}
		}
	})
}

// FuzzCHAP feeds the four values that a target sends.
func FuzzCHAP(f *testing.F) {
	f.Add("5", "1", "0x00", "0x0000")
	f.Add("8", "0xff", "0bAAE=", "0b")
	f.Fuzz(func(t *testing.T, a, i, c, r string) {
		x, err := newCHAP(&Auth{User: "u", Secret: NewSecret([]byte("s")), TargetSecret: NewSecret([]byte("t"))}, new(counter))
		if err != nil {
			t.Fatal(err)
		}
		keys, err := x.answer(pdu.Keys{{Name: "CHAP_A", Value: a}, {Name: "CHAP_I", Value: i}, {Name: "CHAP_C", Value: c}})
		if err != nil {
			if keys != nil {
				t.Fatal("error and value")
			}
			return
		}
		if x.verify(pdu.Keys{{Name: "CHAP_N", Value: "t"}, {Name: "CHAP_R", Value: r}}) == nil && !strings.Contains(r, hex.EncodeToString(x.digest(x.id, x.auth.TargetSecret, x.challenge))) &&
			!strings.HasPrefix(strings.ToLower(r), "0b") && !strings.EqualFold(r, "0x"+hex.EncodeToString(x.digest(x.id, x.auth.TargetSecret, x.challenge))) {
			t.Fatal("a wrong proof was accepted")
		}
	})
}
