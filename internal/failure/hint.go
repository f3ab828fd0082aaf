package failure

import (
	"errors"

	"iserd.org/iserd/iscsi/login"
)

// hints say what a person can do about a login that failed. The more particular come first.
var hints = []struct {
	err  error
	hint string
}{
	{login.ErrAuthFailed, "compare user and secret with those of the target: iserctl node show TARGET, iserctl node secret TARGET"},
	{login.ErrAuthorizationFailed, "the target has to admit our initiator name: iserctl status shows it"},
	{login.ErrRemoved, "what the portal offers now: iserctl discover ADDR"},
	{login.ErrNotFound, "what the portal offers: iserctl discover ADDR"},
	{login.ErrNoDigest, "allow None: iserctl node set TARGET header_digest=CRC32C,None data_digest=CRC32C,None"},
	{login.ErrTooManyConnections, "the target's limit of sessions is reached; fewer: setting reactors in /etc/iserd/iserd.toml"},
	{login.ErrOutOfResources, "tried several times; the target has no memory left for a session"},
}

// Hint says what a person can do about a failure, or "".
func Hint(err error) string {
	for _, h := range hints {
		if errors.Is(err, h.err) {
			return h.hint
		}
	}
	return ""
}

// Text is the failure as a person gets to see it: with its hint.
func Text(err error) string {
	if h := Hint(err); h != "" {
		return err.Error() + " (" + h + ")"
	}
	return err.Error()
}
