package testtarget

import (
	"crypto/md5"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"
	"strconv"
	"strings"
)

// CHAP is what the target knows for authentication (RFC 7143 section 12.1.3).
type CHAP struct {
	User, Secret             string // of the initiator
	TargetUser, TargetSecret string // of the target, for the mutual direction; "" refuses to be asked

	// Algorithms are the values of CHAP_A that the target takes (5 MD5, 6 SHA-1, 7 SHA-256, 8 SHA3-256); nil means all. The initiator's
	// order decides.
	Algorithms []int

	// OpenDiscovery asks for no authentication in discovery sessions.
	OpenDiscovery bool
}

// chapHashes are the algorithms by CHAP_A.
var chapHashes = map[string]func() hash.Hash{
	"5": md5.New, "6": sha1.New, "7": sha256.New, "8": func() hash.Hash { return sha3.New256() },
}

type chapState struct {
	step      int // 0: AuthMethod expected, 1: CHAP_A expected, 2: CHAP_N and CHAP_R expected
	hash      func() hash.Hash
	id        byte
	challenge []byte
}

// security answers the keys of the security stage.
func (c *Conn) security(pairs []pair) (reply []pair, status int) {
	keys := make(map[string]string)
	for _, kv := range pairs {
		keys[kv.key] = kv.value
		switch kv.key {
		case "AuthMethod", "CHAP_A", "CHAP_N", "CHAP_R", "CHAP_I", "CHAP_C":
		default:
			reply = append(reply, c.negotiate([]pair{kv})...)
		}
	}
	s, chap := &c.login.chap, c.target.config.CHAP
	if methods, ok := keys["AuthMethod"]; ok {
		want := "None"
		if !c.login.secure {
			want = "CHAP"
		}
		for _, m := range strings.Split(methods, ",") {
			if m == want {
				s.step = 1
				return append(reply, pair{"AuthMethod", want}), 0
			}
		}
		return nil, statusAuthFailed
	}
	if chap == nil || c.login.secure {
		return reply, 0
	}
	switch s.step {
	case 1:
		for _, a := range strings.Split(keys["CHAP_A"], ",") {
			if h, ok := chapHashes[a]; ok && chap.takes(a) {
				s.hash, s.step = h, 2
				b := make([]byte, 1+h().Size())
				if _, err := rand.Read(b); err != nil {
					panic(err)
				}
				s.id, s.challenge = b[0], b[1:]
				return append(reply, pair{"CHAP_A", a}, pair{"CHAP_I", fmt.Sprint(s.id)},
					pair{"CHAP_C", "0x" + hex.EncodeToString(s.challenge)}), 0
			}
		}
		return nil, statusAuthFailed
	case 2:
		got, err := decodeBinary(keys["CHAP_R"])
		if err != nil || keys["CHAP_N"] != chap.User ||
			subtle.ConstantTimeCompare(got, chapResponse(s.hash, s.id, chap.Secret, s.challenge)) != 1 {
			return nil, statusAuthFailed
		}
		if id, ok := keys["CHAP_I"]; ok {
			var n byte
			challenge, err := decodeBinary(keys["CHAP_C"])
			if _, e := fmt.Sscan(id, &n); e != nil || err != nil || chap.TargetSecret == "" || string(challenge) == string(s.challenge) {
				return nil, statusAuthFailed
			}
			reply = append(reply, pair{"CHAP_N", chap.TargetUser},
				pair{"CHAP_R", "0x" + hex.EncodeToString(chapResponse(s.hash, n, chap.TargetSecret, challenge))})
		}
		c.login.secure = true
		return reply, 0
	}
	return nil, statusAuthFailed
}

func (c *CHAP) takes(algorithm string) bool {
	n, err := strconv.Atoi(algorithm)
	return err == nil && (c.Algorithms == nil || slices.Contains(c.Algorithms, n))
}

func chapResponse(h func() hash.Hash, id byte, secret string, challenge []byte) []byte {
	d := h()
	d.Write([]byte{id})
	d.Write([]byte(secret))
	d.Write(challenge)
	return d.Sum(nil)
}

// decodeBinary reads a large binary value: 0x hexadecimal or 0b base64 (section 6.1).
func decodeBinary(s string) ([]byte, error) {
	switch {
	case strings.HasPrefix(s, "0x"), strings.HasPrefix(s, "0X"):
		return hex.DecodeString(s[2:])
	case strings.HasPrefix(s, "0b"), strings.HasPrefix(s, "0B"):
		return base64.StdEncoding.DecodeString(s[2:])
	}
	return nil, fmt.Errorf("%q is not a binary value", s)
}
