// Package records keeps what the control plane must remember over a restart of the machine: node records, the ISIDs of session groups and the
// initiator's name. Package daemon is its only user.
//
//	STATE/nodes/n<16 hex>.json   one record each: target, portal, interface; what discovery found; what the user set
//	STATE/isid.json              the random part of our ISIDs and the block of qualifiers of each session group
//	/etc/iserd/initiatorname     our name, made once (in STATE when /etc cannot be written)
//
// Every file is replaced by rename after its content and before its directory are on the disk (fsync), so that a crash or a full disk
// leaves the old content. A name that came from a target never becomes part of a path: files are named after a hash.
//
// A record that cannot be read is reported, left where it is, and the others load. An isid.json that cannot be read is an error for every login: a
// made-up ISID would not terminate the tasks of the old session at the target (RFC 7143 section 6.3.5), and a write from before a
// crash could then land after a newer one.
//
// The caller holds a lock on the state directory (one daemon per machine); the types here are safe for concurrent use within a process.
package records
