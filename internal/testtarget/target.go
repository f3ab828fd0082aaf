package testtarget

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"sync"
)

// Default names and sizes.
const (
	DefaultName = "iqn.2003-01.org.example:test"
	defaultSize = 8 << 20
)

// Config describes a target. The zero value is a target with one unit of 8 MiB on 127.0.0.1, keys as LIO has them, no CHAP.
type Config struct {
	Addr  string   // address to listen on; "" means 127.0.0.1:0
	Name  string   // "" means DefaultName
	Alias string   // TargetAlias, if not ""
	Units []*Unit  // by LUN; nil places have no unit. Empty means one unit of 8 MiB
	More  []string // text that SendTargets=All returns besides this target, as "TargetName=..." and "TargetAddress=..."

	// Portals are the TargetAddress values of SendTargets; empty means the address it listens on, portal group 1.
	Portals []string

	// ISER listens over RDMA at Addr, which must be an address of an adapter, instead of over TCP.
	ISER bool

	// PortGroup is the target portal group tag and the SCSI target port group; 0 means 1.
	PortGroup uint16

	CHAP     *CHAP  // nil: no authentication asked for
	Redirect string // TargetAddress; not "": every normal login is answered with status 0101

	// RedirectForever makes that 0102, the target has moved permanently.
	RedirectForever bool

	// Keys change what the target asks for in the negotiation, over LIO's defaults: InitialR2T, ImmediateData, MaxBurstLength,
	// FirstBurstLength, MaxOutstandingR2T, MaxRecvDataSegmentLength, HeaderDigest, DataDigest (lists of what it takes, in no order),
	// ErrorRecoveryLevel, MaxConnections.
	Keys map[string]string

	StatSN         uint32 // of the first Login Response; 0 means 0xfffffff0, so that it wraps early
	Window         int    // commands that may be outstanding; 0 means 64
	DataInSize     int    // bytes of a Data-In PDU at most; 0 means what the initiator takes
	SeparateStatus bool   // status in a SCSI Response always; otherwise GOOD status rides on the last Data-In
	TextSize       int    // bytes of text in a Text or Login Response at most; 0 means what the initiator takes

	// LoginKeys are further keys, as "key=value", in the first Login Response of the operational stage.
	LoginKeys []string

	Hooks Hooks
}

// Hooks see the PDUs of every connection, on its goroutine. nil ones let everything pass.
type Hooks struct {
	// Received is called with a PDU of the initiator. The target ignores it when the hook returns false.
	Received func(c *Conn, p *PDU) bool

	// Sending is called with a PDU that the target is about to send, numbers filled in. It is not sent when the hook returns false.
	// PDUs that the hook itself writes do not pass through it again.
	Sending func(c *Conn, p *PDU) bool
}

// Event is a PDU that passed, in the order of one connection. Data is cut to its first 8 KiB.
type Event struct {
	Conn int  // number of the connection, from 1
	Sent bool // by the target
	PDU  *PDU
}

// Target is a running target.
type Target struct {
	config   Config
	listener listener
	routines sync.WaitGroup

	mu         sync.Mutex // guards what follows
	conns      map[*Conn]bool
	accepted   int
	logins     int
	tsih       uint16
	sessions   map[nexus]*Conn
	lingering  map[nexus][]*Conn // ended without a logout, with commands that are still at work: parked ones
	events     []Event
	violations []string
	hooks      Hooks
	rules      []*rule
	parks      []*Park
	luns       []*Unit
	closed     bool
}

// listener waits for connections.
type listener interface {
	accept() (link, error)
	addr() net.Addr
	close()
}

// nexus names a session (RFC 7143 section 4.4.3: the I_T nexus).
type nexus struct {
	initiator string
	isid      [6]byte
	port      uint16 // target port group
}

func (n nexus) compare(o nexus) int {
	return cmp.Or(cmp.Compare(n.initiator, o.initiator), bytes.Compare(n.isid[:], o.isid[:]), cmp.Compare(n.port, o.port))
}

