package scsi

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
)

// Operation codes of persistent reservations (SPC-4).
const (
	OpPersistentReserveIn  uint8 = 0x5e
	OpPersistentReserveOut uint8 = 0x5f
)

// ReserveIn is a service action of PERSISTENT RESERVE IN.
type ReserveIn uint8

// Service actions of PERSISTENT RESERVE IN.
const (
	ReadKeys           ReserveIn = 0
	ReadReservation    ReserveIn = 1
	ReportCapabilities ReserveIn = 2
	ReadFullStatus     ReserveIn = 3
)

// ReserveOut is a service action of PERSISTENT RESERVE OUT. REGISTER AND MOVE has no builder: it hands a reservation to another initiator port
// of the same one, which the sessions of a group have no use for.
type ReserveOut uint8

// Service actions of PERSISTENT RESERVE OUT.
const (
	Register                     ReserveOut = 0
	Reserve                      ReserveOut = 1
	Release                      ReserveOut = 2
	Clear                        ReserveOut = 3
	Preempt                      ReserveOut = 4
	PreemptAndAbort              ReserveOut = 5
	RegisterAndIgnoreExistingKey ReserveOut = 6
)

var reserveOutNames = [...]string{
	Register: "REGISTER", Reserve: "RESERVE", Release: "RELEASE", Clear: "CLEAR", Preempt: "PREEMPT", PreemptAndAbort: "PREEMPT AND ABORT",
	RegisterAndIgnoreExistingKey: "REGISTER AND IGNORE EXISTING KEY",
}

// String is the name of SPC.
func (a ReserveOut) String() string {
	if int(a) < len(reserveOutNames) {
		return reserveOutNames[a]
	}
	return fmt.Sprintf("service action %#02x", uint8(a))
}

// ReservationType is the type of a persistent reservation: who may still do what.
type ReservationType uint8

// Reservation types (SPC-4, persistent reservation type codes). 0 is none.
const (
	WriteExclusive                 ReservationType = 1
	ExclusiveAccess                ReservationType = 3
	WriteExclusiveRegistrantsOnly  ReservationType = 5
	ExclusiveAccessRegistrantsOnly ReservationType = 6
	WriteExclusiveAllRegistrants   ReservationType = 7
	ExclusiveAccessAllRegistrants  ReservationType = 8
)

var reservationTypes = [...]struct{ name, short string }{
	WriteExclusive:                 {"Write Exclusive", "we"},
	ExclusiveAccess:                {"Exclusive Access", "ea"},
	WriteExclusiveRegistrantsOnly:  {"Write Exclusive - Registrants Only", "we-ro"},
	ExclusiveAccessRegistrantsOnly: {"Exclusive Access - Registrants Only", "ea-ro"},
	WriteExclusiveAllRegistrants:   {"Write Exclusive - All Registrants", "we-ar"},
	ExclusiveAccessAllRegistrants:  {"Exclusive Access - All Registrants", "ea-ar"},
}

// Valid tells whether SPC-4 knows the type.
func (t ReservationType) Valid() bool {
	return int(t) < len(reservationTypes) && reservationTypes[t].name != ""
}

// OneNexus tells whether the type lets only the I_T nexus in that made the reservation, and not the other ones that are registered.
func (t ReservationType) OneNexus() bool { return t == WriteExclusive || t == ExclusiveAccess }

// String is the name of SPC.
func (t ReservationType) String() string {
	if t.Valid() {
		return reservationTypes[t].name
	}
	return fmt.Sprintf("type %#x", uint8(t))
}

// ParseReservationType reads the name of SPC in any case, with blanks or hyphens between the words, or the short form: we, ea, we-ro, ea-ro,
// we-ar, ea-ar.
func ParseReservationType(s string) (ReservationType, error) {
	plain := func(s string) string {
		return strings.Join(strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return r == ' ' || r == '-' || r == '_' }), "-")
	}
	for t, names := range reservationTypes {
		if names.name != "" && (plain(s) == plain(names.name) || plain(s) == names.short) {
			return ReservationType(t), nil
		}
	}
	return 0, fmt.Errorf("%q is no type of persistent reservation: expected we, ea, we-ro, ea-ro, we-ar or ea-ar, or the name as SPC has it", s)
}

// PersistentReserveIn asks about registrations and the reservation, at most n bytes. READ KEYS has 8 bytes and 8 for each registration.
func PersistentReserveIn(cdb *CDB, action ReserveIn, n uint16) {
	*cdb = CDB{OpPersistentReserveIn, uint8(action)}
	binary.BigEndian.PutUint16(cdb[7:], n)
}

