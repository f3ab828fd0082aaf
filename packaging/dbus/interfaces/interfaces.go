// Package interfaces holds the D-Bus interfaces of iserd as introspection XML, one file each. The files are installed to
// /usr/share/dbus-1/interfaces and are what the daemon answers to Introspect, so they cannot differ; a test in daemon/bus compares
// them with the methods and properties that are really there.
package interfaces

import "embed"

// Files are the *.xml files.
//
//go:embed *.xml
var Files embed.FS
