// Package test runs every test of the project where it can run, and reports all of them as one.
//
// Most tests run anywhere. Those that need ublk, RDMA or a kernel target say so by calling require.Need, and run in the guest of package
// internal/testbed; the scenarios in test/scenario all do. [Discover] finds out which is which by reading the sources, so a new test of
// either sort is picked up without a list to keep.
//
// [TestGuest] builds the guest's tests on the host, boots one guest, runs them there, and mirrors each as a subtest of its own with its
// output, time and verdict. Command test/run runs both sorts and prints one stream of events for a runner to summarise. Environment:
//
//	GUEST=1                  boot a guest; otherwise TestGuest skips, as a plain go test should not take minutes
//	GUEST_RUN=ublk:TestRead  only packages whose path ends in the part before the colon, only tests that match the expression after it;
//	                         either may be empty
//	SOAK=15                  scenarios that soak do so many rounds (make soak), and the time limits are lifted accordingly
//	GUEST_CONSOLE=1          show the guest's console on standard error
//	REQUIRE=guest,...        a guest that cannot be had, and a test that skips inside it, fail
package test
