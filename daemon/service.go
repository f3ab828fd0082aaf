package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/config"
	"iserd.org/iserd/daemon/records"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/scsi"
	"iserd.org/iserd/ublk"
)

// Blocks are the control commands of the block driver; *ublk.Control has them.
type Blocks interface {
	Features(ctx context.Context) (ublk.Features, error)
	Add(ctx context.Context, spec ublk.DeviceSpec) (ublk.DeviceInfo, error)
	SetParams(ctx context.Context, id int, p ublk.Params) error
	Start(ctx context.Context, id, pid int) error
	StartRecovery(ctx context.Context, id int) error
	EndRecovery(ctx context.Context, id, pid int) error
	Stop(ctx context.Context, id int) error
	TryStop(ctx context.Context, id int) error
	Delete(ctx context.Context, id int) error
	DeleteAsync(ctx context.Context, id int) error
	RegisterBuffer(ctx context.Context, id int, file *os.File, off, n int64) (index int, err error)
	UnregisterBuffer(ctx context.Context, id, index int) error
	UpdateSize(ctx context.Context, id int, size ublk.Sector) error
	Quiesce(ctx context.Context, id int, timeout time.Duration) error
	Info(ctx context.Context, id int) (ublk.DeviceInfo, error)
	Close() error
}

// Found is one portal of one target, as a discovery over one transport lists it.
type Found struct {
	Target  string
	Address string
	Port    uint16
	TPGT    int
}

// Question is what a portal is asked, and how.
type Question struct {
	Portal, Transport, InitiatorName string
	Timeout                          time.Duration
	Settings                         api.Settings
	Secrets                          records.SecretSet
}

// Discoverer asks a portal for its targets over one transport (iser or tcp). Its errors carry a name of package api.
type Discoverer interface {
	SendTargets(ctx context.Context, q Question) ([]Found, error)
}

// Launcher starts a data plane that outlives this process. exited yields why it ended if it does.
type Launcher func() (exited <-chan error, err error)

// Options are what a Service works with.
type Options struct {
	Config   config.Loaded
	RunDir   string // runtime state: sockets, device files
	StateDir string // records
	// Load reads the configuration again; nil: there is nothing to read.
	Load func() (config.Loaded, error)
	// Reloading hears that the configuration is being read again, and what it returns that this is done; nil: nobody wants to know.
	Reloading func() (done func())
	// EtcName is the file of the initiator's name; "" means /etc/iserd/initiatorname.
	EtcName string
	Version string
	Log     *logrus.Entry

	Discoverer Discoverer
	Launch     Launcher // nil: somebody else starts the data plane
	// Prepare starts a data plane that gets ready while process pid serves. It returns nil if somebody else starts it, and it looks as if it could.
	Prepare    func(ctx context.Context, pid int) (*Successor, error)
	OpenBlocks func() (Blocks, error)
	Devices    func() ([]int, error)                     // numbers of the ublk devices that exist
	Holders    func(ids []int) (map[int][]string, error) // who uses /dev/ublkbN; nobody uses one that is not in the map
	Kill       func(pid int) error                       // ends a data plane that does not answer
	// QueueAttribute reads /sys/block/ublkbN/queue/NAME and, unless value is "", writes it. nil leaves the queues as the kernel makes them.
	QueueAttribute func(id int, name, value string) (old string, err error)
	// FirmwareDir is where the kernel shows the iSCSI Boot Firmware Table; "" means /sys/firmware/ibft.
	FirmwareDir string
}

