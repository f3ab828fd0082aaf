package pdu

import (
	"fmt"
	"strings"
)

// String decodes the header for a trace: name, task tag, the PDU's own fields, data length. Any bytes are fine.
func (b *BHS) String() string {
	var s strings.Builder
	op := b.Opcode()
	s.WriteString(op.String())
	if b.Immediate() && opcodes[op].dir == FromInitiator {
		s.WriteString(" I")
	}
	fmt.Fprintf(&s, " ITT=%#08x", b.InitiatorTaskTag())
	if d := opcodes[op].decode; d != nil {
		if t := strings.TrimSpace(d(b)); t != "" {
			s.WriteByte(' ')
			s.WriteString(t)
		}
	}
	if n := b.AHSLength(); n != 0 {
		fmt.Fprintf(&s, " AHS=%d", n)
	}
	if n := b.DataSegmentLength(); n != 0 {
		fmt.Fprintf(&s, " data=%d", n)
	}
	return s.String()
}

// decodeSN are the three numbers of every target PDU.
func decodeSN(b *BHS) string {
	return fmt.Sprintf("StatSN=%d ExpCmdSN=%d MaxCmdSN=%d", b.StatSN(), b.ExpCmdSN(), b.MaxCmdSN())
}

// flags names the bits that are set in v, from 0x80 down; an empty name is a bit that is not a flag here.
func flags(v byte, names ...string) string {
	var set []string
	for i, n := range names {
		if n != "" && v&(0x80>>i) != 0 {
			set = append(set, n)
		}
	}
	return strings.Join(set, "|")
}

// nameOf looks v up in a table of names, and falls back to kind and number.
func nameOf(names []string, v int, kind string) string {
	if v < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s %#02x", kind, v)
}
