package login

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// Transport is what carries the connection.
type Transport uint8

// Transports.
const (
	TCP  Transport = 1
	ISER Transport = 2
)

// SessionType is the kind of session, key SessionType.
type SessionType uint8

// Session types.
const (
	Normal    SessionType = 1
	Discovery SessionType = 2
)

// String is the value of key SessionType.
func (t SessionType) String() string {
	if t == Discovery {
		return "Discovery"
	}
	return "Normal"
}

// Digest is a checksum of headers or data segments on TCP.
type Digest uint8

// Digests.
const (
	DigestNone   Digest = 0
	DigestCRC32C Digest = 1
)

// String is the value of keys HeaderDigest and DataDigest.
func (d Digest) String() string {
	if d == DigestCRC32C {
		return "CRC32C"
	}
	return "None"
}

// Keys are the operational parameters, spelled as on the wire: what to propose ([Config.Keys]), and what came out ([Result.Keys]). Lengths
// are in bytes.
//
// Source: RFC 7143 section 13; RFC 7145 for the keys of iSER.
type Keys struct {
	HeaderDigest                   Digest // outcome only; the proposal is the list in Config
	DataDigest                     Digest // outcome only; the proposal is the list in Config
	MaxConnections                 uint32
	InitialR2T                     bool
	ImmediateData                  bool
	MaxRecvDataSegmentLength       uint32 // ours: what the target may send in one PDU
	TargetMaxRecvDataSegmentLength uint32 // the target's: what we may send in one PDU; outcome only
	MaxBurstLength                 uint32
	FirstBurstLength               uint32
	DefaultTime2Wait               time.Duration // whole seconds
	DefaultTime2Retain             time.Duration // whole seconds
	MaxOutstandingR2T              uint32
	DataPDUInOrder                 bool
	DataSequenceInOrder            bool
	ErrorRecoveryLevel             uint32
	TaskReporting                  string // always RFC3720: one connection keeps its responses in order, and FastAbort is not spoken
	ISCSIProtocolLevel             uint32 // always 1 or less: key iSCSIProtocolLevel (RFC 7144 section 7.1.1)

	RDMAExtensions                   bool
	InitiatorRecvDataSegmentLength   uint32 // what the target may send in one control PDU over iSER
	TargetRecvDataSegmentLength      uint32 // what we may send in one control PDU over iSER
	MaxOutstandingUnexpectedPDUs     uint32 // ours: 0 means no limit stated
	TargetMaxOutstandingUnexpected   uint32 // the target's value of MaxOutstandingUnexpectedPDUs; outcome only
	MaxAHSLength                     uint32 // the target's; outcome only
	TaggedBufferForSolicitedDataOnly bool   // not declared, so No: the base offset is that of the whole data. What a target sends is only noted
	ISERHelloRequired                bool   // not declared, so No: key iSERHelloRequired. A target that wants it is refused
}

// rfcKeys are the values that hold for a key that was not negotiated.
var rfcKeys = Keys{
	MaxConnections: 1, InitialR2T: true, ImmediateData: true, MaxRecvDataSegmentLength: 8192, TargetMaxRecvDataSegmentLength: 8192,
	MaxBurstLength: 262144, FirstBurstLength: 65536, DefaultTime2Wait: 2 * time.Second, DefaultTime2Retain: 20 * time.Second,
	MaxOutstandingR2T: 1, DataPDUInOrder: true, DataSequenceInOrder: true, TaskReporting: reportRFC3720, ISCSIProtocolLevel: 1,
	InitiatorRecvDataSegmentLength: 8192, TargetRecvDataSegmentLength: 8192, MaxAHSLength: 256,
}

// DefaultKeys is a proposal that all known targets get right.
//
// Over iSER: no immediate and no unsolicited data, because targets disagree on the address that a Write STag starts at when some data has
// gone before. Lengths of control PDUs are 8192, which is what the targets really post.
func DefaultKeys(t Transport, s SessionType) Keys {
	k := rfcKeys
	k.DefaultTime2Retain = 0
	k.MaxBurstLength = 1 << 20
	k.MaxRecvDataSegmentLength = 256 << 10
	if s == Discovery {
		k.MaxRecvDataSegmentLength = 32 << 10
	}
	if t == ISER {
		k.ImmediateData = false
		k.MaxBurstLength = 16776192
		k.MaxRecvDataSegmentLength = 8192
		k.RDMAExtensions = s == Normal
	}
	return k
}

// kind is how the outcome of a key follows from the two values.
type kind uint8

