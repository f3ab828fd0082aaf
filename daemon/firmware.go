package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"iserd.org/iserd/api"
	"iserd.org/iserd/daemon/records"
	"iserd.org/iserd/discovery/ibft"
)

// Firmware reads the iSCSI Boot Firmware Table. With Save its targets become records, with the names and secrets for CHAP that the table has; a
// record that is there keeps what the user has set, secrets included.
func (s *Service) Firmware(_ context.Context, r api.FirmwareRequest) (api.FirmwareReply, error) {
	reply := api.FirmwareReply{Version: api.Version, NICs: []api.FirmwareNIC{}, Targets: []api.FirmwareTarget{}, Notes: []string{}}
	dir := s.opt.FirmwareDir
	if dir == "" {
		dir = ibft.Dir
	}
	table, err := ibft.Read(dir)
	if errors.Is(err, ibft.ErrNone) {
		return reply, api.Errorf(api.ErrNotFound, "%w", err)
	}
	if err != nil {
		return reply, api.Errorf(api.ErrInternal, "%w", err)
	}
	reply.InitiatorName = table.Initiator
	reply.Notes = append(reply.Notes, table.Notes...)
	if n := table.Initiator; n != "" && n != s.name {
		reply.Notes = append(reply.Notes, fmt.Sprintf("the firmware logs in as %s and iserd as %s; a target may admit only the former: setting initiator_name in /etc/iserd/iserd.toml", n, s.name))
	}
	interfaces, _ := net.Interfaces() // only to name them
	for i := range table.NICs {
		reply.NICs = append(reply.NICs, firmwareNIC(&table.NICs[i], interfaces))
	}
	for i := range table.Targets {
		x := &table.Targets[i]
		t := firmwareTarget(x)
		if r.Save {
			if err := s.saveFirmware(x); err != nil {
				return reply, api.Wrap(err, api.ErrDatabase, "store record of %s", x.Name)
			}
			t.Saved = true
		}
		reply.Targets = append(reply.Targets, t)
	}
	if r.Save {
		s.changed()
	}
	return reply, nil
}

func text(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func firmwareNIC(n *ibft.NIC, interfaces []net.Interface) api.FirmwareNIC {
	out := api.FirmwareNIC{
		Index: n.Index, Boot: n.Boot, MAC: n.MAC.String(), Address: text(n.Address), PrefixLength: n.PrefixLength, Gateway: text(n.Gateway),
		DHCP: text(n.DHCP), VLAN: n.VLAN, Hostname: n.Hostname,
	}
	for _, a := range n.DNS {
		out.DNS = append(out.DNS, a.String())
	}
	for _, ifc := range interfaces {
		if bytes.Equal(ifc.HardwareAddr, n.MAC) {
			out.Interface = ifc.Name
			break
		}
	}
	return out
}

func firmwareSecrets(x *ibft.Target) records.SecretSet {
	return records.SecretSet{Secret: x.Secret, TargetSecret: x.TargetSecret}
}

func firmwareTarget(x *ibft.Target) api.FirmwareTarget {
	out := api.FirmwareTarget{
		Index: x.Index, Boot: x.Boot, Target: x.Name, Address: x.Address.String(), Port: x.Port, LUN: x.LUN, NIC: x.NIC, Auth: "none", User: x.User,
		Secrets: firmwareSecrets(x).Names(),
	}
	switch len(out.Secrets) {
	case 1:
		out.Auth = "chap"
	case 2:
		out.Auth = "mutual chap"
	}
	return out
}

// saveFirmware makes a record of a target that the firmware knows.
func (s *Service) saveFirmware(x *ibft.Target) error {
	key := records.MakeKey(x.Name, api.Portal{Address: x.Address.String(), Port: x.Port})
	_, err := s.nodes.Get(key.ID())
	if !errors.Is(err, records.ErrNotFound) {
		return err // it is there: what the user has set stays
	}
	n, err := s.nodes.Add(key)
	if err != nil {
		return err
	}
	for _, name := range firmwareSecrets(x).Names() {
		secret := x.Secret
		if name == api.CHAPTargetSecret {
			secret = x.TargetSecret
		}
		if err := s.secrets.Set(n.ID(), name, secret); err != nil {
			return err
		}
	}
	_, err = s.nodes.Change(n.ID(), func(n *records.Node) error {
		for name, value := range map[string]string{"chap_user": x.User, "chap_target_user": x.TargetUser} {
			if value == "" {
				continue
			}
			if err := n.Settings.Set(name, value); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}
