package scenario

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
)

// footprint is what the daemon holds: its own objects as it counts them, and what the kernel says of its two processes.
type footprint struct {
	plane       api.DataPlaneStatus
	sessions    int
	descriptors [2]int // of the control plane, of the data plane
	memory      [2]int // resident, bytes
}

// processes are those of the daemon.
func processes(t testing.TB) [2]int {
	t.Helper()
	s := status(t)
	return [2]int{s.PID, s.DataPlane.PID}
}

func footprintOf(t testing.TB, pids [2]int) footprint {
	t.Helper()
	s := status(t)
	f := footprint{plane: s.DataPlane, sessions: s.Sessions}
	for i, pid := range pids {
		f.descriptors[i], f.memory[i] = countDescriptors(t, pid), resident(t, pid)
	}
	return f
}

// resident is the size of the memory that a process has in use, bytes.
func resident(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatalf("process %d: %q", pid, line)
			}
			return n << 10
		}
	}
	t.Fatalf("process %d has no VmRSS", pid)
	return 0
}

// Memory is a matter of the garbage collector's moments, so it may be this much more in the end than after the first third of the logins.
const memoryGrowth = 4 * mib

// Login and logout again and again, over both transports in turn, leave nothing behind and need nothing more: no session, queue pair, registration or
// descriptor of either process, and no memory beyond what the first of them have taken up.
func TestManyLogins(t *testing.T) {
	guestOnly(t)
	n := 30
	if soak := rounds(t, 0); soak > 0 {
		n = 100 * soak
	}
	var list []*target
	for i, k := range kinds[:2] {
		g := &target{name: newName(t), transport: k.transport, kind: k, units: twoUnits(t, 16*mib, 16*mib)}
		g.lioAt(t, fmt.Sprintf("10.0.0.1:%d", 3266+i), k.transport == "iser") // LIO mixes up targets that are at one address over different transports
		g.login(t)
		g.logout(t)
		list = append(list, g)
	}
	pids := processes(t)
	var before footprint
	for i := range n {
		if i == n/3 {
			before = footprintOf(t, pids)
		}
		g := list[i%len(list)]
		iserctl(t, "login", g.name)
		// Something moves, so that buffers are used.
		for _, d := range devices(t, g.name) {
			must(t, "dd", "if="+d.Path, "of=/dev/null", "bs=1M", "count=4", "iflag=direct", "status=none")
		}
		g.logout(t)
	}
	var after footprint
	waitFor(t, "nothing is left", 10*time.Second, func() error {
		after = footprintOf(t, pids)
		if !sameObjects(before.plane, after.plane) || before.sessions != after.sessions {
			return fmt.Errorf("before %+v\nafter  %+v", before, after)
		}
		for i, d := range after.descriptors {
			if d > before.descriptors[i] {
				return fmt.Errorf("process %d had %d descriptors and has %d", pids[i], before.descriptors[i], d)
			}
		}
		return nil
	})
	if p := processes(t); p != pids {
		t.Errorf("processes %v, in the beginning %v", p, pids)
	}
	for i, m := range after.memory {
		grown := m - before.memory[i]
		if grown > memoryGrowth {
			t.Errorf("process %d had %d KiB of memory after %d logins and has %d KiB after %d", pids[i], before.memory[i]>>10, n/3, m>>10, n)
		}
	}
	t.Logf("%d logins; memory of control and data plane, KiB: %d and %d after a third, %d and %d in the end", n,
		before.memory[0]>>10, before.memory[1]>>10, after.memory[0]>>10, after.memory[1]>>10)
}
