package login

import (
	"crypto/subtle"
	"fmt"
)

// Secret holds a CHAP secret and prints as "***" wherever it ends up: in any fmt verb, in JSON, inside a larger value.
//
// fmt can not call methods on unexported fields, and for some verbs it follows pointers in them. So the bytes sit behind a function, which
// prints as an address whatever is done.
//
// The zero value is "no secret". Copies share the bytes.
type Secret struct{ hidden func() *[]byte }

// masked is what every print of a secret shows.
const masked = "***"

// NewSecret copies b. An empty b gives the zero value.
func NewSecret(b []byte) Secret {
	if len(b) == 0 {
		return Secret{}
	}
	own := append([]byte(nil), b...)
	return Secret{func() *[]byte { return &own }}
}

// bytes are the secret itself, nil for the zero value and after Wipe.
func (s Secret) bytes() []byte {
	if s.hidden == nil {
		return nil
	}
	return *s.hidden()
}

// IsZero tells whether there is no secret.
func (s Secret) IsZero() bool { return s.Len() == 0 }

// Len is the number of bytes; RFC 7143 section 12.1.3 asks for 12 or more unless IPsec protects the connection.
func (s Secret) Len() int { return len(s.bytes()) }

// Equal compares in constant time. Two zero secrets are not equal.
func (s Secret) Equal(o Secret) bool {
	return !s.IsZero() && !o.IsZero() && subtle.ConstantTimeCompare(s.bytes(), o.bytes()) == 1
}

// Wipe overwrites the bytes, for all copies.
func (s Secret) Wipe() {
	if s.hidden != nil {
		b := s.hidden()
		clear(*b)
		*b = nil
	}
}

// String is "***", or "" for no secret.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return masked
}

// GoString is String.
func (s Secret) GoString() string { return s.String() }

// Format prints String for every verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// MarshalText is String; so no encoder writes a secret out.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
