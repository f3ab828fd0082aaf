package api

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// Hex are bytes that JSON shows as hexadecimal digits.
type Hex []byte

// MarshalText writes the digits.
func (h Hex) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

// UnmarshalText reads digits; blanks and colons between bytes are allowed.
func (h *Hex) UnmarshalText(text []byte) error {
	b, err := ParseHex(string(text))
	*h = b
	return err
}

// ParseHex reads hexadecimal digits, two for each byte, with blanks, colons or "0x" before and between bytes. The error is ErrInvalidArgs.
func ParseHex(s string) (Hex, error) {
	var digits strings.Builder
	for _, f := range strings.FieldsFunc(s, func(r rune) bool { return r == ' ' || r == ':' || r == ',' || r == '\t' || r == '\n' }) {
		f = strings.TrimPrefix(strings.TrimPrefix(f, "0x"), "0X")
		if len(f)%2 != 0 {
			f = "0" + f
			if len(f) != 2 {
				return nil, Errorf(ErrInvalidArgs, "%s: an odd number of hexadecimal digits", quote(s))
			}
		}
		digits.WriteString(f)
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		return nil, Errorf(ErrInvalidArgs, "%s: expected hexadecimal digits", quote(s))
	}
	return b, nil
}

// Key is the key of a persistent reservation, "0x" and hexadecimal digits in JSON, since numbers of 64 bits do not pass through every JSON reader.
type Key uint64

// String is "0x" and the digits.
func (k Key) String() string { return fmt.Sprintf("%#x", uint64(k)) }

// MarshalText is String.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText is ParseKey.
func (k *Key) UnmarshalText(text []byte) (err error) {
	*k, err = ParseKey(string(text))
	return err
}

// ParseKey reads a key: a decimal number, or 0x and hexadecimal digits. The error is ErrInvalidArgs.
func ParseKey(s string) (Key, error) {
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		return 0, Errorf(ErrInvalidArgs, "%s is not a key: expected a number of 64 bits such as 0x1234", quote(s))
	}
	return Key(n), nil
}

// UnitName names a logical unit: a device, or a session with the number of a unit, which need not be served.
type UnitName struct {
	Name string  `json:"name"`          // /dev/ublkbN, or a target or the number of a session
	LUN  *uint16 `json:"lun,omitempty"` // not for a device
}

// ScsiRequest is one SCSI command, sent as it is beside those that serve the block device.
type ScsiRequest struct {
	Unit    UnitName `json:"unit"`
	CDB     Hex      `json:"cdb"`               // 6 to 16 bytes
	In      int      `json:"in,omitempty"`      // bytes that the command may read, at most 524288
	Out     Hex      `json:"out,omitempty"`     // what it writes, as much; not together with In
	Timeout Seconds  `json:"timeout,omitempty"` // 0: 30 s; the command is aborted then. At most 900
	// Force sends a command that changes the unit. Whoever uses the block device does not see what it does.
	Force bool `json:"force,omitempty"`
	// SkipAttention sends the command again when it only met a unit attention.
	SkipAttention bool `json:"skip_attention,omitempty"`
}

// ScsiReply is the answer of the unit. A status other than GOOD is an answer, not an error.
type ScsiReply struct {
	Version    int    `json:"version"`
	Status     uint8  `json:"status"`
	StatusName string `json:"status_name"` // as SAM has it: "GOOD", "CHECK CONDITION"
	Sense      Hex    `json:"sense,omitempty"`
	SenseText  string `json:"sense_text,omitempty"`
	Data       Hex    `json:"data,omitempty"`
	Residual   int64  `json:"residual"` // bytes that were not moved; negative: the unit had that many more
}

// Reservation service actions.
const (
	ReserveRegister       = "register"
	ReserveRegisterIgnore = "register-ignore"
	ReserveReserve        = "reserve"
	ReserveRelease        = "release"
	ReserveClear          = "clear"
	ReservePreempt        = "preempt"
	ReservePreemptAbort   = "preempt-abort"
)

// ReserveRequest changes persistent reservations. Registrations are made, changed and removed by every session that the unit's device has.
type ReserveRequest struct {
	Unit   UnitName `json:"unit"`
	Action string   `json:"action"`
	// Key is the one under which the sessions are registered now; 0 for none.
	Key Key `json:"key"`
	// NewKey is the one to register, 0 to unregister; for a preempt, the one to take away.
	NewKey Key `json:"new_key"`
	// Type is we-ro, ea-ro, we-ar or ea-ar, or we or ea where there is one session; or the name as SPC has it.
	Type           string  `json:"type,omitempty"`
	PersistLoss    bool    `json:"persist_loss,omitempty"`     // APTPL, with register: survive a loss of power at the target
	AllTargetPorts bool    `json:"all_target_ports,omitempty"` // ALL_TG_PT, with register
	Timeout        Seconds `json:"timeout,omitempty"`
}

// ReserveReply tells what was done.
type ReserveReply struct {
	Version  int `json:"version"`
	Sessions int `json:"sessions"` // that have carried it out
}

// What a ReservationRequest may ask for.
const (
	AskKeys         = "keys"
	AskReservation  = "reservation"
	AskCapabilities = "capabilities"
	AskFullStatus   = "full-status"
)

// ReservationRequest asks about persistent reservations.
type ReservationRequest struct {
	Unit    UnitName `json:"unit"`
	What    string   `json:"what"`
	Timeout Seconds  `json:"timeout,omitempty"`
}

// ReservationReply is the answer. Of the parts only the one that was asked for is there.
type ReservationReply struct {
	Version       int                      `json:"version"`
	Generation    uint32                   `json:"generation"` // not with capabilities
	Keys          []Key                    `json:"keys,omitempty"`
	Held          *Reservation             `json:"reservation,omitempty"` // nil: there is none
	Registrations []Registration           `json:"registrations,omitempty"`
	Capabilities  *ReservationCapabilities `json:"capabilities,omitempty"`
}

// Reservation is one that is held.
type Reservation struct {
	Key  Key    `json:"key"`  // of the holder, 0 if all registrants hold it
	Type string `json:"type"` // as SPC has it
}

// Registration is one registered I_T nexus.
type Registration struct {
	Key            Key    `json:"key"`
	Initiator      string `json:"initiator"` // "iqn...,i,0xISID"
	TargetPort     uint16 `json:"target_port"`
	AllTargetPorts bool   `json:"all_target_ports,omitempty"`
	Holder         bool   `json:"holder,omitempty"`
	Type           string `json:"type,omitempty"` // of the reservation, for a holder
	Own            bool   `json:"own,omitempty"`  // a session of this daemon with the target
}

// ReservationCapabilities tell what the unit can do.
type ReservationCapabilities struct {
	Types             []string `json:"types"` // nil: it does not say
	PersistLoss       bool     `json:"persist_loss"`
	PersistLossActive bool     `json:"persist_loss_active"`
	AllTargetPorts    bool     `json:"all_target_ports"`
	SpecifyInitiators bool     `json:"specify_initiators"`
	CompatibleReserve bool     `json:"compatible_reserve"`
}