// Service is the control plane. Its methods are safe for concurrent use and return errors with a name of package api.
type Service struct {
	opt     Options
	log     *logrus.Entry
	nodes   *records.Nodes
	portals *records.Nodes
	secrets *records.Secrets
	isids   *records.ISIDs
	name    string
	since   time.Time
	conf    atomic.Pointer[configuration]
	plane   *plane
	targets keyLock
	jobs    sync.WaitGroup  // clean-ups that events started
	ready   chan struct{}   // closed when what a former daemon left is known
	life    context.Context // of what goes on in the background; ends with Run
	endJobs context.CancelFunc

	reloading sync.Mutex // while the configuration is being replaced

	blocksMu sync.Mutex
	blocks   Blocks // nil until it could be opened

	mu        sync.Mutex
	sessions  map[string]*session // by group
	watchers  map[chan struct{}]struct{}
	bus       string
	stopping  bool
	answered  map[string]bool // session groups whose data plane ended with nothing under way, until the next one has been told
	upgrading bool
	mem       memory
	known     ublk.Features // what the driver said last
	aborted   map[unitKey]bool
}

// session is a session group. Guarded by Service.mu; the values in it are replaced, never changed.
type session struct {
	number  int
	state   string
	group   ipc.Group
	devices map[int]*device // by ublk id
	reasons map[uint64]string
	orphan  bool // its data plane is gone, and the next one does not know of it yet

	reconciling bool // a reconcile is going to begin: see rescan.go
	told        bool // the data plane has said something of the session while it was being made
}

// device is a served unit. Immutable, but for what memory points to.
type device struct {
	deviceRecord
	state  string
	memory *deviceMemory // nil for a device that nobody serves

	reason string   // why its unit is not served any more: it is gone, or another one; the state is dead then
	notes  []string // what of its unit has changed that the block device cannot follow
	stuck  uint64   // blocks of the unit to which the block device could not be grown
}

// New reads the records and makes a Service. Nothing is contacted before Run.
func New(opt Options) (*Service, error) {
	if opt.EtcName == "" {
		opt.EtcName = "/etc/iserd/initiatorname"
	}
	s := &Service{
		opt: opt, log: opt.Log, since: time.Now(), sessions: make(map[string]*session), watchers: make(map[chan struct{}]struct{}),
		bus: "not used", ready: make(chan struct{}), mem: newMemoryState(),
	}
	s.conf.Store(&configuration{opt.Config, opt.Config.Config})
	s.life, s.endJobs = context.WithCancel(context.Background())
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{opt.StateDir, 0o700}, {s.deviceDir(), 0o755}, {s.bufferDir(), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return nil, api.Errorf(api.ErrDatabase, "state: %w", err)
		}
	}
	var err error
	if s.nodes, err = records.OpenNodes(filepath.Join(opt.StateDir, "nodes")); err != nil {
		return nil, api.Errorf(api.ErrDatabase, "%w", err)
	}
	if s.portals, err = records.OpenPortals(filepath.Join(opt.StateDir, "portals")); err != nil {
		return nil, api.Errorf(api.ErrDatabase, "%w", err)
	}
	if s.secrets, err = records.OpenSecrets(filepath.Join(opt.StateDir, "secrets")); err != nil {
		return nil, api.Errorf(api.ErrDatabase, "%w", err)
	}
	for _, p := range append(s.nodes.Problems(), s.portals.Problems()...) {
		s.log.Error(p)
	}
	s.aborted = s.readAborted()
	s.isids = records.OpenISIDs(filepath.Join(opt.StateDir, "isid.json"))
	if s.name = opt.Config.Config.InitiatorName; s.name == "" {
		var path string
		if s.name, path, err = records.InitiatorName(opt.EtcName, filepath.Join(opt.StateDir, "initiatorname")); err != nil {
			return nil, api.Errorf(api.ErrDatabase, "%w", err)
		}
		s.log.WithField("file", path).Infof("initiator name %s", s.name)
	}
	s.plane = newPlane(s)
	return s, nil
}

// Run keeps the data plane alive and in step until ctx ends. ready runs once, when what a former daemon left has been adopted or the first
// attempt to get there has failed.
func (s *Service) Run(ctx context.Context, ready func()) {
	defer context.AfterFunc(ctx, s.endLife)()
	s.plane.run(ctx, func() {
		close(s.ready)
		ready()
	})
	s.endLife()
	s.jobs.Wait()
	s.plane.takeBack()
	s.closeFiles()
}

// endLife ends what goes on in the background; no job begins after it.
func (s *Service) endLife() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endJobs()
}

