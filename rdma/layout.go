//go:build cgo

package rdma

/*
#cgo LDFLAGS: -libverbs -lrdmacm
#cgo noescape shim_post
#cgo nocallback shim_post
#cgo noescape shim_poll
#cgo nocallback shim_poll
#cgo noescape shim_arm
#cgo nocallback shim_arm
#cgo noescape shim_drain
#cgo nocallback shim_drain
#include <stddef.h>
#include <stdlib.h>
#include "shim.h"

// The unions that cgo shows as bytes.
enum {
	off_send_rdma_addr = offsetof(struct ibv_send_wr, wr.rdma.remote_addr),
	off_send_rdma_rkey = offsetof(struct ibv_send_wr, wr.rdma.rkey),
};
*/
import "C"

import (
	"structs"
	"unsafe"
)

// The structures that Go and the adapter's library share, in C's layout and outside the Go heap. Pointers are uintptr: they point to
// memory of the same kind, and the collector must not look at them.

// sge mirrors struct ibv_sge, verbs.h.
type sge struct {
	_    structs.HostLayout
	addr uint64
	len  uint32
	lkey uint32
}

// sendWR mirrors struct ibv_send_wr, verbs.h, with the rdma member of its union.
type sendWR struct {
	_          structs.HostLayout
	wrID       uint64
	next       uintptr
	sgList     uintptr
	numSGE     int32
	opcode     uint32
	flags      uint32
	imm        uint32
	remoteAddr uint64
	rkey       uint32
	_          [C.sizeof_struct_ibv_send_wr - 52]byte
}

// recvWR mirrors struct ibv_recv_wr, verbs.h.
type recvWR struct {
	_      structs.HostLayout
	wrID   uint64
	next   uintptr
	sgList uintptr
	numSGE int32
	_      int32
}

// wcEntry mirrors struct ibv_wc, verbs.h, as far as it is read here.
type wcEntry struct {
	_         structs.HostLayout
	wrID      uint64
	status    uint32
	opcode    uint32
	vendorErr uint32
	byteLen   uint32
	imm       uint32
	qpNum     uint32
	_         [C.sizeof_struct_ibv_wc - 32]byte
}

// A difference of sizes or offsets does not compile: the index is out of range, or negative.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(sge{})-C.sizeof_struct_ibv_sge]
	_ = [1]struct{}{}[unsafe.Offsetof(sge{}.addr)-unsafe.Offsetof(C.struct_ibv_sge{}.addr)]
	_ = [1]struct{}{}[unsafe.Offsetof(sge{}.len)-unsafe.Offsetof(C.struct_ibv_sge{}.length)]
	_ = [1]struct{}{}[unsafe.Offsetof(sge{}.lkey)-unsafe.Offsetof(C.struct_ibv_sge{}.lkey)]

	_ = [1]struct{}{}[unsafe.Sizeof(sendWR{})-C.sizeof_struct_ibv_send_wr]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.wrID)-unsafe.Offsetof(C.struct_ibv_send_wr{}.wr_id)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.next)-unsafe.Offsetof(C.struct_ibv_send_wr{}.next)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.sgList)-unsafe.Offsetof(C.struct_ibv_send_wr{}.sg_list)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.numSGE)-unsafe.Offsetof(C.struct_ibv_send_wr{}.num_sge)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.opcode)-unsafe.Offsetof(C.struct_ibv_send_wr{}.opcode)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.flags)-unsafe.Offsetof(C.struct_ibv_send_wr{}.send_flags)]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.remoteAddr)-C.off_send_rdma_addr]
	_ = [1]struct{}{}[unsafe.Offsetof(sendWR{}.rkey)-C.off_send_rdma_rkey]

	_ = [1]struct{}{}[unsafe.Sizeof(recvWR{})-C.sizeof_struct_ibv_recv_wr]
	_ = [1]struct{}{}[unsafe.Offsetof(recvWR{}.wrID)-unsafe.Offsetof(C.struct_ibv_recv_wr{}.wr_id)]
	_ = [1]struct{}{}[unsafe.Offsetof(recvWR{}.next)-unsafe.Offsetof(C.struct_ibv_recv_wr{}.next)]
	_ = [1]struct{}{}[unsafe.Offsetof(recvWR{}.sgList)-unsafe.Offsetof(C.struct_ibv_recv_wr{}.sg_list)]
	_ = [1]struct{}{}[unsafe.Offsetof(recvWR{}.numSGE)-unsafe.Offsetof(C.struct_ibv_recv_wr{}.num_sge)]

	_ = [1]struct{}{}[unsafe.Sizeof(wcEntry{})-C.sizeof_struct_ibv_wc]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.wrID)-unsafe.Offsetof(C.struct_ibv_wc{}.wr_id)]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.status)-unsafe.Offsetof(C.struct_ibv_wc{}.status)]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.opcode)-unsafe.Offsetof(C.struct_ibv_wc{}.opcode)]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.vendorErr)-unsafe.Offsetof(C.struct_ibv_wc{}.vendor_err)]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.byteLen)-unsafe.Offsetof(C.struct_ibv_wc{}.byte_len)]
	_ = [1]struct{}{}[unsafe.Offsetof(wcEntry{}.qpNum)-unsafe.Offsetof(C.struct_ibv_wc{}.qp_num)]
)

// The values of types.go and status.go that go to C as they are.
var (
	_ = [1]struct{}{}[LocalWrite-C.IBV_ACCESS_LOCAL_WRITE]
	_ = [1]struct{}{}[RemoteWrite-C.IBV_ACCESS_REMOTE_WRITE]
	_ = [1]struct{}{}[RemoteRead-C.IBV_ACCESS_REMOTE_READ]
	_ = [1]struct{}{}[StatusFlushed-C.IBV_WC_WR_FLUSH_ERR]
	_ = [1]struct{}{}[StatusTagRendezvous-C.IBV_WC_TM_RNDV_INCOMPLETE]
	_ = [1]struct{}{}[MaxResources-C.RDMA_MAX_RESP_RES]
)

// statusStr is the library's own name of a status.
//
// Wraps: ibv_wc_status_str.
func statusStr(s Status) string { return C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(s))) }

// offHeap returns n zeroed elements outside the Go heap, or nil.
func offHeap[T any](n int) []T {
	var zero T
	p := C.calloc(C.size_t(max(n, 1)), C.size_t(unsafe.Sizeof(zero)))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*T)(p), n)
}

// freeOffHeap frees what offHeap returned.
func freeOffHeap[T any](s []T) {
	C.free(unsafe.Pointer(unsafe.SliceData(s)))
}
