// Package iscsitcp is the Datamover over a TCP socket: framing, digests, R2T, Data-In and Data-Out of RFC 7143.
//
// It stands between package iscsi, whose [iserd.org/iserd/iscsi.Datamover] and Port it implements, and a socket. A connection has two
// lives. As a [Port] it belongs to an ordinary goroutine, which logs in or asks for targets and may block. [Port.Attach] takes the
// descriptor away from the Go runtime and makes it a [Conn], which belongs to a reactor: what has to wait for the socket is an entry of the
// reactor's io_uring.
//
//	Session --SendControl--> commands --+                                  one sendmsg for many PDUs
//	            R2T ---------> bursts --+--> message: headers | iovecs ---> socket
//	Session <-ControlNotify-- parse <-- buffer  <------------------------- one RECV, reads ahead
//	            task memory <---------- Data-In <------------------------- RECV straight into it
//
// # What the session does not see
//
// Data-In lands in the task's memory, R2T is answered here, and a status that rides on the last Data-In goes up as the SCSI Response it
// stands for. Before a SCSI Response with GOOD status goes up, the bytes are counted: a read that did not receive what the residual leaves,
// or a write whose data was not asked for, is a protocol error and never a success.
//
// # Pages
//
// The data of a task may be pages that are not mapped in this process but stand in the ring's table of registered buffers (iscsi.Pages):
//
//	READ   RECV of the header alone, RECV of the data segment into the pages
//	WRITE  header with MSG_MORE, SEND of the data segment from the pages
//
// Nobody reads ahead then, so each PDU takes an operation more. Limits says where that pays: for segments of 32 KiB and more, and without a data
// digest, which takes a processor that sees the data. It needs Linux 7.2.
//
// # Ownership
//
// Everything a Conn needs is made by Attach and NoticeKeyValues; no I/O allocates or locks. What the kernel reads or writes lies outside
// the Go heap: one mapping per connection, and the data of tasks. A task's Data is referenced by the entries of the ring and by
// queued PDUs until its response; when a response comes while that is still so, the target broke the protocol and the connection ends. The
// account is exact because sends are not MSG_WAITALL: a byte that has left the process has been reported before any answer to it, by the system
// call or by a completion.
//
// # Traps
//
//   - A socket that Go has used is non-blocking, which tells io_uring to give up where it should wait: Attach makes it blocking again.
//   - shutdown(2) alone does not prove that an operation has ended; memory is given back after its completion only.
//   - A Login Response is read to its last byte and not further: what follows it belongs to the Conn.
//
// Sources: RFC 7143 sections 4.2 (numbering), 11 (PDUs), 13 (keys); io_uring_enter(2); Linux 6.18 io_uring/net.c for what RECV and
// SENDMSG promise.
package iscsitcp