// transportID names the initiator port (SPC-4).
func (n nexus) transportID() []byte {
	name := fmt.Sprintf("%s,i,0x%x", n.initiator, n.isid)
	b := append([]byte{0x45, 0, 0, 0}, name...)
	b = append(b, "\x00\x00\x00\x00"[:4-len(name)%4]...)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)-4))
	return b
}

// Start listens and serves until Close.
func Start(config Config) (*Target, error) {
	if config.Addr == "" {
		config.Addr = "127.0.0.1:0"
	}
	if config.Name == "" {
		config.Name = DefaultName
	}
	if config.Window == 0 {
		config.Window = 64
	}
	if config.StatSN == 0 {
		config.StatSN = 0xfffffff0
	}
	if len(config.Units) == 0 {
		config.Units = []*Unit{NewUnit(defaultSize)}
	}
	if config.PortGroup == 0 {
		config.PortGroup = 1
	}
	t := &Target{config: config, conns: make(map[*Conn]bool), sessions: make(map[nexus]*Conn), lingering: make(map[nexus][]*Conn), hooks: config.Hooks, luns: slices.Clone(config.Units)}
	for i, u := range config.Units {
		if u != nil {
			u.serve(t, i)
		}
	}
	var err error
	if config.ISER {
		t.listener, err = listenISER(config.Addr)
	} else {
		t.listener, err = listenTCP(config.Addr)
	}
	if err != nil {
		return nil, fmt.Errorf("test target: %w", err)
	}
	t.routines.Add(1)
	go t.runAccept()
	return t, nil
}

// Addr is the address that the target listens on, as host:port.
func (t *Target) Addr() string { return t.listener.addr().String() }

// Name is the iSCSI name of the target.
func (t *Target) Name() string { return t.config.Name }

// Unit returns the unit of a LUN; nil if there is none.
func (t *Target) Unit(lun int) *Unit { return t.unit(lun) }

// Map puts a unit at a LUN, or takes the one there away if u is nil, and raises REPORTED LUNS DATA HAS CHANGED at the others.
func (t *Target) Map(lun int, u *Unit) {
	t.mu.Lock()
	for len(t.luns) <= lun {
		t.luns = append(t.luns, nil)
	}
	t.luns[lun] = u
	others := slices.Clone(t.luns)
	t.mu.Unlock()
	if u != nil {
		u.serve(t, lun)
	}
	for _, o := range others {
		if o == nil || o == u {
			continue
		}
		for _, n := range t.nexuses() {
			o.attention(n, nexus{}, 0x3f, 0x0e)
		}
	}
}

// Unmap takes the unit at a LUN away.
func (t *Target) Unmap(lun int) { t.Map(lun, nil) }

func (t *Target) unit(lun int) *Unit {
	t.mu.Lock()
	defer t.mu.Unlock()
	if lun < 0 || lun >= len(t.luns) {
		return nil
	}
	return t.luns[lun]
}

func (t *Target) units() []*Unit {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.luns)
}

// nexuses are the sessions that are logged in.
func (t *Target) nexuses() []nexus {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []nexus
	for n := range t.sessions {
		list = append(list, n)
	}
	return list
}

// others runs f for every other connection.
func (t *Target) others(c *Conn, f func(*Conn)) {
	list := t.Conns()
	t.mu.Lock()
	for _, l := range t.lingering {
		list = append(list, l...)
	}
	t.mu.Unlock()
	for _, o := range list {
		if o != c {
			f(o)
		}
	}
}

// abortTasks ends what a nexus has under way at a LUN.
func (t *Target) abortTasks(n nexus, lun int) {
	for _, c := range t.Conns() {
		if c.FullFeature() && c.nexus() == n {
			c.forget(func(k *task) bool { return k.lun == lun })
		}
	}
}

// Close ends every connection and waits for their goroutines.
func (t *Target) Close() {
	t.mu.Lock()
	t.closed = true
	t.listener.close()
	for c := range t.conns {
		c.Close()
	}
	t.mu.Unlock()
	t.routines.Wait()
}

