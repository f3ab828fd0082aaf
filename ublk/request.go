package ublk

import (
	"fmt"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// Op is the operation of a request.
type Op uint8

// The operations, UBLK_IO_OP_*.
const (
	OpRead        Op = Op(uapi.UBLK_IO_OP_READ)
	OpWrite       Op = Op(uapi.UBLK_IO_OP_WRITE)
	OpFlush       Op = Op(uapi.UBLK_IO_OP_FLUSH) // no sectors; only with AttrVolatileCache
	OpDiscard     Op = Op(uapi.UBLK_IO_OP_DISCARD)
	OpWriteZeroes Op = Op(uapi.UBLK_IO_OP_WRITE_ZEROES)
)

func (o Op) String() string {
	switch o {
	case OpRead:
		return "READ"
	case OpWrite:
		return "WRITE"
	case OpFlush:
		return "FLUSH"
	case OpDiscard:
		return "DISCARD"
	case OpWriteZeroes:
		return "WRITE_ZEROES"
	}
	return "op " + strconv.Itoa(int(o))
}

// Flags are the hints of a request, UBLK_IO_F_*.
type Flags uint32

// The flags.
const (
	FlagFailfastDev       Flags = Flags(uapi.UBLK_IO_F_FAILFAST_DEV)
	FlagFailfastTransport Flags = Flags(uapi.UBLK_IO_F_FAILFAST_TRANSPORT) // a multipath layer above wants to hear of a lost path at once
	FlagFailfastDriver    Flags = Flags(uapi.UBLK_IO_F_FAILFAST_DRIVER)
	FlagMeta              Flags = Flags(uapi.UBLK_IO_F_META)
	FlagFUA               Flags = Flags(uapi.UBLK_IO_F_FUA)     // a WRITE is to be on the medium when it completes
	FlagNoUnmap           Flags = Flags(uapi.UBLK_IO_F_NOUNMAP) // WRITE_ZEROES keeps the blocks allocated
	FlagSwap              Flags = Flags(uapi.UBLK_IO_F_SWAP)
)

// Request is a request of the block layer, one per tag, made with its queue and used again for each request of that tag. Between Submit
// and Complete it is the handler's; its methods belong to the reactor.
type Request struct {
	q    *Queue
	desc uapi.UblksrvIoDesc
	pos  int64 // of its data in the character device
	tag  uint16
	out  bool // at the handler
	lent bool // its pages are in the ring's table
	gone bool // the driver gave the tag back
}

// Op is the operation.
func (r *Request) Op() Op { return Op(r.desc.OpFlags & 0xff) }

// Flags are the hints that came with it.
func (r *Request) Flags() Flags { return Flags(r.desc.OpFlags &^ 0xff) }

// Tag is the request's number in its queue, below the depth; no two requests that are out share it.
func (r *Request) Tag() uint16 { return r.tag }

// Queue is the queue that delivered it.
func (r *Request) Queue() *Queue { return r.q }

// Sector is where the request starts.
func (r *Request) Sector() Sector { return Sector(r.desc.StartSector) }

// Sectors is how many sectors it covers, 0 for FLUSH.
func (r *Request) Sectors() uint32 { return r.desc.NrSectors }

// Len is the number of bytes that it covers; of data only for READ and WRITE, where it is at most 32 MiB. A DISCARD may cover up to 4 GiB.
func (r *Request) Len() int { return int(r.desc.NrSectors) * SectorSize }

// Shared tells that the data lies in memory that was registered with the device (UBLK_U_CMD_REG_BUF): offset bytes into the buffer that the driver
// calls index, in one piece. Nothing has to be copied then, though CopyIn and CopyOut work all the same. Such a request is completed as a
// whole or with an error, which Complete sees to.
//
// Source: UBLK_IO_F_SHMEM_ZC, ublk_shmem_zc_index, ublk_shmem_zc_offset.
func (r *Request) Shared() (index int, offset int64, ok bool) {
	return int(r.desc.Addr >> 32), int64(r.desc.Addr & 0xffffffff), r.desc.OpFlags&uapi.UBLK_IO_F_SHMEM_ZC != 0
}

// String is for traces: "WRITE tag 3 sector 2048 +16".
func (r *Request) String() string {
	return fmt.Sprintf("%v tag %d sector %d +%d", r.Op(), r.tag, r.desc.StartSector, r.desc.NrSectors)
}

// CopyIn copies data of a WRITE, from byte off of the request on, into dst. One system call as a rule.
//
// Errors, as bare errno: EINVAL when the range is not within the request or the operation is another; else what pread(2) says.
//
// Source: UBLK_F_USER_COPY, ublk_ch_read_iter.
func (r *Request) CopyIn(dst []byte, off int) error {
	if r.Op() != OpWrite || !r.within(len(dst), off) {
		return unix.EINVAL
	}
	return r.copy(unix.SYS_PREAD64, dst, off)
}

// CopyOut copies src into the data of a READ, from byte off of the request on. One system call as a rule. Errors are those of CopyIn.
//
// Source: UBLK_F_USER_COPY, ublk_ch_write_iter.
func (r *Request) CopyOut(src []byte, off int) error {
	if r.Op() != OpRead || !r.within(len(src), off) {
		return unix.EINVAL
	}
	return r.copy(unix.SYS_PWRITE64, src, off)
}

// ringCopy is up to how many bytes a copy goes by the ring: what is copied while the ring submits holds up everything that is submitted behind it.
const ringCopy = 64 << 10

// Gather copies the data of a WRITE into dst, all of it: like CopyIn, but by the ring if that takes no worker thread, so that one system call
// makes the copies of many requests; a request that is alone has nothing from it but one more turn of the reactor. If it could be done at once done is true, and err tells how it went. Else the next Enter makes the copy and
// the handler's Copied follows; dst belongs to the kernel until then.
func (r *Request) Gather(dst []byte) (done bool, err error) {
	if !r.q.inline || len(dst) > ringCopy || r.q.out == 1 {
		return true, r.CopyIn(dst, 0)
	}
	if r.Op() != OpWrite || len(dst) != r.Len() || !r.out {
		return true, unix.EINVAL
	}
	e := r.q.ring.SQE()
	e.PrepRead(r.q.dev.fd, uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uint32(len(dst)), uint64(r.pos))
	e.UserData = r.q.slot.Key(uint32(r.tag) | tokenCopy)
	return false, nil
}

// Scatter copies src into the data of a READ, all of it: the other direction of Gather.
func (r *Request) Scatter(src []byte) (done bool, err error) {
	if !r.q.inline || len(src) > ringCopy || r.q.out == 1 {
		return true, r.CopyOut(src, 0)
	}
	if r.Op() != OpRead || len(src) != r.Len() || !r.out {
		return true, unix.EINVAL
	}
	e := r.q.ring.SQE()
	e.PrepWrite(r.q.dev.fd, uintptr(unsafe.Pointer(unsafe.SliceData(src))), uint32(len(src)), uint64(r.pos))
	e.UserData = r.q.slot.Key(uint32(r.tag) | tokenCopy)
	return false, nil
}

// copied takes the end of a copy by the ring.
func (q *Queue) copied(r *Request, res int32) {
	q.Stats.RingCopies++
	switch {
	case !r.out: // nobody waits for it
	case res < 0:
		q.h.Copied(r, unix.Errno(-res))
	case int(res) != r.Len():
		q.h.Copied(r, unix.EIO)
	default:
		q.h.Copied(r, nil)
	}
}

func (r *Request) within(n, off int) bool { return r.out && off >= 0 && n <= r.Len()-off }

// shortCopy is up to how many bytes a copy runs without telling the Go scheduler: some microseconds, which stop-the-world can wait for.
const shortCopy = 32 << 10

// copy moves all of p with pread or pwrite on the character device.
func (r *Request) copy(trap uintptr, p []byte, off int) error {
	for len(p) > 0 {
		var (
			n     uintptr
			errno unix.Errno
		)
		if len(p) <= shortCopy {
			n, _, errno = unix.RawSyscall6(trap, uintptr(r.q.dev.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
				uintptr(r.pos+int64(off)), 0, 0)
		} else {
			n, _, errno = unix.Syscall6(trap, uintptr(r.q.dev.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
				uintptr(r.pos+int64(off)), 0, 0)
		}
		r.q.Stats.Copies++
		switch {
		case errno == unix.EINTR:
		case errno != 0:
			return errno
		case n == 0 || n > uintptr(len(p)):
			return unix.EIO
		default:
			p = p[n:]
			off += int(n)
		}
	}
	return nil
}

// Complete answers the request and hands its tag back to the driver: prepared on the ring, submitted by its next Enter. res is a negative
// errno, or for READ and WRITE the number of bytes, which must be Len, and 0 for the others. After Complete r belongs to the driver.
//
// A READ or WRITE that was done in part is an error (EIO): the driver would deliver the rest again, for ever when nothing was done, and
// does so differently from kernel to kernel. A second Complete of the same request does nothing but count.
//
// Source: UBLK_U_IO_COMMIT_AND_FETCH_REQ, __ublk_complete_rq.
func (r *Request) Complete(res int32) {
	q := r.q
	if !r.out {
		q.Stats.Double++
		if strict {
			panic("ublk: second Complete of " + r.String())
		}
		return
	}
	r.out = false
	q.out--
	r.takeBack()
	if res >= 0 {
		switch r.Op() {
		case OpRead, OpWrite:
			if int(res) != r.Len() {
				q.Stats.Short++
				res = -int32(unix.EIO)
			} else if r.Op() == OpRead {
				q.Stats.ReadBytes += uint64(res)
			} else {
				q.Stats.WriteBytes += uint64(res)
			}
		default:
			res = 0
		}
	}
	if res < 0 {
		q.Stats.Errors++
	}
	if q.ring.Closed() {
		return
	}
	q.command(uapi.UBLK_U_IO_COMMIT_AND_FETCH_REQ, r.tag, res)
}
