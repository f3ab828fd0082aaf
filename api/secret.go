package api

import (
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
)

// MaxSecretLen is the longest CHAP secret, bytes. RFC 7143 section 9.2.1 asks for at least 12 unless IPsec protects the connection; some targets
// take no more than 16.
const MaxSecretLen = 255

// Secret is a CHAP secret on its way from the user to the login. It prints as "***" in every verb of fmt and every logger, also within a larger
// value: the bytes sit behind a function, because fmt follows pointers and cannot call the methods of unexported fields.
//
// Its JSON is the secret itself, base64: the form in which requests carry it over the local sockets and in which its file holds it. So no answer,
// state or record may contain one. The zero value is no secret. Copies share the bytes.
type Secret struct{ hidden func() []byte }

// NewSecret copies b. An empty b gives the zero value.
func NewSecret(b []byte) Secret {
	if len(b) == 0 {
		return Secret{}
	}
	own := append([]byte(nil), b...)
	return Secret{func() []byte { return own }}
}

// CheckSecret tells whether b can be a CHAP secret. The error is ErrInvalidArgs and does not repeat b.
func CheckSecret(b []byte) error {
	if len(b) == 0 || len(b) > MaxSecretLen {
		return Errorf(ErrInvalidArgs, "a CHAP secret has 1 to %d bytes, this has %d", MaxSecretLen, len(b))
	}
	return nil
}

// Reveal is the secret itself. The caller does not change it.
func (s Secret) Reveal() []byte {
	if s.hidden == nil {
		return nil
	}
	return s.hidden()
}

// IsZero tells whether there is no secret.
func (s Secret) IsZero() bool { return s.hidden == nil }

// Equal compares in constant time. No secret equals no secret.
func (s Secret) Equal(o Secret) bool { return subtle.ConstantTimeCompare(s.Reveal(), o.Reveal()) == 1 }

// String is "***", or "" for no secret.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return "***"
}

// GoString is String.
func (s Secret) GoString() string { return s.String() }

// Format prints String for every verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// MarshalJSON writes the secret out, in base64.
func (s Secret) MarshalJSON() ([]byte, error) {
	return json.Marshal(base64.StdEncoding.EncodeToString(s.Reveal()))
}

// UnmarshalJSON reads what MarshalJSON has written.
func (s *Secret) UnmarshalJSON(b []byte) error {
	var text string
	if json.Unmarshal(b, &text) != nil {
		return errors.New("a secret is text in base64")
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw) > MaxSecretLen {
		return errors.New("a secret is text in base64, of at most 255 bytes")
	}
	*s = NewSecret(raw)
	return nil
}
