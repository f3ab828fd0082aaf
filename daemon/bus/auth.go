package bus

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
)

// The polkit actions.
const (
	actionDiscover = "org.iserd.iser1.discover"
	actionLogin    = "org.iserd.iser1.login"
	actionLogout   = "org.iserd.iser1.logout"
	actionModify   = "org.iserd.iser1.modify"
)

const (
	polkitName      = "org.freedesktop.PolicyKit1"
	polkitPath      = "/org/freedesktop/PolicyKit1/Authority"
	polkitCheck     = "org.freedesktop.PolicyKit1.Authority.CheckAuthorization"
	polkitInteract  = uint32(1) // AllowUserInteraction
	polkitTimeout   = 10 * time.Second
	interactTimeout = 5 * time.Minute // a person types a password
)

// trusted are the users who need no leave: root and the daemon's own.
func trusted(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

// authorize lets a caller do what action names: a trusted user, or whoever polkit lets. Without polkitd only trusted users may. The subject is
// the caller's unique bus name, which nobody else can take over.
func (c *connection) authorize(ctx context.Context, msg *dbus.Message, action string) error {
	sender, _ := msg.Headers[dbus.FieldSender].Value().(string)
	var uid uint32
	bctx, cancel := context.WithTimeout(ctx, polkitTimeout)
	defer cancel()
	if err := c.conn.BusObject().CallWithContext(bctx, "org.freedesktop.DBus.GetConnectionUnixUser", 0, sender).Store(&uid); err != nil {
		return api.Errorf(api.ErrAccessDenied, "the bus does not say who the caller is: %w", err)
	}
	if c.trusted(uid) {
		return nil
	}
	flags, limit := uint32(0), polkitTimeout
	if msg.Flags&dbus.FlagAllowInteractiveAuthorization != 0 {
		flags, limit = polkitInteract, interactTimeout
	}
	pctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type subject struct {
		Kind    string
		Details map[string]dbus.Variant
	}
	type result struct {
		Authorized, Challenge bool
		Details               map[string]string
	}
	var r result
	err := c.conn.Object(polkitName, polkitPath).CallWithContext(pctx, polkitCheck, 0,
		subject{"system-bus-name", map[string]dbus.Variant{"name": dbus.MakeVariant(sender)}}, action, map[string]string{}, flags, "").Store(&r)
	var derr dbus.Error
	switch {
	case errors.As(err, &derr) && (derr.Name == "org.freedesktop.DBus.Error.ServiceUnknown" || derr.Name == "org.freedesktop.DBus.Error.NameHasNoOwner"):
		return api.Errorf(api.ErrAccessDenied, "permission denied: only root may do this, there is no polkit to ask for others")
	case err != nil:
		return api.Errorf(api.ErrAccessDenied, "permission denied: polkit does not answer: %w", err)
	case r.Authorized:
		return nil
	case r.Challenge:
		return api.Errorf(api.ErrInteractiveRequired, "permission denied: %s needs a password", action)
	}
	return api.Errorf(api.ErrAccessDenied, "permission denied: polkit refuses %s", action)
}
