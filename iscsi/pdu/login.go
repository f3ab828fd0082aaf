package pdu

import "fmt"

// Stage is a stage of the login phase, as in CSG and NSG.
type Stage uint8

// Login stages (RFC 7143 section 11.12).
const (
	SecurityNegotiation    Stage = 0
	OperationalNegotiation Stage = 1
	FullFeaturePhase       Stage = 3
)

// String is the RFC's name of the stage.
func (s Stage) String() string {
	switch s {
	case SecurityNegotiation:
		return "SecurityNegotiation"
	case OperationalNegotiation:
		return "LoginOperationalNegotiation"
	case FullFeaturePhase:
		return "FullFeaturePhase"
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

// LoginRequest is one step of the initiator in the login phase (RFC 7143 section 11.12). Always immediate.
//
//	off len
//	  1   1  0x80 T (transit), 0x40 C (text continues), 0x0c CSG, 0x03 NSG
//	  2   1  VersionMax
//	  3   1  VersionMin
//	  8   6  ISID
//	 14   2  TSIH
//	 16   4  InitiatorTaskTag
//	 20   2  CID
//	 24   4  CmdSN
//	 28   4  ExpStatSN
type LoginRequest struct{ *BHS }

// NewLoginRequest starts a Login Request PDU in b.
func NewLoginRequest(b *BHS) LoginRequest {
	b.init(OpLoginRequest).SetImmediate(true)
	return LoginRequest{b}
}

// AsLoginRequest views b as a Login Request.
func AsLoginRequest(b *BHS) LoginRequest { return LoginRequest{b} }

// Transit is the T bit: the sender is ready to go to NSG.
func (p LoginRequest) Transit() bool { return p.bit(1, 0x80) }

// Continue is the C bit: the text goes on in the next PDU.
func (p LoginRequest) Continue() bool { return p.bit(1, 0x40) }

// CSG is the current stage.
func (p LoginRequest) CSG() Stage { return Stage(p.BHS[1] >> 2 & 3) }

// NSG is the next stage, valid with Transit.
func (p LoginRequest) NSG() Stage { return Stage(p.BHS[1] & 3) }

// SetStage sets T, C, CSG and NSG. NSG is written as 0 without transit.
func (p LoginRequest) SetStage(transit, cont bool, csg, nsg Stage) {
	setStage(p.BHS, transit, cont, csg, nsg)
}

// VersionMax and VersionMin are the protocol versions offered; both are 0 today.
func (p LoginRequest) VersionMax() uint8 { return p.BHS[2] }

// VersionMin is the lowest protocol version offered.
func (p LoginRequest) VersionMin() uint8 { return p.BHS[3] }

// ISID is the initiator's part of the session identifier.
func (p LoginRequest) ISID() [6]byte { return [6]byte(p.BHS[8:14]) }

// SetISID sets the initiator's part of the session identifier.
func (p LoginRequest) SetISID(v [6]byte) { copy(p.BHS[8:14], v[:]) }

// TSIH is the target's session handle, 0 for a new session (and for session reinstatement).
func (p LoginRequest) TSIH() uint16 { return p.u16(14) }

// SetTSIH sets the target's session handle.
func (p LoginRequest) SetTSIH(v uint16) { p.put16(14, v) }

// CID is the connection's number in the session.
func (p LoginRequest) CID() uint16 { return p.u16(20) }

// SetCID sets the connection's number.
func (p LoginRequest) SetCID(v uint16) { p.put16(20, v) }

// LoginResponse is one step of the target in the login phase (RFC 7143 section 11.13).
//
//	off len
//	  1   1  0x80 T, 0x40 C, 0x0c CSG, 0x03 NSG
//	  2   1  VersionMax
//	  3   1  VersionActive
//	  8   6  ISID, as in the request
//	 14   2  TSIH, set in the final response
//	 16   4  InitiatorTaskTag
//	 24   4  StatSN
//	 28   4  ExpCmdSN
//	 32   4  MaxCmdSN
//	 36   1  StatusClass
//	 37   1  StatusDetail
type LoginResponse struct{ *BHS }

// NewLoginResponse starts a Login Response PDU in b.
func NewLoginResponse(b *BHS) LoginResponse { return LoginResponse{b.init(OpLoginResponse)} }

// AsLoginResponse views b as a Login Response.
func AsLoginResponse(b *BHS) LoginResponse { return LoginResponse{b} }

// Transit is the T bit: the target goes to NSG.
func (p LoginResponse) Transit() bool { return p.bit(1, 0x80) }

// Continue is the C bit: the text goes on in the next PDU.
func (p LoginResponse) Continue() bool { return p.bit(1, 0x40) }

// CSG is the current stage.
func (p LoginResponse) CSG() Stage { return Stage(p.BHS[1] >> 2 & 3) }

// NSG is the next stage, valid with Transit.
func (p LoginResponse) NSG() Stage { return Stage(p.BHS[1] & 3) }

// SetStage sets T, C, CSG and NSG. NSG is written as 0 without transit.
func (p LoginResponse) SetStage(transit, cont bool, csg, nsg Stage) {
	setStage(p.BHS, transit, cont, csg, nsg)
}

// VersionActive is the protocol version in force.
func (p LoginResponse) VersionActive() uint8 { return p.BHS[3] }

// SetVersionActive sets the protocol version in force.
func (p LoginResponse) SetVersionActive(v uint8) { p.BHS[3] = v }

// ISID is the initiator's part of the session identifier.
func (p LoginResponse) ISID() [6]byte { return [6]byte(p.BHS[8:14]) }

// SetISID sets the initiator's part of the session identifier.
func (p LoginResponse) SetISID(v [6]byte) { copy(p.BHS[8:14], v[:]) }

// TSIH is the session handle that the target chose.
func (p LoginResponse) TSIH() uint16 { return p.u16(14) }

// SetTSIH sets the session handle.
func (p LoginResponse) SetTSIH(v uint16) { p.put16(14, v) }

// StatusClass is 0 while all is well.
func (p LoginResponse) StatusClass() uint8 { return p.BHS[36] }

// StatusDetail says more, within the class.
func (p LoginResponse) StatusDetail() uint8 { return p.BHS[37] }

// SetStatus sets status class and detail.
func (p LoginResponse) SetStatus(class, detail uint8) { p.BHS[36], p.BHS[37] = class, detail }

func setStage(b *BHS, transit, cont bool, csg, nsg Stage) {
	b[1] = byte(csg&3) << 2
	if transit {
		b[1] |= 0x80 | byte(nsg&3)
	}
	b.putBit(1, 0x40, cont)
}

// checkLogin serves both login PDUs: their flag bytes are the same.
func checkLogin(b *BHS) error {
	p := LoginResponse{b}
	if b.Opcode() == OpLoginResponse && p.StatusClass() != 0 {
		return nil // the flags mean nothing once the login has failed
	}
	switch {
	case p.Transit() && p.Continue():
		return protocolErrorf("11.12", 1, "%s with both T and C", b.Opcode())
	case p.CSG() > OperationalNegotiation:
		return protocolErrorf("11.12", 1, "%s with CSG %d", b.Opcode(), p.CSG())
	case p.Transit() && (p.NSG() <= p.CSG() || p.NSG() == 2):
		return protocolErrorf("11.12", 1, "%s goes from stage %d to stage %d", b.Opcode(), p.CSG(), p.NSG())
	}
	return nil
}

func decodeLoginRequest(b *BHS) string {
	p := LoginRequest{b}
	return fmt.Sprintf("%s CSG=%d NSG=%d ISID=%x TSIH=%#04x CID=%d CmdSN=%d ExpStatSN=%d",
		flags(p.BHS[1], "T", "C", "", "", "", "", "", ""), p.CSG(), p.NSG(), p.ISID(), p.TSIH(), p.CID(), p.CmdSN(), p.ExpStatSN())
}

func decodeLoginResponse(b *BHS) string {
	p := LoginResponse{b}
	return fmt.Sprintf("%s CSG=%d NSG=%d ISID=%x TSIH=%#04x Status=%02x/%02x %s",
		flags(p.BHS[1], "T", "C", "", "", "", "", "", ""), p.CSG(), p.NSG(), p.ISID(), p.TSIH(), p.StatusClass(), p.StatusDetail(), decodeSN(b))
}
