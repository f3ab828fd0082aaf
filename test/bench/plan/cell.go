package plan

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Initiator is what logs in, together with what memory the application has for its I/O.
type Initiator string

// The initiators. The name is the last element of a cell's.
const (
	Iserd      Initiator = "iserd"        // ours
	Shared     Initiator = "shared"       // ours over iSER, from huge pages that are registered (iserctl buffer add)
	Shared4k   Initiator = "shared4k"     // the same from pages of 4 KiB
	IbIser     Initiator = "ib_iser"      // the kernel's over iSER, with open-iscsi
	IbIserHuge Initiator = "ib_iser_huge" // the same from huge pages, which spare the kernel work, too
	ISCSITCP   Initiator = "iscsi_tcp"    // the kernel's over TCP, with open-iscsi
	Libiscsi   Initiator = "libiscsi"     // iscsi-perf of libiscsi: no block device, no fio
	NullBlk    Initiator = "null_blk"     // no initiator: what fio and the block layer cost
)

// Ours tells whether the initiator is this project.
func (i Initiator) Ours() bool { return i == Iserd || i.Registered() }

// Registered tells whether the application's memory is registered with the daemon.
func (i Initiator) Registered() bool { return i == Shared || i == Shared4k }

// Memory is what fio takes its I/O memory from.
type Memory string

// The kinds of memory.
const (
	MemoryPrivate Memory = ""      // what malloc gives
	MemoryTmpfs   Memory = "tmpfs" // a file on tmpfs, mapped shared
	MemoryHuge    Memory = "huge"  // a file on hugetlbfs, mapped shared
)

// Memory returns what fio's memory is with the initiator.
func (i Initiator) Memory() Memory {
	switch i {
	case Shared, IbIserHuge:
		return MemoryHuge
	case Shared4k:
		return MemoryTmpfs
	}
	return MemoryPrivate
}

// Kind is the way in which a cell is measured.
type Kind string

// The kinds of cell.
const (
	KindFio      Kind = "fio"      // fio on a device, or iscsi-perf
	KindIdle     Kind = "idle"     // nothing to do for a long time
	KindMemory   Kind = "memory"   // memory of the initiator's processes
	KindCreation Kind = "creation" // login and logout of many units
	KindOutage   Kind = "outage"   // how long requests stand still through a fault
	KindShare    Kind = "share"    // fio, with every instruction of the machine attributed to its place in the code
)

// Fault is what happens in a cell of kind "outage".
type Fault string

// The faults.
const (
	FaultKilled  Fault = "killed"  // the data plane gets SIGKILL
	FaultUpgrade Fault = "upgrade" // the data plane is replaced
	FaultAway    Fault = "away"    // the target goes away and comes back
)

// Machine is the guest that a cell is measured in.
type Machine string

// The machines. A boot serves all cells of one.
const (
	Counting  Machine = "counting"  // one CPU; guest time counts instructions
	Profiling Machine = "profiling" // the same with QEMU's plugin, several times slower to watch
	Ordinary  Machine = "ordinary"  // two CPUs; guest time is wall time
)

// Job is what fio does.
type Job struct {
	BlockSize int  // bytes
	Depth     int  // requests in flight of each job
	Jobs      int  // threads
	Write     bool // else read
	Random    bool
}

// Cell is one thing to measure: one job with one initiator, or one of the other kinds.
type Cell struct {
	Name      string // unique; elements separated by slashes, the last is the initiator
	Kind      Kind
	Transport string // "iser", "tcp", or "" where there is none
	Initiator Initiator
	Job       Job
	Devices   int  // logical units of the target
	Targets   int  // targets, each with Devices/Targets units; 1 when 0
	Spread    bool // I/O goes to all devices instead of one
	Fault     Fault
	Wall      bool // in wall time, on two CPUs
	Once      bool // a point of a plot: one run is enough
}

