package testtarget

import (
	"fmt"
	"net"
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

	CHAP     *CHAP  // nil: no authentication asked for
	Redirect string // TargetAddress; not "": every normal login is answered with status 0101

	// Keys change what the target asks for in the negotiation, over LIO's defaults: InitialR2T, ImmediateData, MaxBurstLength,
	// FirstBurstLength, MaxOutstandingR2T, MaxRecvDataSegmentLength, HeaderDigest, DataDigest (lists of what it takes, in no order),
	// ErrorRecoveryLevel, MaxConnections.
	Keys map[string]string

	StatSN         uint32 // of the first Login Response; 0 means 0xfffffff0, so that it wraps early
	Window         int    // commands that may be outstanding; 0 means 64
	DataInSize     int    // bytes of a Data-In PDU at most; 0 means what the initiator takes
	SeparateStatus bool   // status in a SCSI Response always; otherwise GOOD status rides on the last Data-In
	TextSize       int    // bytes of a Text Response at most; 0 means what the initiator takes

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
	listener net.Listener
	routines sync.WaitGroup

	mu         sync.Mutex // guards what follows
	conns      map[*Conn]bool
	accepted   int
	logins     int
	tsih       uint16
	sessions   map[nexus]*Conn
	events     []Event
	violations []string
	hooks      Hooks
	closed     bool
}

// nexus names a session (RFC 7143 section 4.4.3: the I_T nexus).
type nexus struct {
	initiator string
	isid      [6]byte
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
	for i, u := range config.Units {
		if u != nil {
			u.setDefaults(i)
		}
	}
	l, err := net.Listen("tcp", config.Addr)
	if err != nil {
		return nil, fmt.Errorf("test target: %w", err)
	}
	t := &Target{config: config, listener: l, conns: make(map[*Conn]bool), sessions: make(map[nexus]*Conn), hooks: config.Hooks}
	t.routines.Add(1)
	go t.runAccept()
	return t, nil
}

// Addr is the address that the target listens on, as host:port.
func (t *Target) Addr() string { return t.listener.Addr().String() }

// Name is the iSCSI name of the target.
func (t *Target) Name() string { return t.config.Name }

// Unit returns the unit of a LUN.
func (t *Target) Unit(lun int) *Unit { return t.config.Units[lun] }

// Close ends every connection and waits for their goroutines.
func (t *Target) Close() {
	t.mu.Lock()
	t.closed = true
	t.listener.Close()
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
		nc, err := t.listener.Accept()
		if err != nil {
			return
		}
		t.mu.Lock()
		if t.closed {
			t.mu.Unlock()
			nc.Close()
			return
		}
		t.accepted++
		c := newConn(t, nc, t.accepted)
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
	n := nexus{c.initiator, c.isid}
	t.mu.Lock()
	old := t.sessions[n]
	t.sessions[n] = c
	t.logins++
	t.mu.Unlock()
	if old != nil {
		old.Close()
	}
}

func (t *Target) gone(c *Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
	if n := (nexus{c.initiator, c.isid}); t.sessions[n] == c {
		delete(t.sessions, n)
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
