package pdu

import (
	"fmt"
	"strings"
)

// MaxNameLength is the longest iSCSI name, in bytes (RFC 7143 section 4.2.7).
const MaxNameLength = 223

// NormalizeName checks an iSCSI name and returns it in lower case, the form in which names are compared, stored and sent.
//
// Accepted are the three types of RFC 7143 section 4.2.7: "iqn." year "-" month "." reversed domain [":" anything], "eui." with 16 hex
// digits, "naa." with 16 or 32. The rest of an iqn is letters, digits, "-", "." and ":", and also "_", which the string profile excludes
// but administrators use. Everything else is refused: "/", blanks, control characters, and names beyond ASCII (those would need the
// Unicode mapping of the profile). So a name that passed is safe as a path component, in a log line and in a unit name.
func NormalizeName(s string) (string, error) {
	n := asciiLower(s)
	if err := ValidName(n); err != nil {
		return "", err
	}
	return n, nil
}

// ValidName checks a name that is already in its normal form; an upper-case letter is an error. See [NormalizeName].
func ValidName(s string) error {
	fail := func(why string) error { return fmt.Errorf("iscsi name %q: %s", clip(s), why) }
	if len(s) > MaxNameLength {
		return fail(fmt.Sprintf("%d bytes long, at most %d are allowed", len(s), MaxNameLength))
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '.', c == ':', c == '_':
		case c >= 'A' && c <= 'Z':
			return fail("upper-case letter")
		default:
			return fail(fmt.Sprintf("character %q is not allowed", c))
		}
	}
	kind, rest, _ := strings.Cut(s, ".")
	switch kind {
	case "iqn":
		if !validQualified(rest) {
			return fail("want iqn.YYYY-MM.reversed.domain[:text]")
		}
	case "eui":
		if len(rest) != 16 || !isHex(rest) {
			return fail("want eui. and 16 hexadecimal digits")
		}
	case "naa":
		if len(rest) != 16 && len(rest) != 32 || !isHex(rest) {
			return fail("want naa. and 16 or 32 hexadecimal digits")
		}
	default:
		return fail("want a name that begins with iqn., eui. or naa.")
	}
	return nil
}

// validQualified checks what follows "iqn.": date, dot, and a naming authority that begins with a letter or digit.
func validQualified(s string) bool {
	if len(s) < 9 || s[4] != '-' || s[7] != '.' {
		return false
	}
	for _, i := range [...]int{0, 1, 2, 3, 5, 6} {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	if month := s[5:7]; month < "01" || month > "12" {
		return false
	}
	authority, _, _ := strings.Cut(s[8:], ":")
	for label := range strings.SplitSeq(authority, ".") {
		if label == "" {
			return false
		}
	}
	return authority[0] != '-'
}

func isHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// asciiLower lowers A-Z only: strings.ToLower would turn some letters beyond ASCII into ASCII ones (the Kelvin sign into k).
func asciiLower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}
