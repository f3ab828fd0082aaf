// Package dataplane puts the data path together: reactors, the sessions and the block devices on them. It is all of the process iserd-io.
//
//	control plane --ipc--> Plane --messages--> Reactor (one per CPU, one locked OS thread)
//	                                              ring: ublk queues, sockets, completion channels, messages
//	                                              completion queues, one per RDMA adapter
//	                                              buffer pool, registered once with each adapter
//	                                              one queue of every device, one session of every group
//
// # Threads and owners
//
// A reactor owns what it holds; nothing on it is locked and nothing is shared. Login, recovery, discovery of units and the answers to the
// control plane run on ordinary goroutines, and reach a reactor only through [Reactor.Do]. They may come to a standstill without
// delaying an I/O.
//
// # Failure
//
// A lost session is replaced by one with the same ISID: the login reinstates the session, so the target ends the old tasks before the held
// requests are sent again. What no reinstatement ends is ended by a reset of the unit (fence.go). A target may have several portals: sessions go from one to
// another (route.go), or there is one by each, of which requests choose (fan.go, access.go). The control plane may vanish at any time; nothing here depends
// on it.
package dataplane
