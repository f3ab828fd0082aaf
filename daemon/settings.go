package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/records"
	"iserd.org/iserd/internal/ipc"
)

// SetNode changes settings of the records that match: of all of them, or of none when a value is wrong. They count from the next login on.
func (s *Service) SetNode(_ context.Context, r api.SettingsRequest) (api.NodesReply, error) {
	reply := api.NodesReply{Version: api.Version, Nodes: []api.Node{}, Problems: []string{}}
	list, err := s.selected(r.Target, r.Portal)
	if err != nil {
		return reply, err
	}
	for _, n := range list { // all are tried before the first is stored
		if err := edit(&n, r); err != nil {
			return reply, err
		}
		if err := n.Settings.Check(); err != nil {
			return reply, err
		}
	}
	defer s.changed()
	for _, n := range list {
		n, err := s.nodes.Change(n.ID(), func(n *records.Node) error { return edit(n, r) })
		if err != nil {
			return reply, api.Wrap(err, api.ErrDatabase, "store settings")
		}
		reply.Nodes = append(reply.Nodes, s.nodeOf(n))
	}
	return reply, nil
}

// selected finds the records to change. None is NotFound.
func (s *Service) selected(target, portal string) ([]records.Node, error) {
	if target == "" {
		return nil, api.Errorf(api.ErrInvalidArgs, "name a target")
	}
	list, err := s.match(api.NodeFilter{Target: target, Portal: portal})
	if err == nil && len(list) == 0 {
		err = api.Errorf(api.ErrNotFound, "no record of %s; store one with: iserctl discover ADDR --save, or iserctl node add", target)
	}
	return list, err
}

// edit applies a request to a record.
func edit(n *records.Node, r api.SettingsRequest) error {
	if len(r.Set)+len(r.Unset) == 0 {
		return api.Errorf(api.ErrInvalidArgs, "nothing to change: give NAME=VALUE, or a name to unset")
	}
	for _, name := range r.Unset {
		if name == api.MovedTo {
			n.MovedTo = ""
		} else if err := n.Settings.Unset(name); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Set)) {
		if err := n.Settings.Set(name, r.Set[name]); err != nil {
			return err
		}
	}
	if n.Settings.Transport == "" {
		n.Settings.Transport = api.TransportAuto
	}
	return nil
}

// SetNodeSecret stores a secret for the records that match, or removes it.
func (s *Service) SetNodeSecret(_ context.Context, r api.SecretRequest) (api.NodesReply, error) {
	reply := api.NodesReply{Version: api.Version, Nodes: []api.Node{}, Problems: []string{}}
	list, err := s.selected(r.Target, r.Portal)
	if err != nil {
		return reply, err
	}
	defer s.changed()
	for _, n := range list {
		if err := s.secrets.Set(n.ID(), r.Name, r.Secret); err != nil {
			return reply, api.Wrap(err, api.ErrDatabase, "store secret")
		}
		reply.Nodes = append(reply.Nodes, s.nodeOf(n))
	}
	return reply, nil
}

// loginSecrets reads the secrets for a login, and checks that there is what the settings ask for.
func (s *Service) loginSecrets(id string, how *api.Settings) (records.SecretSet, error) {
	if how.Auth == api.AuthNone {
		return records.SecretSet{}, nil
	}
	set, err := s.secrets.Get(id)
	switch {
	case err != nil:
		return records.SecretSet{}, api.Errorf(api.ErrDatabase, "%w", err)
	case !set.Secret.IsZero():
		for _, secret := range []api.Secret{set.Secret, set.TargetSecret} {
			if n := len(secret.Reveal()); how.CHAPPolicy == api.PolicyStrong && !secret.IsZero() && n < api.StrongSecret {
				return set, api.Errorf(api.ErrInvalidArgs, "chap_policy=strong refuses a secret of %d bytes; %d or more are wanted", n, api.StrongSecret)
			}
		}
	case how.Auth == api.AuthCHAP, how.CHAPPolicy == api.PolicyStrong:
		return set, api.Errorf(api.ErrInvalidArgs, "CHAP is required by auth or chap_policy, but there is no chap_secret: iserctl node secret TARGET, or iserctl discovery secret ADDR")
	case !set.TargetSecret.IsZero():
		return set, api.Errorf(api.ErrInvalidArgs, "there is a chap_target_secret, but no chap_secret: the target proves itself only to whom has proved himself")
	}
	return set, nil
}

// binding takes out of settings what says which way connections go.
func binding(from api.Settings) api.Settings {
	return api.Settings{SourceAddress: from.SourceAddress, NetworkInterface: from.NetworkInterface, RDMADevice: from.RDMADevice}
}

// portalSettings tells how a portal is to be asked: as its record says, else by the fallback; set goes over both.
func (s *Service) portalSettings(p api.Portal, set map[string]string, fallback api.Settings) (api.Settings, records.SecretSet, error) {
	key := records.PortalKey(p)
	how := fallback
	n, err := s.portals.Get(key.ID())
	if err == nil {
		how = n.Settings.Settings
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if err := setPortal(&how, name, set[name]); err != nil {
			return how, records.SecretSet{}, err
		}
	}
	if err := how.Check(); err != nil {
		return how, records.SecretSet{}, err
	}
	secrets, err := s.loginSecrets(key.ID(), &how)
	return how, secrets, api.Wrap(err, api.ErrDatabase, "discover %s", p)
}

