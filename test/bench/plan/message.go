package plan

// Order is what the host asks the guest to do, as JSON on its standard input.
type Order struct {
	Cells   []Cell  `json:"cells"`
	Runs    int     `json:"runs"`    // of each cell
	Seconds float64 `json:"seconds"` // of each run, guest time
	Trace   bool    `json:"trace"`   // add a pass that counts system calls and the like
}

// Report is one line of JSON that the guest writes to its standard output. One of Values, Skip, Error and Note is set.
type Report struct {
	Cell   string             `json:"cell,omitempty"`
	Run    int                `json:"run,omitempty"` // 1 for the first
	Values map[string]float64 `json:"values,omitempty"`
	Detail string             `json:"detail,omitempty"` // for a reader
	Skip   string             `json:"skip,omitempty"`   // why the cell cannot be measured
	Error  string             `json:"error,omitempty"`  // why it failed
	Note   string             `json:"note,omitempty"`   // progress

	Versions map[string]string `json:"versions,omitempty"` // of the programs in the guest
}

// Names of values. Those with PerIO are per request of fio, not of the device: a request may be split or merged on the way.
const (
	IOPS           = "iops"            // fio's, or iscsi-perf's
	Kinsn          = "kinsn"           // instructions of the whole machine per I/O, thousands: 1e6/IOPS
	Busy           = "busy"            // share of the time in which the CPU was not idle, 0 to 1
	Switches       = "switches"        // context switches of the whole machine per I/O
	DaemonKinsn    = "daemon_kinsn"    // CPU time of all threads of iserd-io per I/O (schedstat), thousands of instructions
	DaemonSwitches = "daemon_switches" // times that threads of iserd-io were put on the CPU, per I/O
	Requests       = "requests"        // requests of the block device per I/O: below 1 when they are merged, above when split
	SharedShare    = "shared_share"    // share of the bytes that went without a copy, by iserd's counters
	Syscalls       = "syscalls"        // system calls of iserd-io per I/O
	Crossings      = "crossings"       // calls from Go into C in iserd-io per I/O
	Turns          = "turns"           // turns of the reactors per I/O (calls of the ring's Dispatch)
	Allocations    = "allocations"     // calls of Go's allocator in iserd-io per I/O
	LatMean        = "lat_mean"        // completion latency, microseconds
	LatP50         = "lat_p50"
	LatP90         = "lat_p90"
	LatP99         = "lat_p99"
	LatP999        = "lat_p999"
)