// SetHooks replaces the hooks, from the next PDU on.
func (t *Target) SetHooks(h Hooks) {
	t.mu.Lock()
	t.hooks = h
	t.mu.Unlock()
}

// Conns returns the live connections, in no order.
func (t *Target) Conns() []*Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []*Conn
	for c := range t.conns {
		list = append(list, c)
	}
	return list
}

// SetPortGroup makes connections to come those of another port group.
func (t *Target) SetPortGroup(group uint16) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.config.PortGroup = group
}

// Logins returns how many normal sessions have reached the full feature phase since Start.
func (t *Target) Logins() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.logins
}

// Sessions returns how many normal sessions are in the full feature phase.
func (t *Target) Sessions() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.sessions)
}

// Events returns what passed so far, at most the first 65536 PDUs.
func (t *Target) Events() []Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Event(nil), t.events...)
}

// Violations returns what initiators did wrong.
func (t *Target) Violations() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.violations...)
}

func (t *Target) runAccept() {
	defer t.routines.Done()
	for {
		l, err := t.listener.accept()
		if err != nil {
			return
		}
		t.mu.Lock()
		if t.closed {
			t.mu.Unlock()
			l.close()
			return
		}
		t.accepted++
		c := newConn(t, l, t.accepted, t.config.PortGroup)
		t.conns[c] = true
		t.routines.Add(1)
		t.mu.Unlock()
		go c.run()
	}
}

const (
	maxEvents    = 65536
	maxEventData = 8192
)

func (t *Target) record(c *Conn, sent bool, p *PDU) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.events) == maxEvents {
		return
	}
	q := &PDU{BHS: p.BHS, Data: append([]byte(nil), p.Data[:min(len(p.Data), maxEventData)]...)}
	t.events = append(t.events, Event{c.Number, sent, q})
}

// established notes a session that entered the full feature phase, and ends the one it reinstates (RFC 7143 section 6.3.5).
func (t *Target) established(c *Conn) {
	n := c.nexus()
	t.mu.Lock()
	list := t.takeLocked(n)
	t.sessions[n] = c
	t.logins++
	t.mu.Unlock()
	for _, p := range t.portals() {
		p.mu.Lock()
		list = append(list, p.takeLocked(n)...)
		p.mu.Unlock()
	}
	for _, l := range list {
		l.Close()
		l.forget(func(*task) bool { return true })
	}
}

// takeLocked returns the connections of a nexus that may have commands at work, and forgets them. Preconditions: t.mu is held.
func (t *Target) takeLocked(n nexus) []*Conn {
	list := t.lingering[n]
	if old := t.sessions[n]; old != nil {
		list = append(list, old)
	}
	delete(t.lingering, n)
	delete(t.sessions, n)
	return list
}

// portals are the other portals of the same target: those with its name that serve one of its units.
func (t *Target) portals() []*Target {
	var list []*Target
	for _, u := range t.units() {
		if u == nil {
			continue
		}
		for _, p := range u.ports() {
			if p != t && p.config.Name == t.config.Name && !slices.Contains(list, p) {
				list = append(list, p)
			}
		}
	}
	return list
}

// gone forgets a connection. Nexus loss ends what its session held at the units. Commands that are parked go on: a target that waits for its medium
// cannot take back what it has given it, until a reset or the reinstatement of the session waits for them.
func (t *Target) gone(c *Conn) {
	n := c.nexus()
	c.mu.Lock()
	busy := len(c.parked) > 0
	c.mu.Unlock()
	t.mu.Lock()
	delete(t.conns, c)
	last := t.sessions[n] == c
	if last {
		delete(t.sessions, n)
		if busy {
			t.lingering[n] = append(t.lingering[n], c)
		}
	}
	luns := slices.Clone(t.luns)
	t.mu.Unlock()
	for _, u := range luns {
		if last && u != nil {
			u.lost(n)
		}
	}
}

func (t *Target) newTSIH() uint16 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tsih++; t.tsih == 0 {
		t.tsih = 1
	}
	return t.tsih
}
