package login

import (
	"slices"
	"strings"

	"iserd.org/iserd/iscsi/pdu"
)

// The answers that a key can get besides a value (RFC 7143 section 6.2).
const (
	answerNotUnderstood = "NotUnderstood"
	answerIrrelevant    = "Irrelevant"
	answerReject        = "Reject"
	valueNone           = "None"
)

// keyState is how far the negotiation of one key is.
type keyState uint8

const (
	untouched keyState = 0
	proposed  keyState = 1 // we sent it and wait for the answer
	settled   keyState = 2 // an outcome is in Result.Keys
	defaulted keyState = 3 // no value came out of it: see finish
)

// negotiation is the operational half of a login.
type negotiation struct {
	place   int
	offer   Keys // what we want
	digests [2][]Digest
	keys    Keys // what came out so far; starts with the values for keys that are not negotiated
	state   [len(rows)]keyState
	sent    map[string]string // every operational key of ours
	answers pdu.Keys          // to keys that the target proposed, for the next request
	seen    map[string]string // every key of the target, to find repetitions
	alias   string
	arch    string // X#NodeArchitecture
	tag     uint16
	hasTag  bool
}

// digestList is our list for a digest key.
func (n *negotiation) digestList(i int) []Digest {
	if rows[i].name == "HeaderDigest" {
		return n.digests[0]
	}
	return n.digests[1]
}

// proposals are all keys that we propose on this connection. Each goes out once.
func (n *negotiation) proposals() pdu.Keys {
	var keys pdu.Keys
	for i := range rows {
		r := &rows[i]
		if r.propose&n.place == 0 || n.state[i] != untouched {
			continue
		}
		v := r.value(&n.offer, true)
		if r.kind == list {
			v = formatDigests(n.digestList(i))
		}
		keys.Add(r.name, v)
		if r.kind != declared {
			n.state[i] = proposed
		}
	}
	return keys
}

// take handles one key of the target: an answer to ours, a declaration, or a proposal that gets an answer.
func (n *negotiation) take(k pdu.Key) error {
	if old, twice := n.seen[k.Name]; twice {
		// Information about the target may be repeated as it was; a second negotiation may not.
		if old == k.Value && (k.Name == "TargetAlias" || k.Name == "TargetPortalGroupTag") {
			return nil
		}
		return protocolErrorf("6.2", "%s came twice", k.Name)
	}
	n.seen[k.Name] = k.Value
	switch k.Name {
	case "TargetAlias":
		n.alias = k.Value
		return nil
	case "X#NodeArchitecture": // a declaration, which nothing may depend on (RFC 7143 section 13.26)
		n.arch = k.Value
		return nil
	case "TargetPortalGroupTag":
		v, ok := parseNumber(k.Value)
		if !ok || v > maxNumber {
			return badValue(k)
		}
		n.tag, n.hasTag = uint16(v), true
		return nil
	case "TargetAddress":
		return nil // only means something in a redirection
	case "InitiatorName", "InitiatorAlias", "TargetName", "SessionType", "SendTargets":
		return protocolErrorf("13", "target sent %s, which only initiators send", k.Name)
	}
	i := rowOf(k.Name)
	if i < 0 {
		n.unknown(k)
		return nil
	}
	switch {
	case rows[i].kind == declared:
		return n.declaration(i, k)
	case n.state[i] == proposed:
		return n.answer(i, k)
	}
	return n.proposal(i, k)
}

// unknown answers a proposal that has no row in the table.
func (n *negotiation) unknown(k pdu.Key) {
	switch {
	case isRefusal(k.Value):
		// An answer to something that we did not say. There is nothing to answer.
	case k.Name == "IFMarker" || k.Name == "OFMarker":
		n.answers.Add(k.Name, "No") // obsolete since RFC 7143, which forbids NotUnderstood for them (section 13.25)
	case k.Name == "IFMarkInt" || k.Name == "OFMarkInt":
		n.answers.Add(k.Name, answerReject)
	default:
		n.answers.Add(k.Name, answerNotUnderstood)
	}
}

// declaration takes the target's own value. There is no answer to it.
func (n *negotiation) declaration(i int, k pdu.Key) error {
	r := &rows[i]
	if isRefusal(k.Value) || r.relevant&n.place == 0 {
		n.state[i] = defaulted
		return nil
	}
	if r.flag != nil {
		v, ok := parseBool(k.Value)
		if !ok {
			return badValue(k)
		}
		*r.flag(&n.keys) = v
	} else {
		v, ok := parseNumber(k.Value)
		if !ok || v < r.lo || v > r.hi {
			return badValue(k)
		}
		*r.num(&n.keys) = v
	}
	n.state[i] = settled
	return nil
}

// answer takes the target's answer to our proposal. The value has to be one that the rule of the key can give.
func (n *negotiation) answer(i int, k pdu.Key) error {
	r := &rows[i]
	if isRefusal(k.Value) {
		n.state[i] = defaulted
		return nil
	}
	n.state[i] = settled
	switch {
	case r.flag != nil:
		v, ok := parseBool(k.Value)
		ours := *r.flag(&n.offer)
		if !ok || r.kind == boolAnd && v && !ours || r.kind == boolOr && !v && ours {
			return notOffered(k, formatBool(ours))
		}
		*r.flag(&n.keys) = v
	case r.numeric():
		v, ok := parseNumber(k.Value)
		ours := r.number(&n.offer)
		if !ok || v < r.lo || v > r.hi {
			return badValue(k)
		}
		if r.kind == numMin && v > ours || r.kind == numMax && v < ours {
			return notOffered(k, formatNumber(ours))
		}
		r.setNumber(&n.keys, v)
	default:
		d, ok := parseDigest(k.Value)
		if ok && d == DigestNone {
			n.state[i] = defaulted // tgt says so even where None was not offered; [Machine.acceptable] decides
			return nil
		}
		if !ok || !slices.Contains(n.digestList(i), d) {
			return notOffered(k, formatDigests(n.digestList(i)))
		}
		*r.digest(&n.keys) = d
	}
	return nil
}

