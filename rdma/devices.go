//go:build cgo

package rdma

/*
#include <stdlib.h>
#include "shim.h"

static inline ssize_t query_gids(struct ibv_context *ctx, struct ibv_gid_entry *e, size_t n)
{
	return ibv_query_gid_table(ctx, e, n, 0);
}
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"unsafe"
)

// maxGIDs bounds the address table read from one device: an attribute of a verbs ioctl has at most 65535 bytes.
const maxGIDs = 65535 / C.sizeof_struct_ibv_gid_entry

// Devices lists the RDMA devices of this host, none being no error. A device that cannot be opened is listed without its ports.
//
// Wraps: ibv_get_device_list(3), ibv_open_device(3), ibv_query_device(3), ibv_query_port(3), ibv_query_gid_table(3).
func Devices() ([]DeviceInfo, error) {
	var n C.int
	list, err := C.ibv_get_device_list(&n)
	if list == nil {
		errno := errnoOf(err)
		if errno == syscall.ENOSYS { // the kernel has no verbs at all: ib_uverbs is not loaded
			return nil, nil
		}
		return nil, &VerbError{Call: "ibv_get_device_list", Err: errno}
	}
	defer C.ibv_free_device_list(list)
	out := make([]DeviceInfo, 0, int(n))
	for _, dev := range unsafe.Slice(list, int(n)) {
		info := DeviceInfo{
			Name:     C.GoString(C.ibv_get_device_name(dev)),
			NodeGUID: nodeGUID(uint64(C.ibv_get_device_guid(dev))),
			NodeType: nodeType(dev),
		}
		if ctx := C.ibv_open_device(dev); ctx != nil {
			info.Ports = queryPorts(ctx)
			C.ibv_close_device(ctx)
		}
		out = append(out, info)
	}
	return out, nil
}

// nodeGUID reads a __be64.
func nodeGUID(be uint64) uint64 {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], be)
	return binary.BigEndian.Uint64(b[:])
}

func nodeType(dev *C.struct_ibv_device) string {
	switch dev.node_type {
	case C.IBV_NODE_CA:
		return "CA"
	case C.IBV_NODE_RNIC:
		return "RNIC"
	}
	return C.GoString(C.ibv_node_type_str(C.enum_ibv_node_type(dev.node_type)))
}

func queryPorts(ctx *C.struct_ibv_context) []PortInfo {
	var attr C.struct_ibv_device_attr
	if C.ibv_query_device(ctx, &attr) != 0 {
		return nil
	}
	var ports []PortInfo
	var gids int
	for num := 1; num <= int(attr.phys_port_cnt); num++ {
		var pa C.struct_ibv_port_attr
		if C.shim_query_port(ctx, C.uint8_t(num), &pa) != 0 {
			continue
		}
		p := PortInfo{
			Num:   num,
			State: strings.TrimPrefix(strings.ToUpper(C.GoString(C.ibv_port_state_str(pa.state))), "PORT_"),
			MTU:   128 << pa.active_mtu, // enum ibv_mtu: 1 is 256
		}
		gids += int(pa.gid_tbl_len)
		switch pa.link_layer {
		case C.IBV_LINK_LAYER_ETHERNET:
			p.LinkLayer = "Ethernet"
		case C.IBV_LINK_LAYER_INFINIBAND:
			p.LinkLayer = "InfiniBand"
		default:
			p.LinkLayer = fmt.Sprintf("%d", pa.link_layer)
		}
		ports = append(ports, p)
	}
	table := queryGIDs(ctx, gids)
	for i := range ports {
		ports[i].GIDs = table[ports[i].Num]
	}
	return ports
}

// queryGIDs returns the valid entries of the address tables, whose lengths add up to size, by port number.
func queryGIDs(ctx *C.struct_ibv_context, size int) map[int][]GID {
	size = min(size, maxGIDs)
	entries := offHeap[C.struct_ibv_gid_entry](size)
	if entries == nil {
		return nil
	}
	defer freeOffHeap(entries)
	n := int(C.query_gids(ctx, unsafe.SliceData(entries), C.size_t(size)))
	out := map[int][]GID{}
	for i := range max(n, 0) {
		e := &entries[i]
		g := GID{
			Index: int(e.gid_index),
			Addr:  netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&e.gid))).Unmap(),
		}
		switch e.gid_type {
		case C.IBV_GID_TYPE_IB:
			g.Type = "IB"
		case C.IBV_GID_TYPE_ROCE_V1:
			g.Type = "RoCE v1"
		case C.IBV_GID_TYPE_ROCE_V2:
			g.Type = "RoCE v2"
		}
		if ifc, err := net.InterfaceByIndex(int(e.ndev_ifindex)); err == nil {
			g.Netdev = ifc.Name
		}
		out[int(e.port_num)] = append(out[int(e.port_num)], g)
	}
	return out
}
