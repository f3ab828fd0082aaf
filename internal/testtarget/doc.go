// Package testtarget is a small iSCSI target for tests: in this process, over TCP on a loopback address, backed by memory, and able to
// misbehave on demand.
//
// It stands outside the product: tests of iscsitcp, discovery, dataplane and daemon start one with [Start], log in to it as to any
// target and close it. It reads and writes headers with its own few lines ([PDU]) and not with iscsi/pdu, so that a misreading of the
// RFC in one of them shows as a failure and does not cancel out. For the same reason it judges: what an initiator does wrong
// (CmdSN out of the window, Data-Out out of order, a bit that has no place) is noted in [Target.Violations], which a test expects empty.
//
// # What it does
//
// Login through all stages with keys answered the way LIO does, CHAP with MD5, SHA-1, SHA-256 (one way and mutual), redirection;
// discovery sessions and SendTargets, in several PDUs where the answer is long; any number of sessions; session reinstatement; INQUIRY
// with the vital product data pages 00, 80, 83, B0, B1, REPORT LUNS, READ CAPACITY (10) and (16), MODE SENSE (6) and (10),
// TEST UNIT READY, REQUEST SENSE, READ and WRITE (10) and (16), SYNCHRONIZE CACHE; Data-In in several PDUs with status in the last or in a response of
// its own; immediate data, unsolicited data and R2T, several at once; NOP both ways; task management that says "function complete";
// logout; header and data digests.
//
// # How it is made to misbehave
//
// [Hooks] see every PDU of a connection, before the target handles what came and before it writes what it wants to send. A hook may
// alter the PDU, drop it, block on a channel to delay it, write other PDUs or raw bytes before it ([Conn.Write], [Conn.WriteBytes]), or
// close the connection. [Unit.Fault] answers single commands with a status of the test's choice.
//
// # Threads
//
// One goroutine per connection, which runs the hooks too. Conn.Write and Conn.Close may be called from anywhere.
//
// Sources: RFC 7143 (sections are named where a rule is applied), SPC-4, SBC-3; drivers/target/iscsi/iscsi_target_nego.c and
// iscsi_target_parameters.c of Linux 7.2 for what LIO answers.
package testtarget
