package pdu

import "fmt"

// TargetRecord is one target of a SendTargets answer.
type TargetRecord struct {
	Name      string    // normal form; empty when the name in the answer was not an iSCSI name
	Addresses []Address // in the order of the answer, each once; empty means the address that was asked
	Problem   error     // what was wrong with the record and left out, nil when nothing was
}

// ParseSendTargets groups the keys of a SendTargets answer into records, in the order of the wire.
//
// One bad record must not hide the others, so a name or an address that does not pass [NormalizeName] or [ParseAddress] is left out and
// told in Problem; the text of it is quoted there and nowhere else. A name that comes twice is one record. Keys other than TargetName and
// TargetAddress are skipped. The error is a *[ProtocolError]: an address before any name.
//
// Source: RFC 7143, appendix on the SendTargets operation, and section 13 (keys TargetName and TargetAddress).
func ParseSendTargets(keys Keys) ([]TargetRecord, error) {
	type seenAddress struct {
		record int
		addr   Address
	}
	var records []TargetRecord
	index := make(map[string]int)
	seen := make(map[seenAddress]bool)
	cur := -1
	for _, k := range keys {
		switch k.Name {
		case "TargetName":
			name, err := NormalizeName(k.Value)
			if i, ok := index[name]; err == nil && ok {
				cur = i
				continue
			}
			cur = len(records)
			records = append(records, TargetRecord{Name: name, Problem: err})
			if err == nil {
				index[name] = cur
			}
		case "TargetAddress":
			if cur < 0 {
				return nil, protocolErrorf("13", -1, "TargetAddress before any TargetName")
			}
			r := &records[cur]
			a, err := ParseAddress(k.Value)
			if err == nil && !a.HasTag {
				err = fmt.Errorf("address %q: no portal group tag", clip(k.Value))
			}
			if err != nil {
				if r.Problem == nil {
					r.Problem = err
				}
				continue
			}
			if s := (seenAddress{cur, a}); !seen[s] {
				seen[s] = true
				r.Addresses = append(r.Addresses, a)
			}
		}
	}
	return records, nil
}
