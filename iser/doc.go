// Package iser is the Datamover over RDMA: iSCSI Extensions for RDMA (RFC 7145).
//
// It stands between package iscsi, whose [iserd.org/iserd/iscsi.Datamover] it implements, and package rdma. A SCSI Command becomes one
// Send: the iSER header with the STag and base offset of the task's memory, then the BHS. The target moves the data itself, by RDMA
// Write for a SCSI Read and by RDMA Read for a SCSI Write, and answers with one Send. R2T, Data-In and Data-Out never appear.
//
// # Memory
//
// Task data lies in regions that a [Domain] registered once; nothing is registered per command, and the STag (the rkey) of a region is
// valid as long as the region is registered. Sends and receives use one buffer per connection, which the target cannot reach and data never
// uses up, carved into slots:
//
//	+-------------------+------------------------+--------------------------+
//	| login send 76+8192| login receive 76+8192  | send slots x 128 ...     | receive slots x 592 ...
//	+-------------------+------------------------+--------------------------+
//
// A slot belongs to the adapter from the post to the completion (receives) or to the answer of the target (sends: once it has
// answered, the Send has been delivered and a retransmission would be recognised as a duplicate by its sequence number).
//
// # What the three targets in the field agree on
//
// InitialR2T=Yes, and of immediate data all or nothing, so that an advertised base offset is the start of the buffer: they disagree about
// it where some data has gone before. A SCSI Write of up to 8 KiB carries its data behind its headers if the target takes
// ImmediateData=Yes (isert does, tgt does not): one packet more, gathered by the adapter from where the data lies, in place of an RDMA Read
// that needs a round trip. Such a command advertises no Write STag. No Send with Invalidate (plain registered memory cannot be invalidated remotely). No Hello: login starts with the first
// PDU. At most 128 PDUs may wait for the target, because isert posts that many receives.
package iser
