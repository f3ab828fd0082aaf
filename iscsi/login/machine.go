package login

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"iserd.org/iserd/iscsi/pdu"
)

// Limits of one login. LIO gives up after seven PDUs, so no honest login comes near.
const (
	maxRequests  = 32
	maxAnswer    = 64 << 10 // of one answer of the target, joined from several PDUs, bytes
	maxLoginText = 8192     // of one Login PDU in either direction, bytes: MaxRecvDataSegmentLength does not count before the full-feature phase
)

// Config is what one login needs to know. New copies it.
type Config struct {
	InitiatorName  string
	InitiatorAlias string // optional
	TargetName     string // empty for a discovery session
	SessionType    SessionType
	Transport      Transport

	ISID  [6]byte // keep it over restarts: the same ISID with TSIH 0 replaces the old session and ends its tasks (RFC 7143 section 6.3.5)
	TSIH  uint16  // 0 for a new session
	CID   uint16
	ITT   uint32 // InitiatorTaskTag of all Login Requests
	CmdSN uint32 // first CmdSN of the session

	Keys         *Keys    // what to propose; nil for DefaultKeys
	HeaderDigest []Digest // in order of preference; nil for None. TCP only
	DataDigest   []Digest // as HeaderDigest
	Auth         Auth

	Rand io.Reader // source of challenges; nil for crypto/rand
}

// Request is one PDU to send.
type Request struct {
	BHS  pdu.BHS // complete, DataSegmentLength included
	Text []byte  // data segment, without padding

	// Final says that the answer to this request may be the last of the login: over iSER all receives of the full-feature phase have to
	// be posted before it is sent. There may be more than one such request.
	Final bool
}

// Result is a connection in the full-feature phase.
type Result struct {
	Keys       Keys
	Negotiated map[string]string // the same as on the wire, for every key that means something on this connection
	Parameters []Parameter       // the same with what each side has said, in a fixed order
	TSIH       uint16
	ExpStatSN  uint32 // StatSN of the first response in the full-feature phase
	CmdSN      uint32 // for the first command
	ExpCmdSN   uint32
	MaxCmdSN   uint32

	TargetPortalGroupTag uint16
	HasPortalGroupTag    bool
	TargetAlias          string // free text of the target: quote it
	TargetArchitecture   string // as TargetAlias: X#NodeArchitecture
	AuthMethod           string // "None", or "CHAP" with algorithm and direction, for the operator
}

// state is what the machine waits for.
//
//	start --> security --------------------------------> operational --> done
//	             |  AuthMethod=CHAP                        ^
//	             +--> challenge --> proof -----------------+
//	any state --> failed
type state uint8

const (
	stateStart       state = 0
	stateSecurity    state = 1 // the answer to AuthMethod
	stateChallenge   state = 2 // CHAP_A, CHAP_I, CHAP_C
	stateProof       state = 3 // the end of CHAP
	stateTransit     state = 4 // AuthMethod is None, the way out of SecurityNegotiation
	stateOperational state = 5
	stateDone        state = 6
	stateFailed      state = 7
)

// Machine is one login. It is not safe for concurrent use.
type Machine struct {
	cfg   Config
	neg   negotiation
	chap  *chap
	state state

	stage    pdu.Stage // CSG of the last request
	transit  bool      // T of the last request
	requests int
	statSN   uint32
	text     []byte // of the target, while the C bit is set
	pending  []byte // of ours, that did not fit the last request
	goOn     bool   // the last request had the C bit: T goes out with the last part
	method   string
}

// New checks cfg and makes a machine in its initial state.
func New(cfg Config) (*Machine, error) {
	if cfg.Rand == nil {
		cfg.Rand = rand.Reader
	}
	m := &Machine{cfg: cfg}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("login: %w", err)
	}
	if m.cfg.Auth.enabled() {
		var err error
		if m.chap, err = newCHAP(&m.cfg.Auth, cfg.Rand); err != nil {
			return nil, fmt.Errorf("login: %w", err)
		}
	}
	return m, nil
}

