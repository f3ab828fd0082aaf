package daemontest

import (
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"

	"iserd.org/iserd/internal/ipc"
)

// commands are what a Plane knows of single SCSI commands. Guarded by Plane.mu.
type commands struct {
	answers  map[string]ipc.ScsiReply // by the first digits of the CDB
	scsi     []ipc.ScsiRequest
	reserves []ipc.ReserveRequest
}

// Answer makes commands whose CDB begins with these hexadecimal digits get an answer; data is cut to what the command may read. Others are answered
// as unknown.
func (p *Plane) Answer(cdb string, reply ipc.ScsiReply) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.commands.answers == nil {
		p.commands.answers = make(map[string]ipc.ScsiReply)
	}
	p.commands.answers[cdb] = reply
}

// Commands lists what came.
func (p *Plane) Commands() ([]ipc.ScsiRequest, []ipc.ReserveRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.commands.scsi), slices.Clone(p.commands.reserves)
}

// command answers a single command.
func (p *Plane) command(method string, body json.RawMessage) (any, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if method == ipc.MethodReserve {
		var r ipc.ReserveRequest
		if err := json.Unmarshal(body, &r); err != nil {
			return nil, err
		}
		p.commands.reserves = append(p.commands.reserves, r)
		if p.groups[r.Group] == nil {
			return nil, &ipc.Error{Code: "SessionNotFound", Text: "no such group"}
		}
		return ipc.ReserveReply{Sessions: p.Reactors}, nil
	}
	var r ipc.ScsiRequest
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, err
	}
	p.commands.scsi = append(p.commands.scsi, r)
	if p.groups[r.Group] == nil {
		return nil, &ipc.Error{Code: "SessionNotFound", Text: "no such group"}
	}
	best, found := "", false
	for prefix := range p.commands.answers {
		if strings.HasPrefix(hex.EncodeToString(r.CDB), prefix) && len(prefix) >= len(best) {
			best, found = prefix, true
		}
	}
	if !found {
		return ipc.ScsiReply{Status: 2, Sense: []byte{0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0}}, nil
	}
	a := p.commands.answers[best]
	a.Residual = int64(r.In - len(a.Data))
	a.Data = a.Data[:min(len(a.Data), r.In)]
	return a, nil
}
