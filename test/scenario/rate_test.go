package scenario

import (
	"slices"
	"testing"

	"iserd.org/iserd/internal/testbed/targets"
)

// What is left of the rate of 4 KiB reads, eight at a time, when one packet of a thousand is lost, with the acknowledgement time-out that hardware has. No
// session ends: the transport sends again. The rate decides nothing; the log has it.
func TestLossyRate(t *testing.T) {
	if err := control.stop(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ISERD_ACK_TIMEOUT", "16ms")
	t.Cleanup(func() { // the next test starts one as it comes
		if err := control.stop(); err != nil {
			t.Error(err)
		}
	})
	g := linked(t, kinds[0], []targets.Unit{{Kind: targets.Ramdisk, Size: 64 * mib}})
	g.login(t)
	dev := devices(t, g.name)[0]
	rate := func() float64 {
		o := fio(t, []fioJob{{name: "rate", file: dev.Path, options: []string{
			"rw=randread", "bs=4k", "iodepth=8", "ioengine=io_uring", "direct=1", "time_based=1", "runtime=3", "ramp_time=1",
		}}})
		return o.Jobs[0].Read.IOPS
	}
	logins, err := g.lio.Logins()
	if err != nil {
		t.Fatal(err)
	}
	var kept []float64
	for range rounds(t, 1) {
		clean := rate()
		disturb(t, "loss", "0.1%")
		lossy := rate()
		lost := dropped(t)
		undisturb(t)
		if lost == 0 {
			t.Error("no packet was lost")
		}
		kept = append(kept, lossy/clean)
		t.Logf("%.0f reads a second, %.0f with 0.1 %% of the packets lost (%d of them): %.0f %%", clean, lossy, lost, 100*lossy/clean)
	}
	slices.Sort(kept)
	t.Logf("median of %d: %.0f %%", len(kept), 100*kept[len(kept)/2])
	if n, err := g.lio.Logins(); err != nil || n != logins {
		t.Errorf("%d logins before, %d after, %v", logins, n, err)
	}
	if d := devices(t, g.name)[0]; d.Stats.Errors != 0 {
		t.Errorf("%d errors", d.Stats.Errors)
	}
	g.logout(t)
}
