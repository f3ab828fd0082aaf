package scsi

import (
	"encoding/binary"
	"fmt"
)

// SenseKey is the class of a sense code.
type SenseKey uint8

// Sense keys (SPC-4).
const (
	KeyNoSense        SenseKey = 0x0
	KeyRecoveredError SenseKey = 0x1
	KeyNotReady       SenseKey = 0x2
	KeyMediumError    SenseKey = 0x3
	KeyHardwareError  SenseKey = 0x4
	KeyIllegalRequest SenseKey = 0x5
	KeyUnitAttention  SenseKey = 0x6
	KeyDataProtect    SenseKey = 0x7
	KeyBlankCheck     SenseKey = 0x8
	KeyVendorSpecific SenseKey = 0x9
	KeyCopyAborted    SenseKey = 0xa
	KeyAbortedCommand SenseKey = 0xb
	KeyVolumeOverflow SenseKey = 0xd
	KeyMiscompare     SenseKey = 0xe
	KeyCompleted      SenseKey = 0xf
)

var senseKeyNames = [16]string{
	"no sense", "recovered error", "not ready", "medium error", "hardware error", "illegal request", "unit attention", "data protect",
	"blank check", "vendor specific", "copy aborted", "aborted command", "reserved", "volume overflow", "miscompare", "completed",
}

// String is the name of SPC in lower case.
func (k SenseKey) String() string { return senseKeyNames[k&0xf] }

// Sense is decoded sense data, of either format.
type Sense struct {
	Key         SenseKey
	ASC, ASCQ   uint8
	Deferred    bool   // belongs to an earlier command that already ended with GOOD
	InfoValid   bool   // Information counts
	Information uint64 // for READ and WRITE: the LBA that failed
	InProgress  bool   // Progress counts
	Progress    uint16 // of an operation such as a format, in 65536ths
	FieldValid  bool   // Field counts
	Field       uint16 // with illegal request: the byte of the CDB or parameter list that is wrong
	FieldInCDB  bool   // Field is in the CDB, else in the parameter list
}

// ParseSense reads sense data in fixed (70h, 71h) or descriptor format (72h, 73h). Fields past the end of b, or past the additional length
// that it states, are zero. The error says that there is no sense key to be had: too short, or an unknown response code.
//
// Source: SPC-4, sense data.
func ParseSense(b []byte) (Sense, error) {
	if len(b) < 3 {
		return Sense{}, shortError("sense data", len(b), 3)
	}
	switch code := b[0] & 0x7f; code {
	case 0x70, 0x71:
		return parseFixed(b, code == 0x71), nil
	case 0x72, 0x73:
		return parseDescriptors(b, code == 0x73), nil
	default:
		return Sense{}, fmt.Errorf("scsi: sense data with response code %02x", code)
	}
}

// parseFixed reads the fixed format.
//
//	off len
//	  0   1  0x80 Information is valid, 0x7f response code
//	  2   1  0x0f sense key
//	  3   4  Information
//	  7   1  additional length, bytes after this field
//	 12   1  ASC
//	 13   1  ASCQ
//	 15   3  sense key specific
func parseFixed(b []byte, deferred bool) Sense {
	if len(b) > 7 {
		b = b[:min(len(b), 8+int(b[7]))]
	}
	f := fields(b)
	s := Sense{Key: SenseKey(b[2] & 0x0f), ASC: f.u8(12), ASCQ: f.u8(13), Deferred: deferred}
	if b[0]&0x80 != 0 && len(b) >= 7 {
		s.InfoValid, s.Information = true, uint64(f.u32(3))
	}
	if len(b) >= 18 {
		s.keySpecific(b[15:18])
	}
	return s
}

