// Package pdu is the wire form of iSCSI: headers as byte views, text keys, names, addresses and the SendTargets answer.
//
// Layer: under iscsi, iscsi/login, iser, iscsitcp and the test target; imports the standard library only.
//
// A header is 48 bytes, big endian, and is never copied into a struct. [BHS] is the array with the fields that all or most PDUs have at
// one place; a view such as [SCSICommand] embeds a pointer to it and adds the fields of that PDU. New... clears the 48 bytes and sets the
// opcode, which is how a PDU is built in a send buffer; As... looks at 48 received bytes:
//
//	cmd := pdu.NewSCSICommand(pdu.HeaderOf(buf))   // buf: at least 48 bytes of a registered buffer
//	cmd.SetInitiatorTaskTag(itt)
//
//	h := pdu.HeaderOf(buf)
//	if err := h.Valid(pdu.FromTarget, segmentLength); err != nil { ... drop the connection ... }
//	if h.Opcode() == pdu.OpSCSIResponse { r := pdu.AsSCSIResponse(h) ... }
//
// Received headers pass [BHS.Valid] once, at the edge. Getters after that do not check, do not allocate and cannot fail: every offset is
// a constant inside an array of fixed length.
//
// Sources: RFC 7143 section 11 (PDU formats), section 13 (text keys), section 4.2.7 (names). The one table of opcodes (opcode.go) feeds
// the checks, the traces and the tests, so they cannot disagree.
//
// Traps:
//   - DataSegmentLength excludes the padding to 4 bytes, which TCP sends and iSER does not.
//   - A tag of 0xffffffff ([ReservedTag]) means "none"; it is never a real InitiatorTaskTag.
//   - A text value may straddle two PDUs when the C bit is set: join the segments first, then decode.
package pdu
