package plan

// Names of places to which instructions are attributed. Values are SharePrefix + name.
const (
	PlaceDaemon    = "daemon"     // iserd-io in user mode, its libraries included
	PlaceUblk      = "ublk_drv"   // the module
	PlaceIOUring   = "io_uring"   // the kernel's, whoever uses it: fio does, too
	PlaceVerbs     = "uverbs"     // ib_uverbs, rdma_ucm
	PlaceKernel    = "initiator"  // the kernel's initiators: ib_iser, iscsi_tcp, libiscsi, scsi_transport_iscsi, scsi_mod, sd_mod
	PlaceBlock     = "block"      // the block layer
	PlaceFio       = "fio"        // in user mode
	PlaceRDMA      = "rdma_core"  // ib_core and what belongs to it
	PlaceRXE       = "rxe"        // the emulated adapter, both ends
	PlaceCRC       = "crc"        // checksums, nearly all of the emulated adapter
	PlaceNet       = "net"        // sockets, TCP, UDP, IP, devices
	PlaceTarget    = "target"     // LIO
	PlaceCopy      = "copies"     // copying and clearing memory, whoever does it
	PlaceSchedule  = "scheduling" // scheduler, wake-ups, work queues, timers
	PlaceEntry     = "entry"      // entering and leaving the kernel: system calls, interrupts
	PlaceMemory    = "memory"     // allocating and freeing it, page tables
	PlaceLocks     = "locks"      // spin locks, mutexes, RCU readers, whoever takes them
	PlaceOther     = "other"      // the rest of the kernel
	PlaceOtherUser = "other_user" // other programs
)

// Places are all of them, in the order in which tables show them.
var Places = []string{
	PlaceDaemon, PlaceUblk, PlaceIOUring, PlaceVerbs, PlaceKernel, PlaceFio, PlaceBlock, PlaceEntry, PlaceSchedule, PlaceMemory, PlaceLocks, PlaceCopy, PlaceOther,
	PlaceTarget, PlaceRDMA, PlaceRXE, PlaceCRC, PlaceNet, PlaceOtherUser,
}

// OwnPlaces make up the initiator's own share: its code, and the kernel's that is there for it alone. What fio spends in the same places
// without any initiator (null_blk) is to be subtracted.
var OwnPlaces = []string{PlaceDaemon, PlaceUblk, PlaceIOUring, PlaceVerbs, PlaceKernel}
