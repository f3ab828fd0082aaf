package plan

import "time"

// Order is what the host asks the guest to do, as JSON on its standard input.
type Order struct {
	Cells   []Cell  `json:"cells"`
	Runs    int     `json:"runs"`    // of each cell
	Seconds float64 `json:"seconds"` // of each run, guest time
	Trace   bool    `json:"trace"`   // add a pass that counts system calls and the like
}

// SecondsOf returns how long a run of the cell is, guest time.
func (o Order) SecondsOf(c Cell) float64 {
	if c.Once {
		return max(0.5, o.Seconds/2)
	}
	return o.Seconds
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

	Profile *Profile `json:"profile,omitempty"` // with Values, of cells of kind "share"

	Versions map[string]string `json:"versions,omitempty"` // of the programs in the guest
}

// Profile tells what the plugin's counts are about.
type Profile struct {
	IOs     float64           `json:"ios"`     // of fio, while it counted
	Elapsed time.Duration     `json:"elapsed"` // guest time in which it counted
	Maps    map[string]string `json:"maps"`    // /proc/PID/maps of PlaceDaemon and PlaceFio
}

// SymbolsFile is the kernel's list of symbols on the share between host and guest.
const SymbolsFile = "kallsyms"

// Names of values of fio's cells. Those "per I/O" are per request of fio; the device may see more, when they are split, or fewer, when they
// are merged.
const (
	IOPS           = "iops"            // fio's, or iscsi-perf's
	Kinsn          = "kinsn"           // instructions of the whole machine per I/O, thousands: 1e6/IOPS
	Busy           = "busy"            // share of the time in which the CPU was not idle, 0 to 1
	Switches       = "switches"        // context switches of the whole machine per I/O
	DaemonKinsn    = "daemon_kinsn"    // CPU time of all threads of iserd-io per I/O (schedstat), thousands of instructions
	DaemonSwitches = "daemon_switches" // times that a thread of iserd-io was put on the CPU, per I/O
	Requests       = "requests"        // requests of the block device per I/O
	SharedShare    = "shared_share"    // share of the bytes that went without a copy, by iserd's counters, 0 to 1
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

// Names of values of the other kinds of cell.
const (
	CPUShare        = "cpu_share"        // of one CPU, used by the initiator's processes; 0 to 1
	Wakeups         = "wakeups"          // of all their threads, per second
	MachineShare    = "machine_share"    // of one CPU, used by the whole machine; 0 to 1
	MachineSwitches = "machine_switches" // context switches of the whole machine, per second
	Pings           = "pings"            // NOP-Outs that the target received, per second and session
	IdleSeconds     = "idle_seconds"     // guest time over which it was measured
	Resident        = "resident"         // of the initiator's processes, VmRSS, MiB
	PinnedOutside   = "pinned_outside"   // pinned for adapters or rings and not in VmRSS, MiB
	HostMemory      = "host_memory"      // that the host (target included) has less than before the login, MiB
	LoginSeconds    = "login_seconds"    // from the command until every device has been read
	CommandSeconds  = "command_seconds"  // of that, until the command ended
	LogoutSeconds   = "logout_seconds"   // from the command until every device and session has gone
	StillMedian     = "still_median"     // no request was completed: the median over the faults of a run, s
	StillMost       = "still_most"       // the longest of them, s
	ShareIOs        = "share_ios"        // I/O over which instructions were attributed
	SharePrefix     = "share_"           // + name of a place: thousands of instructions per I/O
)
