// Package testtarget is an iSCSI target for tests: over TCP on the host, over iSER in the guest, backed by memory or files, and able to
// misbehave on demand.
//
// It stands outside the product: tests start one with [Start], log in to it as to any target and close it; cmd/testtarget is the same as a
// program. It reads and writes headers with its own few lines ([PDU]) and not with iscsi/pdu or iser, so that a misreading of the RFC in one
// of them shows as a failure and does not cancel out. For the same reason it judges: what an initiator does wrong (CmdSN out of the window,
// Data-Out out of order, a bit that has no place) is noted in [Target.Violations], which a test expects empty. The target itself is judged
// by libiscsi and by the kernel's initiator; see below.
//
// # Where things are
//
//	target.go     Config, Start, units by LUN, sessions         unit.go       a unit: size, identity, faults, attentions, access states
//	conn.go       one connection: numbers, window, dispatch     store.go      its content: memory or a file
//	login.go      login, redirection; text.go keys; chap.go     scsi.go       the table of commands, and what holds one up
//	control.go    NOP, text, task management, async, Reject     primary.go, inquiry.go, block.go, reserve.go  the commands
//	task.go       a command from its PDU to its response        misbehave.go  rules and actions that spoil PDUs
//	tcp.go, iser.go  how PDUs and data move                     park.go       commands that are held back
//
// # What it does
//
// Login through all stages with keys answered the way LIO does, in several PDUs where the answer is long; CHAP with MD5, SHA-1, SHA-256 and
// SHA3-256, one way and mutual; redirection; discovery sessions and SendTargets; any number of sessions; session reinstatement; Data-In in
// several PDUs with status in the last or in a response of its own; immediate data, unsolicited data and R2T, several at once; NOP both
// ways; task management; logout; header and data digests. Over iSER data moves by RDMA Read and Write, and immediate data is taken.
//
// Units have any size, blocks of 512 or 4096 bytes, may be read-only or thin with bounded space, and know the commands of SPC and SBC that
// the tables in primary.go, block.go and reserve.go list: persistent reservations, UNMAP, WRITE SAME, COMPARE AND WRITE and target port
// groups among them.
//
// # How it is made to misbehave
//
//   - [Target.Misbehave] applies an [Action] to PDUs that a [When] picks: wrong numbers and tags, wrong lengths, bad digests, PDUs twice, never
//     or cut, garbage, Rejects, login statuses, other answers to keys, a closed connection. An action is a function; tests write their own.
//   - [Target.Park] holds commands back (lost, late, in another order), [Target.Slow] delays them, [Target.Hold] holds PDUs of the target.
//   - [Unit.FaultNext] and [Unit.Fault] answer commands with any status and sense data; [Unit.Attention] raises a unit attention.
//   - [Unit.Grow], [Unit.SetSerial], [Unit.SetALUA], [Target.Map], [Target.Unmap] change what there is, with the unit attention that tells it.
//   - [Conn.Async], [Conn.Ping], [Conn.Reject], [Conn.CloseWindow], [Conn.Reset], [Conn.Write], [Conn.WriteBytes] act on one connection.
//   - [Hooks] see every PDU of all connections after the rules.
//
// # What iscsi-test-cu says
//
// TestSuite runs libiscsi's iscsi-test-cu (230 tests in version 1.19) on units of 512 and 4096 byte blocks, thin, read-only, with two paths. It
// passes but for these:
//
//   - WriteSame10.UnmapUntilEnd unmaps by a block of 0xff and expects to read zeros. Where unmapped blocks read as zero, only a block of zeros
//     may be unmapped instead of written.
//   - iSCSIdatasn.iSCSIDataSnInvalid: in one of its four cases libiscsi has logged in again and sends the data as immediate data, so that the
//     Data-Out with the wrong DataSN is never sent. Without immediate data it passes.
//   - GetLBAStatus.UnmapSingle, where a physical block has several logical ones: it asks at one block and expects an answer that begins at a
//     later one. With one logical block to a physical one it passes.
//
// Not offered, so that their tests skip: ORWRITE, WRITE ATOMIC, SANITIZE, EXTENDED COPY and RECEIVE COPY RESULTS, READ DEFECT DATA, PREVENT ALLOW MEDIUM
// REMOVAL; protection information. libiscsi itself does not let StatSN wrap: give it a [Config.StatSN] that is low.
//
// # Threads
//
// One goroutine per connection, which runs rules and hooks too; over RDMA a second one owns the completion queue. Methods of Target, Unit,
// Park and Conn may be called from anywhere, rules and hooks included, but for Target.Close. Sources: RFC 7143, RFC 7145 (sections are named where a rule is
// applied), SPC-4, SBC-3, SAM-5; drivers/target/iscsi of Linux 7.2 for what LIO answers.
package testtarget
