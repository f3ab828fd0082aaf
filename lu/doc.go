// Package lu is the logical unit: it turns the block requests of a ublk queue into SCSI commands and their outcome into block results.
//
// It stands between package ublk, whose [iserd.org/iserd/ublk.Handler] its [Queue] implements, and package iscsi, to whose session it submits
// tasks. [Probe] asks a target what its units are before a device is made of them.
//
// # Ownership
//
// A Queue and its requests belong to one reactor. The memory of a tag (task, command, sense) is made when the queue is; a request in
// steady state allocates nothing. Data buffers come from [Memory], which all queues of a reactor share.
//
// # Durability
//
// A request is completed only after the target has answered. A FLUSH becomes SYNCHRONIZE CACHE of the whole unit, a write with FUA sets
// the FUA bit. A short transfer is never reported as success: either every byte moved, or the request fails.
package lu