// Stop ends the data plane if it serves nothing, and closes what the Service holds. Call it after Run has returned. It tells whether a data plane
// was left serving.
func (s *Service) Stop(ctx context.Context) (leftServing bool) {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	leftServing = s.plane.shutdown(ctx)
	s.Close()
	return leftServing
}

// Close lets go of the data plane and the block driver without changing anything at either. Call it after Run has returned.
func (s *Service) Close() {
	s.plane.close()
	s.blocksMu.Lock()
	defer s.blocksMu.Unlock()
	if s.blocks != nil {
		_ = s.blocks.Close()
		s.blocks = nil
	}
}

// control returns the block driver, which is opened when it is first needed, so that loading the module helps without a restart.
func (s *Service) control() (Blocks, error) {
	s.blocksMu.Lock()
	defer s.blocksMu.Unlock()
	if s.blocks != nil {
		return s.blocks, nil
	}
	b, err := s.opt.OpenBlocks()
	if err != nil {
		name := api.ErrInternal
		switch {
		case errors.Is(err, ublk.ErrNotSupported), errors.Is(err, os.ErrNotExist):
			name = api.ErrNotSupported
		case errors.Is(err, os.ErrPermission):
			name = api.ErrAccessDenied
		}
		return nil, api.Errorf(name, "%w", err)
	}
	s.blocks = b
	return b, nil
}

// knownFeatures is what the driver said last. It asks nobody. Preconditions: s.mu is held.
func (s *Service) knownFeatures() (ublk.Features, error) {
	if s.known == 0 {
		return 0, errors.New("not known")
	}
	return s.known, nil
}

// InitiatorName is the name by which targets know this machine.
func (s *Service) InitiatorName() string { return s.name }

// SetBus records for Status how the bus is doing.
func (s *Service) SetBus(text string) {
	s.mu.Lock()
	s.bus = text
	s.mu.Unlock()
}

// Watch returns a channel that gets a value after something that the lists show has changed; several changes may make one value. Stop it
// with the function.
func (s *Service) Watch() (<-chan struct{}, func()) {
	c := make(chan struct{}, 1)
	s.mu.Lock()
	s.watchers[c] = struct{}{}
	s.mu.Unlock()
	return c, func() {
		s.mu.Lock()
		delete(s.watchers, c)
		s.mu.Unlock()
	}
}

// changedLocked wakes the watchers. Preconditions: s.mu is held.
func (s *Service) changedLocked() {
	for c := range s.watchers {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

func (s *Service) changed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changedLocked()
}

// undo returns a context for taking something back: it does not end with ctx, but in time.
func (s *Service) undo(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 2*s.Config().ControlTimeout)
}

// bounded returns a context for one command to the driver.
func (s *Service) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, s.Config().ControlTimeout)
}

// Nodes lists the stored records that match.
func (s *Service) Nodes(f api.NodeFilter) (api.NodesReply, error) {
	r := api.NodesReply{Version: api.Version, Nodes: []api.Node{}, Problems: s.nodes.Problems()}
	if r.Problems == nil {
		r.Problems = []string{}
	}
	list, err := s.match(f)
	if err != nil {
		return r, err
	}
	for _, n := range list {
		r.Nodes = append(r.Nodes, s.nodeOf(n))
	}
	return r, nil
}

