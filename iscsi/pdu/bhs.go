package pdu

import "encoding/binary"

// Sizes of a PDU, in bytes.
const (
	HeaderLength         = 48        // basic header segment
	MaxDataSegmentLength = 1<<24 - 1 // what the 3-byte field can say
	Alignment            = 4         // every segment is padded to a multiple of it
)

// ReservedTag is the task tag that stands for "no task".
const ReservedTag uint32 = 0xffffffff

// BHS is the basic header segment: 48 bytes, big endian (RFC 7143 section 11.2).
//
//	off len
//	  0   1  0x40 immediate (initiator PDUs), 0x3f Opcode
//	  1   1  0x80 F (final), rest by opcode
//	  4   1  TotalAHSLength, words of 4 bytes
//	  5   3  DataSegmentLength, bytes, padding excluded
//	  8   8  LUN, or by opcode
//	 16   4  InitiatorTaskTag
//	 20   4  TargetTransferTag, where the PDU has one
//	 24   4  CmdSN (from initiators), StatSN (from targets)
//	 28   4  ExpStatSN (from initiators), ExpCmdSN (from targets)
//	 32   4  MaxCmdSN (from targets)
type BHS [HeaderLength]byte

// HeaderOf views the first 48 bytes of b as a header; it does not copy. It panics when b is shorter, which is a bug of the caller: a
// receiver compares the length with [HeaderLength] first.
func HeaderOf(b []byte) *BHS {
	return (*BHS)(b[:HeaderLength])
}

func (b *BHS) u16(off int) uint16       { return binary.BigEndian.Uint16(b[off:]) }
func (b *BHS) u32(off int) uint32       { return binary.BigEndian.Uint32(b[off:]) }
func (b *BHS) put16(off int, v uint16)  { binary.BigEndian.PutUint16(b[off:], v) }
func (b *BHS) put32(off int, v uint32)  { binary.BigEndian.PutUint32(b[off:], v) }
func (b *BHS) bit(off int, m byte) bool { return b[off]&m != 0 }

func (b *BHS) putBit(off int, m byte, v bool) {
	if v {
		b[off] |= m
	} else {
		b[off] &^= m
	}
}

// init clears the header and sets its opcode.
func (b *BHS) init(op Opcode) *BHS {
	*b = BHS{byte(op)}
	return b
}

// Opcode is the kind of the PDU.
func (b *BHS) Opcode() Opcode { return Opcode(b[0] & 0x3f) }

// Immediate is the I bit: the command is for immediate delivery and CmdSN does not advance. Initiator PDUs only.
func (b *BHS) Immediate() bool { return b.bit(0, 0x40) }

// SetImmediate sets the I bit.
func (b *BHS) SetImmediate(v bool) { b.putBit(0, 0x40, v) }

// Final is the F bit: the last PDU of a sequence. In login PDUs the same bit is T ([LoginRequest.Transit]).
func (b *BHS) Final() bool { return b.bit(1, 0x80) }

// SetFinal sets the F bit.
func (b *BHS) SetFinal(v bool) { b.putBit(1, 0x80, v) }

// AHSLength is the length of all additional header segments, in bytes (TotalAHSLength times 4).
func (b *BHS) AHSLength() int { return int(b[4]) * 4 }

// DataSegmentLength is the length of the data segment, in bytes, without padding.
func (b *BHS) DataSegmentLength() int { return int(b[5])<<16 | int(b[6])<<8 | int(b[7]) }

// SetDataSegmentLength sets the length of the data segment. Preconditions: 0 <= n <= MaxDataSegmentLength.
func (b *BHS) SetDataSegmentLength(n int) {
	b[5], b[6], b[7] = byte(n>>16), byte(n>>8), byte(n)
}

// LUN is the 8-byte logical unit number as a big endian value; package scsi takes it apart.
func (b *BHS) LUN() uint64 { return binary.BigEndian.Uint64(b[8:]) }

// SetLUN sets the logical unit number.
func (b *BHS) SetLUN(v uint64) { binary.BigEndian.PutUint64(b[8:], v) }

// InitiatorTaskTag names the task that the PDU belongs to, or is ReservedTag.
func (b *BHS) InitiatorTaskTag() uint32 { return b.u32(16) }

// SetInitiatorTaskTag sets the task tag.
func (b *BHS) SetInitiatorTaskTag(v uint32) { b.put32(16, v) }

// CmdSN is the command number of an initiator PDU (all but SCSI Data-Out and SNACK).
func (b *BHS) CmdSN() uint32 { return b.u32(24) }

// SetCmdSN sets the command number of an initiator PDU.
func (b *BHS) SetCmdSN(v uint32) { b.put32(24, v) }

// ExpStatSN is the next StatSN that the initiator expects; initiator PDUs.
func (b *BHS) ExpStatSN() uint32 { return b.u32(28) }

// SetExpStatSN sets the next StatSN that the initiator expects.
func (b *BHS) SetExpStatSN(v uint32) { b.put32(28, v) }

// StatSN is the status number of a target PDU. In R2T, in Data-In without status, and in a NOP-In that asks for an answer it is only the
// next number, and does not advance.
func (b *BHS) StatSN() uint32 { return b.u32(24) }

// SetStatSN sets the status number of a target PDU.
func (b *BHS) SetStatSN(v uint32) { b.put32(24, v) }

// ExpCmdSN is the next CmdSN that the target expects; target PDUs.
func (b *BHS) ExpCmdSN() uint32 { return b.u32(28) }

// SetExpCmdSN sets the next CmdSN that the target expects.
func (b *BHS) SetExpCmdSN(v uint32) { b.put32(28, v) }

// MaxCmdSN is the last CmdSN that the target accepts; target PDUs.
func (b *BHS) MaxCmdSN() uint32 { return b.u32(32) }

// SetMaxCmdSN sets the last CmdSN that the target accepts.
func (b *BHS) SetMaxCmdSN(v uint32) { b.put32(32, v) }

// Padded is n rounded up to the alignment of segments: what n bytes of data take on a TCP connection.
func Padded(n int) int { return (n + Alignment - 1) &^ (Alignment - 1) }

// Padding is the number of zero bytes that follow a segment of n bytes.
func Padding(n int) int { return -n & (Alignment - 1) }