// ReserveParameters are the parameter list of PERSISTENT RESERVE OUT. There is no SPEC_I_PT: to register other initiator ports takes their
// transport IDs, and each session of ours registers itself.
type ReserveParameters struct {
	Key             uint64 // under which this nexus is registered; 0 for none
	ActionKey       uint64 // REGISTER: the new key, 0 to unregister; PREEMPT: the key to take away
	PersistLoss     bool   // APTPL: REGISTER only; survive a loss of power at the target
	AllTargetPorts  bool   // ALL_TG_PT: REGISTER only; for every port of the target
	ReservationType ReservationType
}

// ReserveParametersLength is the length of the parameter list, bytes.
const ReserveParametersLength = 24

// PersistentReserveOut changes registrations or the reservation of the whole unit; list gets the parameters and has ReserveParametersLength bytes.
//
//	off len
//	  0   8  reservation key
//	  8   8  service action reservation key
//	 20   1  0x08 SPEC_I_PT, 0x04 ALL_TG_PT, 0x01 APTPL
//
// Source: SPC-4, PERSISTENT RESERVE OUT command.
func PersistentReserveOut(cdb *CDB, list []byte, action ReserveOut, p ReserveParameters) {
	*cdb = CDB{OpPersistentReserveOut, uint8(action), uint8(p.ReservationType)} // the scope in the upper half is 0, the unit
	binary.BigEndian.PutUint32(cdb[5:], ReserveParametersLength)
	list = list[:ReserveParametersLength]
	clear(list)
	binary.BigEndian.PutUint64(list, p.Key)
	binary.BigEndian.PutUint64(list[8:], p.ActionKey)
	if p.PersistLoss {
		list[20] |= 0x01
	}
	if p.AllTargetPorts {
		list[20] |= 0x04
	}
}

// reservePayload gives what follows the header of READ KEYS, READ RESERVATION and READ FULL STATUS, as much as has come.
//
//	off len
//	  0   4  PRGENERATION
//	  4   4  additional length, bytes after this field
func reservePayload(what string, b []byte) (generation uint32, needed int, payload []byte, err error) {
	if len(b) < 8 {
		return 0, 0, nil, shortError(what+" data", len(b), 8)
	}
	n := binary.BigEndian.Uint32(b[4:])
	return binary.BigEndian.Uint32(b), 8 + int(n), b[8:min(uint64(len(b)), 8+uint64(n))], nil
}

// RegisteredKeys is the answer to READ KEYS.
type RegisteredKeys struct {
	Generation uint32   // counts registrations, clears and preempts
	Keys       []uint64 // one for each registered I_T nexus: the same key may be there several times
}

// ParseReadKeys reads the answer to READ KEYS. needed is the length that the whole answer has, bytes.
func ParseReadKeys(b []byte) (k RegisteredKeys, needed int, err error) {
	generation, needed, p, err := reservePayload("READ KEYS", b)
	if err != nil {
		return RegisteredKeys{}, 0, err
	}
	k.Generation = generation
	for ; len(p) >= 8; p = p[8:] {
		k.Keys = append(k.Keys, binary.BigEndian.Uint64(p))
	}
	return k, needed, nil
}

// Reservation is the answer to READ RESERVATION.
type Reservation struct {
	Generation uint32
	Held       bool            // there is a reservation: the other fields count
	Key        uint64          // of the holder; 0 if all registrants hold it
	Scope      uint8           // 0: the unit
	Type       ReservationType // may be one that this package does not know
}

// ParseReadReservation reads the answer to READ RESERVATION.
//
//	off len
//	  8   8  reservation key
//	 21   1  0xf0 scope, 0x0f type
func ParseReadReservation(b []byte) (Reservation, error) {
	generation, _, p, err := reservePayload("READ RESERVATION", b)
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{Generation: generation}
	if len(p) == 0 {
		return r, nil
	}
	if len(p) < 14 {
		return Reservation{}, shortError("READ RESERVATION data", len(b), 22)
	}
	r.Held, r.Key, r.Scope, r.Type = true, binary.BigEndian.Uint64(p), p[13]>>4, ReservationType(p[13]&0x0f)
	return r, nil
}

// ReserveCapabilities is the answer to REPORT CAPABILITIES.
type ReserveCapabilities struct {
	CompatibleReserve bool              // CRH: RESERVE(6) and RELEASE(6) of a registered nexus do no harm
	SpecifyInitiators bool              // SIP_C: SPEC_I_PT works
	AllTargetPorts    bool              // ATP_C: ALL_TG_PT works
	PersistLoss       bool              // PTPL_C: APTPL works
	PersistLossActive bool              // PTPL_A: the last REGISTER asked for it
	TypesKnown        bool              // TMV: Types counts
	Types             []ReservationType // that the unit has
}

