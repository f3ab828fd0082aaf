package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

// sections returns the generated parts of the README.
func (r *Results) sections() Sections {
	return Sections{
		"bars":        r.barTable(),
		"environment": r.environmentTable(),
		"iser":        r.peerTable("iser"),
		"shared":      r.sharedTable(),
		"tcp":         r.peerTable("tcp"),
		"path":        r.pathTable(),
		"share":       r.shareTables(),
		"size":        r.sizeTable(),
		"depth":       r.depthTable(),
		"devices":     r.devicesTable(),
		"memory":      r.memoryTable(),
		"idle":        r.idleTable(),
		"creation":    r.creationTable(),
		"outage":      r.outageTable(),
	}
}

// groups returns the groups of cells below a prefix, in the order of the plan.
func groups(prefix string) [][]plan.Cell {
	var out [][]plan.Cell
	for _, g := range plan.Groups(plan.All()) {
		if strings.HasPrefix(g[0].Name, prefix+"/") {
			out = append(out, g)
		}
	}
	return out
}

// jobText describes a job for a reader.
func jobText(j plan.Job) string {
	s := fmt.Sprintf("%s, depth %d", plan.SizeText(j.BlockSize), j.Depth)
	if j.Jobs > 1 {
		s += fmt.Sprintf(", %d jobs", j.Jobs)
	}
	return s + ", " + strings.TrimPrefix(j.RW(), "rand")
}

// peerOf is the kernel's initiator over a transport.
func peerOf(transport string) plan.Initiator {
	if transport == "tcp" {
		return plan.ISCSITCP
	}
	return plan.IbIser
}

// iops returns the rate of an initiator in a group of cells.
func (r *Results) iops(group string, i plan.Initiator) Figure {
	return r.Get(group+"/"+string(i), plan.IOPS)
}

// peerRate returns the rate of the kernel's initiator for an application with the same memory as with ours. Where a request is a single page,
// huge pages make no difference and are not measured.
func (r *Results) peerRate(c plan.Cell, ours plan.Initiator) Figure {
	if ours == plan.Shared && c.Job.BlockSize > 4<<10 {
		return r.iops(c.Group(), plan.IbIserHuge)
	}
	return r.iops(c.Group(), peerOf(c.Transport))
}

// peerTable compares rates with the peers over a transport.
func (r *Results) peerTable(transport string) string {
	peer := peerOf(transport)
	t := table{head: []string{"job", string(peer), "iserd", "ratio", "switches per I/O: " + string(peer), "iserd"}}
	var below string
	for _, g := range groups(transport) {
		group := g[0].Group()
		theirs, ours := r.iops(group, peer), r.iops(group, plan.Iserd)
		if theirs.Known() || ours.Known() {
			t.add(jobText(g[0].Job), spread(theirs), spread(ours), ratio(ours, theirs),
				median(r.Get(group+"/"+string(peer), plan.Switches)), median(r.Get(group+"/iserd", plan.Switches)))
		}
		if lib := r.iops(group, plan.Libiscsi); lib.Known() {
			below += fmt.Sprintf("\n`iscsi-perf` of libiscsi, %s: %s; iserd / libiscsi %s", jobText(g[0].Job), spread(lib), ratio(ours, lib))
			if shared := r.iops(group, plan.Shared); shared.Known() {
				below += ", with shared memory " + ratio(shared, lib)
			}
			below += ".\n"
		}
	}
	return t.String() + below
}

// sharedTable compares shared memory with the peer, by the pages that the application's memory is made of.
func (r *Results) sharedTable() string {
	t := table{head: []string{"job", "ib_iser", "shared", "ratio", "ib_iser, huge pages", "shared, huge pages", "ratio", "switches per I/O: shared, huge pages"}}
	for _, g := range groups("iser") {
		c := g[0]
		small, huge := plan.Shared4k, plan.Shared
		if c.Job.BlockSize <= 4<<10 {
			small, huge = plan.Shared, "" // one page either way
		}
		a, b := r.iops(c.Group(), small), r.iops(c.Group(), huge)
		if !a.Known() && !b.Known() {
			continue
		}
		theirs, theirsHuge := r.iops(c.Group(), plan.IbIser), r.iops(c.Group(), plan.IbIserHuge)
		t.add(jobText(c.Job), spread(theirs), spread(a), ratio(a, theirs), spread(theirsHuge), spread(b), ratio(b, theirsHuge),
			median(r.Get(c.Group()+"/shared", plan.Switches)))
	}
	return t.String()
}

// pathTable shows what the data plane does per I/O.
func (r *Results) pathTable() string {
	t := table{head: []string{"job", "who", "system calls", "C calls", "turns", "allocations", "switches", "daemon, kinsn"}}
	for _, transport := range []string{"iser", "tcp"} {
		for _, g := range groups(transport) {
			for _, c := range g {
				if c.Initiator.Ours() && r.Get(c.Name, plan.Syscalls).Known() {
					t.add(jobText(c.Job), who(c), median(r.Get(c.Name, plan.Syscalls)), median(r.Get(c.Name, plan.Crossings)),
						median(r.Get(c.Name, plan.Turns)), median(r.Get(c.Name, plan.Allocations)), median(r.Get(c.Name, plan.Switches)),
						median(r.Get(c.Name, plan.DaemonKinsn)))
				}
			}
		}
	}
	return t.String()
}

