package profile

import (
	"bufio"
	"cmp"
	"debug/elf"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// symbol is the beginning of a function.
type symbol struct {
	address uint64
	name    string
	module  string // of the kernel; "" for what is built in, and in programs
}

// symbols are sorted by address.
type symbols []symbol

func (t symbols) sort() {
	slices.SortStableFunc(t, func(a, b symbol) int { return cmp.Compare(a.address, b.address) })
}

// find returns the last symbol at or below an address.
func (t symbols) find(address uint64) (symbol, bool) {
	i, found := slices.BinarySearchFunc(t, address, func(s symbol, a uint64) int { return cmp.Compare(s.address, a) })
	if !found {
		i--
	}
	if i < 0 {
		return symbol{}, false
	}
	return t[i], true
}

// readKallsyms reads /proc/kallsyms: address, type, name, and the module in brackets.
func readKallsyms(r io.Reader) (symbols, error) {
	var t symbols
	s := bufio.NewScanner(r)
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 3 {
			return nil, fmt.Errorf("kallsyms: line %q", s.Text())
		}
		if k := f[1][0]; k != 't' && k != 'T' && k != 'w' && k != 'W' {
			continue
		}
		address, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil {
			return nil, fmt.Errorf("kallsyms: line %q: %w", s.Text(), err)
		}
		x := symbol{address: address, name: f[2]}
		if len(f) > 3 {
			x.module = strings.Trim(f[3], "[]")
		}
		t = append(t, x)
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	t.sort()
	if len(t) == 0 || t[len(t)-1].address == 0 {
		return nil, fmt.Errorf("kallsyms: it holds no addresses")
	}
	return t, nil
}

// readELF reads the functions of a program at a fixed address.
func readELF(file string) (symbols, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if f.Type != elf.ET_EXEC {
		return nil, fmt.Errorf("%s: it has no fixed address", file)
	}
	all, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var t symbols
	for _, s := range all {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			t = append(t, symbol{address: s.Value, name: s.Name})
		}
	}
	t.sort()
	return t, nil
}

// mapping is a part of a process's memory that holds code.
type mapping struct {
	begin, end uint64
	name       string // of the file, without its folder
}

// parseMaps reads /proc/PID/maps and returns the executable mappings.
func parseMaps(text string) ([]mapping, error) {
	var out []mapping
	for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 {
			return nil, fmt.Errorf("maps: line %q", line)
		}
		if !strings.Contains(f[1], "x") {
			continue
		}
		var m mapping
		if _, err := fmt.Sscanf(f[0], "%x-%x", &m.begin, &m.end); err != nil {
			return nil, fmt.Errorf("maps: line %q: %w", line, err)
		}
		m.name = "anonymous"
		if len(f) > 5 {
			m.name = f[5][strings.LastIndexByte(f[5], '/')+1:]
		}
		out = append(out, m)
	}
	return out, nil
}