// check completes the configuration and finds what can not work.
func (m *Machine) check() error {
	c := &m.cfg
	if c.SessionType != Normal && c.SessionType != Discovery || c.Transport != TCP && c.Transport != ISER {
		return errors.New("no session type or no transport")
	}
	var err error
	if c.InitiatorName, err = pdu.NormalizeName(c.InitiatorName); err != nil {
		return fmt.Errorf("initiator name: %w", err)
	}
	if c.SessionType == Normal {
		if c.TargetName, err = pdu.NormalizeName(c.TargetName); err != nil {
			return fmt.Errorf("target name: %w", err)
		}
	} else if c.TargetName != "" {
		return errors.New("a discovery session has no target name")
	}
	if len(c.InitiatorAlias) > 255 || strings.ContainsRune(c.InitiatorAlias, 0) {
		return errors.New("initiator alias has more than 255 bytes or a NUL")
	}
	if c.ITT == pdu.ReservedTag {
		return errors.New("the InitiatorTaskTag is the reserved one")
	}
	offer := DefaultKeys(c.Transport, c.SessionType)
	if c.Keys != nil {
		offer = *c.Keys
	}
	n := &m.neg
	*n = negotiation{place: place(c.Transport, c.SessionType), offer: offer, keys: rfcKeys, seen: make(map[string]string), sent: make(map[string]string)}
	for i, list := range [][]Digest{c.HeaderDigest, c.DataDigest} {
		if len(list) == 0 {
			list = []Digest{DigestNone}
		}
		if c.Transport == ISER && !slices.Equal(list, []Digest{DigestNone}) {
			return errors.New("digests are not possible over iSER: RDMA has its own")
		}
		n.digests[i] = slices.Clone(list)
	}
	for i := range rows {
		r := &rows[i]
		if !r.numeric() || r.propose&n.place == 0 {
			continue
		}
		v := r.value(&offer, true)
		if x, ok := parseNumber(v); !ok || x < r.lo || x > r.hi || r.dur != nil && *r.dur(&offer)%time.Second != 0 {
			return fmt.Errorf("%s=%s cannot be proposed, want %d to %d", r.name, v, r.lo, r.hi)
		}
	}
	if c.SessionType == Normal && offer.FirstBurstLength > offer.MaxBurstLength {
		return fmt.Errorf("FirstBurstLength %d is above MaxBurstLength %d", offer.FirstBurstLength, offer.MaxBurstLength)
	}
	if c.Transport == ISER && c.SessionType == Normal && !offer.RDMAExtensions {
		return errors.New("a session over iSER needs RDMAExtensions")
	}
	return c.Auth.check()
}

// Start gives the first request. Call it once.
func (m *Machine) Start() *Request {
	if m.state != stateStart {
		panic("login: Start called twice")
	}
	c := &m.cfg
	keys := pdu.Keys{{Name: "InitiatorName", Value: c.InitiatorName}}
	if c.InitiatorAlias != "" {
		keys.Add("InitiatorAlias", c.InitiatorAlias)
	}
	if c.SessionType == Normal {
		keys.Add("TargetName", c.TargetName)
	}
	keys.Add("SessionType", c.SessionType.String())
	methods := c.Auth.methods()
	keys.Add("AuthMethod", strings.Join(methods, ","))
	m.state = stateSecurity
	m.stage = pdu.SecurityNegotiation
	// With CHAP in the list there is more to say in this stage, so the machine does not ask to leave it yet.
	return m.send(keys, !c.Auth.enabled())
}

// send makes the request for keys in the current stage; transit asks for the next stage. Text that does not fit goes out in parts.
func (m *Machine) send(keys pdu.Keys, transit bool) *Request {
	for _, k := range keys {
		if rowOf(k.Name) >= 0 {
			m.neg.sent[k.Name] = k.Value
		}
	}
	m.pending = keys.Append(nil)
	m.goOn = transit
	return m.part()
}

