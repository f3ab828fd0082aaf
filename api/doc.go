// Package api holds what the control plane and its callers agree on: the objects of the control API, its requests, the stable names of
// failures with the exit code that goes with each, and the grammar of target names and portals.
//
// The daemon serves these types over two doors, the local socket (JSON) and D-Bus, and package client and the command line read them.
// The data plane uses the same failure names in its answers. The package holds no state, opens nothing and imports only the standard
// library, so that every process of the project can share it.
//
// JSON form: one top-level list per noun beside "version", snake_case names, numbers as numbers, sizes in bytes, times in RFC 3339,
// lists always present. A field is only ever added within one version.
//
// Sources: RFC 7143 section 4.2.7 (iSCSI names) and RFC 3722 (their preparation); exit codes are those of open-iscsi's iscsiadm(8), so that scripts
// written for it keep their meaning.
package api