// parseDescriptors reads the descriptor format.
//
//	off len
//	  1   1  0x0f sense key
//	  2   1  ASC
//	  3   1  ASCQ
//	  7   1  additional length, bytes after this field
//	  8      descriptors: type, length of the rest, rest
func parseDescriptors(b []byte, deferred bool) Sense {
	f := fields(b)
	s := Sense{Key: SenseKey(b[1] & 0x0f), ASC: f.u8(2), ASCQ: f.u8(3), Deferred: deferred}
	if len(b) < 8 {
		return s
	}
	d := b[8:min(len(b), 8+int(b[7]))]
	for len(d) >= 2 && len(d) >= 2+int(d[1]) {
		body := d[2 : 2+int(d[1])]
		switch {
		case d[0] == 0x00 && len(body) >= 10: // information
			if body[0]&0x80 != 0 {
				s.InfoValid, s.Information = true, binary.BigEndian.Uint64(body[2:])
			}
		case d[0] == 0x02 && len(body) >= 5: // sense key specific
			s.keySpecific(body[2:5])
		}
		d = d[2+int(d[1]):]
	}
	return s
}

// keySpecific reads the three bytes whose meaning depends on the sense key.
func (s *Sense) keySpecific(b []byte) {
	if b[0]&0x80 == 0 {
		return
	}
	v := binary.BigEndian.Uint16(b[1:])
	switch s.Key {
	case KeyIllegalRequest:
		s.FieldValid, s.Field, s.FieldInCDB = true, v, b[0]&0x40 != 0
	case KeyNoSense, KeyNotReady:
		s.InProgress, s.Progress = true, v
	}
}

// String reads as "medium error 03/11/00: unrecovered read error at LBA 4711".
func (s *Sense) String() string {
	t := fmt.Sprintf("%s %02x/%02x/%02x", s.Key, uint8(s.Key), s.ASC, s.ASCQ)
	if n := ASCName(s.ASC, s.ASCQ); n != "" {
		t += ": " + n
	}
	if s.InfoValid && (s.Key == KeyMediumError || s.Key == KeyHardwareError || s.Key == KeyRecoveredError) {
		t += fmt.Sprintf(" at LBA %d", s.Information)
	}
	if s.FieldValid {
		where := "parameter list"
		if s.FieldInCDB {
			where = "CDB"
		}
		t += fmt.Sprintf(" (byte %d of the %s)", s.Field, where)
	}
	if s.InProgress {
		t += fmt.Sprintf(" (%d%% done)", int(s.Progress)*100/65536)
	}
	if s.Deferred {
		t += " (deferred: an earlier command failed)"
	}
	return t
}

// ASCName is the text for an additional sense code, lower case, or the text for the whole ASC when the qualifier is not known, or "".
func ASCName(asc, ascq uint8) string {
	if n, ok := ascNames[uint16(asc)<<8|uint16(ascq)]; ok {
		return n
	}
	return ascNames[uint16(asc)<<8]
}