// part sends the next piece of pending text.
func (m *Machine) part() *Request {
	n := min(len(m.pending), maxLoginText)
	text := m.pending[:n:n]
	m.pending = m.pending[n:]
	more := len(m.pending) > 0
	m.transit = m.goOn && !more
	next := pdu.OperationalNegotiation
	if m.stage == pdu.OperationalNegotiation {
		next = pdu.FullFeaturePhase
	}
	req := &Request{Text: text, Final: m.transit && next == pdu.FullFeaturePhase}
	h := pdu.NewLoginRequest(&req.BHS)
	h.SetStage(m.transit, more, m.stage, next)
	h.SetISID(m.cfg.ISID)
	h.SetTSIH(m.cfg.TSIH)
	h.SetCID(m.cfg.CID)
	h.SetInitiatorTaskTag(m.cfg.ITT)
	h.SetCmdSN(m.cfg.CmdSN)
	if m.requests > 0 {
		h.SetExpStatSN(m.statSN + 1)
	}
	h.SetDataSegmentLength(len(text))
	m.requests++
	return req
}

// Step takes the target's PDU: its header, and its data segment without padding. Exactly one of the three results is not nil: the next
// request, the result, or why there is no session.
//
// Errors: *[LoginError] for a status of the target, or a condition that a person has to solve; *[pdu.ProtocolError] (wrapped) for a PDU or
// an answer that the protocol does not allow. After an error the machine is dead and the connection has to be closed.
func (m *Machine) Step(header *pdu.BHS, segment []byte) (*Request, *Result, error) {
	if m.state == stateStart || m.state >= stateDone {
		return nil, nil, errors.New("login: Step outside of a login")
	}
	req, res, err := m.step(header, segment)
	if err != nil {
		m.state = stateFailed
		var le *LoginError
		var pe *pdu.ProtocolError
		switch {
		case errors.As(err, &le):
			return nil, nil, le
		case errors.As(err, &pe):
			return nil, nil, fmt.Errorf("login %s: %w", m.target(), err)
		}
		return nil, nil, &LoginError{Target: m.target(), Err: err}
	}
	return req, res, nil
}

// Lost ends the login because the connection went away or the time was over, and makes the error for that: a *[LoginError] around
// [ErrConnectionLost] and cause. It is retryable: LIO's iSER drops a login when it finds no memory for the session. It also drops one, and
// without any status, when it wants authentication and was offered none, so the text names that where it fits.
func (m *Machine) Lost(cause error) error {
	hint := ""
	if m.state == stateSecurity && !m.cfg.Auth.enabled() {
		hint = " (the target may require CHAP; LIO closes without a status then)"
	}
	m.state = stateFailed
	return &LoginError{Target: m.target(), Err: fmt.Errorf("%w in %s%s: %w", ErrConnectionLost, m.stage, hint, cause)}
}

// target names the login in errors.
func (m *Machine) target() string {
	if m.cfg.SessionType == Discovery {
		return "discovery"
	}
	return m.cfg.TargetName
}