// nodeOf gives the public form.
func (s *Service) nodeOf(n records.Node) api.Node {
	ts := n.Found.Transports
	if ts == nil {
		ts = []string{}
	}
	x := api.Node{
		ID: n.ID(), Target: n.Target, Address: n.Address, Port: n.Port, TPGT: n.Found.TPGT, Interface: n.Interface, Transport: n.Settings.Transport,
		SeenOver: ts, Startup: n.Settings.Startup, Discovered: n.Found.Time, Missing: n.Found.Missing, Source: n.Found.Source,
		Settings: n.Settings.Settings, Secrets: s.secrets.Names(n.ID()), MovedTo: n.MovedTo,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss := s.sessions[x.ID]; ss != nil {
		x.SessionState = ss.state
		if ss.state != api.SessionLogin {
			x.Pending = n.Settings.Changed(&ss.group.Settings)
		}
	}
	return x
}

// match finds records. The filter is checked before anything is looked at.
func (s *Service) match(f api.NodeFilter) ([]records.Node, error) {
	if f.Target != "" {
		if err := api.CheckName(f.Target); err != nil {
			return nil, err
		}
	}
	var portal api.Portal
	if f.Portal != "" {
		var err error
		if portal, err = api.ParsePortal(f.Portal); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(s.nodes.List(), func(n records.Node) bool {
		return f.Target != "" && n.Target != f.Target || f.Portal != "" && n.Portal() != portal
	}), nil
}

// AddNode stores a record by hand. One that exists is returned as it is.
func (s *Service) AddNode(target, portal string) (api.Node, error) {
	if err := api.CheckName(target); err != nil {
		return api.Node{}, err
	}
	p, err := api.ParsePortal(portal)
	if err != nil {
		return api.Node{}, err
	}
	n, err := s.nodes.Add(records.MakeKey(target, p))
	if err != nil {
		return api.Node{}, api.Wrap(err, api.ErrDatabase, "store record")
	}
	s.changed()
	return s.nodeOf(n), nil
}

// DeleteNodes removes the records that match. One that is logged in is Busy, and then none is removed; no match is NotFound.
func (s *Service) DeleteNodes(f api.NodeFilter) (api.NodesReply, error) {
	r := api.NodesReply{Version: api.Version, Nodes: []api.Node{}, Problems: []string{}}
	if f.Target == "" && f.Portal == "" {
		return r, api.Errorf(api.ErrInvalidArgs, "delete: name a target or a portal")
	}
	list, err := s.match(f)
	if err != nil {
		return r, err
	}
	if len(list) == 0 {
		return r, api.Errorf(api.ErrNotFound, "no record matches; see: iserctl node list")
	}
	for _, n := range list {
		s.mu.Lock()
		ss := s.sessions[n.ID()]
		s.mu.Unlock()
		if ss != nil {
			return r, api.Errorf(api.ErrBusy, "%s at %s is logged in; log out first", n.Target, n.Portal())
		}
	}
	defer s.changed()
	for _, n := range list {
		if err := s.nodes.Delete(n.ID()); err != nil && !errors.Is(err, records.ErrNotFound) {
			return r, api.Errorf(api.ErrDatabase, "%w", err)
		}
		shown := s.nodeOf(n)
		if err := s.secrets.Delete(n.ID()); err != nil {
			return r, api.Errorf(api.ErrDatabase, "%w", err)
		}
		r.Nodes = append(r.Nodes, shown)
	}
	return r, nil
}

// Sessions lists the session groups, by number.
func (s *Service) Sessions() api.SessionsReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := api.SessionsReply{Version: api.Version, Sessions: []api.Session{}}
	for _, ss := range s.sessions {
		if ss.state != api.SessionLogin {
			r.Sessions = append(r.Sessions, ss.show())
		}
	}
	slices.SortFunc(r.Sessions, func(a, b api.Session) int { return a.ID - b.ID })
	return r
}

// show gives the public form. Preconditions: Service.mu is held.
func (ss *session) show() api.Session {
	g := &ss.group
	p, _ := api.ParsePortal(g.Portal)
	out := api.Session{
		ID: ss.number, Node: g.ID, Target: g.Target, Address: p.Address, Port: p.Port, TPGT: int(g.TPGT), State: ss.state,
		Transport: string(g.Transport), TransportReason: g.TransportReason, InitiatorName: g.InitiatorName, Since: g.Since,
		Connections: []api.Connection{}, Units: []api.Unit{},
	}
	if g.Error != nil {
		out.LastError = &api.Error{Name: api.FullName(g.Error.Code), Text: g.Error.Text}
	}
	for _, c := range g.Sessions {
		neg := c.Negotiated
		if neg == nil {
			neg = map[string]string{}
		}
		out.Connections = append(out.Connections, api.Connection{
			Reactor: c.Reactor, ISID: fmt.Sprintf("%x", c.ISID[:]), TSIH: c.TSIH, State: c.State, LocalAddress: c.LocalAddress, RDMADevice: c.RDMADevice,
			Negotiated: neg, AuthMethod: c.AuthMethod, Portal: c.Portal, Aborts: c.Aborts, Resets: c.Resets, Drops: c.Drops,
			Transport: string(c.Transport), Access: c.Access,
		})
	}
	for _, u := range g.Units {
		x := api.Unit{
			LUN: u.Number, Type: scsi.DeviceType(u.DeviceType).String(), Reason: u.Reason, Size: u.Blocks * uint64(u.LogicalBlockSize), Vendor: u.Vendor, Product: u.Product, Serial: u.Serial, WWID: u.WWID,
		}
		for _, d := range ss.devices {
			switch {
			case d.Unit.LUN != u.LUN:
			case d.reason == "":
				x.Device = d.path()
			case u.Usable:
				x.Reason = fmt.Sprintf("%s, of the unit that had this number, is still in use; when it is not, run: iserctl rescan", d.path())
			}
		}
		if why := ss.reasons[u.LUN]; why != "" {
			x.Reason = why
		}
		out.Units = append(out.Units, x)
	}
	return out
}

// Devices lists the block devices, by number, with their counters if the data plane answers, those of each queue too if queues is set.
func (s *Service) Devices(ctx context.Context, queues bool) api.DevicesReply {
	stats := make(map[int][]ipc.QueueStats)
	if st, err := s.plane.state(ctx); err == nil {
		for _, d := range st.Devices {
			stats[d.UblkID] = d.Queues
		}
	}
	return s.devicesWith(stats, queues)
}

// Inventory lists records, sessions and devices, these without counters. It asks nobody.
func (s *Service) Inventory() ([]api.Node, []api.Session, []api.Device) {
	nodes, err := s.Nodes(api.NodeFilter{})
	if err != nil { // an empty filter is always valid
		s.log.WithError(err).Error("records")
	}
	return nodes.Nodes, s.Sessions().Sessions, s.devicesWith(nil, false).Devices
}

// DataPlane tells how the data plane is, without its counts. It asks nobody.
func (s *Service) DataPlane() api.DataPlaneStatus { return s.plane.status() }

// Version is the version of the daemon.
func (s *Service) Version() string { return s.opt.Version }

func (s *Service) devicesWith(stats map[int][]ipc.QueueStats, queues bool) api.DevicesReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := api.DevicesReply{Version: api.Version, Devices: []api.Device{}}
	for _, ss := range s.sessions {
		for id, d := range ss.devices {
			x := d.show(ss)
			x.Stats = sum(stats[id])
			x.Warnings = append(slices.Clone(d.notes), s.warningsLocked(d, stats[id])...)
			if queues {
				for i := range stats[id] {
					x.QueueStats = append(x.QueueStats, sum(stats[id][i:i+1]))
				}
			}
			r.Devices = append(r.Devices, x)
		}
	}
	slices.SortFunc(r.Devices, func(a, b api.Device) int { return a.UblkID - b.UblkID })
	r.Unserved = s.unservedLocked()
	return r
}

