package bus

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/godbus/dbus/v5"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon"
)

// The polkit actions.
const (
	actionDiscover = "org.iserd.iser1.discover"
	actionLogin    = "org.iserd.iser1.login"
	actionLogout   = "org.iserd.iser1.logout"
	actionModify   = "org.iserd.iser1.modify"
	actionRegister = "org.iserd.iser1.register-buffer"
	actionAdopt    = "org.iserd.iser1.adopt-process"
	actionUpgrade  = "org.iserd.iser1.upgrade-data-plane"
	actionReload   = "org.iserd.iser1.reload"
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

// caller tells who sent a message. The unique name is one that nobody else can take over.
func (c *connection) caller(ctx context.Context, msg *dbus.Message) (daemon.Owner, error) {
	sender, _ := msg.Headers[dbus.FieldSender].Value().(string)
	o := daemon.Owner{Name: sender}
	ctx, cancel := context.WithTimeout(ctx, polkitTimeout)
	defer cancel()
	if err := c.conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.GetConnectionUnixUser", 0, sender).Store(&o.UID); err != nil {
		return o, api.Errorf(api.ErrAccessDenied, "the bus does not say who the caller is: %w", err)
	}
	o.Trusted = c.trusted(o.UID)
	return o, nil
}

// authorize lets a caller do what action names: a trusted user, or whoever polkit lets. Without polkitd only trusted users may. The subject is
// the caller's unique bus name, which nobody else can take over.
func (c *connection) authorize(ctx context.Context, msg *dbus.Message, action string) error {
	o, err := c.caller(ctx, msg)
	if err != nil || o.Trusted {
		return err
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
	err = c.conn.Object(polkitName, polkitPath).CallWithContext(pctx, polkitCheck, 0,
		subject{"system-bus-name", map[string]dbus.Variant{"name": dbus.MakeVariant(o.Name)}}, action, map[string]string{}, flags, "").Store(&r)
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
