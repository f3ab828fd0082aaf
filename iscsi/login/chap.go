package login

import (
	"bytes"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strconv"
	"strings"

	"iserd.org/iserd/iscsi/pdu"
)

// CHAPAlgorithm is a hash for CHAP, by its number in key CHAP_A (IANA registry of PPP authentication algorithms).
type CHAPAlgorithm uint8

// Algorithms. MD5 is the only one that every target has; the SHA ones are what RFC 7143 and IANA added.
const (
	CHAPMD5     CHAPAlgorithm = 5
	CHAPSHA1    CHAPAlgorithm = 6
	CHAPSHA256  CHAPAlgorithm = 7
	CHAPSHA3256 CHAPAlgorithm = 8
)

// allAlgorithms is the order of preference when the configuration has none. SHA-256 comes last although it is not the weakest: tgt (1.0.85)
// takes number 7 for SHA1, chooses it when it stands before 5, and then refuses the right answer. A target that knows SHA-256 knows
// SHA3-256 too, or has no MD5, so it still gets a good one.
var allAlgorithms = []CHAPAlgorithm{CHAPSHA3256, CHAPSHA1, CHAPMD5, CHAPSHA256}

// String is the usual name.
func (a CHAPAlgorithm) String() string {
	switch a {
	case CHAPMD5:
		return "MD5"
	case CHAPSHA1:
		return "SHA1"
	case CHAPSHA256:
		return "SHA-256"
	case CHAPSHA3256:
		return "SHA3-256"
	}
	return fmt.Sprintf("CHAP algorithm %d", uint8(a))
}

func (a CHAPAlgorithm) hash() hash.Hash {
	switch a {
	case CHAPMD5:
		return md5.New()
	case CHAPSHA1:
		return sha1.New()
	case CHAPSHA256:
		return sha256.New()
	case CHAPSHA3256:
		return sha3.New256()
	}
	return nil
}

// Auth is how the two sides prove who they are. The zero value offers AuthMethod=None only.
type Auth struct {
	User   string // CHAP_N that we send
	Secret Secret // with it we answer the target's challenge

	TargetUser   string // CHAP_N that the target has to send; empty accepts any
	TargetSecret Secret // with it the target has to answer ours (mutual CHAP)

	// Required refuses a target that does not ask for CHAP. Mutual CHAP always does: a target that skips it has not proved anything.
	Required   bool
	Algorithms []CHAPAlgorithm // in order of preference; nil for all that exist

	// Strong refuses what is weak: MD5 and SHA1, of which no proof is taken or given, and secrets of less than 96 bits. Targets that know nothing
	// better cannot be logged in to then, and RFC 7143 section 12.1.3, which wants MD5 to be offered always, is not kept. With a secret it is Required.
	Strong bool
}

// minSecret is the length of a secret that may stand alone, without IPsec, in bytes (RFC 7143 section 9.2.1: 96 bits).
const minSecret = 12

// weak tells what has been broken, or is about to be.
func (a CHAPAlgorithm) weak() bool { return a == CHAPMD5 || a == CHAPSHA1 }

// algorithms is what is offered, in order of preference.
func (a *Auth) algorithms() []CHAPAlgorithm {
	list := a.Algorithms
	if len(list) == 0 {
		list = allAlgorithms
	}
	if a.Strong {
		list = slices.DeleteFunc(slices.Clone(list), CHAPAlgorithm.weak)
	}
	return list
}

// Weaknesses lists what the settings have below the recommendations of RFC 7143 section 9.2.1, for a warning; nothing where Strong is set.
func (a *Auth) Weaknesses() []string {
	var list []string
	for _, s := range []struct {
		what   string
		secret Secret
	}{{"secret", a.Secret}, {"target's secret", a.TargetSecret}} {
		if n := s.secret.Len(); n > 0 && n < minSecret {
			list = append(list, fmt.Sprintf("the %s has %d bytes, fewer than the %d that are safe without IPsec", s.what, n, minSecret))
		}
	}
	return list
}