// Machine returns the guest that the cell is measured in.
func (c Cell) Machine() Machine {
	switch c.Kind {
	case KindCreation:
		if c.Wall {
			return Ordinary
		}
	case KindShare:
		return Profiling
	}
	return Counting
}

// Group is the name without the initiator: cells of one group are measured in turns and compared.
func (c Cell) Group() string { return c.Name[:strings.LastIndexByte(c.Name, '/')] }

// SizeText writes a block size as fio does: 512, 4k, 1m.
func SizeText(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%dm", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%dk", n>>10)
	}
	return fmt.Sprint(n)
}

func (j Job) direction() string {
	if j.Write {
		return "write"
	}
	return "read"
}

// RW is fio's name for the access pattern.
func (j Job) RW() string {
	if j.Random {
		return "rand" + j.direction()
	}
	return j.direction()
}

// spec is the element of a name that describes the job, without direction.
func (j Job) spec() string {
	s := fmt.Sprintf("%s-qd%d", SizeText(j.BlockSize), j.Depth)
	if j.Jobs > 1 {
		s += fmt.Sprintf("x%d", j.Jobs)
	}
	return s
}

// What the axes of the plots are.
var (
	Sizes  = []int{512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20} // bytes
	Depths = []int{1, 2, 4, 8, 16, 32, 64}
	Counts = []int{1, 10, 100} // devices

	SizesDepth = 8 // requests in flight where sizes are compared
)

// jobs are those of the comparison with the peers.
var jobs = []Job{
	{BlockSize: 4 << 10, Depth: 1, Jobs: 1, Random: true},
	{BlockSize: 4 << 10, Depth: 32, Jobs: 1, Random: true},
	{BlockSize: 4 << 10, Depth: 32, Jobs: 4, Random: true},
	{BlockSize: 128 << 10, Depth: 16, Jobs: 1},
	{BlockSize: 512 << 10, Depth: 8, Jobs: 1},
}

// headline is the job that is looked at most closely.
var headline = jobs[1]

// transports are what a session can go over.
var transports = []string{"iser", "tcp"}

// both are the two directions of a job.
func both(j Job) []Job {
	w := j
	w.Write = true
	return []Job{j, w}
}

// initiators are those that are compared over a transport.
func initiators(transport string) []Initiator {
	if transport == "tcp" {
		return []Initiator{Iserd, ISCSITCP}
	}
	return []Initiator{Iserd, Shared, IbIser}
}

