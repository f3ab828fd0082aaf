package pdu

import (
	"fmt"
	"time"
)

// LogoutRequest ends a connection or a session (RFC 7143 section 11.14).
//
//	off len
//	  1   1  0x80, 0x7f ReasonCode
//	 16   4  InitiatorTaskTag
//	 20   2  CID, unless the session is closed
//	 24   4  CmdSN
//	 28   4  ExpStatSN
type LogoutRequest struct{ *BHS }

// LogoutReason says what a LogoutRequest ends.
type LogoutReason uint8

// Logout reasons (RFC 7143 section 11.14).
const (
	CloseSession      LogoutReason = 0
	CloseConnection   LogoutReason = 1
	RemoveForRecovery LogoutReason = 2
)

// NewLogoutRequest starts a Logout Request PDU in b.
func NewLogoutRequest(b *BHS, r LogoutReason) LogoutRequest {
	p := LogoutRequest{b.init(OpLogoutRequest)}
	p.BHS[1] = 0x80 | byte(r)&0x7f
	return p
}

// AsLogoutRequest views b as a Logout Request.
func AsLogoutRequest(b *BHS) LogoutRequest { return LogoutRequest{b} }

// Reason is what is to be ended.
func (p LogoutRequest) Reason() LogoutReason { return LogoutReason(p.BHS[1] & 0x7f) }

// CID is the connection that is meant.
func (p LogoutRequest) CID() uint16 { return p.u16(20) }

// SetCID names the connection that is meant.
func (p LogoutRequest) SetCID(v uint16) { p.put16(20, v) }

// LogoutResponse answers a LogoutRequest; after it the connection is closed (RFC 7143 section 11.15).
//
//	off len
//	  1   1  0x80
//	  2   1  Response
//	 16   4  InitiatorTaskTag
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 40   2  Time2Wait, seconds
//	 42   2  Time2Retain, seconds
type LogoutResponse struct{ *BHS }

// LogoutResult is the outcome of a logout.
type LogoutResult uint8

// Outcomes (RFC 7143 section 11.15).
const (
	LogoutSuccess              LogoutResult = 0
	LogoutCIDNotFound          LogoutResult = 1
	LogoutRecoveryNotSupported LogoutResult = 2
	LogoutCleanupFailed        LogoutResult = 3
)

var logoutResultNames = [...]string{"closed", "CID not found", "connection recovery not supported", "cleanup failed"}

// String is a short text for the outcome.
func (r LogoutResult) String() string { return nameOf(logoutResultNames[:], int(r), "response") }

// NewLogoutResponse starts a Logout Response PDU in b.
func NewLogoutResponse(b *BHS, r LogoutResult) LogoutResponse {
	p := LogoutResponse{b.init(OpLogoutResponse)}
	p.BHS[1], p.BHS[2] = 0x80, byte(r)
	return p
}

// AsLogoutResponse views b as a Logout Response.
func AsLogoutResponse(b *BHS) LogoutResponse { return LogoutResponse{b} }

// Response is the outcome.
func (p LogoutResponse) Response() LogoutResult { return LogoutResult(p.BHS[2]) }

// Time2Wait is how long to wait before a new login; valid when the logout failed or cleaned up for recovery.
func (p LogoutResponse) Time2Wait() time.Duration { return time.Duration(p.u16(40)) * time.Second }

// Time2Retain is how long the target keeps the tasks after Time2Wait.
func (p LogoutResponse) Time2Retain() time.Duration { return time.Duration(p.u16(42)) * time.Second }

func decodeLogoutRequest(b *BHS) string {
	p := LogoutRequest{b}
	return fmt.Sprintf("reason=%d CID=%d CmdSN=%d ExpStatSN=%d", p.Reason(), p.CID(), p.CmdSN(), p.ExpStatSN())
}

func decodeLogoutResponse(b *BHS) string {
	p := LogoutResponse{b}
	return fmt.Sprintf("%q Time2Wait=%s Time2Retain=%s %s", p.Response(), p.Time2Wait(), p.Time2Retain(), decodeSN(b))
}
