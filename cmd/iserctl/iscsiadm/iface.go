package iscsiadm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"iserd.org/iserd/api"
)

// ifaceFields prints the names of a record that belong to its iface.
func (r *run) ifaceFields(name string) {
	for _, k := range ifaceKeys {
		value := k.preset
		switch k.name {
		case "iface.iscsi_ifacename":
			value = name
		case "iface.transport_name":
			value = transportOf(name)
		}
		r.field(k.name, value)
	}
}

// iface is -m iface: there are two, which cannot be changed.
func (r *run) iface(ctx context.Context) error {
	switch {
	case r.op == opNew, r.op == opDelete, r.op == opUpdate, r.op == opApply, r.op == opApplyAll:
		return r.unsupported("the ifaces default and iser are fixed; a record is bound to an address or a device with: iserctl node set TARGET source_address=ADDR")
	case r.op != 0 && r.op != opShow:
		return exit(codeInvalid)
	case r.level > 1 || r.level < -1:
		return r.refuse(codeInvalid, "Invalid info level %d. Try 0 - 1.", r.level)
	}
	name, err := r.knownIface(codeDatabase)
	if err != nil {
		return err
	}
	if r.level == 1 {
		nodes, err := r.nodes(ctx, filter{port: noPort})
		if err != nil {
			return err
		}
		for _, x := range []string{ifaceDefault, ifaceISER} {
			if name == "" || name == x {
				r.print("Iface: %s\n", x)
				var own []api.Node
				for _, n := range nodes {
					if ifaceOf(&n) == x {
						own = append(own, n)
					}
				}
				r.tree(own, "\t", false)
			}
		}
		return nil
	}
	if name != "" {
		r.print("# BEGIN RECORD %s\n", recordVersion)
		r.ifaceFields(name)
		r.print("# END RECORD\n")
		return nil
	}
	for _, x := range []string{ifaceDefault, ifaceISER} {
		r.print("%s %s,%s\n", x, transportOf(x), strings.Join([]string{empty, empty, empty, empty}, ","))
	}
	return nil
}

// firmwareTable reads the boot table.
func (r *run) firmwareTable(ctx context.Context, save bool) (api.FirmwareReply, error) {
	reply, err := r.d.Firmware(ctx, api.FirmwareRequest{Save: save})
	if err == nil && len(reply.Targets) == 0 {
		err = api.Errorf(api.ErrNotFound, "the firmware names no target")
	}
	if err != nil {
		r.detail(err)
		return reply, r.refuse(codeOf(err), "Could not get list of targets from firmware. (err %d)", codeOf(err))
	}
	return reply, nil
}

func firmwareNodes(reply *api.FirmwareReply) []api.Node {
	list := make([]api.Node, len(reply.Targets))
	for i, t := range reply.Targets {
		list[i] = api.Node{Target: t.Target, Address: t.Address, Port: t.Port, TPGT: 1}
	}
	return list
}

// discoverFirmware is -m discovery -t fw.
func (r *run) discoverFirmware(ctx context.Context) error {
	reply, err := r.firmwareTable(ctx, r.op&opNonpersistent == 0)
	if err != nil {
		return err
	}
	return r.found(ctx, firmwareNodes(&reply))
}

// firmware is -m fw. A login goes by the records, which it makes if there are none; pairs of -n and -v have to be put into those.
func (r *run) firmware(ctx context.Context) error {
	if r.login && len(r.params) > 0 {
		return r.unsupported("-n and -v do not go with a login from the firmware; store the records with -m discovery -t fw and update those")
	}
	reply, err := r.firmwareTable(ctx, r.login)
	if err != nil {
		return err
	}
	if r.login {
		var code exit
		if err := r.loginAllOf(ctx, firmwareNodes(&reply)); err != nil && !errors.As(err, &code) {
			return err
		}
		return nil // as iscsiadm: what failed is on standard error
	}
	for i := range reply.Targets {
		r.firmwareEntry(&reply, &reply.Targets[i])
	}
	return nil
}

func (r *run) firmwareEntry(reply *api.FirmwareReply, t *api.FirmwareTarget) {
	field := func(name, value string) {
		if value != "" {
			r.print("%s = %s\n", name, value)
		}
	}
	r.print("# BEGIN RECORD %s\n", recordVersion)
	field("iface.initiatorname", reply.InitiatorName)
	field("iface.transport_name", "tcp")
	for _, n := range reply.NICs {
		if n.Index != t.NIC {
			continue
		}
		field("iface.hwaddress", n.MAC)
		proto := "STATIC"
		if n.DHCP != "" {
			proto = "DHCP"
		}
		field("iface.bootproto", proto)
		field("iface.ipaddress", n.Address)
		if n.PrefixLength > 0 {
			field("iface.prefix_len", fmt.Sprint(n.PrefixLength))
		}
		field("iface.gateway", n.Gateway)
		for i, name := range []string{"iface.primary_dns", "iface.secondary_dns"} {
			if i < len(n.DNS) {
				field(name, n.DNS[i])
			}
		}
		if n.VLAN > 0 {
			field("iface.vlan_id", fmt.Sprint(n.VLAN))
		}
		field("iface.net_ifacename", n.Interface)
	}
	field("node.name", t.Target)
	field("node.conn[0].address", t.Address)
	field("node.conn[0].port", fmt.Sprint(t.Port))
	field("node.session.auth.username", t.User)
	for _, s := range t.Secrets {
		if s == api.CHAPSecret {
			field("node.session.auth.password", masked)
		} else {
			field("node.session.auth.password_in", masked)
		}
	}
	if t.LUN >= 0 {
		field("node.boot_lun", fmt.Sprint(t.LUN))
	}
	r.print("# END RECORD\n")
}
