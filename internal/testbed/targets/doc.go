// Package targets sets up real iSCSI targets to test against: [LIO], the kernel's own, through configfs, and [TGTD], the tgt project's
// daemon, as a child process. It runs where the targets run: inside the test guest, and for tgtd over TCP on any host.
//
// A target lists its logical units by number: LIO's first is LUN 0, tgtd's first is LUN 1, since its LUN 0 is a controller. [Unit] says
// what lies behind one, and the target's LUNs method which numbers it has.
//
// # Traps
//
//   - LIO with iSER on a portal serves TCP on the same address and port as well; SendTargets lists only portals of the transport asked.
//   - tgtd serves iSER on port 3260 of every address and nowhere else: its "--iser port=" is refused (a stale errno, tgt 1.0.85 to
//     1.0.97). It takes that port even when only its TCP target is wanted, if it is free. So at one time either one tgtd or LIO has iSER
//     on port 3260; give the other another port.
//   - tgtd over iSER admits only initiators that are named: the address list alone is not enough (login ends with 02/03).
//   - tgtd does not redirect an initiator whose own address is the one it would be sent to.
//   - tgtd ends with a segmentation fault when an iSER target is deleted, so [TGTD.Close] kills it instead of asking.
//   - Removing a LIO target whose sessions hang waits in the kernel. Closing sessions first is the test's business.
package targets
