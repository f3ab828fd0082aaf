package iscsiadm

import (
	"fmt"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/version"
)

// Exit codes of iscsiadm(8), those that are made here; the others come with the daemon's failures.
const (
	codeUnknown       = 1
	codeNoMemory      = 3
	codeDatabase      = 6
	codeInvalid       = 7
	codeSessionExists = 15
	codeNoISNS        = 17
	codeFatalLogin    = 19
	codeNotFound      = 21
	codeSysfs         = 22
	codeNotSupported  = 27
)

// messages are the words of iscsiadm for its exit codes.
var messages = [...]string{
	1: "unknown error", 2: "session not found", 3: "no available memory", 4: "encountered connection failure", 5: "encountered iSCSI login failure",
	6: "encountered iSCSI database failure", 7: "invalid parameter", 8: "connection timed out", 9: "internal error", 10: "encountered iSCSI logout failure",
	11: "iSCSI PDU timed out", 12: "iSCSI driver not found. Please make sure it is loaded, and retry the operation", 13: "daemon access denied",
	14: "iSCSI driver does not support requested capability.", 15: "session exists", 16: "Unknown request", 17: "iSNS service not supported",
	18: "could not communicate to iscsid", 19: "encountered non-retryable iSCSI login failure", 20: "could not connect to iscsid", 21: "no objects found",
	22: "sysfs lookup failure", 23: "host not found", 24: "iSCSI login failed due to authorization failure", 25: "iSNS query failed",
	26: "iSNS registration failed", 27: "operation not supported", 28: "device or resource in use", 29: "operation failed but retry may succeed",
	30: "unknown discovery type", 31: "child process terminated", 32: "target likely not connected", 33: "iscsid request timed out",
}

// message is the text for an exit code.
func message(code int) string {
	if code > 0 && code < len(messages) {
		return messages[code]
	}
	return messages[1]
}

// codeOf is the exit code for a failure of the daemon.
func codeOf(err error) int {
	switch api.NameOf(err) {
	case api.ErrCommandFailed, api.ErrReservationConflict: // numbers that mean something else here
		return codeUnknown
	}
	return api.ExitCode(err)
}

// loginCode is codeOf for a login. A target that is not there is no missing record: it is what iscsiadm says of the target's status 02/03.
func loginCode(err error) int {
	if c := codeOf(err); c != codeNotFound {
		return c
	}
	return codeFatalLogin
}

// recordVersion is the release of open-iscsi whose words and records these are.
const recordVersion = "2.1.11"

func versionLine() string {
	return fmt.Sprintf("iscsiadm version %s (iserd %s)\n", recordVersion, version.String())
}

// plain marks lines for standard error that come without the name of the program.
const plain = "\x00"

const tryHelp = plain + "Try `iscsiadm --help' for more information."

const usage = `iscsiadm commands, carried out by iserd. See docs/iscsiadm.md for what is different.

  -m discovery   -t sendtargets|fw -p ADDR[:PORT] [-I IFACE] [-l] [-o new|update|delete|nonpersistent] [-P 0|1]
  -m discoverydb [-t sendtargets -p ADDR[:PORT] [-D] [-l] [-o new|show|update|delete] [-n NAME -v VALUE]...] [-P 0|1]
  -m node        [-T TARGET] [-p ADDR[:PORT]] [-I IFACE] [-l|-u|-R|-s] [-o new|show|update|delete] [-n NAME -v VALUE]... [-P 0|1] [-S]
  -m node        -L all|manual|automatic|onboot | -U all|manual|automatic
  -m session     [-r SESSION] [-u|-R|-s] [-o show|update|delete] [-n NAME -v VALUE]... [-P 0..3] [-S]
  -m iface       [-I default|iser] [-o show] [-P 0|1]
  -m host        [-P 0]
  -m fw          [-l]
  -h | -V        alone; every mode takes -d LEVEL
`
