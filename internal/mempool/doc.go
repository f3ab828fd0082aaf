// Package mempool hands out buffers from one mapped region outside the Go heap, so that a network adapter can be told of the whole region
// once and write into it at any time.
//
// Layer: below rdma, iser, iscsitcp and lu; it imports nothing of the project. A reactor of the data plane owns one [Pool]; rdma registers
// its [Region]; iser and lu take a [Buffer] per request that needs one.
//
// The allocator is a buddy system: the region is cut into blocks of 1 MiB, a block is halved until it just fits the request (down to 4 KiB),
// and two free halves become one again at once. So a buffer is aligned to its size, memory does not fragment into unusable pieces as long
// as buffers are returned, and both Get and Put cost at most eight steps, no lock, no allocation.
//
// Traps: a pool has one owner and no lock, so Get and Put stay on the owner's thread. Put only when no adapter, socket or kernel request
// can still reach the buffer: memory that is handed out again too early is silent corruption. Returned memory is not zeroed.
//
// Source: D. E. Knuth, The Art of Computer Programming, volume 1, section 2.5 (buddy system); madvise(2).
package mempool
