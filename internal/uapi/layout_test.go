package uapi

import (
	"testing"
	"unsafe"
)

// TestOffsets compares the offsets with those that a C compiler gives for the headers of Linux 7.2 (amd64; arm64 is the same).
func TestOffsets(t *testing.T) {
	var (
		sqe    SQE
		sqe128 SQE128
		cqe    CQE
		par    IoUringParams
		arg    IoUringGeteventsArg
		reg    IoUringRsrcRegister
		upd    IoUringRsrcUpdate2
		cmd    UblksrvCtrlCmd
		info   UblksrvCtrlDevInfo
		desc   UblksrvIoDesc
		io     UblksrvIoCmd
		basic  UblkParamBasic
		disc   UblkParamDiscard
		params UblkParams
		shmem  UblkShmemBufReg
	)
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"sqe.ioprio", unsafe.Offsetof(sqe.Ioprio), 2},
		{"sqe.fd", unsafe.Offsetof(sqe.Fd), 4},
		{"sqe.off", unsafe.Offsetof(sqe.Off), 8},
		{"sqe.addr", unsafe.Offsetof(sqe.Addr), 16},
		{"sqe.len", unsafe.Offsetof(sqe.Len), 24},
		{"sqe.rw_flags", unsafe.Offsetof(sqe.OpFlags), 28},
		{"sqe.user_data", unsafe.Offsetof(sqe.UserData), 32},
		{"sqe.buf_index", unsafe.Offsetof(sqe.BufIndex), 40},
		{"sqe.file_index", unsafe.Offsetof(sqe.FileIndex), 44},
		{"sqe.cmd", unsafe.Offsetof(sqe.Cmd), 48},
		{"sqe128.sqe", unsafe.Offsetof(sqe128.SQE), 0},
		{"sqe128.cmd tail", unsafe.Offsetof(sqe128.CmdTail), 64},
		{"cqe.res", unsafe.Offsetof(cqe.Res), 8},
		{"cqe.flags", unsafe.Offsetof(cqe.Flags), 12},
		{"params.features", unsafe.Offsetof(par.Features), 20},
		{"params.sq_off", unsafe.Offsetof(par.SqOff), 40},
		{"params.cq_off", unsafe.Offsetof(par.CqOff), 80},
		{"sq_off.array", unsafe.Offsetof(par.SqOff.Array), 24},
		{"cq_off.cqes", unsafe.Offsetof(par.CqOff.Cqes), 20},
		{"getevents_arg.ts", unsafe.Offsetof(arg.Ts), 16},
		{"rsrc_register.data", unsafe.Offsetof(reg.Data), 16},
		{"rsrc_update2.data", unsafe.Offsetof(upd.Data), 8},
		{"rsrc_update2.nr", unsafe.Offsetof(upd.Nr), 24},
		{"ctrl_cmd.queue_id", unsafe.Offsetof(cmd.QueueID), 4},
		{"ctrl_cmd.len", unsafe.Offsetof(cmd.Len), 6},
		{"ctrl_cmd.addr", unsafe.Offsetof(cmd.Addr), 8},
		{"ctrl_cmd.data", unsafe.Offsetof(cmd.Data), 16},
		{"ctrl_cmd.dev_path_len", unsafe.Offsetof(cmd.DevPathLen), 24},
		{"dev_info.state", unsafe.Offsetof(info.State), 4},
		{"dev_info.max_io_buf_bytes", unsafe.Offsetof(info.MaxIoBufBytes), 8},
		{"dev_info.dev_id", unsafe.Offsetof(info.DevID), 12},
		{"dev_info.ublksrv_pid", unsafe.Offsetof(info.UblksrvPid), 16},
		{"dev_info.flags", unsafe.Offsetof(info.Flags), 24},
		{"dev_info.ublksrv_flags", unsafe.Offsetof(info.UblksrvFlags), 32},
		{"dev_info.owner_uid", unsafe.Offsetof(info.OwnerUID), 40},
		{"io_desc.nr_sectors", unsafe.Offsetof(desc.NrSectors), 4},
		{"io_desc.start_sector", unsafe.Offsetof(desc.StartSector), 8},
		{"io_desc.addr", unsafe.Offsetof(desc.Addr), 16},
		{"io_cmd.tag", unsafe.Offsetof(io.Tag), 2},
		{"io_cmd.result", unsafe.Offsetof(io.Result), 4},
		{"io_cmd.addr", unsafe.Offsetof(io.Addr), 8},
		{"basic.logical_bs_shift", unsafe.Offsetof(basic.LogicalBsShift), 4},
		{"basic.max_sectors", unsafe.Offsetof(basic.MaxSectors), 8},
		{"basic.dev_sectors", unsafe.Offsetof(basic.DevSectors), 16},
		{"basic.virt_boundary_mask", unsafe.Offsetof(basic.VirtBoundaryMask), 24},
		{"discard.max_discard_sectors", unsafe.Offsetof(disc.MaxDiscardSectors), 8},
		{"discard.max_discard_segments", unsafe.Offsetof(disc.MaxDiscardSegments), 16},
		{"params.basic", unsafe.Offsetof(params.Basic), 8},
		{"params.discard", unsafe.Offsetof(params.Discard), 40},
		{"params.devt", unsafe.Offsetof(params.Devt), 60},
		{"params.zoned", unsafe.Offsetof(params.Zoned), 76},
		{"params.dma_align", unsafe.Offsetof(params.DmaAlign), 108},
		{"params.segment", unsafe.Offsetof(params.Segment), 120},
		{"params.integrity", unsafe.Offsetof(params.Integrity), 136},
		{"shmem_buf_reg.len", unsafe.Offsetof(shmem.Len), 8},
		{"shmem_buf_reg.flags", unsafe.Offsetof(shmem.Flags), 16},
	} {
		if c.got != c.want {
			t.Errorf("%s at offset %d, the kernel has it at %d", c.name, c.got, c.want)
		}
	}
}

