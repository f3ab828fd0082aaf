package testtarget

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// pair is one key=value of a text data segment, in the order of the wire (RFC 7143 section 6.1).
type pair struct{ key, value string }

func parseText(b []byte) ([]pair, error) {
	var pairs []pair
	for len(b) > 0 {
		end := bytes.IndexByte(b, 0)
		if end < 0 {
			return nil, fmt.Errorf("text %q does not end in a zero byte", b)
		}
		item := string(b[:end])
		b = b[end+1:]
		if item == "" {
			continue // padding by zero bytes
		}
		key, value, ok := strings.Cut(item, "=")
		if !ok || key == "" || len(key) > 63 {
			return nil, fmt.Errorf("text item %q is not key=value", item)
		}
		pairs = append(pairs, pair{key, value})
	}
	return pairs, nil
}

func formatText(pairs []pair) []byte {
	var b []byte
	for _, p := range pairs {
		b = append(b, p.key...)
		b = append(b, '=')
		b = append(b, p.value...)
		b = append(b, 0)
	}
	return b
}

// negotiation is how the result of a key is found (RFC 7143 section 13).
type negotiation int

const (
	ruleMin negotiation = iota
	ruleMax
	ruleAnd
	ruleOr
	ruleList    // the first of the initiator's list that the target takes
	ruleDeclare // both declare
)

// operational are the keys of a normal session, with what LIO asks for (iscsi_target_parameters.h).
var operational = map[string]struct {
	rule  negotiation
	value string
}{
	"HeaderDigest":             {ruleList, "CRC32C,None"},
	"DataDigest":               {ruleList, "CRC32C,None"},
	"MaxConnections":           {ruleMin, "1"},
	"InitialR2T":               {ruleOr, "Yes"},
	"ImmediateData":            {ruleAnd, "Yes"},
	"MaxRecvDataSegmentLength": {ruleDeclare, "8192"},
	"MaxBurstLength":           {ruleMin, "262144"},
	"FirstBurstLength":         {ruleMin, "65536"},
	"DefaultTime2Wait":         {ruleMax, "2"},
	"DefaultTime2Retain":       {ruleMin, "20"},
	"MaxOutstandingR2T":        {ruleMin, "1"},
	"DataPDUInOrder":           {ruleOr, "Yes"},
	"DataSequenceInOrder":      {ruleOr, "Yes"},
	"ErrorRecoveryLevel":       {ruleMin, "0"},
	"IFMarker":                 {ruleAnd, "No"},
	"OFMarker":                 {ruleAnd, "No"},
}

// extensions are the keys of RFC 7145 section 6, for a portal that speaks iSER, with what the target asks for.
var extensions = map[string]struct {
	rule  negotiation
	value string
}{
	"RDMAExtensions":                 {ruleAnd, "Yes"},
	"InitiatorRecvDataSegmentLength": {ruleMin, "262144"},
	"TargetRecvDataSegmentLength":    {ruleMin, "8192"},
	"MaxOutstandingUnexpectedPDUs":   {ruleDeclare, "0"},
	"MaxAHSLength":                   {ruleDeclare, "256"},
	"HeaderDigest":                   {ruleList, "None"}, // digests are not to be used with RDMA
	"DataDigest":                     {ruleList, "None"},
}

// silent are the keys of it that only the initiator declares: no answer is due.
var silent = map[string]bool{"TaggedBufferForSolicitedDataOnly": true, "iSERHelloRequired": true}

// discoveryIrrelevant are the keys that RFC 7143 section 13 calls irrelevant when SessionType=Discovery.
var discoveryIrrelevant = map[string]bool{
	"MaxConnections": true, "InitialR2T": true, "ImmediateData": true, "MaxBurstLength": true, "FirstBurstLength": true,
	"MaxOutstandingR2T": true, "DataPDUInOrder": true, "DataSequenceInOrder": true,
}

// answer negotiates one key. effective is what holds from now on, for a declaration what the initiator declared.
func (t *Target) answer(key, offer string) (reply, effective string) {
	op, ok := operational[key]
	if x, has := extensions[key]; has && t.config.ISER {
		op, ok = x, true
	}
	switch {
	case key == "RDMAExtensions" && !t.config.ISER:
		return "No", ""
	case !ok:
		return "NotUnderstood", ""
	}
	own := op.value
	if v, ok := t.config.Keys[key]; ok {
		own = v
	}
	switch op.rule {
	case ruleDeclare:
		return own, offer
	case ruleAnd, ruleOr:
		if offer != "Yes" && offer != "No" {
			return "Reject", ""
		}
		result := "No"
		if op.rule == ruleAnd && offer == "Yes" && own == "Yes" || op.rule == ruleOr && (offer == "Yes" || own == "Yes") {
			result = "Yes"
		}
		return result, result
	case ruleList:
		takes := strings.Split(own, ",")
		for _, o := range strings.Split(offer, ",") {
			for _, k := range takes {
				if o == k {
					return o, o
				}
			}
		}
		return "Reject", ""
	}
	a, err := strconv.ParseUint(offer, 0, 32)
	b, _ := strconv.ParseUint(own, 0, 32)
	if err != nil {
		return "Reject", ""
	}
	result := min(a, b)
	if op.rule == ruleMax {
		result = max(a, b)
	}
	s := strconv.FormatUint(result, 10)
	return s, s
}

// params are the negotiated values of a connection, with the RFC's defaults (section 13).
type params struct {
	initialR2T, immediateData bool
	maxBurst, firstBurst      int
	maxOutstandingR2T         int
	sendMax                   int // MaxRecvDataSegmentLength that the initiator declared
	recvMax                   int // MaxRecvDataSegmentLength that the target declared
	digests                   digests
}

func defaultParams() params {
	return params{
		initialR2T: true, immediateData: true, maxBurst: 262144, firstBurst: 65536, maxOutstandingR2T: 1,
		sendMax: 8192, recvMax: 8192,
	}
}

// first is FirstBurstLength, which may not exceed MaxBurstLength (section 13.14): LIO cuts it.
func (p *params) first() int { return min(p.firstBurst, p.maxBurst) }

func (p *params) set(key, reply, effective string) {
	n, _ := strconv.Atoi(effective)
	switch key {
	case "InitialR2T":
		p.initialR2T = effective == "Yes"
	case "ImmediateData":
		p.immediateData = effective == "Yes"
	case "MaxBurstLength":
		p.maxBurst = n
	case "FirstBurstLength":
		p.firstBurst = n
	case "MaxOutstandingR2T":
		p.maxOutstandingR2T = n
	case "MaxRecvDataSegmentLength":
		p.sendMax = n
		p.recvMax, _ = strconv.Atoi(reply)
	case "InitiatorRecvDataSegmentLength":
		p.sendMax = n
	case "TargetRecvDataSegmentLength":
		p.recvMax = n
	case "HeaderDigest":
		p.digests.header = effective == "CRC32C"
	case "DataDigest":
		p.digests.data = effective == "CRC32C"
	}
}
