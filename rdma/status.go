package rdma

import "fmt"

// Status is the result of a work request: enum ibv_wc_status. It is an error, so that errors.Is(err, StatusFlushed) works on a *WCError.
type Status uint32

// The statuses of ibv_poll_cq(3), with verbs.h's values; the last one is this package's own.
const (
	StatusSuccess          Status = 0  // IBV_WC_SUCCESS
	StatusLocalLength      Status = 1  // IBV_WC_LOC_LEN_ERR: message longer than the buffer or the port's limit
	StatusLocalQPOperation Status = 2  // IBV_WC_LOC_QP_OP_ERR
	StatusLocalEEContext   Status = 3  // IBV_WC_LOC_EEC_OP_ERR
	StatusLocalProtection  Status = 4  // IBV_WC_LOC_PROT_ERR: LKey or range of a local buffer is wrong
	StatusFlushed          Status = 5  // IBV_WC_WR_FLUSH_ERR: the QP was in the error state
	StatusMWBind           Status = 6  // IBV_WC_MW_BIND_ERR
	StatusBadResponse      Status = 7  // IBV_WC_BAD_RESP_ERR
	StatusLocalAccess      Status = 8  // IBV_WC_LOC_ACCESS_ERR: a peer's RDMA failed on local memory
	StatusRemoteInvalid    Status = 9  // IBV_WC_REM_INV_REQ_ERR: for a send, the peer's receive buffer was too short
	StatusRemoteAccess     Status = 10 // IBV_WC_REM_ACCESS_ERR: RKey or range at the peer is wrong
	StatusRemoteOperation  Status = 11 // IBV_WC_REM_OP_ERR
	StatusRetryExceeded    Status = 12 // IBV_WC_RETRY_EXC_ERR: the peer or the network does not answer
	StatusRNRRetryExceeded Status = 13 // IBV_WC_RNR_RETRY_EXC_ERR: the peer posted no receive in time
	StatusLocalRDDomain    Status = 14 // IBV_WC_LOC_RDD_VIOL_ERR
	StatusRemoteInvalidRD  Status = 15 // IBV_WC_REM_INV_RD_REQ_ERR
	StatusRemoteAborted    Status = 16 // IBV_WC_REM_ABORT_ERR
	StatusInvalidEECN      Status = 17 // IBV_WC_INV_EECN_ERR
	StatusInvalidEEState   Status = 18 // IBV_WC_INV_EEC_STATE_ERR
	StatusFatal            Status = 19 // IBV_WC_FATAL_ERR: the adapter broke
	StatusResponseTimeout  Status = 20 // IBV_WC_RESP_TIMEOUT_ERR
	StatusGeneral          Status = 21 // IBV_WC_GENERAL_ERR
	StatusTagMatching      Status = 22 // IBV_WC_TM_ERR
	StatusTagRendezvous    Status = 23 // IBV_WC_TM_RNDV_INCOMPLETE

	StatusNotPosted Status = 0x10000 // the adapter refused it at Flush, no other completion will come
)

var statusNames = [...]string{
	StatusSuccess:          "success",
	StatusLocalLength:      "local length error",
	StatusLocalQPOperation: "local QP operation error",
	StatusLocalEEContext:   "local EE context operation error",
	StatusLocalProtection:  "local protection error",
	StatusFlushed:          "work request flushed",
	StatusMWBind:           "memory window bind error",
	StatusBadResponse:      "bad response",
	StatusLocalAccess:      "local access error",
	StatusRemoteInvalid:    "remote invalid request",
	StatusRemoteAccess:     "remote access error",
	StatusRemoteOperation:  "remote operation error",
	StatusRetryExceeded:    "transport retry count exceeded",
	StatusRNRRetryExceeded: "receiver not ready retry count exceeded",
	StatusLocalRDDomain:    "local RDD violation",
	StatusRemoteInvalidRD:  "remote invalid RD request",
	StatusRemoteAborted:    "remote aborted",
	StatusInvalidEECN:      "invalid EE context number",
	StatusInvalidEEState:   "invalid EE context state",
	StatusFatal:            "fatal adapter error",
	StatusResponseTimeout:  "response timeout",
	StatusGeneral:          "general error",
	StatusTagMatching:      "tag matching error",
	StatusTagRendezvous:    "tag matching rendezvous incomplete",
}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	if s == StatusNotPosted {
		return "not posted"
	}
	return fmt.Sprintf("status %d", uint32(s))
}

// Error makes a Status a sentinel error.
func (s Status) Error() string { return s.String() }
