package scenario

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/testbed/targets"
)

// mapped is a device of dm-multipath above devices of the daemon.
type mapped struct {
	name, path string
	numbers    []string // major:minor of each path
}

// twoWays makes two targets with one unit, logs in to both, and puts dm-multipath above their devices, which uses both in turn.
func twoWays(t *testing.T, k kind, settings ...string) ([2]*target, mapped) {
	t.Helper()
	must(t, "modprobe", "-a", "dm-multipath", "dm-round-robin")
	var ways [2]*target
	ways[0] = newTarget(t, k, []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}})
	ways[1] = newTarget(t, k, nil)
	if err := ways[1].lio.AddShared(0, ways[0].lio); err != nil {
		t.Fatal(err)
	}
	ways[1].luns = ways[0].luns
	m := mapped{name: "ways"}
	table := ""
	for _, g := range ways {
		g.login(t, settings...)
		number, err := os.ReadFile("/sys/block/" + filepath.Base(devices(t, g.name)[0].Path) + "/dev")
		if err != nil {
			t.Fatal(err)
		}
		m.numbers = append(m.numbers, strings.TrimSpace(string(number)))
		table += " " + m.numbers[len(m.numbers)-1] + " 1" // request by request
	}
	must(t, "dmsetup", "create", m.name, "--noudevsync", "--table", fmt.Sprintf("0 %d multipath 0 0 1 1 round-robin 0 2 1%s", 16*mib/512, table))
	t.Cleanup(func() { run(t, "dmsetup", "remove", "--noudevsync", m.name) })
	m.path = filepath.Clean("/dev/" + filepath.Base(strings.TrimSpace(must(t, "dmsetup", "info", "-c", "--noheadings", "-o", "blkdevname", m.name))))
	return ways, m
}

// failed waits until dm-multipath takes a path for failed, or for good.
func (m mapped) failed(t testing.TB, way int, failed bool) {
	t.Helper()
	want := m.numbers[way] + " A"
	if failed {
		want = m.numbers[way] + " F"
	}
	waitFor(t, "the path's state", 30*time.Second, func() error {
		if s := must(t, "dmsetup", "status", m.name); !strings.Contains(s, want) {
			return fmt.Errorf("want %q: %s", want, s)
		}
		return nil
	})
}

// reinstate does what multipathd does when a path answers again.
func (m mapped) reinstate(t testing.TB, way int) {
	t.Helper()
	must(t, "dmsetup", "message", m.name, "0", "reinstate_path", m.numbers[way])
	m.failed(t, way, false)
}

// dm-multipath above two devices of one unit, which two targets offer. One is away: what it has not been sent fails at once and goes by the other, although
// requests would wait for ever.
func TestFaultMultipath(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			ways, m := twoWays(t, k, "replacement_timeout=forever")
			device := openDirect(t, m.path)
			b := newBlock()
			for range rounds(t, 1) {
				for away, g := range ways {
					g.enable(t, false)
					g.lost(t)
					for n := range int64(8) {
						copy(b, fmt.Sprintf("away %d, block %d", away, n))
						if _, err := device.WriteAt(b, n*blockSize); err != nil {
							t.Errorf("write block %d: %v", n, err)
						}
						got := newBlock()
						if _, err := device.ReadAt(got, n*blockSize); err != nil || string(got) != string(b) {
							t.Errorf("read block %d: %q, %v", n, got[:20], err)
						}
					}
					m.failed(t, away, true)
					g.enable(t, true)
					g.whole(t)
					m.reinstate(t, away)
				}
			}
			device.Close()
			must(t, "dmsetup", "remove", "--noudevsync", m.name)
			ways[1].logout(t)
			ways[0].logout(t)
		})
	}
}

// The same under load, with writes that have been sent, which wait for replacement_timeout before they go by the other path.
func TestFaultMultipathLoad(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			ways, m := twoWays(t, k, "replacement_timeout=1")
			above := map[uint16]api.Device{0: {Path: m.path}}
			for n := range rounds(t, 1) {
				away := n % len(ways)
				jobs := fioVerify("ways", m.path, 16*mib)
				for i := range jobs {
					jobs[i].options = append(jobs[i].options, "rate=512k,512k")
				}
				wait := startFio(t, jobs)
				progress(t, above)
				ways[away].enable(t, false)
				m.failed(t, away, true)
				progress(t, above)
				ways[away].enable(t, true)
				ways[away].whole(t)
				m.reinstate(t, away)
				progress(t, above)
				wait()
			}
			must(t, "dmsetup", "remove", "--noudevsync", m.name)
			ways[1].logout(t)
			ways[0].logout(t)
		})
	}
}
