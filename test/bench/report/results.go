package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"iserd.org/iserd/test/bench/plan"
)

// Results are all measurements, by the cell's name.
type Results struct {
	Environments []Environment    `json:"environments"`
	Cells        map[string]*Cell `json:"cells"`
}

// Environment is what cells were measured with. It names no machine: guest time does not depend on it.
type Environment struct {
	Commit   string            `json:"commit"`   // of this project
	Kernel   string            `json:"kernel"`   // of the guest
	QEMU     string            `json:"qemu"`     //
	Go       string            `json:"go"`       //
	Programs map[string]string `json:"programs"` // versions of the peers and of fio
}

func (e Environment) equal(o Environment) bool {
	return e.Commit == o.Commit && e.Kernel == o.Kernel && e.QEMU == o.QEMU && e.Go == o.Go && maps.Equal(e.Programs, o.Programs)
}

// Cell is what was measured of one cell.
type Cell struct {
	Environment int                  `json:"environment"` // index into Environments
	Seconds     float64              `json:"seconds"`     // guest time of a run
	Runs        []map[string]float64 `json:"runs"`        // values by the names of package plan
	Detail      string               `json:"detail,omitempty"`
}

// file is where results live in their folder.
const file = "results.json"

// Load reads the results of a folder; none are there when it has none.
func Load(dir string) (*Results, error) {
	r := &Results{Cells: map[string]*Cell{}}
	b, err := os.ReadFile(filepath.Join(dir, file))
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, file), err)
	}
	for name, c := range r.Cells {
		if c == nil || c.Environment < 0 || c.Environment >= len(r.Environments) {
			return nil, fmt.Errorf("%s: cell %s has no environment", filepath.Join(dir, file), name)
		}
	}
	return r, nil
}

// Save writes the results to a folder, which is made when missing. Cells that no longer exist and environments that no cell was measured in
// are left out.
func (r *Results) Save(dir string) error {
	known := map[string]bool{}
	for _, c := range plan.All() {
		known[c.Name] = true
	}
	maps.DeleteFunc(r.Cells, func(name string, _ *Cell) bool { return !known[name] })
	var kept []Environment
	for i, e := range r.Environments {
		used := false
		for _, c := range r.Cells {
			if c.Environment == i {
				used = true
			}
		}
		if !used {
			continue
		}
		for _, c := range r.Cells {
			if c.Environment == i {
				c.Environment = len(kept) // never above i, so none is renumbered twice
			}
		}
		kept = append(kept, e)
	}
	r.Environments = kept
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(dir, file+".new")
	if err := os.WriteFile(tmp, append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, file))
}

// Add takes a run of a cell in. The first run of a measurement replaces what was there.
func (r *Results) Add(e Environment, seconds float64, p plan.Report) {
	c := r.Cells[p.Cell]
	if c == nil || p.Run == 1 {
		i := slices.IndexFunc(r.Environments, e.equal)
		if i < 0 {
			i = len(r.Environments)
			r.Environments = append(r.Environments, e)
		}
		c = &Cell{Environment: i, Seconds: seconds}
		r.Cells[p.Cell] = c
	}
	c.Runs = append(c.Runs, p.Values)
	if p.Detail != "" {
		c.Detail = p.Detail
	}
}

// Get returns a value of a cell over its runs. A value that only some of the runs have, as those of the tracer, is taken from them.
func (r *Results) Get(cell, value string) Figure {
	var f Figure
	if c := r.Cells[cell]; c != nil {
		for _, run := range c.Runs {
			if v, ok := run[value]; ok {
				f = append(f, v)
			}
		}
	}
	slices.Sort(f)
	return f
}
