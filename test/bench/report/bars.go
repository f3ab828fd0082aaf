package report

import (
	"fmt"
	"math"
	"strings"

	"iserd.org/iserd/test/bench/plan"
)

// bar is something that has to be true, with the cells it is judged by.
type bar struct {
	text  string
	judge func(r *Results) (measured string, ok bool, known bool)
}

// verdict says what came out. A bar of which a part was not measured is open, unless a measured part misses it.
func (b bar) verdict(r *Results) (measured, verdict string) {
	measured, ok, known := b.judge(r)
	switch {
	case !ok:
		return measured, "**not met**"
	case !known:
		return measured, "open"
	}
	return measured, "met"
}

// barTable judges all bars.
func (r *Results) barTable() string {
	t := table{head: []string{"bar", "measured", "verdict"}}
	for _, b := range bars {
		measured, verdict := b.verdict(r)
		t.add(b.text, measured, verdict)
	}
	// Text reads better from the left.
	return strings.Replace(t.String(), "| --- | ---: | ---: |", "| --- | --- | --- |", 1)
}

// limited is a value that has an upper bound.
type limited struct {
	name  string
	value float64 // NaN when it was not measured
	limit float64 // the same
}

// within judges values that have to be at most their limits; format is for a value.
func within(format string, values ...limited) (string, bool, bool) {
	ok, known := true, true
	var words []string
	for _, v := range values {
		if math.IsNaN(v.value) || math.IsNaN(v.limit) {
			known = false
			continue
		}
		ok = ok && v.value <= v.limit
		words = append(words, strings.TrimSpace(v.name+" "+fmt.Sprintf(format, v.value)))
	}
	return listed(words), ok, known
}

// listed joins what was measured.
func listed(words []string) string {
	if len(words) == 0 {
		return none
	}
	return strings.Join(words, "; ")
}

// need is a lower bound of a ratio by cell.
type need func(c plan.Cell) float64

// least judges the ratios of an initiator to the peer in every cell of the comparison over a transport. It names the worst, and all that
// miss their bound.
func (r *Results) least(transport string, ours plan.Initiator, bound need) (string, bool, bool) {
	ok, known := true, true
	worst, worstText := math.Inf(1), none
	var missed []string
	for _, g := range groups(transport) {
		group := g[0].Group()
		a, b := r.iops(group, ours), r.peerRate(g[0], ours)
		if !a.Known() || !b.Known() {
			known = false
			continue
		}
		v := Divide(a, b).Value
		text := fmt.Sprintf("%s in %s", ratio(a, b), jobText(g[0].Job))
		if m := v / bound(g[0]); m < worst {
			worst, worstText = m, text
		}
		if v < bound(g[0]) {
			ok = false
			missed = append(missed, text)
		}
	}
	switch {
	case !ok:
		return "too low: " + strings.Join(missed, "; "), ok, known
	case worstText == none:
		return none, ok, known
	}
	return "nearest to its bound: " + worstText, ok, known
}

// headlines are the cells of the headline job over a transport, ours only.
func headlines(transport string) []plan.Cell {
	var out []plan.Cell
	for _, g := range groups(transport) {
		for _, c := range g {
			if c.Initiator.Ours() && c.Job.BlockSize == 4<<10 && c.Job.Depth == 32 && c.Job.Jobs == 1 {
				out = append(out, c)
			}
		}
	}
	return out
}

// perIO judges a value of ours at 4k, depth 32, over both transports.
func perIO(value, format string, limit func(r *Results, c plan.Cell) float64) func(r *Results) (string, bool, bool) {
	return func(r *Results) (string, bool, bool) {
		var all []limited
		for _, t := range []string{"iser", "tcp"} {
			for _, c := range headlines(t) {
				direction := strings.TrimPrefix(c.Job.RW(), "rand")
				all = append(all, limited{who(c) + " " + direction, r.Get(c.Name, value).Median(), limit(r, c)})
			}
		}
		return within(format, all...)
	}
}

func fixed(limit float64) func(*Results, plan.Cell) float64 {
	return func(*Results, plan.Cell) float64 { return limit }
}