// GenerateSecret makes a secret of 128 random bits, as 32 hexadecimal digits (RFC 7143 section 9.2.1: a means to generate it is due). random
// is the source; nil for crypto/rand.
func GenerateSecret(random io.Reader) ([]byte, error) {
	if random == nil {
		random = rand.Reader
	}
	var b [16]byte
	if _, err := io.ReadFull(random, b[:]); err != nil {
		return nil, fmt.Errorf("no random bytes for a secret: %w", err)
	}
	return hex.AppendEncode(nil, b[:]), nil
}

// enabled tells whether CHAP is offered at all.
func (a *Auth) enabled() bool { return !a.Secret.IsZero() }

// mutual tells whether the target has to prove itself too.
func (a *Auth) mutual() bool { return !a.TargetSecret.IsZero() }

// methods is the list for key AuthMethod.
func (a *Auth) methods() []string {
	switch {
	case !a.enabled():
		return []string{valueNone}
	case a.Required || a.Strong || a.mutual():
		return []string{"CHAP"}
	}
	return []string{"CHAP", valueNone}
}

// check finds settings that can not work or are not safe.
func (a *Auth) check() error {
	switch {
	case a.Required && !a.enabled():
		return errors.New("auth: authentication is required but there is no secret")
	case a.mutual() && !a.enabled():
		return errors.New("auth: a target secret needs an initiator secret: mutual CHAP begins with one-way CHAP")
	case a.enabled() && (a.User == "" || len(a.User) > 255 || strings.ContainsRune(a.User, 0)):
		return errors.New("auth: the user name has to have 1 to 255 bytes and no NUL")
	case a.mutual() && a.Secret.Equal(a.TargetSecret):
		return errors.New("auth: the secrets of the two directions are the same; then an answer could be reflected")
	}
	for _, alg := range a.Algorithms {
		if alg.hash() == nil {
			return fmt.Errorf("auth: %v is not known", alg)
		}
		if a.Strong && alg.weak() {
			return fmt.Errorf("auth: %v is weak, and weak algorithms are refused", alg)
		}
	}
	if list := a.Weaknesses(); a.Strong && len(list) > 0 {
		return fmt.Errorf("auth: weak secrets are refused: %s", list[0])
	}
	return nil
}

// Limits of CHAP values, in bytes: a challenge has at most 1024 (RFC 7143 section 12.1.3).
const maxChallenge = 1024

// chap is the state of one CHAP exchange:
//
//	-> CHAP_A=<list>
//	<- CHAP_A=<one> CHAP_I CHAP_C
//	-> CHAP_N CHAP_R [CHAP_I CHAP_C]
//	<- [CHAP_N CHAP_R]
//
// Source: RFC 7143 section 12.1.3.
type chap struct {
	auth       *Auth
	algorithms []CHAPAlgorithm
	chosen     CHAPAlgorithm
	id         byte   // of our challenge
	challenge  []byte // ours, 32 random bytes; nil unless mutual
	response   []byte // what we answered
}

// newCHAP draws our own challenge right away, so that a target that sends the same one is caught.
func newCHAP(a *Auth, random io.Reader) (*chap, error) {
	c := &chap{auth: a, algorithms: a.algorithms()}
	if a.mutual() {
		var b [33]byte
		if _, err := io.ReadFull(random, b[:]); err != nil {
			return nil, fmt.Errorf("auth: no random bytes for a challenge: %w", err)
		}
		c.id, c.challenge = b[0], b[1:]
	}
	return c, nil
}

// offer is the first CHAP step.
func (c *chap) offer() pdu.Keys {
	var s []string
	for _, a := range c.algorithms {
		s = append(s, strconv.Itoa(int(a)))
	}
	return pdu.Keys{{Name: "CHAP_A", Value: strings.Join(s, ",")}}
}