func setPortal(how *api.Settings, name, value string) error {
	if r, err := api.FindSetting(name); err == nil && !r.Discovery {
		return api.Errorf(api.ErrInvalidArgs, "%s means nothing for a discovery", name)
	}
	return how.Set(name, value)
}

// Portals lists how portals are asked, those without a record of it left out.
func (s *Service) Portals() api.PortalsReply {
	r := api.PortalsReply{Version: api.Version, Portals: []api.PortalRecord{}, Problems: append([]string{}, s.portals.Problems()...)}
	for _, n := range s.portals.List() {
		r.Portals = append(r.Portals, s.portalOf(n))
	}
	return r
}

func (s *Service) portalOf(n records.Node) api.PortalRecord {
	how := n.Settings.Settings
	how.Transport = ""
	return api.PortalRecord{Address: n.Address, Port: n.Port, Settings: how, Secrets: s.secrets.Names(n.ID())}
}

// portal makes the answer to a change of one portal's record.
func (s *Service) portal(n records.Node) api.PortalsReply {
	s.changed()
	return api.PortalsReply{Version: api.Version, Portals: []api.PortalRecord{s.portalOf(n)}, Problems: []string{}}
}

// SetPortal changes how a portal is asked, from the next discovery on.
func (s *Service) SetPortal(_ context.Context, r api.SettingsRequest) (api.PortalsReply, error) {
	p, err := askedPortal(r.Target, r.Portal)
	if err != nil {
		return api.PortalsReply{}, err
	}
	var try api.Settings
	for _, name := range slices.Sorted(maps.Keys(r.Set)) {
		if err := setPortal(&try, name, r.Set[name]); err != nil {
			return api.PortalsReply{}, err
		}
	}
	draft := records.Node{}
	if err := errors.Join(edit(&draft, r), draft.Settings.Check()); err != nil {
		return api.PortalsReply{}, api.Wrap(err, api.ErrInvalidArgs, "portal %s", p)
	}
	n, err := s.portals.Add(records.PortalKey(p))
	if err == nil {
		n, err = s.portals.Change(n.ID(), func(n *records.Node) error { return edit(n, r) })
	}
	if err != nil {
		return api.PortalsReply{}, api.Wrap(err, api.ErrDatabase, "store settings")
	}
	return s.portal(n), nil
}

func askedPortal(target, portal string) (api.Portal, error) {
	if target != "" {
		return api.Portal{}, api.Errorf(api.ErrInvalidArgs, "a discovery has no target")
	}
	return api.ParsePortal(portal)
}

// SetPortalSecret stores a secret for discoveries, or removes it.
func (s *Service) SetPortalSecret(_ context.Context, r api.SecretRequest) (api.PortalsReply, error) {
	p, err := askedPortal(r.Target, r.Portal)
	if err != nil {
		return api.PortalsReply{}, err
	}
	n, err := s.portals.Add(records.PortalKey(p))
	if err == nil {
		err = s.secrets.Set(n.ID(), r.Name, r.Secret)
	}
	if err != nil {
		return api.PortalsReply{}, api.Wrap(err, api.ErrDatabase, "store secret")
	}
	return s.portal(n), nil
}

// DeletePortal forgets how a portal is asked, secrets included. Records of targets stay.
func (s *Service) DeletePortal(_ context.Context, f api.NodeFilter) (api.PortalsReply, error) {
	p, err := askedPortal(f.Target, f.Portal)
	if err != nil {
		return api.PortalsReply{}, err
	}
	n, err := s.portals.Get(records.PortalKey(p).ID())
	if err != nil {
		return api.PortalsReply{}, api.Errorf(api.ErrNotFound, "nothing is stored for discoveries at %s", p)
	}
	r := api.PortalsReply{Version: api.Version, Portals: []api.PortalRecord{s.portalOf(n)}, Problems: []string{}}
	if err := errors.Join(s.secrets.Delete(n.ID()), s.portals.Delete(n.ID())); err != nil {
		return r, api.Errorf(api.ErrDatabase, "%w", err)
	}
	s.changed()
	return r, nil
}

// noteMove stores where a target has moved to for good by its own word, after a login at one of its portals; "" says that it is there.
func (s *Service) noteMove(id string, at api.Portal, movedTo string) {
	n, err := s.nodes.Get(id)
	if err != nil {
		return // no record, nothing to store
	}
	if movedTo == "" {
		movedTo = at.String()
	}
	if movedTo == n.Portal().String() {
		movedTo = ""
	}
	if p, err := api.ParsePortal(movedTo); movedTo != "" && (err != nil || p.String() != movedTo) || movedTo == n.MovedTo {
		return
	}
	log := s.log.WithFields(map[string]any{"target": n.Target, "portal": n.Portal().String()})
	if _, err := s.nodes.Change(id, func(n *records.Node) error { n.MovedTo = movedTo; return nil }); err != nil {
		log.WithError(err).Error("where the target has moved to cannot be stored")
		return
	}
	if movedTo == "" {
		log.Info("the target is back at its first portal")
	} else {
		log.Infof("the target says that it has moved to %s for good; stored", movedTo)
	}
	s.changed()
}

// noteMoveDuring is noteMove for a session that was sent on while it was brought back.
func (s *Service) noteMoveDuring(g ipc.Group) {
	n, err := s.nodes.Get(g.ID)
	if err != nil || g.MovedTo == "" && n.MovedTo == g.Portal {
		return // the session was made where the target had moved to, and is there again
	}
	at := n.Portal()
	if p, err := api.ParsePortal(g.MovedTo); err == nil {
		at = p
	}
	s.noteMove(g.ID, at, g.MovedTo)
}