// ParseReserveCapabilities reads the answer to REPORT CAPABILITIES.
//
//	off len
//	  0   2  length, 8
//	  2   1  0x10 CRH, 0x08 SIP_C, 0x04 ATP_C, 0x01 PTPL_C
//	  3   1  0x80 TMV, 0x01 PTPL_A
//	  4   2  type mask
func ParseReserveCapabilities(b []byte) (ReserveCapabilities, error) {
	if len(b) < 4 {
		return ReserveCapabilities{}, shortError("REPORT CAPABILITIES data", len(b), 4)
	}
	f := fields(b)
	c := ReserveCapabilities{
		CompatibleReserve: b[2]&0x10 != 0, SpecifyInitiators: b[2]&0x08 != 0, AllTargetPorts: b[2]&0x04 != 0, PersistLoss: b[2]&0x01 != 0,
		TypesKnown: b[3]&0x80 != 0, PersistLossActive: b[3]&0x01 != 0,
	}
	if c.TypesKnown {
		mask := f.u16(4)
		for _, t := range []struct {
			bit uint16
			t   ReservationType
		}{
			{0x0200, WriteExclusive}, {0x0800, ExclusiveAccess}, {0x2000, WriteExclusiveRegistrantsOnly}, {0x4000, ExclusiveAccessRegistrantsOnly},
			{0x8000, WriteExclusiveAllRegistrants}, {0x0001, ExclusiveAccessAllRegistrants},
		} {
			if mask&t.bit != 0 {
				c.Types = append(c.Types, t.t)
			}
		}
	}
	return c, nil
}

// Registration is one entry of READ FULL STATUS: one registered I_T nexus.
type Registration struct {
	Key            uint64
	AllTargetPorts bool            // registered at every port: TargetPort does not count
	Holder         bool            // holds the reservation
	Scope          uint8           // of the reservation, for a holder
	Type           ReservationType // of the reservation, for a holder
	TargetPort     uint16          // relative target port identifier
	Initiator      string          // printable: "iqn....,i,0x800123456789" for iSCSI, else the protocol and the bytes in hexadecimal
}

// ParseFullStatus reads the answer to READ FULL STATUS. An entry that runs past the end of what arrived ends the list. needed is the length that
// the whole answer has, bytes.
//
//	entry  0  8  reservation key
//	      12  1  0x02 ALL_TG_PT, 0x01 R_HOLDER
//	      13  1  0xf0 scope, 0x0f type
//	      18  2  relative target port identifier
//	      20  4  length of the transport ID, bytes
//
// Source: SPC-4, READ FULL STATUS service action.
func ParseFullStatus(b []byte) (generation uint32, list []Registration, needed int, err error) {
	generation, needed, p, err := reservePayload("READ FULL STATUS", b)
	if err != nil {
		return 0, nil, 0, err
	}
	for len(p) >= 24 {
		n := uint64(binary.BigEndian.Uint32(p[20:]))
		if n > uint64(len(p)-24) {
			break
		}
		r := Registration{
			Key: binary.BigEndian.Uint64(p), AllTargetPorts: p[12]&0x02 != 0, Holder: p[12]&0x01 != 0, TargetPort: binary.BigEndian.Uint16(p[18:]),
			Initiator: transportID(p[24 : 24+n]),
		}
		if r.Holder {
			r.Scope, r.Type = p[13]>>4, ReservationType(p[13]&0x0f)
		}
		list = append(list, r)
		p = p[24+n:]
	}
	return generation, list, needed, nil
}

const protocolISCSI = 5 // protocol identifier (SPC-4)

// transportID makes a transport ID printable. That of iSCSI is text: the name of the initiator, and in format 1 the ISID after ",i,0x".
//
//	off len
//	  0   1  0xc0 format, 0x0f protocol
//	  2   2  length of the rest, bytes
//	  4      iSCSI: the text, ended by a zero byte
func transportID(b []byte) string {
	if len(b) >= 4 && b[0]&0x0f == protocolISCSI {
		body := b[4:min(len(b), 4+int(binary.BigEndian.Uint16(b[2:])))]
		name, _, _ := strings.Cut(string(body), "\x00")
		return text([]byte(name), 0, len(name))
	}
	if len(b) == 0 {
		return ""
	}
	return fmt.Sprintf("protocol %d: %s", b[0]&0x0f, hex.EncodeToString(b))
}
