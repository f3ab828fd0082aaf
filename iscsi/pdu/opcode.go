package pdu

import "fmt"

// Opcode is the kind of a PDU, the low six bits of byte 0.
type Opcode uint8

// Opcodes (RFC 7143 section 11.2).
const (
	OpNOPOut         Opcode = 0x00
	OpSCSICommand    Opcode = 0x01
	OpTaskRequest    Opcode = 0x02
	OpLoginRequest   Opcode = 0x03
	OpTextRequest    Opcode = 0x04
	OpDataOut        Opcode = 0x05
	OpLogoutRequest  Opcode = 0x06
	OpSNACK          Opcode = 0x10
	OpNOPIn          Opcode = 0x20
	OpSCSIResponse   Opcode = 0x21
	OpTaskResponse   Opcode = 0x22
	OpLoginResponse  Opcode = 0x23
	OpTextResponse   Opcode = 0x24
	OpDataIn         Opcode = 0x25
	OpLogoutResponse Opcode = 0x26
	OpR2T            Opcode = 0x31
	OpAsyncMessage   Opcode = 0x32
	OpReject         Opcode = 0x3f
)

// Direction tells who sends a PDU.
type Direction uint8

// Directions.
const (
	FromInitiator Direction = 1
	FromTarget    Direction = 2
)

// segmentRule says whether a PDU may carry a data segment.
type segmentRule uint8

const (
	segmentNone segmentRule = 1 // DataSegmentLength must be 0
	segmentMay  segmentRule = 2
)

// opcodeRow is one line of the table.
type opcodeRow struct {
	name    string
	dir     Direction
	segment segmentRule
	ahs     bool              // additional header segments may be present
	check   func(*BHS) error  // fields that must hold for the getters to make sense; nil if any value does
	decode  func(*BHS) string // fields for a trace
}

// opcodes has one row per opcode; checks, names and traces all read it. A row without a name is a reserved opcode.
//
// A target PDU never carries an AHS: the two that exist (extended CDB, bidirectional read length) belong to the SCSI Command.
var opcodes [64]opcodeRow

func init() {
	opcodes = [64]opcodeRow{
		OpNOPOut:         {"NOP-Out", FromInitiator, segmentMay, false, nil, decodeNOPOut},
		OpSCSICommand:    {"SCSI Command", FromInitiator, segmentMay, true, nil, decodeSCSICommand},
		OpTaskRequest:    {"Task Management Function Request", FromInitiator, segmentNone, false, nil, decodeTaskRequest},
		OpLoginRequest:   {"Login Request", FromInitiator, segmentMay, false, checkLogin, decodeLoginRequest},
		OpTextRequest:    {"Text Request", FromInitiator, segmentMay, false, checkText, decodeTextRequest},
		OpDataOut:        {"SCSI Data-Out", FromInitiator, segmentMay, false, nil, decodeDataOut},
		OpLogoutRequest:  {"Logout Request", FromInitiator, segmentNone, false, nil, decodeLogoutRequest},
		OpSNACK:          {"SNACK Request", FromInitiator, segmentNone, false, nil, decodeSNACK},
		OpNOPIn:          {"NOP-In", FromTarget, segmentMay, false, nil, decodeNOPIn},
		OpSCSIResponse:   {"SCSI Response", FromTarget, segmentMay, false, checkSCSIResponse, decodeSCSIResponse},
		OpTaskResponse:   {"Task Management Function Response", FromTarget, segmentNone, false, nil, decodeTaskResponse},
		OpLoginResponse:  {"Login Response", FromTarget, segmentMay, false, checkLogin, decodeLoginResponse},
		OpTextResponse:   {"Text Response", FromTarget, segmentMay, false, checkText, decodeTextResponse},
		OpDataIn:         {"SCSI Data-In", FromTarget, segmentMay, false, checkDataIn, decodeDataIn},
		OpLogoutResponse: {"Logout Response", FromTarget, segmentNone, false, nil, decodeLogoutResponse},
		OpR2T:            {"Ready To Transfer", FromTarget, segmentNone, false, checkR2T, decodeR2T},
		OpAsyncMessage:   {"Asynchronous Message", FromTarget, segmentMay, false, nil, decodeAsyncMessage},
		OpReject:         {"Reject", FromTarget, segmentMay, false, nil, decodeReject},
	}
}

// String is the RFC's name of the PDU.
func (o Opcode) String() string {
	if r := &opcodes[o&0x3f]; r.name != "" {
		return r.name
	}
	return fmt.Sprintf("opcode %#02x", uint8(o))
}

// Valid checks a received header once, at the edge: the opcode exists and comes from side from, the lengths agree with it, and flags that
// exclude each other are not both set. received is the number of data segment bytes that arrived or that the receiver has room for; a
// DataSegmentLength above it is refused. Reserved fields are not looked at (RFC 7143 section 11: the receiver ignores them).
//
// The error is a *[ProtocolError]; the connection has to end, for nothing after this PDU can be trusted.
func (b *BHS) Valid(from Direction, received int) error {
	row := &opcodes[b[0]&0x3f]
	n := b.DataSegmentLength()
	switch {
	case row.name == "":
		return protocolErrorf("11.2", 0, "opcode %#02x is not defined", b[0]&0x3f)
	case row.dir != from:
		return protocolErrorf("11.2", 0, "%s came from the wrong side", row.name)
	case b[4] != 0 && !row.ahs:
		return protocolErrorf("11.2", 4, "%s with additional header segments (%d bytes)", row.name, b.AHSLength())
	case n != 0 && row.segment == segmentNone:
		return protocolErrorf("11.2", 5, "%s with a data segment of %d bytes; it has none", row.name, n)
	case n > received:
		return protocolErrorf("11.2", 5, "%s with a data segment of %d bytes, %d are there", row.name, n, received)
	case row.check != nil:
		return row.check(b)
	}
	return nil
}
