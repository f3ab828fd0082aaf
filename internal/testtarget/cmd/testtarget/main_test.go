package main

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"iserd.org/iserd/iscsi"
	"iserd.org/iserd/iscsi/login"
	"iserd.org/iserd/iscsitcp"
)

// TestControl serves two units, logs in, and gives every command once.
func TestControl(t *testing.T) {
	in, commands := io.Pipe()
	answers, out := io.Pipe()
	ended := make(chan error, 1)
	file := filepath.Join(t.TempDir(), "unit")
	go func() {
		ended <- run([]string{
			"-control", "-listen", "127.0.0.1:0", "-unit", "size=1M,thin,space=512K", "-unit", "none",
			"-unit", "file=" + file + ",size=2M,block=4096,serial=abc",
		}, in, out, make(chan os.Signal))
	}()
	r := bufio.NewReader(answers)
	line := func() string {
		s, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(s)
	}
	first := strings.Fields(line())
	if len(first) != 5 || first[0] != "listening" {
		t.Fatalf("it says %q", first)
	}
	p, err := iscsitcp.Dial(t.Context(), first[2])
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	_, err = iscsi.Login(t.Context(), p, login.Config{
		InitiatorName: "iqn.2003-01.org.example:me", TargetName: first[4], SessionType: login.Normal, Transport: login.TCP, ISID: [6]byte{0x80}, CmdSN: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, c := range []struct{ command, want string }{
		{"sessions", "ok 1 now, 1 so far"},
		{"grow 0 3M", "ok"},
		{"map 1 size=1M", "ok"},
		{"unmap 1", "ok"},
		{"serial 2 xyz", "ok"},
		{"alua 0 1 2", "ok"},
		{"attention 0 0x29 0", "ok"},
		{"fault 0 1 2 3 0x11 0", "ok"},
		{"faultless 0", "ok"},
		{"held 0", "ok 0"},
		{"async 1 0 0 10", "ok 1 connections"},
		{"ping 5", "ok 1 connections"},
		{"close-window", "ok 1 connections"},
		{"open-window", "ok 1 connections"},
		{"violations", "ok"},
		{"drop", "ok 1 connections"},
		{"grow 0", "error grow: usage"},
		{"grow 0 many", "error \"many\" is not a size"},
		{"grow 1 1M", "error there is no unit"},
		{"held x", "error \"x\" is not a number"},
		{"map 1 size=1M,colour=red", "error unit"},
		{"nothing", "error nothing: usage"},
	} {
		io.WriteString(commands, c.command+"\n")
		if got := line(); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", c.command, got, c.want)
		}
		used[strings.Fields(c.command)[0]] = true
	}
	io.WriteString(commands, "help\n")
	help := line()
	for v := range verbs {
		if !used[v] || !strings.Contains(help, v) {
			t.Errorf("%s is not tried, or not in %q", v, help)
		}
	}
	commands.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(file); err != nil || fi.Size() != 2<<20 {
		t.Errorf("the unit's file: %v, %v", fi, err)
	}
}
