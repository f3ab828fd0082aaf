//go:build cgo

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shim.h"

int shim_get_cm_event(struct rdma_event_channel *ch, struct shim_cm_event *out)
{
	struct rdma_cm_event *ev;

	if (rdma_get_cm_event(ch, &ev))
		return errno ? errno : EIO;

	memset(out, 0, sizeof(*out));
	out->id = ev->id;
	out->event = ev->event;
	out->status = ev->status;
	out->responder_resources = ev->param.conn.responder_resources;
	out->initiator_depth = ev->param.conn.initiator_depth;
	if (ev->param.conn.private_data) {
		out->private_len = ev->param.conn.private_data_len;
		memcpy(out->private_data, ev->param.conn.private_data,
		       out->private_len);
	}
	rdma_ack_cm_event(ev);
	return 0;
}

int shim_get_async_event(struct ibv_context *ctx, struct shim_async_event *out)
{
	struct ibv_async_event ev;

	if (ibv_get_async_event(ctx, &ev))
		return errno ? errno : EIO;

	memset(out, 0, sizeof(*out));
	out->event = ev.event_type;
	switch (ev.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->qpn = ev.element.qp->qp_num;
		break;
	case IBV_EVENT_CQ_ERR:
		out->cq = ev.element.cq;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		out->port = ev.element.port_num;
		break;
	default:
		break;
	}
	ibv_ack_async_event(&ev);
	return 0;
}

int shim_nonblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	return 0;
}

/*
 * The chains are linked for good when they are made; only the end of this
 * batch is cut for the call. A provider may fail without naming a bad WR (rxe
 * when its doorbell write fails): then all of them are in the queue.
 */
static int post_recv(struct shim_post *p)
{
	struct ibv_recv_wr *last = &p->recv[p->nrecv - 1];
	struct ibv_recv_wr *next = last->next, *bad = NULL;
	int err;

	last->next = NULL;
	err = ibv_post_recv(p->qp, p->recv, &bad);
	last->next = next;
	p->recv_done = err && bad ? bad - p->recv : p->nrecv;
	return abs(err);
}

static int post_send(struct shim_post *p)
{
	struct ibv_send_wr *last = &p->send[p->nsend - 1];
	struct ibv_send_wr *next = last->next, *bad = NULL;
	int err;

	last->next = NULL;
	err = ibv_post_send(p->qp, p->send, &bad);
	last->next = next;
	p->send_done = err && bad ? bad - p->send : p->nsend;
	return abs(err);
}

/* Receives go first, so that the answer to a send finds its buffer. */
int shim_post(uintptr_t posts, int n)
{
	struct shim_post *p = (struct shim_post *)posts;
	int failed = 0;

	for (; n > 0; n--, p++) {
		p->err = 0;
		p->err_recv = 0;
		p->recv_done = 0;
		p->send_done = 0;
		if (p->nrecv) {
			p->err = post_recv(p);
			p->err_recv = p->err != 0;
		}
		if (p->nsend && !p->err)
			p->err = post_send(p);
		failed += p->err != 0;
	}
	return failed;
}

int shim_poll(uintptr_t cq, uintptr_t wc, int n)
{
	return ibv_poll_cq((struct ibv_cq *)cq, n, (struct ibv_wc *)wc);
}

int shim_arm(uintptr_t cq)
{
	return abs(ibv_req_notify_cq((struct ibv_cq *)cq, 0));
}

/*
 * Takes the event, if there is one: never more than one is under way, because
 * the queue is armed again only after its event was taken. Returns 1, 0 or
 * -errno.
 */
int shim_drain(uintptr_t ch, uintptr_t cq)
{
	struct ibv_cq *ev_cq;
	void *ev_ctx;

	if (ibv_get_cq_event((struct ibv_comp_channel *)ch, &ev_cq, &ev_ctx))
		return errno == EAGAIN ? 0 : -errno;
	ibv_ack_cq_events((struct ibv_cq *)cq, 1);
	return 1;
}

int shim_qp_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	return abs(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

int shim_qp_rnr_timer(struct ibv_qp *qp, uint8_t code)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.min_rnr_timer = code,
	};

	return abs(ibv_modify_qp(qp, &attr,
				 IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER));
}

struct ibv_mr *shim_reg_mr(struct ibv_pd *pd, uintptr_t addr, size_t len,
			   int access)
{
	return ibv_reg_mr(pd, (void *)addr, len, access);
}

int shim_query_port(struct ibv_context *ctx, uint8_t port,
		    struct ibv_port_attr *attr)
{
	return abs(ibv_query_port(ctx, port, attr));
}

/*
 * librdmacm opens one context per device for the process and closes it when
 * the device was removed and no rdma_cm_id refers to it any more. A PD or MR
 * may outlive the last id, so hold a reference of our own: rdma_get_devices()
 * takes one on every device, and those of the others are given back at once.
 * rdma_free_devices() drops one reference for each context in the list that
 * it is given, and frees the list.
 */
struct ibv_context **shim_pin(struct ibv_context *ctx)
{
	struct ibv_context **all, **pin;
	int i, j = 0, n = 0;

	all = rdma_get_devices(&n);
	if (!all)
		return NULL;
	pin = calloc(2, sizeof(*pin));
	for (i = 0; i < n; i++) {
		if (all[i] == ctx && pin)
			pin[0] = ctx;
		else
			all[j++] = all[i];
	}
	all[j] = NULL;
	rdma_free_devices(all);
	if (!pin || !pin[0]) {
		errno = pin ? ENODEV : ENOMEM;
		free(pin);
		return NULL;
	}
	return pin;
}

void shim_unpin(struct ibv_context **pin)
{
	rdma_free_devices(pin);
}

int shim_refresh(void)
{
	struct ibv_context **all;
	int n = 0;

	all = rdma_get_devices(&n);
	if (!all)
		return 0;
	rdma_free_devices(all);
	return n;
}

/*
 * librdmacm keeps the context, and closes these descriptor numbers when it
 * finds out, so they must stay taken. Any verb on them fails from now on.
 */
void shim_let_go(struct ibv_context *ctx)
{
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return;
	dup3(fd, ctx->cmd_fd, O_CLOEXEC);
	dup3(fd, ctx->async_fd, O_CLOEXEC);
	close(fd);
}
