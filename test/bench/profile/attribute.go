package profile

import (
	"cmp"
	"fmt"
	"os"
	"slices"

	"iserd.org/iserd/test/bench/plan"
)

// Function is what was executed of a function, of a library, or of a kernel's function.
type Function struct {
	Place, Name  string
	Instructions uint64
}

// Profile is where instructions were executed.
type Profile struct {
	Places    map[string]uint64 // instructions by place
	Functions []Function        // most instructions first
}

// Total returns all instructions.
func (p *Profile) Total() uint64 {
	var n uint64
	for _, x := range p.Places {
		n += x
	}
	return n
}

// kernelBase is the lowest address of the kernel's half.
const kernelBase = 1 << 63

// Attribute finds the places of blocks. kallsyms is a copy of the guest's /proc/kallsyms, daemon the program iserd-io, maps the memory maps by
// the names plan.PlaceDaemon and plan.PlaceFio.
func Attribute(blocks []Block, kallsyms, daemon string, maps map[string]string) (*Profile, error) {
	f, err := os.Open(kallsyms)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	kernel, err := readKallsyms(f)
	if err != nil {
		return nil, err
	}
	var program symbols
	parsed := map[string][]mapping{}
	for name, text := range maps {
		if parsed[name], err = parseMaps(text); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if name == plan.PlaceDaemon {
			if program, err = readELF(daemon); err != nil {
				return nil, err
			}
		}
	}
	p := &Profile{Places: map[string]uint64{}}
	functions := map[Function]uint64{}
	for _, b := range blocks {
		var at Function
		if b.Address >= kernelBase {
			s, _ := kernel.find(b.Address)
			at = Function{Place: kernelPlace(s), Name: s.name}
			if s.module != "" {
				at.Name += " [" + s.module + "]"
			}
		} else {
			at = userPlace(b.Address, parsed, program)
		}
		p.Places[at.Place] += b.Instructions
		functions[at] += b.Instructions
	}
	for at, n := range functions {
		at.Instructions = n
		p.Functions = append(p.Functions, at)
	}
	slices.SortFunc(p.Functions, func(a, b Function) int {
		return cmp.Or(cmp.Compare(b.Instructions, a.Instructions), cmp.Compare(a.Name, b.Name))
	})
	return p, nil
}

// userPlace finds the process that has code at an address.
func userPlace(address uint64, maps map[string][]mapping, program symbols) Function {
	for _, place := range []string{plan.PlaceDaemon, plan.PlaceFio} {
		for _, m := range maps[place] {
			if address < m.begin || address >= m.end {
				continue
			}
			at := Function{Place: place, Name: m.name}
			// The data plane's own code is at its fixed, low addresses.
			if s, ok := program.find(address); ok && place == plan.PlaceDaemon && address < 1<<32 {
				at.Name = s.name
			}
			return at
		}
	}
	return Function{Place: plan.PlaceOtherUser, Name: "user"}
}
