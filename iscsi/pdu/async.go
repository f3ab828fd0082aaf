package pdu

import (
	"fmt"
	"time"
)

// AsyncMessage tells of an event at the target (RFC 7143 section 11.9).
//
//	off len
//	  1   1  0x80
//	  8   8  LUN, for a SCSI event
//	 16   4  0xffffffff
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   1  AsyncEvent
//	 37   1  AsyncVCode
//	 38   2  Parameter1
//	 40   2  Parameter2
//	 42   2  Parameter3
//
// Data segment of AsyncSCSI: as in a SCSI Response, see [SenseData].
type AsyncMessage struct{ *BHS }

// AsyncEvent is the kind of an asynchronous message.
type AsyncEvent uint8

// Asynchronous events (RFC 7143 section 11.9).
const (
	AsyncSCSI            AsyncEvent = 0   // sense data follows
	AsyncLogoutRequest   AsyncEvent = 1   // log out within Parameter3 seconds
	AsyncDropConnection  AsyncEvent = 2   // the target drops connection Parameter1
	AsyncDropAll         AsyncEvent = 3   // the target drops all connections of the session
	AsyncNegotiate       AsyncEvent = 4   // negotiate with a Text Request within Parameter3 seconds
	AsyncTasksTerminated AsyncEvent = 5   // the tasks of this LUN are being terminated
	AsyncVendor          AsyncEvent = 255 // see AsyncVCode
)

// NewAsyncMessage starts an Asynchronous Message PDU in b.
func NewAsyncMessage(b *BHS, e AsyncEvent) AsyncMessage {
	p := AsyncMessage{b.init(OpAsyncMessage)}
	p.SetFinal(true)
	p.SetInitiatorTaskTag(ReservedTag)
	p.BHS[36] = byte(e)
	return p
}

// AsAsyncMessage views b as an Asynchronous Message.
func AsAsyncMessage(b *BHS) AsyncMessage { return AsyncMessage{b} }

// Event is the kind of the event.
func (p AsyncMessage) Event() AsyncEvent { return AsyncEvent(p.BHS[36]) }

// VendorCode is the vendor's number of the event, with AsyncVendor.
func (p AsyncMessage) VendorCode() uint8 { return p.BHS[37] }

// CID is the connection that will be dropped (Parameter1), with AsyncDropConnection.
func (p AsyncMessage) CID() uint16 { return p.u16(38) }

// Time2Wait is how long to stay away before a new login (Parameter2), with AsyncDropConnection and AsyncDropAll.
func (p AsyncMessage) Time2Wait() time.Duration { return time.Duration(p.u16(40)) * time.Second }

// Timeout is the time that the event grants (Parameter3): to log out, to negotiate, or Time2Retain of a dropped connection.
func (p AsyncMessage) Timeout() time.Duration { return time.Duration(p.u16(42)) * time.Second }

// SetParameters sets the three parameters of the event.
func (p AsyncMessage) SetParameters(p1, p2, p3 uint16) {
	p.put16(38, p1)
	p.put16(40, p2)
	p.put16(42, p3)
}

// Reject tells that the target could not accept a PDU (RFC 7143 section 11.17). Its data segment holds the header of that PDU.
//
//	off len
//	  1   1  0x80
//	  2   1  Reason
//	 16   4  0xffffffff
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   4  DataSN or R2TSN, or reserved
type Reject struct{ *BHS }

// RejectReason says why a PDU was rejected.
type RejectReason uint8

// Reject reasons (RFC 7143 section 11.17).
const (
	RejectDataDigest          RejectReason = 0x02
	RejectSNACK               RejectReason = 0x03
	RejectProtocolError       RejectReason = 0x04
	RejectCommandNotSupported RejectReason = 0x05
	RejectTooManyImmediate    RejectReason = 0x06
	RejectTaskInProgress      RejectReason = 0x07
	RejectInvalidDataACK      RejectReason = 0x08
	RejectInvalidPDUField     RejectReason = 0x09
	RejectLongOperation       RejectReason = 0x0a
	RejectNegotiationReset    RejectReason = 0x0b
	RejectWaitingForLogout    RejectReason = 0x0c
)

var rejectReasonNames = [...]string{
	RejectDataDigest: "data digest error", RejectSNACK: "SNACK reject", RejectProtocolError: "protocol error",
	RejectCommandNotSupported: "command not supported", RejectTooManyImmediate: "too many immediate commands",
	RejectTaskInProgress: "task in progress", RejectInvalidDataACK: "invalid data ACK", RejectInvalidPDUField: "invalid PDU field",
	RejectLongOperation: "long operation reject", RejectNegotiationReset: "negotiation reset", RejectWaitingForLogout: "waiting for logout",
}

// String is the RFC's text for the reason, in lower case.
func (r RejectReason) String() string { return nameOf(rejectReasonNames[:], int(r), "reason") }

// NewReject starts a Reject PDU in b. The caller appends the 48 bytes of the rejected header as data segment.
func NewReject(b *BHS, r RejectReason) Reject {
	p := Reject{b.init(OpReject)}
	p.SetFinal(true)
	p.SetInitiatorTaskTag(ReservedTag)
	p.BHS[2] = byte(r)
	return p
}

// AsReject views b as a Reject.
func AsReject(b *BHS) Reject { return Reject{b} }

// Reason is why the PDU was rejected.
func (p Reject) Reason() RejectReason { return RejectReason(p.BHS[2]) }

// RejectedHeader views the header of the rejected PDU in the data segment of a Reject, nil when the target sent less than 48 bytes of it.
func RejectedHeader(segment []byte) *BHS {
	if len(segment) < HeaderLength {
		return nil
	}
	return HeaderOf(segment)
}

func decodeAsyncMessage(b *BHS) string {
	p := AsyncMessage{b}
	return fmt.Sprintf("event=%d LUN=%#016x vcode=%d p1=%d p2=%d p3=%d %s",
		p.Event(), p.LUN(), p.VendorCode(), p.u16(38), p.u16(40), p.u16(42), decodeSN(b))
}

func decodeReject(b *BHS) string {
	return fmt.Sprintf("%q %s", Reject{b}.Reason(), decodeSN(b))
}
