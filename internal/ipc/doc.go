// Package ipc carries messages between the control plane (iserd) and the data plane (iserd-io) over a local SOCK_SEQPACKET socket.
//
// The data plane listens ([Serve]), the control plane connects ([Dial]). A request is answered by exactly one reply; the data plane sends events
// without being asked. The types of the messages are in messages.go. The rate is low (logins, attachments, state), so the form is
// JSON; block I/O never passes here.
//
// # Form on the socket
//
//	datagram   1 byte: 1 = more datagrams of this message follow, 0 = last one; then at most 32 KiB of the message
//	message    JSON envelope {v, id, method, body} request, {v, id, body|error} reply, {v, method, body} event, {v, cancel} withdrawal
//	limit      8 MiB for one message; descriptors (SCM_RIGHTS, at most 16) ride on the first datagram
//
// One sender at a time holds the socket, so the datagrams of a message are never mixed with those of another. A peer that breaks the form is cut off.
//
// # Who may connect
//
// The kernel tells the peer's user (SO_PEERCRED): root or the server's own user. There is one control client at a time; a new connection takes over and the
// older one is closed, so that a new control plane need not wait for the kernel to notice the death of the previous one.
//
// # Traps
//
//   - The context of a request ends when the caller withdraws it and when the connection is lost. Work that must not stop half-way
//     (closing a device) uses context.WithoutCancel; work that nobody would know about (a login) should stop and roll back.
//   - The socket file stays behind when a server is killed. Whether a server lives is decided by a lock on PATH.lock, never by the file.
//   - A client that does not read its events fast enough (1024 waiting) is closed rather than lied to: it connects again and reads the state.
package ipc
