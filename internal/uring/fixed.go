package uring

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/internal/uapi"
)

// The table of registered buffers. A driver puts pages there that no process has mapped (UBLK_U_IO_REGISTER_IO_BUF), and operations that name the
// place reach them.

// MaxBuffers is how many places a table may have (IORING_MAX_REG_BUFFERS).
const MaxBuffers = 1 << 14

// OpenBuffers gives the ring a table with n empty places, once. It fails with ErrNotSupported where SEND and RECV cannot use it, which came with Linux 7.2.
//
// Source: io_uring_register(2), IORING_REGISTER_BUFFERS2.
func (r *Ring) OpenBuffers(n int) error {
	reg := uapi.IoUringRsrcRegister{Nr: uint32(n), Flags: uapi.IORING_RSRC_REGISTER_SPARSE}
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), uintptr(uapi.IORING_REGISTER_BUFFERS2),
		uintptr(unsafe.Pointer(&reg)), unsafe.Sizeof(reg), 0, 0)
	if errno != 0 {
		return fmt.Errorf("io_uring: table of %d buffers: %w", n, errno)
	}
	r.buffers = n
	if err := r.probeFixed(); err != nil {
		r.buffers = 0
		return err
	}
	return nil
}

// HasBuffers reports whether the ring has a table.
func (r *Ring) HasBuffers() bool { return r.buffers > 0 }

// TakeBuffers reserves n places that follow each other, until GiveBuffers. ok is false when there are not so many left, or no table.
func (r *Ring) TakeBuffers(n int) (first int, ok bool) {
	run := 0
	for i := range r.buffers {
		if run++; i < len(r.taken) && r.taken[i] {
			run = 0
		}
		if run < n {
			continue
		}
		for len(r.taken) <= i {
			r.taken = append(r.taken, false)
		}
		first = i + 1 - n
		for j := first; j <= i; j++ {
			r.taken[j] = true
		}
		return first, true
	}
	return 0, false
}

// GiveBuffers takes n places back. Nothing is registered there any more.
func (r *Ring) GiveBuffers(first, n int) { clear(r.taken[first : first+n]) }

// RegisterBuffer puts memory of this process at a place of the table; nil empties it. The memory stays mapped until then.
//
// Source: io_uring_register(2), IORING_REGISTER_BUFFERS_UPDATE.
func (r *Ring) RegisterBuffer(index int, b []byte) error {
	var v unix.Iovec
	if len(b) > 0 {
		v.Base = unsafe.SliceData(b)
		v.SetLen(len(b))
	}
	update := uapi.IoUringRsrcUpdate2{Offset: uint32(index), Data: uint64(uintptr(unsafe.Pointer(&v))), Nr: 1}
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), uintptr(uapi.IORING_REGISTER_BUFFERS_UPDATE),
		uintptr(unsafe.Pointer(&update)), unsafe.Sizeof(update), 0, 0)
	runtime.KeepAlive(&v)
	if errno != 0 {
		return fmt.Errorf("io_uring: register %d bytes as buffer %d: %w", len(b), index, errno)
	}
	return nil
}

// probe keeps the results of probeFixed.
type probe struct{ res [2]int32 }

func (p *probe) Complete(token uint32, res int32, _ uint32) { p.res[token] = res }

// probeFixed sends some bytes from and to a registered buffer. A kernel that cannot do it refuses the flag.
func (r *Ring) probeFixed() error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("io_uring: socket pair: %w", err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	const half = 64
	mem, err := unix.Mmap(-1, 0, 2*half, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("io_uring: memory for a probe: %w", err)
	}
	defer unix.Munmap(mem)
	if err := r.RegisterBuffer(0, mem); err != nil {
		return err
	}
	defer r.RegisterBuffer(0, nil)
	copy(mem, "from here to there")
	p := &probe{}
	slot := r.Attach(p)
	base := uintptr(unsafe.Pointer(&mem[0]))
	for token, prep := range []func(*uapi.SQE){
		func(e *uapi.SQE) { e.PrepSend(fds[0], base, half, unix.MSG_DONTWAIT) },
		func(e *uapi.SQE) { e.PrepRecv(fds[1], base+half, half, unix.MSG_DONTWAIT) },
	} {
		e := r.SQE()
		prep(e)
		e.UseFixed(0)
		e.UserData = slot.Key(uint32(token))
	}
	for r.Outstanding(slot) > 0 {
		if err := r.Enter(!r.Ready(), -1); err != nil {
			return err
		}
		r.Dispatch()
	}
	r.Detach(slot)
	switch {
	case p.res[0] == -int32(unix.EINVAL) || p.res[1] == -int32(unix.EINVAL):
		return fmt.Errorf("io_uring: %w: SEND and RECV do not use registered buffers", ErrNotSupported)
	case p.res[0] != half || p.res[1] != half:
		return fmt.Errorf("io_uring: probe of registered buffers sent %d and received %d of %d bytes", p.res[0], p.res[1], half)
	case string(mem[:half]) != string(mem[half:]):
		return fmt.Errorf("io_uring: %w: SEND and RECV with registered buffers lose data", ErrNotSupported)
	}
	return nil
}
