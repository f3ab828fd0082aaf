package ublk

import (
	"strconv"
	"strings"

	"iserd.org/iserd/internal/uapi"
)

// Features is a set of UBLK_F_* flags: what a driver can do, or what a device was added with.
type Features uint64

// The features, named as in include/uapi/linux/ublk_cmd.h.
const (
	FeatureZeroCopy        Features = Features(uapi.UBLK_F_SUPPORT_ZERO_COPY)
	FeatureCompInTask      Features = Features(uapi.UBLK_F_URING_CMD_COMP_IN_TASK) // always set by the driver
	FeatureNeedGetData     Features = Features(uapi.UBLK_F_NEED_GET_DATA)
	FeatureRecovery        Features = Features(uapi.UBLK_F_USER_RECOVERY)         // the device outlives its server; requests wait
	FeatureRecoveryReissue Features = Features(uapi.UBLK_F_USER_RECOVERY_REISSUE) // requests in flight are delivered again
	FeatureUnprivileged    Features = Features(uapi.UBLK_F_UNPRIVILEGED_DEV)
	FeatureIoctlEncode     Features = Features(uapi.UBLK_F_CMD_IOCTL_ENCODE) // always set by the driver
	FeatureUserCopy        Features = Features(uapi.UBLK_F_USER_COPY)        // the mode that this package serves
	FeatureZoned           Features = Features(uapi.UBLK_F_ZONED)
	FeatureRecoveryFailIO  Features = Features(uapi.UBLK_F_USER_RECOVERY_FAIL_IO) // without a server, requests fail at once
	FeatureUpdateSize      Features = Features(uapi.UBLK_F_UPDATE_SIZE)
	FeatureAutoBufReg      Features = Features(uapi.UBLK_F_AUTO_BUF_REG)
	FeatureQuiesce         Features = Features(uapi.UBLK_F_QUIESCE)
	FeaturePerIODaemon     Features = Features(uapi.UBLK_F_PER_IO_DAEMON)      // set by the driver
	FeatureBufRegOffDaemon Features = Features(uapi.UBLK_F_BUF_REG_OFF_DAEMON) // set by the driver
	FeatureBatchIO         Features = Features(uapi.UBLK_F_BATCH_IO)
	FeatureIntegrity       Features = Features(uapi.UBLK_F_INTEGRITY)
	FeatureSafeStop        Features = Features(uapi.UBLK_F_SAFE_STOP_DEV) // TRY_STOP_DEV exists; set by the driver
	FeatureNoAutoPartScan  Features = Features(uapi.UBLK_F_NO_AUTO_PART_SCAN)
	FeatureSharedMemory    Features = Features(uapi.UBLK_F_SHMEM_ZC)
)

// featureTable holds, by bit, the name and the first kernel that has the feature.
var featureTable = []struct {
	name   string
	kernel string
}{
	{"SUPPORT_ZERO_COPY", "6.15"},
	{"URING_CMD_COMP_IN_TASK", "6.0"},
	{"NEED_GET_DATA", "6.0"},
	{"USER_RECOVERY", "6.1"},
	{"USER_RECOVERY_REISSUE", "6.1"},
	{"UNPRIVILEGED_DEV", "6.3"},
	{"CMD_IOCTL_ENCODE", "6.4"},
	{"USER_COPY", "6.5"},
	{"ZONED", "6.6"},
	{"USER_RECOVERY_FAIL_IO", "6.13"},
	{"UPDATE_SIZE", "6.16"},
	{"AUTO_BUF_REG", "6.16"},
	{"QUIESCE", "6.16"},
	{"PER_IO_DAEMON", "6.16"},
	{"BUF_REG_OFF_DAEMON", "6.17"},
	{"BATCH_IO", "7.0"},
	{"INTEGRITY", "7.0"},
	{"SAFE_STOP_DEV", "7.0"},
	{"NO_AUTO_PART_SCAN", "7.0"},
	{"SHMEM_ZC", "7.1"},
}

// Has reports whether every feature of want is in f.
func (f Features) Has(want Features) bool { return f&want == want }

// Names gives the features by their kernel names without UBLK_F_, in the order of their bits; a bit without a name is "bitN".
func (f Features) Names() []string {
	var names []string
	for bit := range 64 {
		if f&(1<<bit) == 0 {
			continue
		}
		if bit < len(featureTable) {
			names = append(names, featureTable[bit].name)
		} else {
			names = append(names, "bit"+strconv.Itoa(bit))
		}
	}
	return names
}

// String gives the names joined by "|", or "none".
func (f Features) String() string {
	if f == 0 {
		return "none"
	}
	return strings.Join(f.Names(), "|")
}

// needs tells in words which kernel has all of f.
func (f Features) needs() string {
	var parts []string
	for bit := range 64 {
		switch {
		case f&(1<<bit) == 0:
		case bit < len(featureTable):
			parts = append(parts, featureTable[bit].name+" (kernel "+featureTable[bit].kernel+")")
		default:
			parts = append(parts, "bit"+strconv.Itoa(bit)+" (unknown)")
		}
	}
	return strings.Join(parts, ", ")
}
