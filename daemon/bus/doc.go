// Package bus is the daemon's door to D-Bus: org.iserd.Iser1 on the system bus.
//
//	/org/iserd/Iser1                org.freedesktop.DBus.ObjectManager
//	/org/iserd/Iser1/Manager        org.iserd.Iser1.Manager
//	/org/iserd/Iser1/node/ID        org.iserd.Iser1.Node       a stored record
//	/org/iserd/Iser1/session/N      org.iserd.Iser1.Session    a session group
//	/org/iserd/Iser1/device/N       org.iserd.Iser1.Device     /dev/ublkbN
//
// The interfaces are the XML files of packaging/dbus/interfaces. What the objects show is a snapshot of the service, made after each
// change and compared with the one before (tree.go): the differences become InterfacesAdded, InterfacesRemoved and PropertiesChanged. Methods
// call the service (methods.go) after asking who the caller is (auth.go).
//
// Traps: the bus may be absent, come later and go away at any time, and the daemon must not mind, so everything here hangs on one connection
// that is thrown away as a whole. Each call runs on a goroutine of its own, so order is not kept. A caller is judged by its bus
// name, never by a process id, which can be taken over by another program in between.
package bus
