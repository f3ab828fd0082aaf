package dataplane

import (
	"errors"

	"iserd.org/iserd/api"
	"iserd.org/iserd/internal/failure"
	"iserd.org/iserd/internal/ipc"
	"iserd.org/iserd/iscsi/login"
)

// classify gives an error the name that the control plane passes on.
func classify(err error) *ipc.Error {
	var coded *ipc.Error
	if errors.As(err, &coded) {
		return coded
	}
	return &ipc.Error{Code: failure.Name(err, api.ErrInternal), Text: failure.Text(err)}
}

// coded is classify for an error that may be nil.
func coded(err error) error {
	if err == nil {
		return nil
	}
	return classify(err)
}

// refusedByTarget reports whether a target was reached and said no, so that another transport would not help.
func refusedByTarget(err error) bool {
	var refused *login.LoginError
	return errors.As(err, &refused) && refused.Class != 0 // class 0 was found on this side: no iSER there, or the connection lost
}
