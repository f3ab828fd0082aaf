package profile

import (
	"regexp"

	"iserd.org/iserd/test/bench/plan"
)

// modules are the places of kernel modules. Others are plan.PlaceOther.
var modules = map[string]string{
	"ublk_drv":  plan.PlaceUblk,
	"ib_uverbs": plan.PlaceVerbs, "ib_uverbs_support": plan.PlaceVerbs, "rdma_ucm": plan.PlaceVerbs,
	"ib_iser": plan.PlaceKernel, "libiscsi": plan.PlaceKernel, "libiscsi_tcp": plan.PlaceKernel, "iscsi_tcp": plan.PlaceKernel,
	"scsi_transport_iscsi": plan.PlaceKernel, "scsi_mod": plan.PlaceKernel, "sd_mod": plan.PlaceKernel,
	"null_blk": plan.PlaceBlock,
	"ib_core":  plan.PlaceRDMA, "rdma_cm": plan.PlaceRDMA, "ib_cm": plan.PlaceRDMA, "iw_cm": plan.PlaceRDMA,
	"rdma_rxe": plan.PlaceRXE,
	"veth":     plan.PlaceNet, "udp_tunnel": plan.PlaceNet, "ip6_udp_tunnel": plan.PlaceNet,
	"target_core_mod": plan.PlaceTarget, "iscsi_target_mod": plan.PlaceTarget, "ib_isert": plan.PlaceTarget,
	"scsi_common": plan.PlaceTarget, // helpers of both; only the target calls them per command
}

// builtIn are the places of the kernel's own functions by name; the first that matches counts.
var builtIn = []struct {
	place string
	name  *regexp.Regexp
}{
	{plan.PlaceCopy, regexp.MustCompile(`^(memcpy|memset|memmove|rep_movs|rep_stos|clear_page|copy_page|_copy_|copy_(to|from)_|copy_user|__copy)`)},
	// The checksums' vector code saves and restores registers; who else does so here is of no weight.
	{plan.PlaceCRC, regexp.MustCompile(`crc|fpu`)},
	{plan.PlaceLocks, regexp.MustCompile(`^(_raw_|mutex_|queued_|native_queued|__rcu_read|rcu_read|down_|up_|rwsem|__mutex)`)},
	{plan.PlaceNet, regexp.MustCompile(`skb|^_*sk_|sock|tcp_|^_*udp|^_*ip_|^_*ip6|ipv[46]|inet|dst_|neigh|^_*dev_|netif|napi|^_*net_|eth_type|xmit|siphash|` +
		`fib_|^nf_|qdisc|csum|_gro_|page_frag|_backlog|__local_bh|loopback|raw_local|xfrm|prandom`)},
	{plan.PlaceSchedule, regexp.MustCompile(`schedul|sched_|wake_|wakeup|(en|de)queue_(task|entity)|__(en|de)queue_(task|entity)|update_(curr|load|se|cfs|rq|min)|psi_|` +
		`pick_|set_next_|put_prev|task_tick|vruntime|_work(_|$)|^worker|process_one_work|kick_pool|timer|ktime|_clock|^tick_|task_switch|wait|futex|` +
		`entity|dl_server|^wq_|switch_|rseq|resched|^account_|cpuacct|update_process_times|__update_load|update_task|nohz|^ttwu_|hrtick|linked_works|^pwq_|reweight|clockevents|timekeep|detach_if_pending|jiffies|^rb_|cpuidle|_idle|rcu_`)},
	{plan.PlaceIOUring, regexp.MustCompile(`^_*io_|^__(x64|do|se)_sys_io_uring|io_uring`)},
	{plan.PlaceBlock, regexp.MustCompile(`blk|^_*bio_|bdev|^I_BDEV|sbitmap|submit_bio|rq_qos|wbt_|^elv_|^_*part_|disk|bvec|update_io_ticks|^iov_iter_|` +
		`gup_|pin_user|try_grab_folio|kiocb|dio_`)},
	{plan.PlaceEntry, regexp.MustCompile(`^entry_|syscall|^x64_sys_call|irq|^asm_|^exc_|^sysvec|interrupt|fpregs_assert|exit_to_user|^ret_from|^error_|apic`)},
	{plan.PlaceMemory, regexp.MustCompile(`alloc|free|kmem_|folio|page|slab|pte|pmd|vma|mod_node|^mm_|fault`)},
}

func kernelPlace(s symbol) string {
	if s.module != "" {
		if p, ok := modules[s.module]; ok {
			return p
		}
	}
	for _, b := range builtIn {
		if b.name.MatchString(s.name) {
			return b.place
		}
	}
	return plan.PlaceOther
}
