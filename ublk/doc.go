// Package ublk speaks to the Linux ublk driver: it adds, starts and stops block devices (/dev/ublkbN), and serves their requests.
//
// Layer: the top of the data path. It declares [Handler], which package lu implements; below it are internal/uring (submission and
// completion) and internal/uapi (the driver's structs). It knows sectors of 512 bytes and errno, and no SCSI.
//
// Two halves, for two processes:
//
//	control process                          data plane process
//	  Control: ADD_DEV, SET_PARAMS  ------>    Open(id), OpenQueue on each reactor: descriptors mapped, every tag fetched
//	  Control: START_DEV(pid of the data plane)
//	                                           Handler.Submit(*Request) ... Request.Complete(res)
//	  Control: TRY_STOP_DEV or STOP_DEV ->     requests drain, all tags come back, OnGone; Queue.Close, Device.Close
//	  Control: DEL_DEV
//
// Data moves in the driver's user copy mode (UBLK_F_USER_COPY): [Request.CopyIn] and [Request.CopyOut] copy between the pages of the
// block request and any buffer of the caller, at the price of one system call each; [Request.Gather] and [Request.Scatter] make one system call for
// many. [Request.Lend] leaves the data where it is, for a socket of the ring (UBLK_F_SUPPORT_ZERO_COPY).
//
// A tag is in one of three places. Only its reactor moves it.
//
//	kernel --completion, result 0--> Handler --Complete--> kernel        (COMMIT_AND_FETCH_REQ)
//	kernel --completion, result -ENODEV--> gone                          (stopped, deleted, or quiesced)
//
// Traps, each of which has cost somebody a reboot:
//
//   - STOP_DEV, TRY_STOP_DEV and DEL_DEV of a live device wait, uninterruptibly, for requests in flight. When the process that serves the
//     device issues them itself and is killed meanwhile, nothing but a reboot removes the device: it cannot exit, so its descriptor is
//     never released, so the requests are never aborted. Issue them from another process.
//   - The server must keep serving until STOP_DEV has returned. Closing its queues first makes STOP_DEV wait for ever, unless something
//     answers the requests; a closed [Queue] therefore goes on answering them with an error until its tags are back.
//   - DEL_DEV returns only when the last descriptor and the last mapping of /dev/ublkcN are gone. A forgotten munmap hangs it.
//   - The thread that fetched a tag must be the one that commits it, and must live as long as the device.
//   - The data plane never opens /dev/ublkbN, nor does anything on its behalf in the same process: blkid, mount, a partition scan.
//     [Holders] reads /proc and /sys only.
//   - A task that fetches without CAP_SYS_ADMIN makes the device one whose partitions are never scanned.
//   - The driver drops feature flags that it does not know without a word; [Control.Add] compares, and removes the device again.
//   - A descriptor is overwritten as soon as its tag is committed; [Request] holds a copy.
//   - Do not start a device again after it was stopped: delete it and add a new one.
//   - Memory reclaim may write back through our own device: a reactor that allocates while it serves can wait for itself. Nothing on the
//     path from Submit to Complete allocates here.
//
// How to free a hung device: kill the data plane (not the control process) with SIGKILL; without recovery flags its requests fail with EIO
// and the device goes away, with them it waits for [Control.StartRecovery] or STOP_DEV.
//
// Sources: include/uapi/linux/ublk_cmd.h, drivers/block/ublk_drv.c and Documentation/block/ublk.rst of Linux 7.2.
package ublk