// who names an initiator for a reader.
func who(c plan.Cell) string {
	switch {
	case c.Initiator == plan.Shared:
		return "iserd, iSER, shared memory"
	case c.Initiator == plan.Shared4k:
		return "iserd, iSER, shared memory of 4 KiB pages"
	case c.Initiator == plan.IbIserHuge:
		return "ib_iser, huge pages"
	case c.Initiator == plan.Iserd && c.Transport == "tcp":
		return "iserd, TCP"
	case c.Initiator == plan.Iserd:
		return "iserd, iSER"
	}
	return string(c.Initiator)
}

// shareTables show where instructions go, for each job that was looked at.
func (r *Results) shareTables() string {
	var tables []string
	for _, g := range groups("share") {
		if c := g[0]; c.Initiator == plan.NullBlk {
			tables = append(tables, r.shareTable(c.Group(), c.Job))
		}
	}
	return strings.Join(tables, "\n")
}

// shareTable shows where instructions go in the cells below a prefix, thousands per I/O.
func (r *Results) shareTable(prefix string, j plan.Job) string {
	t := table{head: []string{jobText(j)}}
	var cells []plan.Cell
	for _, g := range groups("share") {
		for _, c := range g {
			if strings.HasPrefix(c.Name, prefix+"/") && r.Cells[c.Name] != nil {
				cells = append(cells, c)
				t.head = append(t.head, who(c))
			}
		}
	}
	if len(cells) == 0 {
		return t.String()
	}
	for _, p := range plan.Places {
		row := []string{p}
		for _, c := range cells {
			row = append(row, median(r.Get(c.Name, plan.SharePrefix+p)))
		}
		t.add(row...)
	}
	all, own := []string{"**all**"}, []string{"**the initiator's own share**"}
	for _, c := range cells {
		all = append(all, median(r.Get(c.Name, plan.Kinsn)))
		own = append(own, number(r.ownShare(c)))
	}
	t.rows = append(t.rows, all, own)
	return t.String()
}

// ownShare adds up the places that are there for the initiator alone, less what fio spends in them without one; thousands of instructions
// per I/O, NaN when it was not measured.
func (r *Results) ownShare(c plan.Cell) float64 {
	floor := "share/" + strings.Split(c.Name, "/")[1] + "/" + strings.Split(c.Name, "/")[2] + "/" + string(plan.NullBlk)
	sum := 0.0
	if r.Cells[c.Name] == nil || r.Cells[floor] == nil {
		return Figure(nil).Median()
	}
	for _, p := range plan.OwnPlaces {
		for sign, name := range map[float64]string{1: c.Name, -1: floor} {
			if f := r.Get(name, plan.SharePrefix+p); f.Known() {
				sum += sign * f.Median()
			}
		}
	}
	return sum
}

// columns are the initiators that are compared by block size and depth.
var columns = []plan.Cell{
	{Transport: "iser", Initiator: plan.Shared},
	{Transport: "iser", Initiator: plan.Iserd},
	{Transport: "iser", Initiator: plan.IbIser},
	{Transport: "tcp", Initiator: plan.Iserd},
	{Transport: "tcp", Initiator: plan.ISCSITCP},
}

// sizeTable shows rate and the daemon's CPU by block size.
func (r *Results) sizeTable() string {
	var b strings.Builder
	for _, x := range []struct {
		title, value string
		ours         bool
	}{{"IOPS", plan.IOPS, false}, {"CPU of iserd-io, thousands of instructions per I/O", plan.DaemonKinsn, true}} {
		for _, direction := range []string{"read", "write"} {
			t := table{head: []string{x.title + ", " + direction}}
			var shown []plan.Cell
			for _, c := range columns {
				if !x.ours || c.Initiator.Ours() {
					shown = append(shown, c)
					t.head = append(t.head, who(c))
				}
			}
			for _, n := range plan.Sizes {
				row, known := []string{plan.SizeText(n)}, false
				for _, c := range shown {
					f := r.Get(strings.Join([]string{"size", c.Transport, plan.SizeText(n), direction, string(c.Initiator)}, "/"), x.value)
					known = known || f.Known()
					row = append(row, median(f))
				}
				if known {
					t.add(row...)
				}
			}
			fmt.Fprintf(&b, "%s\n", t.String())
		}
	}
	return b.String()
}

// depthTable shows latencies by queue depth.
func (r *Results) depthTable() string {
	t := table{head: []string{"4k read, p50 / p99 / p99.9, µs"}}
	for _, c := range columns {
		t.head = append(t.head, who(c))
	}
	for _, n := range plan.Depths {
		row, known := []string{fmt.Sprintf("depth %d", n)}, false
		for _, c := range columns {
			name := fmt.Sprintf("depth/%s/%d/read/%s", c.Transport, n, c.Initiator)
			known = known || r.Cells[name] != nil
			row = append(row, median(r.Get(name, plan.LatP50))+" / "+median(r.Get(name, plan.LatP99))+" / "+median(r.Get(name, plan.LatP999)))
		}
		if known {
			t.add(row...)
		}
	}
	return t.String()
}

