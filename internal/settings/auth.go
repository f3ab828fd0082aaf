package settings

import (
	"iserd.org/iserd/api"
	"iserd.org/iserd/iscsi/login"
)

var algorithms = map[string]login.CHAPAlgorithm{
	"MD5": login.CHAPMD5, "SHA1": login.CHAPSHA1, "SHA256": login.CHAPSHA256, "SHA3-256": login.CHAPSHA3256,
}

// Auth is how to prove who we are. Without a secret, or when the user wants no authentication, nothing is offered.
func Auth(s *api.Settings, secret, target api.Secret, initiator string) login.Auth {
	var a login.Auth
	if s.Auth == api.AuthNone {
		return a
	}
	a.Strong = s.CHAPPolicy == api.PolicyStrong
	a.Required = a.Strong || s.Auth == api.AuthCHAP
	a.Secret, a.TargetSecret = login.NewSecret(secret.Reveal()), login.NewSecret(target.Reveal())
	a.User, a.TargetUser = s.CHAPUser, s.CHAPTargetUser
	if a.User == "" {
		a.User = initiator
	}
	for _, name := range s.CHAPAlgorithms {
		a.Algorithms = append(a.Algorithms, algorithms[name])
	}
	return a
}
