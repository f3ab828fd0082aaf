package scenario

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"iserd.org/iserd/internal/testbed/targets"
)

// initiator is who logs in to a target for a comparison.
type initiator struct {
	name string
	// login returns the block device of the target's only unit. patience is for how long requests wait, and may be "" for what is usual.
	login  func(t *testing.T, g *target, patience string) string
	logout func(t *testing.T, g *target)
	kill   func(t *testing.T) // ends all of the initiator that is a process, and starts it again
}

// iscsid ends open-iscsi's daemon.
var iscsid func()

var initiators = []initiator{
	{
		name: "iserd",
		login: func(t *testing.T, g *target, patience string) string {
			var settings []string
			if patience != "" {
				settings = append(settings, "replacement_timeout="+patience)
			}
			g.login(t, settings...)
			return devices(t, g.name)[g.luns[0]].Path
		},
		logout: func(t *testing.T, g *target) { g.logout(t) },
		kill: func(t *testing.T) {
			old := status(t).DataPlane.PID
			control.kill(t)
			if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			control.need(t)
		},
	},
	{
		name: "open-iscsi",
		login: func(t *testing.T, g *target, patience string) string {
			iscsid = openISCSI(t, initiatorName(t)) // which the targets let in
			record := []string{"-m", "node", "-T", g.name, "-p", targets.ParsePortal(g.portal, false).Addr.String()}
			iface := "default"
			if g.transport == "iser" {
				iface = "iser"
			}
			must(t, "iscsiadm", append(record, "-I", iface, "-o", "new")...)
			if patience != "" {
				must(t, "iscsiadm", append(record, "-o", "update", "-n", "node.session.timeo.replacement_timeout", "-v", patience)...)
			}
			must(t, "iscsiadm", append(record, "-I", iface, "--login")...)
			path := ""
			waitFor(t, "the disk is there", 30*time.Second, func() error {
				found, err := filepath.Glob(fmt.Sprintf("/sys/class/iscsi_session/session*/device/target*/*:%d/block/*", g.luns[0]))
				if err != nil || len(found) != 1 {
					return fmt.Errorf("%v, %v", found, err)
				}
				path = "/dev/" + filepath.Base(found[0])
				f, err := os.Open(path)
				if err == nil {
					f.Close()
				}
				return err
			})
			return path
		},
		logout: func(t *testing.T, g *target) {
			waitFor(t, "the logout", 30*time.Second, func() error { // an iscsid that was just started refuses at first
				if r := run(t, "iscsiadm", "-m", "node", "-T", g.name, "-u"); r.code != 0 {
					return fmt.Errorf("status %d: %s", r.code, r.stderr)
				}
				return nil
			})
			must(t, "iscsiadm", "-m", "node", "-T", g.name, "-o", "delete")
		},
		kill: func(t *testing.T) {
			iscsid()
			iscsid = openISCSI(t, initiatorName(t))
		},
	},
}

// disk is a device under load: somebody reads or writes a block every few milliseconds, and how long that took is kept.
type disk struct {
	device *os.File
	stop   chan struct{}
	ended  sync.WaitGroup

	mu   sync.Mutex // guards what follows
	done []time.Time
	errs []error
}

func watchDisk(t *testing.T, path string) *disk {
	t.Helper()
	d := &disk{device: openDirect(t, path), stop: make(chan struct{})}
	for i := range 4 {
		block := newBlock()
		do := d.device.ReadAt
		if i%2 == 1 {
			do = d.device.WriteAt
		}
		d.ended.Go(func() {
			for {
				select {
				case <-d.stop:
					return
				case <-time.After(5 * time.Millisecond): // the rate, which is low: this is about time, and CPU is scarce
				}
				_, err := do(block, int64(i)*blockSize)
				d.mu.Lock()
				if err == nil {
					d.done = append(d.done, time.Now())
				} else {
					d.errs = append(d.errs, err)
				}
				d.mu.Unlock()
			}
		})
	}
	d.after(t, time.Now())
	return d
}