const (
	declared kind = 1 // each side states its own, no answer
	boolAnd  kind = 2
	boolOr   kind = 3
	numMin   kind = 4
	numMax   kind = 5
	list     kind = 6 // the first of the proposer's values that the responder has
)

// Where a key is proposed by us, or means anything at all: bits of row.propose and row.relevant.
const (
	onTCP          = 1 << 0
	onISER         = 1 << 1
	onTCPDiscover  = 1 << 2
	onISERDiscover = 1 << 3
	normal         = onTCP | onISER
	everywhere     = normal | onTCPDiscover | onISERDiscover
)

// place is the bit for a connection.
func place(t Transport, s SessionType) int {
	switch {
	case t == TCP && s == Normal:
		return onTCP
	case t == ISER && s == Normal:
		return onISER
	case t == TCP:
		return onTCPDiscover
	}
	return onISERDiscover
}

// row is one operational key. Exactly one of flag, num, dur, digest and text is set; for a declared key, mine is our value and the other the
// target's.
type row struct {
	name     string
	kind     kind
	propose  int // where we propose it, in the order of the table
	relevant int // where a proposal of the target is not answered with Irrelevant
	lo, hi   uint32
	limit    bool // bounds what the target may send us: without an answer the target goes by the default, so we must expect that
	flag     func(*Keys) *bool
	num      func(*Keys) *uint32
	dur      func(*Keys) *time.Duration
	digest   func(*Keys) *Digest
	text     func(*Keys) *string // of a list from which we only take the default
	mine     func(*Keys) *uint32
}

// maxSegment is the largest length that a data segment can have, and maxNumber the largest value of most numbers.
const (
	maxSegment = 1<<24 - 1
	maxNumber  = 65535
)

// reportRFC3720 is the default of TaskReporting (RFC 7143 section 13.23).
const reportRFC3720 = "RFC3720"

// rows has every operational key that this initiator knows. The order is the order on the wire.
var rows = [...]row{
	{name: "HeaderDigest", kind: list, propose: onTCP | onTCPDiscover, relevant: everywhere, digest: func(k *Keys) *Digest { return &k.HeaderDigest }},
	{name: "DataDigest", kind: list, propose: onTCP | onTCPDiscover, relevant: everywhere, digest: func(k *Keys) *Digest { return &k.DataDigest }},
	{name: "RDMAExtensions", kind: boolAnd, propose: onISER, relevant: normal, flag: func(k *Keys) *bool { return &k.RDMAExtensions }},
	{name: "InitiatorRecvDataSegmentLength", kind: numMin, propose: onISER, relevant: onISER, lo: 512, hi: maxSegment, limit: true,
		num: func(k *Keys) *uint32 { return &k.InitiatorRecvDataSegmentLength }},
	{name: "TargetRecvDataSegmentLength", kind: numMin, propose: onISER, relevant: onISER, lo: 512, hi: maxSegment,
		num: func(k *Keys) *uint32 { return &k.TargetRecvDataSegmentLength }},
	{name: "MaxOutstandingUnexpectedPDUs", kind: declared, propose: onISER, relevant: onISER, hi: 1<<32 - 1,
		mine: func(k *Keys) *uint32 { return &k.MaxOutstandingUnexpectedPDUs },
		num:  func(k *Keys) *uint32 { return &k.TargetMaxOutstandingUnexpected }},
	{name: "MaxAHSLength", kind: declared, relevant: onISER, hi: 1<<32 - 1, num: func(k *Keys) *uint32 { return &k.MaxAHSLength }},
	{name: "TaggedBufferForSolicitedDataOnly", kind: declared, relevant: onISER,
		flag: func(k *Keys) *bool { return &k.TaggedBufferForSolicitedDataOnly }},
	{name: "iSERHelloRequired", kind: declared, relevant: onISER, flag: func(k *Keys) *bool { return &k.ISERHelloRequired }},
	{name: "MaxRecvDataSegmentLength", kind: declared, propose: onTCP | onTCPDiscover | onISERDiscover, relevant: everywhere &^ onISER, lo: 512, hi: maxSegment,
		mine: func(k *Keys) *uint32 { return &k.MaxRecvDataSegmentLength },
		num:  func(k *Keys) *uint32 { return &k.TargetMaxRecvDataSegmentLength }},
	{name: "InitialR2T", kind: boolOr, propose: normal, relevant: normal, flag: func(k *Keys) *bool { return &k.InitialR2T }},
	{name: "ImmediateData", kind: boolAnd, propose: normal, relevant: normal, flag: func(k *Keys) *bool { return &k.ImmediateData }},
	{name: "MaxBurstLength", kind: numMin, propose: normal, relevant: normal, lo: 512, hi: maxSegment, num: func(k *Keys) *uint32 { return &k.MaxBurstLength }},
	{name: "FirstBurstLength", kind: numMin, propose: normal, relevant: normal, lo: 512, hi: maxSegment, num: func(k *Keys) *uint32 { return &k.FirstBurstLength }},
	{name: "MaxOutstandingR2T", kind: numMin, propose: normal, relevant: normal, lo: 1, hi: maxNumber, limit: true,
		num: func(k *Keys) *uint32 { return &k.MaxOutstandingR2T }},
	{name: "DefaultTime2Wait", kind: numMax, propose: everywhere, relevant: everywhere, hi: 3600, dur: func(k *Keys) *time.Duration { return &k.DefaultTime2Wait }},
	{name: "DefaultTime2Retain", kind: numMin, propose: everywhere, relevant: everywhere, hi: 3600, dur: func(k *Keys) *time.Duration { return &k.DefaultTime2Retain }},
	{name: "MaxConnections", kind: numMin, propose: normal, relevant: normal, lo: 1, hi: maxNumber, num: func(k *Keys) *uint32 { return &k.MaxConnections }},
	{name: "ErrorRecoveryLevel", kind: numMin, propose: everywhere, relevant: everywhere, hi: 2, num: func(k *Keys) *uint32 { return &k.ErrorRecoveryLevel }},
	{name: "DataPDUInOrder", kind: boolOr, propose: normal, relevant: normal, flag: func(k *Keys) *bool { return &k.DataPDUInOrder }},
	{name: "DataSequenceInOrder", kind: boolOr, propose: normal, relevant: normal, flag: func(k *Keys) *bool { return &k.DataSequenceInOrder }},
	{name: "TaskReporting", kind: list, relevant: normal, text: func(k *Keys) *string { return &k.TaskReporting }},
	{name: "iSCSIProtocolLevel", kind: numMin, relevant: normal, hi: 31, num: func(k *Keys) *uint32 { return &k.ISCSIProtocolLevel }},
}