func (m *Machine) step(header *pdu.BHS, segment []byte) (*Request, *Result, error) {
	if err := header.Valid(pdu.FromTarget, len(segment)); err != nil {
		return nil, nil, err
	}
	segment = segment[:header.DataSegmentLength()]
	if header.Opcode() == pdu.OpReject {
		return nil, nil, protocolErrorf("11.17", "target rejected a login PDU: %s", pdu.AsReject(header).Reason())
	}
	if header.Opcode() != pdu.OpLoginResponse {
		return nil, nil, protocolErrorf("6", "%s came during login", header.Opcode())
	}
	p := pdu.AsLoginResponse(header)
	if p.InitiatorTaskTag() != m.cfg.ITT {
		return nil, nil, protocolErrorf("11.13", "response with InitiatorTaskTag %#x, ours is %#x", p.InitiatorTaskTag(), m.cfg.ITT)
	}
	if p.StatusClass() != 0 {
		return nil, nil, statusError(m.target(), p.StatusClass(), p.StatusDetail(), segment)
	}
	switch {
	case p.ISID() != m.cfg.ISID:
		return nil, nil, protocolErrorf("11.13", "response with ISID %x, ours is %x", p.ISID(), m.cfg.ISID)
	case p.VersionActive() != 0:
		return nil, nil, protocolErrorf("11.13", "target uses protocol version %d, only 0 exists", p.VersionActive())
	case p.CSG() != m.stage:
		return nil, nil, protocolErrorf("11.13", "response is in %s, we are in %s", p.CSG(), m.stage)
	case p.Transit() && !m.transit:
		return nil, nil, protocolErrorf("11.13", "target leaves %s without being asked", m.stage)
	case p.Transit() && m.stage == pdu.SecurityNegotiation && p.NSG() != pdu.OperationalNegotiation:
		return nil, nil, protocolErrorf("11.13", "target goes to %s, we asked for %s", p.NSG(), pdu.OperationalNegotiation)
	}
	// A StatSN that jumps is not worth losing a login for; what counts is the last one.
	m.statSN = p.StatSN()
	if m.requests >= maxRequests && !(p.Transit() && p.NSG() == pdu.FullFeaturePhase) {
		return nil, nil, protocolErrorf("6", "no end after %d requests", m.requests)
	}
	if len(m.pending) > 0 {
		if len(segment) > 0 || p.Continue() {
			return nil, nil, protocolErrorf("6.2", "target answers before our text is complete")
		}
		return m.part(), nil, nil
	}
	if len(m.text)+len(segment) > maxAnswer {
		return nil, nil, protocolErrorf("6.2", "target sent more than %d bytes of text", maxAnswer)
	}
	m.text = append(m.text, segment...)
	if p.Continue() {
		return m.send(nil, false), nil, nil
	}
	keys, err := pdu.DecodeKeys(m.text)
	if err != nil {
		return nil, nil, err
	}
	m.text = nil
	if m.stage == pdu.SecurityNegotiation {
		req, err := m.security(keys, p)
		return req, nil, err
	}
	return m.operational(keys, p)
}

// security is one answer in SecurityNegotiation.
func (m *Machine) security(keys pdu.Keys, p pdu.LoginResponse) (*Request, error) {
	var auth pdu.Keys
	for _, k := range keys {
		if !isSecurityKey(k.Name) {
			if err := m.neg.take(k); err != nil {
				return nil, err
			}
			continue
		}
		if _, twice := m.neg.seen[k.Name]; twice {
			return nil, protocolErrorf("6.2", "%s came twice", k.Name)
		}
		m.neg.seen[k.Name] = k.Value
		auth = append(auth, k)
	}
	switch m.state {
	case stateSecurity:
		return m.chooseMethod(auth, p.Transit())
	case stateChallenge:
		answer, err := m.chap.answer(auth)
		if err != nil {
			return nil, err
		}
		m.state = stateProof
		return m.send(answer, true), nil
	case stateProof:
		if err := m.chap.verify(auth); err != nil {
			return nil, err
		}
		m.method = "CHAP " + m.chap.chosen.String()
		if m.cfg.Auth.mutual() {
			m.method += " mutual"
		}
	default: // stateTransit
		if len(auth) > 0 {
			return nil, protocolErrorf("12", "%s after AuthMethod=None", auth[0].Name)
		}
	}
	return m.leaveSecurity(p.Transit()), nil
}

// chooseMethod acts on the target's AuthMethod.
func (m *Machine) chooseMethod(auth pdu.Keys, transit bool) (*Request, error) {
	offered := m.cfg.Auth.methods()
	method, ok := auth.Get("AuthMethod")
	switch {
	case !ok && slices.Contains(offered, valueNone):
		method = valueNone // some targets that know no authentication say nothing
	case !ok:
		return nil, fmt.Errorf("%w: target does not answer AuthMethod=%s", ErrAuthFailed, strings.Join(offered, ","))
	case isRefusal(method):
		return nil, fmt.Errorf("%w: target answers %s to AuthMethod=%s", ErrAuthFailed, method, strings.Join(offered, ","))
	case !slices.Contains(offered, method):
		return nil, fmt.Errorf("%w: target wants AuthMethod=%s, we offered %s", ErrAuthFailed, clip(method), strings.Join(offered, ","))
	}
	if method == "CHAP" {
		m.state = stateChallenge
		return m.send(m.chap.offer(), false), nil
	}
	m.method = valueNone
	m.state = stateTransit
	return m.leaveSecurity(transit), nil
}

