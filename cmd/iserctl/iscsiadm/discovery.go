package iscsiadm

import (
	"context"
	"fmt"
	"slices"

	"iserd.org/iserd/api"
)

// discovery is -m discovery and -m discoverydb.
func (r *run) discovery(ctx context.Context) error {
	db := r.mode == modeDiscoveryDB
	switch r.disc {
	case typeISNS:
		return r.refuse(codeNoISNS, "Could not perform iSNS discovery: %s", message(codeNoISNS))
	case typeFW:
		if db && !r.discover {
			return r.refuse(codeInvalid, "Invalid command. Possibly missing --discover argument.")
		}
		return r.discoverFirmware(ctx)
	case typeSendTargets:
		if r.address == "" {
			return r.refuse(codeInvalid, "Please specify portal as <ipaddr>[:<ipport>]")
		}
	default:
		return r.discoveryWithoutType(ctx, db)
	}
	portal, err := r.askedPortal()
	if err != nil {
		return err
	}
	if !db {
		return r.sendTargets(ctx, portal)
	}
	if r.op&opNew != 0 && !r.discover {
		if err := r.resetPortal(ctx, portal); err != nil {
			r.trouble(err)
			return r.refuse(codeOf(err), "Could not add new discovery record.")
		}
		r.print("New discovery record for [%s,%d] added.\n", r.address, portal.Port)
		return nil
	}
	record, err := r.portalRecord(ctx, portal)
	switch {
	case err != nil:
		return err
	case r.discover:
		return r.sendTargets(ctx, portal)
	case record == nil:
		return r.refuse(codeDatabase, "Discovery record [%s,%d] not found.", r.address, portal.Port)
	}
	return r.portalOperation(ctx, record)
}

// discoveryWithoutType does what can be done when -t names nothing.
func (r *run) discoveryWithoutType(ctx context.Context, db bool) error {
	show := r.op == 0 || r.op == opShow
	switch {
	case r.address == "" && show:
		return r.printPortals(ctx)
	case r.address == "" && db:
		return r.refuse(codeInvalid, "Invalid operation. Operation not supported.")
	case r.address == "":
		return r.refuse(codeInvalid, "Invalid operation.")
	case db && r.op != 0:
		return r.refuse(codeInvalid, "Invalid command. Possibly missing discovery --type.")
	case db:
		return r.refuse(codeInvalid, "Invalid command. Portal not needed or Possibly missing discovery --type.")
	}
	portal, err := r.askedPortal()
	if err != nil {
		return err
	}
	record, err := r.portalRecord(ctx, portal)
	switch {
	case err != nil:
		return err
	case record == nil:
		return r.refuse(codeInvalid, "Discovery record [%s,%d] not found!", r.address, portal.Port)
	case r.discover, r.login:
		return r.sendTargets(ctx, portal)
	case r.op == opUpdate, r.op == opNew:
		return r.refuse(codeInvalid, "Operations new and update for discovery mode is not supported. Use discoverydb mode.")
	}
	return r.portalOperation(ctx, record)
}

// askedPortal is that of -p.
func (r *run) askedPortal() (api.Portal, error) {
	port := r.port
	if port == noPort {
		port = api.DefaultPort
	}
	if port < 1 || port > 65535 {
		return api.Portal{}, r.refuse(codeInvalid, "the port %d is not from 1 to 65535", port)
	}
	p, err := api.ParsePortal(api.Portal{Address: r.address, Port: uint16(port)}.String())
	if err != nil {
		r.trouble(err)
		return p, exit(codeOf(err))
	}
	return p, nil
}

// portalRecord is what is stored for discoveries at a portal, nil for nothing.
func (r *run) portalRecord(ctx context.Context, p api.Portal) (*api.PortalRecord, error) {
	reply, err := r.d.Portals(ctx)
	if err != nil {
		return nil, err
	}
	for i := range reply.Portals {
		if reply.Portals[i].Portal() == p {
			return &reply.Portals[i], nil
		}
	}
	return nil, nil
}

// resetPortal makes a portal's record, with the defaults also when there was one.
func (r *run) resetPortal(ctx context.Context, p api.Portal) error {
	record, err := r.portalRecord(ctx, p)
	if err != nil {
		return err
	}
	var names []string
	for i := range api.SettingTable {
		if api.SettingTable[i].Discovery {
			names = append(names, api.SettingTable[i].Name)
		}
	}
	if _, err := r.d.SetPortal(ctx, api.SettingsRequest{Portal: p.String(), Unset: names}); err != nil {
		return err
	}
	if record == nil {
		return nil
	}
	for _, name := range record.Secrets {
		if _, err := r.d.SetPortalSecret(ctx, api.SecretRequest{Portal: p.String(), Name: name}); err != nil {
			return err
		}
	}
	return nil
}

// portalOperation is -o with a record of a portal.
func (r *run) portalOperation(ctx context.Context, p *api.PortalRecord) error {
	switch {
	case r.op == 0, r.op == opShow:
		r.dumpPortal(p)
		return nil
	case r.op == opDelete:
		if _, err := r.d.DeletePortal(ctx, p.Portal().String()); err != nil {
			r.trouble(err)
			return r.refuse(codeOf(err), "Unable to delete record!")
		}
		return nil
	case r.op == opUpdate && len(r.params) == 0:
		return r.refuse(codeInvalid, "Update requires name and value.")
	case r.op == opUpdate:
		return r.updatePortal(ctx, p.Portal())
	}
	return r.refuse(codeInvalid, "Operation is not supported.")
}

