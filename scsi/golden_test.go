package scsi

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the decoded lines of testdata/*.hex")

// capture is one answer of a real target.
type capture struct {
	name string
	data []byte
}

// captures reads one file of testdata: blocks of a name, hex lines and "= decoded text".
func captures(t testing.TB, file string) []capture {
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var list []capture
	for block := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n\n") {
		var c capture
		for line := range strings.SplitSeq(block, "\n") {
			switch {
			case line == "" || line[0] == '#' || line[0] == '=':
			case c.name == "":
				c.name = line
			default:
				b, err := hex.DecodeString(line)
				if err != nil {
					t.Fatalf("%s: %s: %v", file, c.name, err)
				}
				c.data = append(c.data, b...)
			}
		}
		if c.name != "" {
			list = append(list, c)
		}
	}
	return list
}

// decode is what the parser for the capture says.
func decode(c capture) string {
	show := func(v any, err error) string {
		if err != nil {
			return "error: " + err.Error()
		}
		return fmt.Sprintf("%+v", v)
	}
	kind, _, _ := strings.Cut(c.name, " ")
	switch kind {
	case "sense", "request-sense":
		s, err := ParseSense(c.data)
		if err != nil {
			return show(nil, err)
		}
		return s.String()
	case "report-luns":
		luns, needed, err := ParseReportLuns(c.data)
		return show(fmt.Sprint(luns, " of ", needed, " bytes"), err)
	case "inquiry":
		return show(ParseInquiry(c.data))
	case "vpd-00":
		return show(ParseSupportedPages(c.data))
	case "vpd-80":
		return show(ParseSerialNumber(c.data))
	case "vpd-83":
		d, err := ParseDesignators(c.data)
		return show(fmt.Sprintf("%d designators, identity %s", len(d), Identity(d)), err)
	case "vpd-b0":
		return show(ParseBlockLimits(c.data))
	case "vpd-b1":
		return show(ParseCharacteristics(c.data))
	case "vpd-b2":
		return show(ParseProvisioning(c.data))
	case "capacity-10":
		return show(ParseReadCapacity10(c.data))
	case "capacity-16":
		return show(ParseReadCapacity16(c.data))
	case "mode-6", "mode-6-caching":
		return show(ParseModeSense6(c.data))
	case "mode-10":
		return show(ParseModeSense10(c.data))
	case "pr-keys":
		k, needed, err := ParseReadKeys(c.data)
		return show(fmt.Sprintf("%+v of %d bytes", k, needed), err)
	case "pr-reservation":
		return show(ParseReadReservation(c.data))
	case "pr-capabilities":
		return show(ParseReserveCapabilities(c.data))
	case "pr-full-status":
		g, list, needed, err := ParseFullStatus(c.data)
		return show(fmt.Sprintf("generation %d %+v of %d bytes", g, list, needed), err)
	case "port-groups":
		return show(ParseTargetPortGroups(c.data))
	}
	return "no parser"
}

func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.hex")
	if err != nil || len(files) == 0 {
		t.Fatal("no golden files", err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		list := captures(t, file)
		lines := strings.Split(string(raw), "\n")
		n := 0
		for i, line := range lines {
			if !strings.HasPrefix(line, "=") {
				continue
			}
			if got := "= " + decode(list[n]); got != line {
				if !*update {
					t.Errorf("%s:%d: %s\n got %s\nwant %s", file, i+1, list[n].name, got, line)
				}
				lines[i] = got
			}
			n++
		}
		if n != len(list) {
			t.Errorf("%s: %d captures, %d decoded lines", file, len(list), n)
		}
		if *update {
			if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
