package pdu

import "fmt"

// ProtocolError reports a PDU, text or answer that the protocol does not allow. The connection that carried it has to end.
type ProtocolError struct {
	Section string // of RFC 7143
	Offset  int    // byte in the header or text that is wrong, -1 when no single byte is
	What    string // lower case, says what was received
}

// Error reads as a path, and leads the reader to the section.
func (e *ProtocolError) Error() string {
	if e.Offset < 0 {
		return fmt.Sprintf("protocol error: %s (RFC 7143 section %s)", e.What, e.Section)
	}
	return fmt.Sprintf("protocol error: %s (byte %d, RFC 7143 section %s)", e.What, e.Offset, e.Section)
}

func protocolErrorf(section string, offset int, format string, args ...any) *ProtocolError {
	return &ProtocolError{Section: section, Offset: offset, What: fmt.Sprintf(format, args...)}
}
