// Package dbusfiles holds what is installed for D-Bus: the interfaces as introspection XML, one file each (/usr/share/dbus-1/interfaces), and the
// bus policy (/usr/share/dbus-1/system.d). The interface files are what the daemon answers to Introspect, so the two cannot differ; a test
// in daemon/bus compares them with the methods and properties that are really there.
package dbusfiles

import "embed"

// Files are interfaces/*.xml and org.iserd.Iser1.conf.
//
//go:embed interfaces/*.xml org.iserd.Iser1.conf
var Files embed.FS