// proposal answers a key that the target proposed and we did not.
func (n *negotiation) proposal(i int, k pdu.Key) error {
	r := &rows[i]
	if isRefusal(k.Value) {
		return nil
	}
	if r.relevant&n.place == 0 {
		n.answers.Add(k.Name, answerIrrelevant)
		n.state[i] = defaulted
		return nil
	}
	switch {
	case r.flag != nil:
		v, ok := parseBool(k.Value)
		if !ok {
			return badValue(k)
		}
		ours := *r.flag(&n.offer)
		if r.kind == boolAnd {
			v = v && ours
		} else {
			v = v || ours
		}
		*r.flag(&n.keys) = v
	case r.numeric():
		v, ok := parseNumber(k.Value)
		if !ok || v < r.lo || v > r.hi {
			return badValue(k)
		}
		if ours := r.number(&n.offer); r.kind == numMin {
			v = min(v, ours)
		} else {
			v = max(v, ours)
		}
		r.setNumber(&n.keys, v)
	case r.text != nil:
		if !slices.Contains(strings.Split(k.Value, ","), *r.text(&rfcKeysCopy)) {
			n.answers.Add(k.Name, answerReject)
			n.state[i] = defaulted
			return nil
		}
	default:
		ours := n.digestList(i)
		found := false
		for v := range strings.SplitSeq(k.Value, ",") {
			if d, ok := parseDigest(v); ok && slices.Contains(ours, d) {
				*r.digest(&n.keys), found = d, true
				break
			}
		}
		if !found {
			n.answers.Add(k.Name, answerReject)
			n.state[i] = defaulted
			return nil
		}
	}
	n.answers.Add(k.Name, r.value(&n.keys, false))
	n.state[i] = settled
	return nil
}

// finish gives every proposal that got no value (no answer, NotUnderstood, Irrelevant, Reject) the one that holds then, which is the
// default, on the side that can not hurt: where the two sides may now disagree, we ask for less than we may.
func (n *negotiation) finish() {
	for i := range rows {
		r := &rows[i]
		if n.state[i] != proposed && n.state[i] != defaulted || r.propose&n.place == 0 || r.kind == declared {
			continue
		}
		switch {
		case r.kind == boolAnd:
			*r.flag(&n.keys) = *r.flag(&rfcKeysCopy) && *r.flag(&n.offer)
		case r.kind == numMin && !r.limit:
			r.setNumber(&n.keys, min(r.number(&rfcKeysCopy), r.number(&n.offer)))
		case r.kind == numMax:
			r.setNumber(&n.keys, max(r.number(&rfcKeysCopy), r.number(&n.offer)))
		}
		n.state[i] = defaulted
	}
	n.keys.FirstBurstLength = min(n.keys.FirstBurstLength, n.keys.MaxBurstLength)
	n.keys.MaxRecvDataSegmentLength = rfcKeys.MaxRecvDataSegmentLength
	if rows[rowOf("MaxRecvDataSegmentLength")].propose&n.place != 0 {
		n.keys.MaxRecvDataSegmentLength = n.offer.MaxRecvDataSegmentLength
	}
	n.keys.MaxOutstandingUnexpectedPDUs = n.offer.MaxOutstandingUnexpectedPDUs
	if n.place == onISER { // RFC 7145 section 6.2
		n.keys.MaxRecvDataSegmentLength = n.keys.InitiatorRecvDataSegmentLength
		n.keys.TargetMaxRecvDataSegmentLength = n.keys.TargetRecvDataSegmentLength
	}
}

// rfcKeysCopy is rfcKeys for the accessors of rows, which take a pointer.
var rfcKeysCopy = rfcKeys

// negotiated is the outcome as text, for every key that means something on this connection.
func (n *negotiation) negotiated() map[string]string {
	m := make(map[string]string, len(rows))
	for i := range rows {
		if r := &rows[i]; r.relevant&n.place != 0 {
			m[r.name] = r.value(&n.keys, false)
		}
	}
	return m
}

// Parameter is one operational key of a connection, for showing.
type Parameter struct {
	Key      string
	Value    string // what holds; the target's value of a key that each side declares for itself
	Sent     string // our proposal, answer or declaration; "" when there was none
	Received string // the target's; "" when it said nothing. Free text: quote it
}

// parameters is the outcome with how it came about, in the order of the table.
func (n *negotiation) parameters() []Parameter {
	list := make([]Parameter, 0, len(rows))
	for i := range rows {
		if r := &rows[i]; r.relevant&n.place != 0 {
			list = append(list, Parameter{r.name, r.value(&n.keys, false), n.sent[r.name], n.seen[r.name]})
		}
	}
	return list
}

func isRefusal(v string) bool {
	return v == answerNotUnderstood || v == answerIrrelevant || v == answerReject
}

func badValue(k pdu.Key) error {
	return protocolErrorf("13", "%s=%q is not a value of this key", k.Name, clip(k.Value))
}

func notOffered(k pdu.Key, ours string) error {
	return protocolErrorf("6.2", "%s=%q answers our %s, which does not allow it", k.Name, clip(k.Value), ours)
}

func clip(s string) string {
	if len(s) > 60 {
		return s[:60] + "..."
	}
	return s
}
