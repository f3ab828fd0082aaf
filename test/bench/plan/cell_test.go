package plan

import (
	"slices"
	"strings"
	"testing"
)

func TestAll(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range All() {
		if seen[c.Name] {
			t.Errorf("%s is there twice", c.Name)
		}
		seen[c.Name] = true
		if !strings.HasSuffix(c.Name, "/"+string(c.Initiator)) {
			t.Errorf("%s: the initiator is %s", c.Name, c.Initiator)
		}
		if c.Devices < 1 || c.Targets > 0 && c.Devices%c.Targets != 0 {
			t.Errorf("%s: %d devices on %d targets", c.Name, c.Devices, c.Targets)
		}
		if c.Initiator == Shared && c.Transport != "iser" {
			t.Errorf("%s: shared memory is for RDMA", c.Name)
		}
		switch c.Kind {
		case KindFio, KindShare:
			if c.Job.BlockSize == 0 || c.Job.Depth == 0 || c.Job.Jobs == 0 {
				t.Errorf("%s: job %+v", c.Name, c.Job)
			}
		}
	}
	// The cells of the comparison, and the names that people type.
	for _, name := range []string{
		"iser/4k-qd1/read/iserd", "iser/4k-qd32/write/ib_iser", "iser/4k-qd32x4/read/shared", "iser/128k-qd16/write/iserd", "tcp/512k-qd8/read/iscsi_tcp",
		"iser/4k-qd32/read/libiscsi", "tcp/4k-qd32/read/libiscsi", "null/4k-qd32/read/null_blk", "share/4k-qd32/write/tcp/iserd", "size/iser/512k/read/shared",
		"depth/tcp/64/read/iserd", "devices/100/spread/iserd", "memory/100/iserd", "idle/100/iserd", "creation/wall/100/iser/ib_iser", "creation/counted/100/tcp/iserd",
		"outage/killed/iser/iserd", "outage/away/tcp/iscsi_tcp",
	} {
		if !seen[name] {
			t.Errorf("there is no cell %s", name)
		}
	}
}

func TestSelect(t *testing.T) {
	for _, tc := range []struct {
		pattern string
		want    []string
	}{
		{"iser/4k-qd32/read", []string{"iser/4k-qd32/read/iserd", "iser/4k-qd32/read/shared", "iser/4k-qd32/read/ib_iser", "iser/4k-qd32/read/libiscsi"}},
		{"tcp/4k-qd1/write/iserd, null", []string{"tcp/4k-qd1/write/iserd", "null/4k-qd32/read/null_blk", "null/4k-qd32/write/null_blk"}},
		{"idle/.*/i.*d", []string{"idle/100/iserd"}},
		{"memory/1,memory/1/iserd", []string{"memory/1/iserd", "memory/1/ib_iser"}},
	} {
		cells, err := Select(All(), tc.pattern)
		if err != nil {
			t.Errorf("%q: %v", tc.pattern, err)
		}
		var got []string
		for _, c := range cells {
			got = append(got, c.Name)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%q selects %q, want %q", tc.pattern, got, tc.want)
		}
	}
	for _, bad := range []string{"iser/4k", "nothing", "iser/(", "iser/4k-qd1/read/iserd/more"} {
		if cells, err := Select(All(), bad); err == nil {
			t.Errorf("%q selects %d cells", bad, len(cells))
		}
	}
	if cells, err := Select(All(), ""); err != nil || len(cells) != len(All()) {
		t.Errorf("no pattern: %d cells, %v", len(cells), err)
	}
}

func TestGroups(t *testing.T) {
	cells, err := Select(All(), "iser/4k-qd1,memory")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, g := range Groups(cells) {
		s := g[0].Group() + ":"
		for _, c := range g {
			s += " " + string(c.Initiator)
		}
		got = append(got, s)
	}
	want := []string{
		"iser/4k-qd1/read: iserd shared ib_iser", "iser/4k-qd1/write: iserd shared ib_iser", "memory/1: iserd ib_iser", "memory/100: iserd ib_iser",
	}
	if !slices.Equal(got, want) {
		t.Errorf("groups %q, want %q", got, want)
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int]string{512: "512", 4096: "4k", 1 << 19: "512k", 1 << 20: "1m", 1536: "1536"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}
