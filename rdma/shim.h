/*
 * What Go cannot call by itself: the inline functions of verbs.h, and loops
 * that are one crossing from Go this way. No call back into Go, no state.
 */
#ifndef ISERD_RDMA_SHIM_H
#define ISERD_RDMA_SHIM_H

#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* A CM event by value; the library's own was acknowledged. */
struct shim_cm_event {
	struct rdma_cm_id *id;
	int event;
	int status;
	int private_len;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t private_data[256];
};

/* An asynchronous event by value; the library's own was acknowledged. */
struct shim_async_event {
	int event;
	uint32_t qpn;		/* of QP events, else 0 */
	uint32_t port;		/* of port events, else 0 */
	struct ibv_cq *cq;	/* of CQ events, else NULL; may be gone */
};

/* The chains of one QP, and what became of them. */
struct shim_post {
	struct ibv_qp *qp;
	struct ibv_recv_wr *recv;
	struct ibv_send_wr *send;
	int nrecv;		/* in */
	int nsend;		/* in */
	int recv_done;		/* out: posted, from the start of the chain */
	int send_done;		/* out */
	int err;		/* out: errno, or 0 */
	int err_recv;		/* out: err is of ibv_post_recv */
};

int shim_get_cm_event(struct rdma_event_channel *ch, struct shim_cm_event *out);
int shim_get_async_event(struct ibv_context *ctx, struct shim_async_event *out);
int shim_nonblock(int fd);

/*
 * The calls of the data path take addresses as numbers: cgo looks through
 * arguments that are pointers at each call, and these are never Go's.
 */
int shim_post(uintptr_t posts, int n);
int shim_poll(uintptr_t cq, uintptr_t wc, int n);
int shim_arm(uintptr_t cq);
int shim_drain(uintptr_t ch, uintptr_t cq);

int shim_qp_error(struct ibv_qp *qp);
int shim_qp_rnr_timer(struct ibv_qp *qp, uint8_t code);
struct ibv_mr *shim_reg_mr(struct ibv_pd *pd, uintptr_t addr, size_t len,
			   int access);
int shim_query_port(struct ibv_context *ctx, uint8_t port,
		    struct ibv_port_attr *attr);

/* Keeps librdmacm from closing ctx until shim_unpin(); NULL and errno if not. */
struct ibv_context **shim_pin(struct ibv_context *ctx);
void shim_unpin(struct ibv_context **pin);

/* Has librdmacm read the list of devices again; returns their number. */
int shim_refresh(void);

/* Closes what the kernel has open for ctx, of a device that was removed. */
void shim_let_go(struct ibv_context *ctx);

#endif