// answer takes the target's challenge and gives our response, and our challenge for mutual CHAP.
func (c *chap) answer(keys pdu.Keys) (pdu.Keys, error) {
	alg, err := need(keys, "CHAP_A")
	if err != nil {
		return nil, err
	}
	n, ok := parseNumber(alg)
	if !ok || n > 255 || !slices.Contains(c.algorithms, CHAPAlgorithm(n)) {
		return nil, fmt.Errorf("%w: target chose CHAP algorithm %q, which was not offered", ErrAuthFailed, clip(alg))
	}
	c.chosen = CHAPAlgorithm(n)
	ident, err := need(keys, "CHAP_I")
	if err != nil {
		return nil, err
	}
	id, ok := parseNumber(ident)
	if !ok || id > 255 {
		return nil, protocolErrorf("12.1.3", "CHAP_I=%q is no number from 0 to 255", clip(ident))
	}
	text, err := need(keys, "CHAP_C")
	if err != nil {
		return nil, err
	}
	challenge, err := decodeBinary("CHAP_C", text, maxChallenge)
	if err != nil {
		return nil, err
	}
	if bytes.Equal(challenge, c.challenge) {
		return nil, fmt.Errorf("%w: target reflects our own challenge", ErrAuthFailed)
	}
	c.response = c.digest(byte(id), c.auth.Secret, challenge)
	out := pdu.Keys{{Name: "CHAP_N", Value: c.auth.User}, {Name: "CHAP_R", Value: "0x" + hex.EncodeToString(c.response)}}
	if c.auth.mutual() {
		out.Add("CHAP_I", strconv.Itoa(int(c.id)))
		out.Add("CHAP_C", "0x"+hex.EncodeToString(c.challenge))
	}
	return out, nil
}

// verify checks the target's answer to our challenge, in constant time. Without mutual CHAP there is nothing to check.
func (c *chap) verify(keys pdu.Keys) error {
	if !c.auth.mutual() {
		return nil
	}
	name, ok := keys.Get("CHAP_N")
	if !ok {
		return fmt.Errorf("%w: target did not prove itself (no CHAP_N)", ErrAuthFailed)
	}
	text, ok := keys.Get("CHAP_R")
	if !ok {
		return fmt.Errorf("%w: target did not prove itself (no CHAP_R)", ErrAuthFailed)
	}
	got, err := decodeBinary("CHAP_R", text, maxChallenge)
	if err != nil {
		return err
	}
	if c.auth.TargetUser != "" && subtle.ConstantTimeCompare([]byte(name), []byte(c.auth.TargetUser)) != 1 {
		return fmt.Errorf("%w: target calls itself %q", ErrAuthFailed, clip(name))
	}
	if bytes.Equal(got, c.response) {
		return fmt.Errorf("%w: target reflects our own response", ErrAuthFailed)
	}
	if subtle.ConstantTimeCompare(got, c.digest(c.id, c.auth.TargetSecret, c.challenge)) != 1 {
		return fmt.Errorf("%w: target does not know its secret", ErrAuthFailed)
	}
	return nil
}

// digest is H(identifier, secret, challenge), RFC 1994 section 4.1.
func (c *chap) digest(id byte, secret Secret, challenge []byte) []byte {
	h := c.chosen.hash()
	h.Write([]byte{id})
	h.Write(secret.bytes())
	h.Write(challenge)
	return h.Sum(nil)
}

// need is the value of a key that a CHAP step can not do without.
func need(keys pdu.Keys, name string) (string, error) {
	v, ok := keys.Get(name)
	switch {
	case !ok:
		return "", protocolErrorf("12.1.3", "CHAP without %s", name)
	case isRefusal(v):
		return "", fmt.Errorf("%w: target answers %s to %s", ErrAuthFailed, v, name)
	}
	return v, nil
}

// decodeBinary reads a binary value: "0x" and hex digits, or "0b" and base64; 1 to limit bytes.
func decodeBinary(name, s string, limit int) ([]byte, error) {
	var b []byte
	var err error
	switch {
	case len(s) > 2*limit+2:
		err = errors.New("too long")
	case len(s) > 2 && (s[:2] == "0x" || s[:2] == "0X"):
		b, err = hex.DecodeString(s[2:])
	case len(s) > 2 && (s[:2] == "0b" || s[:2] == "0B"):
		b, err = base64.StdEncoding.DecodeString(s[2:])
	default:
		err = errors.New("no 0x or 0b in front")
	}
	if err == nil && (len(b) == 0 || len(b) > limit) {
		err = fmt.Errorf("%d bytes", len(b))
	}
	if err != nil {
		return nil, protocolErrorf("12.1.3", "%s is no binary value of 1 to %d bytes", name, limit)
	}
	return b, nil
}
