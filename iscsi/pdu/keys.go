package pdu

import (
	"bytes"
	"strings"
)

// Limits of text keys, in bytes.
const (
	MaxKeyLength   = 63   // RFC 7143 section 6.1
	MaxValueLength = 8192 // RFC 7143 section 6.1
)

// Key is one "key=value" of a text segment.
type Key struct {
	Name, Value string
}

// Keys is a text segment in the order of the wire. The same name may stand in it more than once; whether that is an error is for the
// caller to say (a login forbids it, a SendTargets answer lives from it).
type Keys []Key

// Get is the value of the first key with this name, and whether there is one.
func (k Keys) Get(name string) (string, bool) {
	for i := range k {
		if k[i].Name == name {
			return k[i].Value, true
		}
	}
	return "", false
}

// Add appends a key.
func (k *Keys) Add(name, value string) { *k = append(*k, Key{name, value}) }

// Append appends the wire form to dst: "name=value" and a NUL each. Nothing is padded.
//
// Preconditions: names are key names, values have no NUL; both come from this program, not from a peer.
func (k Keys) Append(dst []byte) []byte {
	for i := range k {
		dst = append(dst, k[i].Name...)
		dst = append(dst, '=')
		dst = append(dst, k[i].Value...)
		dst = append(dst, 0)
	}
	return dst
}

// String is the text on one line, for traces. Secrets do not occur: CHAP sends digests only.
func (k Keys) String() string {
	var s strings.Builder
	for i := range k {
		if i > 0 {
			s.WriteByte(' ')
		}
		s.WriteString(k[i].Name)
		s.WriteByte('=')
		s.WriteString(k[i].Value)
	}
	return s.String()
}

// DecodeKeys takes a whole text segment apart, joined from several PDUs where the C bit said so.
//
// The result holds copies; text may be reused. Memory is bounded by a small multiple of len(text), which the caller bounds: a login takes
// 64 KiB, an answer to SendTargets may be larger. Errors are *[ProtocolError]: a pair
// without "=", a name that is empty, too long or has characters no key name has, a value that is too long, text that does not end with a
// NUL (it was cut off). NUL bytes between pairs are skipped, because targets have counted the padding as text.
//
// Source: RFC 7143 section 6.1.
func DecodeKeys(text []byte) (Keys, error) {
	if len(text) == 0 {
		return nil, nil
	}
	if text[len(text)-1] != 0 {
		return nil, protocolErrorf("6.1", len(text), "text does not end with NUL: it was cut off")
	}
	keys := make(Keys, 0, min(bytes.Count(text, []byte{0}), 64))
	all := string(text)
	for off := 0; off < len(all); {
		n := strings.IndexByte(all[off:], 0)
		pair := all[off : off+n]
		if n > 0 {
			name, value, found := strings.Cut(pair, "=")
			switch {
			case !found:
				return nil, protocolErrorf("6.1", off, "text %q has no \"=\"", clip(pair))
			case name == "" || len(name) > MaxKeyLength || strings.ContainsFunc(name, notKeyRune):
				return nil, protocolErrorf("6.1", off, "%q is not a key name", clip(name))
			case len(value) > MaxValueLength:
				return nil, protocolErrorf("6.1", off, "value of %s has %d bytes, at most %d are allowed", name, len(value), MaxValueLength)
			}
			keys = append(keys, Key{name, value})
		}
		off += n + 1
	}
	return keys, nil
}

// notKeyRune tells the characters that no key name has. "#" and ":" occur in the names of extension keys.
func notKeyRune(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune(".-+@_#:", r)
}

// clip shortens hostile text for an error message.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