// leaveSecurity goes on to the operational keys if the target moved, else asks it to.
func (m *Machine) leaveSecurity(moved bool) *Request {
	if !moved {
		m.state = stateTransit
		return m.send(nil, true)
	}
	m.state = stateOperational
	m.stage = pdu.OperationalNegotiation
	keys := m.neg.answers
	m.neg.answers = nil
	return m.send(append(keys, m.neg.proposals()...), true)
}

// operational is one answer in LoginOperationalNegotiation.
func (m *Machine) operational(keys pdu.Keys, p pdu.LoginResponse) (*Request, *Result, error) {
	for _, k := range keys {
		if isSecurityKey(k.Name) {
			return nil, nil, protocolErrorf("12", "%s in %s", k.Name, m.stage)
		}
		if err := m.neg.take(k); err != nil {
			return nil, nil, err
		}
	}
	if !p.Transit() {
		answers := m.neg.answers
		m.neg.answers = nil
		return m.send(answers, true), nil, nil
	}
	// A proposal in the last response can not be answered any more, so nothing came of it.
	for _, k := range m.neg.answers {
		if i := rowOf(k.Name); i >= 0 {
			m.neg.revert(i)
		}
	}
	m.neg.finish()
	if err := m.acceptable(p); err != nil {
		return nil, nil, err
	}
	m.state = stateDone
	return nil, &Result{
		Keys: m.neg.keys, Negotiated: m.neg.negotiated(), Parameters: m.neg.parameters(), TSIH: p.TSIH(), ExpStatSN: m.statSN + 1, CmdSN: m.cfg.CmdSN,
		ExpCmdSN: p.ExpCmdSN(), MaxCmdSN: p.MaxCmdSN(), TargetPortalGroupTag: m.neg.tag, HasPortalGroupTag: m.neg.hasTag,
		TargetAlias: m.neg.alias, TargetArchitecture: m.neg.arch, AuthMethod: m.method,
	}, nil
}

// acceptable refuses an outcome that this initiator can not work with.
func (m *Machine) acceptable(p pdu.LoginResponse) error {
	switch {
	case p.TSIH() == 0 && m.cfg.SessionType == Normal:
		return protocolErrorf("11.13", "final response without TSIH")
	case m.cfg.TSIH != 0 && p.TSIH() != m.cfg.TSIH:
		return protocolErrorf("11.13", "final response with TSIH %#x, ours is %#x", p.TSIH(), m.cfg.TSIH)
	case !slices.Contains(m.neg.digests[0], m.neg.keys.HeaderDigest) || !slices.Contains(m.neg.digests[1], m.neg.keys.DataDigest):
		return ErrNoDigest
	case m.cfg.SessionType == Discovery || m.cfg.Transport == TCP:
		return nil
	case !m.neg.keys.RDMAExtensions:
		return ErrNoISER
	case m.neg.keys.ISERHelloRequired:
		return ErrHelloRequired
	}
	return nil
}

// revert takes back what a proposal of the target did.
func (n *negotiation) revert(i int) {
	r := &rows[i]
	switch {
	case r.flag != nil:
		*r.flag(&n.keys) = *r.flag(&rfcKeysCopy)
	case r.numeric():
		r.setNumber(&n.keys, r.number(&rfcKeysCopy))
	case r.text != nil: // it has never left the default
	default:
		*r.digest(&n.keys) = DigestNone
	}
	n.state[i] = defaulted
}

// isSecurityKey tells the keys of SecurityNegotiation (RFC 7143 section 12).
func isSecurityKey(name string) bool {
	return name == "AuthMethod" || strings.HasPrefix(name, "CHAP_")
}

func protocolErrorf(section, format string, args ...any) *pdu.ProtocolError {
	return &pdu.ProtocolError{Section: section, Offset: -1, What: fmt.Sprintf(format, args...)}
}
