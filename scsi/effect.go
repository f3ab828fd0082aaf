package scsi

import "encoding/binary"

// ReadsOnly tells whether a command leaves the unit as it is: data, state, reservations, and what other commands find. why says, for one that does
// not, what it would do under a block device that is in use. A command that this package does not know is taken for one that changes something.
//
// cdb has the length of the command, at least 1.
func ReadsOnly(cdb []byte) (ok bool, why string) {
	sa := byte(0)
	if len(cdb) > 1 {
		sa = cdb[1] & 0x1f
	}
	if n := CDBLength(cdb[0]); n > 0 && len(cdb) >= n && cdb[n-1]&0x04 != 0 || cdb[0] == 0x7f && len(cdb) > 1 && cdb[1]&0x04 != 0 {
		return false, "NACA is set: an error would hold up every command of the session until it is cleared"
	}
	switch op := cdb[0]; op {
	case OpTestUnitReady, OpRequestSense, OpInquiry, OpModeSense6, OpModeSense10, OpReadCapacity10, OpReportLuns, OpPersistentReserveIn,
		OpRead10, OpRead16, OpSynchronizeCache10, OpSynchronizeCache16,
		0x08, 0xa8, // READ(6), READ(12)
		0x34, 0x90, // PRE-FETCH(10) and (16)
		0x37, 0xb7, // READ DEFECT DATA(10) and (12)
		0x2f, 0x8f, // VERIFY(10) and (16)
		0xa2, // SECURITY PROTOCOL IN
		0xa3, // MAINTENANCE IN
		0x1c: // RECEIVE DIAGNOSTIC RESULTS
		return true, ""
	case 0x4d: // LOG SENSE
		if len(cdb) > 1 && cdb[1]&1 == 0 {
			return true, ""
		}
		return false, "LOG SENSE with SP saves parameters"
	case 0x9e: // SERVICE ACTION IN(16), which has commands that destroy data, too
		switch sa {
		case 0x10, 0x11, 0x12, 0x13: // READ CAPACITY(16), READ LONG(16), GET LBA STATUS, REPORT REFERRALS
			return true, ""
		}
	case OpWrite10, OpWrite16, 0x0a, 0xaa, 0x2e, 0x8e, 0x89, 0x9c, OpWriteSame16, 0x41, OpUnmap:
		return false, "it changes data behind the back of whoever uses the block device: caches and mounted file systems do not see it"
	case 0x04:
		return false, "FORMAT UNIT destroys all data of the unit"
	case 0x48:
		return false, "SANITIZE destroys all data of the unit"
	case OpPersistentReserveOut:
		return false, "it would register or reserve for one of the sessions of the block device only, and the others would meet the reservation: " +
			"use the reservation commands instead"
	case 0x16, 0x56:
		return false, "RESERVE locks the unit for one of the sessions of the block device only"
	case 0x17, 0x57:
		return false, "RELEASE gives up a lock"
	case 0x1b:
		return false, "START STOP UNIT may stop the unit under its users"
	case 0x15, 0x55:
		return false, "MODE SELECT changes how the unit works: the write cache, for one, is not looked at again"
	case 0x7f:
		if len(cdb) >= 10 {
			switch binary.BigEndian.Uint16(cdb[8:]) {
			case 0x0009, 0x000a: // READ(32), VERIFY(32)
				return true, ""
			}
		}
		return false, "it may change data behind the back of whoever uses the block device"
	case 0x9d:
		return false, "it is one of a family of commands that change the unit"
	case 0xa4:
		if sa == 0x0a {
			return false, "SET TARGET PORT GROUPS changes the access states of the paths"
		}
	}
	return false, "it is not known to leave the unit as it is"
}

// CDBLength is the length that the group of an operation code has, bytes, and 0 for a code whose length is not fixed by its group (vendor specific, or
// variable: byte 7 tells).
//
// Source: SPC-4, operation code.
func CDBLength(op uint8) int {
	switch op >> 5 {
	case 0:
		return 6
	case 1, 2:
		return 10
	case 4:
		return 16
	case 5:
		return 12
	}
	return 0
}