// All returns every cell, in the order in which they are measured.
func All() []Cell {
	var cells []Cell
	add := func(group string, c Cell, who ...Initiator) {
		for _, i := range who {
			c.Initiator, c.Name = i, group+"/"+string(i)
			cells = append(cells, c)
		}
	}
	// The comparison with the peers, and the floor.
	for _, t := range transports {
		for _, base := range jobs {
			for _, j := range both(base) {
				group := strings.Join([]string{t, j.spec(), j.direction()}, "/")
				c := Cell{Kind: KindFio, Transport: t, Job: j, Devices: 1}
				add(group, c, initiators(t)...)
				if t == "iser" && j.BlockSize > 4<<10 { // below, a request is one page either way
					add(group, c, Shared4k, IbIserHuge)
				}
				if base == headline && !j.Write { // iscsi-perf only reads
					add(group, c, Libiscsi)
				}
			}
		}
	}
	for _, j := range both(headline) {
		add("null/"+j.spec()+"/"+j.direction(), Cell{Kind: KindFio, Job: j, Devices: 1}, NullBlk)
	}
	// Where the instructions go.
	for _, j := range slices.Concat(both(headline), both(jobs[4])) {
		group := "share/" + j.spec() + "/" + j.direction()
		add(group, Cell{Kind: KindShare, Job: j, Devices: 1}, NullBlk)
		for _, t := range transports {
			add(group+"/"+t, Cell{Kind: KindShare, Transport: t, Job: j, Devices: 1}, initiators(t)...)
		}
	}
	// By block size, and by depth.
	for _, t := range transports {
		for _, n := range Sizes {
			for _, j := range both(Job{BlockSize: n, Depth: SizesDepth, Jobs: 1, Random: true}) {
				add(strings.Join([]string{"size", t, SizeText(n), j.direction()}, "/"),
					Cell{Kind: KindFio, Transport: t, Job: j, Devices: 1, Once: true}, initiators(t)...)
			}
		}
	}
	for _, t := range transports {
		for _, n := range Depths {
			j := Job{BlockSize: 4 << 10, Depth: n, Jobs: 1, Random: true}
			add(fmt.Sprintf("depth/%s/%d/read", t, n), Cell{Kind: KindFio, Transport: t, Job: j, Devices: 1, Once: true}, initiators(t)...)
		}
	}
	// Many devices.
	for _, n := range Counts {
		c := Cell{Kind: KindFio, Transport: "iser", Job: headline, Devices: n}
		add(fmt.Sprintf("devices/%d/one", n), c, Iserd, IbIser)
		if c.Spread = true; n > 1 {
			add(fmt.Sprintf("devices/%d/spread", n), c, Iserd, IbIser)
		}
	}
	for _, n := range []int{1, 100} {
		add(fmt.Sprintf("memory/%d", n), Cell{Kind: KindMemory, Transport: "iser", Devices: n, Once: true}, Iserd, IbIser)
	}
	add("idle/100", Cell{Kind: KindIdle, Transport: "iser", Devices: 100, Targets: 10, Once: true}, Iserd, IbIser)
	for _, clock := range []string{"counted", "wall"} {
		for _, t := range transports {
			c := Cell{Kind: KindCreation, Transport: t, Devices: 100, Wall: clock == "wall", Once: clock == "counted"}
			add("creation/"+clock+"/100/"+t, c, Iserd, initiators(t)[len(initiators(t))-1])
		}
	}
	// Faults. Without a process in the data path there is none to kill or replace.
	for _, t := range transports {
		for _, f := range []Fault{FaultKilled, FaultUpgrade, FaultAway} {
			c := Cell{Kind: KindOutage, Transport: t, Devices: 1, Fault: f, Once: true}
			who := []Initiator{Iserd}
			if f == FaultAway {
				who = append(who, initiators(t)[len(initiators(t))-1])
			}
			add("outage/"+string(f)+"/"+t, c, who...)
		}
	}
	return cells
}

// Select returns the cells whose names a pattern matches. A pattern is a list separated by commas; each is a name of which every element is
// a regular expression for the whole element, and elements left out at the end match all.
func Select(cells []Cell, pattern string) ([]Cell, error) {
	if pattern == "" {
		return cells, nil
	}
	taken := make([]bool, len(cells))
	for _, p := range strings.Split(pattern, ",") {
		var res []*regexp.Regexp
		for _, e := range strings.Split(strings.TrimSpace(p), "/") {
			re, err := regexp.Compile("^(?:" + e + ")$")
			if err != nil {
				return nil, fmt.Errorf("pattern %q: %w", p, err)
			}
			res = append(res, re)
		}
		found := false
		for i, c := range cells {
			parts := strings.Split(c.Name, "/")
			ok := len(res) <= len(parts)
			for k := 0; ok && k < len(res); k++ {
				ok = res[k].MatchString(parts[k])
			}
			taken[i] = taken[i] || ok
			found = found || ok
		}
		if !found {
			return nil, fmt.Errorf("no cell matches %q; -list shows their names", p)
		}
	}
	var out []Cell
	for i, c := range cells {
		if taken[i] {
			out = append(out, c)
		}
	}
	return out, nil
}

// Groups splits cells into groups that are measured in turns, in the order of their first member.
func Groups(cells []Cell) [][]Cell {
	var out [][]Cell
	for _, c := range cells {
		i := slices.IndexFunc(out, func(g []Cell) bool { return g[0].Group() == c.Group() })
		if i < 0 {
			out = append(out, []Cell{c})
		} else {
			out[i] = append(out[i], c)
		}
	}
	return out
}