// ascNames are the codes that disks and targets send, from SPC-4's list of additional sense codes; the key is ASC<<8 | ASCQ.
var ascNames = map[uint16]string{
	0x0006: "i/o process terminated",
	0x0016: "operation in progress",
	0x0200: "no seek complete",
	0x0300: "peripheral device write fault",
	0x0400: "not ready, cause not reportable",
	0x0401: "becoming ready",
	0x0402: "initializing command required",
	0x0403: "manual intervention required",
	0x0404: "format in progress",
	0x0405: "rebuild in progress",
	0x0406: "recalculation in progress",
	0x0407: "operation in progress",
	0x0408: "long write in progress",
	0x0409: "self-test in progress",
	0x040a: "asymmetric access state transition",
	0x040b: "target port in standby state",
	0x040c: "target port in unavailable state",
	0x0410: "auxiliary memory not accessible",
	0x0411: "notify (enable spinup) required",
	0x0412: "offline",
	0x0414: "space allocation in progress",
	0x041a: "start stop unit command in progress",
	0x041b: "sanitize in progress",
	0x041c: "additional power use not yet granted",
	0x041d: "configuration in progress",
	0x0424: "depopulation in progress",
	0x0425: "depopulation restoration in progress",
	0x0500: "logical unit does not respond to selection",
	0x0800: "logical unit communication failure",
	0x0801: "logical unit communication time-out",
	0x0900: "track following error",
	0x0b00: "warning",
	0x0b01: "warning: specified temperature exceeded",
	0x0c00: "write error",
	0x0c02: "write error, auto reallocation failed",
	0x0c03: "write error, recommend reassignment",
	0x0d00: "error detected by third party temporary initiator",
	0x0e00: "invalid information unit",
	0x1000: "id crc or ecc error",
	0x1001: "logical block guard check failed",
	0x1002: "logical block application tag check failed",
	0x1003: "logical block reference tag check failed",
	0x1100: "unrecovered read error",
	0x1101: "read retries exhausted",
	0x1104: "unrecovered read error, auto reallocate failed",
	0x110b: "unrecovered read error, recommend reassignment",
	0x1114: "read error, lba marked bad by application client",
	0x1300: "address mark not found for data field",
	0x1400: "recorded entity not found",
	0x1401: "record not found",
	0x1500: "random positioning error",
	0x1700: "recovered data with no error correction applied",
	0x1800: "recovered data with error correction applied",
	0x1900: "defect list error",
	0x1a00: "parameter list length error",
	0x1b00: "synchronous data transfer error",
	0x1d00: "miscompare during verify operation",
	0x2000: "invalid command operation code",
	0x2002: "access denied, no access rights",
	0x2100: "logical block address out of range",
	0x2101: "invalid element address",
	0x2400: "invalid field in cdb",
	0x2401: "cdb decryption error",
	0x2500: "logical unit not supported",
	0x2600: "invalid field in parameter list",
	0x2601: "parameter not supported",
	0x2602: "parameter value invalid",
	0x2604: "invalid release of persistent reservation",
	0x2606: "too many target descriptors",
	0x2700: "write protected",
	0x2701: "hardware write protected",
	0x2702: "logical unit software write protected",
	0x2707: "space allocation failed, write protect",
	0x2800: "not ready to ready change, medium may have changed",
	0x2900: "power on, reset, or bus device reset occurred",
	0x2901: "power on occurred",
	0x2902: "scsi bus reset occurred",
	0x2903: "bus device reset function occurred",
	0x2904: "device internal reset",
	0x2907: "i_t nexus loss occurred",
	0x2a00: "parameters changed",
	0x2a01: "mode parameters changed",
	0x2a02: "log parameters changed",
	0x2a03: "reservations preempted",
	0x2a04: "reservations released",
	0x2a05: "registrations preempted",
	0x2a06: "asymmetric access state changed",
	0x2a07: "implicit asymmetric access state transition failed",
	0x2a09: "capacity data has changed",
	0x2a0a: "error history i_t nexus cleared",
	0x2a0c: "error recovery attributes have changed",
	0x2a13: "data encryption key has been changed",
	0x2c00: "command sequence error",
	0x2c09: "previous reservation conflict status",
	0x2f00: "commands cleared by another initiator",
	0x2f01: "commands cleared by power loss notification",
	0x2f02: "commands cleared by device server",
	0x3000: "incompatible medium installed",
	0x3100: "medium format corrupted",
	0x3101: "format command failed",
	0x3200: "no defect spare location available",
	0x3500: "enclosure services failure",
	0x3800: "event status notification",
	0x3807: "thin provisioning soft threshold reached",
	0x3900: "saving parameters not supported",
	0x3a00: "medium not present",
	0x3e00: "logical unit has not self-configured yet",
	0x3e01: "logical unit failure",
	0x3e02: "timeout on logical unit",
	0x3f00: "target operating conditions have changed",
	0x3f01: "microcode has been changed",
	0x3f02: "changed operating definition",
	0x3f03: "inquiry data has changed",
	0x3f05: "device identifier changed",
	0x3f0a: "volume set created or modified",
	0x3f0e: "reported luns data has changed",
	0x4100: "data path failure",
	0x4300: "message error",
	0x4400: "internal target failure",
	0x4500: "select or reselect failure",
	0x4700: "scsi parity error",
	0x4800: "initiator detected error message received",
	0x4900: "invalid message error",
	0x4a00: "command phase error",
	0x4b00: "data phase error",
	0x4c00: "logical unit failed self-configuration",
	0x4e00: "overlapped commands attempted",
	0x5300: "media load or eject failed",
	0x5500: "system resource failure",
	0x5503: "insufficient resources",
	0x550b: "insufficient power for operation",
	0x5d00: "failure prediction threshold exceeded",
	0x5e00: "low power condition on",
	0x6500: "voltage fault",
	0x6700: "configuration failure",
	0x7400: "security error",
}
