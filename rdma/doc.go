// Package rdma is the verbs layer: connections by rdma_cm, queue pairs, completion queues and registered memory, through rdma-core's
// libibverbs and librdmacm. It is the only package with import "C"; no C type crosses its border and C never calls Go. Without cgo
// everything here returns [ErrNotSupported] and the rest of the project still builds and runs over TCP.
//
// Above it is iser, which knows what the messages mean; below it is the adapter. This package knows no PDU.
//
// # Objects
//
//	Resolve / Listener.Accept -> Conn -> Device (shared, one PD) -> MR
//	                              |        \-> CQ (one per reactor, with a completion channel)
//	                              \-> QP on one CQ, with one WCHandler
//
// A [Device] stands for one verbs context of this process. It is made when the first [Conn] resolves to it, and it closes, PD included,
// when the last Conn, CQ and MR on it is closed; the order of those closes does not matter, except that a CQ outlives its QPs.
//
// # Life of a connection
//
//	active:  Resolve -> CreateQP -> PostRecv, Flush -> Connect -> OnEvent ... -> Disconnect or Abort -> Poll until all is back -> Close
//	passive: Listen -> Accept -> CreateQP -> PostRecv, Flush -> Conn.Accept -> OnEvent ... (the same)
//
// Post receives before Connect or Accept: the peer may send as soon as it sees the connection.
//
// # One reactor, one CQ
//
// A CQ and the data path of every QP on it ([Conn.PostSend], [Conn.PostRecv], [CQ.Flush], [CQ.Poll], [CQ.Arm], [CQ.DrainEvents])
// belong to one goroutine, the CQ's owner. Posting appends to an array of C layout that lies outside the Go heap; Flush hands all arrays of
// all QPs to the adapter in one crossing into C, and Poll fetches a batch of completions in one crossing and gives them to the handlers.
// Nothing on that path allocates, and its only lock is one uncontended mutex per Flush. Control calls (Connect, Abort, Disconnect, Close)
// may come from any goroutine.
//
// The owner sleeps like this; Poll in step 3 closes the race between the last Poll and the notification:
//
//  1. Poll until it returns 0
//  2. Arm
//  3. Poll again; work found: go to 1
//  4. wait until FD is readable (poll request of an io_uring, poll(2), netpoller)
//  5. DrainEvents, go to 1
//
// # Completion routing
//
// The wr_id given to the adapter is 2 bits of operation, 14 bits of slot and the caller's 48 bits. The slot finds the handler in a table of
// the CQ. A slot is given out again only after its QP was destroyed and a later poll found the CQ empty, and the QP number must match as
// well: a completion of a destroyed QP reaches no handler, and never the wrong one. (rxe leaves completions of a destroyed QP in the CQ;
// mlx5 removes them.)
//
// # Traps
//
//   - Memory named by a posted WR belongs to the adapter until its completion was polled or its QP was destroyed. Completion of a send says
//     nothing about RDMA Writes of the peer: those stop when the QP is destroyed or in the error state, or the MR is closed.
//   - Registered memory must be outside the Go heap (internal/mempool): the adapter writes to it behind the collector's back.
//   - An unsignalled send that succeeds has no completion, yet holds its place in the queue until a later signalled one completes.
//   - The completion order of receives is the order of posting; a send and the receive of its answer may complete in either order.
//   - On RoCE the ACK time-out is chosen when the route is resolved and the default of 0.54 s makes each lost packet a stall: set
//     [ResolveConfig.ACKTimeout], which reaches the peer's QP too, though not below the ACK delay that the adapter claims to need itself
//     (rxe: 2^15, 134 ms).
//   - On InfiniBand and RoCE the private data of a connection reply is delivered at its full field length, filled with zeros: its length
//     says nothing about what the peer wrote.
//   - Locked memory counts against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK; registration then fails with ENOMEM, or with EPERM if the limit is 0.
//
// Sources: rdma-core's manual pages (rdma_cm(7), ibv_post_send(3), ibv_poll_cq(3), ibv_get_cq_event(3)), include/infiniband/verbs.h,
// librdmacm/cma.c; the kernel's drivers/infiniband/core/{cma,ucma}.c; the InfiniBand Architecture Specification for states and statuses.
package rdma
