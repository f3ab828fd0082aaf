package ublk

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree writes files below a root; a value that starts with "->" is a link.
func tree(t *testing.T, files map[string]string) scan {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(text, "->"); ok {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return scan{proc: filepath.Join(root, "proc"), sys: filepath.Join(root, "sys")}
}

func TestHolders(t *testing.T) {
	s := tree(t, map[string]string{
		"sys/block/ublkb3/dev":                     "259:7\n",
		"sys/block/ublkb3/ublkb3p1/dev":            "259:8\n",
		"sys/block/ublkb3/ublkb3p2/dev":            "259:9\n",
		"sys/block/ublkb3/queue/scheduler":         "none\n",
		"sys/block/ublkb3/holders/md0/x":           "",
		"sys/block/ublkb3/ublkb3p2/holders/dm-0/x": "",
		"sys/block/dm-0/dm/name":                   "vg-root\n",
		"sys/block/loop4/loop/backing_file":        "/dev/ublkb3\n",
		"sys/block/loop5/loop/backing_file":        "/dev/ublkb33\n",
		"sys/block/ublkb33/dev":                    "259:20\n",
		"proc/1/mountinfo": "22 1 259:8 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/ublkb3p1 rw\n" +
			"23 1 0:44 /sub /btr rw - btrfs /dev/ublkb3 rw\n24 1 259:20 / /other rw - ext4 /dev/ublkb33 rw\ngarbage\n",
		"proc/self/mountinfo": "22 1 259:8 / /mnt/a\\040b rw - ext4 /dev/ublkb3p1 rw\n30 1 259:8 / /bind rw - ext4 /dev/ublkb3p1 rw\n",
		"proc/swaps":          "Filename Type Size Used Priority\n/dev/ublkb3p2 partition 100 0 -2\n/swapfile file 100 0 -3\n",
		"proc/70/comm":        "fio\n",
		"proc/70/fd/0":        "->/dev/null",
		"proc/70/fd/5":        "->/dev/ublkb3",
		"proc/70/fd/6":        "->/dev/ublkb3",
		"proc/70/fd/7":        "->/dev/ublkb33",
		"proc/71/comm":        "dd\n",
		"proc/71/fd/1":        "->/dev/ublkb3p1",
		"proc/72/fd/3":        "->socket:[123]",
		"proc/cpuinfo":        "",
	})
	got, err := s.holders("ublkb3")
	if err != nil {
		t.Fatal(err)
	}
	all, err := s.holdersOf([]int{3, 4, 33})
	if err != nil || len(all) != 2 || len(all[33]) != 3 {
		t.Errorf("all at once: %v, %v", all, err)
	}
	for _, h := range got {
		if !slices.Contains(all[3], h) || len(all[3]) != len(got) {
			t.Errorf("all at once: %v, one by one: %v", all[3], got)
		}
	}
	var text []string
	for _, h := range got {
		text = append(text, h.String())
	}
	slices.Sort(text)
	want := []string{
		"ublkb3 is mounted on /btr",
		"ublkb3 is open in process 70 (fio)",
		"ublkb3 is part of loop4",
		"ublkb3 is part of md0",
		"ublkb3p1 is mounted on /bind",
		"ublkb3p1 is mounted on /mnt/a b",
		"ublkb3p1 is open in process 71 (dd)",
		"ublkb3p2 is part of dm-0 (vg-root)",
		"ublkb3p2 is swap space (/dev/ublkb3p2)",
	}
	if !slices.Equal(text, want) {
		t.Errorf("holders\n%s\nwant\n%s", strings.Join(text, "\n"), strings.Join(want, "\n"))
	}
	if _, err := s.holders("ublkb4"); !errors.Is(err, ErrNotFound) {
		t.Errorf("no disk: %v", err)
	}
}

func TestList(t *testing.T) {
	s := tree(t, map[string]string{
		"sys/class/ublk-char/ublkc11/dev": "", "sys/class/ublk-char/ublkc2/dev": "", "sys/class/ublk-char/other/dev": "",
	})
	if ids, err := s.list(); err != nil || !slices.Equal(ids, []int{2, 11}) {
		t.Errorf("list %v, %v", ids, err)
	}
	if ids, err := tree(t, map[string]string{"sys/x": ""}).list(); err != nil || len(ids) != 0 {
		t.Errorf("list without the driver: %v, %v", ids, err)
	}
}

func FuzzMountinfo(f *testing.F) {
	f.Add([]byte("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"))
	f.Add([]byte("1 2 3:4 / /a\\040b\\ rw - x \\777 -\n"))
	f.Add([]byte("1 2 99999999999:4 / / - - -"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range parseMountinfo(b) {
			if m.point == "" {
				t.Errorf("mount without a point out of %q", b)
			}
		}
	})
}