func (r *run) updatePortal(ctx context.Context, p api.Portal) error {
	var c change
	for _, x := range r.params {
		if bad := c.add(x, discoveryKeys, silentDiscoveryKeys); bad != nil {
			for _, line := range bad {
				r.fail("%s", line)
			}
			return exit(codeInvalid)
		}
	}
	if len(c.set)+len(c.unset) > 0 {
		if _, err := r.d.SetPortal(ctx, api.SettingsRequest{Portal: p.String(), Set: c.set, Unset: c.unset}); err != nil {
			return err
		}
	}
	for _, s := range c.secrets {
		if _, err := r.d.SetPortalSecret(ctx, api.SecretRequest{Portal: p.String(), Name: s.name, Secret: s.value}); err != nil {
			return err
		}
	}
	for _, n := range c.notes {
		r.fail("%s", n)
	}
	return nil
}

func (r *run) dumpPortal(p *api.PortalRecord) {
	r.print("# BEGIN RECORD %s\n", recordVersion)
	for i := range discoveryKeys {
		k := &discoveryKeys[i]
		value := k.show(&p.Settings, p.Secrets, false)
		switch k.name {
		case "discovery.sendtargets.address":
			value = p.Address
		case "discovery.sendtargets.port":
			value = fmt.Sprint(p.Port)
		}
		r.field(k.name, value)
	}
	r.print("# END RECORD\n")
}

// printPortals lists the records of portals, with the records that they have brought for -P 1.
func (r *run) printPortals(ctx context.Context) error {
	reply, err := r.d.Portals(ctx)
	if err != nil {
		return err
	}
	if r.level < 1 {
		for _, p := range reply.Portals {
			r.print("%s via sendtargets\n", address(p.Address, int(p.Port)))
		}
		if len(reply.Portals) == 0 {
			return exit(codeNotFound)
		}
		return nil
	}
	nodes, err := r.nodes(ctx, filter{port: noPort})
	if err != nil {
		return err
	}
	none := func(n int) {
		if n == 0 {
			r.print("No targets found.\n")
		}
	}
	r.print("SENDTARGETS:\n")
	for _, p := range reply.Portals {
		r.print("DiscoveryAddress: %s,%d\n", p.Address, p.Port)
		r.tree(slices.DeleteFunc(slices.Clone(nodes), func(n api.Node) bool { return n.Source != p.Portal().String() }), "", true)
	}
	none(len(reply.Portals))
	r.print("iSNS:\n")
	none(0)
	r.print("STATIC:\n")
	static := slices.DeleteFunc(nodes, func(n api.Node) bool { return n.Source != "" })
	r.tree(static, "", true)
	none(len(static))
	r.print("FIRMWARE:\n")
	none(0)
	if len(reply.Portals)+len(static) == 0 {
		return exit(codeNotFound)
	}
	return nil
}

// sendTargets asks a portal and prints what it offers. The records that discovery makes keep what was set in them before.
func (r *run) sendTargets(ctx context.Context, portal api.Portal) error {
	const cannot = "Could not perform SendTargets discovery: %s"
	transport := api.TransportAuto
	if len(r.ifaces) > 0 {
		usable := slices.DeleteFunc(slices.Clone(r.ifaces), func(n string) bool {
			bad := n != ifaceDefault && n != ifaceISER
			if bad {
				r.fail("Could not read iface info for %s. There are the ifaces default and iser.", n)
			}
			return bad
		})
		switch {
		case len(usable) == 0:
			return exit(codeNotFound)
		case !slices.Contains(usable, ifaceDefault):
			transport = api.TransportISER
		}
	}
	save := r.op&opNonpersistent == 0
	if save {
		record, err := r.portalRecord(ctx, portal)
		if err == nil && record == nil {
			err = r.resetPortal(ctx, portal)
		}
		if err != nil {
			r.trouble(err)
			return r.refuse(codeOf(err), "Could not add new discovery record.")
		}
	}
	reply, err := r.d.Discover(ctx, api.DiscoverRequest{Portal: portal.String(), Transport: transport, Save: save})
	if err != nil {
		r.trouble(err)
		return r.refuse(codeOf(err), cannot, message(codeOf(err)))
	}
	if len(reply.Targets) == 0 {
		return r.refuse(codeNotFound, "No portals found")
	}
	list := make([]api.Node, len(reply.Targets))
	for i, t := range reply.Targets {
		list[i] = api.Node{Target: t.Target, Address: t.Address, Port: t.Port, TPGT: t.TPGT}
	}
	return r.found(ctx, list)
}

// found prints what a discovery has brought, and logs in on -l.
func (r *run) found(ctx context.Context, list []api.Node) error {
	switch {
	case r.level < 1:
		for _, n := range list {
			r.print("%s,%d %s\n", address(n.Address, int(n.Port)), n.TPGT, n.Target)
		}
	case r.level == 1:
		r.tree(list, "", true)
	}
	if !r.login {
		return nil
	}
	return r.loginAllOf(ctx, list)
}