// ioc encodes an ioctl number as _IOC of include/uapi/asm-generic/ioctl.h does.
func ioc(dir, nr, size uint32) uint32 { return dir<<30 | size<<16 | 'u'<<8 | nr }

// TestCommands compares the literal command numbers with the ioctl encoding that the header spells with _IOR and _IOWR.
func TestCommands(t *testing.T) {
	const r, wr = 2, 3
	ctrl := uint32(unsafe.Sizeof(UblksrvCtrlCmd{}))
	io := uint32(unsafe.Sizeof(UblksrvIoCmd{}))
	for _, c := range []struct {
		name      string
		got, want uint32
	}{
		{"GET_QUEUE_AFFINITY", UBLK_U_CMD_GET_QUEUE_AFFINITY, ioc(r, 0x01, ctrl)},
		{"GET_DEV_INFO", UBLK_U_CMD_GET_DEV_INFO, ioc(r, 0x02, ctrl)},
		{"ADD_DEV", UBLK_U_CMD_ADD_DEV, ioc(wr, 0x04, ctrl)},
		{"DEL_DEV", UBLK_U_CMD_DEL_DEV, ioc(wr, 0x05, ctrl)},
		{"START_DEV", UBLK_U_CMD_START_DEV, ioc(wr, 0x06, ctrl)},
		{"STOP_DEV", UBLK_U_CMD_STOP_DEV, ioc(wr, 0x07, ctrl)},
		{"SET_PARAMS", UBLK_U_CMD_SET_PARAMS, ioc(wr, 0x08, ctrl)},
		{"GET_PARAMS", UBLK_U_CMD_GET_PARAMS, ioc(r, 0x09, ctrl)},
		{"START_USER_RECOVERY", UBLK_U_CMD_START_USER_RECOVERY, ioc(wr, 0x10, ctrl)},
		{"END_USER_RECOVERY", UBLK_U_CMD_END_USER_RECOVERY, ioc(wr, 0x11, ctrl)},
		{"GET_DEV_INFO2", UBLK_U_CMD_GET_DEV_INFO2, ioc(r, 0x12, ctrl)},
		{"GET_FEATURES", UBLK_U_CMD_GET_FEATURES, ioc(r, 0x13, ctrl)},
		{"DEL_DEV_ASYNC", UBLK_U_CMD_DEL_DEV_ASYNC, ioc(r, 0x14, ctrl)},
		{"UPDATE_SIZE", UBLK_U_CMD_UPDATE_SIZE, ioc(wr, 0x15, ctrl)},
		{"QUIESCE_DEV", UBLK_U_CMD_QUIESCE_DEV, ioc(wr, 0x16, ctrl)},
		{"TRY_STOP_DEV", UBLK_U_CMD_TRY_STOP_DEV, ioc(wr, 0x17, ctrl)},
		{"REG_BUF", UBLK_U_CMD_REG_BUF, ioc(wr, 0x18, ctrl)},
		{"UNREG_BUF", UBLK_U_CMD_UNREG_BUF, ioc(wr, 0x19, ctrl)},
		{"FETCH_REQ", UBLK_U_IO_FETCH_REQ, ioc(wr, 0x20, io)},
		{"COMMIT_AND_FETCH_REQ", UBLK_U_IO_COMMIT_AND_FETCH_REQ, ioc(wr, 0x21, io)},
		{"NEED_GET_DATA", UBLK_U_IO_NEED_GET_DATA, ioc(wr, 0x22, io)},
		{"REGISTER_IO_BUF", UBLK_U_IO_REGISTER_IO_BUF, ioc(wr, 0x23, io)},
		{"UNREGISTER_IO_BUF", UBLK_U_IO_UNREGISTER_IO_BUF, ioc(wr, 0x24, io)},
	} {
		if c.got != c.want {
			t.Errorf("%s is %#x, the header's encoding gives %#x", c.name, c.got, c.want)
		}
	}
}
