package iser

import (
	"fmt"

	"golang.org/x/sys/unix"

	"iserd.org/iserd/rdma"
)

// memory holds the messages of one connection, registered for the adapter alone: no peer reaches it, and data never uses it up.
type memory struct {
	mem []byte
	mr  *rdma.MR
}

// newMemory maps and registers a connection's buffer. It may wait for the adapter.
func newMemory(dev *rdma.Device) (*memory, error) {
	mem, err := unix.Mmap(-1, 0, bufferSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map %d KiB for the messages of a connection: %w", bufferSize>>10, err)
	}
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	mr, err := dev.Register(mem, rdma.LocalWrite)
	if err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("messages of a connection: %w", err)
	}
	return &memory{mem, mr}, nil
}

// free gives it back. The queue pair is gone. It may wait for the adapter.
func (m *memory) free() {
	m.mr.Close()
	unix.Munmap(m.mem)
}