func sum(qs []ipc.QueueStats) api.DeviceStats {
	var t api.DeviceStats
	for _, q := range qs {
		t.Reads += q.Reads
		t.Writes += q.Writes
		t.Flushes += q.Flushes
		t.Discards += q.Discards
		t.Zeroes += q.Zeroes
		t.ReadBytes += q.ReadBytes
		t.WriteBytes += q.WriteBytes
		t.Errors += q.Errors
		t.Retries += q.Retries
		t.InFlight += q.InFlight
		t.BytesShared += q.Tiers.Shared
		t.BytesRegistered += q.Tiers.Registered
		t.BytesTCP += q.Tiers.TCP
		t.RequestsShared += q.Requests.Shared
		t.RequestsRegistered += q.Requests.Registered
		t.RequestsTCP += q.Requests.TCP
		t.BytesLent += q.Lent.Bytes
	}
	return t
}

// show gives the public form, without counters. Preconditions: Service.mu is held.
func (d *device) show(ss *session) api.Device {
	p, _ := api.ParsePortal(d.Portal)
	u := &d.Unit
	ways, buffers := tiers(d, ss)
	discard := discardLimits(u)
	return api.Device{
		UblkID: d.UblkID, Path: d.path(), State: d.state, SessionID: ss.number, Target: d.Target, Address: p.Address, Port: p.Port,
		Transport: string(ss.group.Transport), LUN: u.Number, Size: u.Blocks * uint64(u.LogicalBlockSize), LogicalBlockSize: u.LogicalBlockSize,
		PhysicalBlockSize: max(u.PhysicalBlockSize, u.LogicalBlockSize), ReadOnly: u.ReadOnly, WriteCache: u.WriteCache, Vendor: u.Vendor, Product: u.Product,
		Revision: u.Revision, Serial: u.Serial, WWID: u.WWID, Queues: d.Queues, QueueDepth: d.Depth, MaxIO: d.MaxIO, Tiers: ways, Buffers: buffers,
		Reason: d.reason, MaxDiscard: uint64(discard.MaxSectors) * ublk.SectorSize, DiscardGranularity: discard.Granularity,
		MaxZeroes: uint64(discard.MaxWriteZeroesSectors) * ublk.SectorSize,
	}
}

