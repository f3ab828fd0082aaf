package main

import (
	"context"
	"strconv"
	"strings"

	"iserd.org/iserd/api"
)

// showFirmware is discover --firmware.
func (a *app) showFirmware(ctx context.Context, save bool) error {
	r, err := a.daemon().Firmware(ctx, api.FirmwareRequest{Save: save})
	if err != nil {
		return err
	}
	if a.json {
		return a.print(r)
	}
	for _, n := range r.Notes {
		a.warn("%s", n)
	}
	boot := func(b bool) string {
		if b {
			return "yes"
		}
		return "no"
	}
	t := newTable(a.out, "NIC", "MAC", "INTERFACE", "ADDRESS", "GATEWAY", "VLAN", "BOOT")
	for _, n := range r.NICs {
		addr := dash(n.Address)
		if n.Address != "" && n.PrefixLength > 0 {
			addr += "/" + strconv.Itoa(n.PrefixLength)
		}
		t.row(strconv.Itoa(n.Index), n.MAC, dash(n.Interface), addr, dash(n.Gateway), strconv.Itoa(n.VLAN), boot(n.Boot))
	}
	if err := t.flush(); err != nil {
		return err
	}
	t = newTable(a.out, "TARGET", "PORTAL", "LUN", "NIC", "AUTH", "USER", "BOOT")
	for _, x := range r.Targets {
		t.row(x.Target, api.Portal{Address: x.Address, Port: x.Port}.String(), tag(x.LUN), strconv.Itoa(x.NIC), x.Auth, dash(strings.TrimSpace(x.User)), boot(x.Boot))
	}
	return t.flush()
}
