package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"iserd.org/iserd/api"
)

// table prints aligned columns. Cells that came from a target are stripped of what could confuse a terminal.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, head ...string) table {
	t := table{tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
	if len(head) > 0 {
		t.row(head...)
	}
	return t
}

func (t table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = strings.Map(func(r rune) rune {
			if r < ' ' || r >= 0x7f && r < 0xa0 {
				return '?'
			}
			return r
		}, c)
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t table) flush() error {
	if err := t.w.Flush(); err != nil {
		return api.Errorf(api.ErrInternal, "print: %w", err)
	}
	return nil
}

// dash makes an absent value visible.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// tag prints a target portal group tag.
func tag(t int) string {
	if t < 0 {
		return "-"
	}
	return strconv.Itoa(t)
}

// size prints bytes for people: 64 MiB, 1.5 GiB.
func size(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10) + " B"
	}
	v, unit := float64(n), 0
	for v >= 1024 && unit < 6 {
		v /= 1024
		unit++
	}
	s := strconv.FormatFloat(v, 'f', 1, 64)
	return strings.TrimSuffix(s, ".0") + " " + "KMGTPE"[unit-1:unit] + "iB"
}
