package report

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// table is a table of markdown.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// String writes the table; columns after the first are aligned to the right. A table without rows is a remark.
func (t *table) String() string {
	if len(t.rows) == 0 {
		return "Not measured yet.\n"
	}
	var b strings.Builder
	line := func(cells []string) {
		b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
	}
	line(t.head)
	rule := make([]string, len(t.head))
	for i := range rule {
		rule[i] = "---:"
	}
	rule[0] = "---"
	line(rule)
	for _, r := range t.rows {
		for len(r) < len(t.head) {
			r = append(r, "")
		}
		line(r)
	}
	return b.String()
}

// none stands for a value that was not measured.
const none = "–"

// number writes a value with three to four digits that mean something.
func number(v float64) string {
	switch {
	case v != v:
		return none
	case v == 0:
		return "0"
	case v >= 100 || v <= -100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10 || v <= -10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// median writes the median of a figure.
func median(f Figure) string { return number(f.Median()) }

// spread writes median and range of a figure.
func spread(f Figure) string {
	switch len(f) {
	case 0:
		return none
	case 1:
		return number(f[0])
	}
	return fmt.Sprintf("%s (%s–%s)", number(f.Median()), number(f.Min()), number(f.Max()))
}

// ratio writes a ratio; one that the runs do not bear out is marked.
func ratio(ours, peer Figure) string {
	if !ours.Known() || !peer.Known() {
		return none
	}
	r := Divide(ours, peer)
	if !r.Distinct {
		return fmt.Sprintf("≈ %.3f", r.Value)
	}
	return fmt.Sprintf("%.3f", r.Value)
}

// Sections are texts by name that go between markers of a document:
//
//	<!-- bench:NAME -->
//	...
//	<!-- bench:end -->
type Sections map[string]string

const (
	markBegin = "<!-- bench:"
	markEnd   = "<!-- bench:end -->"
	markClose = " -->"
)

// Fill replaces what stands between the markers of text. Every marker must have a section, and every section a marker.
func (s Sections) Fill(text string) (string, error) {
	var b strings.Builder
	used := map[string]bool{}
	for {
		head, rest, found := strings.Cut(text, markBegin)
		b.WriteString(head)
		if !found {
			break
		}
		name, rest, found := strings.Cut(rest, markClose)
		if !found {
			return "", fmt.Errorf("a marker is not closed")
		}
		content, ok := s[name]
		if !ok {
			return "", fmt.Errorf("marker %q has no section", name)
		}
		old, rest, found := strings.Cut(rest, markEnd)
		if !found || strings.Contains(old, markBegin) {
			return "", fmt.Errorf("section %q has no end marker", name)
		}
		if used[name] {
			return "", fmt.Errorf("section %q stands there twice", name)
		}
		used[name] = true
		b.WriteString(markBegin + name + markClose + "\n" + strings.TrimRight(content, "\n") + "\n" + markEnd)
		text = rest
	}
	for name := range s {
		if !used[name] {
			return "", fmt.Errorf("section %q has no marker", name)
		}
	}
	return b.String(), nil
}

// fillFile does so for the README of a folder. A folder without one stays without: it is written by hand.
func (s Sections) fillFile(dir string) error {
	path := filepath.Join(dir, "README.md")
	b, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	text, err := s.Fill(string(b))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if text == string(b) {
		return nil
	}
	return os.WriteFile(path, []byte(text), 0o644)
}
