package testbed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestConsole(t *testing.T) {
	var seen strings.Builder
	fatal := 0
	c := &console{copy: &seen, fatal: func(Complaint) { fatal++ }}
	c.runConsole(strings.NewReader("\x1b[2J\x1bcSeaBIOS\r\n\r\n[    1.0] fine\n[    2.0] WARNING: CPU: 0 PID: 1 at x.c:1\n" +
		"the test prints BUG: not the kernel's\n[    3.0] BUG: kernel NULL pointer dereference\n[    4.0] last"))
	if got := strings.Join(c.tail(2), "|"); got != "[    3.0] BUG: kernel NULL pointer dereference|[    4.0] last" {
		t.Errorf("tail: %q", got)
	}
	if !strings.HasPrefix(seen.String(), "SeaBIOS\n[    1.0] fine\n") {
		t.Errorf("copy: %q", seen.String())
	}
	cs := c.all()
	if len(cs) != 2 || cs[0].Fatal || !cs[1].Fatal || fatal != 1 {
		t.Errorf("complaints: %v, fatal %d", cs, fatal)
	}
	if fatalOf(cs) != "[    3.0] BUG: kernel NULL pointer dereference" {
		t.Errorf("fatalOf: %q", fatalOf(cs))
	}
	for i := range 3 * consoleLines {
		c.add(fmt.Sprint("line ", i))
	}
	if n := len(c.tail(1 << 30)); n > consoleLines {
		t.Errorf("%d lines are kept", n)
	}
	if !c.contains(fmt.Sprint("line ", 3*consoleLines-1)) || c.contains("SeaBIOS") {
		t.Error("contains")
	}
}

func TestComplain(t *testing.T) {
	for _, tc := range []struct {
		line         string
		found, fatal bool
	}{
		{"[   12.3] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [fio:300]", true, false},
		{"[   12.3] rcu: INFO: rcu_preempt self-detected stall on CPU", true, false},
		{"[   12.3] INFO: task kworker/u8:3:310 blocked for more than 120 seconds.", true, true},
		{"[   12.3] Kernel panic - not syncing: Fatal exception", true, true},
		{"[   12.3] Oops: Oops: 0000 [#1] SMP NOPTI", true, true},
		{"[   12.3] general protection fault, probably for non-canonical address", true, true},
		{"[   12.3] Out of memory: Killed process 12 (iserd-io)", true, true},
		{"[   12.3] ublk: some message", false, false},
		{"Kernel panic, says a user program", false, false},
	} {
		c, found := complain(tc.line)
		if found != tc.found || c.Fatal != tc.fatal {
			t.Errorf("%s: found %v, fatal %v", tc.line, found, c.Fatal)
		}
	}
}

func TestGuestArguments(t *testing.T) {
	g := &Guest{bed: &Bed{kernel: kernel{dir: "/k"}, image: "/a,b", kvm: true}, share: "/s"}
	usual := strings.Join(g.arguments(GuestConfig{}, "/i"), " ")
	for _, want := range []string{"-accel kvm", "-smp 2", "-m 4096", "file=/a,,b", "snapshot=on", "path=/s", "-cpu max "} {
		if !strings.Contains(usual, want) {
			t.Errorf("%q is not in %s", want, usual)
		}
	}
	count := strings.Join(g.arguments(GuestConfig{Count: true, CPUs: 4, MemoryMiB: 512, Append: "x=y"}, "/i"), " ")
	for _, want := range []string{"-accel tcg,thread=single -icount shift=0,sleep=off", "-smp 1", "-m 512", "-cpu max,-erms,-fsrm", "init_on_alloc=0", " x=y "} {
		if !strings.Contains(count, want) {
			t.Errorf("%q is not in %s", want, count)
		}
	}
}

func TestTexts(t *testing.T) {
	p := &Problem{What: "no network", Do: "plug it in", Err: fmt.Errorf("dial")}
	if p.Error() != "no network: dial; plug it in" {
		t.Error(p)
	}
	e := &GuestError{Reason: "it hung", Console: []string{"a", "b"}}
	if want := "guest: it hung; the last 2 lines of its console:\n\ta\n\tb"; e.Error() != want {
		t.Errorf("got %q", e.Error())
	}
	if got := lastLines([]byte("a\n\nb\nc\n"), 2); strings.Join(got, ",") != "b,c" {
		t.Errorf("lastLines: %q", got)
	}
}

func TestRemoveStale(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	mine := filepath.Join(os.TempDir(), fmt.Sprintf("%s%d-1", tempPrefix, os.Getpid()))
	stale := filepath.Join(os.TempDir(), tempPrefix+"2147483646-1")
	for _, d := range []string{mine, stale} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	removeStale()
	if _, err := os.Stat(mine); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(stale); err == nil {
		t.Error("a dead process's folder is left")
	}
}

func TestForeign(t *testing.T) {
	const oops = "its kernel failed: [  899.658085] Oops: general protection fault, probably for non-canonical address 0xf62c89d8fe3acbb1: 0000 [#1] SMP NOPTI"
	for _, c := range []struct {
		name, reason, console string
		want                  bool
	}{
		{"adapter", oops, "[  899.663] Call Trace:\n[  899.665601]  rxe_init_packet+0xa0/0x150 [rdma_rxe]", true},
		{"at once", oops, "[  899.665601] RIP: 0010:isert_put_cmd+0xa0/0x150 [ib_isert]", true},
		{"left on the stack", oops, "[  899.665991]  ? rxe_pool_get_index+0x4b/0x80 [rdma_rxe]\n[  899.7]  ublk_ch_uring_cmd+0x1/0x2 [ublk_drv]", false},
		{"only loaded", oops, "[  899.667741] Modules linked in: sg ib_isert rdma_rxe ublk_drv", false},
		{"elsewhere", oops, "[  899.665601]  ublk_ch_uring_cmd+0xa0/0x150 [ublk_drv]", false},
		{"emulator", "its kernel failed: [    2.1] Oops: int3: 0000 [#1] SMP NOPTI", "", true},
		{"a task hangs", "its kernel failed: [  512.1] INFO: task fio:77 blocked for more than 122 seconds.", "[ 512.2]  rxe_init_packet+0xa0/0x150 [rdma_rxe]", false},
		{"hangs", "it hung: no answer for 120 s", "[  899.665601]  rxe_init_packet+0xa0/0x150 [rdma_rxe]", false},
	} {
		e := &GuestError{Reason: c.reason, Console: strings.Split(c.console, "\n")}
		if got := e.Foreign(); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestUnlucky(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{&GuestError{Reason: "its kernel failed: [    2.194972] Oops: int3: 0000 [#1] SMP NOPTI"}, true},
		{fmt.Errorf("boot: %w", &GuestError{Reason: "its kernel failed: [    2.1] Oops: int3: 0000 [#1] SMP NOPTI"}), true},
		{&GuestError{Reason: "its kernel failed: [    2.194972] Oops: general protection fault"}, false},
		{errors.New("Oops: int3"), false},
	} {
		if got := unlucky(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}