// rowOf is the index of a key in rows, or -1.
func rowOf(name string) int {
	return slices.IndexFunc(rows[:], func(r row) bool { return r.name == name })
}

// value is the key's value in k, in the form of the wire. own selects our side of a declared key.
func (r *row) value(k *Keys, own bool) string {
	switch {
	case own && r.mine != nil:
		return formatNumber(*r.mine(k))
	case r.flag != nil:
		return formatBool(*r.flag(k))
	case r.num != nil:
		return formatNumber(*r.num(k))
	case r.dur != nil:
		return formatNumber(uint32(*r.dur(k) / time.Second))
	case r.text != nil:
		return *r.text(k)
	}
	return r.digest(k).String()
}

// number is the numeric value of the key in k.
func (r *row) number(k *Keys) uint32 {
	if r.dur != nil {
		return uint32(*r.dur(k) / time.Second)
	}
	return *r.num(k)
}

func (r *row) setNumber(k *Keys, v uint32) {
	if r.dur != nil {
		*r.dur(k) = time.Duration(v) * time.Second
		return
	}
	*r.num(k) = v
}

// numeric tells whether the key has a number.
func (r *row) numeric() bool { return r.num != nil || r.dur != nil }

func formatNumber(v uint32) string { return strconv.FormatUint(uint64(v), 10) }

func formatBool(v bool) string {
	if v {
		return "Yes"
	}
	return "No"
}

// parseNumber reads a decimal or 0x constant.
func parseNumber(s string) (uint32, bool) {
	base := 10
	if len(s) > 2 && (s[:2] == "0x" || s[:2] == "0X") {
		s, base = s[2:], 16
	}
	if s == "" || s[0] == '+' || strings.Contains(s, "_") {
		return 0, false
	}
	v, err := strconv.ParseUint(s, base, 32)
	return uint32(v), err == nil
}

func parseBool(s string) (v, ok bool) { return s == "Yes", s == "Yes" || s == "No" }

func parseDigest(s string) (Digest, bool) {
	switch s {
	case "None":
		return DigestNone, true
	case "CRC32C":
		return DigestCRC32C, true
	}
	return 0, false
}

func formatDigests(list []Digest) string {
	var s []string
	for _, d := range list {
		s = append(s, d.String())
	}
	return strings.Join(s, ",")
}
