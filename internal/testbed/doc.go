// Package testbed boots a guest that has everything the project stands on: a kernel with ublk, soft RoCE (rdma_rxe), the kernel's own
// iSER target (LIO) and a second target (tgtd). Tests and the demonstration run in it, so neither an RDMA adapter nor a particular host
// kernel is needed.
//
// # Pieces
//
//   - [InstallTools] puts the programs on the host that the rest needs. It starts no service there.
//   - [Prepare] finds the newest kernel of Debian's trixie-backports, builds the guest's root image, and keeps both in a cache folder
//     ($ISERD_CACHE, else /var/cache/iserd-testbed). Everything downloaded is checked against Debian's signature. Without a network the
//     cached pieces serve.
//   - [Bed.Boot] starts QEMU, with KVM where KVM really runs a guest, and waits until the agent in the guest (package guestinit) is ready.
//   - [Guest.Run] executes a command there and streams its output; one boot serves many commands.
//   - [Guest.Close] powers off and checks that the guest went down in order.
//
// Sub-package targets sets up LIO and tgtd from inside the guest; cmd/testbed is the same for a person at a keyboard.
//
// # Verdicts
//
// Silence is a failure. A guest that panics, dies, or answers nothing ends every running command with a [*GuestError] that holds the last
// lines of its console. Messages of the kernel about itself ("BUG:", "WARNING:", hung tasks) are collected: [Guest.Complaints].
//
// # The guest
//
// Debian 13 without systemd as process 1. veth0 has 10.0.0.1/24 and fd00::1/64 with an MTU of 4200, rxe0 sits on it, configfs is mounted,
// and the modules are loaded. [Guest.Upload] puts files there, programs into [Bin]. /host is a folder of the host ([Guest.Share]), for
// results: it is slow. The root drive is discarded at the end. There is no network outside the guest.
//
// # Traps
//
// The host's /dev/kvm may exist and still run no stock kernel, so KVM is tried by booting once, and the answer is remembered.
// QEMU dies with the harness (parent death signal), which holds only while the thread that started it lives: a goroutine stays locked
// to it for that long. Under emulation wall-clock figures mean nothing; [GuestConfig].Count makes guest time count instructions.
package testbed
