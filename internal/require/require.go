// Package require decides what a test does when its environment lacks something.
//
// A test probes for what it needs and calls [Need] with the probe's error. Without the feature the test skips and says why; when the
// environment variable REQUIRE names the feature (a comma separated list, as in REQUIRE=ublk,rdma,root), the skip becomes a failure, so
// that a laboratory or a continuous integration run cannot pass empty.
package require

import (
	"os"
	"strings"
	"testing"
)

// Need skips t because feature is missing, or fails it when REQUIRE names feature. A nil err means the feature is there.
func Need(t testing.TB, feature string, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if Demanded(feature) {
		t.Fatalf("%s is required (REQUIRE=%s): %v", feature, os.Getenv("REQUIRE"), err)
	}
	t.Skipf("needs %s: %v", feature, err)
}

// Demanded reports whether REQUIRE names feature.
func Demanded(feature string) bool {
	for _, f := range strings.Split(os.Getenv("REQUIRE"), ",") {
		if strings.TrimSpace(f) == feature {
			return true
		}
	}
	return false
}
