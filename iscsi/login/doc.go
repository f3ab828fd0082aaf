// Package login is the login phase of an iSCSI connection as a pure state machine: PDUs in, PDUs out.
//
// Layer: used by iscsi and discovery, with either transport; imports iscsi/pdu. It has no goroutine, clock or socket. The driver sends what
// the machine gives it, bounds the time, and hands back each Login Response:
//
//	m, err := login.New(login.Config{...})
//	req := m.Start()
//	for {
//		if req.Final { ... post all receives of the full-feature phase ... }
//		... send req.BHS and req.Text; receive a header and its data segment ...
//		next, res, err := m.Step(header, segment)
//		if err != nil || res != nil { break }
//		req = next
//	}
//
// The conversation, with the stages of RFC 7143:
//
//	SecurityNegotiation          -> names, SessionType, AuthMethod; then CHAP if the target chose it
//	LoginOperationalNegotiation  -> all our keys in one request, T=1; more requests only to answer keys that the target proposes
//	FullFeaturePhase             the Result
//
// With an open target these are two requests, with mutual CHAP four. LIO ends a login after seven.
//
// Sources: RFC 7143 section 6 (negotiation), 11.12 and 11.13 (PDUs), 12.1.3 (CHAP), 13 (keys); RFC 7145 for the keys of iSER.
//
// What targets do, and why the machine is written this way:
//   - LIO wants SessionType spelled out in the first request, proposes every key that was not proposed to it, and waits for the answers.
//     So every key that both sides know goes out once, in the first operational request.
//   - LIO answers NotUnderstood to some keys of iSER, SCST answers nothing; RFC 7145 allows neither. Both mean: the default holds.
//   - LIO takes an InitiatorRecvDataSegmentLength or TargetRecvDataSegmentLength of any size and then can not serve it: never propose
//     more than 8192 for the latter.
//   - In a discovery session RDMAExtensions must not be offered (RFC 7145 section 5.1), and over RDMA the answer to SendTargets comes in
//     one Send, so MaxRecvDataSegmentLength has to be the size of the posted buffer.
//   - LIO says 03/01 for a target name that it does not have, where the RFC has 02/03; tgt says 02/03 over iSER when the initiator name was
//     not bound to the target. LIO closes without a status when it wants CHAP and None was offered: see [Machine.Lost].
package login
