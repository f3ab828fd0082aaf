// Package iscsi is the initiator's iSCSI layer: sessions, tasks, command numbering and the login exchange (RFC 7143).
//
// It stands between [iserd.org/iserd/lu], which turns block requests into SCSI commands, and a [Datamover], which moves PDUs and data:
// package iser over RDMA, package iscsitcp over a socket. The interface is the initiator half of the Datamover Architecture (RFC 5047),
// so nothing here knows verbs, sockets, R2T, Data-In or Data-Out.
//
//	lu --Task--> Session --PDU--> Datamover --> target
//	lu <--done-- Session <-PDU--- Datamover <-- target
//
// # Threads
//
// A [Session] and its Datamover have one owner: the reactor that drives them. Every method runs on the owner and none takes a lock or
// allocates while commands flow. Login runs before that on an ordinary goroutine through a [Port], one PDU at a time.
//
// # Scope
//
// One connection per session (MaxConnections=1) and error recovery level 0: a connection that breaks a rule is terminated, its tasks are
// handed back as lost, and whoever owns the session decides whether they may be sent again (only behind session reinstatement, RFC 7143
// section 6.3.5).
package iscsi
