// Package scsi builds SCSI commands and reads what a logical unit answers: capacity, pages, sense data.
//
// Layer: under lu, iscsi users and the test target; no transport, standard library only.
//
//	var cdb [16]byte
//	scsi.Read16(&cdb, lba, blocks, false)
//	...
//	sense, err := scsi.ParseSense(senseBytes)
//	action := scsi.Classify(status, sense)
//
// CDB builders write all 16 bytes of an array that the caller owns, and allocate nothing. Parsers take the bytes that arrived, which may
// be fewer than the length fields in them claim; they return a value or an error, never both, and hold no reference to the input.
//
// Units: [LBA] and [Blocks] count logical blocks, whose size the unit reports; everything else is bytes and says so.
//
// Sources: SPC-4 and SBC-3 (T10 project drafts), SAM-5 for status codes and LUN formats; page and field names are theirs.
//
// Traps:
//   - A unit attention is not an error: the command was not executed and is to be sent again, after looking at [Action.Attention].
//   - A deferred error (response code 71h or 73h) belongs to an earlier write that was already reported as done.
//   - READ CAPACITY(10) answers FFFFFFFFh blocks for a large unit: ask with (16).
//   - Text of a target (vendor, serial number, designators) is reduced to printable ASCII here, before it can reach a log or a path.
package scsi
