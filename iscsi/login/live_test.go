package login

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/internal/require"
	"iserd.org/iserd/iscsi/pdu"
)

// dialogue logs in to a real target over TCP and gives the transcript in the form of testdata/*.txt, and how it ended.
func dialogue(t *testing.T, portal string, c Config) (string, *Result, error) {
	conn, err := net.DialTimeout("tcp", portal, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	for req := m.Start(); ; {
		log.WriteString(showRequest(t, req) + "\n")
		out := append(append([]byte{}, req.BHS[:]...), req.Text...)
		if _, err := conn.Write(append(out, make([]byte, pdu.Padding(len(req.Text)))...)); err != nil {
			t.Fatalf("%s%v", log.String(), err)
		}
		var head [pdu.HeaderLength]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return log.String(), nil, m.Lost(err)
		}
		h := pdu.HeaderOf(head[:])
		segment := make([]byte, pdu.Padded(h.DataSegmentLength()))
		if _, err := io.ReadFull(conn, segment); err != nil {
			t.Fatalf("%s%v", log.String(), err)
		}
		segment = segment[:h.DataSegmentLength()]
		fmt.Fprintf(&log, "<- %s\n   %s\n\n", strings.TrimPrefix(h.String(), "Login Response "), strings.ReplaceAll(string(segment), "\x00", "\n   "))
		next, res, err := m.Step(h, segment)
		if next == nil {
			return log.String(), res, err
		}
		req = next
	}
}

// TestLive logs in to the target that the environment names, over TCP:
//
//	LOGIN_PORTAL=10.0.0.1:3260 LOGIN_TARGET=iqn....  an open target
//	LOGIN_CHAP=iqn....        a target with CHAP user "me", secret "initiatorsecret", mutual user "them", secret "targetsecret12"
//	LOGIN_MOVED=iqn....       a target that redirects
//	LOGIN_ALGORITHMS=5,6,7,8  what the CHAP target has; 5 without it
func TestLive(t *testing.T) {
	portal, target := os.Getenv("LOGIN_PORTAL"), os.Getenv("LOGIN_TARGET")
	if portal == "" || target == "" {
		require.Need(t, "target", errors.New("LOGIN_PORTAL and LOGIN_TARGET name no target"))
	}
	base := Config{
		InitiatorName: "iqn.2003-01.org.example:host", TargetName: target, SessionType: Normal, Transport: TCP, ISID: scriptISID, ITT: 1, CmdSN: 1,
		InitiatorAlias: "host",
	}
	ok := func(t *testing.T, c Config) *Result {
		log, res, err := dialogue(t, portal, c)
		if err != nil {
			t.Fatalf("%s%v", log, err)
		}
		t.Logf("%s%s", log, showResult(res))
		return res
	}
	t.Run("normal", func(t *testing.T) { ok(t, base) })
	t.Run("unsolicited", func(t *testing.T) {
		c := base
		k := DefaultKeys(TCP, Normal)
		k.InitialR2T, k.MaxOutstandingR2T, k.ErrorRecoveryLevel, k.MaxBurstLength = false, 8, 2, 16776192
		c.Keys = &k
		ok(t, c)
	})
	t.Run("digests", func(t *testing.T) {
		c := base
		c.HeaderDigest, c.DataDigest = []Digest{DigestCRC32C, DigestNone}, []Digest{DigestCRC32C}
		log, res, err := dialogue(t, portal, c)
		switch {
		case errors.Is(err, ErrNoDigest): // tgt
			t.Log(err)
		case err != nil || res.Keys.HeaderDigest != DigestCRC32C || res.Keys.DataDigest != DigestCRC32C:
			t.Errorf("%s%v", log, err)
		}
	})
	t.Run("discovery", func(t *testing.T) {
		c := base
		c.SessionType, c.TargetName = Discovery, ""
		ok(t, c)
	})
	t.Run("unknown target", func(t *testing.T) {
		c := base
		c.TargetName = "iqn.2003-01.org.example:no-such-target"
		log, _, err := dialogue(t, portal, c)
		var le *LoginError
		if !errors.As(err, &le) || !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnavailable) {
			t.Errorf("%s%v", log, err)
		}
		t.Log(err)
	})
	t.Run("redirect", func(t *testing.T) {
		c := base
		if c.TargetName = os.Getenv("LOGIN_MOVED"); c.TargetName == "" {
			require.Need(t, "target", errors.New("LOGIN_MOVED names no target"))
		}
		log, _, err := dialogue(t, portal, c)
		var le *LoginError
		if !errors.As(err, &le) || !errors.Is(err, ErrMovedTemporarily) || le.Redirect == nil {
			t.Errorf("%s%v", log, err)
		}
		t.Logf("%s%v", log, err)
	})
	t.Run("chap", func(t *testing.T) {
		c := base
		if c.TargetName = os.Getenv("LOGIN_CHAP"); c.TargetName == "" {
			require.Need(t, "target", errors.New("LOGIN_CHAP names no target"))
		}
		log, _, err := dialogue(t, portal, c)
		if !errors.Is(err, ErrAuthFailed) && !errors.Is(err, ErrConnectionLost) { // LIO says nothing
			t.Errorf("%swithout a secret: %v", log, err)
		}
		t.Log("without a secret:", err)
		algorithms := os.Getenv("LOGIN_ALGORITHMS")
		if algorithms == "" {
			algorithms = "5"
		}
		for a := range strings.SplitSeq(algorithms, ",") {
			n, _ := parseNumber(a)
			for _, mutual := range []bool{false, true} {
				c.Auth = Auth{User: "me", Secret: NewSecret([]byte("initiatorsecret")), Algorithms: []CHAPAlgorithm{CHAPAlgorithm(n)}}
				if mutual {
					c.Auth.TargetUser, c.Auth.TargetSecret = "them", NewSecret([]byte("targetsecret12"))
				}
				t.Log(ok(t, c).AuthMethod)
			}
		}
		c.Auth.Algorithms = nil
		t.Log("all offered:", ok(t, c).AuthMethod)
		c.Auth.TargetSecret = NewSecret([]byte("anothersecret"))
		if log, _, err := dialogue(t, portal, c); !errors.Is(err, ErrAuthFailed) {
			t.Errorf("%swrong target secret: %v", log, err)
		}
		c.Auth.TargetSecret, c.Auth.Secret = Secret{}, NewSecret([]byte("wrongsecret123"))
		log, _, err = dialogue(t, portal, c)
		if !errors.Is(err, ErrAuthFailed) {
			t.Errorf("%swrong secret: %v", log, err)
		}
		t.Log("wrong secret:", err)
	})
}
