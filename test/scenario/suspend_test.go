package scenario

import (
	"os"
	"testing"
)

// The host goes to sleep and wakes up five seconds later: all processes are frozen, with the data plane among them. The kernel's test of suspending goes no
// further than that (Documentation/power/basic-pm-debugging.rst), which leaves the network as it is.
func TestFaultSuspend(t *testing.T) {
	for _, k := range kinds[:2] {
		t.Run(k.name, func(t *testing.T) {
			guestOnly(t)
			g := newTarget(t, k, twoUnits(t, 16*mib, 16*mib))
			g.login(t, quick...)
			const test = "/sys/power/pm_test"
			if err := os.WriteFile(test, []byte("freezer"), 0); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.WriteFile(test, []byte("none"), 0); err != nil {
					t.Error(err)
				}
			})
			g.ride(t, func(t *testing.T) {
				if err := os.WriteFile("/sys/power/state", []byte("freeze"), 0); err != nil {
					t.Error(err)
				}
			}, slowly)
			g.logout(t)
		})
	}
}
