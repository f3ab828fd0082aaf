package bus

import (
	"encoding/hex"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
)

const (
	busName = "org.iserd.Iser1"
	root    = dbus.ObjectPath("/org/iserd/Iser1")

	managerInterface = busName + ".Manager"
	nodeInterface    = busName + ".Node"
	sessionInterface = busName + ".Session"
	deviceInterface  = busName + ".Device"
	bufferInterface  = busName + ".Buffer"

	managerPath = root + "/Manager"
	noObject    = dbus.ObjectPath("/") // the null of object paths
)

type (
	properties map[string]dbus.Variant
	interfaces map[string]properties
	// tree is everything that the objects show.
	tree map[dbus.ObjectPath]interfaces
)

func nodePath(id string) dbus.ObjectPath { return root + dbus.ObjectPath("/node/"+id) }
func sessionPath(n int) dbus.ObjectPath {
	return root + dbus.ObjectPath("/session/"+strconv.Itoa(n))
}
func devicePath(n int) dbus.ObjectPath { return root + dbus.ObjectPath("/device/"+strconv.Itoa(n)) }
func bufferPath(n uint32) dbus.ObjectPath {
	return root + dbus.ObjectPath("/buffer/"+strconv.FormatUint(uint64(n), 10))
}

// nameAndText is the type (ss) of LastError.
type nameAndText struct{ Name, Text string }

// snapshot reads the service.
func snapshot(s *daemon.Service) tree {
	nodes, sessions, devices := s.Inventory()
	plane := s.DataPlane()
	v := func(x any) dbus.Variant { return dbus.MakeVariant(x) }
	t := tree{managerPath: {managerInterface: {
		"Version": v(s.Version()), "ApiVersion": v(uint32(api.Version)), "InitiatorName": v(s.InitiatorName()), "DataPlaneState": v(plane.State),
		"RdmaDevices": v(plane.RDMADevices),
	}}}
	stored := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		stored[n.ID] = true
	}
	byNode, bySession := make(map[string][]dbus.ObjectPath), make(map[int][]dbus.ObjectPath)
	for _, x := range sessions {
		byNode[x.Node] = append(byNode[x.Node], sessionPath(x.ID))
	}
	for _, d := range devices {
		bySession[d.SessionID] = append(bySession[d.SessionID], devicePath(d.UblkID))
		t[devicePath(d.UblkID)] = interfaces{deviceInterface: {
			"Session": v(sessionPath(d.SessionID)), "Lun": v(uint64(d.LUN)), "Path": v(d.Path), "UblkId": v(uint32(d.UblkID)), "Size": v(d.Size),
			"LogicalBlockSize": v(d.LogicalBlockSize), "PhysicalBlockSize": v(d.PhysicalBlockSize), "ReadOnly": v(d.ReadOnly), "Vendor": v(valid(d.Vendor)),
			"Product": v(valid(d.Product)), "Revision": v(valid(d.Revision)), "Serial": v(valid(d.Serial)), "Wwid": v(valid(d.WWID)), "State": v(d.State), "Reason": v(valid(d.Reason)),
			"Queues": v(uint16(d.Queues)), "QueueDepth": v(uint16(d.QueueDepth)), "Tiers": v(tierNames(d)),
		}}
	}
	for _, b := range s.BufferInventory() {
		registered := []dbus.ObjectPath{}
		for _, d := range b.Devices {
			if d.State == api.BufferRegistered {
				registered = append(registered, devicePath(d.UblkID))
			}
		}
		t[bufferPath(b.ID)] = interfaces{bufferInterface: {
			"Id": v(b.ID), "Kind": v(b.Kind), "State": v(b.State), "Length": v(b.Length), "PageSize": v(b.PageSize), "Uid": v(b.UID), "Owner": v(b.Owner),
			"Pid": v(uint32(b.PID)), "Since": v(uint64(max(0, b.Since.UnixMicro()))), "Devices": v(registered),
		}}
	}
	for _, x := range sessions {
		node := noObject
		if stored[x.Node] {
			node = nodePath(x.Node)
		}
		isid := []byte{}
		if len(x.Connections) > 0 {
			if b, err := hex.DecodeString(x.Connections[0].ISID); err == nil {
				isid = b
			}
		}
		var last nameAndText
		if x.LastError != nil {
			last = nameAndText{x.LastError.Name, valid(x.LastError.Text)}
		}
		t[sessionPath(x.ID)] = interfaces{sessionInterface: {
			"Id": v(uint32(x.ID)), "Node": v(node), "Target": v(x.Target), "Address": v(x.Address), "Port": v(x.Port), "Tpgt": v(uint16(x.TPGT)),
			"State": v(x.State), "Transport": v(x.Transport), "TransportReason": v(valid(x.TransportReason)), "Isid": v(isid),
			"Connections": v(uint32(len(x.Connections))), "Since": v(uint64(max(0, x.Since.UnixMicro()))), "LastError": v(last), "Devices": v(paths(bySession[x.ID])), "Units": v(units(x)),
		}}
	}
	for _, n := range nodes {
		t[nodePath(n.ID)] = interfaces{nodeInterface: {
			"Target": v(n.Target), "Address": v(n.Address), "Port": v(n.Port), "Tpgt": v(int32(n.TPGT)), "Interface": v(n.Interface),
			"Transport": v(n.Transport), "SeenOver": v(n.SeenOver), "Startup": v(n.Startup), "Missing": v(n.Missing), "Sessions": v(paths(byNode[n.ID])),
			"Settings": v(variants(&n.Settings)), "Secrets": v(n.Secrets), "MovedTo": v(n.MovedTo), "Pending": v(append([]string{}, n.Pending...)),
		}}
	}
	return t
}

// unit is the type (qsss) of Units.
type unit struct {
	LUN                  uint16
	Device, Type, Reason string
}

// units lists the logical units of a session.
func units(x api.Session) []unit {
	out := make([]unit, 0, len(x.Units))
	for _, u := range x.Units {
		out = append(out, unit{u.LUN, u.Device, u.Type, valid(u.Reason)})
	}
	return out
}

// tierNames lists the ways that a device's requests can go.
func tierNames(d api.Device) []string {
	out := []string{}
	for _, t := range d.Tiers {
		if t.Possible {
			out = append(out, t.Name)
		}
	}
	return out
}

func paths(p []dbus.ObjectPath) []dbus.ObjectPath {
	if p == nil {
		return []dbus.ObjectPath{}
	}
	return p
}

// valid makes text from a target fit the bus: a string that is not UTF-8, or that holds a NUL, would end the connection.
func valid(s string) string {
	out := make([]rune, 0, len(s))
	for _, r := range s {
		if r < ' ' || r == 0x7f {
			r = '?'
		}
		out = append(out, r)
	}
	return string(out)
}

// changes are the differences between two trees, ordered by path.
type changes struct {
	removed []dbus.ObjectPath
	added   []dbus.ObjectPath
	changed []change
}

type change struct {
	path  dbus.ObjectPath
	iface string
	now   properties // only those that changed
}

func diff(old, now tree) changes {
	var c changes
	for _, p := range slices.Sorted(maps.Keys(old)) {
		if now[p] == nil {
			c.removed = append(c.removed, p)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(now)) {
		if old[p] == nil {
			c.added = append(c.added, p)
			continue
		}
		for iface, props := range now[p] {
			d := properties{}
			for name, v := range props {
				if !reflect.DeepEqual(old[p][iface][name], v) {
					d[name] = v
				}
			}
			if len(d) > 0 {
				c.changed = append(c.changed, change{p, iface, d})
			}
		}
	}
	return c
}