// after waits until several requests were completed after a moment, and returns when the first was.
func (d *disk) after(t *testing.T, from time.Time) (at time.Time) {
	t.Helper()
	waitFor(t, "requests are completed", 3*time.Minute, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		i := slices.IndexFunc(d.done, func(x time.Time) bool { return x.After(from) })
		if i < 0 || len(d.done)-i < 16 {
			return errors.New("none yet")
		}
		at = d.done[i]
		return nil
	})
	return at
}

// pause is the longest time without a completion since a moment.
func (d *disk) pause(from time.Time) (longest time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := from
	for _, x := range d.done {
		if x.After(from) {
			longest, last = max(longest, x.Sub(last)), x
		}
	}
	return longest
}

// failures counts the requests that have failed, by error.
func (d *disk) failures() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	count := map[string]int{}
	for _, err := range d.errs {
		var errno syscall.Errno
		errors.As(err, &errno)
		count[errno.Error()]++
	}
	if len(count) == 0 {
		return "no errors"
	}
	var words []string
	for what, n := range count {
		words = append(words, fmt.Sprintf("%d times %s", n, what))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

func (d *disk) close() {
	close(d.stop)
	d.ended.Wait()
	_ = d.device.Close()
}

// comparisons are faults that both initiators can have. do makes one and returns when its cause had gone.
var comparisons = []struct {
	name     string
	kinds    []kind
	link     bool
	patience string
	do       func(t *testing.T, g *target, who *initiator) (gone time.Time)
}{
	{"target away for 5 s", kinds[:2], false, "", func(t *testing.T, g *target, _ *initiator) time.Time {
		g.enable(t, false)
		time.Sleep(5 * time.Second)
		g.enable(t, true)
		return time.Now()
	}},
	{"target away for 10 s with a patience of 5 s", kinds[:2], false, "5", func(t *testing.T, g *target, _ *initiator) time.Time {
		g.enable(t, false)
		time.Sleep(10 * time.Second)
		g.enable(t, true)
		return time.Now()
	}},
	{"cable pulled for 10 s", kinds[:2], true, "", func(t *testing.T, _ *target, _ *initiator) time.Time {
		unplug(t)
		time.Sleep(10 * time.Second)
		plug(t)
		return time.Now()
	}},
	{"tgtd killed and started again 2 s later", kinds[2:], false, "", func(t *testing.T, g *target, _ *initiator) time.Time {
		if err := g.tgtd.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		g.startTGTD(t)
		return time.Now()
	}},
	{"tgtd stopped for 15 s", kinds[2:], false, "", func(t *testing.T, g *target, _ *initiator) time.Time {
		g.pause(t, true)
		time.Sleep(15 * time.Second)
		g.pause(t, false)
		return time.Now()
	}},
	{"all processes of the initiator killed", kinds[:2], false, "", func(t *testing.T, _ *target, who *initiator) time.Time {
		who.kill(t)
		return time.Now()
	}},
}

// What users of a device see of the same fault with us and with the kernel's initiator and open-iscsi, for docs/reliability.md: how long nothing is
// completed, for how long of that the cause is gone already, and what fails. The figures decide nothing.
func TestPeer(t *testing.T) {
	guestOnly(t)
	list := comparisons
	if rounds(t, 0) == 0 { // all of them take minutes: make soak SOAK=1 SOAKED='scenario:^TestPeer$'
		list = slices.Clone(comparisons[:1])
		list[0].kinds = kinds[1:2]
	}
	for _, c := range list {
		for _, k := range c.kinds {
			for _, who := range initiators {
				t.Run(c.name+"/"+k.name+"/"+who.name, func(t *testing.T) {
					var g *target
					units := []targets.Unit{{Kind: targets.Ramdisk, Size: 16 * mib}}
					if c.link {
						g = linked(t, k, units)
					} else {
						g = newTarget(t, k, units)
					}
					path := who.login(t, g, c.patience)
					defer who.logout(t, g)
					d := watchDisk(t, path)
					defer d.close()
					begin := time.Now()
					gone := c.do(t, g, &who)
					back := d.after(t, gone)
					pause := d.pause(begin)
					t.Logf("Compared | %s | %s | %s | %.2f s | %.2f s | %s |", c.name, k.name, who.name, pause.Seconds(), back.Sub(gone).Seconds(), d.failures())
				})
			}
		}
	}
}
