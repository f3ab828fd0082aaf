// Package serial compares and counts the 32-bit sequence numbers of iSCSI: CmdSN, StatSN, DataSN and R2TSN.
//
// Layer: below iscsi/pdu's users; imports nothing. All of them wrap, so "smaller" is only defined by RFC 1982 (serial number arithmetic,
// SERIAL_BITS = 32), and no other package compares them with < or >.
//
// Trap: two numbers that are exactly 2**31 apart are in no order at all (RFC 1982 section 3.2). Every function here answers false for them.
package serial

// half is the distance at which the order of two serial numbers is undefined.
const half = 1 << 31

// Less tells whether a comes before b.
func Less(a, b uint32) bool {
	d := b - a
	return d != 0 && d < half
}

// LessEq tells whether a comes before b or is b.
func LessEq(a, b uint32) bool {
	return b-a < half
}

// Distance is the signed number of steps from a to b; it is negative when b comes before a. At a distance of 2**31, where there is no
// order, it is -2**31.
func Distance(a, b uint32) int32 {
	return int32(b - a)
}

// Max is the later of a and b, and a when they are in no order.
func Max(a, b uint32) uint32 {
	if Less(a, b) {
		return b
	}
	return a
}

// Between tells whether n lies in lo..hi, both included. The range must span less than 2**31 numbers.
func Between(n, lo, hi uint32) bool {
	return LessEq(lo, hi) && n-lo <= hi-lo
}