// Status is the daemon at a glance. It never fails: what cannot be found out is a problem in it.
func (s *Service) Status(ctx context.Context) api.Status {
	st := api.Status{
		Version: s.opt.Version, PID: os.Getpid(), Since: s.since, State: "running", InitiatorName: s.name, Nodes: len(s.nodes.List()),
		Problems: append(append([]string{}, s.nodes.Problems()...), s.portals.Problems()...),
	}
	st.DataPlane = s.plane.status()
	if st.DataPlane.State == api.DataPlaneUp {
		if x, err := s.plane.state(ctx); err != nil {
			st.Problems = append(st.Problems, "data plane: "+oneLine(err))
		} else {
			o := x.Objects
			st.DataPlane.Connections, st.DataPlane.QPs, st.DataPlane.CQs, st.DataPlane.MRs = o.Connections, o.QPs, o.CQs, o.MRs
			st.DataPlane.Descriptors, st.DataPlane.PoolBytes, st.DataPlane.PoolBytesUsed = o.Descriptors, o.PoolBytes, o.PoolBytesUsed
		}
	} else if why := s.plane.problem(); why != "" {
		st.Problems = append(st.Problems, "data plane: "+why)
	}
	if f, err := s.features(ctx); err != nil {
		st.Ublk.Reason = oneLine(err)
		st.Problems = append(st.Problems, "block devices: "+st.Ublk.Reason)
	} else {
		st.Ublk = api.UblkStatus{Available: true, Features: uint64(f)}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Bus = s.bus
	for _, ss := range s.sessions {
		st.Sessions++
		st.Devices += len(ss.devices)
		if ss.state == api.SessionFailed || ss.state == api.SessionRecovering {
			text := fmt.Sprintf("session %d with %s is %s", ss.number, ss.group.Target, ss.state)
			if ss.group.Error != nil {
				text += ": " + ss.group.Error.Text
			}
			st.Problems = append(st.Problems, text)
		}
	}
	switch {
	case s.stopping:
		st.State = "stopping"
	case st.DataPlane.State == api.DataPlaneStarting:
		st.State = "starting"
	case len(st.Problems) > 0:
		st.State = "degraded"
	}
	return st
}

func (s *Service) features(ctx context.Context) (ublk.Features, error) {
	b, err := s.control()
	if err != nil {
		return 0, err
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	f, err := b.Features(ctx)
	if err == nil {
		s.mu.Lock()
		s.known = f
		s.mu.Unlock()
	}
	return f, err
}

// oneLine makes an error's text fit a line.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