// devicesTable shows the rate with many devices.
func (r *Results) devicesTable() string {
	t := table{head: []string{"devices", "I/O on", "iserd", "of one device's", "switches per I/O", "daemon, kinsn", "ib_iser", "of one device's", "switches per I/O"}}
	for _, g := range groups("devices") {
		group := g[0].Group()
		ours, theirs := r.iops(group, plan.Iserd), r.iops(group, plan.IbIser)
		if !ours.Known() && !theirs.Known() {
			continue
		}
		on := "one"
		if g[0].Spread {
			on = "all"
		}
		t.add(fmt.Sprint(g[0].Devices), on,
			spread(ours), ratio(ours, r.iops("devices/1/one", plan.Iserd)), median(r.Get(group+"/iserd", plan.Switches)), median(r.Get(group+"/iserd", plan.DaemonKinsn)),
			spread(theirs), ratio(theirs, r.iops("devices/1/one", plan.IbIser)), median(r.Get(group+"/ib_iser", plan.Switches)))
	}
	return t.String()
}

// memoryTable shows memory by number of devices.
func (r *Results) memoryTable() string {
	t := table{head: []string{"devices", "who", "resident, MiB", "pinned beside, MiB", "whole machine, MiB", "in detail"}}
	for _, g := range groups("memory") {
		for _, c := range g {
			if x := r.Cells[c.Name]; x != nil {
				t.add(fmt.Sprint(c.Devices), processesOf(c), median(r.Get(c.Name, plan.Resident)), median(r.Get(c.Name, plan.PinnedOutside)),
					median(r.Get(c.Name, plan.HostMemory)), x.Detail)
			}
		}
	}
	return t.String()
}

// processesOf names the processes of an initiator.
func processesOf(c plan.Cell) string {
	if c.Initiator.Ours() {
		return "iserd, iserd-io"
	}
	return "iscsid"
}

// idleTable shows what initiators do with nothing to do.
func (r *Results) idleTable() string {
	t := table{head: []string{"devices", "sessions", "who", "CPU of its processes, %", "their wake-ups per s", "pings per s", "CPU of the machine, %", "its context switches per s", "over, s"}}
	for _, g := range groups("idle") {
		for _, c := range g {
			if r.Cells[c.Name] == nil {
				continue
			}
			get := func(value string, scale float64) string {
				return fmt.Sprintf("%.4g", scale*r.Get(c.Name, value).Median())
			}
			t.add(fmt.Sprint(c.Devices), fmt.Sprint(c.Targets), processesOf(c), get(plan.CPUShare, 100), get(plan.Wakeups, 1), get(plan.Pings, float64(c.Targets)),
				get(plan.MachineShare, 100), get(plan.MachineSwitches, 1), get(plan.IdleSeconds, 1))
		}
	}
	return t.String()
}

// creationTable shows the time of logins and logouts.
func (r *Results) creationTable() string {
	t := table{head: []string{"units", "clock", "who", "login until all are usable, s", "of it the command, s", "logout until all are gone, s"}}
	for _, g := range groups("creation") {
		for _, c := range g {
			if r.Cells[c.Name] != nil {
				clock := "10⁹ instructions"
				if c.Wall {
					clock = "wall"
				}
				t.add(fmt.Sprint(c.Devices), clock, who(c), spread(r.Get(c.Name, plan.LoginSeconds)), spread(r.Get(c.Name, plan.CommandSeconds)), spread(r.Get(c.Name, plan.LogoutSeconds)))
			}
		}
	}
	return t.String()
}

// outageTable shows for how long requests stand still.
func (r *Results) outageTable() string {
	t := table{head: []string{"fault", "who", "nothing completed for, s, median", "longest"}}
	for _, g := range groups("outage") {
		for _, c := range g {
			if r.Cells[c.Name] != nil {
				t.add(faultText[c.Fault], who(c), median(r.Get(c.Name, plan.StillMedian)), median(r.Get(c.Name, plan.StillMost)))
			}
		}
	}
	return t.String()
}

// faultText describes a fault for a reader.
var faultText = map[plan.Fault]string{
	plan.FaultKilled:  "data plane killed, from SIGKILL",
	plan.FaultUpgrade: "data plane replaced",
	plan.FaultAway:    "target away, from its return",
}

// environmentTable tells what was measured with what.
func (r *Results) environmentTable() string {
	t := table{head: []string{"commit", "cells", "kernel of the guest", "QEMU", "Go", "others"}}
	for i, e := range r.Environments {
		n := 0
		for _, c := range r.Cells {
			if c.Environment == i {
				n++
			}
		}
		var others []string
		for _, name := range slices.Sorted(maps.Keys(e.Programs)) {
			others = append(others, name+" "+e.Programs[name])
		}
		t.add(e.Commit, fmt.Sprint(n), e.Kernel, e.QEMU, e.Go, strings.Join(others, ", "))
	}
	return t.String()
}