// bars are those of the benchmark, each a figure with its bound.
var bars = []bar{
	{"over iSER, ordinary memory: at least 1.0 of ib_iser in every cell (0.95 at 512k)", func(r *Results) (string, bool, bool) {
		return r.least("iser", plan.Iserd, func(c plan.Cell) float64 {
			if c.Job.BlockSize == 512<<10 {
				return 0.95
			}
			return 1
		})
	}},
	{"over iSER, shared memory (huge pages, the peer's application has them too): at least 1.0 of ib_iser in every cell, 1.1 at 128k and 512k", func(r *Results) (string, bool, bool) {
		return r.least("iser", plan.Shared, func(c plan.Cell) float64 {
			if c.Job.BlockSize >= 128<<10 {
				return 1.1
			}
			return 1
		})
	}},
	{"over TCP: at least 1.0 of iscsi_tcp in every cell", func(r *Results) (string, bool, bool) {
		return r.least("tcp", plan.Iserd, func(plan.Cell) float64 { return 1 })
	}},
	{"at 4k, depth 32: at least 2 times `iscsi-perf` of libiscsi, over iSER and TCP", func(r *Results) (string, bool, bool) {
		ok, known := true, true
		var words []string
		for _, t := range []string{"iser", "tcp"} {
			for _, c := range headlines(t) {
				if c.Job.Write {
					continue
				}
				a, b := r.Get(c.Name, plan.IOPS), r.iops(c.Group(), plan.Libiscsi)
				if !a.Known() || !b.Known() {
					known = false
					continue
				}
				ok = ok && Divide(a, b).Value >= 2
				words = append(words, who(c)+" "+ratio(a, b))
			}
		}
		return listed(words), ok, known
	}},
	{"shared memory: the daemon's CPU per I/O at 512k at most 1.2 times that at 4k", func(r *Results) (string, bool, bool) {
		var all []limited
		for _, d := range []string{"read", "write"} {
			at := func(n string) float64 { return r.Get("size/iser/"+n+"/"+d+"/shared", plan.DaemonKinsn).Median() }
			all = append(all, limited{d, at("512k") / at("4k"), 1.2})
		}
		return within("%.2f", all...)
	}},
	{"at 4k, depth 32: at most 0.25 system calls of the daemon per I/O", perIO(plan.Syscalls, "%.2f", fixed(0.25))},
	{"at 4k, depth 32: at most two C calls per turn of the reactor, one for posting and one for polling", func(r *Results) (string, bool, bool) {
		var all []limited
		for _, c := range headlines("iser") {
			all = append(all, limited{who(c) + " " + strings.TrimPrefix(c.Job.RW(), "rand"),
				r.Get(c.Name, plan.Crossings).Median() / r.Get(c.Name, plan.Turns).Median(), 2})
		}
		return within("%.2f", all...)
	}},
	// Timers and the control connection allocate a few times per second, which is none per I/O.
	{"at 4k, depth 32: no heap allocation per I/O", perIO(plan.Allocations, "%.4f", fixed(0.005))},
	{"at 4k, depth 32: fewer context switches per I/O than the peer", perIO(plan.Switches, "%.2f", func(r *Results, c plan.Cell) float64 {
		return math.Nextafter(r.Get(c.Group()+"/"+string(peerOf(c.Transport)), plan.Switches).Median(), 0)
	})},
	{"idle, 100 devices, 10 sessions: at most 0.1 % of a CPU", func(r *Results) (string, bool, bool) {
		return within("%.4f %%", limited{"", 100 * r.Get("idle/100/iserd", plan.CPUShare).Median(), 0.1})
	}},
	{"idle: no more wake-ups than the pings ask for: one to send and one for the answer", func(r *Results) (string, bool, bool) {
		pings := 10 * r.Get("idle/100/iserd", plan.Pings).Median()
		text, ok, known := within("%.2f per second", limited{"", r.Get("idle/100/iserd", plan.Wakeups).Median(), 2 * pings})
		if known {
			text += fmt.Sprintf(", %.2f pings", pings)
		}
		return text, ok, known
	}},
	{"at 4k, depth 32: the initiator's own share above the null_blk floor, copies apart, at most 7 thousand instructions", func(r *Results) (string, bool, bool) {
		var all []limited
		for _, g := range groups("share") {
			for _, c := range g {
				if c.Initiator.Ours() && c.Job.BlockSize == 4<<10 {
					all = append(all, limited{who(c) + " " + strings.TrimPrefix(c.Job.RW(), "rand"), r.ownShare(c), 7})
				}
			}
		}
		return within("%.1f", all...)
	}},
	{"memory, resident and pinned: 1 device at most 64 MiB, 100 devices at most 128 MiB", func(r *Results) (string, bool, bool) {
		var all []limited
		for n, limit := range map[int]float64{1: 64, 100: 128} {
			name := fmt.Sprintf("memory/%d/iserd", n)
			all = append(all, limited{fmt.Sprint(n) + ":", r.Get(name, plan.Resident).Median() + r.Get(name, plan.PinnedOutside).Median(), limit})
		}
		if all[0].limit > all[1].limit {
			all[0], all[1] = all[1], all[0]
		}
		return within("%.1f MiB", all...)
	}},
	{"100 devices keep at least 0.97 of one device's rate", func(r *Results) (string, bool, bool) {
		ok, known := true, true
		var words []string
		for _, on := range []string{"one", "spread"} {
			a, b := r.iops("devices/100/"+on, plan.Iserd), r.iops("devices/1/one", plan.Iserd)
			if !a.Known() || !b.Known() {
				known = false
				continue
			}
			ok = ok && Divide(a, b).Value >= 0.97
			words = append(words, fmt.Sprintf("%s: %s", on, ratio(a, b)))
		}
		return listed(words), ok, known
	}},
	{"100 units of one target: usable within 20 s, gone within 20 s", func(r *Results) (string, bool, bool) {
		var all []limited
		for _, t := range []string{"iser", "tcp"} {
			all = append(all, limited{t + " login", r.Get("creation/wall/100/"+t+"/iserd", plan.LoginSeconds).Median(), 20},
				limited{t + " logout", r.Get("creation/wall/100/"+t+"/iserd", plan.LogoutSeconds).Median(), 20})
		}
		return within("%.1f s", all...)
	}},
	{"requests stand still: at most 0.5 s when the data plane is killed, 0.3 s when it is replaced, 0.25 s after the return of a target", func(r *Results) (string, bool, bool) {
		var all []limited
		for _, g := range groups("outage") {
			for _, c := range g {
				if c.Initiator.Ours() {
					limit := map[plan.Fault]float64{plan.FaultKilled: 0.5, plan.FaultUpgrade: 0.3, plan.FaultAway: 0.25}[c.Fault]
					all = append(all, limited{string(c.Fault) + " " + c.Transport, r.Get(c.Name, plan.StillMost).Median(), limit})
				}
			}
		}
		return within("%.2f s", all...)
	}},
}
